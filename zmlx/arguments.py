"""Declared arguments of an op, and the one check that all ops share.

A shape is symbolic: `(*, D)` is any leading axes and a last axis D, `(D,)` that same D, `(*, 2D)` a
last axis of even length, `(...)` any shape, `()` a scalar. Symbols, `*` and `...` must agree
between the arguments of a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from operator import index
from struct import pack, unpack
from typing import Any

import mlx.core as mx

FLOATING = (mx.float32, mx.float16, mx.bfloat16)
INDICES = (mx.int32, mx.uint32, mx.int64)
INTEGERS = (*INDICES, mx.uint64, mx.int16, mx.uint16, mx.int8, mx.uint8)
BOOLEAN = (mx.bool_,)

#: From here on a number is infinite as a float32, which kernels take numbers as.
_TOO_LARGE = 2.0**128 - 2.0**103

#: A name that Metal can take.
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Argument:
    """An array argument: its symbolic shape, the dtypes that it may have, whether it has a
    gradient, and in `values` which elements are allowed where only the device can check them."""

    name: str
    shape: str = "(*, D)"
    dtypes: tuple[mx.Dtype, ...] = FLOATING
    differentiable: bool = True
    optional: bool = False
    values: str = ""


@cache
def dimensions(shape: str) -> tuple[tuple[int, str], ...]:
    """Factor and symbol of each axis: `(*, 2D)` is ((0, "*"), (2, "D")). A number has no symbol."""
    axes = []
    for item in shape.strip("()").split(","):
        text = item.strip()
        if not text:
            continue
        match = re.fullmatch(r"(\*|\.\.\.)|(\d*)([A-Za-z]?\w*)", text)
        assert match is not None, shape
        if match[1]:
            axes.append((0, match[1]))
        else:
            axes.append((int(match[2] or 1), match[3]))
    return tuple(axes)


def dtype_name(dtype: mx.Dtype) -> str:
    """The name without its module."""
    return str(dtype).rsplit(".", 1)[-1]


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def check_array(op: str, name: str, value: Any, dtypes: Sequence[mx.Dtype] = FLOATING) -> None:
    """Raises unless `value` is an array of one of `dtypes`."""
    if not isinstance(value, mx.array):
        raise TypeError(f"[{op}] '{name}' must be an mx.array but got {type(value).__name__}.")
    if value.dtype not in dtypes:
        wanted = _one_of([dtype_name(d) for d in dtypes])
        raise ValueError(
            f"[{op}] '{name}' must have dtype {wanted} but got {dtype_name(value.dtype)}."
        )


def check(op: str, arguments: Sequence[Argument], values: Sequence[mx.array | None]) -> None:
    """Raises `[op] 'argument' must … but got …` for the first value that does not fit."""
    bound: dict[str, int] = {}
    lead: tuple[int, ...] | None = None
    for argument, value in zip(arguments, values, strict=True):
        if value is None and argument.optional:
            continue
        check_array(op, argument.name, value, argument.dtypes)
        assert value is not None
        axes = dimensions(argument.shape)
        fixed = [a for a in axes if a[1] not in ("*", "...")]
        free = len(fixed) != len(axes)
        shape = tuple(value.shape)
        head = shape[: len(shape) - len(fixed)]
        fits = len(shape) >= len(fixed) if free else len(shape) == len(fixed)
        if fits and free and lead is not None:
            fits = head == lead
        expected: list[str] = []
        for (factor, symbol), size in zip(fixed, shape[len(head) :] if fits else (), strict=False):
            if symbol and symbol not in bound and size % factor == 0:
                bound[symbol] = size // factor
            fits = fits and size == (factor * bound[symbol] if symbol in bound else factor)
        if free and lead is None and fits:
            lead = head
        if not fits:
            if free:
                expected += [str(n) for n in lead] if lead is not None else [axes[0][1]]
            for factor, symbol in fixed:
                prefix = "" if factor == 1 and symbol else str(factor)
                known = str(factor * bound[symbol]) if symbol in bound else prefix + symbol
                expected.append(known)
            text = "(" + ", ".join(expected) + ("," if len(expected) == 1 else "") + ")"
            raise ValueError(f"[{op}] '{argument.name}' must have shape {text} but got {shape}.")


def check_names(op: str, argument: str, names: Any) -> tuple[str, ...]:
    """`names` as a tuple of identifiers without repeats, or an error. A text is none, although
    Python takes it for its letters."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"[{op}] '{argument}' must be a sequence of names but got {names!a}.")
    checked = tuple(names)
    for name in checked:
        if not isinstance(name, str) or not IDENTIFIER.fullmatch(name):
            raise ValueError(f"[{op}] '{argument}' must be identifiers but got {name!a}.")
    if len(set(checked)) != len(checked):
        raise ValueError(f"[{op}] '{argument}' must not repeat a name but got {list(checked)}.")
    return checked


def check_identifier(op: str, argument: str, name: Any) -> None:
    """Raises unless `name` is an identifier."""
    if not isinstance(name, str) or not IDENTIFIER.fullmatch(name):
        raise ValueError(f"[{op}] '{argument}' must be an identifier but got {name!a}.")


