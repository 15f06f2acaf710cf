"""The softmax family.

    softmax        y = exp(x - max x) / Σ exp(x - max x)
    logsumexp      y = log Σ exp(x)
    log_softmax    y = x - log Σ exp(x)

Bytes: the forward reads x and writes y, where y of logsumexp is one value per row. Of a row that
fits in registers, or in the cache of a CPU, maximum and sum take a walk each over what was kept of
x, and softmax keeps the exponentials for y. Of a longer one they come from one walk, which rescales
the sum whenever the maximum grows (Milakov & Gimelshein 2018, arXiv:1805.02867). The backward of
softmax reads y and dy and writes dx; that of the others reads x, dy and two float32 per row that
the forward keeps, the log-sum-exp and by how much it was rounded (which x far from 0 would see),
because in half precision y itself is too coarse to take exp(y) of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import msl
from ..arguments import FLOATING, Argument, check_axis, check_flag
from ..codegen import Let, Operand, Output, Pass, Reduce, Rowwise
from ..pattern import PatternKernel
from ..registry import Op, Option, register
from ..targets import cpu
from ..transforms import Arrays
from .axes import Axes, named_axes


def softmax_reference(x: mx.array, axis: int = -1, *, xp: Any = mx) -> Any:
    """softmax in plain MLX."""
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return e / xp.sum(e, axis=axis, keepdims=True)


def logsumexp_reference(
    x: mx.array, axis: Axes = -1, keepdims: bool = False, *, xp: Any = mx
) -> Any:
    """logsumexp in plain MLX."""
    return xp.logsumexp(x, axis=axis, keepdims=keepdims)


def log_softmax_reference(x: mx.array, axis: int = -1, *, xp: Any = mx) -> Any:
    """log_softmax in plain MLX."""
    return x - xp.logsumexp(x, axis=axis, keepdims=True)


# ---- kernels ------------------------------------------------------------------------------------

_X, _Y, _DY = Operand("x"), Operand("y"), Operand("dy")
_LSE = (Operand("lse", "per_row"), Operand("lse_low", "per_row"))
_ARGUMENTS = (Argument("x"),)


def lse_low(largest: str, log_total: str) -> Let:
    """By how much `lse`, their sum, was rounded. An lse that is far from 0 has few digits left for
    exp(x - lse), which is off by a factor exp(`lse_low`)."""
    return Let("lse_low", f"isinf(lse) ? 0.0f : ({largest} - lse) + {log_total}")


#: The factor of exp(x - lse) that makes up for the rounding of lse.
OF_LOW = "exp(0.0f - lse_low)"

_LARGEST = Reduce("largest", "max", "x", shift=True)

#: Maximum and sum in one walk.
_ONE_WALK = Reduce("total", "sum_exp", "x", peak="largest")

_DX = PatternKernel(
    "softmax/dx",
    Rowwise(
        inputs=(_Y, _DY),
        passes=(Pass((Reduce("dot", "sum", "y * dy"),)),),
        outputs=(Output("dx", "y * (dy - dot)"),),
    ),
    (("y",),),
)


def _softmax_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array]:
    return (_DX(outputs[0], cotangents[0]),)


_SOFTMAX = PatternKernel(
    "softmax",
    Rowwise(
        inputs=(_X,),
        lets=(Let("e", "ZMLX_EXP_BOUNDED(x - largest)"),),
        passes=(
            Pass((_LARGEST,)),
            Pass((Reduce("total", "sum", "e"),), (Let("scale", "1.0f / total"),)),
        ),
        outputs=(Output("y", "e * scale"),),
        keep=("x", "e"),
    ),
    (("x",),),
    arguments=_ARGUMENTS,
    vjp=_softmax_vjp,
    long=PatternKernel(
        "softmax/long",
        Rowwise(
            inputs=(_X,),
            # An infinite maximum makes the whole row NaN, as in MLX.
            passes=(Pass((_ONE_WALK,), (Let("scale", "isinf(largest) ? NAN : 1.0f / total"),)),),
            outputs=(Output("y", "ZMLX_EXP_BOUNDED(x - largest) * scale"),),
        ),
        (("x",),),
        vjp=_softmax_vjp,
    ),
)

_DX_OF_LOGSUMEXP = PatternKernel(
    "logsumexp/dx",
    Rowwise(
        inputs=(_X, *_LSE, Operand("dy", "per_row"), Operand("dlse", "per_row")),
        before=(Let("g", f"(dy + dlse) * {OF_LOW}"),),
        outputs=(Output("dx", "g * ZMLX_EXP_BOUNDED(x - lse)"),),
    ),
    (("x",),),
    header=msl.header_for("ZMLX_EXP_BOUNDED"),
)


def _logsumexp_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array]:
    return (_DX_OF_LOGSUMEXP(primals[0], *outputs[1:], *cotangents[:2]),)


#: Log-sum-exp in two walks, and in one. An infinite maximum is not taken off, so that a row of -inf
#: gives -inf and one with inf gives inf.
_TWO_WALKS = (
    Pass((_LARGEST,), (Let("shift", "isinf(largest) ? 0.0f : largest"),)),
    Pass(
        (Reduce("total", "sum", "ZMLX_EXP_BOUNDED(x - shift)"),),
        (Let("rest", "log(total)"), Let("lse", "shift + rest"), lse_low("shift", "rest")),
    ),
)
_LSE_PASS = Pass(
    (_ONE_WALK,),
    (
        *(Let("shift", "largest"), Let("rest", "log(total)"), Let("lse", "shift + rest")),
        lse_low("shift", "rest"),
    ),
)


def _with_lse(name: str, output: Output, vjp: Any) -> PatternKernel:
    """A kernel of x and its log-sum-exp, whose training form stores that too."""
    stored = (
        output,
        Output("kept_lse", "lse", "per_row"),
        Output("kept_low", "lse_low", "per_row"),
    )

    def kernel(name: str, passes: tuple[Pass, ...], keep: tuple[str, ...], **more: Any) -> Any:
        training = PatternKernel(
            f"{name}/training",
            Rowwise((_X,), stored, passes, keep=keep),
            (("x",), mx.float32, mx.float32),
            vjp=vjp,
        )
        pattern = Rowwise((_X,), (output,), passes, keep=keep)
        return PatternKernel(
            name, pattern, (("x",),), arguments=_ARGUMENTS, training=training, **more
        )

    long = kernel(f"{name}/long", (_LSE_PASS,), ())
    return kernel(name, _TWO_WALKS, ("x",), long=long)  # type: ignore[no-any-return]


_LOGSUMEXP = _with_lse("logsumexp", Output("y", "lse", "per_row"), _logsumexp_vjp)


_DX_OF_LOG_SOFTMAX = PatternKernel(
    "log_softmax/dx",
    Rowwise(
        inputs=(_X, *_LSE, _DY, Operand("dlse", "per_row")),
        passes=(Pass((Reduce("total", "sum", "dy"),), (Let("g", f"(dlse - total) * {OF_LOW}"),)),),
        outputs=(Output("dx", "dy + g * ZMLX_EXP_BOUNDED(x - lse)"),),
    ),
    (("x",),),
)


def _log_softmax_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array]:
    return (_DX_OF_LOG_SOFTMAX(primals[0], *outputs[1:], *cotangents[:2]),)


# x - shift is exact where it matters, x - lse is not.
_LOG_SOFTMAX = _with_lse("log_softmax", Output("y", "(x - shift) - rest"), _log_softmax_vjp)


# ---- ops ----------------------------------------------------------------------------------------


def over_axis(kernel: PatternKernel, x: mx.array, axis: int) -> mx.array:
    """A kernel of the last axis over another axis."""
    if type(axis) is not int or axis != -1:
        axis = check_axis(kernel.name, x, axis)
        if axis != x.ndim - 1:
            # Moved, not swapped: axes that stay neighbours are copied as one.
            y = kernel(mx.moveaxis(x, axis, -1))
            return mx.moveaxis(y, -1, axis)
    return kernel(x)  # type: ignore[no-any-return]


def softmax(x: mx.array, axis: int = -1) -> mx.array:
    """The softmax over one axis, as `mx.softmax` with `precise=True`.

        y = exp(x - max x) / Σ exp(x - max x)

    Args:
        x: at least one axis, in float32, float16 or bfloat16; computed in float32.
        axis: the axis that sums to one. Another than the last is copied to the end first.

    Returns:
        An array of x's shape and dtype. A row of -inf, or one with inf or NaN, gives NaN, as in
        MLX. Gradient for x.
    """
    return over_axis(_SOFTMAX, x, axis)


def log_softmax(x: mx.array, axis: int = -1) -> mx.array:
    """The logarithm of the softmax over one axis, as `mlx.nn.log_softmax`.

        y = x - log Σ exp(x)

    Args:
        x: at least one axis, in float32, float16 or bfloat16; computed in float32.
        axis: the axis whose exponentials sum to one. Another than the last is copied to the end.

    Returns:
        An array of x's shape and dtype; -inf where x is -inf, and NaN for a row of -inf, as in MLX.
        In a row with inf the rest is -inf, as in x - mx.logsumexp(x). Gradient for x.
    """
    return over_axis(_LOG_SOFTMAX, x, axis)


def logsumexp_in_mlx(x: mx.array, axes: Sequence[int], keepdims: bool = False) -> mx.array:
    """`mx.logsumexp` for a trace of any shape. MLX's own refuses an array without rows, and its
    gradient and that of a flatten have the shape that was compiled."""
    top = mx.stop_gradient(x.max(axis=axes, keepdims=True))
    top = mx.where(mx.isinf(top), 0.0, top)
    y = top + mx.log(mx.exp(x - top).sum(axis=axes, keepdims=True))
    return y if keepdims else y.squeeze(axes)


def logsumexp(x: mx.array, axis: Axes = -1, keepdims: bool = False) -> mx.array:
    """The logarithm of the sum of exponentials over one or several axes, as `mx.logsumexp`.

        y = log Σ exp(x)

    Args:
        x: at least one axis, in float32, float16 or bfloat16; computed in float32.
        axis: the axes to sum over, or None for all. Axes that are not the last are copied to the
            end first.
        keepdims: keep the axes that were summed over, with size 1.

    Returns:
        An array of x's dtype; -inf for a row of -inf or of no elements, inf for a row with inf.
        Gradient for x.
    """
    check_flag("logsumexp", "keepdims", keepdims)
    if type(axis) is int and axis == -1 and not keepdims:
        return _LOGSUMEXP(x)  # type: ignore[no-any-return]
    axes = named_axes("logsumexp", x, axis, FLOATING)
    if not axes:
        raise ValueError(
            f"[logsumexp] 'axis' must name different axes, at least one, but got {axis}."
        )
    if len(axes) > 1 and cpu.any_shape((x,)):
        y = logsumexp_in_mlx(x.astype(mx.float32), axes, keepdims)
        return y.astype(x.dtype)
    others = [a for a in range(x.ndim) if a not in axes]
    lead = len(others)
    if [*others, *axes] != list(range(x.ndim)):
        x = x.transpose(*others, *axes)
    y = _LOGSUMEXP(x.flatten(lead) if len(axes) > 1 else x)
    return mx.expand_dims(y, axes) if keepdims else y


_AXIS = Option("axis", -1, (0,), passed="text")

register(
    Op(
        name="softmax",
        family="softmax",
        summary="softmax over one axis",
        formula="exp(x - max x) / Σ exp(x - max x)",
        function=softmax,
        reference=softmax_reference,
        arguments=_ARGUMENTS,
        options=(_AXIS,),
        baseline=lambda x, axis=-1: mx.softmax(x, axis=axis, precise=True),
        paper="Milakov & Gimelshein 2018, arXiv:1805.02867",
        reads_backward=("output",),
        torch="F.softmax(x, axis)",
    )
)
register(
    Op(
        name="log_softmax",
        family="softmax",
        summary="logarithm of the softmax over one axis",
        formula="x - log Σ exp(x)",
        function=log_softmax,
        reference=log_softmax_reference,
        arguments=_ARGUMENTS,
        options=(_AXIS,),
        reads_backward=("x",),
        statistics=2,
        torch="F.log_softmax(x, axis)",
    )
)
register(
    Op(
        name="logsumexp",
        family="softmax",
        summary="logarithm of the sum of exponentials",
        formula="log Σ exp(x)",
        function=logsumexp,
        reference=logsumexp_reference,
        arguments=_ARGUMENTS,
        options=(
            Option("axis", -1, (0, (0, 1), None), passed="text"),
            Option("keepdims", False, (True,), passed="text"),
        ),
        outputs=("(*)",),
        baseline=mx.logsumexp,
        reads_backward=("x",),
        statistics=2,
        torch="torch.logsumexp(x, axis)",
    )
)
