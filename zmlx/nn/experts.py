"""The stacked experts of mlx-lm's mixtures: one array per projection holds all experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from .. import checks
from ..arguments import INDICES, check_array, check_size
from ..targets import cpu
from . import functional as F
from .choosing import dtype_of, typical, weights
from .expert_rows import Experts, each


def _positive(layer: str, **sizes: int) -> None:
    for name, size in sizes.items():
        check_size(layer, name, size)


class _Stacked(mnn.Module):
    """The weights of all experts in one array, (experts, outputs, …)."""

    weight: mx.array

    @property
    def output_dims(self) -> int:
        """The dimension of the outputs."""
        return self.weight.shape[1]

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.weight.shape[0]

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> mnn.Module:
        """The layer with an adapter of rank `r`, for `mlx_lm.tuner`: a ``LoRASwitchLinear``."""
        from .lora import LoRAExperts

        return LoRAExperts.over(self, r, dropout, scale)  # type: ignore[arg-type]


class SwitchLinear(_Stacked):
    r"""A linear layer per expert, as ``mlx_lm.models.switch_layers.SwitchLinear``.

    .. math::

        y = W_e x + b_e

    Args:
        input_dims (int): The dimension of the inputs.
        output_dims (int): The dimension of the outputs.
        num_experts (int): The number of experts.
        bias (bool): Whether the experts have a bias. Default: ``True``.

    Shape:
        - x: :math:`(*, 1, D)`, and indices that broadcast to its leading axes.
        - Output: :math:`(*, 1, H)`.
        - weight: :math:`(E, H, D)`; bias: :math:`(E, H)`.
    """

    def __init__(self, input_dims: int, output_dims: int, num_experts: int, bias: bool = True):
        super().__init__()
        _positive("SwitchLinear", input_dims=input_dims, output_dims=output_dims,
                  num_experts=num_experts)  # fmt: skip
        scale = math.sqrt(1 / input_dims)
        self.weight = mx.random.uniform(-scale, scale, (num_experts, output_dims, input_dims))
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))

    @classmethod
    def of(cls, weight: mx.array, bias: mx.array | None) -> SwitchLinear:
        """The layer of these weights."""
        experts, outputs, inputs = weight.shape
        layer = cls(inputs, outputs, experts, False)
        layer.weight = weight
        if bias is not None:
            layer.bias = bias
        return layer

    @property
    def input_dims(self) -> int:
        """The dimension of the inputs."""
        return self.weight.shape[2]

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, "
            f"num_experts={self.num_experts}, bias={'bias' in self}"
        )

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = mx.gather_mm(
            x,
            self["weight"].swapaxes(-1, -2),
            rhs_indices=indices,
            sorted_indices=sorted_indices,
        )
        return _biased(self, y, indices)

    def to_quantized(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        global_scale: bool = False,
    ) -> QuantizedSwitchLinear:
        """The layer with quantised weights, for `mlx.nn.quantize`."""
        layer = QuantizedSwitchLinear(
            self.input_dims, self.output_dims, self.num_experts, False, group_size, bits, mode,
            global_scale, self.weight,
        )  # fmt: skip
        if "bias" in self:
            layer.bias = self.bias
        return layer


class QuantizedSwitchLinear(_Stacked):
    """:class:`SwitchLinear` with quantised weights that are not trained, as
    ``mlx_lm.models.switch_layers.QuantizedSwitchLinear``.

    Args:
        input_dims (int): The dimension of the inputs.
        output_dims (int): The dimension of the outputs.
        num_experts (int): The number of experts.
        bias (bool): Whether the experts have a bias. Default: ``True``.
        group_size (int, optional): The weights that share a scale; see
            :func:`mlx.core.quantize`, also for the default.
        bits (int, optional): The bits of a weight.
        mode (str): The mode of :func:`mlx.core.quantize`. Default: ``"affine"``.
        global_scale (bool): Whether each expert has a scale of its own besides, in mode
            ``"nvfp4"``. MLX multiplies by these on a GPU alone. Default: ``False``.
        weight (array, optional): The weights to quantise; random ones unless given.

    Shape:
        - weight, scales and biases as :func:`mlx.core.quantize` returns them for
          :math:`(E, H, D)`; bias: :math:`(E, H)`; global_scale: :math:`(E,)` in float32.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        num_experts: int,
        bias: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        global_scale: bool = False,
        weight: mx.array | None = None,
    ):
        super().__init__()
        _positive("QuantizedSwitchLinear", input_dims=input_dims, output_dims=output_dims,
                  num_experts=num_experts)  # fmt: skip
        if weight is None:
            scale = math.sqrt(1 / input_dims)
            weight = mx.random.uniform(-scale, scale, (num_experts, output_dims, input_dims))
        if global_scale:
            if mode != "nvfp4":
                raise ValueError(
                    f"[QuantizedSwitchLinear] 'global_scale' must be False where the mode is not "
                    f"nvfp4 but got {global_scale} and {mode}."
                )
            self.global_scale = mx.abs(weight).max(axis=(-2, -1)).astype(mx.float32)
            parts = [
                mx.quantize(w, group_size, bits, mode, global_scale=scale)
                for w, scale in zip(weight, self.global_scale, strict=True)
            ]
            self.weight, self.scales = (mx.stack(list(p)) for p in zip(*parts, strict=True))
        else:
            self.weight, self.scales, *biases = mx.quantize(weight, group_size, bits, mode)
            if biases:
                self.biases = biases[0]
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))
        # What `None` stood for follows from the shapes.
        self.group_size = input_dims // self.scales.shape[-1]
        self.bits = self.weight.shape[-1] * 32 // input_dims
        self.mode = mode
        self.freeze()

    @property
    def input_dims(self) -> int:
        """The dimension of the inputs."""
        return self.scales.shape[2] * self.group_size

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, "
            f"num_experts={self.num_experts}, bias={'bias' in self}, "
            f"group_size={self.group_size}, bits={self.bits}, mode={self.mode}"
        )

    def dequantized(self) -> SwitchLinear:
        """The layer with weights of the dtype of its scales, bfloat16 where those are bytes."""
        how: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        if "global_scale" in self:
            parts = zip(self.weight, self.scales, self.global_scale, strict=True)
            weight = mx.stack([mx.dequantize(w, s, global_scale=g, **how) for w, s, g in parts])
        else:
            weight = mx.dequantize(self.weight, self.scales, self.get("biases"), **how)
        return SwitchLinear.of(weight, self.get("bias"))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        # MLX before 0.32.3 does not know the name.
        scaled = {"global_scale": self["global_scale"]} if "global_scale" in self else {}
        y = mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
            **scaled,
        )
        return _biased(self, y, indices)


