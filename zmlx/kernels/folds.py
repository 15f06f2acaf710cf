"""The kernels behind the reductions: a fold in one launch, or in two for a few long rows.

Axes that are no neighbours are folded one run of neighbours after the other: to states, which are
then merged. A transposition of what is folded would take longer than the folds. Many short rows are
folded side by side, a row by one thread: nothing is left over of a step then, or to be merged.

Bytes: x is read once, whatever the axis. A cut fold also writes and reads its partial states, at
most 256 a row. Results do not depend on the number of threads: parts follow from the shape, and
there are no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from .. import launch
from ..codegen import MONOIDS, Fold, Operand, Output
from ..interpret import expression_value
from ..pattern import PatternKernel
from ..transforms import Arrays
from .axes import Plan, element

_DTYPES = {
    "float": mx.float32,
    "int": mx.int32,
    "uint": mx.uint32,
    "int64_t": mx.int64,
    "uint64_t": mx.uint64,
}

#: Outputs of a fold: names to expressions of the state.
Results = tuple[tuple[str, str], ...]

#: A fold of an array: the arrays of its results.
Folding = Callable[[mx.array], Arrays]


def folding(
    name: str,
    op: str,
    results: Results,
    plan: Plan,
    dtype: mx.Dtype,
    dtypes: Sequence[mx.Dtype],
    scalars: tuple[tuple[str, mx.array], ...] = (),
    type_: str = "",
    shape: tuple[int, ...] | None = None,
) -> Folding:
    """How arrays of a dtype are folded over the axes of `plan`, in `type_` or that of the dtype: to
    an array for each of `results`, of the plan's shape or another of as many elements."""
    type_ = type_ or element(dtype)
    left, shape = plan.left, plan.shape if shape is None else shape
    if plan.apart:
        return _in_turn(name, op, results, plan, dtype, dtypes, scalars, type_, shape)
    parts = launch.fold_parts(plan.view, plan.columns)[0]
    key = (name, op, results, type_, plan.columns, tuple(n for n, _ in scalars))
    values = tuple(value for _, value in scalars)
    if parts == 1:
        rows, d = plan.view[0], plan.view[-1]
        short = not plan.columns and launch.rows_are_short(rows, d, len(MONOIDS[op].states))
        whole = _whole(*key, tuple(dtypes), short)
        return lambda x: _shaped(whole(plan.seen(x), *values), left, shape)
    first = parts_of(name, op, type_, plan.columns)
    merge = _merge(*key, tuple(dtypes))
    if len(MONOIDS[op].states) == 1:
        return lambda x: _shaped(merge(first(plan.seen(x)), *values), left, shape)
    return lambda x: _shaped(merge(*first(plan.seen(x)), *values), left, shape)


def _in_turn(
    name: str,
    op: str,
    results: Results,
    plan: Plan,
    dtype: mx.Dtype,
    dtypes: Sequence[mx.Dtype],
    scalars: tuple[tuple[str, mx.array], ...],
    type_: str,
    shape: tuple[int, ...],
) -> Folding:
    """`folding` of axes that are no neighbours."""

    def run(x: mx.array) -> Arrays:
        first = plan.first(x.shape)
        to_states = folding(
            name, op, _own(op), first, dtype, _dtypes(op, type_), (), type_, first.kept
        )
        states = to_states(x)
        if MONOIDS[op].shifted:
            # A run's mean is that of what its elements are away from its own last one.
            mine, last = (p.last(x).astype(mx.float32) for p in (first, plan))
            states = (states[0] + mx.stop_gradient(mine - last), *states[1:])
        merged = _merged_over(name, op, results, plan.rest(first), states, dtypes, scalars, type_)
        return _shaped(merged, plan.shape, shape)

    return run


def _merged_over(
    name: str,
    op: str,
    results: Results,
    plan: Plan,
    states: Arrays,
    dtypes: Sequence[mx.Dtype],
    scalars: tuple[tuple[str, mx.array], ...],
    type_: str,
) -> Arrays:
    """`folding` of states, which are merged over the axes of `plan`."""
    if len(states) == 1:  # what merges it takes an element, too
        run = folding(name, op, results, plan, states[0].dtype, dtypes, scalars, type_)
        return run(states[0])
    if plan.apart:
        first = plan.first(states[0].shape)
        merged = _merged_over(name, op, _own(op), first, states, _dtypes(op, type_), (), type_)
        states = _shaped(merged, first.shape, first.kept)
        return _merged_over(name, op, results, plan.rest(first), states, dtypes, scalars, type_)
    merge = _merge(
        name, op, results, type_, plan.columns, tuple(n for n, _ in scalars), tuple(dtypes)
    )
    outputs = merge(*(plan.seen(s) for s in states), *(value for _, value in scalars))
    return _shaped(outputs, plan.left, plan.shape)


def _own(op: str) -> Results:
    """The variables of the state as results."""
    return tuple((n, n) for n in MONOIDS[op].names)


def _dtypes(op: str, type_: str) -> list[mx.Dtype]:
    """The dtypes of the variables of the state."""
    return [_DTYPES[t] for t in MONOIDS[op].types(type_).values()]


