"""Interleaved timing: every variant of a computation in every round, in rotating order.

Whatever disturbs the machine for a while disturbs all variants of a round alike, so ratios are
formed within rounds (see `summary.paired`). All variants are warmed up by the same rounds, until
none needs fresh pages any more (a hopelessly slow one by the first alone). Before every timed call
the caches are filled with other data, and then with the code that all calls of its library run.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .memory import collector_paused, page_faults

#: Rounds of warm-up, at least and at most.
WARM_UPS = 3
LONGEST_WARM_UP = 12

#: A round of warm-up with more page faults than this shows that memory is not settled.
_SETTLED = 256

#: Rounds that a bar is judged on, and the least number of timings of a variant that is slower than
#: the fastest one by a factor of `HOPELESS`, whose rounds are thinned to keep within the budget.
ROUNDS = 20
FEWEST = 3
HOPELESS = 10.0

#: Seconds from which on a hopelessly slow variant warms up once, and above which it is timed once.
LONG = 0.1
LONGEST = 1.0


@dataclass(frozen=True)
class Variant:
    """One way to compute a thing.

    Attributes:
        name: unique within a measurement.
        call: what is timed; its result must be complete when it returns. It gets what `before`
            returned.
        before: runs untimed ahead of every call.
        ready: runs untimed just before the call, after the caches were filled with other data: a
            small call of the library, whose code is in the caches in the middle of a model.
        self_timed: `call` returns its own time in seconds.
        anchor: a bound of the machine and no way to compute the thing: nothing is hopelessly slow
            beside it, and what is in the caches ahead of it makes no difference.
        every: it takes part in every n-th round.
    """

    name: str
    call: Callable[[Any], Any]
    before: Callable[[], Any] = lambda: None
    ready: Callable[[], Any] = lambda: None
    self_timed: bool = False
    anchor: bool = False
    every: int = 1

    def seconds(self, between: Callable[[], None]) -> float:
        """Runs once, after `before`, `between` and `ready`, and returns the time of the call."""
        return self.times(between)[1]

    def times(self, between: Callable[[], None]) -> tuple[float, float]:
        """As `seconds`, with the time of `before` ahead of it."""
        start = time.perf_counter()
        given = self.before()
        ahead = time.perf_counter() - start
        if not self.anchor:
            between()
            self.ready()
        start = time.perf_counter()
        result = self.call(given)
        seconds = time.perf_counter() - start
        return ahead, float(result) if self.self_timed else seconds


def measure(
    variants: Sequence[Variant],
    *,
    rounds: int = ROUNDS,
    budget: float = math.inf,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per variant and round; NaN where a hopelessly slow variant sat a round out.

    Args:
        variants: what to time; each is called `WARM_UPS` times or more first.
        rounds: timings of each variant.
        budget: seconds that the rounds of one hopelessly slow variant may take, beyond `FEWEST`,
            with what runs before its calls.
        between: runs untimed ahead of every call, after the variant's own `before`.
    """
    warm, costs = _warm_up(variants, between)
    fastest = _fastest(variants, warm)
    stride = {
        v.name: max(v.every, _stride(warm[v.name], costs[v.name], fastest, rounds, budget))
        for v in variants
    }
    times: dict[str, list[float]] = {v.name: [] for v in variants}
    gc.collect()
    with collector_paused():
        for i in range(rounds):
            for variant in _order(variants, i):
                due = i % stride[variant.name] == 0
                times[variant.name].append(variant.seconds(between) if due else math.nan)
    return times


def _warm_up(
    variants: Sequence[Variant], between: Callable[[], None]
) -> tuple[dict[str, float], dict[str, float]]:
    """Rounds until the allocator is settled; returns the best time of each variant, and the
    least that a call takes with what runs before it."""
    best = {v.name: math.inf for v in variants}
    costs = dict(best)
    for i in range(LONGEST_WARM_UP):
        before = page_faults()
        for variant in _order(variants, i):
            if i == 0 or best[variant.name] < max(LONG, HOPELESS * _fastest(variants, best)):
                ahead, seconds = variant.times(between)
                best[variant.name] = min(best[variant.name], seconds)
                costs[variant.name] = min(costs[variant.name], ahead + seconds)
        if i + 1 >= WARM_UPS and page_faults() - before <= _SETTLED:
            break
    return best, costs


def _fastest(variants: Sequence[Variant], seconds: dict[str, float]) -> float:
    """Of those that are no anchors, if there are such."""
    ways = [v for v in variants if not v.anchor] or variants
    return min(seconds[v.name] for v in ways)


def _stride(seconds: float, cost: float, fastest: float, rounds: int, budget: float) -> int:
    """A variant takes part in every n-th round."""
    if seconds < HOPELESS * fastest or cost * rounds <= budget:
        return 1
    if seconds > LONGEST:
        return rounds
    wanted = max(FEWEST, int(budget / cost))
    return max(1, (rounds - 1) // max(1, wanted - 1))


def _order(variants: Sequence[Variant], i: int) -> list[Variant]:
    """Round i begins with the i-th variant, and every other round runs backwards, so that nobody
    always follows the same one."""
    shift = i % len(variants)
    rotated = [*variants[shift:], *variants[:shift]]
    return rotated[::-1] if i % 2 else rotated
