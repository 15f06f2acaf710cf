"""Attention layers against mlx.nn's, mlx-lm's and themselves."""

import mlx.core as mx
import mlx.nn as mnn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache

import zmlx
import zmlx.nn as nn
from zmlx import launch


def multi_head(*sizes, **options):
    """Our layer and MLX's, with the same parameters."""
    mx.random.seed(11)
    ours, theirs = (m.MultiHeadAttention(*sizes, **options) for m in (nn, mnn))
    parameters = tree_map(lambda p: p + 0.3 * mx.random.normal(p.shape), theirs.parameters())
    theirs.update(parameters)
    ours.update(parameters)
    return ours, theirs


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_attention_with_a_cache_is_attention_without(n_kv_heads):
    mx.random.seed(0)
    layer, x = nn.Attention(32, 4, n_kv_heads), mx.random.normal((2, 9, 32))
    whole, cache = layer(x, "causal"), KVCache()
    parts = [layer(x[:, :5], "causal", cache)]
    parts += [layer(x[:, i : i + 1], None, cache) for i in range(5, 9)]
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5).item()


def test_multi_head_attention_takes_a_mask():
    ours, theirs = multi_head(32, 4, bias=True)
    x = mx.random.normal((2, 7, 32))
    mask = mnn.MultiHeadAttention.create_additive_causal_mask(7)
    assert mx.allclose(ours(x, x, x, mask), theirs(x, x, x, mask), rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize(("kind", "width"), [("cpu", 1032), ("gpu", 520)])
@pytest.mark.parametrize("length", [1, 20])
def test_attention_takes_heads_that_no_tile_has_room_for(kind, width, length):
    ours, theirs = multi_head(width, 1)
    x = mx.random.normal((1, length, width))

    def loss(layer, x):
        with launch.geometry(kind), zmlx.prefer("zmlx"):
            return mx.sin(layer(x, x, x)).sum()

    got, want = (mx.value_and_grad(loss, 1)(layer, x) for layer in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-4).item()


def filled(batch, dtype):
    """A cache that 5 tokens are in."""
    cache, rows = KVCache(), mx.ones((batch, 2, 5, 8), dtype)
    cache.update_and_fetch(rows, rows)
    return cache


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("make", [None, KVCache, lambda: RotatingKVCache(8), filled])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0), (0, 0)])
def test_attention_takes_no_rows(batch, length, mask, make, dtype):
    layer = nn.Attention(32, 4, 2, bias=True)
    layer.set_dtype(dtype)
    x = mx.zeros((batch, length, 32), dtype)

    def loss(x):
        cache = None if make is None else make(batch, dtype) if make is filled else make()
        y = layer(x, mask, cache)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        return y.sum()

    value, gradients = mnn.value_and_grad(layer, loss)(x)
    assert value.item() == 0
    assert not any(mx.any(g).item() for _, g in tree_flatten(gradients))
    assert mx.grad(loss)(x).shape == x.shape


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 0), (2, 0, 3), (0, 3, 3)])
def test_multi_head_attention_takes_no_queries_and_no_keys(shape, masked, dtype):
    """MLX's is 0 before the last projection where there are no keys."""
    batch, length, keys = shape
    ours, theirs = multi_head(32, 4, bias=True)
    ours.set_dtype(dtype)
    theirs.set_dtype(dtype)
    q, k = mx.ones((batch, length, 32), dtype), mx.ones((batch, keys, 32), dtype)
    mask = mx.ones((length, keys), mx.bool_) if masked else None

    def outcome(layer):
        value, gradients = mnn.value_and_grad(layer, lambda q, k: layer(q, k, k, mask).sum())(q, k)
        return [layer(q, k, k, mask), value, *(g for _, g in tree_flatten(gradients))]

    with zmlx.prefer("zmlx"):
        mine = outcome(ours)
    for a, b in zip(mine, outcome(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert mx.array_equal(a, b).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        (mx.int8, 126),
        (mx.int8, -128),
        (mx.uint8, 254),
        (mx.int16, 32766),
        (mx.uint16, 65534),
        (mx.uint32, 70000),
        (mx.int64, 70000),
        (mx.uint64, 70000),
    ],
    ids=str,
)
def test_offsets_of_any_integer_dtype_are_those_of_mlx(kind, offset, shape, dtype):
    """At the end of their range, so that sums of steps in their dtype would wrap."""
    x = mx.random.normal((3, 2, 5, 8), key=mx.random.key(6)).astype(dtype)
    start = mx.full(shape, offset, kind)

    def outcome(module):
        layer = module.RoPE(8)
        return layer(x, start), mx.grad(lambda x: (layer(x, start) * x).sum())(x)

    with zmlx.prefer("zmlx"):
        ours, theirs = outcome(nn), outcome(mnn)
    # An angle of 2^16 has an eps of 2^-7, of which frequencies computed in two ways are off by one.
    bound = 2**-5 * mx.abs(x).max().item()
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert mx.abs(a - b).max().item() <= bound
