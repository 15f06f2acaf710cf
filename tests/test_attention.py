"""scaled_dot_product_attention beyond what its entry's tests say: MLX's own results, identities,
masks of every shape, random configurations, memory."""

import math
import subprocess
import sys
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import arrays, assert_right, assert_right_gradients, qkv, terms_of
from hypothesis import given
from hypothesis import strategies as st
from plain_gradients import WAYS, assert_plain_gradients

import zmlx
from zmlx import launch, metal, transforms
from zmlx.kernels import attention_launch
from zmlx.kernels import scaled_dot_product_attention as attention
from zmlx.registry import get
from zmlx.testing import gradients, to_numpy

KINDS = ("cpu", "gpu")


def check(values, which=(0, 1, 2), **options):
    """Values and gradients against float64."""
    out = attention(*values, **options)
    assert_right(out, values, **options)
    outputs = out if isinstance(out, tuple) else (out,)
    cotangents = [c.astype(outputs[0].dtype) for c in arrays(*[o.shape for o in outputs], seed=5)]
    assert_right_gradients(
        lambda *xs: attention(*xs, **options), values, which, cotangents,
        terms=terms_of(values, cotangents, **options), **options,
    )  # fmt: skip


# ---- MLX's own ----------------------------------------------------------------------------------

#: MLX's exp is off by up to 63 units in the last place.
OF_MLX = 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "added"])
def test_equals_mlx(kind, mask):
    q, k, v = qkv(b=2)
    (scores,) = arrays((2, 1, 37, 70), seed=3)
    given = {"bool": scores > 0, "added": scores}.get(mask, mask)
    theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=given)
    options = {"scale": 0.3, "causal": mask == "causal"}
    values = [q, k, v, None if mask == "causal" else given]
    with launch.geometry(kind):
        assert_right(attention(*values, **options), values, **options)
    assert_right(theirs, values, rounding=OF_MLX, **options)


