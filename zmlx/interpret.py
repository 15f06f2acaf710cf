"""A codegen pattern evaluated in plain MLX.

This is what a kernel means: the fallback of its `vmap`, `jvp`, second-order gradient and shapeless
compile, and the `reference` target. Expressions are parsed by `zmlx.expr` and evaluated in float32
(or the type that the pattern names), outputs are cast to the dtype of the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx

from . import expr, philox
from .codegen import Columnwise, Elementwise, Let, Operand, Output, Reduce, Rowwise
from .targets import cpu

Pattern = Elementwise | Rowwise | Columnwise

_TYPES = {
    "float": mx.float32,
    "int": mx.int32,
    "uint": mx.uint32,
    "int64_t": mx.int64,
    "uint64_t": mx.uint64,
    "bool": mx.bool_,
}

_REDUCE = {
    "sum": mx.sum,
    "prod": mx.prod,
    "max": mx.max,
    "min": mx.min,
    "maximum": mx.max,
    "minimum": mx.min,
}
_OF_NOTHING = {"max": -math.inf, "min": math.inf, "maximum": -math.inf, "minimum": math.inf}

_parse = lru_cache(maxsize=4096)(expr.parse)


def expression_value(text: str, values: dict[str, mx.array]) -> mx.array:
    """The value of an expression."""
    return _parse(text).evaluate(values)


def cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """`x` in a dtype. An int or a bool has no derivative, which MLX would cast as well."""
    return (x if mx.issubdtype(dtype, mx.floating) else mx.stop_gradient(x)).astype(dtype)


def _slice(x: mx.array, part: int, parts: int) -> mx.array:
    width = x.shape[-1] // parts
    return x if parts == 1 else x[..., part * width : (part + 1) * width]


def _spread(value: mx.array, like: mx.array) -> mx.array:
    return mx.broadcast_arrays(value, like)[0]


def _rows(x: mx.array) -> mx.array:
    """x as (rows, D). No reshape to (-1, D), which a vmap over nothing cannot take."""
    return mx.flatten(x, 0, -2) if x.ndim > 1 else mx.expand_dims(x, 0)


class _Values(dict[str, mx.array]):
    """Names to arrays; a let is evaluated when it is first asked for, since element-level lets may
    name results of reductions that come later."""

    def __init__(self, lets: Sequence[Let], dtypes: dict[str, mx.Dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes
        self._lets = {let.name: let for let in lets}

    def __missing__(self, name: str) -> mx.array:
        let = self._lets[name]
        value = expression_value(let.expr, self)
        if let.rounded:
            value = value.astype(self._dtypes[let.rounded])
        self[name] = cast(value, _TYPES[let.type])
        return self[name]


def _along(ones: mx.array, axis: int) -> mx.array:
    """The length of an axis, at every element. No reduction, because MLX's crash in a shapeless
    compile where an axis that was longer becomes 1."""
    before = mx.cumsum(ones, axis=axis)
    return before + mx.cumsum(ones, axis=axis, reverse=True, inclusive=False)


def _random(pattern: Pattern, x: Operand, values: dict[str, mx.array], ones: mx.array) -> mx.array:
    """The numbers that a random operand draws."""
    width = _along(ones, -1)
    if not isinstance(pattern, Elementwise):
        width = (width + 7) // 8 * 8
    index, stride = mx.cumsum(ones, axis=-1, inclusive=False), width
    for axis in range(ones.ndim - 2, -1, -1):
        index = index + mx.cumsum(ones, axis=axis, inclusive=False) * stride
        stride = stride * _along(ones, axis)
    return mx.stop_gradient(philox.uniform(index, values[x.index], values[x.name]))


def _extreme(reduce: Callable[..., mx.array], x: mx.array) -> mx.array:
    """The extreme of each row as the mean of what equals it: the tangent of MLX's own is a gather
    at a place that depends on x, which has no gradient."""
    top = mx.stop_gradient(reduce(x, axis=-1, keepdims=True))
    equal = x == top
    finite = mx.where(mx.isinf(top), 0, top)  # sums of what is left of large numbers are finite
    rest = mx.where(equal, x - finite, 0).sum(axis=-1, keepdims=True)
    return finite + rest / equal.sum(axis=-1, keepdims=True)


def _reduce(r: Reduce, element: mx.array, values: dict[str, mx.array]) -> None:
    """Adds what a reduction names to `values`."""
    if r.op != "sum_exp":
        element = mx.stop_gradient(element) if r.shift else element
        if r.op in _OF_NOTHING and not element.shape[-1] and not cpu.any_shape((element,)):
            total = mx.full((*element.shape[:-1], 1), _OF_NOTHING[r.op])
        elif r.op in _OF_NOTHING and mx.issubdtype(element.dtype, mx.floating):
            total = _extreme(_REDUCE[r.op], element)
        else:
            total = _REDUCE[r.op](element, axis=-1, keepdims=True)
        values[r.name] = cast(total, _TYPES[r.type])
        return
    lowest = mx.array(mx.finfo(mx.float32).min, dtype=mx.float32)
    # What it adds to a gradient is 0 but for rounding, all of it at the largest element.
    peak = mx.stop_gradient(mx.maximum(lowest, mx.max(element, axis=-1, keepdims=True)))
    away = mx.where(mx.logical_and(mx.isinf(peak), element == peak), 0.0, element - peak)
    values[r.name], values[r.peak] = mx.exp(away).sum(axis=-1, keepdims=True), peak


def evaluate(
    pattern: Pattern, inputs: Sequence[mx.array], dtypes: Sequence[mx.Dtype], chunks: int = 1
) -> tuple[mx.array, ...]:
    """The outputs of `pattern` on `inputs` (without the launch constants), in plain MLX ops."""
    arrays = dict(zip(pattern.input_names, inputs, strict=False))
    stored = dict(zip(pattern.output_names, dtypes, strict=True))
    values = _Values(
        pattern.lets, {y.name: stored[(y.array or y.name) + "_out"] for y in pattern.outputs}
    )
    like: mx.array | None = None
    picks: list[tuple[Operand, mx.array]] = []
    for x in pattern.inputs:
        type_ = "uint64_t" if x.kind == "random" else x.type
        value = cast(arrays[(x.array or x.name) + "_in"], _TYPES[type_])
        if x.kind in ("row", "column", "at"):
            value = _slice(value, x.part, x.parts)
        if x.kind == "at" or (x.kind == "row" and x.index):
            picks.append((x, value))
            continue
        if x.kind == "per_row":
            value = mx.expand_dims(value, -1)
        if x.kind in ("row", "full") and like is None:
            like = value
        values[x.name] = value
    assert like is not None
    # From the elements and not from the shape, which a shapeless compile may change.
    ones = mx.logical_or(like == like, mx.array(True)).astype(mx.uint32)
    for x in pattern.inputs:
        if x.kind == "random":
            values[x.name] = _random(pattern, x, values, ones.astype(mx.uint64))
    if isinstance(pattern, Rowwise):
        values["D"] = ones.sum(axis=-1, keepdims=True)
        values["j"] = mx.cumsum(ones, axis=-1, inclusive=False)
        for let in pattern.before:
            values[let.name] = cast(expression_value(let.expr, values), _TYPES[let.type])
        for x, row in picks:
            index = mx.stop_gradient(values[x.index])
            if x.kind == "row":
                values[x.name] = _rows(row)[index.squeeze(-1)]
            else:
                values[x.name] = mx.take_along_axis(row, index, axis=-1)
        for step in pattern.passes:
            if step.climb:
                raise ValueError(
                    f"[{step.climb.name}] 'reference' must be given for a pattern that climbs but "
                    "got None."
                )
            for r in step.reductions:
                element = _spread(expression_value(r.expr, values), like)
                _reduce(r, cast(element, _TYPES[r.type]), values)
            for let in step.then:
                values[let.name] = cast(expression_value(let.expr, values), _TYPES[let.type])
    slots: dict[str, list[tuple[Output, mx.array]]] = {}
    for y in pattern.outputs:
        value = expression_value(y.expr, values)
        if isinstance(pattern, Columnwise) or y.kind == "column":
            total = _rows(_spread(value, like)).sum(axis=0)
            zeros = mx.zeros((chunks - 1, like.shape[-1]), dtype=mx.float32)
            value = mx.concatenate([total[None], zeros], axis=0)
        elif y.kind == "per_row":
            value = _spread(value, (like == like).any(axis=-1, keepdims=True)).squeeze(-1)
        else:
            value = _spread(value, like)
        slots.setdefault((y.array or y.name) + "_out", []).append((y, value))
    outputs = []
    for parts, dtype in zip(slots.values(), dtypes, strict=True):
        ordered = [v for _, v in sorted(parts, key=lambda p: p[0].part)]
        value = ordered[0] if len(ordered) == 1 else mx.concatenate(ordered, axis=-1)
        outputs.append(cast(value, dtype))
    return tuple(outputs)


def constants(pattern: Rowwise, inputs: Sequence[mx.array]) -> dict[str, mx.array]:
    """What is known of every row before its elements: scalars, values per row, and the lets
    `before` the first pass."""
    arrays = dict(zip(pattern.input_names, inputs, strict=False))
    values: dict[str, mx.array] = {}
    for x in pattern.inputs:
        array = arrays[(x.array or x.name) + "_in"]
        if x.kind == "row":
            values["D"] = mx.array(array.shape[-1] // x.parts, dtype=mx.uint32)
        elif x.kind in ("per_row", "scalar"):
            value = cast(array, _TYPES[x.type])
            values[x.name] = value if x.kind == "scalar" else mx.expand_dims(value, -1)
    for let in pattern.before:
        values[let.name] = cast(expression_value(let.expr, values), _TYPES[let.type])
    return values
