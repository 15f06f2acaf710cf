"""What the ops of the RoPE family take, checked, and the rotation that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ..arguments import (
    INDICES,
    INTEGERS,
    check_array,
    check_choice,
    check_finite,
    check_flag,
    check_integer,
    check_positive,
)
from ..metal import scalar
from ..transforms import Arrays
from .rope_kernels import AXES, EACH, START, STARTS, STEPS, Rotation, axes_of, paces

LAYOUTS = ("BHLD", "BLHD")
#: Elements that turn, at most: a thread of a CPU keeps their angles on its stack.
MOST_DIMS = 2**17
POSITIONS = (*INDICES, mx.float32)


#: Offsets from which no step, of fewer than 2^31, leaves 64 bits.
_LEAST, _MOST = -(2**63), 2**63 - 2**31


@lru_cache(maxsize=1024)
def first_position(value: int) -> mx.array:
    """The position of the first step as an array."""
    dtype = mx.int32 if -(2**31) <= value < 2**31 else mx.int64
    return mx.array([value], dtype=dtype)


def as_offset(offset: Any) -> Any:
    """An offset as an array, since it changes from call to call; what is not plainly one as it is,
    for `turning` to look at."""
    plain = type(offset) is int and _LEAST <= offset < _MOST
    return first_position(offset) if plain else offset


def as_option(sections: Any) -> Any:
    """Sections in a list, which may change, as a tuple."""
    return tuple(sections) if type(sections) is list else sections


def check_offset(op: str, offset: Any, steps: int) -> int:
    """`offset` as an int, or an error unless all positions have 64 bits."""
    number = check_integer(op, "offset", offset, "an int or an mx.array")
    if not -(2**63) <= number < 2**63 - steps:
        raise ValueError(f"[{op}] 'offset' must be a position of 64 bits but got {number}.")
    return number


class Turning(NamedTuple):
    """A rotation, checked: what the ops of the family share.

    Attributes:
        rotation: what is static.
        arrays: freqs, positions and offset of a call, each None where there is none, to the arrays
            that `Rotation.inputs` names, without the last.
    """

    rotation: Rotation
    arrays: Callable[[mx.array | None, mx.array | None, Any], Arrays]


def check_rows(op: str, name: str, x: mx.array) -> None:
    """Raises unless the rows of x have numbers of 32 bits; and where x is empty those of its other
    axes, which kernels are given."""
    if prod(max(n, 1) for n in x.shape[:-1]) >= 2**32:
        raise ValueError(
            f"[{op}] '{name}' must have fewer than 2^32 rows, with 1 for an axis of 0, but got "
            f"{tuple(x.shape)}."
        )


def turning(
    op: str,
    name: str,
    x: mx.array,
    dims: int | None,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None,
    positions: mx.array | None,
    sections: Sequence[int] | None,
    interleave_sections: bool,
    layout: str,
) -> Turning:
    """The rotation of the array x, which the op calls `name`; else `[op] 'argument' must …`. It
    holds none of the arrays."""

    def bad(argument: str, must: str, got: Any) -> ValueError:
        return ValueError(f"[{op}] '{argument}' must {must} but got {got}.")

    check_array(op, name, x)
    if x.ndim < 3:
        raise bad(name, "have shape (B, *, L, D)", tuple(x.shape))
    check_choice(op, "layout", layout, LAYOUTS)
    batches, d = x.shape[0], x.shape[-1]
    steps = x.shape[-2] if layout == "BHLD" else x.shape[1]
    if dims is None:
        dims = d
    dims = check_integer(op, "dims", dims)
    most = min(d, MOST_DIMS)
    if dims % 2 or not 2 <= dims <= most:
        raise bad("dims", f"be even and in [2, {most}]", dims)
    check_flag(op, "traditional", traditional)
    check_flag(op, "interleave_sections", interleave_sections)
    half = dims // 2

    frequencies: mx.array | None = None
    if freqs is None:
        frequencies = paces(half, 10000.0 if base is None else check_positive(op, "base", base))
    else:
        check_array(op, "freqs", freqs)
        if tuple(freqs.shape) != (half,):
            raise bad("freqs", f"have shape ({half},)", tuple(freqs.shape))
        if base is not None:
            raise bad("base", "be None where freqs are given", base)

    axes: Arrays = ()
    if sections is not None:
        if not isinstance(sections, Sequence):
            raise TypeError(
                f"[{op}] 'sections' must be a sequence of ints but got {type(sections).__name__}."
            )
        sizes = tuple(check_integer(op, "sections", n, "a sequence of ints") for n in sections)
        if any(n < 0 for n in sizes) or sum(sizes) != half:
            raise bad("sections", f"be sizes ≥ 0 that sum to {half}", sections)
        sections = sizes
        if positions is None:
            raise bad("positions", f"have shape ({len(sections)}, {batches}, {steps})", None)
        axes = (axes_of(sections, interleave_sections),)
    elif interleave_sections:
        raise bad("interleave_sections", "be False without sections", interleave_sections)

    lay: Callable[[mx.array], mx.array] | None = None
    if positions is not None:
        if isinstance(offset, mx.array) or offset != 0:
            raise bad("offset", "be 0 where positions are given", offset)
        check_array(op, "positions", positions, POSITIONS)
        shape = tuple(positions.shape)
        if sections is not None:
            count = len(sections)
            if shape == (count, steps):
                lay = _of_all_batches
            elif shape not in ((count, batches, steps), (count, 1, steps)):
                raise bad("positions", f"have shape ({count}, {batches}, {steps})", shape)
            placed = AXES
        elif shape == (steps,):
            placed = STEPS
        elif shape in ((batches, steps), (1, steps)):
            placed = EACH
        else:
            raise bad("positions", f"have shape ({steps},) or ({batches}, {steps})", shape)
    elif isinstance(offset, mx.array):
        check_array(op, "offset", offset, INTEGERS)
        shape = tuple(offset.shape)
        if shape not in ((), (1,), (batches,)):
            raise bad("offset", f"have shape () or ({batches},)", shape)
        placed = STARTS if shape == (batches,) and batches != 1 else START
        if shape == () or offset.dtype not in INDICES:
            lay = _as_starts
    else:
        placed, number = START, check_offset(op, offset, steps)
        lay = lambda _: first_position(number)  # noqa: E731
    rotation = Rotation(half, traditional, freqs is not None, placed, layout == "BLHD")
    rest = (*axes, scalar(check_finite(op, "scale", scale)))

    def arrays(freqs: Any, positions: Any, offset: Any) -> Arrays:
        start = offset if positions is None else positions
        if lay is not None:
            start = lay(start)
        return (start, frequencies if freqs is None else freqs, *rest)

    return Turning(rotation, arrays)


def _of_all_batches(positions: mx.array) -> mx.array:
    return positions[:, None]


def _as_starts(offset: mx.array) -> mx.array:
    start = offset.reshape(1) if offset.ndim == 0 else offset
    return start if start.dtype in INDICES else start.astype(mx.int64)
