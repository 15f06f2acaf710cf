"""Normalisation over groups of channels, channels last.

    group_norm    y = (x - mean) · rsqrt(var + eps) · weight + bias          (Wu & He 2018)

Mean and variance are those of a sample's group: all positions, and the channels c with the same
c mod num_groups, as `mlx.nn.GroupNorm`, or the same c div (C / num_groups), as PyTorch.

Bytes: the forward reads x and writes y, the backward reads x and dy and writes dx, while a sample
fits in a cache; else a sample is read twice more, and x and dy once more. Kept for the backward are
the mean and rstd of each group of a sample. The gradients of weight and bias come with that of x on
the CPU; on a GPU they are one more launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial, update_wrapper
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check, check_flag, check_integer, check_not_negative
from ..body import BodyKernel
from ..broadcasting import sum_chunks
from ..metal import scalar
from ..registry import COUNTS_ELEMENTS, Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays
from . import group_norm_lanes as lanes
from . import group_norm_threads as threads
from .group_norm_plain import Grouping, normed_and_statistics


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


_ARGUMENTS = (
    Argument("x"),
    Argument("weight", "(D,)", optional=True),
    Argument("bias", "(D,)", optional=True),
)


# ---- kernels ------------------------------------------------------------------------------------


def _on_cpu() -> bool:
    return launch.is_cpu(launch.settings())


@cache
def _forward(grouping: Grouping, cpu: bool) -> BodyKernel:
    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> Sequence[mx.array | None]:
        return _gradients(grouping, primals, cotangents, outputs, wanted)

    return lanes.forward(grouping, vjp) if cpu else threads.forward(grouping, vjp)


def _tuple(outputs: mx.array | Arrays) -> Arrays:
    return (outputs,) if isinstance(outputs, mx.array) else tuple(outputs)


def _gradients(
    grouping: Grouping,
    primals: Arrays,
    cotangents: Arrays,
    outputs: Arrays,
    wanted: Sequence[int],
) -> Sequence[mx.array | None]:
    x, statistics = primals[0], outputs[1:]
    weight = primals[1 : 1 + grouping.weighted]
    dy, dmean, _, drstd = cotangents
    names = [n for i, n in enumerate(grouping.parameters) if i + 1 in wanted]
    some = replace(grouping, summed=tuple(names))
    found: dict[str, mx.array] = {}
    arrays = (*statistics, dy)
    if _on_cpu():
        dx, *sums = _tuple(lanes.backward(some)(x, *weight, *arrays, dmean, drstd))
        found["x"] = dx
    else:
        if 0 in wanted:
            found["x"] = threads.x_backward(grouping)(x, *weight, *arrays, dmean, drstd)
        sums = list(_tuple(threads.parameter_backward(some)(x, *arrays))) if names else []
    for n, part in zip(names, sums, strict=True):
        found[n] = sum_chunks(part, primals[1 + grouping.parameters.index(n)])
    return [found.get(n) for n in ("x", *grouping.parameters, "eps")]


# ---- op -----------------------------------------------------------------------------------------


def _group_norm(
    x: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    num_groups: int,
    eps: float,
    pytorch_compatible: bool,
) -> Way:
    check("group_norm", _ARGUMENTS, (x, weight, bias))
    if x.ndim < 2:
        raise ValueError(f"[group_norm] 'x' must have shape (B, *, D) but got {x.shape}.")
    groups = check_integer("group_norm", "num_groups", num_groups)
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"[group_norm] 'num_groups' must divide {x.shape[-1]} channels but got {groups}."
        )
    check_flag("group_norm", "pytorch_compatible", pytorch_compatible)
    grouping = Grouping(groups, not pytorch_compatible, weight is not None, bias is not None)
    added = scalar(check_not_negative("group_norm", "eps", eps))
    if not x.size and not cpu.any_shape(tuple(a for a in (x, weight, bias) if a is not None)):
        run: Any = partial(normed_and_statistics, grouping)
    else:
        run = _forward(grouping, _on_cpu())
    return lambda *arrays: run(*[a for a in arrays if a is not None], added)[0]


_GROUP_NORM = Remembered(_group_norm)


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
        x: (B, *, D) in float32, float16 or bfloat16; computed in float32. A sample has fewer than
            2^32 elements.
        num_groups: divides D.
        weight: (D,), or None for none.
        bias: (D,), or None for none.
        eps: added to the variance.
        pytorch_compatible: a group is D / num_groups neighbouring channels, as in PyTorch; else
            every num_groups-th channel.

    Returns:
        An array of x's shape and the promoted dtype of x, weight and bias. Gradients for all three.
    """
    options = (num_groups, eps, pytorch_compatible)
    return _GROUP_NORM((x, weight, bias), options)  # type: ignore[no-any-return]


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
        torch="(groups := (num_groups, -1) if pytorch_compatible else (-1, num_groups),"
        " axes := (*range(1, x.ndim - 1), x.ndim if pytorch_compatible else x.ndim - 1),"
        " parts := x.float().unflatten(-1, groups),"
        " centred := parts - parts.mean(axes, keepdim=True),"
        " y := centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps),"
        " (y.flatten(-2) * weight + bias).to(x.dtype))[-1]",
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
            Case((2, 3), {"D": 288}, "more groups than lanes", {"num_groups": 96}),
            Case((9, 3), {"D": 160}, "short runs", {"num_groups": 32, "pytorch_compatible": True}),
            Case((2, 3), {"D": 520}, "long runs", {"num_groups": 2, "pytorch_compatible": True}),
        ),
        long_cases=(Case((2, 20001), {"D": 4}, "a group longer than a row that is kept"),),
        benchmarks=(Case((64, 256), {"D": 1024}), Case((4096,), {"D": 4096})),
    )
)
