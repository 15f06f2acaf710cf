"""RoPE: equality with MLX's, positions of every kind, M-RoPE, accuracy far out, the KV cache."""

import re
import weakref

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zmlx
from zmlx import checks, launch, metal
from zmlx.kernels import qk_norm_rope, rope, rope_append
from zmlx.kernels.rope import _ROPE
from zmlx.kernels.rope_append import _ROPE_APPEND
from zmlx.kernels.rope_append_backward import gradients
from zmlx.kernels.rope_kernels import STARTS, Rotation, paces
from zmlx.metal import scalar
from zmlx.testing import assert_matches, to_numpy


def normal(*shape, dtype=mx.float32, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rotated(x, theta, traditional=False):
    """x turned by theta (…, pairs), which broadcasts, in float64."""
    x, h = to_numpy(x), theta.shape[-1]
    pairs = (slice(0, 2 * h, 2), slice(1, 2 * h, 2)) if traditional else (slice(h), slice(h, 2 * h))
    a, b = (x[..., p] for p in pairs)
    y = x.copy()
    y[..., pairs[0]] = a * np.cos(theta) - b * np.sin(theta)
    y[..., pairs[1]] = a * np.sin(theta) + b * np.cos(theta)
    return y


def waves(dims, base=10000.0):
    return base ** (-np.arange(0, dims, 2) / dims)


@given(st.data())
def test_it_equals_mx_fast_rope(data):
    lead = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    batch, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    d = data.draw(st.integers(2, 40))
    dims = 2 * data.draw(st.integers(1, d // 2))
    dtype = data.draw(st.sampled_from([mx.float32, mx.float16, mx.bfloat16]))
    offset = data.draw(st.integers(-5, 100))
    if data.draw(st.booleans()):
        offset = mx.array([offset + 3 * b for b in range(batch)])
    given_ = data.draw(st.booleans())
    freqs = 10.0 ** mx.linspace(0.0, 4.0, dims // 2) if given_ else None
    options = {
        "traditional": data.draw(st.booleans()),
        "base": None if given_ else data.draw(st.sampled_from([10000.0, 5e5])),
        "scale": data.draw(st.sampled_from([1.0, 0.25])),
        "offset": offset,
        "freqs": freqs,
    }
    x = normal(batch, *lead, steps, d, dtype=dtype)
    got, want = rope(x, dims, **options), mx.fast.rope(x, dims, **options)
    assert got.dtype == want.dtype
    # MLX's angle is off by up to 2e-6 of itself.
    close = {mx.float32: 1e-3, mx.float16: 4e-3, mx.bfloat16: 4e-2}[dtype]
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), atol=close)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("traditional", [False, True])
def test_positions_of_a_million_cost_no_digits(geometry, traditional):
    x, d = normal(1, 2, 4, 128), 128
    for offset in (10**5, 10**6, 2**24 - 5):
        with launch.geometry(geometry):
            got = rope(x, offset=offset, traditional=traditional)
        theta = np.arange(offset, offset + 4)[:, None] * waves(d)
        # The factor of the angle holds 48 digits, of which 24 are before the point at 2²⁴.
        assert_matches(got, rotated(x, theta, traditional), rounding=16)


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("kind", ["offsets", "steps", "each", "one batch", "float"])
def test_positions_of_every_kind(kind, layout):
    x = normal(3, 2, 5, 8)
    rng = np.random.default_rng(1)
    places = {
        "offsets": np.array([4, 0, 90])[:, None] + np.arange(5),
        "steps": np.tile(rng.integers(0, 99, 5), (3, 1)),
        "each": rng.integers(0, 99, (3, 5)),
        "one batch": np.tile(rng.integers(0, 99, 5), (3, 1)),
        "float": rng.uniform(0, 99, (3, 5)).astype(np.float32),
    }[kind]
    if kind == "offsets":
        given_ = {"offset": mx.array(places[:, 0])}
    elif kind in ("steps", "one batch"):
        given_ = {"positions": mx.array(places[0] if kind == "steps" else places[:1])}
    else:
        given_ = {"positions": mx.array(places)}
    turned = x if layout == "BHLD" else x.transpose(0, 2, 1, 3)
    got = rope(turned, layout=layout, **given_)
    got = got if layout == "BHLD" else got.transpose(0, 2, 1, 3)
    want = rotated(x, (places[..., None] * waves(8))[:, None])
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-5)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_m_rope_turns_each_section_by_its_axis(geometry, interleaved):
    b, h, steps, d, sections = 2, 3, 7, 16, (2, 3, 3)
    x = normal(b, h, steps, d)
    places = np.random.default_rng(1).integers(0, 50, (3, b, steps))
    if interleaved:
        axes = [i % 3 if i % 3 and i < 3 * sections[i % 3] else 0 for i in range(8)]
    else:
        axes = [0, 0, 1, 1, 1, 2, 2, 2]
    theta = places[axes].transpose(1, 2, 0) * waves(d)
    options = {"positions": mx.array(places), "sections": sections}
    with launch.geometry(geometry):
        got = rope(x, interleave_sections=interleaved, **options)
    np.testing.assert_allclose(to_numpy(got), rotated(x, theta[:, None]), atol=1e-5)
    dy = normal(b, h, steps, d, seed=2)
    with launch.geometry(geometry):
        dx = mx.vjp(lambda x: rope(x, interleave_sections=interleaved, **options), [x], [dy])[1][0]
    np.testing.assert_allclose(to_numpy(dx), rotated(dy, -theta[:, None]), atol=1e-5)


def test_text_positions_make_m_rope_a_plain_rope():
    x, places = normal(2, 2, 5, 8), mx.arange(5)
    same = mx.broadcast_to(places, (3, 5))
    np.testing.assert_array_equal(rope(x, positions=same, sections=(1, 1, 2)), rope(x))


@pytest.mark.parametrize("placed", ["offsets", "each", "axes"])
def test_the_gradient_of_freqs_with_positions_of_a_batch(placed):
    x, dy = normal(2, 3, 5, 8), normal(2, 3, 5, 8, seed=1)
    freqs = mx.array([1.0, 3.0, 10.0, 40.0])
    each = mx.array(np.random.default_rng(2).integers(0, 30, (2, 5)))
    options = {
        "offsets": {"offset": mx.array([3, 9])},
        "each": {"positions": each},
        "axes": {"positions": mx.stack([each, each + 3]), "sections": (1, 3)},
    }[placed]
    places = {
        "offsets": (mx.array([[3], [9]]) + mx.arange(5))[:, :, None],
        "each": each[:, :, None],
        "axes": mx.stack([each, each + 3, each + 3, each + 3], axis=-1),
    }[placed]

    def plain(f):
        theta = (places / f)[:, None]
        a, b = x[..., :4], x[..., 4:]
        c, s = mx.cos(theta), mx.sin(theta)
        return mx.concatenate([a * c - b * s, a * s + b * c], axis=-1)

    want = mx.vjp(plain, [freqs], [dy])[1][0]
    for geometry in ("cpu", "gpu"):
        with launch.geometry(geometry):
            got = mx.vjp(lambda f: rope(x, freqs=f, **options), [freqs], [dy])[1][0]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_an_infinite_frequency_turns_nothing():
    """As models with proportional RoPE mark dimensions that do not turn."""
    x = normal(1, 2, 5, 4)
    y = rope(x, freqs=mx.array([1.0, np.inf]))
    np.testing.assert_array_equal(y[..., 1::2], x[..., 1::2])


def test_a_new_length_position_or_base_compiles_nothing():
    def run(steps, offset, **options):
        x = normal(2, 4, steps, 32)
        mx.eval(mx.grad(lambda x: (rope(x, offset=offset, **options) * x).sum())(x))
        caches = [mx.zeros((2, 4, 64, 32)) for _ in "kv"]
        mx.eval(rope_append(x, x, *caches, mx.array([offset, 0]), q=x))

    run(9, 3)
    before = metal.statistics()
    for steps, offset, options in ((1, 0, {}), (33, 20, {"base": 77.0}), (12, 7, {"scale": 0.3})):
        run(steps, offset, **options)
    after = metal.statistics()
    assert after["compiles"] + after["cache_hits"] == before["compiles"] + before["cache_hits"]


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "dtype, top",
    [
        (mx.int8, 2**7),
        (mx.uint8, 2**8),
        (mx.int16, 2**15),
        (mx.uint16, 2**16),
        (mx.int32, 2**31),
        (mx.uint32, 2**32),
        (mx.uint64, 2**40),
    ],
    ids=str,
)
def test_positions_beyond_the_dtype_of_the_offset_do_not_wrap(geometry, dtype, top):
    """Steps on both sides of the largest offset, by an array, an int and one by one."""
    x = mx.array(np.random.default_rng(0).standard_normal((2, 1, 4, 8)).astype(np.float32))
    starts = [top - 2, top - 1]
    with launch.geometry(geometry):
        got = rope(x, offset=mx.array(starts, dtype))
        for batch, start in enumerate(starts):
            one = x[batch : batch + 1]
            wanted = mx.array([start], mx.int64)
            assert mx.array_equal(got[batch : batch + 1], rope(one, offset=wanted)).item()
            assert mx.array_equal(got[batch : batch + 1], rope(one, offset=start)).item()
            last = rope(one[:, :, 3:], offset=np.int64(start + 3))
            assert mx.array_equal(got[batch : batch + 1, :, 3:], last).item()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dims": 3}, "'dims' must be even and in [2, 8] but got 3."),
        ({"dims": 10}, "'dims' must be even and in [2, 8] but got 10."),
        ({"base": 0.0}, "'base' must be positive and finite but got 0.0."),
        ({"base": float("inf")}, "'base' must be positive and finite but got inf."),
        (
            {"layout": np.zeros(3)},
            "'layout' must be one of BHLD, BLHD but got array([0., 0., 0.]).",
        ),
        ({"layout": "LBHD"}, "'layout' must be one of BHLD, BLHD but got 'LBHD'."),
        ({"freqs": mx.ones((3,))}, "'freqs' must have shape (4,) but got (3,)."),
        ({"freqs": mx.ones((4,)), "base": 1.0}, "'base' must be None where freqs"),
        ({"offset": mx.array([1, 2, 3])}, "'offset' must have shape () or (2,) but got (3,)."),
        ({"offset": mx.array(1.0)}, "'offset' must have dtype int32, uint32, int64, uint64, int16"),
        ({"offset": 2.0}, "'offset' must be an int or an mx.array but got float."),
        ({"offset": 2**63 - 5}, "'offset' must be a position of 64 bits but got"),
        ({"offset": 1, "positions": mx.arange(5)}, "'offset' must be 0 where positions"),
        ({"positions": mx.arange(4)}, "'positions' must have shape (5,) or (2, 5) but got (4,)."),
        ({"sections": (2, 2)}, "'positions' must have shape (2, 2, 5) but got None."),
        ({"sections": (2, 1)}, "'sections' must be sizes ≥ 0 that sum to 4 but got (2, 1)."),
        ({"sections": 4}, "'sections' must be a sequence of ints but got int."),
        ({"sections": np.array([2, 2])}, "'sections' must be a sequence of ints but got ndarray."),
        ({"sections": (True, 3)}, "'sections' must be a sequence of ints but got bool."),
        ({"interleave_sections": True}, "'interleave_sections' must be False without sections"),
    ],
)
def test_errors(options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"[rope] {message}")):
        rope(normal(2, 3, 5, 8), **options)


