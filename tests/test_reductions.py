"""What reductions promise beyond their registry entries."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops.sweep import in_dtypes

import zmlx
from zmlx import kernels, launch, metal
from zmlx.kernels import argmax, argmin, max, mean, min, std, sum, var
from zmlx.kernels import axes as axes_module
from zmlx.kernels.axes import NUMBERS, plan

NAMES = ("sum", "mean", "max", "min", "var", "std", "argmax", "argmin")
SEVERAL_AXES = NAMES[:6]
GEOMETRIES = ("cpu", "gpu")
NAN, INF = float("nan"), float("inf")


def normal(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape), dtype=mx.float32)


def same(got, want, tolerance=0.0):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    got, want = (np.array(y.astype(mx.float32)) for y in (got, want))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# ---- as MLX -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, dtype", in_dtypes(NAMES, NUMBERS))
def test_dtypes_and_values_are_those_of_mlx(name, dtype):
    x = mx.array(np.random.default_rng(1).integers(0, 6, (7, 40))).astype(dtype)
    for axis in (0, 1, None):
        got, want = getattr(kernels, name)(x, axis), getattr(mx, name)(x, axis)
        tolerance = 2e-2 if dtype in (mx.float16, mx.bfloat16) else 1e-5
        same(got, want, tolerance)


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int32, mx.int64, mx.uint64], ids=str)
@pytest.mark.parametrize("name", ["max", "min"])
def test_integers_are_compared_exactly(name, dtype):
    limits = np.iinfo(str(dtype).rsplit(".", 1)[-1])
    x = np.array([[limits.max, limits.max - 1], [limits.min, limits.min + 1]], dtype=limits.dtype)
    got = np.array(getattr(kernels, name)(mx.array(x), axis=1))
    np.testing.assert_array_equal(got, getattr(x, name)(axis=1))
    at = np.array(getattr(kernels, f"arg{name}")(mx.array(x), axis=1))
    np.testing.assert_array_equal(at, getattr(x, f"arg{name}")(axis=1))


@pytest.mark.parametrize("threads", [8, 32, 64])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_of_64_bits_are_exchanged_whole(dtype, threads):
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min, limits.max, (5, 300), dtype)
    with launch.geometry("gpu", TPR=threads):
        for name in ("sum", "max", "min", "argmax", "argmin"):
            got = np.array(getattr(kernels, name)(mx.array(x), axis=1))
            np.testing.assert_array_equal(got, getattr(x, name)(axis=1))


@st.composite
def shapes_and_axes(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    axes = draw(st.lists(st.sampled_from(range(len(shape))), unique=True, max_size=len(shape)))
    return tuple(shape), tuple(a - draw(st.sampled_from((0, len(shape)))) for a in axes)


@given(shapes_and_axes(), st.booleans(), st.sampled_from(SEVERAL_AXES))
def test_any_shape_and_axes(case, keepdims, name):
    shape, axes = case
    x = normal(*shape)
    got = getattr(kernels, name)(x, axes, keepdims)
    same(got, getattr(mx, name)(x, axes, keepdims), 1e-5)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -0.0], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_special_values_are_as_in_mlx(name, value, geometry):
    x = normal(40, 130)
    x[3, 77] = x[3, 99] = x[22, 129] = value
    x[7] = value
    with launch.geometry(geometry):
        for axis in (0, 1, None):
            got, want = getattr(kernels, name)(x, axis), getattr(mx, name)(x, axis)
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [1, 31, 64, 129, 5000, 70001])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_of_equal_elements_the_first_is_found(geometry, d):
    x = mx.zeros((3, d))
    x[1, d // 2 :] = 1.0
    x[2, d - 1] = -INF
    with launch.geometry(geometry):
        np.testing.assert_array_equal(np.array(argmax(x, -1)), [0, d // 2, 0])
        np.testing.assert_array_equal(np.array(argmax(x.T, 0)), [0, d // 2, 0])
        assert argmin(x, -1)[2].item() == d - 1
        low = mx.full((2, d), -INF)
        np.testing.assert_array_equal(np.array(argmax(low, -1)), [0, 0])


def test_the_first_nan_is_found():
    x = normal(3, 50000)
    x[1, 40001] = x[1, 30001] = NAN
    assert argmax(x, -1)[1].item() == argmin(x, -1)[1].item() == 30001
    assert argmax(x).item() == argmin(x).item() == 80001


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_reductions_of_nothing(target):
    with zmlx.target(target):
        check_reductions_of_nothing()


def check_reductions_of_nothing():
    x = mx.zeros((0, 3))
    np.testing.assert_array_equal(np.array(sum(x, 0)), [0, 0, 0])
    assert sum(x).item() == 0
    for op in (mean, var, std):
        assert np.isnan(np.array(op(x, 0))).all()
    for op in (sum, mean, max, min, var, std, argmax, argmin):
        assert op(x, 1).shape == (0,)
        mx.eval(op(x, 1))
    for op in (max, min, argmax, argmin):
        for none, axis in ((x, 0), (x, None), (mx.zeros((0, 0)), 1)):
            with pytest.raises(ValueError, match=rf"\[{op.__name__}\] 'x' must have elements"):
                op(none, axis)


def test_0d_arrays_and_no_axes():
    x = mx.array(3.0)
    assert [op(x).item() for op in (sum, mean, max, min, var, std, argmax)] == [3, 3, 3, 3, 0, 0, 0]
    same(sum(normal(2, 3), ()), normal(2, 3))
    for target in ("cpu", "reference"):
        with zmlx.target(target):
            for op in (argmax, argmin):
                assert op(x, keepdims=True).shape == op(x).shape == ()
                assert op(x, keepdims=True).item() == 0


@pytest.mark.parametrize("ddof", [0, 1, 4, 5, 9])
def test_ddof_as_in_mlx(ddof):
    x = normal(3, 5)
    same(var(x, -1, ddof=ddof), mx.var(x, -1, ddof=ddof), 1e-5)
    same(std(x, 0, ddof=ddof), mx.std(x, 0, ddof=ddof), 1e-5)


# ---- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_a_variance_far_from_zero_does_not_cancel(axis):
    x = normal(3000, 3000 // 10) + 1e4
    want = np.array(x).astype(np.float64).var(axis=axis)
    np.testing.assert_allclose(np.array(var(x, axis)), want, rtol=2e-6)


def test_a_mean_of_halves_does_not_overflow_on_the_way():
    assert mean(mx.full((1000,), 60000.0, dtype=mx.float16)).item() == 60000.0
    assert mean(mx.full((8,), 2**30, dtype=mx.int32)).item() == 2.0**30


def test_a_long_sum_keeps_its_digits():
    """Equal numbers round the same way at every step: the worst case. One running total is off by
    more than 1 %; blocks of 256 are off by 256 half ulps a level at most, 1.5e-5."""
    x = mx.full((1 << 24,), 0.1, dtype=mx.float32)
    want = np.float64(np.float32(0.1)) * (1 << 24)
    assert abs(sum(x).item() - want) < 1e-5 * want
    column = x.reshape(-1, 2)
    assert abs(sum(column, 0)[0].item() - want / 2) < 1e-5 * want


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, 1, 2, (0, 2), (1, 2)])
@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_gradients_over_any_axes(name, axis):
    x = normal(5, 40, 6)

    def loss(op):
        def f(x):
            y = op(x, axis)
            return (y * mx.cos(mx.arange(y.size)).reshape(y.shape)).sum()

        return mx.grad(f)(x)

    same(loss(getattr(kernels, name)), loss(getattr(mx, name)), 1e-4)


@pytest.mark.parametrize("op", [max, min])
@pytest.mark.parametrize("axis", [0, 1])
def test_equal_elements_share_the_gradient(op, axis):
    x = mx.array(np.random.default_rng(2).integers(0, 3, (30, 50)), dtype=mx.float32)
    x[4, 5] = NAN
    got, want = (
        mx.grad(lambda x, f=f: f(x, axis).sum())(x) for f in (op, getattr(mx, op.__name__))
    )
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, None])
def test_a_mean_of_more_halves_than_the_largest_half(axis):
    """70000 as a half is infinite; 1 / 70000 is none that vanishes."""
    x = mx.zeros((70000, 2), dtype=mx.float16)
    gradient = mx.grad(lambda x: mean(x, axis).sum())(x)
    want = mx.full(x.shape, 1 / (70000 if axis == 0 else 140000)).astype(mx.float16)
    assert mx.array_equal(gradient, want)


def test_gradients_of_two_launches():
    x = normal(3, 50000)
    for name in SEVERAL_AXES:
        both = (getattr(kernels, name), getattr(mx, name))
        got, want = (mx.grad(lambda x, f=f: f(x, -1).sum())(x) for f in both)
        same(got, want, 1e-4)


# ---- launches -----------------------------------------------------------------------------------


def launches(function):
    before = metal.statistics()["launches"]
    mx.eval(function())
    return metal.statistics()["launches"] - before


@pytest.mark.parametrize("name", NAMES)
def test_at_most_two_launches(name):
    op = getattr(kernels, name)
    for x in (normal(300, 40), normal(1 << 20), normal(4, 1 << 17), normal(1 << 17, 4)):
        mx.eval(x)
        assert launches(lambda x=x: op(x)) <= 2
        assert launches(lambda x=x: op(x, 0)) <= 2
        assert launches(lambda x=x: op(x, -1)) <= 2


@pytest.mark.parametrize("axis", [0, 1, 2, (0, 1), (1, 2), None])
def test_no_copy_for_axes_that_are_neighbours(axis):
    x = normal(4, 30, 50)
    mx.eval(x)
    before = metal.statistics()
    mx.eval(sum(x, axis))
    after = metal.statistics()
    copies = [k for k in before if "cop" in k or "contiguous" in k]
    assert copies
    assert all(after[k] == before[k] for k in copies)
    axes = tuple(range(3)) if axis is None else (axis,) if isinstance(axis, int) else axis
    assert not plan((4, 30, 50), axes).apart


@pytest.mark.parametrize(
    "shape, axis", [((300, 1), 1), ((1, 300), 0), ((3, 1, 9), 1), ((9, 3), ())]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32, mx.uint8, mx.bool_], ids=str)
def test_reductions_of_one_element_each(shape, axis, dtype):
    """As columns of one, which a vector register takes many of."""
    x = (normal(*shape) * 50).astype(dtype)
    assert plan(shape, (axis,) if isinstance(axis, int) else axis).columns
    for name in SEVERAL_AXES if axis == () else NAMES:
        for keepdims in (False, True):
            want = getattr(mx, name)(x, axis=axis, keepdims=keepdims)
            same(getattr(kernels, name)(x, axis=axis, keepdims=keepdims), want)
    if mx.issubdtype(dtype, mx.floating):
        for name in SEVERAL_AXES[:4]:
            dx = mx.grad(lambda x, name=name: getattr(kernels, name)(x, axis=axis).sum())(x)
            same(dx, mx.ones_like(x))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("rows", [64, 65, 1000])
@pytest.mark.parametrize("name, dtype", in_dtypes(NAMES, (mx.float32, mx.bfloat16, mx.int32)))
def test_short_rows_are_folded_side_by_side(name, dtype, rows, geometry):
    """By one thread each, which takes as many as its vectors hold."""
    states = 2 if name.startswith("arg") else 3 if name in ("var", "std") else 1
    longest = launch._SHORT_ROW[states > 1]
    for d in (2, 3, 10, longest):
        assert launch.rows_are_short(rows, d, states)
        x = mx.random.normal((rows, d), key=mx.random.key(d)) * 3
        x = mx.round(x).astype(dtype)  # with equal elements
        if mx.issubdtype(dtype, mx.floating):
            x[rows // 2, d // 2] = NAN
            x[rows // 3, 0] = INF
        values = np.array(x.astype(mx.float32), dtype=np.float64)
        with np.errstate(invalid="ignore"):
            want = getattr(np, name)(values, axis=1)
        with launch.geometry(geometry):
            y = getattr(kernels, name)(x, axis=1)
        if name.startswith("arg"):
            np.testing.assert_array_equal(np.array(y), want)
            continue
        rtol = 8e-3 if dtype == mx.bfloat16 else 1e-5
        np.testing.assert_allclose(np.array(y.astype(mx.float32)), want, rtol=rtol, atol=1e-6)
    assert not launch.rows_are_short(rows, longest + 1, states)


@pytest.mark.parametrize("axes", [(0, 2), (1, 3), (0, 2, 4), (0, 3, 4), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32], ids=str)
def test_axes_that_are_no_neighbours_go_one_run_after_the_other(axes, name, dtype):
    """Without a transposition of what is summed, in float32 on the way."""
    x = (mx.random.normal((3, 7, 4, 33, 5), key=mx.random.key(0)) * 50).astype(dtype)
    values = np.array(x.astype(mx.float32), dtype=np.float64)
    for keepdims in (False, True):
        y = getattr(kernels, name)(x, axis=axes, keepdims=keepdims)
        want = getattr(np, name)(values, axis=axes, keepdims=keepdims)
        assert y.shape == want.shape
        assert y.dtype == getattr(mx, name)(x, axis=axes).dtype
        bound = 1e-6 * np.abs(values).sum(axis=axes, keepdims=keepdims)
        if y.dtype == mx.bfloat16:
            bound += 2.0**-8 * np.abs(want)
        bound *= name not in ("max", "min")
        assert (np.abs(np.array(y.astype(mx.float32)) - want) <= bound).all()


@pytest.mark.parametrize("axes", [(0, 2), (1, 3), (0, 2, 4), (0, 3, 4), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32], ids=str)
def test_variances_over_axes_that_are_no_neighbours(axes, name, dtype):
    """The runs' states are merged: nothing cancels, and x is not copied."""
    offset = 100 if dtype == mx.bfloat16 else 10000
    x = (mx.random.normal((3, 7, 4, 33, 5), key=mx.random.key(0)) * 50 + offset).astype(dtype)
    values = np.array(x.astype(mx.float32), dtype=np.float64)
    before = metal.statistics()
    for keepdims in (False, True):
        y = getattr(kernels, name)(x, axis=axes, keepdims=keepdims, ddof=1)
        want = getattr(np, name)(values, axis=axes, keepdims=keepdims, ddof=1)
        assert y.shape == want.shape
        rtol = 2.0**-8 if y.dtype == mx.bfloat16 else 2e-6
        np.testing.assert_allclose(np.array(y.astype(mx.float32)), want, rtol=rtol)
    after = metal.statistics()
    assert all(after[k] == before[k] for k in before if "cop" in k or "contiguous" in k)


