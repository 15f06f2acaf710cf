"""`mlx.nn`'s norms by zmlx's kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as mnn
from mlx.nn.layers import normalization as _mlx

from .. import kernels
from ..choice import use_kernel
from . import functional as F
from .choosing import Choosing


class RMSNorm(Choosing, mnn.RMSNorm):
    r"""Applies Root Mean Square normalization to the inputs, as :class:`mlx.nn.RMSNorm`.

    .. math::

        y = \frac{x}{\sqrt{E[x^2] + \epsilon}} \gamma

    Args:
        dims (int): The feature dimension of the input to normalize over
        eps (float): A small additive constant for numerical stability. Default: ``1e-5``.

    Shape:
        - Input: :math:`(*, D)` in float32, float16 or bfloat16; computed in float32.
        - Output: Same shape as the input.
    """

    op = "rms_norm"

    def __call__(self, x: mx.array) -> mx.array:
        return F.rms_norm(x, self["weight"], self.eps)


class LayerNorm(Choosing, mnn.LayerNorm):
    r"""Applies layer normalization to the inputs, as :class:`mlx.nn.LayerNorm`.

    .. math::

        y = \frac{x - E[x]}{\sqrt{Var[x] + \epsilon}} \gamma + \beta

    Args:
        dims (int): The feature dimension of the input to normalize over
        eps (float): A small additive constant for numerical stability. Default: ``1e-5``.
        affine (bool): If True learn an affine transform to apply after the normalization.
            Default: ``True``.
        bias (bool): If True include a translation to the affine transformation.
            Default: ``True``.

    Shape:
        - Input: :math:`(*, D)` in float32, float16 or bfloat16; computed in float32.
        - Output: Same shape as the input.
    """

    op = "layer_norm"

    def __call__(self, x: mx.array) -> mx.array:
        return F.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)


class GroupNorm(Choosing, mnn.GroupNorm):
    r"""Applies Group Normalization to the inputs, as :class:`mlx.nn.GroupNorm`.

    .. math::

        y = \frac{x - E[x]}{\sqrt{Var[x] + \epsilon}} \gamma + \beta

    over all positions and the channels of a group.

    Args:
        num_groups (int): Number of groups to separate the features into
        dims (int): The feature dimensions of the input to normalize over
        eps (float): A small additive constant for numerical stability. Default: ``1e-5``.
        affine (bool): If True learn an affine transform to apply after the normalization.
            Default: ``True``.
        pytorch_compatible (bool): If True perform the group normalization in the same
            order/grouping as PyTorch. Default: ``False``.

    Shape:
        - Input: :math:`(B, *, D)` in float32, float16 or bfloat16; computed in float32.
        - Output: Same shape as the input.
    """

    op = "group_norm"

    def __call__(self, x: mx.array) -> Any:
        weight, bias = self.get("weight"), self.get("bias")
        if F.is_eps(self.eps) and use_kernel("group_norm", x, weight, bias) and x.ndim >= 2:
            return kernels.group_norm(
                x,
                self.num_groups,
                weight,
                bias,
                self.eps,
                self.pytorch_compatible,
            )
        return super().__call__(x)


def __getattr__(name: str) -> Any:
    return getattr(_mlx, name)
