"""decode_attention, paged_attention and quantized_attention equal the plain op, and keep to what
tables and lengths allow."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import arrays, assert_right, assert_right_gradients
from decode_arrays import each_batch, paged, qkv
from plain_gradients import plain_gradients

import zmlx
from zmlx import checks, launch, metal
from zmlx.kernels import decode_attention, decode_launch, paged_attention, quantized_attention
from zmlx.kernels.decode_lanes import LANES
from zmlx.kernels.paged import paged_attention_reference
from zmlx.kernels.quantized import quantized_attention_reference

KINDS = ("cpu", "gpu")
OPTIONS = [{}, {"causal": True}, {"window": 40}, {"causal": True, "window": 9, "softcap": 2.0}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_equals_the_plain_op(kind, options):
    q, k, v = qkv()
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    lengths = mx.array([300, 17])
    with launch.geometry(kind):
        got = decode_attention(q, k, v, sinks=sinks, **options)
        assert_right(got, [q, k, v, None, sinks], **options)
        got = decode_attention(q, k, v, lengths, sinks, **options)
        assert_right(got, [q, k, v, lengths, sinks], each_batch, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_paged_equals_the_plain_op(kind, size, options):
    q, k, v = qkv()
    rng = np.random.default_rng(1)
    cache_k, table = paged(k, size, rng)
    cache_v, _ = paged(v, size, np.random.default_rng(1))
    lengths = mx.array([300, 41])
    with launch.geometry(kind):
        got = paged_attention(q, cache_k, cache_v, table, lengths, **options)
    assert_right(got, [q, k, v, lengths], each_batch, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_several_heads_groups_of_their_rows_spans_and_batches(kind, dtype):
    q, k, v = qkv(b=2, h=20, k=2, queries=1, keys=2600, d=24, v=40, dtype=dtype)
    cache_k, table = paged(k, 16, np.random.default_rng(1))
    cache_v, _ = paged(v, 16, np.random.default_rng(1))
    lengths = mx.array([2600, 1500])
    side_by_side = [mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v)]
    with launch.geometry(kind):
        for got in (
            decode_attention(q, k, v, lengths),
            decode_attention(q, *side_by_side, lengths),
            paged_attention(q, cache_k, cache_v, table, lengths),
        ):
            assert_right(got, [q, k, v, lengths], each_batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_quantized_equals_the_plain_op(kind, bits, group_size, dtype):
    q, k, v = qkv(d=128, v=256 if group_size == 32 else 128, keys=77, dtype=dtype)
    some = [mx.quantize(x, group_size, bits) for x in (k, v)]
    expanded = [
        mx.dequantize(words, *[x.astype(mx.float32) for x in rest], group_size, bits)
        for words, *rest in some
    ]
    with launch.geometry(kind):
        got = quantized_attention(q, *some[0], *some[1], bits=bits, causal=True)
    assert got.dtype == dtype
    assert_right(got, [q, *expanded], causal=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("d", "v"), [(32, 96), (96, 64), (192, 32), (64, 320)])
@pytest.mark.parametrize("queries", [1, 3])
def test_packed_rows_may_have_any_number_of_words(bits, d, v, queries):
    """A thread takes 16 bytes at once, which are a group of 32 values or half of one."""
    q, k, values = qkv(d=d, v=v, keys=45, queries=queries)
    some = [mx.quantize(x, 32, bits) for x in (k, values)]
    expanded = [mx.dequantize(*x, 32, bits) for x in some]
    got = quantized_attention(q, *some[0], *some[1], bits=bits, causal=True)
    assert_right(got, [q, *expanded], causal=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8], ids=str)
def test_lanes_in_registers_equal_lanes_in_loops(dtype):
    """What a GPU compiles in their place computes the same, bit for bit."""
    loops = LANES[LANES.index("template") : LANES.index("// Before a loop")]
    each = """
    {
        const float by = float(a[3]), plus = float(a[4]);
        const auto x = NAME_read<N>(a + 1), y = NAME_read<N>(a + 2);
        NAME_write<N>(out, NAME_fma<N>(x, NAME_splat<N>(a[0]), y));
        NAME_write<N>(out + N, x);
        NAME_write<N>(out + 2 * N, NAME_dequantized<8, N>(bytes + 1, 0, by, plus));
        NAME_write<N>(out + 3 * N, NAME_codes<8, N>(bytes + 2, 0));
        for (int place = 0; place < 2; ++place) {
            const auto z = NAME_dequantized<4, N>(bytes + 3, place, by, plus);
            NAME_write<N>(out + (4 + place) * N, z);
            NAME_write<N>(out + (6 + place) * N, NAME_codes<4, N>(bytes + 1, place));
        }
        NAME_write<N>(out + 8 * N, NAME_pair_sums<N>(x, y));
    }
    """
    kernel = metal.kernel(
        name="lanes",
        input_names=["a", "bytes"],
        output_names=["registers", "looped"],
        source=each.replace("NAME", "zmlx").replace("out", "registers")
        + each.replace("NAME", "loop").replace("out", "looped"),
        header=LANES
        + "const constant int found = ZMLX_FLOATS;\n"
        + loops.replace("zmlx_", "loop_"),
    )
    rng = np.random.default_rng(0)
    a = mx.array(rng.standard_normal(20) * 50).astype(dtype)
    packed = mx.array(rng.integers(0, 256, 20).astype(np.uint8))
    for n in (4, 8, 16):
        registers, looped = kernel(
            a,
            packed,
            template=[("N", n)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(9 * n,)] * 2,
            output_dtypes=[mx.float32] * 2,
        )
        assert np.array_equal(registers, looped)
        assert np.array_equal(registers[n : 2 * n], a[1 : 1 + n].astype(mx.float32))


def test_a_slice_of_a_cache_is_read_where_it_lies():
    q, k, v = qkv(queries=1, keys=512)
    before = metal.statistics()["contiguous_copies"]
    for n in (100, 300):
        got = decode_attention(q, k[:, :, :n], v[:, :, :n])
        mx.eval(got)
        assert metal.statistics()["contiguous_copies"] == before
        assert_right(got, [q, k[:, :, :n], v[:, :, :n]])
        before = metal.statistics()["contiguous_copies"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["slice", "turned"])
def test_a_quantised_cache_is_read_where_it_lies(kind, bits, layout):
    q, k, v = qkv(queries=1, keys=200, d=64, v=96)
    packed = [x for each in (k, v) for x in mx.quantize(each, 32, bits)]
    if layout == "slice":
        given = [x[:, :, 30:130] for x in packed]
    else:  # (B, S, K, G) in memory
        given = [mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)[:, :, 30:130] for x in packed]
    mx.eval(q, given)
    before = metal.statistics()["contiguous_copies"]
    with launch.geometry(kind):
        got = quantized_attention(q, *given, bits=bits)
        mx.eval(got)
    assert metal.statistics()["contiguous_copies"] == before
    dense = [mx.dequantize(*given[i : i + 3], 32, bits) for i in (0, 3)]
    assert_right(got, [q, *dense])


def test_values_that_do_not_lie_side_by_side():
    q, k, v = qkv()
    turned = [mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (k, v)]
    np.testing.assert_array_equal(decode_attention(q, *turned), decode_attention(q, k, v))


def test_a_new_length_compiles_nothing():
    q, k, v = qkv(queries=1, keys=2000)
    mx.eval(decode_attention(q, k[:, :, :100], v[:, :, :100]))
    before = metal.statistics()["compiles"]
    for n in (101, 555, 1999):
        mx.eval(decode_attention(q, k[:, :, :n], v[:, :, :n]))
    assert metal.statistics()["compiles"] == before


def test_no_keys_are_nan_and_with_sinks_zero():
    q, k, v = qkv()
    lengths = mx.array([0, 5])
    out = np.array(decode_attention(q, k, v, lengths))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()
    out = np.array(decode_attention(q, k, v, lengths, mx.zeros((4,))))
    assert (out[0] == 0).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize(("b", "h", "queries"), [(2, 4, 0), (2, 0, 3), (0, 4, 3)])
def test_no_queries_launch_nothing(b, h, queries, monkeypatch):
    monkeypatch.setattr(decode_launch, "_spans", None)
    q, k, _ = qkv(b=b, h=4, queries=queries)
    q, packed = q[:, :h], [x[:b] for x in mx.quantize(qkv()[1], 32, 8)]
    cache, table = paged(qkv()[1], 16, np.random.default_rng(1))
    lengths = mx.array([9, 9])
    for sinks in (None, mx.zeros((h,))):
        for width, out in (
            (16, decode_attention(q, k, k[..., :16], sinks=sinks)),
            (16, paged_attention(q, cache, cache[..., :16], table[:b], lengths[:b], sinks)),
            (32, quantized_attention(q, *packed, *packed, None, sinks)),
        ):
            assert np.array(out).shape == (b, h, queries, width)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64], ids=str)
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_queries_before_the_first_key_count_below_zero(target, dtype):
    """Also where the lengths have no sign."""
    q, k, v = qkv(b=4, queries=5, keys=9)
    lengths, options = [0, 1, 3, 9], {"causal": True, "window": 3}
    with zmlx.target(target):
        got = decode_attention(q, k, v, mx.array(lengths, dtype), **options)
        none = decode_attention(q, k[:, :, :0], v[:, :, :0], **options)
    assert np.isnan(np.array(got)[0]).all()
    assert np.isnan(np.array(none)).all()
    want = each_batch(q[1:], k[1:], v[1:], lengths[1:], xp=mx, **options)
    np.testing.assert_allclose(np.array(got)[1:], np.array(want), rtol=1e-5, atol=1e-6)


def test_rows_of_a_cache_of_no_blocks_are_not_read():
    """They would lie in no array's memory."""
    script = """if True:
        import mlx.core as mx
        from zmlx.kernels import paged_attention
        q, pool = mx.ones((1, 1, 1, 64)), mx.zeros((0, 2**20, 1, 64))
        out = paged_attention(q, pool, pool, mx.zeros((1, 1), mx.int32), mx.array([2**20]))
        try:
            mx.eval(out)
        except RuntimeError as error:
            assert "'block_table' must be in range but got 0" in str(error)
        else:
            raise AssertionError(out)
    """
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_cache_of_no_blocks(target):
    q, cache, table = mx.ones((2, 2, 1, 8)), mx.zeros((0, 4, 2, 8)), mx.zeros((2, 3), mx.int32)
    lengths = mx.zeros((2,), mx.int32)
    with zmlx.target(target):
        assert np.isnan(np.array(paged_attention(q, cache, cache, table, lengths))).all()
        out = paged_attention(q, cache, cache, table, lengths, mx.zeros((2,)))
        assert not np.array(out).any()


