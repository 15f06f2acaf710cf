"""mlx-lm's adapter of stacked experts, over layers of zmlx; imported where mlx-lm is in use."""

from __future__ import annotations

from mlx_lm.tuner.lora import LoRASwitchLinear

from .experts import QuantizedSwitchLinear, SwitchLinear


class LoRAExperts(LoRASwitchLinear):
    """``mlx_lm.tuner.lora.LoRASwitchLinear``, whose ``fuse`` returns layers of zmlx."""

    @classmethod
    def over(
        cls, layer: SwitchLinear | QuantizedSwitchLinear, r: int, dropout: float, scale: float
    ) -> LoRAExperts:
        """The layer with an adapter that does nothing yet."""
        adapted = cls(layer.input_dims, layer.output_dims, layer.num_experts, r, dropout, scale)
        adapted.linear = layer  # type: ignore[assignment]
        return adapted

    def fuse(self, dequantize: bool = False) -> SwitchLinear | QuantizedSwitchLinear:
        """The layer with the adapter's product in its weights, quantised as before or not."""
        layer = self.linear
        plain = layer if isinstance(layer, SwitchLinear) else layer.dequantized()
        product = (self.scale * self.lora_b) @ self.lora_a
        fused = SwitchLinear.of(
            plain.weight + product.astype(plain.weight.dtype), plain.get("bias")
        )
        if plain is layer or dequantize:
            return fused
        return fused.to_quantized(layer.group_size, layer.bits, layer.mode, "global_scale" in layer)
