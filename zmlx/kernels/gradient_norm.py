"""Kernels over the gradients of a tree: the sum of their squares, and all of them times a number.

`zmlx.optimizers.clip_by_global_norm` is made of them.
"""

from __future__ import annotations

import mlx.core as mx

from ..packed import PackedIntoKernel, PackedSumKernel
from ..registry import register_call

SQUARES = PackedSumKernel("global_norm", "x * x")
SCALE = PackedIntoKernel("clip_by_global_norm", "x * number")


def _launch(dtype: mx.Dtype) -> None:
    for size, count in ((40, SQUARES.arrays_per_launch), (40, 1), (3, 2)):
        arrays = [mx.zeros((size,), dtype)] * count
        SQUARES(arrays)
        SCALE(arrays, mx.zeros((1,)))


register_call("clip_by_global_norm", _launch)
