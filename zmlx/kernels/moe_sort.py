"""Where each token goes among tokens that are sorted by expert.

    A slot is a choice of a token: slot t·k + a is choice a of token t. Sorting the slots by expert,
    those of an expert in their own order, gives
    order[r]        the slot in row r               offsets[e]   the first row of expert e
    positions[t,a]  the row of slot t·k + a         counts[e]    its rows

A stable counting sort in one launch of one group: each thread counts a run of slots, the counts are
summed over threads and experts, and each thread puts its run in place.

Bytes: reads the indices twice, writes order and positions.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from .. import launch, msl
from ..arguments import INDICES, Argument, check, check_size
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..transforms import Arrays, refuses_any_shape


class Routing(NamedTuple):
    """What `moe_sort` returns, all uint32: order (N·k,), positions (*, k), counts (E,) and offsets
    (E + 1,)."""

    order: mx.array
    positions: mx.array
    counts: mx.array
    offsets: mx.array


def moe_sort_reference(indices: mx.array, *, num_experts: int = 4, xp: Any = mx) -> Any:
    """moe_sort in plain MLX; an index out of range sorts behind the experts."""
    flat = indices.reshape(indices.size)
    flat = xp.where(xp.logical_and(flat >= 0, flat < num_experts), flat, num_experts)
    order = xp.argsort(flat, axis=-1)
    positions = xp.argsort(order, axis=-1).reshape(indices.shape)
    counts = xp.sum(flat[:, None] == xp.arange(num_experts), axis=0)
    offsets = xp.concatenate([xp.zeros((1,)), xp.cumsum(counts, axis=0)])
    return order, positions, counts, offsets


# ---- kernels ------------------------------------------------------------------------------------

#: `scratch` has a row of E + 1 counters per thread; the last one counts indices out of range.
_BODY = """\
    const uint t = thread_position_in_threadgroup.x;
    const uint run = (slots + T - 1) / T;
    const uint begin = min(slots, t * run);
    const uint end = min(slots, begin + run);
    auto mine = scratch + size_t(t) * (experts + 1);
    for (uint e = 0; e <= experts; ++e) {
        mine[e] = 0;
    }
    for (uint s = begin; s < end; ++s) {
        const int64_t index = int64_t(indices[s]);
        const bool valid = index >= 0 && index < int64_t(experts);
        if (!valid) {
            ZMLX_FAIL("indices", index);
        }
        mine[valid ? uint(index) : experts] += 1;
    }
    threadgroup_barrier(mem_flags::mem_device);
    // Of each expert: the slots in the runs before, and all slots.
    for (uint e = t; e <= experts; e += T) {
        uint sum = 0;
        for (uint u = 0; u < T; ++u) {
            const uint count = scratch[size_t(u) * (experts + 1) + e];
            scratch[size_t(u) * (experts + 1) + e] = sum;
            sum += count;
        }
        if (e < experts) {
            counts[e] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (t == 0) {
        uint sum = 0;
        for (uint e = 0; e < experts; ++e) {
            offsets[e] = sum;
            sum += counts[e];
        }
        offsets[experts] = sum;
    }
    threadgroup_barrier(mem_flags::mem_device);
    for (uint s = begin; s < end; ++s) {
        const int64_t index = int64_t(indices[s]);
        const uint e = index >= 0 && index < int64_t(experts) ? uint(index) : experts;
        const uint row = offsets[e] + mine[e];
        mine[e] += 1;
        order[row] = s;
        positions[s] = row;
    }
"""

_SPEC = KernelSpec(
    "moe_sort",
    ("indices", "slots", "experts"),
    ("order", "positions", "counts", "offsets", "scratch"),
    _BODY,
    msl.header_for("ZMLX_FAIL"),
)
_ARGUMENTS = (Argument("indices", "(*, K)", INDICES, differentiable=False, values="0 … E-1"),)


def _check_values(num_experts: int, indices: mx.array) -> None:
    bad = mx.logical_or(indices < 0, indices >= num_experts)
    if bad.any().item():
        flat, at = indices.reshape(-1), mx.argmax(bad.reshape(-1))
        raise ValueError(f"[moe_sort] 'indices' must be in range but got {flat[at].item()}.")


@cache
def _sort(num_experts: int) -> BodyKernel:
    def plan(settings: launch.Settings, inputs: Arrays) -> Plan:
        shape = tuple(inputs[0].shape)
        slots = prod(shape)
        if slots >= 2**31:
            raise ValueError(f"[moe_sort] 'indices' must have fewer than 2^31 but got {slots}.")
        # A thread for every 16 slots at least.
        threads = 1 if launch.is_cpu(settings) else min(256, max(32, slots // 512 * 32))
        return Plan(
            template=(("T", threads),),
            geometry=launch.Geometry((), (threads, 1, 1), (threads, 1, 1)),
            shapes=(
                *((slots,), shape, (num_experts,), (num_experts + 1,)),
                (threads, num_experts + 1),
            ),
            dtypes=(mx.uint32,) * 5,
            constants=(constant((slots,), mx.uint32), constant((num_experts,), mx.uint32)),
        )

    def reference(indices: mx.array) -> Arrays:
        found = moe_sort_reference(indices.astype(mx.int64), num_experts=num_experts)
        scratch = mx.zeros((1, num_experts + 1), mx.uint32)
        return (*(x.astype(mx.uint32) for x in found), scratch)

    return BodyKernel(
        _SPEC,
        plan,
        reference,
        dynamic=refuses_any_shape("moe_sort"),
        arguments=_ARGUMENTS,
        values=lambda indices: _check_values(num_experts, indices),
    )


# ---- ops ----------------------------------------------------------------------------------------


def _sorted(indices: mx.array, num_experts: int) -> Way:
    num_experts = check_size("moe_sort", "num_experts", num_experts)
    if num_experts >= 2**31 - 1:
        raise ValueError(f"[moe_sort] 'num_experts' must be below 2^31 - 1 but got {num_experts}.")
    check("moe_sort", _ARGUMENTS, [indices])
    sort = _sort(num_experts)
    # Where the indices come from is nothing to differentiate.
    return lambda indices: Routing(*sort(mx.stop_gradient(indices))[:4])


_SORTED = Remembered(_sorted)


def moe_sort(indices: mx.array, *, num_experts: int) -> Routing:
    """Sorts the choices of all tokens by expert, stably, in one launch.

    Args:
        indices: (*, k) experts of each token, in int32, uint32 or int64. An index out of range
            gets a row behind those of all experts, which no expert computes; on the CPU the
            evaluation raises.
        num_experts: E, at least 1. Experts may have no token.

    Returns:
        `Routing`: order, positions, counts and offsets. No gradient.
    """
    return _SORTED((indices,), (num_experts,))  # type: ignore[no-any-return]


def _with_four_experts(indices: mx.array, *, num_experts: int = 4) -> Routing:
    return moe_sort(indices, num_experts=num_experts)


def _experts(rng: Any, shape: tuple[int, ...], sizes: Any) -> Any:
    return rng.integers(0, 4, shape)


register(
    Op(
        name="moe_sort",
        family="moe",
        summary="rows of each token's choices, sorted by expert",
        formula="order = argsort(indices), stable; positions = order⁻¹",
        function=_with_four_experts,
        reference=moe_sort_reference,
        arguments=_ARGUMENTS,
        options=(Option("num_experts", 4, (5, 300)),),
        outputs=("(N·K,)", "(*, K)", "(E,)", "(E + 1,)"),
        cases=(
            Case((1,), {"K": 1}, "one slot"),
            Case((2, 3), {"K": 2}, "two leading axes"),
            Case((70,), {"K": 3}, "several threads, the last ones idle"),
            Case((512,), {"K": 8}, "many threads"),
            Case((333,), {"K": 7}, "a last run that is not full"),
            Case((), {"K": 4}, "one token"),
            Case((0,), {"K": 2}, "no rows"),
        ),
        long_cases=(Case((20000,), {"K": 8}, "long runs"),),
        benchmarks=(Case((16384,), {"K": 8}),),
        samples={"indices": _experts},
        refuses={"shapeless compile": "compile with shapes: rows are counted by them"},
    )
)
