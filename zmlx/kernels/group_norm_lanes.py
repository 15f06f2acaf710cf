"""The kernels of `group_norm` where a thread has whole groups of a sample: the CPU's.

A thread walks over rows of neighbouring elements with one accumulator per lane. A lane belongs to
one group, whichever layout the groups have, so that the loops vectorise; lanes are folded into
groups after a walk. A sample that fits in a cache is read from memory once, and written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, prod

import mlx.core as mx

from .. import launch
from ..body import BodyKernel, Plan
from ..metal import KernelSpec
from ..transforms import Arrays, Rule
from .group_norm_plain import (
    STATISTICS,
    Grouping,
    normed_and_statistics,
    normed_of_any_shape,
    parameter_gradients,
    result_dtype,
    sizes_of,
    x_gradient,
)


@dataclass(frozen=True)
class Lanes:
    """How a thread walks over its elements: `blocks` threads share a sample, each with rows of up
    to `step` elements that lie `stride` apart, in steps of `lanes`.

    A lane is of group (lane % period) / run of the thread's. `turns` rows go through all channels.
    Where `repeats`, a lane is of channel lane % D, and a sample is one row.
    """

    lanes: int
    period: int
    run: int
    blocks: int
    rows: int
    width: int
    stride: int
    turns: int = 1
    repeats: bool = False


#: The least number of lanes that fills the widest registers, and the most whose accumulators stay
#: in the nearest cache.
_LEAST, _MOST = 32, 1024
#: Elements of a wide register.
_REGISTER = 16
#: Fewer threads than this leave processors idle.
_FEW = 8


def lanes_of(grouping: Grouping, shape: tuple[int, ...]) -> Lanes:
    """The walk over an array of this shape. The lanes depend on the channels alone, but for a
    sample of one position."""
    channels, positions, groups = shape[-1], prod(shape[1:-1]), grouping.groups
    run = channels // groups
    apart = grouping.apart
    if channels <= 2 * _LEAST:
        lanes = channels * (1 if positions == 1 else -(-_LEAST // channels))
        size = channels * positions
        period, run = (groups, 1) if apart else (channels, run)
        return Lanes(lanes, period, run, 1, 1, size, size, repeats=True)
    if apart and groups <= 2 * _LEAST:
        lanes = groups * -(-_LEAST // groups)
        return Lanes(lanes, groups, 1, 1, positions, channels, channels)
    if apart:
        lanes = min(groups, _MOST)
        rows = positions * run
        return Lanes(lanes, lanes, 1, -(-groups // lanes), rows, lanes, groups, run)
    if run >= _MOST // 4:
        return Lanes(_LEAST, _LEAST, _LEAST, groups, positions, run, channels)
    together = min(groups, _MOST // run)
    if shape[0] * -(-groups // together) < _FEW:
        # Whole registers, where there are as many groups.
        unit = _REGISTER // gcd(_REGISTER, run)
        together = min(together, unit * -(-2 * _LEAST // (unit * run)))
    lanes = together * run
    return Lanes(lanes, lanes, run, -(-groups // together), positions, lanes, channels)


_START = """\
    const uint D = sizes[0];
    const uint groups = sizes[1];
    const float count = float(sizes[2]);
    const uint rows = sizes[3];
    const uint step = sizes[4];
    const size_t stride = sizes[5];
    const uint turns = sizes[6];
    const uint block = thread_position_in_grid.y;
    const uint first_group = block * GROUPS;
    const size_t offset = size_t(block) * step;
    const size_t width = min(size_t(step), stride - offset);
    const size_t whole = width / LANES * LANES;
    const uint tail = uint(width - whole);
"""

#: Elements i + l of each row: whole steps, then the tail.
_WALK = """\
        for (uint row = 0; row < rows; ++row) {
            const size_t spot = base + row * stride;
            const size_t channel = offset + (row % turns) * stride;
            POINTERS
            for (size_t i = 0; i < whole; i += LANES) {
                for (uint l = 0; l < LANES; ++l) {
                    ELEMENT
                }
            }
            for (uint l = 0; l < tail; ++l) {
                const size_t i = whole;
                ELEMENT
            }
        }
"""

#: The sums of the lanes of each group, and what follows from them, as a value for each lane.
_FOLD = """\
        for (uint g = 0; g < GROUPS; ++g) {
            SUMS
            for (uint f = 0; f < LANES; f += PERIOD) {
                for (uint k = 0; k < RUN; ++k) {
                    const uint l = f + g * RUN + k;
                    ADD
                }
            }
            THEN
            for (uint f = 0; f < LANES; f += PERIOD) {
                for (uint k = 0; k < RUN; ++k) {
                    const uint l = f + g * RUN + k;
                    SET
                }
            }
        }
