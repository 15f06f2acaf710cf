"""Dropout with a counter-based generator.

    dropout    y = x / (1 - p) where u ≥ p, else 0;  u uniform in [0, 1)      (Srivastava 2014)

The number u of an element comes from Philox4x32-10 (Salmon et al. 2011): element i takes number
i mod 8 of counter `offset` + i div 8 under the key `seed` (see philox.py). No mask is stored: the
backward draws the same numbers again and is the forward applied to dy.

Bytes: forward and backward read one array and write one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial, update_wrapper
from math import prod
from typing import Any

import mlx.core as mx

from .. import philox
from ..arguments import Argument, check_integer, check_number
from ..codegen import Elementwise, Let, Operand, Output
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import COUNTS_ELEMENTS, Case, Op, Option, register
from ..transforms import Arrays

SEEDS = (mx.int32, mx.uint32, mx.int64, mx.uint64)

#: The inputs of a kernel that drops, what they must be, and the factor of an element: NaN and
#: infinities that are dropped become NaN, as where MLX multiplies by its mask.
DROP_INPUTS = (
    Operand("p", "scalar"),
    Operand("offset", "scalar", "uint64_t"),
    Operand("uniform", "random", array="seed", index="offset"),
)
DROP_ARGUMENTS = (
    Argument("offset", "()", SEEDS, differentiable=False),
    Argument("seed", "()", SEEDS, differentiable=False),
)
DROP = Let("drop", "uniform < p ? 0.0f : 1.0f / (1.0f - p)")


def drop_reference(index: Any, p: float, seed: int, offset: int, *, xp: Any = mx) -> Any:
    """The factors of elements number `index` in plain MLX."""
    p = xp.array(p, dtype=xp.float32)
    return xp.where(philox.uniform(index, offset, seed, xp) < p, 0.0, 1.0 / (1.0 - p))


def dropout_reference(
    x: mx.array, p: float = 0.3, *, seed: int = 7, offset: int = 0, xp: Any = mx
) -> Any:
    """dropout in plain MLX."""
    elements = xp.arange(prod(x.shape)).reshape(x.shape)
    return x * drop_reference(elements, p, seed, offset, xp=xp)


# ---- kernels ------------------------------------------------------------------------------------


def _vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array | None, ...]:
    _, p, offset, seed = primals
    return _DROPOUT(cotangents[0], p, offset, seed), None, None, None


_ARGUMENTS = (Argument("x", "(...)"),)
_DROPOUT = PatternKernel(
    "dropout",
    Elementwise((Operand("x", "full"), *DROP_INPUTS), (Output("y", "x * drop", "full"),), (DROP,)),
    (("x",),),
    arguments=(*_ARGUMENTS, *DROP_ARGUMENTS),
    vjp=_vjp,
)


# ---- ops ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _wide(value: int) -> mx.array:
    return mx.array(value, dtype=mx.uint64)


def _number(op: str, name: str, value: int | mx.array) -> mx.array:
    if isinstance(value, mx.array):
        return value
    number = check_integer(op, name, value, "an int or an mx.array")
    if not 0 <= number < 2**63:
        raise ValueError(f"[{op}] '{name}' must be in [0, 2^63) but got {number}.")
    return _wide(number)


def drop_scalars(
    op: str, p: float, seed: int | mx.array, offset: int | mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """What `DROP_INPUTS` takes: p, offset and seed as 0-d arrays, checked."""
    chance = check_number(op, "p", p)
    if not 0 <= chance < 1:
        raise ValueError(f"[{op}] 'p' must be in [0, 1) but got {p}.")
    return scalar(chance), _number(op, "offset", offset), _number(op, "seed", seed)


def dropout(
    x: mx.array, p: float = 0.5, *, seed: int | mx.array, offset: int | mx.array = 0
) -> mx.array:
    """Zeros each element with probability p and scales the others by 1 / (1 - p), as
    `mlx.nn.Dropout` does in training.

    The mask is a function of seed, offset and the number of the element in row-major order; it is
    not stored. The same arguments drop the same elements. A new seed, offset or p compiles nothing.

    Args:
        x: any shape, in float32, float16 or bfloat16.
        p: the probability to drop, in [0, 1); its resolution is 2⁻²⁴.
        seed: key of the generator, an int in [0, 2⁶³) or a 0-d array in int32, uint32, int64 or
            uint64. Different seeds give independent masks. An array is not looked at, but taken
            modulo 2⁶⁴: -1 in it is the seed 2⁶⁴ - 1.
        offset: counter of the first element, as seed. A counter serves eight elements, so that
            calls under one seed are independent if their offsets differ by at least size / 8.

    Returns:
        An array of x's shape and dtype. Gradient for x.
    """
    return _DROPOUT(x, *drop_scalars("dropout", p, seed, offset))  # type: ignore[no-any-return]


def with_seed(function: Any) -> Any:
    """`function` with a seed and a probability, which its users must choose and tests need not."""
    return update_wrapper(partial(function, p=0.3, seed=7), function)


#: Values of the options that every dropping op is tested with.
DROP_OPTIONS = (
    Option("p", 0.3, (0.0, 0.5, 0.999)),
    Option("seed", 7, (0, 2**40 + 1)),
    Option("offset", 0, (3, 2**33)),
)

register(
    Op(
        name="dropout",
        family="dropout",
        summary="zeros a random part, scales the rest",
        formula="x / (1 - p) where u ≥ p, else 0",
        function=with_seed(dropout),
        reference=dropout_reference,
        arguments=_ARGUMENTS,
        options=DROP_OPTIONS,
        outputs=("(...)",),
        paper="Srivastava et al. 2014, JMLR 15:1929; "
        "Philox: Salmon et al. 2011, doi:10.1145/2063384.2063405",
        torch="F.dropout(x, p)",
        needs=COUNTS_ELEMENTS,
        cases=(
            Case((), {"D": 1}, "one element"),
            Case((3,), {"D": 5}, "rows that share a counter"),
            Case((7,), {"D": 31}, "a last counter that is not used up"),
            Case((9,), {"D": 1024}, "several threads, a last one that is full"),
            Case((2, 3), {"D": 1365}, "a last thread with a tail"),
            Case((0,), {"D": 16}, "no rows"),
        ),
    )
)
