"""What topk promises beyond its registry entry."""

import weakref

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmlx import launch, metal
from zmlx.kernels import topk
from zmlx.kernels.axes import NUMBERS
from zmlx.kernels.topk import topk_reference


def expected(x, k):
    """By a stable sort; NaN first."""
    key = np.where(np.isnan(x), np.inf, x)
    order = np.lexsort((np.broadcast_to(np.arange(x.shape[-1]), x.shape), -key, ~np.isnan(x)))
    at = order[..., :k]
    return np.take_along_axis(x, at, -1), at


def check(x, k, dtype=mx.float32):
    values, at = topk(mx.array(x).astype(dtype), k)
    want, want_at = expected(np.asarray(x, dtype=np.float64), k)
    assert values.dtype == dtype
    assert at.dtype == mx.uint32
    np.testing.assert_array_equal(np.array(at), want_at)
    np.testing.assert_array_equal(np.array(values.astype(mx.float32)), want.astype(np.float32))


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("d", [1, 2, 63, 64, 65, 200, 4097, 40000])
def test_any_k_of_any_row(d, geometry):
    rng = np.random.default_rng(d)
    with launch.geometry(geometry):
        for k in sorted({1, min(2, d), min(64, d), min(65, d), d // 2 or 1, d}):
            check(rng.standard_normal((2, d)).astype(np.float32), k)
            check(rng.integers(0, 7, (2, d)), k, mx.int32)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
def test_other_rows_lengths_and_k_compile_nothing(geometry):
    def run(rows, d, k):
        mx.eval(topk(mx.random.normal((rows, d)), k))

    with launch.geometry(geometry):
        run(3, 40000, 8)  # several tiles and a merge
        run(3, 300, 300)  # sorted on a CPU
        before = metal.statistics()
        for rows, d, k in ((5, 40000, 8), (1, 50000, 9), (40, 301, 300), (3, 70000, 5)):
            run(rows, d, k)
    after = metal.statistics()
    assert after["compiles"] + after["cache_hits"] == before["compiles"] + before["cache_hits"]


@given(st.integers(1, 300), st.data())
def test_ties_nan_and_infinities(d, data):
    k = data.draw(st.integers(1, d))
    elements = st.sampled_from([0.0, -0.0, 1e-40, 1.0, -1.0, 2.0, np.nan, np.inf, -np.inf])
    x = np.array([data.draw(st.lists(elements, min_size=d, max_size=d))], dtype=np.float32)
    check(x, k)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_dtype(dtype):
    check(np.random.default_rng(0).integers(0, 2 if dtype == mx.bool_ else 100, (3, 90)), 70, dtype)


def test_64_bit_integers_are_compared_exactly():
    x = mx.array([2**53, 2**53 + 1, 2**53 - 1], dtype=mx.int64)
    np.testing.assert_array_equal(np.array(topk(x, 3)[1]), [1, 0, 2])


def test_rising_and_falling_rows():
    x = np.arange(5000, dtype=np.float32)
    for k in (5, 300):
        check(np.stack([x, x[::-1]]), k)


@pytest.mark.parametrize("axis", [0, 1, 2, -2, None])
def test_any_axis(axis):
    x = mx.array(np.random.default_rng(1).standard_normal((4, 5, 6)), dtype=mx.float32)
    values, at = topk(x, 3, axis)
    flat = x.reshape(-1) if axis is None else x
    along = 0 if axis is None else axis
    np.testing.assert_array_equal(
        np.array(values), np.array(mx.sort(-flat, axis=along) * -1).take(range(3), axis=along)
    )
    np.testing.assert_array_equal(
        np.array(mx.take_along_axis(flat, at, axis=along)), np.array(values)
    )


def test_a_tangent_that_is_mapped():
    x = mx.random.normal((4, 5), key=mx.random.key(1))

    def tangent(x):
        return mx.jvp(lambda x: topk(x, 2)[0], [x], [2 * x])[1][0]

    assert mx.array_equal(mx.vmap(tangent)(x), 2 * topk(x, 2)[0])


def test_the_gradient_goes_to_the_elements_that_were_taken():
    x = mx.array([[3.0, 1.0, 3.0, 2.0]])
    dx = mx.grad(lambda x: (topk(x, 3)[0] * mx.array([1.0, 10.0, 100.0])).sum())(x)
    np.testing.assert_array_equal(np.array(dx), [[1.0, 0.0, 10.0, 100.0]])


@pytest.mark.on_cpu
def test_a_row_in_one_tile_is_one_launch():
    x = mx.random.normal((8, 4096))
    mx.eval(x)
    for k in (8, 1000):
        before = metal.statistics()["launches"]
        mx.eval(topk(x, k))
        assert metal.statistics()["launches"] - before == 1


def test_a_new_k_of_few_compiles_nothing():
    x = mx.random.normal((8, 4096))
    mx.eval(topk(x, 8))
    before = metal.statistics()["compiles"]
    mx.eval([topk(x, k) for k in (1, 3, 30)])
    assert metal.statistics()["compiles"] == before


def test_a_new_k_or_length_of_many_compiles_nothing():
    mx.eval(topk(mx.random.normal((8, 4096)), 1000))
    before = metal.statistics()["compiles"]
    mx.eval(
        [topk(mx.random.normal((8, d)), k) for d, k in ((4096, 100), (5000, 999), (4097, 4097))]
    )
    assert metal.statistics()["compiles"] == before


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"\[topk\] 'k' must be in \[1, 4\] but got {k}"):
        topk(mx.zeros((2, 4)), k)


def test_k_that_is_no_int():
    with pytest.raises(TypeError, match=r"\[topk\] 'k' must be an int but got float"):
        topk(mx.zeros((2, 4)), 1.0)


def test_an_empty_axis():
    with pytest.raises(ValueError, match=r"\[topk\] 'k' must be in \[1, 0\] but got 1"):
        topk(mx.zeros((2, 0)), 1)
    assert topk(mx.zeros((0, 4)), 2)[0].shape == (0, 2)


def test_a_repeated_call_is_right_for_other_values_and_options():
    for seed in range(3):
        x = mx.random.normal((6, 6), key=mx.random.key(seed))
        for k, axis in ((2, -1), (2, 0), (2, None), (3, -1)):
            for got, want in zip(topk(x, k, axis), topk_reference(x, k, axis), strict=True):
                assert mx.array_equal(got, want)


@pytest.mark.on_cpu
def test_a_bad_call_raises_after_a_good_one_that_equals_it():
    x = mx.random.normal((4, 5))
    for _ in range(2):
        topk(x, 1, 1)
        for k, axis in ((True, 1), (1.0, 1), (1, True), (1, 1.0), (1, (1,))):
            with pytest.raises(TypeError, match=r"\[topk\] '(k|axis)' must be an int"):
                topk(x, k, axis)
        with pytest.raises(ValueError, match=r"\[topk\] 'k' must be in \[1, 4\] but got 5"):
            topk(x, 5, 0)


def test_no_array_of_a_call_is_kept():
    x = mx.random.normal((7, 9))
    kept = weakref.ref(x)
    mx.eval(topk(x, 3), topk(x, 3, 0), topk(x, 3, None))
    del x
    assert kept() is None