"""


def _fill(text: str, **parts: tuple[str, ...]) -> str:
    """`text` with each line that is a name in capitals replaced by lines at its indentation."""
    lines: list[str] = []
    for line in text.splitlines():
        name = line.strip()
        if name in parts:
            indent = line[: len(line) - len(name)]
            lines.extend(indent + one for one in parts[name])
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _walk(pointers: tuple[str, ...], *element: str) -> str:
    return _fill(_WALK, POINTERS=pointers, ELEMENT=element)


def _fold(sums: tuple[str, ...], then: tuple[str, ...], *each: str) -> str:
    return _fill(
        _FOLD,
        SUMS=tuple(f"float {n}_sum = 0.0f;" for n in sums),
        ADD=tuple(f"{n}_sum += {n}[l];" for n in sums),
        THEN=then,
        SET=each,
    )


def _table(name: str) -> str:
    """A parameter per lane, where a lane always has the same channel."""
    return f"""\
    float {name}_of[REPEATS ? LANES : 1];
    if (REPEATS) {{
        for (uint l = 0; l < LANES; ++l) {{
            {name}_of[l] = float({name}[l % D]);
        }}
    }}
"""


def _parameter(name: str) -> str:
    return f"(REPEATS ? {name}_of[l] : float({name}[channel + i + l]))"


_X = "auto source = x + spot;"
_NORMED = "(float(source[i + l]) - mean_of[l] - rest_of[l]) * rstd_of[l]"


def _forward_text(grouping: Grouping) -> str:
    y = _NORMED
    if grouping.weighted:
        y = f"({y}) * {_parameter('weight')}"
    if grouping.biased:
        y = f"{y} + {_parameter('bias')}"
    return (
        _START
        + "".join(_table(n) for n in grouping.parameters)
        + """\
    const uint sample = thread_position_in_grid.x;
    const size_t base = size_t(sample) * sizes[7] + offset;
    const size_t place = size_t(sample) * groups + first_group;
    float mean_of[LANES], rest_of[LANES], rstd_of[LANES];
    {
        float total[LANES] = {0};
"""
        + _walk((_X,), "total[l] += float(source[i + l]);")
        + _fold(("total",), ("const float value = total_sum / count;",), "mean_of[l] = value;")
        + """\
    }
    {
        float off[LANES] = {0}, squares[LANES] = {0};
"""
        + _walk(
            (_X,),
            "const float v = float(source[i + l]) - mean_of[l];",
            "off[l] += v;",
            "squares[l] += v * v;",
        )
        + _fold(
            ("off", "squares"),
            (
                "const float more = off_sum / count;",
                "const float variance = squares_sum / count - min(more * more, FLT_MAX);",
                "const float scale = rsqrt((variance < 0.0f ? 0.0f : variance) + float(eps));",
                "if (first_group + g < groups) {",
                "    mean[place + g] = mean_of[g * RUN];",
                "    rest[place + g] = more;",
                "    rstd[place + g] = scale;",
                "}",
            ),
            "rest_of[l] = more;",
            "rstd_of[l] = scale;",
        )
        + """\
    }
    {
"""
        + _walk((_X, "auto target = y + spot;"), f"target[i + l] = T({y});")
        + """\
    }
"""
    )


_START_OF_SUMS = """\
    float dNAME_of[REPEATS ? LANES : 1] = {0};
    if (!REPEATS) {
        for (uint turn = 0; turn < turns; ++turn) {
            for (size_t i = 0; i < width; ++i) {
                dNAME[first_channel + turn * stride + i] = 0.0f;
            }
        }
    }
"""
_END_OF_SUMS = """\
    if (REPEATS) {
        for (uint c = 0; c < D; ++c) {
            float sum = 0.0f;
            for (uint l = c; l < LANES; l += D) {
                sum += dNAME_of[l];
            }
            dNAME[first_channel + c] = sum;
        }
    }
"""

_GROUP_TABLES = """\
        for (uint f = 0; f < LANES; f += PERIOD) {
            for (uint g = 0; g < GROUPS; ++g) {
                const size_t group = size_t(sample) * groups + min(first_group + g, groups - 1);
                for (uint k = 0; k < RUN; ++k) {
                    const uint l = f + g * RUN + k;
                    mean_of[l] = mean[group];
                    rest_of[l] = rest[group];
                    rstd_of[l] = rstd[group];
                }
            }
        }
"""


def _backward_text(grouping: Grouping) -> str:
    g = f"{_parameter('weight')} * " if grouping.weighted else ""
    slope = (f"const float normed = {_NORMED};", "const float dy_ = float(slopes[i + l]);")
    pointers = (_X, "auto slopes = dy + spot;")
    columns = {"weight": "dy_ * normed", "bias": "dy_"}
    sums = tuple(
        line
        for n in grouping.summed
        for line in (
            "if (REPEATS) {",
            f"    d{n}_of[l] += {columns[n]};",
            "} else {",
            f"    d{n}_row[i + l] += {columns[n]};",
            "}",
        )
    )
    rows = tuple(f"auto d{n}_row = d{n} + first_row + channel;" for n in grouping.summed)
    return (
        _START
        + "".join(_table(n) for n in ("weight",) * grouping.weighted)
        + """\
    const uint samples = sizes[8];
    const uint chunk = sizes[9];
    const uint part = thread_position_in_grid.x;
    const size_t first_row = size_t(part) * D;
    const size_t first_channel = first_row + offset;
    const uint stop = min(samples, (part + 1) * chunk);
