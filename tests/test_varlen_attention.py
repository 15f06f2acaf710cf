"""varlen_attention: the same as separate calls, and ends of sequences that are no such thing."""

import weakref
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import assert_right, assert_right_gradients
from plain_gradients import WAYS, assert_plain_gradients

import zmlx
from zmlx import checks, launch
from zmlx.kernels import varlen_attention
from zmlx.kernels.attention import scaled_dot_product_attention_reference
from zmlx.testing import gradients

QUERIES = (0, 5, 5, 70, 133)
KEYS = (0, 9, 10, 100, 120)


def inputs(heads=4, kv_heads=2, d=16, v=8):
    rng = np.random.default_rng(0)
    shapes = ((heads, QUERIES[-1], d), (kv_heads, KEYS[-1], d), (kv_heads, KEYS[-1], v))
    return [mx.array(rng.standard_normal(s).astype(np.float32)) for s in shapes]


def ends(dtype=mx.int32):
    return mx.array(QUERIES, dtype=dtype), mx.array(KEYS, dtype=dtype)


def separately(q, k, v, sinks, *, xp, **options):
    """The plain op of each sequence."""
    parts = []
    for a, b, c, d in zip(QUERIES, QUERIES[1:], KEYS, KEYS[1:], strict=False):
        part = scaled_dot_product_attention_reference(
            q[None, :, a:b], k[None, :, c:d], v[None, :, c:d], None, sinks, **options, xp=xp
        )
        parts.append(part if isinstance(part, tuple) else (part,))
    return [xp.concatenate([x[0] for x in xs], axis=1) for xs in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 7}, {"causal": True, "window": 3, "softcap": 2.0},
     {"causal": True, "return_lse": True}],
    ids=str,
)  # fmt: skip
def test_equals_separate_calls(kind, options):
    values = [*inputs(), mx.array([0.1, -0.5, 1.0, 0.0])]

    def function(q, k, v, sinks):
        return varlen_attention(q, k, v, *ends(), sinks, **options)

    with launch.geometry(kind):
        out = function(*values)
        assert_right(out, values, separately, **options)
        outputs = out if isinstance(out, tuple) else (out,)
        cotangents = [mx.cos(mx.arange(y.size)).reshape(y.shape) for y in outputs]
        assert_right_gradients(function, values, range(4), cotangents, separately, **options)


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint32], ids=str)
def test_ends_of_any_integer_type(dtype):
    values = inputs()
    got = varlen_attention(*values, *ends(dtype), causal=True)
    np.testing.assert_array_equal(got, varlen_attention(*values, *ends(), causal=True))


def test_a_sequence_without_keys_is_nan_and_the_others_are_not():
    q, k, v = inputs()
    cu_q, cu_k = mx.array([0, 40, 133]), mx.array([0, 0, 120])
    out = np.array(varlen_attention(q, k, v, cu_q, cu_k))
    assert np.isnan(out[:, :40]).all()
    assert np.isfinite(out[:, 40:]).all()
    got = gradients(
        lambda *x: varlen_attention(*x, cu_q, cu_k)[:, 40:], [q, k, v], range(3),
        [mx.ones((4, 93, 8))],
    )  # fmt: skip
    assert all(np.isfinite(np.array(g)).all() for g in got)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "cotangent"])
def test_what_is_not_finite_in_a_sequence_stays_there(which, options, kind):
    """The third one ends in the middle of tiles, of queries and of keys."""

    def results(values):
        *x, cotangent = map(mx.array, values)
        run = partial(varlen_attention, cu_seqlens_q=ends()[0], cu_seqlens_k=ends()[1], **options)
        dq, dk, dv = gradients(run, x, range(3), [cotangent])
        others = [[*range(5), *range(70, 133)], [*range(10), *range(100, 120)]]
        return [
            np.array(y)[:, rows]
            for y, rows in ((run(*x), others[0]), (dq, others[0]), (dk, others[1]), (dv, others[1]))
        ]

    values = [np.array(x) for x in (*inputs(), mx.cos(mx.arange(4 * 133 * 8)).reshape(4, 133, 8))]
    odd = [x.copy() for x in values]
    first, last = (10, 100) if which in (1, 2) else (5, 70)
    rows = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), last - first)
    odd[which][:, first:last] = rows[:, None]
    with launch.geometry(kind):
        for got, want in zip(results(odd), results(values), strict=True):
            assert np.isfinite(want).all()
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("way", [w for w in WAYS if w != "shapeless"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}], ids=str)
def test_a_sequence_without_keys_has_the_gradient_0_in_plain_mlx_too(options, way):
    cu_q, cu_k = mx.array([0, 40, 70, 133]), mx.array([0, 60, 60, 120])
    dq, _, _ = assert_plain_gradients(
        lambda *x: varlen_attention(*x, cu_q, cu_k, **options), inputs(), range(3), way
    )
    assert not np.array(dq)[:, 40:70].any()


BAD = [((1, 5, 5, 70, 133), KEYS), ((0, 9, 5, 70, 133), KEYS), ((0, 5, 5, 70, 140), KEYS),
       (QUERIES, (0, 9, 10, 100, 119)), (QUERIES, (0, -4, 10, 100, 120))]  # fmt: skip