def python_number(value: Any) -> bool | int | float | None:
    """A number of Python or of NumPy as Python's own; None for anything else."""
    kind = type(value)
    if kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def float32(number: float) -> float:
    """`number`, not beyond the range of a float32, rounded to one."""
    return float(unpack("f", pack("f", number))[0])


def _number(op: str, name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"[{op}] '{name}' must be a number but got {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"[{op}] '{name}' must be in the range of a float but got a larger "
            f"{type(value).__name__}."
        ) from None


def check_number(op: str, name: str, value: Any) -> float:
    """`value` as a float that is infinite as a float32 only if it is itself, or an error."""
    number = _number(op, name, value)
    if _TOO_LARGE <= abs(number) < inf:
        raise ValueError(f"[{op}] '{name}' must be in the range of a float32 but got {value}.")
    return number


def number_for(
    op: str, name: str, value: Any, dtypes: Sequence[mx.Dtype]
) -> bool | int | float | None:
    """A number of Python or of NumPy as an argument of these dtypes takes it, None for anything
    else, or an error where it is out of range."""
    if isinstance(value, mx.array) or not isinstance(value, Real):
        number = python_number(value)
        return number if number is None or mx.float32 not in dtypes else float(number)
    if mx.float32 in dtypes:
        return float(value) if isinstance(value, bool) else check_number(op, name, value)
    number = python_number(value)
    if isinstance(number, float):
        return check_number(op, name, number)
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(f"[{op}] '{name}' must be a number of 64 bits but got a larger int.")
    return number


def is_finite(number: float) -> bool:
    """Whether a number is finite as a float32."""
    return -_TOO_LARGE < number < _TOO_LARGE


def check_finite(op: str, name: str, value: Any) -> float:
    """`value` as a float that is finite as a float32, or an error."""
    number = _number(op, name, value)
    if not is_finite(number):
        raise ValueError(f"[{op}] '{name}' must be finite but got {value}.")
    return number


def check_not_negative(op: str, name: str, value: Any) -> float:
    """`value` as a float that is at least 0 and finite as a float32, or an error."""
    number = _number(op, name, value)
    if not 0 <= number < _TOO_LARGE:
        wanted = "finite" if number > 0 else "at least 0"
        raise ValueError(f"[{op}] '{name}' must be {wanted} but got {value}.")
    return number


def check_positive(op: str, name: str, value: Any) -> float:
    """`value` as a float that is more than 0 and finite as a float32, or an error."""
    number = _number(op, name, value)
    if not (0 < number < _TOO_LARGE and float32(number) > 0):
        raise ValueError(f"[{op}] '{name}' must be positive and finite but got {value}.")
    return number


def check_text(op: str, argument: str, text: Any) -> None:
    """Raises unless `text` is a str."""
    if not isinstance(text, str):
        raise TypeError(f"[{op}] '{argument}' must be a str but got {text!r}.")


def is_pair_of_texts(pair: Any) -> bool:
    """Whether these are two texts."""
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
    )


def check_choice(op: str, name: str, value: Any, known: Sequence[str]) -> None:
    """Raises unless `value` is one of the texts `known`. An array is none, whatever it equals."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"[{op}] '{name}' must be one of {', '.join(known)} but got {value!r}.")


def check_integer(op: str, name: str, value: Any, wanted: str = "an int") -> int:
    """`value` as an int, or an error, which says what is `wanted`."""
    try:
        return index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"[{op}] '{name}' must be {wanted} but got {type(value).__name__}."
        ) from None


def check_size(op: str, name: str, value: Any) -> int:
    """`value` as an int of at least 1 that 64 bits hold, or an error."""
    size = check_integer(op, name, value)
    if size < 1:
        raise ValueError(f"[{op}] '{name}' must be at least 1 but got {size}.")
    if size >= 2**63:
        raise ValueError(f"[{op}] '{name}' must be below 2^63 but got a larger int.")
    return size


def check_heads(op: str, n_heads: Any, n_kv_heads: Any) -> None:
    """An error unless each head of keys and values serves as many heads of queries."""
    check_size(op, "n_heads", n_heads)
    check_size(op, "n_kv_heads", n_kv_heads)
    if n_heads % n_kv_heads:
        raise ValueError(f"[{op}] 'n_kv_heads' must divide {n_heads} heads but got {n_kv_heads}.")


def check_flag(op: str, name: str, value: Any) -> bool:
    """`value` if it is True or False, or an error."""
    if value is not True and value is not False:
        kind = type(value)
        of = "numpy." if kind.__module__ == "numpy" else ""  # whose bool is called bool, too
        raise TypeError(f"[{op}] '{name}' must be True or False but got {of}{kind.__name__}.")
    return value


def check_axis(op: str, x: mx.array, axis: int, wanted: str = "an int") -> int:
    """`axis` counted from the front, or an error, which says what is `wanted`."""
    if not isinstance(x, mx.array):
        check_array(op, "x", x)
    number = check_integer(op, "axis", axis, wanted)
    if not -x.ndim <= number < x.ndim:
        raise ValueError(f"[{op}] 'axis' must be in [{-x.ndim}, {x.ndim}) but got {number}.")
    return number % x.ndim
