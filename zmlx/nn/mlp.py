"""Gated feed-forward networks."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as mnn

from . import functional as F
from .choosing import dtype_of, outputs, typical


class GatedMLP(mnn.Module):
    r"""A feed-forward network whose hidden units are gated (Shazeer 2020, arXiv:2002.05202).

    .. math::

        y = W_{down} (\phi(W_{gate} x) \odot W_{up} x)

    The parameters have the names of mlx-lm's models: ``gate_proj``, ``up_proj``, ``down_proj``.

    Args:
        dims (int): The dimension of input and output.
        hidden_dims (int): The number of hidden units.
        bias (bool): Whether the projections have a bias. Default: ``False``.
        gate (str): The gated unit: ``"swiglu"``, ``"geglu"``, ``"geglu_tanh"``, ``"reglu"`` or
            ``"glu"``. Default: ``"swiglu"``.

    Shape:
        - Input: :math:`(*, D)`.
        - Output: Same shape as the input.
    """

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False, gate: str = "swiglu"):
        super().__init__()
        known = ("swiglu", "geglu", "geglu_tanh", "reglu", "glu")
        if gate not in known:
            raise ValueError(
                f"[{type(self).__name__}] 'gate' must be one of {', '.join(known)} but got {gate}."
            )
        self.gate_proj = mnn.Linear(dims, hidden_dims, bias=bias)
        self.up_proj = mnn.Linear(dims, hidden_dims, bias=bias)
        self.down_proj = mnn.Linear(hidden_dims, dims, bias=bias)
        self._gate = gate

    def _extra_repr(self) -> str:
        runs = typical(self._gate, outputs(self.up_proj), dtype_of(self.up_proj))
        return f"gate={self._gate}, runs={runs}"

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(F.gated[self._gate](self.gate_proj(x), self.up_proj(x)))


class SwiGLU(GatedMLP):
    r"""A feed-forward network gated by SiLU; see :class:`GatedMLP`.

    .. math::

        y = W_{down} (\mathrm{silu}(W_{gate} x) \odot W_{up} x)

    Args:
        dims (int): The dimension of input and output.
        hidden_dims (int): The number of hidden units.
        bias (bool): Whether the projections have a bias. Default: ``False``.
    """

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False):
        super().__init__(dims, hidden_dims, bias, "swiglu")


class GeGLU(GatedMLP):
    r"""A feed-forward network gated by GELU; see :class:`GatedMLP`.

    .. math::

        y = W_{down} (\mathrm{gelu}(W_{gate} x) \odot W_{up} x)

    Args:
        dims (int): The dimension of input and output.
        hidden_dims (int): The number of hidden units.
        bias (bool): Whether the projections have a bias. Default: ``False``.
        approx ('none' | 'precise' | 'tanh'): The approximation of GELU, as in
            :class:`mlx.nn.GELU`. Default: ``'none'``.
    """

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False, approx: str = "none"):
        allowed = ["none", "precise", "tanh"]
        if approx not in allowed:
            raise ValueError(f"[GeGLU] 'approx' must be one of {allowed} but got {approx!r}.")
        super().__init__(dims, hidden_dims, bias, "geglu" if approx == "none" else "geglu_tanh")
