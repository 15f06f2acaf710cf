"""Functions of arrays that broadcast, as elementwise kernels, and the sums that are the gradients
of what was broadcast.

An operand that has every element is read as it is; a value per row, a row for all or a row for some
is read where it lies, so that nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from math import prod
from typing import Any

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
        values = [
            x if isinstance(x, mx.array) else self._number(name, x, dtypes)
            for name, x, dtypes in zip(self.inputs, arrays, self._dtypes, strict=True)
        ]
        for name, x, dtypes in zip(self.inputs, values, self._dtypes, strict=True):
            check_array(self.name, name, x, dtypes)
        shape = self._broadcast_shape(values)
        tracing = cpu.maybe_tracing(tuple(values))
        expanded = _expanded if tracing else mx.broadcast_to
        kinds: list[str] = []
        operands: list[mx.array] = []
        if tracing and cpu.any_shape(tuple(values)):
            # Kinds, and what is expanded to a shape, hold for this one alone.
            kinds = ["full"] * len(values)
            operands = list(mx.broadcast_arrays(*[_widened(x, shape) for x in values]))
        else:
            for x in values:
                kind, operand = _operand(x, shape, expanded)
                kinds.append(kind)
                operands.append(operand)
        if "full" not in kinds:
            operands[0] = expanded(values[0], shape)
            kinds[0] = "full"
        is_widened = tracing and any(
            o.dtype != x.dtype for o, x in zip(operands, values, strict=True)
        )
        if each_kind(kinds) == "row":
            kinds = ["row" if k == "full" else k for k in kinds]
        operands += [
            _row_numbers(tuple(x.shape[:-1]), shape[:-1])
            for x, kind in zip(values, kinds, strict=True)
            if kind == "shared"
        ]
        decides: Decides = tuple(isinstance(x, mx.array) for x in arrays)
        floating = [x.dtype for x in arrays if isinstance(x, mx.array) and x.dtype in FLOATING]
        if is_widened:
            decides = reduce(mx.result_type, floating)
        elif not floating:
            decides = (True,) * len(values)
        key = tuple(kinds), decides
        if key not in self._kernels:
            self._kernels[key] = self._build(*key)
        return self._kernels[key](*operands)

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


def _widened(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    """`x` in the dtype that it is expanded to `shape` in: MLX adds up the gradient in it, and half
    precision is expanded in float32, so that its gradient is rounded once."""
    is_half = x.dtype in (mx.float16, mx.bfloat16) and tuple(x.shape) != shape
    return x.astype(mx.float32) if is_half else x


def _expanded(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    return mx.broadcast_to(_widened(x, shape), shape)


def _operand(
    x: mx.array,
    shape: tuple[int, ...],
    expanded: Callable[[mx.array, tuple[int, ...]], mx.array],
) -> tuple[str, mx.array]:
    """How an array takes part in an elementwise kernel over `shape`; where it has to be expanded,
    by `expanded`."""
    if tuple(x.shape) == shape and shape:
        return "full", x
    if x.size == 1:
        return "scalar", x.reshape(())
    if prod(x.shape[:-1]) == 1 and x.shape[-1] == shape[-1]:
        return "column", x.flatten()
    if shape[-1] >= _FEWEST_IN_A_ROW:
        if x.shape[-1] == 1:
            values = (*shape[:-1], 1)
            return "per_row", (x if x.shape == values else expanded(x, values)).squeeze(-1)
        return "shared", x
    return "full", expanded(x, shape)


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
