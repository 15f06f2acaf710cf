"""Tokens to the rows of their experts, and rows back to tokens.

    dispatch   y[r] = x[order[r] div k]                            (N, D) → (R, D)
    combine    y[t] = Σₐ weights[t, a] · x[positions[t, a]]        (R, D) → (N, D)

with R = N·k rows and the order and positions of `moe_sort`. Each is the other's gradient:
dispatch's is combine with weights 1; combine's for the rows is dispatch with each row times its
weight, and for the weights it is the product of row and cotangent, summed over D. All write every
element once and add in float32 in a fixed order: results do not depend on the threads.

Bytes: dispatch reads x and writes R rows; combine reads R rows and writes y.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx

from .. import launch, msl
from ..arguments import INDICES, Argument, check
from ..body import BodyKernel, Plan, constant
from ..codegen import ROW_HEADER
from ..metal import KernelSpec
from ..registry import Case, Op, register
from ..remembered import Remembered, Way
from ..transforms import Arrays, refuses_any_shape
from . import moe_rows_text as text


def _flat(x: Any) -> Any:
    """x as (rows, D)."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def moe_dispatch_reference(
    x: mx.array, positions: mx.array, order: mx.array, *, xp: Any = mx
) -> Any:
    """moe_dispatch in plain MLX."""
    return _flat(x)[order // positions.shape[-1]]


def moe_combine_reference(
    x: mx.array, weights: mx.array, positions: mx.array, order: mx.array, *, xp: Any = mx
) -> Any:
    """moe_combine in plain MLX."""
    return xp.sum(x[positions] * weights[..., None], axis=-2)


# ---- kernels ------------------------------------------------------------------------------------

_CPU_COLUMNS = 16384
_CPU_STEP = 64
_CACHE_LINE = 64


def _columns(settings: launch.Settings, d: int, rows: int, step: bool) -> launch.Geometry:
    """V columns of a row per thread."""
    on_cpu = launch.is_cpu(settings)
    c = launch.pick(settings, V=_CPU_COLUMNS if on_cpu else 4)
    if step:
        c |= launch.pick(settings, U=_CPU_STEP if on_cpu else 4)
    threads = -(-d // c["V"])
    group = 1 if on_cpu else min(256, max(threads, 1))
    return launch.Geometry(tuple(c.items()), (threads, rows, 1), (group, 1, 1))


def _spread_plan(settings: launch.Settings, inputs: Arrays) -> Plan:
    x, positions, order = inputs[0], inputs[-2], inputs[-1]
    d, rows = x.shape[-1], order.size
    geometry = _columns(settings, d, rows, False)
    line = _CACHE_LINE // x.dtype.size if launch.is_cpu(settings) else dict(geometry.template)["V"]
    return Plan(
        template=(("T", x.dtype), *geometry.template, ("LINE", line)),
        geometry=geometry,
        shapes=((rows, d),),
        dtypes=(x.dtype,),
        constants=_numbers(D=d, K=positions.shape[-1], tokens=x.size // max(d, 1)),
    )


def _gather_plan(settings: launch.Settings, inputs: Arrays) -> Plan:
    x, positions = inputs[0], inputs[-2]
    (rows, d), (*lead, k) = x.shape, positions.shape
    geometry = _columns(settings, d, prod(lead), True)
    return Plan(
        template=(("T", x.dtype), *geometry.template),
        geometry=geometry,
        shapes=((*lead, d),),
        dtypes=(x.dtype,),
        constants=_numbers(D=d, K=k, rows=rows),
    )


def _dot_plan(settings: launch.Settings, inputs: Arrays) -> Plan:
    x, positions, weights = inputs[0], inputs[-1], inputs[2]
    (rows, d), (*lead, k) = x.shape, positions.shape
    on_cpu = launch.is_cpu(settings)
    c = launch.pick(settings, TPR=1 if on_cpu else 128, U=_CPU_STEP if on_cpu else 4)
    slots = prod(lead) * k
    x_groups = min(slots, 1 << 20)
    grid = (x_groups * c["TPR"], -(-slots // x_groups) if slots else 0, 1)
    return Plan(
        template=(("T", weights.dtype), *c.items()),
        geometry=launch.Geometry((), grid, (c["TPR"], 1, 1)),
        shapes=((*lead, k),),
        dtypes=(weights.dtype,),
        constants=_numbers(D=d, K=k, rows=rows, tokens=prod(lead)),
    )


def _numbers(**values: int) -> tuple[mx.array, ...]:
    return tuple(constant((value,), mx.uint32) for value in values.values())


def _spec(name: str, inputs: tuple[str, ...], output: str, body: str, **parts: str) -> KernelSpec:
    for key, part in parts.items():
        body = body.replace(f"@{key}@", part)
    header = msl.header_for("ZMLX_FAIL") + text.HEADER
    return KernelSpec(name, inputs, (output,), body, header)


def _dispatch_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> list[mx.array | None]:
    _, positions, order = primals
    return [_SUM(cotangents[0], positions, order), None, None]


def _sum_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> list[mx.array | None]:
    _, positions, order = primals
    return [_DISPATCH(cotangents[0], positions, order), None, None]


def _combine_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> list[mx.array | None]:
    x, weights, positions, order = primals
    dy, dweights = None, None
    if 0 in wanted:
        dy = _SPREAD_WEIGHTED(cotangents[0], weights, positions, order)
    if 1 in wanted:
        dweights = _DOTS(x, cotangents[0], weights, positions)
    return [dy, dweights, None, None]


def _rows(x: mx.array, index: mx.array) -> mx.array:
    """x[index], and NaN where there is no such row, which MLX does not look at."""
    if not x.shape[0]:
        return mx.full((*index.shape, *x.shape[1:]), mx.nan, x.dtype)
    good = mx.logical_and(index >= 0, index < x.shape[0])
    return mx.where(good[..., None], x[mx.where(good, index, 0)], mx.nan)


def _dispatch_plain(x: mx.array, positions: mx.array, order: mx.array) -> Arrays:
    return (_rows(_flat(x), order // positions.shape[-1]),)


def _spread_weighted_plain(
    x: mx.array, weights: mx.array, positions: mx.array, order: mx.array
) -> Arrays:
    rows = _dispatch_plain(x, positions, order)[0].astype(mx.float32)
    factors = _rows(weights.reshape(weights.size, 1), order).astype(mx.float32)
    return ((rows * factors).astype(x.dtype),)


def _combine_plain(x: mx.array, *rest: mx.array) -> Arrays:
    weights, positions, _ = rest
    rows, factors = _rows(x.astype(mx.float32), positions), weights.astype(mx.float32)
    return ((rows * factors[..., None]).sum(axis=-2).astype(x.dtype),)


def _sum_plain(x: mx.array, positions: mx.array, order: mx.array) -> Arrays:
    return (_rows(x, positions).astype(mx.float32).sum(axis=-2).astype(x.dtype),)


def _dots_plain(x: mx.array, dy: mx.array, weights: mx.array, positions: mx.array) -> Arrays:
    products = _rows(x, positions).astype(mx.float32) * dy[..., None, :].astype(mx.float32)
    return (products.sum(axis=-1).astype(weights.dtype),)


_X = Argument("x", "(*, D)")
_ROWS = Argument("x", "(R, D)")
_WEIGHTS = Argument("weights", "(*, K)")
_POSITIONS = Argument(
    "positions", "(*, K)", INDICES, differentiable=False, values="0 … R-1, a permutation"
)
_ORDER = Argument(
    "order", "(R,)", INDICES, differentiable=False, values="0 … R-1, the inverse permutation"
)

_DISPATCH = BodyKernel(
    _spec("moe_dispatch", ("x", "positions", "order", "D", "K", "tokens"), "y", text.SPREAD,
          WEIGHT="1.0f", COPY="valid"),
    _spread_plan,
    _dispatch_plain,
    vjp=_dispatch_vjp,
    dynamic=refuses_any_shape("moe_dispatch"),
)  # fmt: skip
_SPREAD_WEIGHTED = BodyKernel(
    _spec("moe_combine__dx", ("x", "weights", "positions", "order", "D", "K", "tokens"), "y",
          text.SPREAD, WEIGHT="weights[valid ? slot : 0]", COPY="false"),
    _spread_plan,
    _spread_weighted_plain,
)  # fmt: skip
_SUM = BodyKernel(
    _spec("moe_dispatch__dx", ("x", "positions", "order", "D", "K", "rows"), "y", text.GATHER,
          WEIGHT="1.0f"),
    _gather_plan,
    _sum_plain,
    vjp=_sum_vjp,
)  # fmt: skip
_COMBINE = BodyKernel(
    _spec("moe_combine", ("x", "weights", "positions", "order", "D", "K", "rows"), "y", text.GATHER,
          WEIGHT="weights[token * K + a]"),
    _gather_plan,
    _combine_plain,
    vjp=_combine_vjp,
    dynamic=refuses_any_shape("moe_combine"),
)  # fmt: skip
_DOTS = BodyKernel(
    KernelSpec(
        "moe_combine__dweights",
        ("x", "dy", "weights", "positions", "D", "K", "rows", "tokens"),
        ("dw",),
        text.DOT,
        ROW_HEADER,
    ),
    _dot_plan,
    _dots_plain,
)


# ---- ops ----------------------------------------------------------------------------------------


def _check_choices(op: str, rows: int, **values: mx.array) -> None:
    for name, value in values.items():
        if isinstance(value, mx.array) and value.size != rows:
            raise ValueError(
                f"[{op}] '{name}' must have an element for each of {rows} rows but got shape "
                f"{value.shape}."
            )


_DISPATCH_ARGUMENTS = (_X, _POSITIONS, _ORDER)
_COMBINE_ARGUMENTS = (_ROWS, _WEIGHTS, _POSITIONS, _ORDER)


def _dispatch(x: mx.array, positions: mx.array, order: mx.array) -> Way:
    check("moe_dispatch", _DISPATCH_ARGUMENTS, [x, positions, order])
    _check_choices("moe_dispatch", positions.size, order=order)
    return _DISPATCH


def _combine(x: mx.array, weights: mx.array, positions: mx.array, order: mx.array) -> Way:
    if isinstance(x, mx.array) and x.ndim == 2:
        _check_choices("moe_combine", x.shape[0], weights=weights, positions=positions, order=order)
    check("moe_combine", _COMBINE_ARGUMENTS, [x, weights, positions, order])
    return _COMBINE


_DISPATCHED = Remembered(_dispatch)
_COMBINED = Remembered(_combine)


def moe_dispatch(x: mx.array, positions: mx.array, order: mx.array) -> mx.array:
    """Copies each token to the rows of its choices.

        y[r] = x[order[r] div k]

    Args:
        x: (*, D) tokens in float32, float16 or bfloat16.
        positions, order: (*, k) and (R,), R = N·k, from `moe_sort`: a permutation and its inverse,
            in int32, uint32 or int64. An element out of range makes the rows that it stands for
            NaN; on the CPU the evaluation raises. The output needs `order` alone, the gradient
            `positions`.

    Returns:
        (R, D) rows sorted by expert, in the dtype of x. Gradient for x.
    """
    return _DISPATCHED((x, positions, order))  # type: ignore[no-any-return]


def moe_combine(x: mx.array, weights: mx.array, positions: mx.array, order: mx.array) -> mx.array:
    """Adds up the rows of each token's choices.

        y[t] = Σₐ weights[t, a] · x[positions[t, a]]

    Args:
        x: (R, D) rows sorted by expert, in float32, float16 or bfloat16.
        weights: (*, k) in float32, float16 or bfloat16.
        positions, order: (*, k) and (R,), R = N·k, as for `moe_dispatch`.

    Returns:
        (*, D) in the dtype of x, added in float32. Gradients for x and the weights.
    """
    return _COMBINED((x, weights, positions, order))  # type: ignore[no-any-return]


def _permutation(shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.random.default_rng(7).permutation(prod(shape))


_SAMPLES = {
    "order": lambda rng, shape, sizes: _permutation(shape),
    "positions": lambda rng, shape, sizes: _permutation(shape).argsort().reshape(shape),
}
_CASES = (
    Case((1,), {"D": 1, "K": 1, "R": 1}, "one token, one element"),
    Case((2, 3), {"D": 5, "K": 2, "R": 12}, "two leading axes"),
    Case((7,), {"D": 67, "K": 3, "R": 21}, "a step with a tail"),
    Case((9,), {"D": 515, "K": 8, "R": 72}, "several steps and a tail"),
    Case((33,), {"D": 129, "K": 4, "R": 132}, "one past 32 lanes of 4"),
    Case((300,), {"D": 16, "K": 1, "R": 300}, "one choice"),
    Case((), {"D": 40, "K": 2, "R": 2}, "no leading axis"),
    Case((0,), {"D": 16, "K": 2, "R": 0}, "no rows"),
)
_LONG = (Case((3,), {"D": 40001, "K": 2, "R": 6}, "longer than a thread's part of a row"),)
_BENCHMARKS = (
    Case((2048,), {"D": 2048, "K": 8, "R": 16384}, follows=("R",)),
    Case((4096,), {"D": 2048, "K": 2, "R": 8192}, follows=("R",)),
)
_REFUSES = {"shapeless compile": "compile with shapes: rows are counted by them"}

register(
    Op(
        name="moe_dispatch",
        family="moe",
        summary="tokens to the rows of their experts",
        formula="y[r] = x[order[r] div k]",
        function=moe_dispatch,
        reference=moe_dispatch_reference,
        arguments=_DISPATCH_ARGUMENTS,
        outputs=("(R, D)",),
        reads_backward=("positions",),
        cases=_CASES,
        long_cases=_LONG,
        benchmarks=_BENCHMARKS,
        samples=_SAMPLES,
        refuses=_REFUSES,
    )
)
register(
    Op(
        name="moe_combine",
        family="moe",
        summary="weighted sums of the rows of each token",
        formula="y[t] = Σₐ weights[t, a] · x[positions[t, a]]",
        function=moe_combine,
        reference=moe_combine_reference,
        arguments=_COMBINE_ARGUMENTS,
        outputs=("(*, D)",),
        reads_backward=("x", "weights", "positions", "order"),
        cases=_CASES,
        long_cases=_LONG,
        benchmarks=_BENCHMARKS,
        samples=_SAMPLES,
        refuses=_REFUSES,
    )
)
