"""Line charts as SVG text, with linear or logarithmic axes and no dependency.

A figure is one or more panels side by side under a common title and legend; the demo and the
benchmark harness draw with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PALETTE = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
"""Line colours, told apart with common forms of colour blindness (Okabe and Ito, 2008)."""

_PANEL_WIDTH, _PANEL_HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 74, 48


@dataclass(frozen=True)
class Series:
    """One line: a label for the legend and points (x, y), drawn in the order given.

    Args:
        label: Text in the legend.
        xs: Horizontal values, positive where the panel's ``x_log`` is set.
        ys: Vertical values, one per entry of ``xs``.
        color: A CSS colour; lines of the same label should share it.
        width: Line width in pixels.
        dash: SVG dash pattern such as ``"5 4"``, empty for a solid line.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    width: float = 1.6
    dash: str = ""


@dataclass(frozen=True)
class Panel:
    """One set of axes and the lines in it."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False


def figure(title: str, panels: Sequence[Panel]) -> str:
    """Returns an SVG document with the panels from left to right.

    Args:
        title: One line above the panels.
        panels: At least one panel, each with at least one point.

    Raises:
        ValueError: A panel has no finite point, or a value that its logarithmic axis cannot show.
    """
    if not panels:
        raise ValueError("[figure] 'panels' must not be empty but got 0 panels.")
    stride = _LEFT + _PANEL_WIDTH + _RIGHT
    width, height = stride * len(panels), _TOP + _PANEL_HEIGHT + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="600" fill="#1a1a1a">'
        f"{escape(title)}</text>",
        *_legend(panels),
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * stride + _LEFT} {_TOP})">')
        parts.extend(_panel(panel))
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


def _legend(panels: Sequence[Panel]) -> list[str]:
    lines = {series.label: series for panel in panels for series in panel.series}
    parts, x = [], float(_LEFT)
    for label, line in lines.items():
        parts.append(
            f'<line x1="{x:.0f}" y1="48" x2="{x + 24:.0f}" y2="48" {_stroke(line)}/>'
            f'<text x="{x + 30:.0f}" y="52" fill="#333333">{escape(label)}</text>'
        )
        x += 30 + 7 * len(label) + 22
    return parts


def _panel(panel: Panel) -> list[str]:
    x_axis = _Axis([x for s in panel.series for x in s.xs], panel.x_log, 0, _PANEL_WIDTH)
    y_axis = _Axis([y for s in panel.series for y in s.ys], panel.y_log, _PANEL_HEIGHT, 0)
    parts = []
    for value in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{_PANEL_HEIGHT}" stroke="#ececec"/>'
            f'<text x="{x:.1f}" y="{_PANEL_HEIGHT + 17}" text-anchor="middle" fill="#555555">'
            f"{_number(value)}</text>"
        )
    for value in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(
            f'<line x1="0" y1="{y:.1f}" x2="{_PANEL_WIDTH}" y2="{y:.1f}" stroke="#ececec"/>'
            f'<text x="-8" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{_number(value)}</text>'
        )
    parts.append(
        f'<path d="M0 0V{_PANEL_HEIGHT}H{_PANEL_WIDTH}" fill="none" stroke="#888888"/>'
        f'<text x="{_PANEL_WIDTH / 2}" y="{_PANEL_HEIGHT + 38}" text-anchor="middle" '
        f'fill="#333333">{escape(panel.x_label)}</text>'
        f'<text transform="translate(-42 {_PANEL_HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="#333333">{escape(panel.y_label)}</text>'
    )
    for line in panel.series:
        points = " ".join(
            f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}"
            for x, y in zip(line.xs, line.ys, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke-linejoin="round" {_stroke(line)}/>'
        )
    return parts


class _Axis:
    """Maps values to pixels and chooses the tick values, which also bound the axis."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float):
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            raise ValueError("[figure] 'panels' must each hold a finite point but one has none.")
        low, high = min(finite), max(finite)
        if log and low <= 0:
            raise ValueError(f"[figure] a logarithmic axis must be positive but got {low}.")
        self._log = log
        self.ticks = _log_ticks(low, high) if log else _linear_ticks(low, high)
        self._low, self._high = self._scale(self.ticks[0]), self._scale(self.ticks[-1])
        self._start, self._end = start, end

    def _scale(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def place(self, value: float) -> float:
        share = (self._scale(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)


def _linear_ticks(low: float, high: float) -> list[float]:
    """Four to nine multiples of 1, 2 or 5 times a power of ten that enclose the values."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span / 7)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that enclose the values."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**exponent for exponent in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.6g}"


def _stroke(line: Series) -> str:
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return f'stroke="{line.color}" stroke-width="{line.width:g}"{dash}'
