"""Norms with dropout, without a stored mask.

    rms_norm_dropout          y = dropout(rms_norm(x))
    layer_norm_dropout        y = dropout(layer_norm(x))
    dropout_add_rms_norm      sum = dropout(x) + residual, y = rms_norm(sum)
    dropout_add_layer_norm    sum = dropout(x) + residual, y = layer_norm(sum)

The last two are the residual connection of a transformer, with dropout on the branch (Vaswani et
al. 2017, section 5.4). Random numbers are those of `dropout`, with rows padded to a multiple of
eight: for such a D the masks are the same. Bytes are those of the norm without dropout.
"""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx

from ..registry import ROWS, Option
from .dropout import DROP_OPTIONS, drop_reference, drop_scalars, with_seed
from .norm_kernels import Norm
from .norms import Variants, define, layer_norm_reference, rms_norm_reference

_OPTIONS = (Option("eps", 1e-5, (1e-2,)), *DROP_OPTIONS)


def _drop(x: mx.array, p: float, seed: int, offset: int, xp: Any) -> Any:
    """dropout(x) in plain MLX, with rows padded."""
    width = x.shape[-1]
    rows = xp.arange(prod(x.shape[:-1])).reshape((*x.shape[:-1], 1))
    elements = rows * (8 * -(-width // 8)) + xp.arange(width)
    return x * drop_reference(elements, p, seed, offset, xp=xp)


def rms_norm_dropout_reference(
    x: mx.array,
    weight: mx.array | None = None,
    p: float = 0.3,
    *,
    seed: int = 7,
    offset: int = 0,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """rms_norm_dropout in plain MLX."""
    return _drop(rms_norm_reference(x, weight, eps=eps, xp=xp), p, seed, offset, xp)


def layer_norm_dropout_reference(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    p: float = 0.3,
    *,
    seed: int = 7,
    offset: int = 0,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """layer_norm_dropout in plain MLX."""
    return _drop(layer_norm_reference(x, weight, bias, eps=eps, xp=xp), p, seed, offset, xp)


def dropout_add_rms_norm_reference(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    p: float = 0.3,
    *,
    seed: int = 7,
    offset: int = 0,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """dropout_add_rms_norm in plain MLX."""
    total = _drop(x, p, seed, offset, xp) + residual
    return rms_norm_reference(total, weight, eps=eps, xp=xp), total


def dropout_add_layer_norm_reference(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    p: float = 0.3,
    *,
    seed: int = 7,
    offset: int = 0,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """dropout_add_layer_norm in plain MLX."""
    total = _drop(x, p, seed, offset, xp) + residual
    return layer_norm_reference(total, weight, bias, eps=eps, xp=xp), total


# ---- ops ----------------------------------------------------------------------------------------

_RMS_NORM_DROPOUT = Variants("rms_norm_dropout", "rms", dropped=True)
_LAYER_NORM_DROPOUT = Variants("layer_norm_dropout", "layer", dropped=True)
_DROPOUT_ADD_RMS_NORM = Variants("dropout_add_rms_norm", "rms", residual=True, dropped=True)
_DROPOUT_ADD_LAYER_NORM = Variants("dropout_add_layer_norm", "layer", residual=True, dropped=True)


def rms_norm_dropout(
    x: mx.array,
    weight: mx.array | None = None,
    p: float = 0.1,
    *,
    seed: int | mx.array,
    offset: int | mx.array = 0,
    eps: float = 1e-5,
) -> mx.array:
    """`rms_norm`, then `dropout`, in one launch.

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        weight: (D,), or None for none.
        p, seed, offset: as in `dropout`, of rows that are counted as multiples of eight elements:
            the mask is that of `dropout` where 8 divides D, and calls under one seed are
            independent if their offsets differ by at least rows · ⌈D / 8⌉.
        eps: added to the mean square.

    Returns:
        An array of x's shape and the promoted dtype of x and weight. Gradients for x and weight.
    """
    drop = drop_scalars("rms_norm_dropout", p, seed, offset)
    return _RMS_NORM_DROPOUT((x,), weight, None, eps, *drop)  # type: ignore[no-any-return]


def layer_norm_dropout(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    p: float = 0.1,
    *,
    seed: int | mx.array,
    offset: int | mx.array = 0,
    eps: float = 1e-5,
) -> mx.array:
    """`layer_norm`, then `dropout`, in one launch.

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        weight: (D,), or None for none.
        bias: (D,), or None for none.
        p, seed, offset: as in `rms_norm_dropout`.
        eps: added to the variance.

    Returns:
        An array of x's shape and the promoted dtype of x, weight and bias. Gradients for all three.
    """
    drop = drop_scalars("layer_norm_dropout", p, seed, offset)
    y = _LAYER_NORM_DROPOUT((x,), weight, bias, eps, *drop)
    return y  # type: ignore[no-any-return]


def dropout_add_rms_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    p: float = 0.1,
    *,
    seed: int | mx.array,
    offset: int | mx.array = 0,
    eps: float = 1e-5,
) -> tuple[mx.array, mx.array]:
    """`add_rms_norm` with `dropout` on x, in one launch.

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        residual: as x; may have another dtype.
        weight: (D,), or None for none.
        p, seed, offset: as in `rms_norm_dropout`.
        eps: added to the mean square.

    Returns:
        y and sum as `add_rms_norm`. Gradients for all three arrays, through both results.
    """
    drop = drop_scalars("dropout_add_rms_norm", p, seed, offset)
    y = _DROPOUT_ADD_RMS_NORM((x, residual), weight, None, eps, *drop)
    return y  # type: ignore[no-any-return]


def dropout_add_layer_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    p: float = 0.1,
    *,
    seed: int | mx.array,
    offset: int | mx.array = 0,
    eps: float = 1e-5,
) -> tuple[mx.array, mx.array]:
    """`add_layer_norm` with `dropout` on x, in one launch.

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        residual: as x; may have another dtype.
        weight: (D,), or None for none.
        bias: (D,), or None for none.
        p, seed, offset: as in `rms_norm_dropout`.
        eps: added to the variance.

    Returns:
        y and sum as `add_layer_norm`. Gradients for all four arrays, through both results.
    """
    drop = drop_scalars("dropout_add_layer_norm", p, seed, offset)
    y = _DROPOUT_ADD_LAYER_NORM((x, residual), weight, bias, eps, *drop)
    return y  # type: ignore[no-any-return]


# ---- registry -----------------------------------------------------------------------------------

define(
    Norm("rms_norm_dropout", "rms", weighted=True, dropped=True),
    "rms_norm and dropout",
    "dropout(rms_norm(x, weight), p)",
    with_seed(rms_norm_dropout),
    rms_norm_dropout_reference,
    options=_OPTIONS,
    torch="F.dropout(F.rms_norm(x, (x.shape[-1],), weight, eps), p)",
)
define(
    Norm("layer_norm_dropout", "layer", weighted=True, biased=True, dropped=True),
    "layer_norm and dropout",
    "dropout(layer_norm(x, weight, bias), p)",
    with_seed(layer_norm_dropout),
    layer_norm_dropout_reference,
    options=_OPTIONS,
    cases=ROWS[1:],
    torch="F.dropout(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), p)",
)
define(
    Norm("dropout_add_rms_norm", "rms", weighted=True, residual=True, dropped=True),
    "residual connection with dropout and rms_norm",
    "sum = dropout(x, p) + residual; y = rms_norm(sum, weight)",
    with_seed(dropout_add_rms_norm),
    dropout_add_rms_norm_reference,
    options=_OPTIONS,
    torch="(lambda s: (F.rms_norm(s, (s.shape[-1],), weight, eps), s))(F.dropout(x, p) + residual)",
)
define(
    Norm(
        "dropout_add_layer_norm", "layer", weighted=True, biased=True, residual=True, dropped=True
    ),
    "residual connection with dropout and layer_norm",
    "sum = dropout(x, p) + residual; y = layer_norm(sum, weight, bias)",
    with_seed(dropout_add_layer_norm),
    dropout_add_layer_norm_reference,
    options=_OPTIONS,
    torch="(lambda s: (F.layer_norm(s, (s.shape[-1],), weight, bias, eps), s))"
    "(F.dropout(x, p) + residual)",
)
