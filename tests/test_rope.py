"""RoPE: equality with MLX's, positions of every kind, M-RoPE, accuracy far out."""

import re
import weakref

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rope_oracle import normal, rotated, waves

from zmlx import launch, metal
from zmlx.kernels import qk_norm_rope, rope, rope_append
from zmlx.kernels.rope import _ROPE
from zmlx.kernels.rope_append import _ROPE_APPEND
from zmlx.testing import assert_matches, to_numpy


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
