"""Reductions over any axes.

    sum     Σ x                mean    Σ x / n
    max     the largest x      min     the smallest x
    var     Σ (x - mean)² / (n - ddof)
    std     √var

Bytes: x is read once, over any axis, and a value per reduction is written. var and std take one
walk too (Welford 1962, in lanes that are merged as in Chan, Golub & LeVeque 1979). The gradients of
sum and mean are broadcasts, which move nothing; those of the others read x and write dx, with one
or two values per reduction that the forward keeps.
"""

from __future__ import annotations

import builtins
from functools import cache, partial, update_wrapper
from typing import Any

import mlx.core as mx

from ..arguments import Argument, check_flag, check_integer
from ..codegen import Let, Operand, Output, Rowwise
from ..interpret import expression_value
from ..launch import settings
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import ROWS, Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays, custom_function
from .axes import NUMBERS, Axes, Plan, named_axes, plan, planned
from .folds import folding


def sum_reference(x: mx.array, axis: Axes = -1, keepdims: bool = False, *, xp: Any = mx) -> Any:
    """sum in plain MLX."""
    return xp.sum(x, axis=axis, keepdims=keepdims)


def mean_reference(x: mx.array, axis: Axes = -1, keepdims: bool = False, *, xp: Any = mx) -> Any:
    """mean in plain MLX."""
    return xp.mean(x, axis=axis, keepdims=keepdims)


def max_reference(x: mx.array, axis: Axes = -1, keepdims: bool = False, *, xp: Any = mx) -> Any:
    """max in plain MLX."""
    return xp.max(x, axis=axis, keepdims=keepdims)


def min_reference(x: mx.array, axis: Axes = -1, keepdims: bool = False, *, xp: Any = mx) -> Any:
    """min in plain MLX."""
    return xp.min(x, axis=axis, keepdims=keepdims)


def var_reference(
    x: mx.array, axis: Axes = -1, keepdims: bool = False, ddof: int = 0, *, xp: Any = mx
) -> Any:
    """var in plain MLX; the mean is taken off first, since E[x²] - E[x]² cancels."""
    off = x - xp.mean(x, axis=axis, keepdims=True)
    count = 1
    axes = named_axes_of(x.ndim, axis)
    for a, n in enumerate(x.shape):
        count *= n if a in axes else 1
    total = xp.sum(off * off, axis=axis, keepdims=keepdims)
    return total / float(count - ddof) if count > ddof else total * float("inf")


def std_reference(
    x: mx.array, axis: Axes = -1, keepdims: bool = False, ddof: int = 0, *, xp: Any = mx
) -> Any:
    """std in plain MLX."""
    return xp.sqrt(var_reference(x, axis, keepdims, ddof, xp=xp))