@pytest.mark.parametrize("axes", [(0, 2), (1, 3), (0, 2, 4), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_gradients_over_axes_that_are_no_neighbours(axes, name):
    x = mx.random.normal((3, 7, 4, 9, 5), key=mx.random.key(1)) + 3
    got, want = (
        mx.grad(lambda x, f=f: (f(x, axes) ** 2).sum())(x)
        for f in (getattr(kernels, name), getattr(mx, name))
    )
    same(got, want, 1e-4)


@pytest.mark.parametrize("name", SEVERAL_AXES)
@pytest.mark.parametrize(
    "shape, axes", [((6, 1, 5, 4), None), ((2, 6, 7, 3), (1, 2)), ((3, 4, 5, 2), (0, 1, 2))]
)
def test_axes_that_are_too_long_for_one_go_one_after_the_other(name, shape, axes, monkeypatch):
    monkeypatch.setattr(axes_module, "LONGEST", 20)
    plan.cache_clear()
    try:
        x = normal(*shape) + 3
        op, mlx = getattr(kernels, name), getattr(mx, name)
        for keepdims in (False, True):
            same(op(x, axes, keepdims=keepdims), mlx(x, axes, keepdims=keepdims), 1e-4)
        got, want = (mx.grad(lambda x, f=f: (f(x, axes) ** 2).sum())(x) for f in (op, mlx))
        same(got, want, 1e-4)
    finally:
        plan.cache_clear()


def test_more_elements_than_the_longest_axis_has():
    x = mx.broadcast_to(mx.arange(4, dtype=mx.uint8)[:, None], (4, 1 << 30))
    assert plan(tuple(x.shape), (0, 1)).run == (1,)
    message = r"\[argmax\] 'x' must have at most 2147483647 elements but got 4294967296"
    with pytest.raises(ValueError, match=message):
        argmax(x)


@pytest.mark.parametrize("name", ["sum", "var", "max", "argmax", "cumsum"])
def test_neighbours_that_are_kept_fit_into_one_axis(name):
    message = rf"\[{name}\] 'x' must have at most 2147483647 elements in neighbouring axes that are"
    for shape, axis in (((65536, 65536, 2), -1), ((2, 65536, 65536), 0)):
        x = mx.broadcast_to(mx.zeros((1, 1, 1), mx.uint8), shape)
        with pytest.raises(ValueError, match=message):
            getattr(kernels, name)(x, axis)


@pytest.mark.parametrize("name", ["sum", "var", "max", "argmax", "cumsum"])
def test_neighbours_that_are_kept_may_be_longer_in_plain_mlx(name):
    x = mx.broadcast_to(mx.zeros((1, 1, 1), mx.uint8), (65536, 65536, 2))
    with zmlx.target("reference"):
        assert getattr(kernels, name)(x, -1).shape[:2] == (65536, 65536)


def test_neighbours_that_are_kept_between_others_fit_into_one_axis():
    x = mx.broadcast_to(mx.zeros((1, 1, 1, 1), mx.uint8), (2, 65536, 65536, 2))
    with pytest.raises(ValueError, match=r"\[sum\] 'x' must have at most 2147483647 elements in"):
        kernels.sum(x, (0, 3))


def test_axes_of_size_1_between_or_beside_others_take_no_run():
    assert plan((4, 1, 5, 6), (0, 2)).view == (1, 20, 6)
    assert plan((4, 3, 5, 1), (0, 2, 3)).run == (2,)


def test_a_new_ddof_compiles_nothing():
    x = normal(9, 65)
    mx.eval(var(x, -1))
    before = metal.statistics()["compiles"]
    mx.eval([var(x, -1, ddof=n) for n in range(5)])
    assert metal.statistics()["compiles"] == before


def test_the_number_of_threads_changes_nothing():
    code = (
        "import mlx.core as mx, numpy as np, hashlib; from zmlx import kernels as K;"
        "x = mx.array(np.random.default_rng(0).standard_normal((3, 200001)), dtype=mx.float32);"
        "y = [f(x, a) for f in (K.sum, K.var, K.argmax, K.cumsum) for a in (0, 1, None)];"
        "print(hashlib.sha256(b''.join(np.array(v).tobytes() for v in y)).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "ZMLX_NUM_THREADS": n},
            capture_output=True, text=True, check=True,
        ).stdout
        for n in ("1", "2", "5")
    }  # fmt: skip
    assert len(found) == 1


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bad_axes(name):
    op = getattr(kernels, name)
    with pytest.raises(ValueError, match=rf"\[{name}\] 'axis' must be in \[-2, 2\) but got 2"):
        op(normal(2, 3), 2)
    with pytest.raises(TypeError, match=rf"\[{name}\] 'axis' must be an int"):
        op(normal(2, 3), "0")
    if name in SEVERAL_AXES:
        with pytest.raises(ValueError, match=rf"\[{name}\] 'axis' must name different axes"):
            op(normal(2, 3), (0, -2))


@pytest.mark.parametrize("name", NAMES)
def test_axes_are_any_integers(name):
    x = normal(2, 3, 4)
    op, plain = getattr(kernels, name), getattr(mx, name)
    axes = [np.int64(1), np.int32(-1), mx.array(0)]
    if name in SEVERAL_AXES:
        axes += [(np.int64(0), 2), np.array([0, 1]), range(2)]
    for axis in axes:
        same(op(x, axis), plain(x, axis), 1e-6)
    # A flag in the place of the axis would be the axis 0 or 1.
    with pytest.raises(TypeError, match=rf"\[{name}\] 'axis' must be an int.* but got bool"):
        op(x, True)
    with pytest.raises(TypeError, match=rf"\[{name}\] 'axis' must be an int.* but got float"):
        op(x, 1.0)


def test_bad_ddof():
    with pytest.raises(TypeError, match=r"\[var\] 'ddof' must be an int but got float"):
        var(normal(3), ddof=1.0)
    for huge in (2**63, -(10**400)):
        with pytest.raises(ValueError, match=r"'ddof' must be in \(-2\^63, 2\^63\) but got"):
            var(normal(3), ddof=huge)


@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_plain_forms_keep_what_the_kernels_keep(name):
    """Of integers whose sum overflows, and of numbers far from 0."""
    f = getattr(kernels, name)
    for x in (mx.array([2**30] * 6), 1e6 + mx.random.normal((64,), key=mx.random.key(0))):
        want = f(x).item()
        assert mx.compile(lambda x: f(x), shapeless=True)(x).item() == pytest.approx(want, rel=1e-5)
        with zmlx.target("reference"):
            assert f(x).item() == pytest.approx(want, rel=1e-5)
