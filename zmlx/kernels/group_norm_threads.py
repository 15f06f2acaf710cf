"""The kernels of `group_norm` where TPR threads have a group of a sample: the GPUs'.

Sums over samples and positions are a kernel of their own, with a thread per channel and chunk of
rows.
"""

from __future__ import annotations

from functools import cache
from math import prod

import mlx.core as mx

from .. import launch
from ..body import BodyKernel, Plan
from ..codegen.reductions import ROW_HEADER
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

_START = """\
    threadgroup float scratch[(TPR + 31) / 32];
    const uint items = sizes[0];
    const uint D = sizes[1];
    const uint size = sizes[2];
    const size_t elements = sizes[3];
    const uint lane = thread_position_in_threadgroup.x % TPR;
    const uint owner = threadgroup_position_in_grid.x
        + threadgroup_position_in_grid.y * threadgroups_per_grid.x;
    const uint slot = owner * RPG + thread_position_in_threadgroup.x / TPR;
    if (owner * RPG >= items) {
        return;
    }
    // A surplus group repeats the last one and stores nothing, so that every thread reaches every
    // simd operation.
    const bool live = RPG == 1 || slot < items;
    const uint item = live ? slot : items - 1;
    const uint g = item % GROUPS;
    const size_t base = size_t(item / GROUPS) * elements;
    const float count = float(size);
"""

#: Element e of the group is element `i` of the array, of channel `c`.
_WALK = """\
    for (uint e = lane; e < size; e += TPR) {
        const uint c = APART ? e % WIDTH * GROUPS + g : g * WIDTH + e % WIDTH;
        const size_t i = base + size_t(e / WIDTH) * D + c;
"""


def _sum(name: str) -> str:
    return f"    {name} = zmlx_row_reduce<TPR, zmlx_sum>({name}, scratch, lane);\n"


def _forward_text(grouping: Grouping) -> str:
    y = "(float(x[i]) - level - more) * scale"
    y = f"({y}) * float(weight[c])" if grouping.weighted else y
    y = f"{y} + float(bias[c])" if grouping.biased else y
    return (
        _START
        + """\
    float total = 0.0f;
"""
        + _WALK
        + """\
        total += float(x[i]);
    }
"""
        + _sum("total")
        + """\
    const float level = total / count;
    float off = 0.0f, squares = 0.0f;
"""
        + _WALK
        + """\
        const float v = float(x[i]) - level;
        off += v;
        squares += v * v;
    }
"""
        + _sum("off")
        + _sum("squares")
        + """\
    const float more = off / count;
    const float variance = squares / count - min(more * more, FLT_MAX);
    const float scale = rsqrt((variance < 0.0f ? 0.0f : variance) + float(eps));
"""
        + _WALK
        + f"""\
        if (live) {{
            y[i] = T({y});
        }}
    }}
    if (lane == 0 && live) {{
        mean[item] = level;
        rest[item] = more;
        rstd[item] = scale;
    }}
"""
    )


def _backward_text(grouping: Grouping) -> str:
    element = f"""\
        const float normed = (float(x[i]) - level - more) * scale;
        const float slope = float(dy[i]){" * float(weight[c])" if grouping.weighted else ""};
"""
    return (
        _START
        + """\
    const float level = mean[item];
    const float more = rest[item];
    const float scale = rstd[item];
    float across = 0.0f, along = 0.0f;
"""
        + _WALK
        + element
        + """\
        across += slope;
        along += slope * normed;
    }
"""
        + _sum("across")
        + _sum("along")
        + """\
    across /= count;
    along = (along + drstd[item] * scale) / count;
    const float lift = dmean[item] / count;
"""
        + _WALK
        + element
        + """\
        if (live) {
            dx[i] = T(scale * (slope - across - normed * along) + lift);
        }
    }
"""
    )


def _sums_text(grouping: Grouping) -> str:
    names = grouping.summed
    values = {"weight": "v * (float(x[i]) - mean[at] - rest[at]) * rstd[at]", "bias": "v"}
    declared = ", ".join(f"{n}_sum = 0.0f" for n in names)
    added = "\n".join(f"        {n}_sum += {values[n]};" for n in names)
    stored = "\n".join(f"    d{n}[size_t(part) * D + c] = {n}_sum;" for n in names)
    return f"""\
    const uint rows = sizes[0];
    const uint D = sizes[1];
    const uint positions = sizes[2];
    const uint chunk = sizes[3];
    const uint c = thread_position_in_grid.x;
    const uint part = thread_position_in_grid.y;
    const uint g = APART ? c % GROUPS : c / WIDTH;
    const uint stop = min(rows, (part + 1) * chunk);
    float {declared};
    for (uint row = part * chunk; row < stop; ++row) {{
        const size_t at = size_t(row / positions) * GROUPS + g;
        const size_t i = size_t(row) * D + c;
        const float v = float(dy[i]);
{added}
    }}
{stored}
"""


