"""What layers that choose have in common: their repr shows the choice."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..choice import choice

#: Rows that a repr asks about: those of a short prompt.
TYPICAL_ROWS = 512


def typical(op: str, width: int, dtype: mx.Dtype) -> str:
    """What runs op on rows of this width in the settings in force: "zmlx" or "mlx"."""
    return choice(op, (TYPICAL_ROWS, width), dtype).runs


class Choosing:
    """A layer that runs `op` by zmlx or MLX, as `zmlx.choice` decides for each input; its repr
    ends in what runs on a few hundred rows of its width and dtype."""

    op = ""

    def _extra_repr(self) -> str:
        weight: Any = self.get("weight")  # type: ignore[attr-defined]
        width = getattr(self, "dims", 4096) if weight is None else weight.shape[-1]
        runs = typical(self.op, width, mx.float32 if weight is None else weight.dtype)
        shown = super()._extra_repr()  # type: ignore[misc]
        return f"{shown}, runs={runs}" if shown else f"runs={runs}"
