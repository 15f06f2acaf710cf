"""Two runs row by row, with a verdict that respects the noise.

Rows are compared by their share of the copy (or matrix product) of their own run, so that a machine
that is slower today does not show as a slower kernel. The interval of the new share over the old
one joins the intervals of both, as independent errors of their logarithms. A row is faster or
slower if that interval lies beyond 1 and the change is at least `NOTICEABLE`: repeats on another
day differ by a few percent whatever the interval within a run says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .result import Result, Row
from .summary import Summary
from .text import title

NOTICEABLE = 0.03

FASTER, SLOWER, SAME, NEW, GONE, BROKEN = "faster", "slower", "same", "new", "gone", "error"


@dataclass(frozen=True)
class Change:
    """A row of one or both runs; `ratio` above 1 means that the new run is faster."""

    row: Row
    verdict: str
    ratio: Summary | None = None


def compare(old: Result, new: Result) -> Iterator[Change]:
    """The rows of the new run, then those that only the old one has."""
    before = {row.key: row for row in old.rows}
    for row in new.rows:
        earlier = before.pop(row.key, None)
        if row.error:
            yield Change(row, BROKEN)
        elif row.share is None or earlier is None or earlier.share is None or earlier.error:
            yield Change(row, NEW)
        else:
            ratio = quotient(row.share, earlier.share)
            yield Change(row, _verdict(ratio), ratio)
    for row in before.values():
        yield Change(row, GONE)


def quotient(a: Summary, b: Summary) -> Summary:
    """a / b of independent medians."""
    middle = a.median / b.median
    up = math.hypot(math.log(a.high / a.median), math.log(b.median / b.low))
    down = math.hypot(math.log(a.median / a.low), math.log(b.high / b.median))
    return Summary(middle, middle * math.exp(-down), middle * math.exp(up), min(a.count, b.count))


def _verdict(ratio: Summary) -> str:
    if ratio.low > 1 and ratio.median >= 1 + NOTICEABLE:
        return FASTER
    if ratio.high < 1 and ratio.median <= 1 - NOTICEABLE:
        return SLOWER
    return SAME


def different_machines(old: Result, new: Result) -> list[str]:
    """What differs between the machines of two runs, in words."""
    return [
        f"{key}: {old.environment.get(key)} then, {new.environment.get(key)} now"
        for key in ("cpu", "threads", "target", "compiler")
        if old.environment.get(key) != new.environment.get(key)
    ]


def lines(old: Result, new: Result, *, whole: bool = True) -> list[str]:
    """The comparison as text. Rows that only the old run has are listed if the new one was to
    measure the whole catalogue, and counted if not."""
    out = [f"compared with the run of {old.environment.get('date')}"]
    out += [f"  another machine: {text}" for text in different_machines(old, new)]
    not_asked = 0
    for change in compare(old, new):
        if change.verdict == GONE and not whole:
            not_asked += 1
            continue
        text = f"  {change.verdict:<7} {title(change.row)}"
        if change.ratio is not None:
            r = change.ratio
            text += f": {r.median:.3f}x [{r.low:.3f}, {r.high:.3f}] as fast"
        out.append(text)
    if not_asked:
        out.append(f"  not measured now: {not_asked} of its rows")
    return out
