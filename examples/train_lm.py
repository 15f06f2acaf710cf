"""Train a byte-level language model with zmlx's kernels.

    python examples/train_lm.py [--text FILE] [--steps 300]

The model is a small Llama: RMSNorm, rotary attention, SwiGLU. Three of its operations are kernels
of zmlx with gradients of their own; all the rest is plain MLX, and so is the training loop.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import zmlx
from zmlx.kernels import cross_entropy, rms_norm, swiglu

LAYERS, WIDTH, HEADS, HIDDEN, BYTES = 4, 128, 4, 384, 256
BATCH, CONTEXT = 16, 64


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = mx.ones((WIDTH,))

    def __call__(self, x):
        return rms_norm(x, self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rope = nn.RoPE(WIDTH // HEADS)

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, -1)
        queries, keys, values = qkv.transpose(2, 0, 3, 1, 4)
        queries, keys = self.rope(queries), self.rope(keys)
        scale = (WIDTH // HEADS) ** -0.5
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask="causal"
        )
        return self.out(attended.transpose(0, 2, 1, 3).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def __call__(self, x):
        return self.down(swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.mlp_norm, self.mlp = RMSNorm(), MLP()

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="any file (default: Python's help topics)")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"'--steps' must be at least 1 but got {options.steps}.")

    if mx.default_device() == mx.cpu:
        zmlx.use_openblas()
    mx.set_cache_limit(2 << 30)
    mx.random.seed(0)
    text = options.text.read_bytes() if options.text else "\n".join(topics.values()).encode()
    if len(text) <= CONTEXT:
        parser.error(f"'--text' must hold more than {CONTEXT} bytes but got {len(text)}.")
    data, rng = np.frombuffer(text, np.uint8).astype(np.int32), np.random.default_rng(0)

    model = Decoder()
    optimizer = optim.AdamW(1e-3)
    loss_and_gradients = nn.value_and_grad(model, lambda x, y: cross_entropy(model(x), y))
    for step in range(1, options.steps + 1):
        start = time.perf_counter()
        first = rng.integers(0, len(data) - CONTEXT, size=(BATCH, 1))
        window = mx.array(data[first + np.arange(CONTEXT + 1)])
        loss, gradients = loss_and_gradients(window[:, :-1], window[:, 1:])
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        if step % 10 == 0 or step == options.steps:
            speed = BATCH * CONTEXT / (time.perf_counter() - start)
            print(f"step {step:4}  loss {loss.item():.4f}  {speed:8,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