_WAVES = 10.0 ** mx.linspace(0.0, 4.0, 4)


@pytest.mark.parametrize(
    "arrays",
    [
        lambda n: {"offset": n},
        lambda n: {"offset": np.int64(n)},
        lambda n: {"offset": mx.array(n)},
        lambda n: {"offset": mx.array([n, n + 2], dtype=mx.int16)},
        lambda n: {"offset": n, "freqs": n * _WAVES},
        lambda n: {"positions": mx.arange(5) * n},
        lambda n: {"positions": mx.arange(10).reshape(2, 5) * n, "offset": 0},
        lambda n: {"positions": mx.arange(10).reshape(2, 5) * n, "sections": (3, 1)},
        lambda n: {"positions": mx.arange(10).reshape(2, 5) * n, "sections": [3, 1]},
    ],
)
def test_a_repeated_call_goes_by_its_own_positions_and_frequencies(arrays):
    def want(x, positions=None, offset=0, freqs=None, sections=None):
        places = np.arange(5) + np.array(offset).reshape(-1, 1)
        if positions is not None:
            places = np.array(positions).reshape(-1, 5)
        places = places[:, None, :, None]  # of batches, heads, steps and pairs
        if sections is not None:
            places = np.concatenate([places[:1]] * 3 + [places[1:]], axis=-1)
        return rotated(x, places * waves(8) if freqs is None else places / to_numpy(freqs))

    for n in (1, 3, 7):
        x = normal(2, 3, 5, 8, seed=n)
        got = to_numpy(rope(x, **arrays(n)))
        np.testing.assert_allclose(got, want(x, **arrays(n)), atol=1e-5)


