"""sparsemax: the Euclidean projection onto the probability simplex.

    y = max(x - τ, 0), with τ such that Σ y = 1         (Martins & Astudillo 2016, arXiv:1602.02068)

f(τ) = Σ max(x - τ, 0) - 1 is convex, falling and piecewise linear, so that Newton's method from the
left, τ ← (Σ of the x > τ, minus 1) / (number of the x > τ), rises to the zero and reaches it
exactly once it has found the support (Michelot 1986; no sorting). From τ = max x - 1 the support
holds few elements and this takes a handful of steps on a row that stays in registers or caches.

Bytes: the forward reads x and writes y; a row too long to be kept is read once per step. The
backward reads y and dy and writes dx = dy - mean of dy over the support there, 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..arguments import Argument
from ..codegen import Climb, Let, Operand, Output, Pass, Reduce, Rowwise
from ..pattern import PatternKernel
from ..registry import COUNTS_ELEMENTS, Op, Option, register
from ..targets import cpu
from ..transforms import Arrays
from .softmax import over_axis


def sparsemax_reference(x: mx.array, axis: int = -1, *, xp: Any = mx) -> Any:
    """sparsemax in plain MLX: τ is the largest (Σ of the k largest - 1) / k."""
    z = x - xp.max(x, axis=axis, keepdims=True)
    sums = xp.cumsum(-xp.sort(-xp.stop_gradient(z), axis=axis), axis=axis)
    k = xp.cumsum(xp.ones_like(sums), axis=axis)
    support = z > xp.max((sums - 1.0) / k, axis=axis, keepdims=True)
    count = xp.sum(xp.where(support, xp.ones_like(z), 0.0), axis=axis, keepdims=True)
    tau = (xp.sum(xp.where(support, z, 0.0), axis=axis, keepdims=True) - 1.0) / count
    return xp.where(support, z - tau, 0.0 * tau)


# ---- kernels ------------------------------------------------------------------------------------

_ARGUMENTS = (Argument("x"),)

_DX = PatternKernel(
    "sparsemax/dx",
    Rowwise(
        inputs=(Operand("y"), Operand("dy")),
        passes=(
            Pass(
                (
                    Reduce("total", "sum", "y > 0.0f ? dy : 0.0f"),
                    Reduce("support", "sum", "y > 0.0f ? 1.0f : 0.0f"),
                ),
                (Let("mean", "total / support"),),
            ),
        ),
        outputs=(Output("dx", "y > 0.0f ? dy - mean : 0.0f * mean"),),
    ),
    (("y",),),
)


def _vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array]:
    return (_DX(outputs[0], cotangents[0]),)


def _plain(x: mx.array) -> Arrays:
    if not x.shape[-1] and not cpu.any_shape((x,)):
        return (x.astype(mx.float32),)  # MLX finds no maximum of nothing
    return (sparsemax_reference(x.astype(mx.float32)),)


def _sparsemax(keep: tuple[str, ...], long: PatternKernel | None = None) -> PatternKernel:
    """Elements at τ and below count as 0; the comparisons are written so that NaN does not."""
    return PatternKernel(
        "sparsemax",
        Rowwise(
            inputs=(Operand("x"),),
            lets=(Let("z", "x - largest"),),
            passes=(
                Pass((Reduce("largest", "max", "x"),)),
                Pass(
                    (
                        Reduce("total", "sum", "z <= tau ? 0.0f : z"),
                        Reduce("support", "sum", "z <= tau ? 0.0f : 1.0f"),
                    ),
                    climb=Climb("tau", "-1.0f", "(total - 1.0f) / support"),
                ),
            ),
            outputs=(Output("y", "z <= tau ? 0.0f : z - tau"),),
            keep=keep,
        ),
        (("x",),),
        arguments=_ARGUMENTS,
        vjp=_vjp,
        reference=_plain,
        long=long,
    )


_SPARSEMAX = _sparsemax(("x",), _sparsemax(()))


# ---- op -----------------------------------------------------------------------------------------


def sparsemax(x: mx.array, axis: int = -1) -> mx.array:
    """The projection of x onto the probability simplex over one axis: a softmax with zeros.

        y = max(x - τ, 0), with τ such that Σ y = 1

    Args:
        x: at least one axis, in float32, float16 or bfloat16; computed in float32.
        axis: the axis that sums to one. Another than the last is copied to the end first.

    Returns:
        An array of x's shape and dtype. A row of -inf, or one with inf or NaN, gives NaN. Gradient
        for x: dy - mean of dy over the support there, 0 elsewhere.
    """
    return over_axis(_SPARSEMAX, x, axis)


register(
    Op(
        name="sparsemax",
        family="softmax",
        summary="projection onto the probability simplex over one axis",
        formula="max(x - τ, 0), τ such that the sum is 1",
        function=sparsemax,
        reference=sparsemax_reference,
        arguments=_ARGUMENTS,
        options=(Option("axis", -1, (0,), passed="text"),),
        paper="Martins & Astudillo 2016, arXiv:1602.02068",
        reads_backward=("output",),
        torch="(z := x.float().sort(axis, descending=True).values, sums := z.cumsum(axis),"
        " k := (1 + torch.ones_like(z).cumsum(axis) * z > sums).sum(axis, keepdim=True),"
        " torch.relu(x - (sums.gather(axis, k - 1) - 1) / k).to(x.dtype))[-1]",
        needs=COUNTS_ELEMENTS,
    )
)
