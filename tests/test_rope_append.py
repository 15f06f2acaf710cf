"""RoPE of new steps of a KV cache: what is written where, gradients, memory, errors."""

import re

import mlx.core as mx
import numpy as np
import pytest
from rope_oracle import normal, rotated, waves

import zmlx
from zmlx import checks, launch, metal
from zmlx.kernels import rope, rope_append
from zmlx.kernels.rope_append_backward import gradients
from zmlx.kernels.rope_kernels import STARTS, Rotation, paces
from zmlx.metal import scalar
from zmlx.testing import to_numpy


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
