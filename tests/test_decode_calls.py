"""Calls of decode_attention, paged_attention and quantized_attention that were looked at before."""

import weakref

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import assert_right
from decode_arrays import each_batch, paged, qkv

from zmlx import checks
from zmlx.kernels import decode_attention, paged_attention, quantized_attention
from zmlx.kernels.attention import scaled_dot_product_attention_reference as plain

OPS = {
    "decode_attention": decode_attention,
    "paged_attention": paged_attention,
    "quantized_attention": quantized_attention,
}


def call_of(name, seed=0):
    """Arrays of a call of the op, with lengths and sinks, and those of the plain op."""
    q, k, v = qkv(d=32, v=32, seed=seed)
    lengths, sinks = mx.array([300 - seed, 41 + seed]), mx.array([0.5, -1.0, 2.0, float(seed)])
    if name == "paged_attention":
        (cache_k, table), (cache_v, _) = (paged(x, 16, np.random.default_rng(seed)) for x in (k, v))
        return (q, cache_k, cache_v, table, lengths, sinks), [q, k, v, lengths, sinks]
    if name == "quantized_attention":
        packed = [mx.quantize(x, 32, 8) for x in (k, v)]
        k, v = (mx.dequantize(*x, 32, 8) for x in packed)
        return (q, *packed[0], *packed[1], lengths, sinks), [q, k, v, lengths, sinks]
    return (q, k, v, lengths, sinks), [q, k, v, lengths, sinks]


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_goes_by_its_own_arrays(name):
    """Lengths, tables, caches and sinks of the first call are not those of the others."""
    for seed in range(3):
        given, values = call_of(name, seed)
        assert_right(OPS[name](*given, causal=True), values, each_batch, causal=True)


@pytest.mark.parametrize("name", OPS)
def test_each_option_of_a_repeated_call_counts(name):
    given, values = call_of(name)
    several = [{}, {"scale": 0.3}, {"scale": 0.4}, {"causal": True}, {"window": 9}, {"window": 40},
               {"softcap": 1.0}, {"softcap": 2.0}]  # fmt: skip
    for _ in range(2):
        for options in several:
            assert_right(OPS[name](*given, **options), values, each_batch, **options)


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_may_leave_out_lengths_or_sinks(name):
    (*given, lengths, sinks), (*values, _, _) = call_of(name)
    for _ in range(2):
        for has in ((lengths, sinks), (lengths, None), (None, sinks), (None, None)):
            if has[0] is not None or name != "paged_attention":
                reference = plain if has[0] is None else each_batch
                known = [*values, None if has[0] is None else lengths, has[1]]
                assert_right(OPS[name](*given, *has), known, reference)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": 1}, "'causal' must be True or False but got int"),
        ({"window": True}, "'window' must be an int but got bool"),
        ({"window": 1.0}, "'window' must be an int but got float"),
        ({"softcap": True}, "'softcap' must be a number but got bool"),
        ({"scale": mx.array(1.0)}, "'scale' must be a number but got array"),
    ],
)
def test_an_option_that_equals_a_good_one_is_refused(name, options, message):
    given, _ = call_of(name)
    OPS[name](*given, scale=1.0, causal=True, window=1, softcap=1.0)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"\[{name}\] {message}"):
            OPS[name](*given, **{"scale": 1.0, "causal": True, "window": 1, **options})


@pytest.mark.parametrize("name", OPS)
def test_a_bad_call_raises_after_a_good_one(name):
    given, _ = call_of(name)
    OPS[name](*given)
    for at in range(len(given)):
        bad = [*given]
        bad[at] = given[at][None]
        with pytest.raises(ValueError, match=rf"\[{name}\] '\w+' must"):
            OPS[name](*bad)
        bad[at] = given[at].astype(mx.int8)
        with pytest.raises(ValueError, match=rf"\[{name}\] '\w+' must"):
            OPS[name](*bad)
        bad[at] = 1.0
        with pytest.raises(TypeError, match=rf"\[{name}\] '\w+' must be an mx.array but got float"):
            OPS[name](*bad)


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_is_checked_when_checking(name, monkeypatch):
    (*given, lengths, sinks), _ = call_of(name)
    monkeypatch.setattr(checks, "ENABLED", True)
    for _ in range(2):
        OPS[name](*given, lengths, sinks)
        with pytest.raises(ValueError, match=rf"\[{name}\] '\w+' must be in range but got 305"):
            OPS[name](*given, mx.array([5, 305]), sinks)


@pytest.mark.parametrize("name", OPS)
def test_a_call_keeps_none_of_its_arrays(name):
    given, values = call_of(name)
    for _ in range(2):
        mx.eval(OPS[name](*given))
    alive = [weakref.ref(x) for x in given]
    del given, values
    assert [x() for x in alive] == [None] * len(alive)


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_has_gradients(name):
    """What is found for arrays is not what a gradient needs, nor the other way round."""
    (q, *others), _ = call_of(name)
    for _ in range(2):
        out = OPS[name](q, *others)
        y, gradient = mx.value_and_grad(lambda q: OPS[name](q, *others).sum())(q)
        np.testing.assert_allclose(out.sum(), y, rtol=1e-5)
        assert np.abs(np.array(gradient)).max() > 0
