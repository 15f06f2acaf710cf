"""What layers that choose have in common: their repr shows the choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as mnn
from mlx.utils import tree_flatten

from ..arguments import FLOATING
from ..choice import choice

#: Rows that a repr asks about: those of a short prompt.
TYPICAL_ROWS = 512
#: Their width where a layer does not say.
TYPICAL_WIDTH = 4096


def typical(op: str, width: int, dtype: mx.Dtype) -> str:
    """What runs op on rows of this width in the settings in force: "zmlx" or "mlx"."""
    return choice(op, (TYPICAL_ROWS, width), dtype).runs


def weights(layer: Any) -> Iterator[mx.array]:
    """The matrices, (*, outputs, inputs), of a linear layer or of the one that it wraps, as
    adapters do. Quantised ones have fewer columns than inputs."""
    if isinstance(layer, mnn.Module):
        weight = dict.get(layer, "weight")
        if isinstance(weight, mx.array) and weight.ndim > 1:
            yield weight
        for inner in dict.values(layer):
            yield from weights(inner)


def outputs(layer: mnn.Module) -> int:
    """How many outputs a linear layer has."""
    weight = next(weights(layer), None)
    return TYPICAL_WIDTH if weight is None else weight.shape[-2]


def dtype_of(layer: mnn.Module) -> mx.Dtype:
    """The floating dtype of a layer's parameters; float32 where it has none, as in microscaling
    modes."""
    parameters: Any = tree_flatten(layer.parameters())
    return next((p.dtype for _, p in parameters if p.dtype in FLOATING), mx.float32)


class Choosing:
    """A layer that runs `op` by zmlx or MLX, as `zmlx.choice` decides for each input; its repr
    ends in what runs on a few hundred rows of its width and dtype."""

    op = ""

    def _extra_repr(self) -> str:
        weight: Any = self.get("weight")  # type: ignore[attr-defined]
        width = getattr(self, "dims", TYPICAL_WIDTH) if weight is None else weight.shape[-1]
        runs = typical(self.op, width, mx.float32 if weight is None else weight.dtype)
        shown = super()._extra_repr()  # type: ignore[misc]
        return f"{shown}, runs={runs}" if shown else f"runs={runs}"
