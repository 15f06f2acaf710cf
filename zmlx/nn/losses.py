"""`mlx.nn.losses` with zmlx's cross entropy; all other losses are MLX's own."""

from __future__ import annotations

from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as mnn

from .. import kernels
from ..choice import use_kernel
from ..stand_in import public_names
from . import functional as F

Reduction = Literal["none", "mean", "sum"]

__all__ = sorted({"cross_entropy", "linear_cross_entropy", *public_names(mnn.losses)})

_INDICES = (mx.int32, mx.uint32, mx.int64)


def cross_entropy(
    logits: mx.array,
    targets: mx.array,
    weights: mx.array | None = None,
    axis: int = -1,
    label_smoothing: float = 0.0,
    reduction: Reduction = "none",
) -> mx.array:
    """Computes the cross entropy loss, as `mlx.nn.losses.cross_entropy`.

    Args:
        logits (array): The unnormalized logits.
        targets (array): Class indices, or probabilities for each class.
        weights (array, optional): Optional weights for each target. Default: ``None``.
        axis (int, optional): The axis over which to compute softmax. Default: ``-1``.
        label_smoothing (float, optional): Label smoothing factor. Default: ``0``.
        reduction (str, optional): ``'none'`` | ``'mean'`` | ``'sum'``. Default: ``'none'``.

    Returns:
        array: The loss in the dtype of the logits. zmlx's kernel, which runs for class indices,
        reduces in float32: over the classes and, where no weights are given, over the rows. With
        probabilities MLX's function runs. A target out of range gives NaN, and on the CPU raises
        at evaluation.
    """
    classes = axis % logits.ndim if -logits.ndim <= axis < logits.ndim else -1
    plain = (
        F.are_numbers(label_smoothing)
        and 0 <= label_smoothing < 1
        and (*logits.shape[:classes], *logits.shape[classes + 1 :]) == targets.shape
        and targets.dtype in _INDICES
    )
    if classes < 0 or not plain or not use_kernel("cross_entropy", logits):
        return mnn.losses.cross_entropy(logits, targets, weights, axis, label_smoothing, reduction)
    if reduction not in get_args(Reduction):
        raise ValueError(f"Invalid reduction. Must be one of {get_args(Reduction)}.")
    whole = reduction if weights is None else "none"
    loss = kernels.cross_entropy(
        logits, targets, axis=classes, label_smoothing=label_smoothing, reduction=whole
    )
    if weights is None:
        return loss  # type: ignore[no-any-return]
    if weights.shape != loss.shape:
        raise ValueError(
            f"Weights with shape {weights.shape} is not the same as "
            f"output loss with shape {loss.shape}."
        )
    return mnn.losses._reduce(loss * weights, reduction)  # type: ignore[no-any-return]


def linear_cross_entropy(
    x: mx.array,
    weight: mx.array,
    targets: mx.array,
    bias: mx.array | None = None,
    reduction: Reduction = "none",
    softcap: float | None = None,
) -> mx.array:
    """The cross entropy of a linear layer's outputs: `cross_entropy(x @ weight.T + bias, targets)`.

    Args:
        x (array): The inputs of the layer, of shape (*, D).
        weight (array): Its weight, of shape (V, D), as `mlx.nn.Linear` stores it.
        targets (array): Class indices, of shape (*).
        bias (array, optional): Its bias, of shape (V,). Default: ``None``.
        reduction (str, optional): ``'none'`` | ``'mean'`` | ``'sum'``. Default: ``'none'``.
        softcap (float, optional): Logits become ``softcap * tanh(logits / softcap)`` first.
            Default: ``None``.

    Returns:
        array: The loss in the dtype of the logits, which zmlx's kernel never holds.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"Invalid reduction. Must be one of {get_args(Reduction)}.")
    if targets.dtype in _INDICES and use_kernel("linear_cross_entropy", x, weight, bias):
        return kernels.linear_cross_entropy(  # type: ignore[no-any-return]
            x, weight, targets, bias, softcap=softcap, reduction=reduction
        )
    logits = x @ weight.T
    logits = logits if bias is None else logits + bias
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    return cross_entropy(logits, targets, reduction=reduction)


def __getattr__(name: str) -> Any:
    return getattr(mnn.losses, name)