def test_an_option_that_changes_alone_changes_the_result():
    x, positions = normal(2, 3, 3, 8), mx.arange(6).reshape(2, 3)
    calls = [
        {},
        {"dims": 6},
        {"traditional": True},
        {"base": 100.0},
        {"scale": 0.5},
        {"offset": 1},
        {"layout": "BLHD", "offset": 1},
        {"positions": positions},
        {"positions": positions, "sections": (2, 2)},
        {"positions": positions, "sections": (3, 1)},
        {"positions": positions, "sections": (2, 2), "interleave_sections": True},
    ]
    for _ in range(2):
        found = [np.array(rope(x, **options)) for options in calls]
        for i, y in enumerate(found):
            assert not any(np.array_equal(y, other) for other in found[:i])


@pytest.mark.parametrize(
    "good, bad",
    [
        ({"offset": 1}, {"offset": True}),
        ({"offset": 1}, {"offset": 1.0}),
        ({"offset": 0}, {"offset": None}),
        ({"traditional": True}, {"traditional": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"dims": 8}, {"dims": 8.0}),
        ({"positions": mx.arange(5)}, {"positions": mx.arange(5), "offset": 1}),
        ({"positions": mx.arange(5)}, {"positions": mx.arange(5), "offset": None}),
        ({"positions": mx.arange(5)}, {"positions": mx.arange(5), "offset": mx.array(0)}),
        ({"positions": mx.arange(5)}, {"positions": mx.arange(4)}),
        ({"freqs": mx.ones(4)}, {"freqs": mx.ones(3)}),
        ({"freqs": mx.ones(4)}, {"freqs": mx.ones(4), "base": 10.0}),
    ],
    ids=str,
)
def test_a_bad_call_raises_after_a_good_one(good, bad):
    x = normal(2, 3, 5, 8)
    for _ in range(2):
        rope(x, **good)
        with pytest.raises((TypeError, ValueError), match=r"\[rope\] '\w+' must"):
            rope(x, **bad)