def named_axes_of(ndim: int, axis: Axes) -> tuple[int, ...]:
    """The axes that `axis` names, counted from the front."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in ((axis,) if isinstance(axis, int) else axis))


# ---- gradients ----------------------------------------------------------------------------------


def _like_x(values: mx.array, plan: Plan, x: mx.array) -> mx.array:
    """A value per reduction, at every element."""
    return mx.broadcast_to(values.reshape(plan.kept), x.shape)


@cache
def _spread(name: str, expr: str, values: tuple[str, ...], columns: bool) -> PatternKernel:
    """dx = expr of x and of a value of each of `values` per reduction. With `columns` x comes as
    (batches·length, D) and the values as (batches, D)."""
    if columns:
        inputs = tuple(Operand(v, "row", index="batch") for v in values)
        pattern = Rowwise(
            (Operand("x"), *inputs, Operand("length", "scalar", "uint")),
            (Output("dx", expr),),
            before=(Let("batch", "row / length", "uint"),),
        )
    else:
        inputs = tuple(Operand(v, "per_row") for v in values)
        pattern = Rowwise((Operand("x"), *inputs), (Output("dx", expr),))

    def reference(x: mx.array, *arrays: mx.array) -> Arrays:
        if not columns:
            known = [mx.expand_dims(v, -1) for v in arrays]
            elements = x
        else:
            known = [mx.expand_dims(v, -2) for v in arrays[:-1]]
            elements = x.reshape(*arrays[0].shape[:-1], -1, x.shape[-1])
        named = dict(zip(values, known, strict=True))
        y = expression_value(expr, {"x": elements.astype(mx.float32), **named})
        return (y.reshape(x.shape),)

    return PatternKernel(name, pattern, (("x",),), reference=reference)


def _gradient(name: str, expr: str, plan: Plan, x: mx.array, **values: mx.array) -> mx.array:
    """dx for an array x that is reduced as `plan` says."""
    if plan.apart:  # a value for each reduction of the last run of neighbours
        first = plan.first(x.shape)
        kept = first.kept
        values = {n: mx.broadcast_to(v.reshape(plan.kept), kept) for n, v in values.items()}
        plan = first
    seen = plan.seen(x)
    kernel = _spread(f"{name}/dx", expr, tuple(values), plan.columns)
    if plan.columns:
        batches, length, d = plan.view
        known = [v.reshape(batches, d) for v in values.values()]
        dx = kernel(seen.reshape(batches * length, d), *known, scalar(length))
    else:
        dx = kernel(seen, *[v.reshape(plan.view[:1]) for v in values.values()])
    return dx.reshape(x.shape)  # type: ignore[no-any-return]


# ---- ops ----------------------------------------------------------------------------------------

_SUMS = {
    **dict.fromkeys((mx.bool_, mx.int8, mx.int16), mx.int32),
    **dict.fromkeys((mx.uint8, mx.uint16), mx.uint32),
}


def _inexact(dtype: mx.Dtype) -> mx.Dtype:
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32


def _is_plain(x: mx.array) -> bool:
    """Whether x is reduced in plain MLX: on the reference target, and where shapes may change."""
    return settings().target == "reference" or cpu.any_shape((x,))


def _nothing(shape: tuple[int, ...], value: float, dtype: mx.Dtype) -> Way:
    """Reductions of no elements."""
    return lambda x: mx.full(shape, value, dtype=dtype)


def _widened(x: mx.array) -> mx.array:
    """x for plain MLX, which would add half precision in half precision."""
    return x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x


def _real(x: mx.array) -> mx.array:
    """x for plain MLX, which would add integers as integers."""
    return _widened(x) if mx.issubdtype(x.dtype, mx.floating) else x.astype(mx.float32)


def _is_traced(x: mx.array) -> bool:
    """Whether a gradient may be taken."""
    return bool(cpu.maybe_tracing((x,))) and mx.issubdtype(x.dtype, mx.floating)


def _traced(name: str, run: Any, rule: Any, shape: tuple[int, ...]) -> Way:
    """The first output of a function with its gradient, in a shape."""
    call = custom_function(name, run, rule)
    return lambda x: _first_of(call(x)).reshape(shape)


def _first_of(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _total(name: str, mean: bool, x: mx.array, axis: Axes, keepdims: bool) -> Way:
    axes = named_axes(name, x, axis)
    check_flag(name, "keepdims", keepdims)
    # A sum over no axes is x, in MLX as well.
    dtype = _inexact(x.dtype) if mean else _SUMS.get(x.dtype, x.dtype) if axes else x.dtype
    if _is_plain(x):
        if mean:
            return lambda x: mx.mean(_real(x), axis=axes, keepdims=keepdims).astype(dtype)
        return lambda x: mx.sum(_widened(x), axis=axes, keepdims=keepdims).astype(dtype)
    p = planned(name, x, axes)
    shape = p.result(keepdims)
    if p.elements == 0:
        return _nothing(shape, float("nan") if mean else 0, dtype)
    results = (("y", "total / divisor" if mean else "total"),)
    scalars = (("divisor", scalar(float(p.elements))),) if mean else ()
    type_ = "float" if mean else ""

    def rule(primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Any) -> Arrays:
        dy = cotangents[0]
        if mean:  # in float32, since the number of elements may be infinite as a half
            dy = (dy.astype(mx.float32) / p.elements).astype(dy.dtype)
        return (_like_x(dy, p, primals[0]),)

    run = folding(name, "sum", results, p, x.dtype, (dtype,), scalars, type_, shape)
    if _is_traced(x):
        return _traced(name, lambda x: run(x)[0], rule, shape)
    return lambda x: run(x)[0]


def _extreme(name: str, x: mx.array, axis: Axes, keepdims: bool) -> Way:
    axes = named_axes(name, x, axis)
    check_flag(name, "keepdims", keepdims)
    is_plain = _is_plain(x)
    p = plan(tuple(x.shape), axes) if is_plain else planned(name, x, axes)
    if p.elements == 0:
        raise ValueError(f"[{name}] 'x' must have elements to reduce but got shape {x.shape}.")
    if is_plain:
        plain = mx.max if name == "max" else mx.min
        return lambda x: plain(x, axis=axes, keepdims=keepdims)
    shape = p.result(keepdims)
    if not _is_traced(x):
        run = folding(name, name, (("y", "m"),), p, x.dtype, (x.dtype,), shape=shape)
        return lambda x: run(x)[0]

    def rule(primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Any) -> Arrays:
        # Equal elements share the gradient; NaN equals nothing, and 0 · (dy / 0) is NaN.
        share = cotangents[0].astype(mx.float32) / outputs[1]
        expr = "(x == m ? 1.0f : 0.0f) * share"
        return (_gradient(name, expr, p, primals[0], m=outputs[0], share=share),)

    results = (("y", "m"), ("equals", "count"))
    run = folding(name, f"{name}_count", results, p, x.dtype, (x.dtype, mx.uint32), shape=shape)
    return _traced(name, run, rule, shape)


def _spread_out(name: str, root: bool, x: mx.array, axis: Axes, keepdims: bool, ddof: int) -> Way:
    axes = named_axes(name, x, axis)
    check_flag(name, "keepdims", keepdims)
    ddof = check_integer(name, "ddof", ddof)
    if not -(2**63) < ddof < 2**63:
        raise ValueError(f"[{name}] 'ddof' must be in (-2^63, 2^63) but got {ddof}.")
    dtype = _inexact(x.dtype)
    if _is_plain(x):
        plain = mx.std if root else mx.var

        def in_mlx(x: mx.array) -> mx.array:
            # Near 0, where MLX's squares keep their digits; no gradient depends on where.
            x = _real(x)
            away = x - mx.stop_gradient(mx.mean(x, axis=axes, keepdims=True))
            return plain(away, axis=axes, keepdims=keepdims, ddof=ddof).astype(dtype)

        return in_mlx
    p = planned(name, x, axes)
    shape = p.result(keepdims)
    if p.elements == 0:
        return _nothing(shape, float("nan"), dtype)
    divisor = float(builtins.max(p.elements - ddof, 0))
    scalars = (("divisor", scalar(divisor)),)
    results = (("y", "sqrt(m2 / divisor)" if root else "m2 / divisor"),)
    if not _is_traced(x):
        run = folding(name, "moments", results, p, x.dtype, (dtype,), scalars, "float", shape)
        return lambda x: run(x)[0]

    def rule(primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Any) -> Arrays:
        _, centre, variance = outputs
        dy, dcentre, dvariance = cotangents
        dy = dy.astype(mx.float32)
        dvariance = dvariance + (dy / (2 * mx.sqrt(variance)) if root else dy)
        slope = 2 * dvariance / divisor
        shift = dcentre / p.elements
        # The centre is that of what x is away from its last element, which is exact where the
        # elements are close to each other.
        last = mx.stop_gradient(p.last(primals[0])).astype(mx.float32)
        values = {"slope": slope, "last": last, "centre": centre, "shift": shift}
        expr = "slope * ((x - last) - centre) + shift"
        return (_gradient(name, expr, p, primals[0], **values),)

    kept = (("centre", "mean"), ("variance", "m2 / divisor"))
    dtypes = (dtype, mx.float32, mx.float32)
    run = folding(name, "moments", results + kept, p, x.dtype, dtypes, scalars, "float")
    return _traced(name, run, rule, shape)


_SUM = Remembered(partial(_total, "sum", False))
_MEAN = Remembered(partial(_total, "mean", True))
_MAX = Remembered(partial(_extreme, "max"))
_MIN = Remembered(partial(_extreme, "min"))
_VAR = Remembered(partial(_spread_out, "var", False))
_STD = Remembered(partial(_spread_out, "std", True))


def sum(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """The sum over one, several or all axes, as `mx.sum`.

        y = Σ x

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer. Half precision is added in
            float32. Neighbouring axes that are kept have at most 2^31 - 1 elements together; so in
            the other reductions, argmax and argmin, and scans.
        axis: an axis, several, or None for all.
        keepdims: keep the reduced axes, with size 1.

    Returns:
        The sums, in x's dtype; of bool and of integers below 32 bits in int32, or uint32 if
        unsigned. 0 where there is nothing to add. Integers wrap. Gradient for x.
    """
    return _SUM((x,), (axis, keepdims))  # type: ignore[no-any-return]


def mean(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """The mean over one, several or all axes, as `mx.mean`.

        y = Σ x / n

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer; added in float32, so that
            neither a half nor an integer overflows on the way.
        axis: an axis, several, or None for all.
        keepdims: keep the reduced axes, with size 1.

    Returns:
        The means, in x's dtype, or float32 of integers; NaN of nothing. Gradient for x.
    """
    return _MEAN((x,), (axis, keepdims))  # type: ignore[no-any-return]


def max(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """The largest element over one, several or all axes, as `mx.max`.

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer.
        axis: an axis, several, or None for all.
        keepdims: keep the reduced axes, with size 1.

    Returns:
        The largest elements, in x's dtype; NaN where there is a NaN. Gradient for x, which equal
        elements share, as in MLX; NaN for all where there is a NaN.

    Raises:
        ValueError: for a maximum of nothing.
    """
    return _MAX((x,), (axis, keepdims))  # type: ignore[no-any-return]


def min(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """The smallest element over one, several or all axes, as `mx.min`.

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer.
        axis: an axis, several, or None for all.
        keepdims: keep the reduced axes, with size 1.

    Returns:
        The smallest elements, in x's dtype; NaN where there is a NaN. Gradient for x, which equal
        elements share, as in MLX; NaN for all where there is a NaN.

    Raises:
        ValueError: for a minimum of nothing.
    """
    return _MIN((x,), (axis, keepdims))  # type: ignore[no-any-return]


def var(x: mx.array, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> mx.array:
    """The variance over one, several or all axes, as `mx.var`.

        y = Σ (x - mean)² / (n - ddof)

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer; computed in float32, in
            one walk that does not cancel (Welford 1962; Chan, Golub & LeVeque 1979).
        axis: an axis, several, or None for all.
        keepdims: keep the reduced axes, with size 1.
        ddof: what is taken off the number n of elements. With n ≤ ddof the result is infinite, or
            NaN where all elements are equal.

    Returns:
        The variances, in x's dtype, or float32 of integers; NaN of nothing. Gradient for x.
    """
    return _VAR((x,), (axis, keepdims, ddof))  # type: ignore[no-any-return]


def std(x: mx.array, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> mx.array:
    """The standard deviation over one, several or all axes, as `mx.std`.

        y = √(Σ (x - mean)² / (n - ddof))

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer; computed in float32.
        axis: an axis, several, or None for all.
        keepdims: keep the reduced axes, with size 1.
        ddof: what is taken off the number n of elements, as in `var`.

    Returns:
        The standard deviations, in x's dtype, or float32 of integers; NaN of nothing. Gradient for
        x, NaN where all elements are equal.
    """
    return _STD((x,), (axis, keepdims, ddof))  # type: ignore[no-any-return]


# ---- entries ------------------------------------------------------------------------------------


def over_last(function: Any) -> Any:
    """`function` over the last axis, which the tests of rows are about."""
    return update_wrapper(partial(function, axis=-1), function)


AXIS = Option("axis", -1, (0, (0, 1), None), passed="text")
KEEPDIMS = Option("keepdims", False, (True,), passed="text")
#: Rows, columns, and the two launches of a long axis.
CASES = (*ROWS, Case((130,), {"D": 10}, "many short rows, which no threads share"))
BENCHMARKS = (
    Case((4096,), {"D": 4096}),
    Case((4096,), {"D": 4096}, options={"axis": 0}),
    Case((4096,), {"D": 4096}, options={"axis": None}),
    Case((4,), {"D": 1 << 22}),
)

_FUNCTIONS = {
    "sum": (sum, sum_reference, "sum", "Σ x", mx.sum, ()),
    "mean": (mean, mean_reference, "mean", "Σ x / n", mx.mean, ()),
    "max": (max, max_reference, "largest element", "max x", mx.max, ("x", "output")),
    "min": (min, min_reference, "smallest element", "min x", mx.min, ("x", "output")),
    "var": (var, var_reference, "variance", "Σ (x - mean)² / (n - ddof)", mx.var, ("x",)),
    "std": (
        std, std_reference, "standard deviation", "√(Σ (x - mean)² / (n - ddof))", mx.std, ("x",)
    ),
}  # fmt: skip

for _name, (_function, _reference, _what, _formula, _baseline, _reads) in _FUNCTIONS.items():
    _torch = {
        "max": "torch.amax(x, axis if axis is not None else ())",
        "min": "torch.amin(x, axis if axis is not None else ())",
        "var": "torch.var(x, axis, correction=0)",
        "std": "torch.std(x, axis, correction=0)",
    }
    register(
        Op(
            name=_name,
            family="reductions",
            summary=f"{_what} over any axes",
            formula=_formula,
            function=over_last(_function),
            reference=_reference,
            arguments=(Argument("x", "(...)", NUMBERS),),
            options=(
                AXIS,
                KEEPDIMS,
                *((Option("ddof", 0, (1,)),) if _name in ("var", "std") else ()),
            ),
            outputs=("(*)",),
            baseline=over_last(_baseline),
            paper="Chan, Golub & LeVeque 1979" if _name in ("var", "std") else "",
            reads_backward=_reads,
            statistics=len(_reads),
            view_gradient=not _reads,
            torch=_torch.get(_name, f"torch.{_name}(x, axis)"),
            cases=CASES,
            benchmarks=BENCHMARKS,
        )
    )
