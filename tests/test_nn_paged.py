"""Attention over a pool of blocks, step by step, against attention over the whole sequence."""

import mlx.core as mx
import numpy as np
import pytest

import zmlx
import zmlx.nn as nn
from zmlx.testing import assert_matches

BLOCKS, SIZE, HEADS, KV, WIDTH = 9, 4, 4, 2, 16


def sequences(batch, length):
    """Queries, keys and values of whole sequences."""
    return [
        mx.random.normal((batch, heads, length, WIDTH), key=mx.random.key(i))
        for i, heads in enumerate((HEADS, KV, KV))
    ]


def attention(q, k, v, mask, sinks=None, dtype=np.float64):
    """Attention over whole sequences in NumPy, where `mask` is true."""
    q, k, v = (np.array(a).astype(dtype) for a in (q, k, v))
    k, v = (np.repeat(a, HEADS // KV, axis=1) for a in (k, v))
    scores = np.where(mask, q @ k.swapaxes(-1, -2) * dtype(WIDTH**-0.5), -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.array(sinks).astype(dtype)[:, None, None], scores.shape)
        scores = np.concatenate([scores, column[..., :1]], axis=-1)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True))[..., : v.shape[-2]] @ v


def agrees(out, *inputs):
    """The rule of zmlx.testing: NumPy's float64, and its float32 as the base."""
    assert_matches(out, attention(*inputs), attention(*inputs, dtype=np.float32))


def test_a_shapeless_compile_takes_tables_of_other_widths():
    def slots(table, lengths):
        return nn.slot_mapping(table, lengths, 3, block_size=4)

    compiled = mx.compile(slots, shapeless=True)
    for table, lengths in (([[0, 1], [3, 2]], [3, 8]), ([[5, 0, 4]], [12])):
        table, lengths = mx.array(table), mx.array(lengths)
        assert compiled(table, lengths).tolist() == slots(table, lengths).tolist()


def test_a_shapeless_compile_does_not_keep_that_nothing_was_written():
    def write(keys, slots):
        return nn.reshape_and_cache(keys, keys, zeros(3, 4, 2, 8), zeros(3, 4, 2, 8), slots)

    for count in (0, 3):
        with pytest.raises(ValueError, match=r"\[reshape_and_cache\] cannot infer output shapes"):
            mx.compile(write, shapeless=True)(zeros(count, 2, 8), mx.arange(count))


@pytest.mark.parametrize("runs", ["zmlx", "mlx"])
def test_steps_over_a_pool_are_attention_over_the_sequence(runs):
    """A prompt of 5 tokens and then single ones, over blocks in no order."""
    layer = nn.PagedAttention(HEADS, KV, WIDTH)
    q, k, v = sequences(2, 11)
    table = mx.array([[7, 0, 3], [2, 8, 5]])
    k_cache, v_cache = layer.make_cache(BLOCKS, SIZE)
    outputs, at = [], 0
    with zmlx.prefer(runs):
        for length in (5, 1, 1, 1, 3):
            part = slice(at, at + length)
            at += length
            lengths = mx.array([at, at])
            slots = nn.slot_mapping(table, lengths, length, block_size=SIZE)
            k_cache, v_cache = nn.reshape_and_cache(
                k[:, :, part], v[:, :, part], k_cache, v_cache, slots
            )
            outputs.append(layer(q[:, :, part], k_cache, v_cache, table, lengths))
    agrees(mx.concatenate(outputs, axis=2), q, k, v, np.tri(11, dtype=bool))


def test_writing_changes_its_slots_and_no_other():
    k_cache = mx.random.normal((BLOCKS, SIZE, KV, WIDTH))
    v_cache = mx.random.normal((BLOCKS, SIZE, KV, 3))
    before = [mx.array(k_cache), mx.array(v_cache)]
    slots = mx.array([-1, 30, -1, 0, 17])
    keys, values = mx.random.normal((5, KV, WIDTH)), mx.random.normal((5, KV, 3))
    after = nn.reshape_and_cache(keys, values, k_cache, v_cache, slots)
    for old, new, tokens in zip(before, after, (keys, values), strict=True):
        want = mx.array(old)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot // SIZE, slot % SIZE] = tokens[i]
        assert mx.array_equal(new, want)


@pytest.mark.parametrize("slots", [[-1, 30, -1, 0, -2], [-1, -1, -1, -1, -1], [4, 3, 2, 1, 0]])
def test_the_gradient_of_writing_counts_each_token_once(slots):
    """Those that are left out have none, and the pool has it where nothing was written."""
    pool, tokens = mx.random.normal((BLOCKS, SIZE, KV, 3)), mx.random.normal((5, KV, 3))
    cotangent = mx.random.normal(pool.shape)

    def written(tokens, pool):
        return nn.reshape_and_cache(tokens, tokens, pool, pool, mx.array(slots))[0] * cotangent

    dtokens, dpool = mx.grad(lambda *a: written(*a).sum(), (0, 1))(tokens, pool)
    want, left = mx.zeros((5, KV, 3)), mx.array(cotangent).reshape(-1, KV, 3)
    for i, slot in enumerate(slots):
        if slot >= 0:
            want[i] = left[slot]
            left[slot] = 0
    assert mx.array_equal(dtokens, want)
    assert mx.array_equal(dpool, left.reshape(pool.shape))