def _ways_of(op):
    return op._ways.get(launch.settings(), {})


@pytest.mark.on_cpu
def test_a_new_offset_is_no_new_call():
    x, cache = normal(1, 2, 1, 8), mx.zeros((1, 2, 64, 8))
    rope(x)
    rope_append(x, x, cache, cache, 0)
    before = len(_ways_of(_ROPE)), len(_ways_of(_ROPE_APPEND))
    for offset in range(1, 64):
        rope(x, offset=offset)
        rope_append(x, x, cache, cache, offset)
    assert (len(_ways_of(_ROPE)), len(_ways_of(_ROPE_APPEND))) == before


@pytest.mark.parametrize("offset", [3, np.int64(3), mx.array(3), mx.array([3, 4])], ids=repr)
def test_no_array_of_a_call_is_kept(offset):
    def call():
        k, v, q, waves = normal(2, 2, 1, 8), normal(2, 2, 1, 6), normal(2, 4, 1, 8), mx.ones(4)
        k_cache, v_cache = mx.zeros((2, 2, 9, 8)), mx.zeros((2, 2, 9, 6))
        arrays = k, v, k_cache, v_cache, q, waves
        mx.eval(rope(q, offset=offset, freqs=waves), rope(q, positions=mx.arange(1)))
        mx.eval(rope_append(k, v, k_cache, v_cache, offset, q=q, freqs=waves))
        return [weakref.ref(a) for a in arrays]

    for _ in range(2):
        assert not any(a() is not None for a in call())