def _biased(layer: Any, y: mx.array, indices: mx.array) -> mx.array:
    return y + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else y


class _SwiGLU(mnn.Module):
    """The gated unit of up and gate, in the order of mlx-lm's."""

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return F.gated["swiglu"](gate, up)


class SwitchGLU(mnn.Module):
    r"""A gated feed-forward network per expert, of which each token runs those it is given; as
    ``mlx_lm.models.switch_layers.SwitchGLU``, whose checkpoints it loads and whose it saves.

    .. math::

        y_{t,a} = W^e_{down} (\mathrm{silu}(W^e_{gate} x_t) \odot W^e_{up} x_t)
        \quad\text{with}\quad e = \mathrm{indices}_{t,a}

    Many tokens are sorted by expert, so that each weight is read once. ``mlx.nn.quantize``
    quantises the projections. On the CPU MLX multiplies the matrices of experts in float32 alone:
    weights in half precision run there without a bias and with SwiGLU, others raise.

    Args:
        input_dims (int): The dimension of input and output.
        hidden_dims (int): The number of hidden units of an expert.
        num_experts (int): The number of experts.
        activation (callable, optional): The gated unit, called with the projection ``up`` and then
            ``gate``, as mlx-lm's. Default: ``silu(gate) * up``.
        bias (bool): Whether the projections have a bias. Default: ``False``.

    Shape:
        - x: :math:`(*, D)`.
        - indices: :math:`(*, k)` in int32, uint32 or int64. What an index out of range returns is
          NaN; with ``ZMLX_CHECK=1`` it raises.
        - Output: :math:`(*, k, D)`.
    """

    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        num_experts: int,
        activation: Callable[[mx.array, mx.array], mx.array] | None = None,
        bias: bool = False,
    ):
        super().__init__()
        _positive("SwitchGLU", input_dims=input_dims, hidden_dims=hidden_dims,
                  num_experts=num_experts)  # fmt: skip
        if activation is not None and not callable(activation):
            raise TypeError(
                f"[SwitchGLU] 'activation' must be a callable of up and gate but got "
                f"{type(activation).__name__}."
            )
        self.gate_proj = SwitchLinear(input_dims, hidden_dims, num_experts, bias=bias)
        self.up_proj = SwitchLinear(input_dims, hidden_dims, num_experts, bias=bias)
        self.down_proj = SwitchLinear(hidden_dims, input_dims, num_experts, bias=bias)
        self.activation = _SwiGLU() if activation is None else activation

    @property
    def input_dims(self) -> int:
        """The dimension of input and output."""
        return next(weights(self.down_proj)).shape[-2]

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return next(weights(self.down_proj)).shape[0]

    def experts(self) -> Experts:
        """The projections as they are now: plain, quantised, or with adapters."""
        parts = gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        plain = all(type(p) is SwitchLinear and "bias" not in p for p in parts)
        kind = type(self.activation)
        # `zmlx.patch` derives a class from it.
        fused = plain and getattr(kind, "_zmlx_class", kind) is _SwiGLU
        return Experts(gate, up, down, self.activation, self.num_experts, fused)

    def _extra_repr(self) -> str:
        return f"runs={typical(self.experts().op(), self.input_dims, dtype_of(self.down_proj))}"

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        experts = self.experts()
        self._check(x, indices)
        y = each(experts, x, mx.clip(indices, 0, experts.count - 1))
        inside = mx.logical_and(indices >= 0, indices < experts.count)
        return mx.where(inside[..., None], y, mx.array(mx.nan, y.dtype))

    def _check(self, x: mx.array, indices: mx.array) -> None:
        check_array("SwitchGLU", "x", x)
        check_array("SwitchGLU", "indices", indices, INDICES)
        width = self.input_dims
        if x.ndim == 0 or x.shape[-1] != width:
            raise ValueError(
                f"[SwitchGLU] 'x' must have shape (*, {width}) but got {tuple(x.shape)}."
            )
        if indices.ndim != x.ndim or indices.shape[:-1] != x.shape[:-1]:
            expected = ", ".join([*map(str, x.shape[:-1]), "k"])
            raise ValueError(
                f"[SwitchGLU] 'indices' must have shape ({expected}) but got "
                f"{tuple(indices.shape)}."
            )
        count = self.num_experts
        if checks.ENABLED and cpu.have_values((indices,)):
            values: Any = indices.reshape(-1).tolist()
            for value in values:
                if not 0 <= value < count:
                    raise ValueError(
                        f"[SwitchGLU] 'indices' must be in [0, {count}) but got {value}."
                    )
