"""Medians and their intervals, without an assumption about the distribution.

The interval of a median comes from order statistics: between the k-th smallest and the k-th
largest of n values lies the true median with a probability that only k and n decide (David &
Nagaraja, Order Statistics, 7.1). Repeats of one run are not independent of the machine's hour, so
an interval says how firm a number is within its run and not what another run would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

COVERAGE = 0.95


@dataclass(frozen=True)
class Summary:
    """The median of `count` values, and the interval of the median.

    With fewer than 6 values no interval covers 95 %; it is then from the smallest to the largest.
    """

    median: float
    low: float
    high: float
    count: int


def summary(values: Sequence[float]) -> Summary:
    """Median and interval of at least one value; NaN values stand for rounds left out."""
    known = sorted(v for v in values if not math.isnan(v))
    if not known:
        raise ValueError("[summary] 'values' must hold a number but got none.")
    n = len(known)
    k = _rank(n)
    middle = (known[(n - 1) // 2] + known[n // 2]) / 2
    return Summary(middle, known[k], known[n - 1 - k], n)


def paired(base: Sequence[float], ours: Sequence[float]) -> Summary:
    """The ratio base / ours, formed round by round: what disturbs a round disturbs both."""
    return summary([b / o for b, o in zip(base, ours, strict=True)])


def _rank(n: int) -> int:
    """The largest k for which values k … n-1-k cover the median with probability `COVERAGE`."""
    outside = 0.0
    for k in range((n + 1) // 2):
        outside += 2 * math.comb(n, k) / 2**n
        if outside > 1 - COVERAGE:
            return max(0, k - 1)
    return 0