def test_as_many_dims_as_a_stack_has_room_for():
    x = mx.ones((1, 1, 1, 2**17 + 2))
    with pytest.raises(
        ValueError, match=re.escape("[rope] 'dims' must be even and in [2, 131072]")
    ):
        rope(x)
    y = rope(x, 2**17, offset=1, base=1.0)
    want = np.full(x.shape, np.cos(1) + np.sin(1))
    want[..., : 2**16], want[..., 2**17 :] = np.cos(1) - np.sin(1), 1
    np.testing.assert_allclose(np.array(y), want, rtol=1e-5)


def test_two_axes_are_too_few():
    with pytest.raises(ValueError, match=re.escape("[rope] 'x' must have shape (B, *, L, D)")):
        rope(normal(5, 8))


@pytest.mark.parametrize("shape", [(0, 70000, 70000, 8), (70000, 0, 70000, 8)], ids=str)
def test_axes_beside_an_empty_one_whose_product_has_no_32_bits_are_refused(shape):
    x, weight = mx.zeros(shape), mx.ones((8,))
    calls = {
        "rope": lambda: rope(x),
        "qk_norm_rope": lambda: qk_norm_rope(x, x, weight, weight),
        "rope_append": lambda: rope_append(x, x, x, x, offset=0),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match=rf"\[{op}\] '\w+' must have fewer than 2\^32 rows"):
            call()


# ---- the cache ----------------------------------------------------------------------------------


def appended(k, v, k_cache, v_cache, offsets, layout="BHLD"):
    """The caches in float64."""
    keys, values = to_numpy(k_cache), to_numpy(v_cache)
    for b, start in enumerate(offsets):
        steps = k.shape[2 if layout == "BHLD" else 1]
        theta = np.arange(start, start + steps)[:, None] * waves(k.shape[-1])
        if layout == "BHLD":
            keys[b, :, start : start + steps] = rotated(k[b], theta)
            values[b, :, start : start + steps] = to_numpy(v[b])
        else:
            keys[b, start : start + steps] = rotated(k[b], theta[:, None])
            values[b, start : start + steps] = to_numpy(v[b])
    return keys, values


