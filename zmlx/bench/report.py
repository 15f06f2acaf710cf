"""The report on a terminal: a row as soon as it is measured, the bars at the end."""

from __future__ import annotations

import sys
from typing import TextIO

from .anchors import FLOPS
from .bars import model_verdicts, verdicts
from .result import ModelRow, Result, Row
from .text import (
    anchor_of,
    got,
    milliseconds,
    model_cells,
    model_title,
    number,
    outcome,
    over,
    overhead,
    peak,
    percent,
    rate,
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

    def text(self, words: str) -> None:
        """What is being done, on a terminal in place of what was said before."""
        self._bar.write(f"\r\x1b[K{words}" if self._on_terminal else f"{words}\n")
        self._bar.flush()

    def model(self, row: ModelRow) -> None:
        """A row of a model."""
        if self._on_terminal:
            self._bar.write("\r\x1b[K")
            self._bar.flush()
        print("\n".join(model_lines(row)), file=self._stream, flush=True)


def model_lines(row: ModelRow) -> list[str]:
    """A row of a model, one way a line."""
    lines = [f"{row.model}: {model_title(row)}"]
    for name, seconds, speed, ratio, peaks in model_cells(row):
        slower = f", {ratio} the patched time" if ratio else ""
        lines.append(f"    {name:<20} {seconds:<24} {speed:>8} tokens/s, peak MiB {peaks}{slower}")
    return lines


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
    ratios = [f"{n} {over(row, n)}" for n in NAMES if n in row.ratios]
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
        unit = "GFLOP/s" if anchor in FLOPS else "GB/s"
        lines.append(
            f"{anchor}: {number(found.median / 1e9)} {unit} "
            f"[{number(found.low / 1e9)}, {number(found.high / 1e9)}]"
        )
    return lines


def end_lines(result: Result) -> list[str]:
    """Overheads, bars and errors."""
    lines = [_marked(o.passed, overhead(o)) for o in result.overheads]
    judged = list(verdicts(result.rows))
    models = list(model_verdicts(result.models))
    if judged or models:
        lines += ["", "bars"]
    for v in judged:
        text = f"{title(v.row)}: {got(v)}, {wanted(v)}"
        lines.append(_marked(v.passed, text if v.passed else f"{text}: {outcome(v)}"))
    lines += [_marked(m.passed, f"{model_title(m.row)}: {m.got}, {m.wanted}") for m in models]
    errors = [row for row in (*result.rows, *result.sweep) if row.error]
    if errors:
        lines += ["", f"{len(errors)} rows are no measurement:"]
        lines += [f"  {title(row)}: {row.error}" for row in errors]
    return lines


def _marked(passed: bool | None, text: str) -> str:
    return f"  {'-     ' if passed is None else 'held  ' if passed else 'MISSED'} {text}"
