"""How an op over any axes becomes one over rows or over columns.

Axes of size 1 count for nothing, and neighbouring axes that are both reduced, or both kept, are
one. What is left of most calls is (rows, D) with D reduced, or (batches, rows, D) with the middle
axis reduced; neither moves an element. Where nothing is left to reduce, each element is a column.
Reduced axes that are neither neighbours nor last, such as 0 and 2 of three, are transposed to the
end, which copies, unless they can be folded one run after the other (see `folds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, cast

import mlx.core as mx

from ..arguments import Argument, check_array, check_axis

Axes = int | Sequence[int] | None

#: What MLX reduces, other than complex numbers and float64.
INTEGERS = (
    mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64,
)  # fmt: skip
NUMBERS = (mx.float32, mx.float16, mx.bfloat16, *INTEGERS)

X = Argument("x", "(...)", NUMBERS)

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
    """Axes that are reduced, the order of a transposition or None, the shape that the kernel sees,
    the shape of the result without and with the reduced axes, and the number of elements in each
    reduction."""

    axes: tuple[int, ...]
    order: tuple[int, ...] | None
    view: tuple[int, ...]
    shape: tuple[int, ...]
    kept: tuple[int, ...]
    elements: int

    @property
    def columns(self) -> bool:
        """Whether the kernel reduces the middle axis of three."""
        return len(self.view) == 3

    def seen(self, x: mx.array) -> mx.array:
        """x as the kernel sees it."""
        if self.order is not None:
            x = x.transpose(self.order)
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
    try:
        given = tuple(cast(Sequence[int], axis))
    except TypeError:  # a number of another kind, or none
        given = (cast(int, axis),)
    axes = tuple(sorted(check_axis(op, x, a, wanted) for a in given))
    if len(set(axes)) != len(axes):
        raise ValueError(f"[{op}] 'axis' must name different axes but got {axis}.")
    return axes


@lru_cache(maxsize=4096)
def plan(size: tuple[int, ...], axes: tuple[int, ...]) -> Plan:
    """How an array of a size is reduced over axes."""
    shape = tuple(n for a, n in enumerate(size) if a not in axes)
    kept = tuple(1 if a in axes else n for a, n in enumerate(size))
    count = prod(size[a] for a in axes)
    runs: list[tuple[bool, int]] = []  # reduced or not, elements
    for a, n in enumerate(size):
        if n == 1:
            continue
        if runs and runs[-1][0] == (a in axes):
            runs[-1] = (a in axes, runs[-1][1] * n)
        else:
            runs.append((a in axes, n))
    reduced = [i for i, (is_reduced, _) in enumerate(runs) if is_reduced]
    if not reduced:  # of columns a CPU takes many in a vector register, of rows one at a time
        return Plan(axes, None, (1, 1, prod(shape)), shape, kept, 1)
    if reduced == [len(runs) - 1]:
        return Plan(axes, None, (prod(shape), count), shape, kept, count)
    if len(reduced) == 1:
        before = prod(n for _, n in runs[: reduced[0]])
        after = prod(n for _, n in runs[reduced[0] + 1 :])
        return Plan(axes, None, (before, count, after), shape, kept, count)
    order = (*(a for a in range(len(size)) if a not in axes), *axes)
    return Plan(axes, order, (prod(shape), count), shape, kept, count)