def _layout(grouping: Grouping, channels: int) -> tuple[tuple[str, int | bool], ...]:
    return (
        ("GROUPS", grouping.groups),
        ("WIDTH", channels // grouping.groups),
        ("APART", grouping.apart),
    )


def _groups(
    chosen: launch.Settings, grouping: Grouping, shape: tuple[int, ...]
) -> tuple[launch.Geometry, mx.array]:
    """Where the groups go, and the sizes that `_START` reads."""
    items, elements = shape[0] * grouping.groups, prod(shape[1:])
    size = elements // grouping.groups
    sizes = (items, shape[-1], size, elements)
    geometry = launch.rowwise(chosen, items, size, capped=False)
    return geometry, sizes_of(shape, sizes)


@cache
def forward(grouping: Grouping, vjp: Rule) -> BodyKernel:
    """x, parameters, eps → y and `STATISTICS`, each (B, groups)."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        shape = tuple(inputs[0].shape)
        geometry, sizes = _groups(chosen, grouping, shape)
        dtype = result_dtype(inputs[:-1])
        return Plan(
            (("T", dtype), *_layout(grouping, shape[-1]), *geometry.template),
            geometry,
            (shape, *((shape[0], grouping.groups),) * len(STATISTICS)),
            (dtype, *(mx.float32,) * len(STATISTICS)),
            (sizes,),
        )

    return BodyKernel(
        KernelSpec(
            "group_norm",
            ("x", *grouping.parameters, "eps", "sizes"),
            ("y", *STATISTICS),
            _forward_text(grouping),
            ROW_HEADER,
        ),
        plan,
        lambda *arrays: normed_and_statistics(grouping, *arrays),
        dynamic=lambda *arrays: normed_of_any_shape(grouping, *arrays),
        vjp=vjp,
    )


@cache
def x_backward(grouping: Grouping) -> BodyKernel:
    """x, weight, `STATISTICS`, dy, dmean, drstd → dx."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x = inputs[0]
        shape = tuple(x.shape)
        geometry, sizes = _groups(chosen, grouping, shape)
        template = (("T", x.dtype), *_layout(grouping, shape[-1]), *geometry.template)
        return Plan(template, geometry, (shape,), (x.dtype,), (sizes,))

    weight = ("weight",) * grouping.weighted
    return BodyKernel(
        KernelSpec(
            "group_norm__dx",
            ("x", *weight, *STATISTICS, "dy", "dmean", "drstd", "sizes"),
            ("dx",),
            _backward_text(grouping),
            ROW_HEADER,
        ),
        plan,
        lambda *arrays: (x_gradient(grouping, *arrays),),
    )


@cache
def parameter_backward(grouping: Grouping) -> BodyKernel:
    """x, `STATISTICS`, dy → partial sums of the gradients of the parameters, (chunks, D)."""

    def chunks_of(x: mx.array) -> tuple[int, int]:
        return launch.row_chunks(prod(x.shape[:-1]))

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x = inputs[0]
        channels, positions = x.shape[-1], prod(x.shape[1:-1])
        chunks, chunk = chunks_of(x)
        sizes = (x.shape[0] * positions, channels, positions, chunk)
        return Plan(
            _layout(grouping, channels),
            launch.Geometry((), (channels, chunks, 1), (min(channels, 256), 1, 1)),
            ((chunks, channels),) * len(grouping.summed),
            (mx.float32,) * len(grouping.summed),
            (sizes_of(tuple(x.shape), sizes),),
        )

    def reference(x: mx.array, *arrays: mx.array) -> Arrays:
        return parameter_gradients(grouping, chunks_of(x)[0], x, *arrays)

    return BodyKernel(
        KernelSpec(
            "group_norm__sums",
            ("x", *STATISTICS, "dy", "sizes"),
            tuple(f"d{n}" for n in grouping.summed),
            _sums_text(grouping),
        ),
        plan,
        reference,
    )
