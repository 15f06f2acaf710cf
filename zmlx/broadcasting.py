"""Functions of arrays that broadcast, as elementwise kernels, and the sums that are the gradients
of what was broadcast.

An operand that has every element is read as it is; a value per row, a row for all or a row for some
is read where it lies, so that nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .arguments import FLOATING, check_array, number_for
from .codegen import (
    Columnwise,
    Elementwise,
    Let,
    Operand,
    Output,
    Pass,
    Reduce,
    Rowwise,
    name_beside,
)
from .metal import scalar
from .packed import MOST_BUFFERS
from .pattern import DtypeRule, PatternKernel
from .remembered import Remembered, Way
from .targets import cpu
from .transforms import Arrays

#: The dtype of a result, or for each operand whether it is one of those that decide it.
Decides = mx.Dtype | tuple[bool, ...]

#: Numbers that a launch takes beside its arrays, at most.
_MOST_NUMBERS = 3

_COLUMN_SUM = PatternKernel(
    "sum_rows", Columnwise((Operand("x"),), (Output("y", "x"),)), (mx.float32,)
)
_CHUNK_SUM = PatternKernel(
    "sum_chunks", Columnwise((Operand("x"),), (Output("y", "x"),)), (mx.float32,), chunks=1
)
_ROW_SUM = PatternKernel(
    "sum_row",
    Rowwise(
        (Operand("x"),),
        (Output("y", "total", "per_row"),),
        (Pass((Reduce("total", "sum", "x"),)),),
    ),
    (mx.float32,),
)


def sum_chunks(partial: mx.array, like: mx.array) -> mx.array:
    """The second launch of a sum over rows: (chunks, D) partial sums to the shape and dtype of the
    parameter whose gradient they are."""
    return _CHUNK_SUM(partial).reshape(like.shape).astype(like.dtype)  # type: ignore[no-any-return]


def sum_rows(x: mx.array, like: mx.array) -> mx.array:
    """The sum of (*, D) over all leading axes, accumulated in float32 in a fixed order."""
    return sum_chunks(_COLUMN_SUM(x), like)


#: Elements of a row from which on a value per row, or a row that serves several, is read as such: a
#: kernel of shorter rows is not faster than one of elements.
_FEWEST_IN_A_ROW = 8

#: Up to how many rows their numbers are kept from call to call: 16 of those take 16 MB.
_KEPT_ROW_NUMBERS = 1 << 18


class BroadcastFunction:
    """A function of arrays that broadcast, one elementwise kernel per way in which they do.

    A subclass builds the kernel for the kinds of its operands ("full" or, where another one is of
    rows, "row"; "column"; "per_row", without its last axis; "shared", rows of which each belongs to
    several; "scalar") and for the dtype of a result: a dtype, or which operands decide it, which
    are all, or where an array is floating, those that are no plain numbers, as in MLX. After its
    operands the kernel takes, for each that is shared, the number of the one that belongs to each
    row.
    """

    def __init__(self, name: str, inputs: Mapping[str, tuple[mx.Dtype, ...]]) -> None:
        self.__name__ = self.name = name
        self.inputs = tuple(inputs)
        self._dtypes = tuple(inputs.values())
        self._kernels: dict[Any, PatternKernel] = {}
        self._looked_at = Remembered(self._find)

    def __call__(self, *arrays: mx.array | float, **named: mx.array | float) -> Any:
        """The outputs: an array, or a tuple of several. Inputs may be given by name."""
        if named:
            rest = self.inputs[len(arrays) :]
            if set(named) != set(rest):
                raise TypeError(
                    f"[{self.name}] takes ({', '.join(self.inputs)}) but got {len(arrays)} of them "
                    f"by position and {', '.join(named)} by name."
                )
            arrays = (*arrays, *(named[n] for n in rest))
        if len(arrays) != len(self.inputs):
            raise TypeError(
                f"[{self.name}] takes {len(self.inputs)} arrays ({', '.join(self.inputs)}) but got "
                f"{len(arrays)}."
            )
        given = tuple([isinstance(x, mx.array) for x in arrays])
        if not all(given):
            arrays = tuple(
                x if is_array else self._number(name, x, dtypes)
                for name, x, dtypes, is_array in zip(
                    self.inputs, arrays, self._dtypes, given, strict=True
                )
            )
        return self._looked_at(arrays, given)  # type: ignore[arg-type]

    def _find(self, *values_and_given: Any) -> Way:
        """How values of these shapes and dtypes are computed, and which of them were arrays."""
        count = len(self.inputs)
        values, given = values_and_given[:count], values_and_given[count:]
        for name, x, dtypes in zip(self.inputs, values, self._dtypes, strict=True):
            check_array(self.name, name, x, dtypes)
        shape = self._broadcast_shape(values)
        tracing = bool(cpu.maybe_tracing(values))
        any_shape = tracing and cpu.any_shape(values)
        if any_shape:
            # Kinds, and what is expanded to a shape, hold for this one alone.
            laid = [_Laid("full", widens=_is_widened(x, shape)) for x in values]
        else:
            laid = [_laid(x, shape, tracing) for x in values]
        if "full" not in [x.kind for x in laid]:
            laid[0] = _expanding("full", values[0], shape, tracing)
        if each_kind([x.kind for x in laid]) == "row":
            laid = [x._replace(kind="row") if x.kind == "full" else x for x in laid]
        kinds = tuple([x.kind for x in laid])
        # Of operands that are shared, the number of the one that belongs to each row.
        numbered = [
            (tuple(x.shape[:-1]), shape[:-1])
            for x, kind in zip(values, kinds, strict=True)
            if kind == "shared"
        ]
        decides: Decides = given
        floating = [
            x.dtype for x, is_array in zip(values, given, strict=True)
            if is_array and x.dtype in FLOATING
        ]  # fmt: skip
        if tracing and any(x.widens for x in laid):
            decides = reduce(mx.result_type, floating)
        elif not floating:
            decides = (True,) * len(values)
        key = kinds, decides
        if key not in self._kernels:
            self._kernels[key] = self._build(*key)
        kernel, changes = self._kernels[key], [x.change for x in laid]
        if any_shape:
            return lambda *values: kernel(
                *mx.broadcast_arrays(*[_widened(x, shape) for x in values])
            )
        if not numbered and changes == [None] * count:
            return kernel

        def way(*values: mx.array) -> Any:
            operands = [
                x if change is None else change(x)
                for x, change in zip(values, changes, strict=True)
            ]
            return kernel(*operands, *[_row_numbers(own, lead) for own, lead in numbered])

        return way

    def _number(self, name: str, value: Any, dtypes: tuple[mx.Dtype, ...]) -> Any:
        """A number as the argument, a float where the argument is one; else `value`."""
        number = number_for(self.name, name, value, dtypes)
        return value if number is None else scalar(number)

    def _broadcast_shape(self, values: Sequence[mx.array]) -> tuple[int, ...]:
        shape: list[int] = []
        for name, x in zip(self.inputs, values, strict=True):
            size = max(len(shape), x.ndim)
            old = [1] * (size - len(shape)) + shape
            new = [1] * (size - x.ndim) + list(x.shape)
            if any(a != b and 1 not in (a, b) for a, b in zip(old, new, strict=True)):
                raise ValueError(
                    f"[{self.name}] '{name}' must broadcast with {tuple(shape)} but got "
                    f"{tuple(x.shape)}."
                )
            shape = [b if a == 1 else a for a, b in zip(old, new, strict=True)]
        return tuple(shape)

    def _build(self, kinds: tuple[str, ...], decides: Decides) -> PatternKernel:
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Any:
        """Itself, since nothing of a function changes: a model that holds one can be copied."""
        return self


def each_kind(kinds: Sequence[str]) -> str:
    """The kind of an operand that has every element."""
    return "row" if {"column", "per_row", "shared"} & set(kinds) else "full"


def operands_of(
    types: Mapping[str, str], kinds: Sequence[str], taken: Iterable[str]
) -> tuple[Operand, ...]:
    """Operands of these names, types and kinds, and after them the row numbers of those that are
    shared, under names that are not `taken`."""
    taken = set(taken)
    operands, numbers = [], []
    for (name, type_), kind in zip(types.items(), kinds, strict=True):
        number = name_beside(f"{name}_number", taken) if kind == "shared" else ""
        if number:
            numbers.append(Operand(number, "per_row", "uint"))
        operands.append(Operand(name, "row" if number else kind, type_, index=number))
    return (*operands, *numbers)


def elementwise_pattern(
    inputs: tuple[Operand, ...], outputs: tuple[Output, ...], lets: tuple[Let, ...]
) -> Elementwise | Rowwise:
    """The pattern that takes operands of these kinds."""
    if outputs[0].kind == "full":
        return Elementwise(inputs, outputs, lets)
    return Rowwise(inputs, outputs, lets=lets)


def gradient_dtypes(
    inputs: Sequence[str], kinds: Sequence[str], each: str
) -> tuple[DtypeRule, ...]:
    """The dtype of each gradient; one that is summed over rows, because its kind is not that of
    `each` element, stays in float32 until then."""
    return tuple((n,) if k == each else mx.float32 for n, k in zip(inputs, kinds, strict=True))


class _Laid(NamedTuple):
    """How an array takes part in an elementwise kernel: its kind, what is done with it before, and
    whether it is expanded in another dtype than its own."""

    kind: str
    change: Callable[[mx.array], mx.array] | None = None
    widens: bool = False


def _is_widened(x: mx.array, shape: tuple[int, ...]) -> bool:
    return x.dtype in (mx.float16, mx.bfloat16) and tuple(x.shape) != shape


def _widened(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    """`x` in the dtype that it is expanded to `shape` in: MLX adds up the gradient in it, and half
    precision is expanded in float32, so that its gradient is rounded once."""
    return x.astype(mx.float32) if _is_widened(x, shape) else x


def _expanding(kind: str, x: mx.array, shape: tuple[int, ...], tracing: bool) -> _Laid:
    """An array that is expanded to `shape`, for a gradient where it is traced."""
    if tracing:
        return _Laid(
            kind, lambda x: mx.broadcast_to(_widened(x, shape), shape), _is_widened(x, shape)
        )
    return _Laid(kind, lambda x: mx.broadcast_to(x, shape))


def _laid(x: mx.array, shape: tuple[int, ...], tracing: bool) -> _Laid:
    """How an array takes part in an elementwise kernel over `shape`."""
    own = tuple(x.shape)
    if own == shape and shape:
        return _Laid("full")
    if x.size == 1:
        return _Laid("scalar", None if own == () else lambda x: x.reshape(()))
    if prod(own[:-1]) == 1 and own[-1] == shape[-1]:
        return _Laid("column", None if len(own) == 1 else mx.flatten)
    if shape[-1] < _FEWEST_IN_A_ROW:
        return _expanding("full", x, shape, tracing)
    if own[-1] != 1:
        return _Laid("shared")
    values = (*shape[:-1], 1)
    if own == values:
        return _Laid("per_row", lambda x: x.squeeze(-1))
    _, expand, widens = _expanding("per_row", x, values, tracing)
    assert expand is not None
    return _Laid("per_row", lambda x: expand(x).squeeze(-1), widens)


def _row_numbers(own: tuple[int, ...], lead: tuple[int, ...]) -> mx.array:
    """For each of the rows of `lead` the number of the one of `own` that broadcasts to it."""
    if prod(lead) <= _KEPT_ROW_NUMBERS:
        return _kept_row_numbers(own, lead)
    return mx.broadcast_to(mx.arange(prod(own), dtype=mx.uint32).reshape(own), lead)


@lru_cache(maxsize=16)
def _kept_row_numbers(own: tuple[int, ...], lead: tuple[int, ...]) -> mx.array:
    numbers = np.arange(prod(own), dtype=np.uint32).reshape(own)
    return mx.array(np.ascontiguousarray(np.broadcast_to(numbers, lead)))


def reduced(gradient: mx.array, primal: mx.array, kind: str) -> mx.array:
    """A gradient per element as the gradient of an operand that was broadcast."""
    if kind == "scalar":
        return gradient.sum().astype(primal.dtype)
    if kind == "per_row":
        return _ROW_SUM(gradient).astype(primal.dtype)  # type: ignore[no-any-return]
    if kind == "shared":
        own = (1,) * (gradient.ndim - primal.ndim) + tuple(primal.shape)
        axes = tuple(a for a, n in enumerate(own) if n != gradient.shape[a])
        return gradient.sum(axis=axes).reshape(primal.shape).astype(primal.dtype)
    return sum_rows(gradient, primal) if kind == "column" else gradient


def gradients_of(
    backward: Callable[[tuple[int, ...]], Callable[..., Any]],
    wanted: Sequence[int],
    primals: Arrays,
    cotangents: Sequence[mx.array],
    kinds: Sequence[str],
) -> list[mx.array | None]:
    """One entry per primal, by the kernels that `backward` has for some of the `wanted` ones; of
    many arrays each takes as many as there are buffers for."""
    room = max(1, MOST_BUFFERS - _MOST_NUMBERS - len(primals) - len(cotangents))
    found: list[mx.array | None] = [None] * len(primals)
    for begin in range(0, len(wanted), room):
        which = tuple(wanted[begin : begin + room])
        got = backward(which)(*primals, *cotangents)
        several = (got,) if len(which) == 1 else got
        for i, gradient in zip(which, several, strict=True):
            found[i] = reduced(gradient, primals[i], kinds[i])
    return found


def gradient_names(inputs: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """What a kernel that has `others` too calls the gradients of `inputs`."""
    found: dict[str, str] = {}
    names = [*inputs, *others]
    for x in inputs:
        found[x] = name_beside(f"d_{x}", [*names, *found.values()])
    return found


def unused_name(stem: str, taken: Iterable[str]) -> str:
    """`stem`, with underscores behind it where it is `taken`."""
    while stem in taken:
        stem += "_"
    return stem
