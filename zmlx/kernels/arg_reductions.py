"""Where the extreme elements are.

    argmax    the index of the largest x          argmin    the index of the smallest x

Bytes: x is read once, over any axis, and an index per reduction is written. The fold is of pairs of
a value and its index, so that it may run in any order; of equal elements the first wins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from ..arguments import Argument, check_flag
from ..launch import settings
from ..registry import Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from .axes import LONGEST, NUMBERS, named_axes, plan, planned
from .folds import folding
from .reductions import BENCHMARKS, CASES, KEEPDIMS, over_last


def _numpy_at(name: str, x: Any, axis: int | None, keepdims: bool, xp: Any) -> Any:
    """With the shape of `keepdims`, which not every namespace knows."""
    at = getattr(xp, name)(x, axis=axis)
    if not keepdims:
        return at
    return xp.reshape(at, (1,) * x.ndim) if axis is None else xp.expand_dims(at, axis)


def argmax_reference(
    x: mx.array, axis: int | None = -1, keepdims: bool = False, *, xp: Any = mx
) -> Any:
    """argmax in plain MLX."""
    return _numpy_at("argmax", x, axis, keepdims, xp)


def argmin_reference(
    x: mx.array, axis: int | None = -1, keepdims: bool = False, *, xp: Any = mx
) -> Any:
    """argmin in plain MLX."""
    return _numpy_at("argmin", x, axis, keepdims, xp)


def _first(name: str, x: mx.array, axes: tuple[int, ...], keepdims: bool) -> mx.array:
    """How many elements stand before the first one that is the extreme, or NaN where that is one:
    what MLX can be asked for of no rows, too, and from 0.32.3 on compiles for others."""
    (axis,) = axes
    top = (mx.max if name == "argmax" else mx.min)(x, axis=axis, keepdims=True)
    found = mx.logical_or(x == top, x != x).astype(mx.int32)
    before = mx.cumsum(found, axis=axis) == 0
    return before.sum(axis=axis, keepdims=keepdims).astype(mx.uint32)


def _extreme_at(name: str, x: mx.array, axis: int | None, keepdims: bool) -> Way:
    axes = named_axes(name, x, axis, several=False)
    check_flag(name, "keepdims", keepdims)
    is_plain = settings().target == "reference" or cpu.any_shape((x,))
    p = plan(tuple(x.shape), axes) if is_plain else planned(name, x, axes)
    if p.elements == 0:
        raise ValueError(f"[{name}] 'x' must have elements to compare but got shape {x.shape}.")
    if p.elements > LONGEST:
        raise ValueError(f"[{name}] 'x' must have at most {LONGEST} elements but got {x.size}.")
    shape = p.result(keepdims)
    if not x.size:  # nothing is asked for, which MLX refuses
        if cpu.any_shape((x,)):
            return lambda x: _first(name, x, axes, keepdims)
        return lambda x: mx.zeros(shape, dtype=mx.uint32)
    if is_plain:
        plain = mx.argmax if name == "argmax" else mx.argmin
        if x.ndim == 0:  # of which MLX keeps no axes
            return plain
        return lambda x: plain(x, axis=axis, keepdims=keepdims)
    run = folding(name, f"{name[3:]}_at", (("y", "at"),), p, x.dtype, (mx.uint32,), shape=shape)
    return lambda x: run(x)[0]


_ARGMAX = Remembered(partial(_extreme_at, "argmax"))
_ARGMIN = Remembered(partial(_extreme_at, "argmin"))


def argmax(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """The index of the largest element over an axis, as `mx.argmax`.

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer.
        axis: the axis, or None for the index in x flattened.
        keepdims: keep the reduced axes, with size 1.

    Returns:
        Indices in uint32: of equal elements the first, and the first NaN where there is one. It
        has no gradient.

    Raises:
        ValueError: for a maximum of nothing.
    """
    return _ARGMAX((x,), (axis, keepdims))  # type: ignore[no-any-return]


def argmin(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """The index of the smallest element over an axis, as `mx.argmin`.

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer.
        axis: the axis, or None for the index in x flattened.
        keepdims: keep the reduced axes, with size 1.

    Returns:
        Indices in uint32: of equal elements the first, and the first NaN where there is one. It
        has no gradient.

    Raises:
        ValueError: for a minimum of nothing.
    """
    return _ARGMIN((x,), (axis, keepdims))  # type: ignore[no-any-return]


for _name, _function, _reference, _baseline in (
    ("argmax", argmax, argmax_reference, mx.argmax),
    ("argmin", argmin, argmin_reference, mx.argmin),
):
    register(
        Op(
            name=_name,
            family="reductions",
            summary=f"index of the {'largest' if _name == 'argmax' else 'smallest'} element",
            formula=f"the first i with x[i] = {_name[3:]} x",
            function=over_last(_function),
            reference=_reference,
            arguments=(Argument("x", "(...)", NUMBERS, differentiable=False),),
            options=(Option("axis", -1, (0, None), passed="text"), KEEPDIMS),
            outputs=("(*)",),
            baseline=over_last(_baseline),
            torch=f"torch.{_name}(x, axis)",
            cases=CASES,
            benchmarks=BENCHMARKS,
        )
    )
