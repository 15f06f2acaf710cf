"""What `group_norm` computes, and its gradients, in plain MLX: what transforms find in place of the
kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import mlx.core as mx

from ..body import constant
from ..transforms import Arrays

#: What the forward keeps of each group of a sample, in float32.
STATISTICS = ("mean", "rest", "rstd")


@dataclass(frozen=True)
class Grouping:
    """What is static of a call.

    Attributes:
        groups: how many.
        apart: a group is every groups-th channel, and not a run of neighbours.
        weighted, biased: whether there is a weight, a bias.
        summed: the parameters whose gradient a backward computes.
    """

    groups: int
    apart: bool
    weighted: bool
    biased: bool
    summed: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The arrays of one value per channel."""
        return ("weight",) * self.weighted + ("bias",) * self.biased


def sizes_of(x: tuple[int, ...], sizes: tuple[int, ...]) -> mx.array:
    """The launch constants of an x of that shape, which are numbers of 32 bits."""
    if max(sizes) >= 2**32:
        raise ValueError(
            "[group_norm] 'x' must have samples of fewer than 2^32 elements, and fewer positions "
            f"and groups in all, but got {x}."
        )
    return constant(sizes, mx.uint32)


def result_dtype(arrays: Arrays) -> mx.Dtype:
    """The promoted dtype of arrays."""
    return reduce(mx.result_type, (a.dtype for a in arrays))


def _split(grouping: Grouping, x: mx.array) -> tuple[mx.array, tuple[int, ...]]:
    """x in float32 with its channels as two axes, and the axes along a group."""
    width = x.shape[-1] // grouping.groups
    sizes = (width, grouping.groups) if grouping.apart else (grouping.groups, width)
    within = x.ndim - 1 if grouping.apart else x.ndim
    parts = x.reshape((*x.shape[:-1], *sizes)).astype(mx.float32)
    return parts, (*range(1, x.ndim - 1), within)


def _spread(grouping: Grouping, statistic: mx.array, ndim: int) -> mx.array:
    """A statistic per sample and group so that it broadcasts with what `_split` gives."""
    batch, groups = statistic.shape
    last = (1, groups) if grouping.apart else (groups, 1)
    return statistic.reshape((batch, *[1] * (ndim - 2), *last))


def normed_and_statistics(
    grouping: Grouping, x: mx.array, *arrays: mx.array
) -> tuple[mx.array, ...]:
    """x and the parameters and eps to y and `STATISTICS`."""
    *parameters, eps = arrays
    parts, axes = _split(grouping, x)
    mean = parts.mean(axis=axes, keepdims=True)
    centred = parts - mean
    # What rounding left of the mean, which is much where the mean is.
    rest = centred.mean(axis=axes, keepdims=True)
    centred = centred - rest
    rstd = mx.rsqrt(mx.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = affine(grouping, (centred * rstd).reshape(x.shape), *parameters)
    shape = (x.shape[0], grouping.groups)
    mean = mean.reshape(shape)
    return (
        y.astype(result_dtype((x, *parameters))),
        mean,
        rest.reshape(shape),
        rstd.reshape(shape),
    )


def affine(grouping: Grouping, y: mx.array, *parameters: mx.array) -> mx.array:
    """y · weight + bias of those that there are."""
    given = dict(zip(grouping.parameters, parameters, strict=True))
    y = y * given["weight"] if "weight" in given else y
    return y + given["bias"] if "bias" in given else y


def _normed(
    grouping: Grouping, x: mx.array, mean: mx.array, rest: mx.array, rstd: mx.array
) -> mx.array:
    parts, _ = _split(grouping, x)
    mean, rest, rstd = (_spread(grouping, s, x.ndim) for s in (mean, rest, rstd))
    return (parts - mean - rest) * rstd


def x_gradient(grouping: Grouping, x: mx.array, *arrays: mx.array) -> mx.array:
    """x, weight, `STATISTICS`, dy, and the cotangents of mean and rstd to dx."""
    *weight, mean, rest, rstd, dy, dmean, drstd = arrays
    normed = _normed(grouping, x, mean, rest, rstd)
    g, axes = _split(grouping, dy.astype(mx.float32) * weight[0] if weight else dy)
    count = x.size // (x.shape[0] * grouping.groups)
    scale, lift, slope = (
        _spread(grouping, s, x.ndim) for s in (rstd, dmean / count, drstd * rstd / count)
    )
    level = g.mean(axis=axes, keepdims=True)
    slope = slope + (g * normed).mean(axis=axes, keepdims=True)
    dx = scale * (g - level - normed * slope) + lift
    return dx.reshape(x.shape).astype(x.dtype)


def parameter_gradients(
    grouping: Grouping,
    chunks: int,
    x: mx.array,
    mean: mx.array,
    rest: mx.array,
    rstd: mx.array,
    dy: mx.array,
) -> tuple[mx.array, ...]:
    """The gradients of the parameters as (chunks, D), all in the first chunk."""
    slope = dy.astype(mx.float32)
    normed = _normed(grouping, x, mean, rest, rstd).reshape(x.shape)
    axes = tuple(range(x.ndim - 1))
    found = {"weight": slope * normed, "bias": slope}
    none = mx.zeros((chunks - 1, x.shape[-1]), mx.float32)
    return tuple(mx.concatenate([found[n].sum(axis=axes)[None], none]) for n in grouping.summed)


def normed_of_any_shape(grouping: Grouping, x: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
    """As `normed_and_statistics` (of which a gradient in plain MLX needs only y) without a reshape,
    which a shapeless compile cannot take: channels find those of their group in a table of which
    share one."""
    *parameters, eps = arrays
    groups = grouping.groups
    positions = tuple(range(1, x.ndim - 1))
    one = x.sum(axis=positions, keepdims=True) if positions else x
    ones = mx.stop_gradient(mx.logical_or(one == one, mx.array(True)).astype(mx.int32))
    channel = mx.cumsum(ones, axis=-1, inclusive=False)
    channels = ones.sum(axis=-1, keepdims=True)
    group = channel % groups if grouping.apart else channel // (channels // groups)
    shared = mx.expand_dims(group, -1) == mx.expand_dims(group, -2)

    def mean(v: mx.array) -> mx.array:
        v = v.mean(axis=positions, keepdims=True) if positions else v
        return mx.where(shared, mx.expand_dims(v, -2), 0).sum(axis=-1) * groups / channels

    centred = x.astype(mx.float32)
    centred = centred - mean(centred)
    centred = centred - mean(centred)
    y = affine(grouping, centred * mx.rsqrt(mean(centred * centred) + eps), *parameters)
    none = mx.zeros((1, groups))
    return y.astype(result_dtype((x, *parameters))), none, none, none
