"""`mlx.nn.Dropout` without a stored mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as mnn
from mlx.nn.layers import dropout as _mlx

from .. import kernels
from ..choice import use_kernel
from . import functional as F
from .choosing import Choosing


def random_seed() -> mx.array:
    """A 0-d seed of 60 bits from MLX's random state, so that `mx.random.seed` repeats it and a
    compiled function that has `mx.random.state` among its inputs draws a new one per call.

    Drawn as three numbers, since one has the 24 bits of a float32.
    """
    parts = mx.random.randint(0, 1 << 20, (3,), mx.int64)
    return (parts * mx.array([1 << 40, 1 << 20, 1], mx.int64)).sum()


def dropped(layer: mnn.Dropout, mlx: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """The call of a layer whose call in MLX is `mlx`."""
    drops = layer.training and F.are_numbers(layer._p_1) and layer._p_1 != 1
    if not drops or not use_kernel("dropout", x):
        return mlx(x)
    return kernels.dropout(x, 1 - layer._p_1, seed=random_seed())


class Dropout(Choosing, mnn.Dropout):
    r"""Randomly zero a portion of the elements during training, as :class:`mlx.nn.Dropout`.

    The remaining elements are multiplied with :math:`\frac{1}{1-p}`. The mask is drawn again in
    the backward and never stored. The layer drops other elements than MLX's under the same seed.

    Args:
        p (float): The probability to zero an element. Default: ``0.5``.
    """

    op = "dropout"

    def __call__(self, x: mx.array) -> mx.array:
        return dropped(self, super().__call__, x)


def __getattr__(name: str) -> Any:
    return getattr(_mlx, name)
