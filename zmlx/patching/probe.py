"""Runs a replacement against the module's own call before it is put in place.

The children of a block are stand-ins that return an array of the right shape, so that a probe
costs nothing in a model of any size and meets no cache or mask. The bound is that of the tests:
twice the error of the module's own call in its dtype, plus 4 roundings, over the call in float32.
In float32 there is nothing better to compare with, and MLX's exp on the CPU is off by up to 63
units: the bound is 256 roundings of the largest element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..choice import prefer
from .dtypes import own_dtype
from .plans import ExpertsPlan, GatePlan, MLPPlan, Plan, RouterPlan
from .probe_mixtures import in_float32, stands, twins
from .reasons import NoGradientError, UnmatchedError, first_line
from .shadows import entries, is_opaque, parameters, placed, shadow
from .steps import EMPTY, AddNorm, BlockPlan

_EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class _Constant(nn.Module):
    """A child that returns one fixed array times a weighted mean of what it gets, plus another. A
    plain mean of what a layer norm returns is 0, and one that adds a plain mean changes nothing.
    Some columns are 0, with a gradient."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self._number = number
        self._factor, self._array = mx.random.normal((2, width), key=mx.random.key(number))
        self._zero = mx.random.uniform(shape=(width,), key=mx.random.key(number + 2000)) < 0.25

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        x = next(v for v in (*given, *named.values()) if isinstance(v, mx.array))
        weights = mx.random.normal(x.shape[-1:], key=mx.random.key(self._number + 1000))
        mean = (x.astype(mx.float32) * weights).mean(axis=-1, keepdims=True)
        y = mean * self._factor + self._array
        return mx.where(self._zero, y - mx.stop_gradient(y), y).astype(x.dtype)


def _drawn(shape: tuple[int, ...], number: int) -> mx.array:
    """Normal numbers, and some zeros."""
    values, zero = mx.random.split(mx.random.key(number))
    x = mx.random.normal(shape, key=values)
    return mx.where(mx.random.uniform(shape=shape, key=zero) < 0.25, 0, x)


def probe(module: nn.Module, plan: Plan) -> None:
    """Raises `UnmatchedError` where the replacement differs in the output or in the gradient, of
    which one that is stopped leaves nothing in the graph; `NoGradientError` where the output is the
    same, and MLX has no gradient. Some elements are 0, where gradients of maxima have their
    ties."""
    dtype = own_dtype(module)
    axes = sorted(n for d, n in plan.verified if d == dtype)
    if not axes:
        raise UnmatchedError(f"its graph differs in {str(dtype).rpartition('.')[2]}")
    if isinstance(plan, (ExpertsPlan, RouterPlan)):
        for twin, x, of, more in twins(module, plan, dtype):
            _compare(plan, twin, in_float32(twin), [x], of, more, dtype)
        return
    width = _width(module, plan)
    shape = (*(2, 2, 2, 3)[4 - axes[-1] + 1 :], width)
    arrays = [_drawn(shape, 7).astype(dtype)]
    of_two = isinstance(plan, GatePlan) and not plan.packed
    if of_two or (isinstance(plan, BlockPlan) and plan.arrays == 2):
        arrays.append(_drawn(shape, 8).astype(dtype))
    twin, wide = _isolated(module, plan), _isolated(_in_float32(module), plan)
    _compare(plan, twin, wide, arrays, lambda y: y, (), dtype, _named(plan))


def inlined(module: nn.Module, plan: Plan) -> Iterator[str]:
    """Paths of the modules whose calls the plan replaces by its own: norms that it computes, and
    children without arrays."""
    yield from (path for path, _ in plan.computes())
    left: list[tuple[str, Any]] = [(str(key), value) for key, value in entries(module)]
    while left:
        path, value = left.pop()
        if isinstance(value, nn.Module):
            if is_opaque(value):
                continue
            yield path
        if isinstance(value, (list, tuple, dict)):
            left += [(f"{path}.{key}", inner) for key, inner in entries(value)]