def to_append(offsets, layout):
    """k, v and q of 5 steps, caches with room for 300, and where the steps go: one number where
    all three batches start alike."""

    def shape(heads, steps, d):
        return (3, heads, steps, d) if layout == "BHLD" else (3, steps, heads, d)

    k, v, q = normal(*shape(2, 5, 16)), normal(*shape(2, 5, 6)), normal(*shape(4, 5, 16))
    caches = normal(*shape(2, 300, 16)), normal(*shape(2, 300, 6), seed=1)
    offset = offsets[0] if offsets[0] == offsets[1] else mx.array(offsets)
    return k, v, q, caches, offset


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("offsets", [[7, 7, 7], [0, 295, 77]])
def test_new_steps_are_written_and_old_ones_kept(offsets, layout, geometry):
    k, v, q, caches, offset = to_append(offsets, layout)
    with launch.geometry(geometry):
        got = rope_append(k, v, *caches, offset, q=q, layout=layout)
    want = appended(k, v, *caches, offsets, layout)
    np.testing.assert_allclose(to_numpy(got[0]), want[0], atol=1e-5)
    np.testing.assert_array_equal(to_numpy(got[1]), want[1])
    with launch.geometry(geometry):
        np.testing.assert_array_equal(got[2], rope(q, offset=offset, layout=layout))


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("offsets", [[7, 7, 7], [0, 295, 77]])
def test_gradients_of_appending_are_those_of_writing_rows(offsets, layout, geometry):
    """Rows turn back by the same angles, and positions that were written pass nothing on."""
    k, v, q, caches, offset = to_append(offsets, layout)
    cotangents = [normal(*a.shape, seed=2) for a in (*caches, q)]

    def append(k, v, k_cache, v_cache, q):
        return list(rope_append(k, v, k_cache, v_cache, offset, q=q, layout=layout))

    with launch.geometry(geometry):
        dk, dv, *dcaches, dq = mx.vjp(append, [k, v, *caches, q], cotangents)[1]
    wants = [to_numpy(c) for c in cotangents[:2]]
    axis = 2 if layout == "BHLD" else 1
    for b, start in enumerate(offsets):
        new = tuple(slice(start, start + 5) if a == axis - 1 else slice(None) for a in range(3))
        theta = np.arange(start, start + 5)[:, None] * waves(16)
        theta = theta if layout == "BHLD" else theta[:, None]
        back = rotated(mx.array(wants[0][b][new]), -theta)
        np.testing.assert_allclose(to_numpy(dk)[b], back, atol=1e-5)
        np.testing.assert_array_equal(to_numpy(dv)[b], wants[1][b][new])
        for want in wants:
            want[b][new] = 0
    for got, want in zip(dcaches, wants, strict=True):
        np.testing.assert_array_equal(to_numpy(got), want)
    with launch.geometry(geometry):
        turned = mx.vjp(lambda q: rope(q, offset=offset, layout=layout), [q], [cotangents[2]])[1][0]
    np.testing.assert_array_equal(dq, turned)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_frequencies_of_appending_have_the_gradient_of_the_rows_that_they_turn(
    layout, queries, geometry
):
    offsets = [0, 295, 77]
    k, v, q, caches, offset = to_append(offsets, layout)
    freqs = 10.0 ** mx.linspace(0.0, 3.0, 8)
    dk, dv, dq = (normal(*a.shape, seed=2) for a in (*caches, q))

    def append(f):
        given = {"q": q} if queries else {}
        return list(rope_append(k, v, *caches, offset, freqs=f, layout=layout, **given))

    def turn(f):
        rows = [k, q][: 1 + queries]
        return [rope(x, freqs=f, offset=offset, layout=layout) for x in rows]

    new = [
        to_numpy(dk)[b][tuple(slice(at, at + 5) if a == axis else slice(None) for a in range(3))]
        for axis in [1 if layout == "BHLD" else 0]
        for b, at in enumerate(offsets)
    ]
    with launch.geometry(geometry):
        got = mx.vjp(append, [freqs], [dk, dv, dq][: 2 + queries])[1][0]
        want = mx.vjp(turn, [freqs], [mx.array(np.stack(new)), dq][: 1 + queries])[1][0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
def test_an_offset_out_of_range_has_gradients_of_zero(geometry):
    """There the results are NaN, whatever the arguments; other batches have their gradients."""
    k, v, dk, dv = normal(2, 2, 3, 8), normal(2, 2, 3, 6), normal(2, 2, 9, 8), normal(2, 2, 9, 6)
    rotation, start = Rotation(4, False, False, STARTS, False), mx.array([7, 4])
    one = scalar(1.0)

    def all_of():
        primals = (k, v, dk, dv, start, paces(4, 10000.0), one, one)
        return gradients(rotation, primals, (dk, dv), (0, 1, 2, 3))[:4]

    with launch.geometry(geometry):
        got = all_of()
    with launch.target("reference"):
        want = all_of()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        assert not np.array(a[0]).any()
        assert np.array(a[1]).any()


@pytest.mark.on_cpu
def test_the_gradient_of_a_cache_takes_the_memory_of_its_cotangent():
    cache, k = normal(1, 2, 9, 8), normal(1, 2, 3, 8, seed=1)

    def loss(k_cache, v_cache):
        keys, values = rope_append(k, k, k_cache, v_cache, 4)
        return (keys**2 + values**2).sum()

    before = metal.statistics()["donations"]
    mx.eval(mx.grad(loss, argnums=(0, 1))(cache, cache))
    assert metal.statistics()["donations"] - before == 2


@pytest.mark.on_cpu
def test_a_cache_that_nobody_else_holds_is_filled_in_place():
    k_cache, v_cache = mx.zeros((1, 2, 64, 8)), mx.zeros((1, 2, 64, 8))
    k, v = normal(1, 2, 64, 8), normal(1, 2, 64, 8, seed=1)
    mx.eval(k, v, k_cache, v_cache)
    before = metal.statistics()["donations"]
    for i in range(64):
        k_cache, v_cache = rope_append(k[:, :, i : i + 1], v[:, :, i : i + 1], k_cache, v_cache, i)
        mx.eval(k_cache, v_cache)
    assert metal.statistics()["donations"] - before == 2 * 64
    np.testing.assert_array_equal(k_cache, rope(k))
    np.testing.assert_array_equal(v_cache, v)


@pytest.mark.parametrize("offset", [0, mx.array(0)])
def test_a_cache_shorter_than_the_steps_is_refused(offset):
    k, cache = normal(1, 2, 5, 8), normal(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"\[rope_append\] 'k_cache' must have at least 5 positi"):
        rope_append(k, k, cache, cache, offset)


def test_a_cache_that_is_held_does_not_change():
    k_cache, v_cache = normal(1, 2, 9, 8), normal(1, 2, 9, 8, seed=1)
    kept = np.array(k_cache), np.array(v_cache)
    k = normal(1, 2, 3, 8, seed=2)
    mx.eval(rope_append(k, k, k_cache, v_cache, 4))
    np.testing.assert_array_equal(k_cache, kept[0])
    np.testing.assert_array_equal(v_cache, kept[1])


def test_one_array_as_both_caches_is_not_filled_in_place():
    cache, k, v = mx.zeros((1, 1, 4, 2)), mx.ones((1, 1, 1, 2)), 2 * mx.ones((1, 1, 1, 2))
    keys, values = rope_append(k, v, cache, cache, 0)
    del cache
    mx.eval(keys, values)
    assert keys[0, 0, 0].tolist() == [1, 1]
    assert values[0, 0, 0].tolist() == [2, 2]


@pytest.mark.on_cpu
@pytest.mark.parametrize("offset", [-1, 7, 2**31 - 1])
def test_an_offset_out_of_range(offset):
    k, cache = normal(2, 2, 3, 8), normal(2, 2, 9, 8)
    with pytest.raises(ValueError, match=re.escape("[rope_append] 'offset' must be")):
        rope_append(k, k, cache, cache, offset)
    with pytest.raises(
        RuntimeError, match=re.escape(f"'offset' must be in range but got {offset}")
    ):
        mx.eval(rope_append(k, k, cache, cache, mx.array([0, offset])))


@pytest.mark.on_cpu
@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("offset", [2**63 - 1, 2**63 - 2, -(2**63)])
def test_an_offset_whose_end_has_no_64_bits_is_out_of_range(offset, geometry):
    k, cache, start = mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 8, 2)), mx.array([offset])
    message = re.escape(f"'offset' must be in range but got {offset}")
    with launch.geometry(geometry):
        with pytest.raises(RuntimeError, match=message):
            mx.eval(rope_append(k, k, cache, cache, start))
        rotation, one = Rotation(1, False, False, STARTS, False), scalar(1.0)
        primals = (k, k, cache, cache, start, paces(1, 10000.0), one, one)
        found = gradients(rotation, primals, (cache, cache), (0, 1, 2, 3))
    assert not any(np.array(x).any() for x in found[:4])


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_offsets_of_no_batches(target):
    x, offset = mx.zeros((0, 2, 3, 4)), mx.zeros((0,), dtype=mx.int32)
    with zmlx.target(target):
        assert rope(x, offset=offset).shape == x.shape
        caches = rope_append(x, x, mx.zeros((0, 2, 8, 4)), mx.zeros((0, 2, 8, 4)), offset)
        assert [c.shape for c in caches] == [(0, 2, 8, 4)] * 2
        mx.eval(caches)


