"""A small Llama-shaped decoder over bytes whose fused operations are chosen by a table."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

VOCABULARY = 256
"""One entry per byte value."""


@dataclass(frozen=True)
class Operations:
    """The operations in which the demo's rows differ; everything else is the same MLX code."""

    rms_norm: Callable[[mx.array, mx.array, float], mx.array]
    swiglu: Callable[[mx.array, mx.array], mx.array]
    cross_entropy: Callable[[mx.array, mx.array], mx.array]


def mlx_operations() -> Operations:
    """Returns MLX's own operations, as ``mlx.nn`` and ``mlx_lm`` use them."""
    return Operations(
        rms_norm=mx.fast.rms_norm,
        swiglu=lambda gate, up: nn.silu(gate) * up,
        cross_entropy=lambda logits, targets: nn.losses.cross_entropy(
            logits, targets, reduction="mean"
        ),
    )


def zmlx_operations() -> Operations:
    """Returns zmlx's kernels for the same operations."""
    from zmlx import kernels

    return Operations(
        rms_norm=kernels.rms_norm,
        swiglu=kernels.swiglu,
        cross_entropy=kernels.cross_entropy,
    )


@dataclass(frozen=True)
class Size:
    """The demo model's shape: layers, width, attention heads and hidden width of the MLP."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    hidden: int = 384


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis with a learned weight."""

    def __init__(self, width: int, operations: Operations):
        super().__init__()
        self.weight = mx.ones((width,))
        self._rms_norm = operations.rms_norm

    def __call__(self, x: mx.array) -> mx.array:
        return self._rms_norm(x, self.weight, 1e-5)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.rope = nn.RoPE(size.width // size.heads)

    def __call__(self, x: mx.array) -> mx.array:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, -1)
        queries, keys, values = qkv.transpose(2, 0, 3, 1, 4)
        attended = mx.fast.scaled_dot_product_attention(
            self.rope(queries),
            self.rope(keys),
            values,
            scale=(width // self.heads) ** -0.5,
            mask="causal",
        )
        return self.out(attended.transpose(0, 2, 1, 3).reshape(batch, length, width))


class MLP(nn.Module):
    """The gated feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, size: Size, operations: Operations):
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)
        self._swiglu = operations.swiglu

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self._swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, size: Size, operations: Operations):
        super().__init__()
        self.attention_norm = RMSNorm(size.width, operations)
        self.attention = Attention(size)
        self.mlp_norm = RMSNorm(size.width, operations)
        self.mlp = MLP(size, operations)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A causal language model over bytes: tokens (batch, length) to logits (…, 256)."""

    def __init__(self, size: Size, operations: Operations):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = [Block(size, operations) for _ in range(size.layers)]
        self.norm = RMSNorm(size.width, operations)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
