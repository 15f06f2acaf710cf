"""What the tests of decoding call with, and compare with."""

import mlx.core as mx
import numpy as np
from attention_oracle import arrays

from zmlx.kernels.attention import scaled_dot_product_attention_reference as plain


def qkv(b=2, h=4, k=2, queries=3, keys=300, d=32, v=16, **more):
    return arrays((b, h, queries, d), (b, k, keys, d), (b, k, keys, v), **more)


def each_batch(q, k, v, lengths, sinks=None, *, xp, **options):
    """The plain op on the keys that each batch has."""
    return xp.concatenate(
        [
            plain(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], None, sinks, **options,
                  xp=xp)
            for i, n in enumerate(lengths)
        ]
    )  # fmt: skip


def paged(x, size, rng, spare=3):
    """Keys as shuffled blocks, and the table; what no batch has is NaN."""
    b, kv, s, d = x.shape
    count = -(-s // size)
    order = rng.permutation(b * count + spare)
    cache = np.full((b * count + spare, size, kv, d), np.nan, dtype=np.float32)
    table = order[: b * count].reshape(b, count)
    padded = np.full((b, count * size, kv, d), np.nan, dtype=np.float32)
    padded[:, :s] = np.array(x.astype(mx.float32)).transpose(0, 2, 1, 3)
    for i in range(b):
        cache[table[i]] = padded[i].reshape(count, size, kv, d)
    return mx.array(cache).astype(x.dtype), mx.array(table.astype(np.int32))
