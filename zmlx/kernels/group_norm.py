"""Normalisation over groups of channels, channels last.

    group_norm    y = (x - mean) · rsqrt(var + eps) · weight + bias          (Wu & He 2018)

Mean and variance are those of a sample's group: all positions, and the channels c with the same
c mod num_groups, as `mlx.nn.GroupNorm`, or the same c div (C / num_groups), as PyTorch.

Bytes: where the elements of a group lie together (no positions, or one group) the statistics are
one launch of `layer_norm`; else the array is transposed before it and after it, which moves it two
more times each way. Weight and bias are one more launch.
"""

from __future__ import annotations

from functools import update_wrapper
from math import prod
from operator import index
from typing import Any

import mlx.core as mx

from ..arguments import Argument, check
from ..autograd import nary_from_expr
from ..registry import COUNTS_ELEMENTS, Case, Op, Option, register
from ..targets import cpu
from .norms import layer_norm


def group_norm_reference(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    num_groups: int = 2,
    eps: float = 1e-5,
    pytorch_compatible: bool = False,
    xp: Any = mx,
) -> Any:
    """group_norm in plain MLX."""
    width = x.shape[-1] // num_groups
    split = (num_groups, width) if pytorch_compatible else (width, num_groups)
    within = x.ndim if pytorch_compatible else x.ndim - 1
    axes = (*range(1, x.ndim - 1), within)
    parts = x.reshape((*x.shape[:-1], *split))
    centred = parts - xp.mean(parts, axis=axes, keepdims=True)
    y = centred * xp.rsqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = y.reshape(x.shape)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _group_norm_of_any_shape(x: mx.array, groups: int, eps: float, pytorch_compatible: bool) -> Any:
    """The normed array without a reshape, which a shapeless compile cannot take: channels find
    those of their group in a table of which share one."""
    positions = tuple(range(1, x.ndim - 1))
    one = x.sum(axis=positions, keepdims=True) if positions else x
    ones = mx.stop_gradient(((one == one) | True).astype(mx.int32))
    channel = mx.cumsum(ones, axis=-1, inclusive=False)
    channels = ones.sum(axis=-1, keepdims=True)
    group = channel // (channels // groups) if pytorch_compatible else channel % groups
    shared = mx.expand_dims(group, -1) == mx.expand_dims(group, -2)

    def mean(v: mx.array) -> mx.array:
        v = v.mean(axis=positions, keepdims=True) if positions else v
        return mx.where(shared, mx.expand_dims(v, -2), 0).sum(axis=-1) * groups / channels

    centred = x.astype(mx.float32)
    centred = centred - mean(centred)
    return (centred * mx.rsqrt(mean(centred * centred) + eps)).astype(x.dtype)


_ARGUMENTS = (
    Argument("x"),
    Argument("weight", "(D,)", optional=True),
    Argument("bias", "(D,)", optional=True),
)

_AFFINE = {
    names: nary_from_expr(expression, ("normed", *names), name="group_norm_affine")
    for names, expression in {
        ("weight",): "normed * weight",
        ("bias",): "normed + bias",
        ("weight", "bias"): "normed * weight + bias",
    }.items()
}


def group_norm(
    x: mx.array,
    num_groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    pytorch_compatible: bool = False,
) -> mx.array:
    """Group normalisation of (B, *, D) with channels last, as `mlx.nn.GroupNorm`.

        y = (x - mean) · rsqrt(var + eps) · weight + bias

    Args:
        x: (B, *, D) in float32, float16 or bfloat16; computed in float32.
        num_groups: divides D.
        weight: (D,), or None for none.
        bias: (D,), or None for none.
        eps: added to the variance.
        pytorch_compatible: a group is D / num_groups neighbouring channels, as in PyTorch; else
            every num_groups-th channel.

    Returns:
        An array of x's shape and the promoted dtype of x, weight and bias. Gradients for all three.
    """
    check("group_norm", _ARGUMENTS, (x, weight, bias))
    if x.ndim < 2:
        raise ValueError(f"[group_norm] 'x' must have shape (B, *, D) but got {x.shape}.")
    try:
        groups = index(num_groups)
    except TypeError:
        raise TypeError(
            f"[group_norm] 'num_groups' must be an int but got {type(num_groups).__name__}."
        ) from None
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"[group_norm] 'num_groups' must divide {x.shape[-1]} channels but got {groups}."
        )
    dynamic = cpu.maybe_tracing((x,)) == cpu.DYNAMIC
    y = (_group_norm_of_any_shape if dynamic else _normed)(x, groups, eps, pytorch_compatible)
    given = {n: a for n, a in (("weight", weight), ("bias", bias)) if a is not None}
    return _AFFINE[tuple(given)](y, *given.values()) if given else y


def _normed(x: mx.array, groups: int, eps: float, pytorch_compatible: bool) -> mx.array:
    batch, *middle, channels = x.shape
    positions, width = prod(middle), channels // groups
    if groups == 1:
        return layer_norm(x.reshape(batch, -1), eps=eps).reshape(x.shape)
    if pytorch_compatible:
        parts = x.reshape(batch, positions, groups, width)
        order = (0, 2, 1, 3)
    else:
        parts = x.reshape(batch, positions, width, groups)
        order = (0, 3, 1, 2)
    rows = parts.transpose(order)
    y = layer_norm(rows.reshape(batch, groups, -1), eps=eps).reshape(rows.shape)
    back = tuple(order.index(axis) for axis in range(4))
    return y.transpose(back).reshape(x.shape)


def _keywords(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    num_groups: int = 2,
    **options: Any,
) -> mx.array:
    """group_norm with its arrays first, as entries call it."""
    return group_norm(x, num_groups, weight, bias, **options)


register(
    Op(
        name="group_norm",
        family="norms",
        summary="normalisation over groups of channels",
        formula="(x - mean) · rsqrt(var + eps) · weight + bias, statistics of a sample's group",
        function=update_wrapper(_keywords, group_norm),
        reference=group_norm_reference,
        arguments=_ARGUMENTS,
        options=(
            Option("num_groups", 2, (1, 4), passed="text"),
            Option("eps", 1e-5, (1e-2,)),
            Option("pytorch_compatible", False, (True,), passed="text"),
        ),
        paper="Wu & He 2018, arXiv:1803.08494",
        reads_backward=("x", "weight"),
        statistics=3,
        needs=COUNTS_ELEMENTS,
        cases=(
            Case((2, 3), {"D": 2}, "one channel a group"),
            Case((3, 3), {"D": 8}, "short groups"),
            Case((2, 5), {"D": 62}, "31 channels a group"),
            Case((2, 5, 5), {"D": 32}, "two axes of positions"),
            Case((7, 1), {"D": 62}, "one position"),
            Case((9, 3), {"D": 514}, "several simdgroups and a tail"),
            Case((2, 33), {"D": 64}, "more positions than channels in a group"),
            Case((4,), {"D": 40}, "no positions"),
        ),
        long_cases=(Case((2, 20001), {"D": 4}, "a group longer than a row that is kept"),),
        benchmarks=(Case((64, 256), {"D": 1024}), Case((4096,), {"D": 4096})),
    )
)
