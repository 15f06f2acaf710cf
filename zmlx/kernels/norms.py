"""Normalisation over the last axis.

    rms_norm          y = x · rsqrt(mean(x²) + eps) · weight           (Zhang & Sennrich 2019)
    layer_norm        y = (x - mean) · rsqrt(var + eps) · weight + bias     (Ba et al. 2016)
    l2_norm           y = x / max(|x|, eps)
    add_rms_norm      sum = x + residual, y = rms_norm(sum)
    add_layer_norm    sum = x + residual, y = layer_norm(sum)

Bytes: the forward reads its arrays and writes y (and sum); the backward reads x (or sum) and dy
(and dsum) and writes dx, and sums the gradients of weight and bias in the same walk over the row.
Only row statistics are kept between them: three float32 per row for layer_norm, else one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..arguments import check_not_negative, check_number
from ..metal import scalar
from ..registry import COUNTS_ELEMENTS, ROWS, Case, Op, Option, register
from .norm_kernels import Norm, forward

# ---- references ---------------------------------------------------------------------------------


def rms_norm_reference(
    x: mx.array, weight: mx.array | None = None, *, eps: float = 1e-5, xp: Any = mx
) -> Any:
    """rms_norm in plain MLX."""
    y = x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def layer_norm_reference(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """layer_norm in plain MLX."""
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    y = centred * xp.rsqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def l2_norm_reference(x: mx.array, *, eps: float = 1e-12, xp: Any = mx) -> Any:
    """l2_norm in plain MLX."""
    return x / xp.maximum(xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True)), eps)


def add_rms_norm_reference(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    *,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """add_rms_norm in plain MLX."""
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps, xp=xp), total


def add_layer_norm_reference(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    eps: float = 1e-5,
    xp: Any = mx,
) -> Any:
    """add_layer_norm in plain MLX."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps=eps, xp=xp), total


# ---- ops ----------------------------------------------------------------------------------------


class Variants:
    """The kernels of an op by which of weight and bias it got, each built when first used."""

    def __init__(self, op: str, statistics: str, **parts: bool) -> None:
        self._norm = Norm(op, statistics, **parts)
        self._kernels: dict[tuple[bool, bool], Any] = {}

    def __call__(
        self,
        arrays: tuple[mx.array, ...],
        weight: mx.array | None,
        bias: mx.array | None,
        eps: float,
        *scalars: mx.array,
    ) -> Any:
        """Launches the kernel of these parameters."""
        key = (weight is not None, bias is not None)
        kernel = self._kernels.get(key)
        if kernel is None:
            norm = replace(self._norm, weighted=key[0], biased=key[1])
            kernel = self._kernels[key] = forward(norm)
        if weight is not None:
            arrays += (weight,)
        if bias is not None:
            arrays += (bias,)
        return kernel(*arrays, scalar(check_not_negative(self._norm.op, "eps", eps)), *scalars)


_RMS_NORM = Variants("rms_norm", "rms")
_LAYER_NORM = Variants("layer_norm", "layer")
_L2_NORM = Variants("l2_norm", "l2")
#: Their squares are normal float32, which no GPU takes for 0.
_SHORTEST, _LONGEST = 1.1e-19, 1e19
_ADD_RMS_NORM = Variants("add_rms_norm", "rms", residual=True)
_ADD_LAYER_NORM = Variants("add_layer_norm", "layer", residual=True)


def rms_norm(x: mx.array, weight: mx.array | None = None, eps: float = 1e-5) -> mx.array:
    """Root mean square normalisation over the last axis, as `mx.fast.rms_norm`.

        y = x · rsqrt(mean(x²) + eps) · weight

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        weight: (D,), or None for none.
        eps: added to the mean square.

    Returns:
        An array of x's shape and the promoted dtype of x and weight. Gradients for x and weight.
    """
    return _RMS_NORM((x,), weight, None, eps)  # type: ignore[no-any-return]


def layer_norm(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> mx.array:
    """Layer normalisation over the last axis, as `mx.fast.layer_norm`.

        y = (x - mean(x)) · rsqrt(var(x) + eps) · weight + bias

    The variance (of the population) is taken from the differences to the mean, so that a mean far
    from 0 costs no digits.

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        weight: (D,), or None for none.
        bias: (D,), or None for none.
        eps: added to the variance.

    Returns:
        An array of x's shape and the promoted dtype of x, weight and bias. Gradients for all three.
    """
    return _LAYER_NORM((x,), weight, bias, eps)  # type: ignore[no-any-return]


def l2_norm(x: mx.array, eps: float = 1e-12) -> mx.array:
    """Rows of length one, as `torch.nn.functional.normalize`.

        y = x / max(|x|, eps)

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        eps: what shorter rows are divided by, in [1.1e-19, 1e19], so that its square is a normal
            float32.

    Returns:
        An array of x's shape and dtype. Gradient for x, which is dy / eps in a shorter row.
    """
    number = check_number("l2_norm", "eps", eps)
    if not _SHORTEST <= number <= _LONGEST:
        raise ValueError(f"[l2_norm] 'eps' must be in [1.1e-19, 1e19] but got {eps}.")
    return _L2_NORM((x,), None, None, number)  # type: ignore[no-any-return]


def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None = None, eps: float = 1e-5
) -> tuple[mx.array, mx.array]:
    """A residual connection and the `rms_norm` after it, in one launch.

        sum = x + residual
        y = sum · rsqrt(mean(sum²) + eps) · weight

    As in the two MLX ops, sum is rounded to its dtype before it is normed: y is rms_norm(sum).

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        residual: as x; may have another dtype.
        weight: (D,), or None for none.
        eps: added to the mean square.

    Returns:
        y in the promoted dtype of x, residual and weight, and sum in that of x and residual, both
        of x's shape. Gradients for all three arrays, through both results.
    """
    return _ADD_RMS_NORM((x, residual), weight, None, eps)  # type: ignore[no-any-return]


