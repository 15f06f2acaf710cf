"""What scans promise beyond their registry entries."""

import itertools
import weakref

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops.sweep import in_dtypes

from zmlx import kernels, launch, metal
from zmlx.kernels import cumprod, cumsum
from zmlx.kernels.axes import NUMBERS

DIRECTIONS = list(itertools.product((False, True), (False, True)))
GEOMETRIES = [
    ("cpu", {}), ("gpu", {}), ("gpu", {"TPR": 31, "RPG": 1}), ("gpu", {"TPR": 33, "RPG": 1}),
    ("gpu", {"TPR": 4, "RPG": 8}), ("gpu", {"TPR": 1024, "RPG": 1}), ("cpu", {"U": 8}),
]  # fmt: skip


def normal(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape), dtype=mx.float32)


def near_one(*shape, zeros=17):
    """Factors whose products stay near one; every `zeros`-th is 0."""
    rng = np.random.default_rng(3)
    x = rng.choice([-1.0, 1.0], shape) * (1 + 0.01 * rng.standard_normal(shape))
    x.reshape(-1)[5::zeros] = 0.0
    return mx.array(x, dtype=mx.float32)


def numpy_scan(op, x, axis, reverse, inclusive):
    x = np.moveaxis(np.array(x).astype(np.float64), axis, -1)
    x = x[..., ::-1] if reverse else x
    start = np.full((*x.shape[:-1], 1), 0.0 if op == "cumsum" else 1.0)
    y = getattr(np, op)(x if inclusive else np.concatenate([start, x[..., :-1]], -1), axis=-1)
    return np.moveaxis(y[..., ::-1] if reverse else y, -1, axis)


@pytest.mark.parametrize("name, dtype", in_dtypes(["cumsum", "cumprod"], NUMBERS))
def test_dtypes_and_values_are_those_of_mlx(name, dtype):
    x = mx.array(np.random.default_rng(1).integers(0, 3, (7, 20))).astype(dtype)
    for axis, (reverse, inclusive) in itertools.product((0, 1, None), DIRECTIONS):
        keywords = {"axis": axis, "reverse": reverse, "inclusive": inclusive}
        got = getattr(kernels, name)(x, **keywords)
        want = getattr(mx, name)(x, **keywords)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(*(np.array(y.astype(mx.float32)) for y in (got, want)))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("reverse, inclusive", DIRECTIONS)
def test_rows_of_any_length_in_any_geometry(reverse, inclusive, geometry):
    with launch.geometry(geometry[0], **geometry[1]):
        for d in (1, 15, 16, 17, 130, 1000):
            for name, x in (("cumsum", normal(3, d)), ("cumprod", near_one(3, d, zeros=401))):
                got = getattr(kernels, name)(x, -1, reverse=reverse, inclusive=inclusive)
                want = numpy_scan(name, x, -1, reverse, inclusive)
                np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-4)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from(DIRECTIONS),
)
def test_any_shape_and_axis(shape, axis, direction):
    axis, x = axis % len(shape), normal(*shape)
    for name in ("cumsum", "cumprod"):
        got = getattr(kernels, name)(x, axis, reverse=direction[0], inclusive=direction[1])
        want = numpy_scan(name, x, axis, *direction)
        np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.on_cpu
@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int32], ids=str)
def test_short_rows_are_a_block_each(dtype, reverse, exclusive):
    for d in range(1, 20):
        geometry = launch.scan_rows(launch.settings(), 9, d, reverse=reverse)
        u = dict(geometry.template)["U"]
        assert u < 2 * d or u == 1
        x = mx.round(normal(301, d) * 4).astype(dtype)
        got = cumsum(x, -1, reverse=reverse, inclusive=not exclusive)
        want = mx.cumsum(x, -1, reverse=reverse, inclusive=not exclusive)
        assert mx.array_equal(got, want), d


