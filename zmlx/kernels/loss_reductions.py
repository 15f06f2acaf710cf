"""The reductions of losses: "none", "mean" and "sum".

    sum     Σ loss
    mean    Σ loss / N, or Σ loss / Σ weight

Summed in float32 as the rows of every other kernel here, since MLX's sum on the CPU adds up one
element after the other, which is off by several ulp from some hundred elements on.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..arguments import check_choice
from ..codegen import Operand, Output, Pass, Reduce, Rowwise
from ..pattern import PatternKernel
from ..targets import cpu
from ..transforms import Arrays

REDUCTIONS = ("none", "mean", "sum")

_LOSS = Operand("loss")
_TOTAL = Reduce("total", "sum", "loss")


def _spread(g: mx.array, like: mx.array) -> mx.array:
    return mx.broadcast_to(g[..., None], like.shape)


def _sum_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array]:
    return (_spread(cotangents[0], primals[0]),)


def _mean_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array]:
    return (_spread(cotangents[0] / primals[0].shape[-1], primals[0]),)


def _weighted_mean_vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array | None, ...]:
    return _spread(cotangents[0] / outputs[1], primals[0]), None


_SUM = PatternKernel(
    "loss_sum",
    Rowwise((_LOSS,), (Output("y", "total", "per_row"),), (Pass((_TOTAL,)),)),
    (mx.float32,),
    vjp=_sum_vjp,
)
_MEAN = PatternKernel(
    "loss_mean",
    Rowwise((_LOSS,), (Output("y", "total / D", "per_row"),), (Pass((_TOTAL,)),)),
    (mx.float32,),
    vjp=_mean_vjp,
)


def _weighted_mean(*more: Output) -> Rowwise:
    return Rowwise(
        (_LOSS, Operand("weight")),
        (Output("y", "total / weights", "per_row"), *more),
        (Pass((_TOTAL, Reduce("weights", "sum", "weight"))),),
    )


def _mean_over(total: mx.array, weights: mx.array) -> mx.array:
    """total / weights, with the gradient 0 where the weights are: an infinite one would make NaN
    of the rows that are ignored, where plain MLX multiplies it by 0."""
    none = weights == 0.0
    mean = total / mx.where(none, 1.0, weights)
    return mx.where(none, mx.stop_gradient(total / weights), mean)


def _weighted_mean_in_mlx(loss: mx.array, weight: mx.array) -> Arrays:
    weights = weight.sum(axis=-1)
    return _mean_over(loss.sum(axis=-1), weights), weights


_WEIGHTED_MEAN = PatternKernel(
    "loss_weighted_mean",
    _weighted_mean(),
    (mx.float32,),
    training=PatternKernel(
        "loss_weighted_mean/training",
        _weighted_mean(Output("kept", "weights", "per_row")),
        (mx.float32, mx.float32),
        vjp=_weighted_mean_vjp,
        reference=_weighted_mean_in_mlx,
    ),
    reference=lambda *inputs: _weighted_mean_in_mlx(*inputs)[:1],
)


def check_reduction(op: str, reduction: str, known: tuple[str, ...] = REDUCTIONS) -> None:
    """Raises for a reduction that is not known."""
    check_choice(op, "reduction", reduction, known)


def reduced(loss: mx.array, reduction: str, weights: mx.array | None = None) -> mx.array:
    """The reduction of float32 losses of any shape; the mean divides by the sum of the weights,
    which have the shape of the losses, or by their number. A mean of none is NaN."""
    if reduction == "none":
        return loss
    if cpu.any_shape((loss,)):
        # The gradient of a reshape has the first shape that was traced.
        if weights is not None:
            return _mean_over(loss.sum(), mx.stop_gradient(weights).sum())
        return loss.sum() if reduction == "sum" else loss.mean()
    flat = loss.flatten()
    if reduction == "sum":
        return _SUM(flat)  # type: ignore[no-any-return]
    if weights is None:
        return _MEAN(flat)  # type: ignore[no-any-return]
    return _WEIGHTED_MEAN(flat, weights.flatten())  # type: ignore[no-any-return]
