"""Time against size, with the line that a copy of the same bytes would draw."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from ..chart import PALETTE, Panel, Series, figure
from .result import Result, Row
from .variants import NAMES, ZMLX

#: The order of NAMES, so that a variant has the same colour in every picture.
_COLORS = dict(zip(NAMES, ("#d55e00", *(c for c in PALETTE if c != "#d55e00")), strict=False))


def write(result: Result, path: Path) -> list[Path]:
    """Writes a picture per op of the sweep, unless all of its rows are errors: `path` itself for
    one op, else the op's name goes before the suffix."""
    if path.suffix != ".svg":
        raise ValueError(f"[bench] '--plot' must name an .svg file but got '{path}'.")
    ops = list(dict.fromkeys(row.op for row in result.sweep))
    written = []
    for op in ops:
        rows = [r for r in result.sweep if r.op == op and not r.error]
        if rows:
            target = path if len(ops) == 1 else path.with_name(f"{path.stem}-{op}.svg")
            target.write_text(picture(rows, result))
            written.append(target)
    return written


def picture(rows: Sequence[Row], result: Result) -> str:
    """One op: a panel per mode of its rows, which are no errors."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    panels = [_panel([r for r in rows if r.mode == mode]) for mode in modes]
    about = result.environment
    return figure(
        f"{rows[0].op}, {rows[0].dtype}, {about['threads']} threads, {about['cpu']}", panels
    )


def _panel(rows: Sequence[Row]) -> Panel:
    ordered = sorted(rows, key=_size)
    names = [n for n in NAMES if any(n in r.timings for r in ordered)]
    lines = [
        Series(
            name,
            [_size(r) for r in ordered if name in r.timings],
            [r.timings[name].seconds.median * 1e3 for r in ordered if name in r.timings],
            _COLORS[name],
            width=2.4 if name == ZMLX else 1.4,
        )
        for name in names
    ]
    floor = Series(
        "copy of the same bytes",
        [_size(r) for r in ordered],
        [r.bytes / r.anchor_rate["copy"] * 1e3 for r in ordered],
        "#000000",
        dash="5 4",
    )
    mode = ordered[0].mode
    return Panel([*lines, floor], f"elements, {mode}", "milliseconds", x_log=True, y_log=True)


def _size(row: Row) -> int:
    return prod(int(n) for n in row.shape.split("x"))
