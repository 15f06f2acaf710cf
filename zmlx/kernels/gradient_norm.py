"""Kernels over the gradients of a tree: the sum of their squares, and all of them times a number.

`zmlx.optimizers.clip_by_global_norm` is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import launch
from ..codegen import Elementwise, Operand, Output
from ..packed import PackedIntoKernel, PackedKernel, PackedSumKernel, groups
from ..registry import register_call

SQUARES = PackedSumKernel("global_norm", "x * x")
SCALE = PackedIntoKernel("clip_by_global_norm", "x * number")
SCALE_IN_PLACE = PackedKernel(
    "clip_by_global_norm",
    Elementwise(
        (Operand("x", "full"), Operand("number", "scalar")), (Output("y", "x * number", "full"),)
    ),
    ("x",),
)


def scaled(arrays: Sequence[mx.array], number: mx.array) -> list[mx.array]:
    """All arrays times `number`, a float32 array of one, in so many launches that with those of
    `SQUARES` there are at most ⌈arrays / 14⌉ + 1 of each dtype.

    On the CPU results take the memory of the arrays where nobody else holds those. A launch does
    that for 14 arrays; for each launch of `SQUARES` after the first, the 28 smallest arrays that
    are left go into a common one instead.
    """
    if launch.settings().target != "cpu":
        return SCALE(arrays, number)
    common: list[int] = []
    for members in groups([(x,) for x in arrays]):
        more = -(-len(members) // SQUARES.arrays_per_launch) - 1
        members.sort(key=lambda i: arrays[i].size)
        common += members[: more * SCALE.arrays_per_launch]
    apart = sorted(set(range(len(arrays))) - set(common))
    done = list(arrays)
    for i, x in zip(common, SCALE([arrays[i] for i in common], number), strict=True):
        done[i] = x
    for i, (x,) in zip(apart, SCALE_IN_PLACE([(arrays[i],) for i in apart], number), strict=True):
        done[i] = x
    return done


def _launch(dtype: mx.Dtype) -> None:
    for size, count in ((40, SQUARES.arrays_per_launch), (40, 1), (3, 2)):
        arrays = [mx.zeros((size,), dtype)] * count
        SQUARES(arrays)
        SCALE(arrays, mx.zeros((1,)))
        SCALE_IN_PLACE([(x,) for x in arrays], mx.zeros((1,)))


register_call("clip_by_global_norm", _launch)
