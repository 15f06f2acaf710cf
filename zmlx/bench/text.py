"""Numbers as the report and the page print them."""

from __future__ import annotations

from .bars import Verdict, bound, digits_short_of
from .result import ModelRow, Overhead, Row, Timing
from .summary import Summary
from .variants import TORCH, ZMLX


def number(value: float) -> str:
    """Three digits of a number, or all that are before its point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def milliseconds(seconds: float) -> str:
    """A time."""
    return f"{number(seconds * 1e3)} ms"


def rate(row: Row, timing: Timing) -> str:
    """GFLOP/s of a row that counts operations, GB/s of the others."""
    if row.flops:
        return f"{row.flops / timing.seconds.median / 1e9:,.0f} GFLOP/s"
    return f"{number(row.bytes / timing.seconds.median / 1e9)} GB/s"


def percent(share: Summary, bar: float = 0.0) -> str:
    """A share with its interval, in percent."""
    digits = digits_short_of(bar, share.median, 2) - 2
    low, high = share.low * 100, share.high * 100
    return f"{share.median:.{digits}%} [{low:.{digits}f}, {high:.{digits}f}]"


def times(ratio: Summary, bar: float = 0.0) -> str:
    """A ratio with its interval; above 1 zmlx is faster."""
    digits = digits_short_of(bar, ratio.median, 2 if ratio.median < 10 else 0)
    return f"{ratio.median:.{digits}f}x [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def over(row: Row, variant: str) -> str:
    """A variant's time over zmlx's, and of how many rounds that is if they are fewer."""
    rounds = row.timings[variant].seconds.count
    fewer = rounds < row.timings[ZMLX].seconds.count
    few = f" ({rounds} round{'s' * (rounds > 1)})" if fewer else ""
    return times(row.ratios[variant]) + few


def mebibytes(count: int | None) -> str:
    """Bytes as MiB, "?" where nobody counted."""
    return "?" if count is None else number(count / 2**20)


def peak(name: str, timing: Timing) -> str:
    """Memory at the worst moment: by MLX's counter and by the process's resident size."""
    process = mebibytes(timing.process_peak)
    return process if name.startswith(TORCH) else f"{mebibytes(timing.mlx_peak)}/{process}"


def anchor_of(row: Row) -> str:
    """What a row's share is a share of."""
    return "matmul" if row.flops else "copy"


def title(row: Row) -> str:
    """What a row is about."""
    return f"{row.op} {point(row)}"


def point(row: Row) -> str:
    """What tells a row from others of its op."""
    return f"{row.shape} {row.dtype} {row.mode}" + (f" ({row.detail})" if row.detail else "")


def wanted(v: Verdict) -> str:
    """What a bar asks for."""
    if not v.bar.than:
        return f"≥ {v.bar.least:.0%} of {anchor_of(v.row)}"
    others = " or ".join(v.bar.than)
    if v.bar.memory:
        return f"≤ {1 / v.bar.least:.3g} of the memory of {others}, beyond results"
    return f"≥ {v.bar.least:.3g}x as fast as {others}"


def got(v: Verdict) -> str:
    """What was measured for a bar."""
    if v.measured is None:
        return "–"
    if v.bar.memory:
        low, high = 1 / v.measured.high, 1 / v.measured.low
        return f"{number(low)} to {number(high)} by the two counters"
    if v.bar.than:
        return f"{times(v.measured, v.bar.least)} to {v.than}"
    return percent(v.measured, v.bar.least)


def outcome(v: Verdict) -> str:
    """Held, missed by how much and for what reason, or not judged and why."""
    if v.passed is None:
        return f"not judged: {v.unjudged}"
    if v.passed:
        return "held"
    assert v.measured is not None
    least, median = v.bar.least, v.measured.median
    if not v.bar.than:
        return f"missed by {_gap(least - median)} points; bound by {bound(v.row)}"
    if v.bar.memory:
        return f"missed by {_gap(least / median - 1)}%"
    share = f"{percent(v.row.share)} of {anchor_of(v.row)}, " if v.row.share else ""
    return f"missed by {_gap(1 - median / least)}%, at {share}bound by {bound(v.row)}"


def _gap(short: float) -> str:
    """Of hundredths as many digits as tell them from 0."""
    return f"{short * 100:.{digits_short_of(1, 1 - short, 2) - 2}f}"


def model_title(row: ModelRow) -> str:
    """What a row of a model is about."""
    return f"{row.mode}, {row.tokens} tokens, vocabulary {row.vocabulary}"


def model_cells(row: ModelRow) -> list[tuple[str, ...]]:
    """By way: its name, time, tokens per second, time over the patched model's, peak memory."""
    cells: list[tuple[str, ...]] = []
    for name, timing in row.timings.items():
        s = timing.seconds
        once = " (once)" if s.count == 1 else ""
        cells.append(
            (
                name,
                f"{number(s.median)} s [{number(s.low)}, {number(s.high)}]{once}",
                f"{row.tokens / s.median:,.0f}",
                times(row.ratios[name]) if name in row.ratios else "",
                f"{mebibytes(timing.mlx_peak)}/{mebibytes(timing.process_peak)}",
            )
        )
    return cells


def overhead(o: Overhead) -> str:
    """An overhead in a line."""
    bar = "" if o.bar is None else f", at most {o.bar:g}"
    note = f" ({o.note})" if o.note else ""
    return f"{o.name}: {number(o.value)} {o.unit}{bar}{note}"
