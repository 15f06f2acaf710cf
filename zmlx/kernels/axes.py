"""How an op over any axes becomes one over rows or over columns.

Axes of size 1 count for nothing, and neighbouring axes that are both reduced, or both kept, are
one. What is left of most calls is (rows, D) with D reduced, or (batches, rows, D) with the middle
axis reduced; neither moves an element. Where nothing is left to reduce, each element is a column.
Reduced axes that are no neighbours, such as 0 and 2 of three, go one run of neighbours after the
other, the last one first (see `folds.py`), and so do neighbours that are too long for one axis.
Neighbours that are kept must not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from ..arguments import Argument, check_array, check_axis

Axes = int | Sequence[int] | None

#: What MLX takes several axes from: no set, mapping or iterator, and no text.
_SEQUENCES = (Sequence, np.ndarray, mx.array)
_BYTES = (str, bytes, bytearray, memoryview)

#: What MLX reduces, other than complex numbers and float64.
INTEGERS = (
    mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64,
)  # fmt: skip
NUMBERS = (mx.float32, mx.float16, mx.bfloat16, *INTEGERS)

X = Argument("x", "(...)", NUMBERS)

LONGEST = 2**31 - 1  # axis that MLX has

_ELEMENTS = {
    **dict.fromkeys((mx.bool_, mx.int8, mx.int16, mx.int32), "int"),
    **dict.fromkeys((mx.uint8, mx.uint16, mx.uint32), "uint"),
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
}


def element(dtype: mx.Dtype) -> str:
    """The type that elements of a dtype are computed in."""
    return _ELEMENTS.get(dtype, "float")


class Plan(NamedTuple):
    """Axes that are reduced, the last of them that are neighbours, the shape that the kernel sees
    (none where more than neighbours are reduced), the shape of the result without and with the
    reduced axes, and the number of elements in each reduction."""

    axes: tuple[int, ...]
    run: tuple[int, ...]
    view: tuple[int, ...]
    shape: tuple[int, ...]
    kept: tuple[int, ...]
    elements: int

    @property
    def columns(self) -> bool:
        """Whether the kernel reduces the middle axis of three."""
        return len(self.view) == 3

    @property
    def left(self) -> tuple[int, ...]:
        """What the kernel leaves of the shape that it sees."""
        return (*self.view[:-2], self.view[-1]) if self.columns else self.view[:1]

    @property
    def apart(self) -> bool:
        """Whether the axes are no neighbours, so that no kernel reduces them all."""
        return self.run != self.axes

    def result(self, keepdims: bool) -> tuple[int, ...]:
        """The shape of the result."""
        return self.kept if keepdims and self.axes else self.shape

    def first(self, size: Sequence[int]) -> Plan:
        """How the last run of neighbours is reduced; `rest` follows."""
        return plan(tuple(size), self.run)

    def rest(self, first: Plan) -> Plan:
        """How all axes are reduced of what `first` leaves, its own with size 1."""
        return plan(first.kept, self.axes)

    def last(self, x: mx.array) -> mx.array:
        """The last element of each reduction, with the reduced axes."""
        ends = slice(-1, None), slice(None)
        return x[tuple(ends[a not in self.axes] for a in range(x.ndim))]

    def seen(self, x: mx.array) -> mx.array:
        """x as the kernel sees it."""
        return x if x.shape == self.view else x.reshape(self.view)


def named_axes(
    op: str,
    x: mx.array,
    axis: Axes,
    dtypes: Sequence[mx.Dtype] = NUMBERS,
    *,
    several: bool = True,
) -> tuple[int, ...]:
    """The axes that `axis` names, `several` only where allowed, counted from the front and in
    order."""
    check_array(op, "x", x, dtypes)
    if axis is None:
        return tuple(range(x.ndim))
    wanted = "an int, ints or None" if several else "an int or None"
    if type(axis) is int or not several:
        return (check_axis(op, x, cast(int, axis), wanted),)
    axes = tuple(sorted(check_axis(op, x, a, wanted) for a in _each(axis)))
    if len(set(axes)) != len(axes):
        raise ValueError(f"[{op}] 'axis' must name different axes but got {axis}.")
    return axes


def _each(axis: Any) -> tuple[Any, ...]:
    """The elements of a sequence; what is none, such as an array of no axes, as it is."""
    is_sequence = isinstance(axis, _SEQUENCES) and not isinstance(axis, _BYTES)
    if not is_sequence or getattr(axis, "ndim", 1) == 0:
        return (axis,)
    # An element of MLX's arrays is an index to Python from MLX 0.32.3 on.
    return tuple(cast(Any, axis).tolist() if isinstance(axis, mx.array) else axis)


@lru_cache(maxsize=4096)
def plan(size: tuple[int, ...], axes: tuple[int, ...]) -> Plan:
    """How an array of a size is reduced over axes."""
    shape = tuple(n for a, n in enumerate(size) if a not in axes)
    kept = tuple(1 if a in axes else n for a, n in enumerate(size))
    count = prod(size[a] for a in axes)
    # Neighbours that are all reduced, or all kept.
    longer = (a for a, n in enumerate(size) if n != 1)
    runs = [(is_in, tuple(run)) for is_in, run in groupby(longer, axes.__contains__)]
    reduced = [i for i, (is_reduced, _) in enumerate(runs) if is_reduced]
    last = _within(size, runs[reduced[-1]][1]) if reduced else ()
    if not reduced:  # of columns a CPU takes many in a vector register, of rows one at a time
        return Plan(axes, axes, (1, 1, prod(shape)), shape, kept, 1)
    if len(reduced) > 1 or last != runs[reduced[0]][1]:
        return Plan(axes, last, (), shape, kept, count)
    if reduced == [len(runs) - 1]:
        return Plan(axes, axes, (prod(shape), count), shape, kept, count)
    before, after = prod(size[: last[0]]), prod(size[last[-1] + 1 :])
    return Plan(axes, axes, (before, count, after), shape, kept, count)


def planned(op: str, x: mx.array, axes: tuple[int, ...]) -> Plan:
    """`plan` of an array, or an error where neighbours that are kept do not fit into one axis."""
    size = tuple(x.shape)
    whole = plan(size, axes)
    if x.size > LONGEST:
        step = whole
        while step.apart:
            first = step.first(size)
            _check_kept(op, x, first)
            size, step = first.kept, step.rest(first)
        _check_kept(op, x, step)
    return whole


def _check_kept(op: str, x: mx.array, step: Plan) -> None:
    if max(step.view) > LONGEST:
        raise ValueError(
            f"[{op}] 'x' must have at most {LONGEST} elements in neighbouring axes that are kept "
            f"but got {tuple(x.shape)}."
        )


def _within(size: tuple[int, ...], run: tuple[int, ...]) -> tuple[int, ...]:
    """The last axes of a run that fit into one."""
    while prod(size[a] for a in run) > LONGEST:
        run = run[1:]
    return run