def test_queries_without_keys_are_as_in_mlx():
    q, k, v = qkv(queries=70, keys=5, k=2)
    sinks = mx.array([0.5, -1.0])
    mask = mx.zeros((70, 5), dtype=mx.bool_)
    mask[::2, 1] = True
    added = mx.where(mask, 0.0, -mx.inf)
    mlx = mx.fast.scaled_dot_product_attention
    for values, options, theirs in (
        ([q, k, v, mask], {}, mlx(q, k, v, scale=1.0, mask=mask)),
        ([q, k, v], {"causal": True}, mlx(q, k, v, scale=1.0, mask="causal")),
        ([q, k, v, mask, sinks], {}, mlx(q, k, v, scale=1.0, mask=mask, sinks=sinks)),
        ([q, k, v, added], {}, mlx(q, k, v, scale=1.0, mask=added)),
    ):
        assert_right(attention(*values, scale=1.0, **options), values, scale=1.0, **options)
        assert_right(theirs, values, rounding=OF_MLX, scale=1.0, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_without_keys_all_is_nan_or_with_sinks_0(kind):
    q, k, v = qkv(keys=0)
    with launch.geometry(kind):
        assert mx.isnan(attention(q, k, v)).all()
        assert (attention(q, k, v, sinks=mx.zeros((2,))) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("near", [{"causal": True}, {"window": 4}, {"causal": True, "window": 4}],
                         ids=str)  # fmt: skip
def test_a_mask_that_drops_all_that_is_near(kind, near):
    """Keys that are too far stay out, whatever tile they are in."""
    q, k, v = qkv(b=1, h=2, k=1, queries=70, keys=150)
    keep = mx.array(np.random.default_rng(2).random((70, 150)) > 0.8)
    keep[3] = False
    keep[60] = False
    with launch.geometry(kind):
        check([q, k, v, keep], **near)
        check([q, k, v, mx.where(keep, 0.0, -1e30)], **near)


# ---- masks --------------------------------------------------------------------------------------

MASKS = [
    (2, 4, 37, 70),
    (1, 1, 37, 70),
    (37, 70),
    (2, 1, 1, 70),
    (1, 4, 37, 1),
    (1,),
    (2, 1, 37, 70),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_gradient_of_an_added_mask_of_any_shape(kind, shape):
    (mask,) = arrays(shape, seed=4)
    with launch.geometry(kind):
        values = [*qkv(b=2, h=4, k=2), mask]
        check(values, which=(0, 1, 2, 3), causal=shape == (37, 70))


MASK_LAYOUTS = {
    "whole": lambda m: m,
    "slice": lambda m: mx.pad(m, [(0, 0), (0, 0), (1, 2), (5, 6)])[:, :, 1:-2, 5:-6],
    "turned": lambda m: mx.contiguous(m.swapaxes(2, 3)).swapaxes(2, 3),
    "backwards": lambda m: m[:, :, ::-1, ::-1],
    "of all heads": lambda m: m[:, :1],
    "of all queries": lambda m: m[:, :, :1],
    "of all keys": lambda m: m[..., :1],
}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_masks_of_whole_tiles_and_of_their_edges(layout, dtype):
    """On the CPU one thread turns the mask of a tile in registers, where keys lie side by side."""
    values = qkv(queries=150, keys=200)
    (mask,) = arrays((1, 2, 150, 200), seed=4)
    mask = MASK_LAYOUTS[layout](mask > -0.5 if dtype == mx.bool_ else mask.astype(dtype))
    check([*values, mask], which=(0, 1, 2) if dtype == mx.bool_ else (0, 1, 2, 3))


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_shapeless_compile_takes_masks_of_other_shapes(axes, keeps):
    compiled = mx.compile(lambda q, k, v, mask: attention(q, k, v, mask, causal=True),
                          shapeless=True)  # fmt: skip
    for queries, keys in ((6, 9), (7, 11)):
        (mask,) = arrays((1, 2, queries, keys)[4 - axes :], seed=5)
        values = [*qkv(queries=queries, keys=keys), mask > 0 if keeps else mask]
        assert_right(compiled(*values), values, rounding=OF_MLX, causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 4, 16, 37])
def test_a_query_whose_added_mask_is_the_least_float_has_gradients(kind, causal, queries):
    """It attends to all keys alike, as any query whose mask is one number."""
    least = float(np.finfo(np.float32).min)
    (mask,) = arrays((queries, 70), seed=7)
    mask = mx.where(mx.arange(queries)[:, None] % 3 == 0, least, mask)
    with launch.geometry(kind):
        check([*qkv(queries=queries), mask], which=(0, 1, 2, 3), causal=causal)


def test_a_shapeless_compile_takes_one_query_or_key():
    # In a process of its own: a sum over an axis of 1 would write out of bounds.
    script = """
import mlx.core as mx
from zmlx.kernels import scaled_dot_product_attention
compiled = mx.compile(
    lambda q, k: scaled_dot_product_attention(q, k, k, causal=True, window=3), shapeless=True
)
for _ in range(50):
    for queries, keys in ((1, 9), (4, 9), (4, 1), (1, 1)):
        q, k = mx.random.normal((1, 6, queries, 8)), mx.random.normal((1, 3, keys, 8))
        want = scaled_dot_product_attention(q, k, k, causal=True, window=3)
        assert mx.allclose(compiled(q, k), want, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_bool_masks_of_any_shape(kind, shape):
    (scores,) = arrays(shape, seed=4)
    with launch.geometry(kind):
        check([*qkv(b=2, h=4, k=2), scores > -0.5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 5}, {"softcap": 1.5}], ids=str
)
def test_lse_may_be_differentiated(kind, options):
    (sinks,) = arrays((2,), seed=6)
    with launch.geometry(kind):
        check([*qkv(), None, sinks], (0, 1, 2, 4), return_lse=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_asked_for_alone_is_the_same(kind):
    """dq has a kernel of its own where dk and dv are not asked for."""
    values = qkv(h=4, k=2)
    (sinks,) = arrays((4,), seed=6)
    (mask,) = arrays((37, 70), seed=7)
    values += [mask, sinks]
    cotangents = arrays((1, 4, 37, 8), seed=8)
    with launch.geometry(kind):
        together = gradients(attention, values, range(5), cotangents)
        for i, want in enumerate(together):
            (got,) = gradients(attention, values, [i], cotangents)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("which", [(0, 3), (1, 3), (0, 1, 2, 3)], ids=str)
def test_a_gradient_of_gradients_may_be_compiled(which, strict):
    """Kernels for several inputs have a fallback each, with equal parts, which a compile merges:
    what a fusable op (a cosine here) gives them must be there for all."""
    values = qkv(queries=5, keys=5) + arrays((5, 5), seed=7)

    def penalty(*xs):
        loss = mx.grad(lambda *ys: mx.sin(attention(*ys)).sum(), which)
        return sum(x.square().sum() for x in loss(*xs))

    function = mx.grad(penalty, range(4))
    with transforms.strict() if strict else nullcontext():
        for got, want in zip(mx.compile(function)(*values), function(*values), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_gradients_does_not_depend_on_the_settings_of_who_asks(kind):
    """Partial sums of dq, and the tiles of a mask that is broadcast, are those of the launch."""
    q, k, v = qkv(queries=100, keys=150)
    (mask,) = arrays((2, 1, 150), seed=7)

    def penalty(*xs):
        with launch.geometry(kind):
            found = mx.grad(lambda *ys: mx.sin(attention(*ys)).sum(), range(4))(*xs)
        return sum(x.square().sum() for x in found)

    with launch.geometry(kind):
        wants = mx.grad(penalty, range(4))(q, k, v, mask)
    with launch.geometry(next(x for x in KINDS if x != kind)):
        gots = mx.grad(penalty, range(4))(q, k, v, mask)
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_backward_is_the_same_every_time():
    values = qkv(b=2, h=4, k=2, queries=300, keys=300, d=32, v=32)
    cotangents = arrays((2, 4, 300, 32))
    first = gradients(attention, values, range(3), cotangents)
    for _ in range(5):
        for a, b in zip(gradients(attention, values, range(3), cotangents), first, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- identities ---------------------------------------------------------------------------------


def test_the_order_of_keys_does_not_matter():
    q, k, v = qkv(keys=200)
    order = mx.array(np.random.default_rng(0).permutation(200))
    assert_right(attention(q, k[:, :, order], v[:, :, order]), [q, k, v])


def test_a_window_of_the_length_is_causal():
    q, k, v = qkv(queries=70)
    got = attention(q, k, v, causal=True, window=70)
    np.testing.assert_array_equal(got, attention(q, k, v, causal=True))


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = qkv()
    got = attention(q, k, v, sinks=mx.array([-mx.inf, -mx.inf]))
    np.testing.assert_array_equal(got, attention(q, k, v))


@pytest.mark.parametrize("sinks", [None, [-mx.inf, -mx.inf]])
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_query_whose_scores_are_all_minus_infinity(target, sinks):
    """The logarithm of no exponentials is -inf, and their mean no number; others are untouched."""
    q, k, v = qkv(queries=5)
    mask = mx.zeros((5, 70))
    mask[2] = -mx.inf
    given = None if sinks is None else mx.array(sinks)
    with zmlx.target(target):
        out, lse = attention(q, k, v, mask, given, return_lse=True)
        plain, plain_lse = attention(q, k, v, return_lse=True)
    assert np.isnan(to_numpy(out)[:, :, 2]).all()
    assert (to_numpy(lse)[:, :, 2] == -np.inf).all()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(to_numpy(out)[:, :, others], to_numpy(plain)[:, :, others])
    np.testing.assert_array_equal(to_numpy(lse)[..., others], to_numpy(plain_lse)[..., others])


@pytest.mark.parametrize("keys", [20, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_without_scores_has_no_part_in_the_gradient_of_a_sink(kind, keys):
    """With more keys than queries, of which there are few, it is decoding."""
    q, k, v = qkv(queries=20 if keys == 20 else 6, keys=keys)
    mask = mx.zeros((q.shape[2], keys))
    mask[2] = -mx.inf
    kept = mx.arange(q.shape[2])[:, None] != 2

    def loss(sinks):
        return mx.where(kept, attention(q, k, v, mask, sinks), 0.0).sum()

    with launch.geometry(kind):
        got = mx.grad(loss)(mx.array([-mx.inf, 0.5]))
    with zmlx.target("reference"):
        want = mx.grad(loss)(mx.array([-mx.inf, 0.5]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert want[0] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keys", [5, 40])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2, "return_lse": True}],
                         ids=str)  # fmt: skip
def test_a_query_without_scores_has_the_gradient_0_in_plain_mlx_too(options, keys, way):
    """With more keys than queries, of which there are few, it is decoding."""
    q, k, v = qkv(queries=6, keys=keys)
    mask = to_numpy(arrays((2, 6, keys))[0]).astype(np.float32)
    mask[:, 3], mask[0, 4, :4] = -np.inf, -np.inf
    found = assert_plain_gradients(
        lambda *xs: attention(*xs, **options), [q, k, v, mx.array(mask)], range(4), way
    )
    assert not to_numpy(found[0])[:, :, 3].any()
    assert not to_numpy(found[3])[:, 3].any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 3, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_without_keys_there_is_nothing_to_attend_to(target, options):
    q, k, v = qkv()
    k, v = k[:, :, :0], v[:, :, :0]
    with zmlx.target(target):
        out, lse = attention(q, k, v, return_lse=True, **options)
        sunk, sink = attention(q, k, v, sinks=mx.array([1.0, 2.0]), return_lse=True, **options)
    assert np.isnan(to_numpy(out)).all()
    assert (to_numpy(lse) == -np.inf).all()
    assert not to_numpy(sunk).any()
    np.testing.assert_array_equal(to_numpy(sink), np.broadcast_to([[1.0], [2.0]], sink.shape))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 3}], ids=str)
def test_the_reference_counts_past_256_in_half_precision(options):
    q, k, v = qkv(queries=300, keys=600, dtype=mx.bfloat16)
    got = get("scaled_dot_product_attention").reference(q, k, v, **options)
    want = get("scaled_dot_product_attention").reference(
        *[x.astype(mx.float32) for x in (q, k, v)], **options
    )
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), atol=0.05)


def test_heads_that_share_keys_equal_repeated_keys():
    q, k, v = qkv(h=6, k=2)
    again = attention(q, mx.repeat(k, 3, axis=1), mx.repeat(v, 3, axis=1))
    np.testing.assert_array_equal(attention(q, k, v), again)


def test_a_new_length_compiles_nothing():
    attention(*qkv(queries=100, keys=100), causal=True, window=3).sum().item()
    before = metal.statistics()["compiles"]
    for n in (101, 150, 311):
        attention(*qkv(queries=n, keys=n), causal=True, window=n % 7 + 1, scale=n).sum().item()
    assert metal.statistics()["compiles"] == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 7, 32, 64, 80, 96, 100, 128, 192, 256])
def test_any_head_dimension(kind, d):
    with launch.geometry(kind):
        check(qkv(b=1, h=1, queries=17, keys=20, d=d, v=max(1, 257 - d) if d > 128 else d))


def test_dtypes_promote_as_in_mlx():
    q, k, v = qkv()
    out = attention(q.astype(mx.bfloat16), k, v.astype(mx.float16))
    assert out.dtype == mx.float32


@given(data=st.data())
def test_random_configurations(data):
    def draw(a, b):
        return data.draw(st.integers(a, b))

    group, kv, d, v = draw(1, 3), draw(1, 2), draw(1, 3) * 8, draw(1, 3) * 8
    b, queries, keys = draw(1, 2), draw(1, data.draw(st.sampled_from((16, 140)))), draw(1, 140)
    options = {"causal": data.draw(st.booleans()), "return_lse": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        options["window"] = draw(1, 150)
    if data.draw(st.booleans()):
        options["softcap"] = 2.5
    heads = group * kv
    values = [*qkv(b, heads, kv, queries, keys, d, v), None, None]
    which = [0, 1, 2]
    if data.draw(st.booleans()):
        shape = [data.draw(st.sampled_from((1, n))) for n in (b, heads, queries, keys)]
        (values[3],) = arrays(shape, seed=8)
        which.append(3)
    if data.draw(st.booleans()):
        (values[4],) = arrays((heads,), seed=9)
        which.append(4)
    check(values, which, **options)


# ---- few queries of a cache ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("mask", [None, "bool", "added"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "return_lse": True}, {"window": 9, "softcap": 2.0}], ids=str
)
def test_few_queries_of_a_cache(kind, queries, mask, options, monkeypatch):
    monkeypatch.setattr(attention_launch, "_forward", None)
    values = [*qkv(b=2, h=4, k=2, queries=queries), None, *arrays((4,), seed=9)]
    if mask:
        shape = (2, 1, 1, 70) if "causal" in options else (1, 4, queries, 70)
        (scores,) = arrays(shape, seed=8)
        values[3] = scores > 0 if mask == "bool" else scores
    with launch.geometry(kind):
        check(values, [0, 1, 2, 4] if mask != "added" else range(5), **options)


def test_a_slice_of_a_cache_and_of_a_mask_are_read_where_they_lie():
    q, k, v = qkv(queries=1, keys=96)
    (wide,) = arrays((1, 2, 1, 96), seed=3)
    mx.eval(q, k, v, wide)
    before = metal.statistics()["contiguous_copies"]
    values = [q, k[:, :, :70], v[:, :, :70], wide[..., ::-1][..., :70]]
    got = attention(*values)
    mx.eval(got)
    assert metal.statistics()["contiguous_copies"] == before
    assert_right(got, values)


def test_a_growing_cache_compiles_nothing():
    q, k, v = qkv(queries=1, keys=3000)
    mx.eval(attention(q, k[:, :, :100], v[:, :, :100]))
    before = metal.statistics()["compiles"]
    for n in (2, 101, 3000):
        mx.eval(attention(q, k[:, :, :n], v[:, :, :n]))
    assert metal.statistics()["compiles"] == before


def test_a_compiled_step_decodes(monkeypatch):
    monkeypatch.setattr(attention_launch, "_forward", None)
    values = qkv(queries=1)
    assert_right(mx.compile(attention)(*values), values)


@pytest.mark.parametrize("kind", KINDS)
def test_few_queries_of_wide_heads_have_gradients(kind):
    """They are decoded, whatever tiles have room for."""
    values = qkv(h=1, queries=2, keys=9, d=1500, v=1500)
    with launch.geometry(kind):
        check(values)


def test_few_queries_of_heads_that_no_stack_has_room_for():
    q, k, v = qkv(h=1, queries=1, keys=2, d=65537)
    with pytest.raises(ValueError, match=r"\[scaled_dot_product_attention\] 'v' must have"):
        attention(q, k, v)


# ---- memory -------------------------------------------------------------------------------------


def peak_bytes(length):
    q, k, v = arrays(*[(1, 2, length, 64)] * 3)
    mx.eval(q, k, v)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    grads = mx.grad(lambda *x: attention(*x, causal=True).sum(), argnums=(0, 1, 2))(q, k, v)
    mx.eval(grads)
    return mx.get_peak_memory() - before


def check_memory(lengths):
    sizes = [peak_bytes(n) / n for n in lengths]
    assert max(sizes) <= 1.2 * min(sizes), dict(zip(lengths, sizes, strict=True))


def test_memory_is_linear_in_the_length():
    check_memory((1024, 2048))


@pytest.mark.slow
def test_memory_is_linear_up_to_16k():
    check_memory((1024, 4096, 16384))


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": mx.zeros((3, 70))}, r"'mask' must broadcast to \(1, 2, 37, 70\) but got"),
        ({"sinks": mx.zeros((3,))}, r"'sinks' must have shape \(2,\) but got \(3,\)"),
        ({"window": 0}, r"'window' must be in \[1, 2\^30\) but got 0"),
        ({"window": 1.0}, "'window' must be an int but got float"),
        ({"softcap": -1.0}, "'softcap' must be positive and finite but got -1.0"),
        ({"softcap": math.inf}, "'softcap' must be positive and finite but got inf"),
        ({"softcap": 1e39}, r"'softcap' must be positive and finite but got 1e\+39"),
        ({"causal": 1}, "'causal' must be True or False but got int"),
        ({"scale": "a"}, "'scale' must be a number but got str"),
        ({"q": mx.zeros((1, 2, 37, 0)), "k": mx.zeros((1, 1, 70, 0))},
         r"'q' must have a last axis of at least 1 but got \(1, 2, 37, 0\)"),
        ({"k": mx.zeros((1, 1, 70, 15))}, r"'k' must have shape \(1, K, S, 16\)"),
        ({"v": mx.zeros((1, 1, 70, 2040))},
         "'v' must have a last axis that makes at most 2048 .* but got 2040 and 16"),
        ({"v": mx.zeros((1, 1, 71, 8))}, r"'v' must have shape \(1, 1, 70, V\)"),
        ({"q": mx.zeros((1, 3, 37, 16)), "k": mx.zeros((1, 2, 70, 16)),
          "v": mx.zeros((1, 2, 70, 8))}, "'k' must have a number of heads that divides the 3"),
    ],
)  # fmt: skip
def test_errors(change, message):
    q, k, v = qkv()
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(
        (ValueError, TypeError), match=rf"\[scaled_dot_product_attention\] {message}"
    ):
        attention(**arguments)


def test_the_entry_benchmarks_operations():
    assert get("scaled_dot_product_attention").flops


@pytest.mark.parametrize(("queries", "keys", "width"), [(64, 64, 128), (40, 72, 24), (16, 24, 64)])
def test_large_scores_have_gradients_as_small_as_they_are(queries, keys, width):
    """The softmax that the backward computes again is the forward's, or no larger than 1."""
    q, k, v, c = (
        mx.random.normal((1, 1, n, width), key=mx.random.key(i))
        for i, n in enumerate((queries, keys, keys, queries))
    )
    for by in (1e2, 1e4, 1e8, 1e18):
        dv = mx.grad(lambda v, by=by: (attention(by * q, k, v) * c).sum())(v)
        p = mx.softmax(by * q @ k.swapaxes(-1, -2) * width**-0.5, axis=-1)
        off = mx.abs(dv - p.swapaxes(-1, -2) @ c).max().item()
        if queries > 16:
            assert off < 2e-4, (by, off)
        # The forward of few queries sums in another order, which rounds the scores otherwise; still
        # no weight is above 1.
        assert (mx.abs(dv) <= 1.0001 * mx.abs(c).sum(axis=-2, keepdims=True)).all(), by