def test_writing_nothing_changes_nothing():
    cache = mx.random.normal((BLOCKS, SIZE, KV, WIDTH))
    for slots in (mx.array([-1, -5]), mx.zeros((0,), mx.int32)):
        tokens = mx.ones((slots.size, KV, WIDTH))
        for new in nn.reshape_and_cache(tokens, tokens, cache, cache, slots):
            assert mx.array_equal(new, cache)


def test_a_slot_past_the_pool_is_loud(monkeypatch):
    cache = mx.zeros((BLOCKS, SIZE, KV, WIDTH))
    tokens = mx.ones((2, KV, WIDTH))
    slots = mx.array([5, BLOCKS * SIZE])
    new, _ = nn.reshape_and_cache(tokens, tokens, cache, cache, slots)
    lost = mx.isnan(new).reshape(BLOCKS * SIZE, -1)
    assert lost[5].all().item()
    assert lost.sum().item() == KV * WIDTH
    table = mx.array([[0, 1]])
    past = nn.slot_mapping(table, mx.array([9]), 2, block_size=SIZE)
    assert past.tolist() == [[7, 2**31 - 1]]
    monkeypatch.setattr(zmlx.checks, "ENABLED", True)
    with pytest.raises(ValueError, match=rf"'slots' must be below {BLOCKS * SIZE} but got"):
        nn.reshape_and_cache(tokens, tokens, cache, cache, slots)
    # A trace has no values to look at.
    mx.compile(nn.reshape_and_cache)(tokens, tokens, cache, cache, mx.zeros_like(slots))


def test_slots_before_the_beginning_are_left_out():
    slots = nn.slot_mapping(mx.array([[3, 1], [0, 2]]), mx.array([5, 2]), 3, block_size=SIZE)
    assert slots.tolist() == [[14, 15, 4], [-1, 0, 1]]


def test_windows_and_sinks_reach_the_kernel():
    layer = nn.PagedAttention(HEADS, KV, WIDTH, window=3)
    q, k, v = sequences(1, 8)
    slots = nn.slot_mapping(mx.array([[4, 6]]), mx.array([8]), 8, block_size=SIZE)
    caches = nn.reshape_and_cache(k, v, *layer.make_cache(BLOCKS, SIZE), slots)
    sinks = mx.random.normal((HEADS,))
    got = layer(q, *caches, mx.array([[4, 6]]), mx.array([8]), sinks)
    agrees(got, q, k, v, np.tri(8, dtype=bool) & ~np.tri(8, k=-3, dtype=bool), sinks)


def test_repr():
    assert repr(nn.PagedAttention(8, 2, 64)) == (
        "PagedAttention(n_heads=8, n_kv_heads=2, head_dim=64, runs=zmlx)"
    )


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


LAYER = nn.PagedAttention(4, 2, 8)
TABLE, LENGTHS, POOL = zeros(1, 2, dtype=mx.int32), mx.array([3]), zeros(4, 4, 2, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.PagedAttention(4, 3, 8), "'n_kv_heads' must divide 4 heads but got 3"),
        (lambda: nn.PagedAttention(4, 2, 0), "'head_dim' must be at least 1 but got 0"),
        (lambda: LAYER.make_cache(4, 4, mx.int32),
         "'dtype' must be float32, float16 or bfloat16 but got int32"),
        (lambda: LAYER.make_cache(0, 4), "'num_blocks' must be at least 1 but got 0"),
        (lambda: LAYER(zeros(1, 3, 1, 8), POOL, POOL, TABLE, LENGTHS),
         r"'queries' must have shape \(B, 4, L, 8\) but got \(1, 3, 1, 8\)"),
        (lambda: LAYER(zeros(1, 4, 1, 8), zeros(4, 4, 1, 8), POOL, TABLE, LENGTHS),
         r"'k_cache' must have shape \(blocks, block size, 2, 8\)"),
        (lambda: nn.slot_mapping(TABLE, mx.array([1, 2]), 1, block_size=4),
         r"'context_lens' must have shape \(1,\)"),
        (lambda: nn.slot_mapping(TABLE, LENGTHS, 0, block_size=4),
         "'length' must be at least 1 but got 0"),
        (lambda: nn.reshape_and_cache(zeros(3, 2, 8), zeros(3, 2, 8), POOL, POOL, LENGTHS),
         r"'keys' must have shape \(1, 2, 8\) but got \(3, 2, 8\)"),
        (lambda: nn.reshape_and_cache(zeros(1, 2, 8, dtype=mx.float16), zeros(1, 2, 8), POOL, POOL,
                                      LENGTHS),
         "'keys' must have dtype float32 but got float16"),
        (lambda: nn.reshape_and_cache(zeros(1, 2, 8), zeros(1, 2, 8), POOL, zeros(3, 4, 2, 8),
                                      LENGTHS),
         r"'v_cache' must have shape \(4, 4, 2\)"),
    ],
)  # fmt: skip
def test_bad_input_raises_before_anything_runs(make, message):
    with pytest.raises(ValueError, match=message):
        make()