"""
        + "".join(_START_OF_SUMS.replace("NAME", n) for n in grouping.summed)
        + """\
    for (uint sample = part * chunk; sample < stop; ++sample) {
        const size_t base = size_t(sample) * sizes[7] + offset;
        float mean_of[LANES], rest_of[LANES], rstd_of[LANES], level_of[LANES], slope_of[LANES];
        float lift_of[LANES];
"""
        + _GROUP_TABLES
        + """\
        float across[LANES] = {0}, along[LANES] = {0};
"""
        + _walk(
            pointers, *slope, f"const float g_ = {g}dy_;", "across[l] += g_;",
            "along[l] += g_ * normed;",
        )
        + _fold(
            ("across", "along"),
            (
                "const size_t group = size_t(sample) * groups + min(first_group + g, groups - 1);",
                "const float level = across_sum / count;",
                "const float slope = (along_sum + drstd[group] * rstd[group]) / count;",
                "const float lift = dmean[group] / count;",
            ),
            "level_of[l] = level;",
            "slope_of[l] = slope;",
            "lift_of[l] = lift;",
        )
        + _walk(
            (*pointers, "auto target = dx + spot;", *rows),
            *slope,
            f"const float g_ = {g}dy_;",
            "target[i + l] = "
            "T(rstd_of[l] * (g_ - level_of[l] - normed * slope_of[l]) + lift_of[l]);",
            *sums,
        )
        + """\
    }
"""
        + "".join(_END_OF_SUMS.replace("NAME", n) for n in grouping.summed)
    )  # fmt: skip


def _sizes(grouping: Grouping, lanes: Lanes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What `_START` reads, and the elements of a sample."""
    size, channels = prod(shape[1:]), shape[-1]
    return (
        channels, grouping.groups, size // grouping.groups, lanes.rows, lanes.width, lanes.stride,
        lanes.turns, size,
    )  # fmt: skip


def _template(lanes: Lanes) -> tuple[tuple[str, int | bool], ...]:
    return (
        ("LANES", lanes.lanes),
        ("PERIOD", lanes.period),
        ("RUN", lanes.run),
        ("GROUPS", lanes.period // lanes.run),
        ("REPEATS", lanes.repeats),
    )


@cache
def forward(grouping: Grouping, vjp: Rule) -> BodyKernel:
    """x, parameters, eps → y and `STATISTICS`, each (B, groups)."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        shape = tuple(inputs[0].shape)
        lanes = lanes_of(grouping, shape)
        dtype = result_dtype(inputs[:-1])
        return Plan(
            (("T", dtype), *_template(lanes)),
            launch.Geometry((), (shape[0], lanes.blocks, 1), (1, 1, 1)),
            (shape, *((shape[0], grouping.groups),) * len(STATISTICS)),
            (dtype, *(mx.float32,) * len(STATISTICS)),
            (sizes_of(shape, _sizes(grouping, lanes, shape)),),
        )

    return BodyKernel(
        KernelSpec(
            "group_norm",
            ("x", *grouping.parameters, "eps", "sizes"),
            ("y", *STATISTICS),
            _forward_text(grouping),
        ),
        plan,
        lambda *arrays: normed_and_statistics(grouping, *arrays),
        dynamic=lambda *arrays: normed_of_any_shape(grouping, *arrays),
        vjp=vjp,
    )


@cache
def backward(grouping: Grouping) -> BodyKernel:
    """x, weight, `STATISTICS`, dy, dmean, drstd → dx, and partial sums of the gradients of the
    parameters, (chunks, D)."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x = inputs[0]
        shape = tuple(x.shape)
        lanes = lanes_of(grouping, shape)
        chunks, chunk = launch.row_chunks(shape[0])
        sums = len(grouping.summed)
        sizes = (*_sizes(grouping, lanes, shape), shape[0], chunk)
        return Plan(
            (("T", x.dtype), *_template(lanes)),
            launch.Geometry((), (chunks, lanes.blocks, 1), (1, 1, 1)),
            (shape, *((chunks, shape[-1]),) * sums),
            (x.dtype, *(mx.float32,) * sums),
            (sizes_of(shape, sizes),),
        )

    def reference(x: mx.array, *arrays: mx.array) -> Arrays:
        *_, mean, rest, rstd, dy, _, _ = arrays
        chunks, _ = launch.row_chunks(x.shape[0])
        return (
            x_gradient(grouping, x, *arrays),
            *parameter_gradients(grouping, chunks, x, mean, rest, rstd, dy),
        )

    return BodyKernel(
        KernelSpec(
            "group_norm__gradient",
            (
                "x", *("weight",) * grouping.weighted, *STATISTICS, "dy", "dmean", "drstd",
                "sizes",
            ),
            ("dx", *(f"d{n}" for n in grouping.summed)),
            _backward_text(grouping),
        ),
        plan,
        reference,
    )  # fmt: skip
