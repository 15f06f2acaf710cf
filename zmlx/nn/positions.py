"""`mlx.nn.RoPE` by zmlx's kernel."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as mnn

from . import functional as F
from .choosing import Choosing


class RoPE(Choosing, mnn.RoPE):
    """Implements the rotary positional encoding, as :class:`mlx.nn.RoPE`.

    The traditional implementation rotates consecutive pairs of elements in the feature dimension
    while the default implementation rotates pairs with stride half the feature dimensions.

    Args:
        dims (int): The feature dimensions to be rotated. If the input feature is larger than dims
            then the rest is left unchanged.
        traditional (bool, optional): Whether pairs are consecutive. Default: ``False``.
        base (float, optional): The base used to compute angular frequency for each dimension in
            the positional encodings. Default: ``10000``.
        scale (float, optional): The scale used to scale the positions. Default: ``1.0``.

    Shape:
        - Input: :math:`(B, *, L, D)` in float32, float16 or bfloat16; computed in float32.
        - Output: Same shape as the input.
    """

    op = "rope"

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return F.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=offset,
        )
