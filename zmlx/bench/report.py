"""The report on a terminal: a row as soon as it is measured, the bars at the end."""

from __future__ import annotations

import sys
from typing import TextIO

from .bars import verdicts
from .result import Result, Row
from .text import (
    anchor_of,
    got,
    milliseconds,
    outcome,
    overhead,
    peak,
    percent,
    rate,
    times,
    title,
    wanted,
)
from .variants import NAMES, ZMLX

_BAR = 24


class Progress:
    """Prints rows; on a terminal with a bar below them."""

    def __init__(self, stream: TextIO | None = None, bar: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._bar = bar or sys.stderr
        self._on_terminal = self._bar.isatty()

    def __call__(self, row: Row, done: int, total: int) -> None:
        """A row and how many of all are done."""
        if self._on_terminal:
            self._bar.write("\r\x1b[K")
            self._bar.flush()
        print("\n".join(row_lines(row)), file=self._stream, flush=True)
        if self._on_terminal and done < total:
            full = _BAR * done // total
            self._bar.write(f"{'█' * full}{'░' * (_BAR - full)} {done}/{total}")
            self._bar.flush()


def row_lines(row: Row) -> list[str]:
    """A row: zmlx, then what the others took in its multiples, then peak memory in MiB."""
    lines = []
    ours = row.timings.get(ZMLX)
    if ours is None:
        lines.append(title(row))
        lines += [
            f"    {variant:<18} {milliseconds(t.seconds.median):>9}  {rate(row, t)}"
            for variant, t in row.timings.items()
        ]
    else:
        share = f"{percent(row.share)} of {anchor_of(row)}" if row.share else ""
        time = milliseconds(ours.seconds.median)
        lines.append(f"{title(row):<44} {time:>9}  {rate(row, ours):>10}  {share}")
    ratios = [f"{n} {_ratio(row, n)}" for n in NAMES if n in row.ratios]
    if ratios:
        lines.append("    time over zmlx's: " + ", ".join(ratios))
    peaks = [
        f"{n} {peak(n, row.timings[n])}"
        for n in NAMES
        if n in row.timings and row.timings[n].process_peak is not None
    ]
    if peaks:
        lines.append("    peak MiB, MLX/process: " + ", ".join(peaks))
    lines += [f"    {variant}: {note}" for variant, note in row.notes.items()]
    if row.error:
        lines.append(f"    ERROR: {row.error}")
    return lines


def _ratio(row: Row, variant: str) -> str:
    ratio = row.ratios[variant]
    rounds = row.timings[variant].seconds.count
    few = "" if rounds == row.timings[ZMLX].seconds.count else f" ({rounds} rounds)"
    return times(ratio) + few


def head_lines(result: Result) -> list[str]:
    """Machine, anchors and method."""
    about = result.environment
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    lines = [
        f"{about['date']}, {about['cpu']}, {about['cpus']} CPUs, {about['threads']} threads, "
        f"{about['system']}",
        f"Python {about['python']}, {versions}; {about['compiler']}",
        f"target {about['target']}, matrix products on {about['blas']}",
    ]
    for anchor, found in result.anchors.items():
        unit = "GFLOP/s" if anchor == "matmul" else "GB/s"
        lines.append(
            f"{anchor}: {found.median / 1e9:.3g} {unit} "
            f"[{found.low / 1e9:.3g}, {found.high / 1e9:.3g}]"
        )
    return lines


def end_lines(result: Result) -> list[str]:
    """Overheads, bars and errors."""
    lines = [_marked(o.passed, overhead(o)) for o in result.overheads]
    judged = list(verdicts(result.rows))
    if judged:
        lines += ["", "bars"]
    for v in judged:
        text = f"{title(v.row)}: {got(v)}, {wanted(v)}"
        lines.append(_marked(v.passed, text if v.passed else f"{text}: {outcome(v)}"))
    errors = [row for row in (*result.rows, *result.sweep) if row.error]
    if errors:
        lines += ["", f"{len(errors)} rows are no measurement:"]
        lines += [f"  {title(row)}: {row.error}" for row in errors]
    return lines


def _marked(passed: bool | None, text: str) -> str:
    return f"  {'-     ' if passed is None else 'held  ' if passed else 'MISSED'} {text}"
