"""A mixture of experts: a router, and the experts that it chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from .. import kernels
from ..arguments import check_array
from .choosing import typical
from .expert_rows import combined, gating
from .experts import SwitchGLU


class MoE(mnn.Module):
    r"""A router and its experts, of which each token runs the ``top_k`` that the router chose
    (Shazeer et al. 2017, arXiv:1701.06538).

    .. math::

        s = \mathrm{scores}(W_{gate} x), \quad
        y = \sum_{e \in \mathrm{top}_k(s + b)} \frac{s_e}{\sum s} \mathrm{expert}_e(x)

    The parameters have the names of mlx-lm's blocks: ``gate`` and ``switch_mlp``, and
    ``e_score_correction_bias`` where there is one.

    Args:
        dims (int): The dimension of input and output.
        hidden_dims (int): The number of hidden units of an expert.
        num_experts (int): The number of experts.
        top_k (int): The experts of a token. Default: ``2``.
        scores (str): ``"softmax"`` or ``"sigmoid"``. Default: ``"softmax"``.
        normalize (bool): Whether the weights of a token's experts are divided by their sum.
            Default: ``True``.
        scale (float): A factor of the weights. Default: ``1.0``.
        n_groups (int): The number of equal groups of experts. Default: ``1``.
        topk_groups (int, optional): The groups that a token's experts are chosen from.
            Default: all.
        group_score (str): Whether a group counts by its two best experts, ``"top2"``, or its best,
            ``"max"``. Default: ``"top2"``.
        correction (bool): Whether there is a bias that is added to the scores for the choice only
            (DeepSeek-V3). It has no gradient. Default: ``False``.
        activation (callable, optional): The gated unit, as in :class:`SwitchGLU`.
        bias (bool): Whether the experts' projections have a bias. Default: ``False``.
        gate_bias (bool): Whether the router has a bias. Default: ``False``.

    Shape:
        - Input: :math:`(*, D)`.
        - Output: Same shape as the input.
    """

    def __init__(
        self,
        dims: int,
        hidden_dims: int,
        num_experts: int,
        top_k: int = 2,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        n_groups: int = 1,
        topk_groups: int | None = None,
        group_score: str = "top2",
        correction: bool = False,
        activation: Callable[[mx.array, mx.array], mx.array] | None = None,
        bias: bool = False,
        gate_bias: bool = False,
    ):
        super().__init__()
        self.switch_mlp = SwitchGLU(dims, hidden_dims, num_experts, activation, bias)
        self.gate = mnn.Linear(dims, num_experts, bias=gate_bias)
        if correction:
            self.e_score_correction_bias = mx.zeros((num_experts,))
        self._options: dict[str, Any] = {
            "top_k": top_k,
            "scores": scores,
            "normalize": normalize,
            "scale": scale,
            "n_groups": n_groups,
            "topk_groups": topk_groups,
            "group_score": group_score,
        }
        # Wrong options raise here, by their names in `topk_gating`.
        try:
            kernels.topk_gating(mx.zeros((0, num_experts)), **self._options)
        except (ValueError, TypeError) as error:
            raise type(error)(str(error).replace("[topk_gating]", "[MoE]")) from None

    def _extra_repr(self) -> str:
        options = self._options
        shown = f"num_experts={self.switch_mlp.num_experts}, top_k={options['top_k']}"
        defaults = {"scores": "softmax", "normalize": True, "scale": 1.0, "n_groups": 1}
        shown += "".join(f", {k}={options[k]}" for k, v in defaults.items() if options[k] != v)
        runs = typical("topk_gating", self.switch_mlp.num_experts, mx.float32)
        return f"{shown}, runs={runs}"

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The weights and indices, (*, k) each, of the experts of each token, the best first."""
        logits = self.gate(x)
        return gating(logits, self.get("e_score_correction_bias"), **self._options)  # type: ignore[no-any-return]

    def __call__(self, x: mx.array) -> mx.array:
        check_array("MoE", "x", x)
        width = self.switch_mlp.input_dims
        if x.ndim == 0 or x.shape[-1] != width:
            raise ValueError(f"[MoE] 'x' must have shape (*, {width}) but got {tuple(x.shape)}.")
        weights, indices = self.route(x)
        return combined(self.switch_mlp.experts(), x, weights, indices)