def test_decode_has_the_gradients_of_the_plain_op():
    assert_right_gradients(
        lambda q, k, v, mask, sinks: decode_attention(q, k, v, sinks=sinks, causal=True),
        [*qkv(keys=70), None, mx.array([0.5, -1.0, 2.0, 0.0])], (0, 1, 2, 4),
        arrays((2, 4, 3, 16), seed=5), causal=True,
    )  # fmt: skip


def test_paged_has_the_gradients_of_the_plain_op():
    values = [*arrays((1, 4, 2, 32), (6, 16, 2, 32)), *arrays((6, 16, 2, 32), seed=1),
              mx.array([[3, 1, 4, 0, 5]]), mx.array([70])]  # fmt: skip
    assert_right_gradients(
        lambda *xs: paged_attention(*xs, causal=True), values, range(3),
        arrays((1, 4, 2, 32), seed=5), paged_attention_reference, causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_settings_of_who_asks(kind):
    """What a call was split into is known where its gradient is made."""
    q, k, v = qkv(b=1)
    other = next(x for x in KINDS if x != kind)

    def loss(q, k, v):
        with launch.geometry(kind):
            return (decode_attention(q, k, v) ** 2).sum()

    def tangent(q):
        return mx.jvp(lambda q: loss(q, k, v), [q], [q])[1][0]

    with launch.geometry(kind):
        wants = [*mx.grad(loss, (0, 1, 2))(q, k, v), tangent(q)]
    with launch.geometry(other):
        gots = [*mx.grad(loss, (0, 1, 2))(q, k, v), tangent(q)]
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_has_the_gradients_of_the_plain_op(bits):
    q, k, v = qkv(d=64, v=64, keys=70)
    assert_right_gradients(
        lambda *xs: quantized_attention(*xs, bits=bits),
        [q, *mx.quantize(k, 32, bits), *mx.quantize(v, 32, bits)], (0, 2, 3, 5, 6),
        arrays(q.shape, seed=5), quantized_attention_reference, bits=bits,
    )  # fmt: skip


def test_a_checkpoint_may_hold_packed_words():
    """Its gradient asks for that of every argument: the words', which are integers, is zero."""
    q, k, v = qkv(d=64, v=64, keys=40)
    packed = [*mx.quantize(k, 32, 8), *mx.quantize(v, 32, 8)]

    def loss(*xs):
        return quantized_attention(*xs).sum()

    got = mx.grad(mx.checkpoint(loss))(q, *packed)
    assert mx.array_equal(got, mx.grad(loss)(q, *packed)).item()
    assert not mx.grad(loss, argnums=1)(q, *packed).any().item()


# ---- values that only the device knows ----------------------------------------------------------


def bad_calls(sinks=None):
    q, k, v = qkv()
    cache, table = paged(k, 16, np.random.default_rng(1))
    wild = np.array(table)
    wild[1, 2] = 10_000_000
    few = mx.array([300, 20])
    wide = np.array(table).astype(np.int64)
    wide[1, 2] += 2**32
    return {
        "lengths": lambda: decode_attention(q, k, v, mx.array([300, 301]), sinks),
        "lengths below": lambda: decode_attention(q, k, v, mx.array([-1, 5]), sinks),
        "lengths of 64 bits": lambda: decode_attention(
            q, k, v, mx.array(np.array([2**32 + 5, 5])), sinks
        ),
        "block_table of 64 bits": lambda: paged_attention(
            q, cache, cache, mx.array(wide), mx.array([9, 300]), sinks
        ),
        "block_table": lambda: paged_attention(
            q, cache, cache, mx.array(wild), mx.array([9, 300]), sinks
        ),
        "block_table in a window": lambda: paged_attention(
            q, cache, cache, mx.array(wild), mx.array([9, 47]), sinks, window=5
        ),
        "context_lens": lambda: paged_attention(q, cache, cache, table, mx.array([305, 20]), sinks),
        "good": lambda: paged_attention(q, cache, cache, mx.array(wild), few, sinks),
    }


@pytest.mark.parametrize("name", sorted(bad_calls().keys() - {"good"}))
def test_values_out_of_range_raise(name, monkeypatch):
    call = bad_calls()[name]
    out = call()
    with pytest.raises(RuntimeError, match="must be in range but got"):
        mx.eval(out)
    monkeypatch.setattr(checks, "ENABLED", True)
    argument = name.split()[0]
    with pytest.raises(ValueError, match=rf"_attention\] '{argument}' must be in range but got"):
        call()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", sorted(bad_calls()))
def test_values_out_of_range_make_their_batch_nan_in_plain_mlx(name, sinks):
    call = bad_calls(mx.zeros((qkv()[0].shape[1],)) if sinks else None)[name]
    with zmlx.target("reference"):
        out = np.isnan(np.array(call()))
    bad = {"good": [False, False], "lengths": [False, True], "block_table": [False, True],
           "block_table of 64 bits": [False, True],
           "block_table in a window": [False, True]}.get(name, [True, False])  # fmt: skip
    assert out.all(axis=(1, 2, 3)).tolist() == bad
    assert out.any(axis=(1, 2, 3)).tolist() == bad


def test_entries_past_the_context_are_not_read():
    assert np.isfinite(np.array(bad_calls()["good"]())).all()


def test_entries_past_the_context_have_no_part_in_gradients():
    q, k, v = qkv()
    few = mx.array([290, 20])
    cache, table = paged(k, 16, np.random.default_rng(1))
    wild = np.array(table)
    wild[1, 2:] = 10_000_000
    past = mx.arange(300)[:, None] >= few[:, None, None, None]
    for function, values in (
        (lambda q, k, v: decode_attention(q, k, v, few),
         [q, mx.where(past, mx.nan, k), mx.where(past, mx.nan, v)]),
        (lambda q, c: paged_attention(q, c, c, mx.array(wild), few), [q, cache]),
    ):  # fmt: skip
        every = mx.grad(lambda *xs, f=function: f(*xs).sum(), argnums=tuple(range(len(values))))
        assert all(np.isfinite(np.array(x)).all() for x in every(*values))


@pytest.mark.parametrize("way", ["kernel", "grad of vmap", "vmap of grad", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [mx.int32, mx.int64], ids=str)
def test_blocks_before_every_window_count_for_nothing(causal, dtype, way, monkeypatch):
    """A server frees them: their entries are -1, and what lay there may be no number."""
    monkeypatch.setattr(checks, "ENABLED", True)
    q, k, v = qkv(b=2)
    (cache_k, table), (cache_v, _) = (paged(x, 16, np.random.default_rng(1)) for x in (k, v))
    # The first of 3 queries is at key 287, and its window of 10 begins in block 17.
    freed = np.array(table)
    gone, freed[:, :17] = mx.array(freed[:, :17].copy()), -1

    def run(caches, table):
        def function(*xs):
            lengths = mx.array([290, 299])
            return paged_attention(*xs, table, lengths, causal=causal, window=10)

        if way == "kernel":
            return [function(q, *caches)]
        (slopes,) = arrays((2, 4, 3, 16), seed=5)
        return plain_gradients(way, function, [q, *caches], range(3), [slopes])

    wants = run((cache_k, cache_v), table)
    cache_k[gone] = cache_v[gone] = mx.nan
    gots = run((cache_k, cache_v), mx.array(freed).astype(dtype))
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(np.array(got)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: decode_attention(q, k, v.astype(mx.float16)),
         r"\[decode_attention\] 'v' must have q's dtype float32 but got float16"),
        (lambda q, k, v: decode_attention(q, k, v, mx.array([1])),
         r"\[decode_attention\] 'lengths' must have shape \(2,\) but got \(1,\)"),
        (lambda q, k, v: paged_attention(q, k, v, mx.zeros((2, 1), mx.int32), mx.array([1, 1])),
         r"\[paged_attention\] 'k_cache' must have shape"),
        (lambda q, k, v: quantized_attention(q, *mx.quantize(k, 32, 8), *mx.quantize(k, 32, 8),
                                             bits=3),
         r"\[quantized_attention\] 'bits' must be 4 or 8 but got 3"),
        (lambda q, k, v: quantized_attention(q, *mx.quantize(k, 32, 8), *mx.quantize(k, 32, 8),
                                             bits=4),
         r"\[quantized_attention\] 'k' must have shape \(2, K, S, 4\)"),
        (lambda q, k, v: quantized_attention(q, *[mx.quantize(k, 32, 8)[0],
                                                  *[mx.ones((2, 2, 300, 2))] * 2] * 2),
         r"\[quantized_attention\] 'k_scales' must have a multiple of 32 values in a group"),
        (lambda q, k, v: decode_attention(*[mx.zeros((1, 1, 1, 65537))] * 3),
         r"\[decode_attention\] 'q' must have rows of at most 8192 values but got 65537"),
        (lambda q, k, v: paged_attention(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)),
                                         mx.zeros((1, 1, 1, 8193)), mx.array([[0]]), mx.array([1])),
         r"\[paged_attention\] 'v_cache' must have rows of at most 8192 values but got 8193"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(*qkv())


@pytest.mark.parametrize("d", [3, 31, 33, 39])
@pytest.mark.parametrize("bits", [4, 8])
def test_queries_are_as_wide_as_the_values_that_keys_pack(d, bits):
    q, k, _ = qkv()
    packed = mx.quantize(k, 32, bits)
    message = r"\[quantized_attention\] 'q' must have a last axis that is a multiple of 32 but got"
    with pytest.raises(ValueError, match=message):
        quantized_attention(mx.ones((*q.shape[:3], d)), *packed, *packed, bits=bits)