def add_layer_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> tuple[mx.array, mx.array]:
    """A residual connection and the `layer_norm` after it, in one launch.

        sum = x + residual
        y = (sum - mean(sum)) · rsqrt(var(sum) + eps) · weight + bias

    As in the two MLX ops, sum is rounded to its dtype before it is normed: y is layer_norm(sum).

    Args:
        x: (*, D) in float32, float16 or bfloat16; computed in float32.
        residual: as x; may have another dtype.
        weight: (D,), or None for none.
        bias: (D,), or None for none.
        eps: added to the variance.

    Returns:
        y in the promoted dtype of all arrays, and sum in that of x and residual, both of x's shape.
        Gradients for all four arrays, through both results.
    """
    return _ADD_LAYER_NORM((x, residual), weight, bias, eps)  # type: ignore[no-any-return]


# ---- registry -----------------------------------------------------------------------------------

#: One element has the gradient 0 but for eps, so that only a large eps leaves a digit to check.
CASES = (Case((3,), {"D": 1}, "one element", {"eps": 0.5}), *ROWS[1:])


def define(
    norm: Norm,
    summary: str,
    formula: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    **fields: Any,
) -> None:
    """Registers a norm with all its parts: what follows from them, and the fields given."""
    follows = {
        "arguments": norm.arguments,
        "options": (Option("eps", 1e-5, (1e-2,)),),
        "outputs": ("(*, D)",) * (1 + norm.residual),
        # The backward of a sum reads the sum, an array like x.
        "reads_backward": ("x", *("weight",) * norm.weighted),
        "statistics": len(norm.kind.names),
        "cases": CASES,
        "needs": COUNTS_ELEMENTS if norm.dropped else {},
    }
    given = {"summary": summary, "formula": formula, "function": function, "reference": reference}
    register(Op(name=norm.op, family="norms", **{**follows, **given, **fields}))


_ZHANG = "Zhang & Sennrich 2019, arXiv:1910.07467"
_BA = "Ba, Kiros & Hinton 2016, arXiv:1607.06450"

define(
    Norm("rms_norm", "rms", weighted=True),
    "root mean square normalisation",
    "x · rsqrt(mean(x²) + eps) · weight",
    rms_norm,
    rms_norm_reference,
    baseline=lambda x, weight=None, *, eps=1e-5: mx.fast.rms_norm(x, weight, eps),
    paper=_ZHANG,
    torch="F.rms_norm(x, (x.shape[-1],), weight, eps)",
)
define(
    Norm("layer_norm", "layer", weighted=True, biased=True),
    "layer normalisation",
    "(x - mean(x)) · rsqrt(var(x) + eps) · weight + bias",
    layer_norm,
    layer_norm_reference,
    cases=ROWS[1:],
    baseline=lambda x, weight=None, bias=None, *, eps=1e-5: mx.fast.layer_norm(
        x, weight, bias, eps
    ),
    paper=_BA,
    torch="F.layer_norm(x, (x.shape[-1],), weight, bias, eps)",
)
define(
    Norm("l2_norm", "l2"),
    "rows of length one",
    "x / max(|x|, eps)",
    l2_norm,
    l2_norm_reference,
    options=(Option("eps", 1e-12, (3.0,)),),
    cases=(Case((3,), {"D": 1}, "one element, shorter than eps", {"eps": 9.0}), *ROWS[1:]),
    torch="F.normalize(x, dim=-1, eps=eps)",
)
define(
    Norm("add_rms_norm", "rms", weighted=True, residual=True),
    "residual connection and rms_norm",
    "sum = x + residual; y = rms_norm(sum, weight)",
    add_rms_norm,
    add_rms_norm_reference,
    paper=_ZHANG,
    torch="(lambda s: (F.rms_norm(s, (s.shape[-1],), weight, eps), s))(x + residual)",
)
define(
    Norm("add_layer_norm", "layer", weighted=True, biased=True, residual=True),
    "residual connection and layer_norm",
    "sum = x + residual; y = layer_norm(sum, weight, bias)",
    add_layer_norm,
    add_layer_norm_reference,
    paper=_BA,
    torch="(lambda s: (F.layer_norm(s, (s.shape[-1],), weight, bias, eps), s))(x + residual)",
)