@pytest.mark.on_cpu
@pytest.mark.parametrize("reverse, inclusive", DIRECTIONS)
@pytest.mark.parametrize("shape, axis", [((3, 70001), 1), ((70001, 3), 0), ((2, 9001, 5), 1)])
def test_a_long_axis_is_cut_into_parts(shape, axis, reverse, inclusive):
    x = normal(*shape)
    mx.eval(x)
    before = metal.statistics()["launches"]
    got = cumsum(x, axis, reverse=reverse, inclusive=inclusive)
    mx.eval(got)
    assert metal.statistics()["launches"] - before == 2
    want = numpy_scan("cumsum", x, axis, reverse, inclusive)
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("reverse, inclusive", DIRECTIONS)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_gradient_of_a_product_with_zeros(axis, reverse, inclusive):
    """No zero, one, several, neighbours: by the definition, in float64."""
    x = np.random.default_rng(4).uniform(0.5, 1.5, (5, 12))
    x[1, 4] = x[2, 3] = x[2, 9] = x[3, 5] = x[3, 6] = x[4, 0] = x[4, 11] = 0.0
    x = x if axis == 1 else x.T.copy()
    weight = np.random.default_rng(5).standard_normal(x.shape)
    want = np.zeros_like(x)
    for at in np.ndindex(*x.shape):
        # A product is linear in each of its factors.
        ends = []
        for value in (0.0, 1.0):
            moved = x.copy()
            moved[at] = value
            ends.append((numpy_scan("cumprod", moved, axis, reverse, inclusive) * weight).sum())
        want[at] = ends[1] - ends[0]
    dy = mx.array(weight, dtype=mx.float32)

    def loss(x):
        return (cumprod(x, axis, reverse=reverse, inclusive=inclusive) * dy).sum()

    got = mx.grad(loss)(mx.array(x, dtype=mx.float32))
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-4)
    with launch.geometry("gpu"):
        np.testing.assert_allclose(np.array(mx.grad(loss)(mx.array(x, dtype=mx.float32))), want,
                                   rtol=1e-4, atol=1e-4)  # fmt: skip


def test_the_gradient_of_a_sum_is_the_sum_from_the_other_end():
    dy = normal(4, 50)
    dx = mx.vjp(lambda x: [cumsum(x, -1)], [normal(4, 50)], [dy])[1][0]
    np.testing.assert_array_equal(np.array(dx), np.array(cumsum(dy, -1, reverse=True)))


def test_nan_and_infinities_stay_behind_where_they_stand():
    x = mx.ones((1, 100))
    x[0, 40] = float("inf")
    x[0, 70] = float("nan")
    y = np.array(cumsum(x, -1))[0]
    np.testing.assert_array_equal(y[:40], np.arange(1, 41))
    assert np.isinf(y[40:70]).all()
    assert np.isnan(y[70:]).all()


def test_empty_arrays():
    assert cumsum(mx.zeros((0, 3)), 0).shape == (0, 3)
    assert cumprod(mx.zeros((3, 0)), 0).shape == (3, 0)


@pytest.mark.parametrize("op", [cumsum, cumprod], ids=lambda f: f.__name__)
def test_bad_axes(op):
    with pytest.raises(ValueError, match=rf"\[{op.__name__}\] 'axis' must be in \[-2, 2\)"):
        op(normal(2, 3), 2)
    with pytest.raises(TypeError, match=rf"\[{op.__name__}\] 'axis' must be an int or None"):
        op(normal(2, 3), (0, 1))


@pytest.mark.parametrize("op", [cumsum, cumprod])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bool_])
def test_a_repeated_call_is_right_for_other_values_and_options(op, dtype):
    plain = getattr(mx, op.__name__)
    for seed in range(3):
        x = mx.random.randint(0, 3, (6, 6), key=mx.random.key(seed)).astype(dtype)
        for axis, reverse, inclusive in (
            (-1, False, True),
            (0, False, True),
            (None, False, True),
            (-1, True, True),
            (-1, False, False),
        ):
            got = op(x, axis, reverse=reverse, inclusive=inclusive)
            want = plain(x, axis=axis, reverse=reverse, inclusive=inclusive)
            assert mx.array_equal(got, want)


@pytest.mark.parametrize("op", [cumsum, cumprod])
def test_a_bad_call_raises_after_a_good_one_that_equals_it(op):
    x = mx.ones((2, 3))
    for _ in range(2):
        op(x, 1, reverse=True, inclusive=False)
        for axis, reverse, inclusive in ((True, True, False), (1, 1, False), (1, True, 0.0)):
            with pytest.raises(TypeError, match=rf"\[{op.__name__}\] '\w+' must be"):
                op(x, axis, reverse=reverse, inclusive=inclusive)


@pytest.mark.parametrize("op", [cumsum, cumprod])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bool_])
def test_no_array_of_a_call_is_kept(op, dtype):
    x = mx.ones((4, 5)).astype(dtype)
    kept = weakref.ref(x)
    mx.eval(op(x, 0), op(x, -1), op(x, None))
    del x
    assert kept() is None