@pytest.mark.parametrize(
    "argument, shape",
    [
        ("v", (2, 2, 4, 8)),
        ("k_cache", (2, 1, 9, 8)),
        ("v_cache", (2, 2, 8, 8)),
        ("q", (2, 2, 3, 6)),
    ],
)
def test_shapes_of_the_cache(argument, shape):
    arrays = {
        "k": (2, 2, 3, 8),
        "v": (2, 2, 3, 8),
        "k_cache": (2, 2, 9, 8),
        "v_cache": (2, 2, 9, 8),
    }
    values = {n: mx.zeros(s) for n, s in (arrays | {argument: shape}).items()}
    with pytest.raises(ValueError, match=re.escape(f"[rope_append] '{argument}' must have")):
        rope_append(**values, offset=0)


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("queries", [False, True])
def test_a_repeated_append_goes_by_its_own_arrays_and_offset(queries, layout):
    def lay(x):
        return x.swapaxes(1, 2) if layout == "BLHD" else x

    for n in (2, 0, 5):
        k, v = normal(2, 2, 3, 8, seed=n), normal(2, 2, 3, 6, seed=n + 1)
        k_cache, v_cache = normal(2, 2, 9, 8, seed=n + 2), normal(2, 2, 9, 6, seed=n + 3)
        q = normal(2, 4, 3, 8, seed=n + 4) if queries else None
        waves = n + 1 + mx.arange(4)
        arrays = tuple(map(lay, (k, v, k_cache, v_cache)))
        given = {"layout": layout, "freqs": waves.astype(mx.float32)}
        if queries:
            given["q"] = lay(q)
        for offset in (n, np.int64(n), mx.array(n), mx.array([n, n])):
            found = [lay(y) for y in rope_append(*arrays, offset, **given)]
            turned = [
                rotated(x, (n + np.arange(3))[:, None] / np.arange(n + 1, n + 5))
                for x in (k, q)
                if x is not None
            ]
            k_cache[:, :, n : n + 3], v_cache[:, :, n : n + 3] = mx.array(turned[0]), v
            for got, wanted in zip(found, (k_cache, v_cache, *turned[1:]), strict=True):
                np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "offset, message",
    [
        (7, "be in [0, 6] for 3 steps in a cache of 9 but got 7."),
        (-1, "be in [0, 6] for 3 steps in a cache of 9 but got -1."),
        (2**63, "be a position of 64 bits but got"),
        (True, "be an int or an mx.array but got bool."),
        (1.0, "be an int or an mx.array but got float."),
        (None, "be an int or an mx.array but got NoneType."),
        (mx.array(1.0), "have dtype int32"),
        (mx.array([1, 1, 1]), "have shape () or (2,)"),
    ],
)
def test_a_bad_offset_raises_after_a_good_one(offset, message):
    k, cache = normal(2, 2, 3, 8), normal(2, 2, 9, 8)
    for good in (1, 6, mx.array(1), mx.array([1, 2])):
        rope_append(k, k, cache, cache, good)
    message = re.escape(f"[rope_append] 'offset' must {message}")
    with pytest.raises((TypeError, ValueError), match=message):
        rope_append(k, k, cache, cache, offset)


def test_values_of_offsets_are_looked_at_in_every_call(monkeypatch):
    k, cache = normal(2, 2, 3, 8), normal(2, 2, 9, 8)
    monkeypatch.setattr(checks, "ENABLED", True)
    for _ in range(2):
        rope_append(k, k, cache, cache, mx.array(6))
        with pytest.raises(ValueError, match=re.escape("'offset' must be in [0, 6] for 3 steps")):
            rope_append(k, k, cache, cache, mx.array(7))