@pytest.mark.parametrize("cuts", BAD, ids=str)
def test_ends_out_of_range_raise_at_evaluation(cuts):
    out = varlen_attention(*inputs(), *[mx.array(c) for c in cuts])
    wrong = "cu_seqlens_k" if cuts[0] == QUERIES else "cu_seqlens_q"
    with pytest.raises(RuntimeError, match=f"'{wrong}' must be in range but got"):
        mx.eval(out)


@pytest.mark.parametrize("sinks", [None, mx.zeros((4,))], ids=["plain", "sinks"])
@pytest.mark.parametrize("cuts", BAD, ids=str)
def test_ends_out_of_range_make_everything_nan_in_plain_mlx(cuts, sinks):
    with zmlx.target("reference"):
        out = varlen_attention(*inputs(), *[mx.array(c) for c in cuts], sinks)
    assert np.isnan(np.array(out)).all()


@pytest.mark.parametrize("cuts", BAD, ids=str)
def test_ends_out_of_range_raise_at_once_when_checking(cuts, monkeypatch):
    monkeypatch.setattr(checks, "ENABLED", True)
    with pytest.raises(ValueError, match=r"\[varlen_attention\] 'cu_seqlens_.' must be in range"):
        varlen_attention(*inputs(), *[mx.array(c) for c in cuts])


def test_a_new_length_compiles_nothing():
    from zmlx import metal

    def run(n):
        q = mx.ones((2, n, 16))
        cu = mx.array([0, n // 3, n])
        mx.eval(varlen_attention(q, q, q, cu, cu, causal=True))

    run(100)
    before = metal.statistics()["compiles"]
    run(101)
    run(250)
    assert metal.statistics()["compiles"] == before


def test_heads_too_wide_are_refused_by_its_own_name():
    with pytest.raises(ValueError, match=r"\[varlen_attention\] 'v' must have a last axis that"):
        varlen_attention(*inputs(v=2040), *ends())


# ---- calls that are looked at once ---------------------------------------------------------------


def test_a_repeated_call_goes_by_its_own_arrays():
    values = inputs()
    for cuts in ((QUERIES, KEYS), ((0, 9, 40, 70, 133), (0, 20, 21, 100, 120))):
        for sign in (1.0, -1.0):
            q, k, v = (sign * x for x in values)
            got = varlen_attention(q, k, v, *[mx.array(c) for c in cuts], causal=True)
            for a, b, c, d in zip(cuts[0], cuts[0][1:], cuts[1], cuts[1][1:], strict=False):
                one = [q[None, :, a:b], k[None, :, c:d], v[None, :, c:d]]
                if b > a:
                    assert_right(got[None, :, a:b], one, causal=True)


def test_each_option_of_a_repeated_call_counts():
    values = [*inputs(), None]
    several = [{}, {"scale": 0.3}, {"scale": 0.4}, {"causal": True}, {"window": 7}, {"window": 30},
               {"softcap": 1.0}, {"softcap": 2.0}, {"return_lse": True}]  # fmt: skip
    for _ in range(2):
        for options in several:
            out = varlen_attention(*values[:3], *ends(), **options)
            assert_right(out, values, separately, **options)


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("causal", True, 1), ("window", 1, True), ("window", 1, 1.0), ("softcap", 1.0, True),
    ("return_lse", False, 0), ("scale", 1.0, True), ("scale", 1.0, mx.array(1.0)),
])  # fmt: skip
def test_an_option_that_equals_a_good_one_is_refused(name, good, bad):
    values = [*inputs(), *ends()]
    varlen_attention(*values, **{name: good})
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"\[varlen_attention\] '{name}' must be"):
            varlen_attention(*values, **{name: bad})


def test_a_bad_call_raises_after_a_good_one():
    values = [*inputs(), *ends()]
    varlen_attention(*values)
    for at in range(5):
        for bad in (values[at][None], values[at].astype(mx.int8), values[at][:1]):
            with pytest.raises(ValueError, match=r"\[varlen_attention\] '\w+' must"):
                varlen_attention(*values[:at], bad, *values[at + 1 :])


def test_a_repeated_call_is_checked_when_checking(monkeypatch):
    values = inputs()
    monkeypatch.setattr(checks, "ENABLED", True)
    for _ in range(2):
        varlen_attention(*values, *ends())
        with pytest.raises(ValueError, match="'cu_seqlens_q' must be in range but got 5"):
            varlen_attention(*values, *[mx.array(c) for c in BAD[1]])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_a_call_keeps_none_of_its_arrays(dtype):
    values = [*inputs(), *ends(), mx.zeros((4,))]
    values[0] = values[0].astype(dtype)
    for _ in range(2):
        mx.eval(varlen_attention(*values))
    alive = [weakref.ref(x) for x in values]
    del values
    assert [x() for x in alive] == [None] * len(alive)


@pytest.mark.parametrize("return_lse", [False, True])
def test_no_queries_have_the_dtype_of_all(return_lse):
    q, k, v = inputs()
    cu_q, cu_k = mx.array([0, 0, 0]), mx.array([0, 9, 120])
    for _ in range(2):
        got = varlen_attention(q[:, :0].astype(mx.float16), k, v, cu_q, cu_k, return_lse=return_lse)
        out, *lse = got if return_lse else (got,)
        assert (out.shape, out.dtype) == ((4, 0, 8), mx.float32)
        assert [x.shape for x in lse] == [(4, 0)] * return_lse