def _compare(
    plan: Plan,
    twin: Any,
    wide: Any,
    arrays: list[mx.array],
    of: Callable[[Any], mx.array],
    more: tuple[Any, ...],
    dtype: mx.Dtype,
    named: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """The plan and the module's own call, on a twin, and on one in float32."""
    call = type(twin).__call__

    def original(module: Any, *a: mx.array) -> mx.array:
        with prefer("mlx"):
            return of(call(module, *a, *more, **named))

    def replaced(module: Any, *a: mx.array) -> mx.array:
        with prefer("zmlx"):
            return of(plan.run(module, call, *a, *more, **named))

    in_wide = [a.astype(mx.float32) for a in arrays]
    runs = [(original, twin, arrays), (replaced, twin, arrays), (original, wide, in_wide)]
    outputs = [f(module, *a) for f, module, a in runs]
    _agree("output", outputs, dtype)
    cotangent = mx.random.normal(outputs[0].shape, key=mx.random.key(9))
    gradients = []
    for (f, module, a), y in zip(runs, outputs, strict=True):
        try:
            gradients.append(_gradients(f, module, a, cotangent.astype(y.dtype)))
        except Exception as error:
            if gradients:
                raise
            raise NoGradientError(f"MLX has no gradient of it: {first_line(error)}") from None
    for results in zip(*gradients, strict=True):
        _agree("gradient", list(results), dtype)


def _gradients(
    run: Callable[..., mx.array], module: Any, arrays: list[mx.array], cotangent: mx.array
) -> list[mx.array]:
    """Of the arrays, and of all vectors among the parameters."""
    own = parameters(module)
    vectors = {path: v for path, v in own.items() if v.ndim <= 1 and v.dtype in _EPS}

    def call(*inputs: mx.array) -> mx.array:
        given = inputs[len(arrays) :]
        return run(placed(module, dict(zip(vectors, given, strict=True))), *inputs[: len(arrays)])

    return mx.vjp(call, [*arrays, *vectors.values()], [cotangent])[1]


def _agree(what: str, results: list[mx.array], dtype: mx.Dtype) -> None:
    original, replaced, reference = results
    if original.shape != replaced.shape or original.dtype != replaced.dtype:
        raise UnmatchedError(f"its {what} has another shape or dtype")
    largest = mx.abs(reference).max()
    own, ours = (mx.abs(r.astype(mx.float32) - reference).max() for r in (original, replaced))
    if dtype == mx.float32:
        bound = 256 * _EPS[dtype] * largest
    else:
        bound = 2 * own + 4 * _EPS[dtype] * largest
    if not (ours <= bound).item():
        raise UnmatchedError(
            f"its {what} differs: {ours.item():.2g} off where {bound.item():.2g} is allowed"
        )


def _width(module: nn.Module, plan: Plan) -> int:
    if isinstance(plan, MLPPlan):
        return 8
    return 16 if isinstance(plan, GatePlan) else plan.width


def _named(plan: Plan) -> dict[str, Any]:
    """The arguments that a block's call needs besides its arrays."""
    if not isinstance(plan, BlockPlan):
        return {}
    others = list(zip(plan.names, plan.defaults, strict=True))[plan.arrays - 1 :]
    return {name: None for name, default in others if default is EMPTY}


def _isolated(module: nn.Module, plan: Plan) -> Any:
    """The module with stand-ins for the children that the plan calls as they are."""
    found: dict[str, nn.Module] = {}
    if isinstance(plan, MLPPlan):
        inner = 2 * plan.width if plan.unit == "packed" else plan.width
        found = {path: _Constant(inner, i) for i, path in enumerate(plan.inputs)}
        found[plan.output] = _Constant(inner if plan.unit != "packed" else plan.width, 99)
    elif isinstance(plan, BlockPlan):
        normed = {s.path for s in plan.steps if isinstance(s, AddNorm)}
        called = [s.path for s in plan.steps if not isinstance(s, AddNorm) and hasattr(s, "path")]
        for i, path in enumerate(called):
            if path not in normed:
                found[path] = _Constant(plan.width, i)
        found.update(stands(module, plan))
    if not found:
        return shadow(module, {})
    return placed(module, found)


def _in_float32(module: nn.Module) -> nn.Module:
    """The same module with its own vectors in float32; what stands in for children is not here."""

    def wide(value: Any) -> Any:
        if isinstance(value, mx.array):
            return value.astype(mx.float32) if value.dtype in _EPS else value
        if isinstance(value, nn.Module) and all(
            isinstance(v, mx.array) and v.ndim <= 1 for v in dict.values(value)
        ):
            return shadow(value, {k: wide(v) for k, v in entries(value)})
        return value

    return shadow(module, {k: wide(v) for k, v in entries(module)})  # type: ignore[no-any-return]