def _shaped(outputs: mx.array | Arrays, before: tuple[int, ...], shape: tuple[int, ...]) -> Arrays:
    """The outputs, which have the shape `before`, in another."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs if before == shape else tuple([y.reshape(shape) for y in outputs])


def _outputs(results: Results) -> tuple[Output, ...]:
    return tuple(Output(name, expr, "per_row") for name, expr in results)


def _scalars(names: tuple[str, ...]) -> tuple[Operand, ...]:
    return tuple(Operand(name, "scalar") for name in names)


@cache
def _whole(
    name: str,
    op: str,
    results: Results,
    type_: str,
    columns: bool,
    scalars: tuple[str, ...],
    dtypes: tuple[mx.Dtype, ...],
    short: bool,
) -> PatternKernel:
    """A fold in one launch."""

    def reference(x: mx.array, *values: mx.array) -> Arrays:
        state = _state_of(op, x.astype(_DTYPES[type_]), _axis(columns))
        return _finished(results, state, dict(zip(scalars, values, strict=True)))

    pattern = Fold(op, _outputs(results), type_, columns, short=short, scalars=_scalars(scalars))
    return PatternKernel(f"{name}/whole", pattern, dtypes, reference=reference)


@cache
def parts_of(
    name: str, op: str, type_: str, columns: bool, for_scan: bool = False
) -> PatternKernel:
    """The states of all parts of the rows or columns."""

    def reference(x: mx.array) -> Arrays:
        axis = _axis(columns)
        parts = (launch.scan_parts if for_scan else launch.fold_parts)(x.shape, columns)[0]
        state = _state_of(op, x.astype(_DTYPES[type_]), axis)
        return tuple(
            mx.concatenate([value] + [_neutral(op, n, value)] * (parts - 1), axis=axis)
            for n, v in state.items()
            for value in [mx.expand_dims(v, axis)]
        )

    pattern = Fold(op, _outputs(_own(op)), type_, columns, cut=True, for_scan=for_scan)
    return PatternKernel(f"{name}/parts", pattern, _dtypes(op, type_), reference=reference)


@cache
def _merge(
    name: str,
    op: str,
    results: Results,
    type_: str,
    columns: bool,
    scalars: tuple[str, ...],
    dtypes: tuple[mx.Dtype, ...],
) -> PatternKernel:
    """The states of the parts, merged."""
    names = MONOIDS[op].names

    def reference(*arrays: mx.array) -> Arrays:
        states = dict(zip(names, arrays[: len(names)], strict=True))
        merged = _merged(op, states, _axis(columns))
        return _finished(results, merged, dict(zip(scalars, arrays[len(names) :], strict=True)))

    pattern = Fold(op, _outputs(results), type_, columns, merges=True, scalars=_scalars(scalars))
    return PatternKernel(f"{name}/merge", pattern, dtypes, reference=reference)


# ---- the same in plain MLX ----------------------------------------------------------------------


def _axis(columns: bool) -> int:
    return -2 if columns else -1


def _state_of(op: str, x: mx.array, axis: int) -> dict[str, mx.array]:
    """The state of the elements along an axis."""
    if op == "sum":
        return {"total": x.sum(axis=axis)}
    if op == "moments":
        x = x - mx.stop_gradient(mx.take(x, mx.array([x.shape[axis] - 1]), axis=axis))
        mean = x.mean(axis=axis, keepdims=True)
        m2 = ((x - mean) ** 2).sum(axis=axis)
        return {
            "mean": mean.squeeze(axis),
            "m2": m2,
            "count": mx.full(m2.shape, x.shape[axis], dtype=mx.float32),
        }
    extreme, at = (mx.max, mx.argmax) if op.startswith("max") else (mx.min, mx.argmin)
    m = extreme(x, axis=axis)
    if op.endswith("_at"):
        return {"m": m, "at": at(x, axis=axis)}
    if op.endswith("_count"):
        return {"m": m, "count": (x == mx.expand_dims(m, axis)).sum(axis=axis).astype(mx.uint32)}
    return {"m": m}


def _neutral(op: str, name: str, value: mx.array) -> mx.array:
    """What leaves `value` as it is when it is merged."""
    return value if name in ("m", "at") else mx.zeros_like(value)


def _merged(op: str, states: dict[str, mx.array], axis: int) -> dict[str, mx.array]:
    if op == "sum":
        return {"total": states["total"].sum(axis=axis)}
    if op == "moments":
        weight = states["count"]
        count = weight.sum(axis=axis, keepdims=True)
        mean = (weight * states["mean"]).sum(axis=axis, keepdims=True) / count
        m2 = (states["m2"] + weight * (states["mean"] - mean) ** 2).sum(axis=axis)
        return {"mean": mean.squeeze(axis), "m2": m2, "count": count.squeeze(axis)}
    extreme, at = (mx.max, mx.argmax) if op.startswith("max") else (mx.min, mx.argmin)
    found = {"m": extreme(states["m"], axis=axis)}
    if op.endswith("_at"):
        place = mx.expand_dims(at(states["m"], axis=axis), axis)
        found["at"] = mx.take_along_axis(states["at"], place, axis=axis).squeeze(axis)
    if op.endswith("_count"):
        is_extreme = states["m"] == mx.expand_dims(found["m"], axis)
        found["count"] = mx.where(is_extreme, states["count"], 0).sum(axis=axis).astype(mx.uint32)
    return found


def _finished(
    results: Results, state: dict[str, mx.array], scalars: dict[str, mx.array]
) -> tuple[Any, ...]:
    values = {**state, **scalars}
    return tuple(expression_value(expr, values) for _, expr in results)
