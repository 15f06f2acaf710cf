"""What must hold of the norms beyond agreeing with their references."""

import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import zmlx
from zmlx import launch
from zmlx.kernels import (
    add_layer_norm,
    add_rms_norm,
    group_norm,
    l2_norm,
    layer_norm,
    rms_norm,
)
from zmlx.testing import EPS, to_numpy

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
WIDTHS = (33, 512, 4097)


def normal(*shape, dtype=mx.float32, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_unit_root_mean_square(dtype, width):
    y = to_numpy(rms_norm(normal(9, width, dtype=dtype), eps=0.0))
    np.testing.assert_allclose(np.sqrt((y * y).mean(-1)), 1, rtol=2 * EPS[dtype])


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_mean_zero_and_variance_one(width):
    y = to_numpy(layer_norm(normal(9, width), eps=0.0))
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.var(-1), 1, rtol=1e-6)


def test_rows_have_length_one():
    y = to_numpy(l2_norm(normal(9, 515)))
    np.testing.assert_allclose(np.sqrt((y * y).sum(-1)), 1, rtol=1e-6)


def test_layer_norm_ignores_shift_and_scale():
    x = normal(5, 300)
    want = to_numpy(layer_norm(x, eps=0.0))
    np.testing.assert_allclose(to_numpy(layer_norm(4 * x, eps=0.0)), want, atol=1e-6)
    np.testing.assert_allclose(to_numpy(layer_norm(x + 8, eps=0.0)), want, atol=1e-5)


def test_rms_norm_ignores_scale():
    x = normal(5, 300)
    np.testing.assert_array_equal(
        to_numpy(rms_norm(4 * x, eps=0.0)), to_numpy(rms_norm(x, eps=0.0))
    )


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("mean", [1e4, -3e3, 1e6])
def test_a_mean_far_from_zero_costs_no_digits(mean, geometry):
    """E[x²] - mean² is negative here, and a mean rounded to float32 is off by 5e-4 deviations."""
    x = mx.array(mean + np.random.default_rng(1).standard_normal((4, 4096)), dtype=mx.float32)
    exact = to_numpy(x)
    want = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    with launch.geometry(geometry):
        np.testing.assert_allclose(to_numpy(layer_norm(x)), want, atol=3e-6)


def test_a_constant_row_gives_the_bias_and_no_gradient():
    x, bias = mx.full((3, 257), 1234.567), normal(257)
    assert mx.array_equal(layer_norm(x, None, bias), mx.broadcast_to(bias, (3, 257)))
    dx = mx.grad(lambda x: (layer_norm(x) ** 2).sum())(x)
    assert not np.array(dx).any()


@pytest.mark.parametrize("eps", [0.0, 1.08e-19, 1e20])
def test_an_eps_whose_square_is_no_normal_float32_is_refused(eps):
    with pytest.raises(ValueError, match=r"\[l2_norm\] 'eps' must be in \[1.1e-19, 1e19\] but got"):
        l2_norm(normal(3, 4), eps)


def test_the_square_of_the_least_eps_is_a_normal_float32():
    least = np.float32(1.1e-19)
    assert least * least >= np.finfo(np.float32).tiny
    assert not np.array(l2_norm(mx.zeros((2, 4)), 1.1e-19)).any()


def test_a_row_shorter_than_eps_is_divided_by_eps():
    x = mx.array([[3e-4, 4e-4], [3.0, 4.0], [0.0, 0.0]])
    want = [[0.03, 0.04], [0.6, 0.8], [0, 0]]
    np.testing.assert_allclose(to_numpy(l2_norm(x, 1e-2)), want, rtol=1e-6)
    dx = mx.grad(lambda x: l2_norm(x, 1e-2).sum())(x)
    np.testing.assert_allclose(to_numpy(dx)[[0, 2]], 100, rtol=1e-6)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("eps", [0.007, 0.011, 0.022, 0.044, 0.088, 0.105, 9e-4])
def test_the_gradient_of_a_row_shorter_than_eps_does_not_depend_on_how_its_square_rounds(
    eps, geometry
):
    """The square of eps, and the root of that, may be a unit in the last place off."""
    x = 0.7 * eps * mx.array([[0.6, 0.8], [-0.8, 0.6], [0.0, 0.0]])
    with launch.geometry(geometry):
        dx = mx.grad(lambda x: l2_norm(x, eps).sum())(x)
    np.testing.assert_allclose(np.array(dx), 1 / eps, rtol=1e-6)


def parameter_gradients(function, x, *parameters):
    weights = normal(*x.shape, seed=7)
    count = tuple(range(1, 1 + len(parameters)))
    return mx.grad(lambda *a: (function(*a) * weights).sum(), argnums=count)(x, *parameters)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
def test_parameter_gradients_sum_over_all_rows(rows):
    x, w, b = normal(rows, 40), normal(40, seed=1), normal(40, seed=2)
    dw, db = (to_numpy(g) for g in parameter_gradients(layer_norm, x, w, b))
    dy = to_numpy(normal(rows, 40, seed=7))
    np.testing.assert_allclose(db, dy.sum(0), atol=1e-4)
    np.testing.assert_allclose(dw, (dy * to_numpy(layer_norm(x))).sum(0), atol=1e-4)


def test_parameter_gradients_do_not_depend_on_the_shape_of_the_batch():
    x, w, b = normal(60, 40), normal(40, seed=1), normal(40, seed=2)

    def of(shape):
        return mx.grad(
            lambda w, b: (layer_norm(x.reshape(shape), w, b) ** 2).sum(), argnums=(0, 1)
        )(w, b)

    for got, want in zip(of((3, 4, 5, 40)), of((60, 40)), strict=True):
        assert mx.array_equal(got, want)


def test_parameter_gradients_accumulate_in_float32():
    """4096 rows of 1: a sum in float16 stops at 2048, one in bfloat16 at 256."""
    for dtype in (mx.float16, mx.bfloat16):
        x = mx.ones((4096, 8), dtype=dtype)
        bias = mx.zeros((8,), dtype=dtype)
        db = mx.grad(lambda b, x=x: layer_norm(x, None, b).sum())(bias)
        assert to_numpy(db).tolist() == [4096.0] * 8


def test_large_float16_values_do_not_overflow():
    x = mx.full((2, 64), 3000.0, dtype=mx.float16)
    np.testing.assert_allclose(to_numpy(rms_norm(x)), 1, rtol=1e-3)
    w = mx.ones((64,), dtype=mx.float16)
    dw = mx.grad(lambda w: add_rms_norm(x, x, w)[0].astype(mx.float32).sum())(w)
    np.testing.assert_allclose(to_numpy(dw), 2, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 4097, 40000])
def test_a_sum_is_rounded_before_it_is_normed(dtype, width):
    """As in MLX, where the sum is an array: a model gives the same tokens."""
    x, r = normal(3, width, dtype=dtype), normal(3, width, dtype=dtype, seed=1)
    w, b = normal(width, dtype=dtype, seed=2), normal(width, dtype=dtype, seed=3)
    for (y, total), want in (
        (add_rms_norm(x, r, w), rms_norm(x + r, w)),
        (add_layer_norm(x, r, w, b), layer_norm(x + r, w, b)),
    ):
        assert mx.array_equal(total, x + r)
        assert mx.array_equal(y, want)


def test_a_sum_passes_its_own_cotangent_to_both_terms():
    x, r = normal(5, 33), normal(5, 33, seed=1)
    c = normal(5, 33, seed=2)
    dx, dr = mx.grad(lambda x, r: (add_rms_norm(x, r)[1] * c).sum(), argnums=(0, 1))(x, r)
    assert mx.array_equal(dx, c)
    assert mx.array_equal(dr, c)


def test_dtypes_promote_as_in_mlx():
    x, r = normal(3, 8, dtype=mx.bfloat16), normal(3, 8)
    w = normal(8)
    assert rms_norm(x, w).dtype == mx.fast.rms_norm(x, w, 1e-5).dtype
    assert layer_norm(x, w).dtype == mx.fast.layer_norm(x, w, None, 1e-5).dtype
    y, total = add_rms_norm(x, r)
    assert (y.dtype, total.dtype) == (mx.float32, mx.float32)
    dx, dr = mx.grad(lambda x, r: add_rms_norm(x, r)[0].sum(), argnums=(0, 1))(x, r)
    assert (dx.dtype, dr.dtype) == (mx.bfloat16, mx.float32)


def launches(function):
    from zmlx import metal

    before = metal.statistics()["launches"]
    mx.eval(function())
    return metal.statistics()["launches"] - before


def test_a_gradient_that_is_not_asked_for_costs_nothing():
    x, w, b = normal(70, 40), normal(40), normal(40)
    mx.eval(x, w, b)

    def gradient(*argnums):
        return lambda: mx.grad(lambda *a: layer_norm(*a).sum(), argnums=argnums)(x, w, b)

    # The forward, the backward, and one sum over chunks for each parameter.
    assert launches(gradient(0)) == 2
    assert launches(gradient(1)) == 3
    assert launches(gradient(0, 2)) == 3
    assert launches(gradient(0, 1, 2)) == 4


# ---- group_norm ---------------------------------------------------------------------------------

SHAPES = ((4, 12), (2, 7, 12), (3, 5, 4, 12))


def numpy_group_norm(x, groups, pytorch):
    """Both conventions from their definitions: which channels of a sample share statistics."""
    y = np.empty_like(x)
    channels = x.shape[-1]
    for g in range(groups):
        size = channels // groups
        own = range(g * size, (g + 1) * size) if pytorch else range(g, channels, groups)
        part = x[..., list(own)]
        axes = tuple(range(1, x.ndim))
        mean, var = part.mean(axes, keepdims=True), part.var(axes, keepdims=True)
        y[..., list(own)] = (part - mean) / np.sqrt(var + 1e-5)
    return y


@pytest.mark.parametrize("groups", [1, 3, 4, 12])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pytorch", [False, True])
def test_group_norm_groups_channels_by_its_convention(pytorch, shape, groups):
    if shape[1:] == (12,) and groups == 12:
        return  # groups of one element are all 0
    x = normal(*shape)
    want = numpy_group_norm(to_numpy(x), groups, pytorch)
    got = group_norm(x, groups, pytorch_compatible=pytorch)
    np.testing.assert_allclose(to_numpy(got), want, atol=2e-6)


@pytest.mark.parametrize("pytorch", [False, True])
def test_group_norm_is_mlx_s_layer(pytorch):
    layer = nn.GroupNorm(4, 12, pytorch_compatible=pytorch)
    layer.weight, layer.bias = normal(12, seed=1), normal(12, seed=2)
    x, dy = normal(3, 5, 4, 12), normal(3, 5, 4, 12, seed=3)

    def mine(x, w, b):
        return (group_norm(x, 4, w, b, pytorch_compatible=pytorch) * dy).sum()

    def theirs(x, w, b):
        layer.weight, layer.bias = w, b
        return (layer(x) * dy).sum()

    arrays = (x, layer.weight, layer.bias)
    for got, want in zip(
        mx.grad(mine, argnums=(0, 1, 2))(*arrays),
        mx.grad(theirs, argnums=(0, 1, 2))(*arrays),
        strict=True,
    ):
        np.testing.assert_allclose(to_numpy(got), to_numpy(want), atol=1e-4)


@pytest.mark.parametrize("groups", [0, -1, 5, 2.0])
def test_group_norm_needs_groups_that_divide_the_channels(groups):
    message = r"\[group_norm\] 'num_groups' must .* but got"
    with pytest.raises((TypeError, ValueError), match=message):
        group_norm(normal(2, 12), groups)


def test_group_norm_needs_a_batch_axis():
    with pytest.raises(ValueError, match=r"\[group_norm\] 'x' must .* but got"):
        group_norm(normal(12), 3)


#: Shapes and groups by how a thread walks over them: few channels; groups of every n-th channel,
#: few and so many that samples are cut into blocks; long groups of neighbours, short ones, and ones
#: of few samples. A last block that is not full, and tails of rows.
WALKS = (
    ((3, 7, 12), 3),
    ((3, 1, 12), 4),
    ((3, 7, 100), 4),
    ((2, 3, 288), 96),
    ((2, 2, 2200), 1100),
    ((2, 5, 600), 2),
    ((9, 4, 160), 8),
    ((2, 3, 2100), 100),
)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("pytorch", [False, True])
@pytest.mark.parametrize("shape, groups", WALKS)
def test_group_norm_walks_over_any_shape(shape, groups, pytorch, geometry):
    x, dy = 2 * normal(*shape) + 1, normal(*shape, seed=1)
    weight, bias = normal(shape[-1], seed=2), normal(shape[-1], seed=3)

    def run(*arrays):
        some = {"pytorch_compatible": pytorch}
        y, gradients = mx.vjp(lambda *a: group_norm(a[0], groups, *a[1:], **some), arrays, (dy,))
        return *y, *gradients

    with zmlx.target("reference"):
        want = run(x, weight, bias)
    with launch.geometry(geometry):
        got = run(x, weight, bias)
    for a, b in zip(got, want, strict=True):
        scale = np.abs(np.array(b)).max()
        np.testing.assert_allclose(np.array(a) / scale, np.array(b) / scale, atol=2e-6)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("pytorch", [False, True])
def test_group_norm_of_a_mean_far_from_zero_costs_no_digits(pytorch, geometry):
    x = mx.array(1e4 + np.random.default_rng(1).standard_normal((2, 128, 96)), dtype=mx.float32)
    want = numpy_group_norm(to_numpy(x), 6, pytorch)
    with launch.geometry(geometry):
        got = to_numpy(group_norm(x, 6, pytorch_compatible=pytorch))
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
def test_group_norm_of_a_constant_gives_the_bias_and_no_gradient(geometry):
    x, bias = mx.full((3, 5, 96), 1234.567), normal(96)
    with launch.geometry(geometry):
        y = group_norm(x, 4, None, bias)
        dx = mx.grad(lambda x: (group_norm(x, 4) ** 2).sum())(x)
    assert mx.array_equal(y, mx.broadcast_to(bias, x.shape))
    assert not np.array(dx).any()


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
def test_the_variance_of_many_equal_elements_is_not_negative(geometry):
    """Rounded sums of a long constant make a mean that is off, and what follows from it is off by
    more than eps."""
    x = mx.full((1, 512, 512, 32), 200.7)
    with launch.geometry(geometry):
        for y in (group_norm(x, 32), group_norm(x, 32, pytorch_compatible=True),
                  layer_norm(x.reshape(32, -1))):  # fmt: skip
            assert np.isfinite(np.array(y)).all()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_group_norm_counts_elements_of_a_sample_in_32_bits(kind):
    x = mx.broadcast_to(mx.zeros((1, 1, 1, 2), mx.float16), (1, 65536, 32768, 2))
    message = r"\[group_norm\] 'x' must have samples of fewer than 2\^32 elements, .* but got \(1,"
    with launch.geometry(kind), pytest.raises(ValueError, match=message):
        group_norm(x, 1)


def test_group_norm_of_nothing():
    for shape in ((0, 3, 8), (2, 0, 8)):
        y, gradients = mx.vjp(
            lambda *a: group_norm(a[0], 4, *a[1:]),
            (mx.zeros(shape), normal(8), normal(8)),
            (mx.zeros(shape),),
        )
        assert y[0].shape == shape
        assert not any(np.array(g).any() for g in gradients)


@pytest.mark.on_cpu
def test_group_norm_compiles_nothing_for_a_new_length_or_eps():
    x = normal(16, 40, 96)
    mx.eval(group_norm(x, 4))
    before = zmlx.metal.statistics()["compiles"] + zmlx.metal.statistics()["cache_hits"]
    for positions in (1, 7, 39):
        mx.eval(group_norm(x[:, :positions], 4, eps=0.1 * positions))
    after = zmlx.metal.statistics()["compiles"] + zmlx.metal.statistics()["cache_hits"]
    assert after == before


def test_a_repeated_group_norm_goes_by_its_own_arrays_and_options():
    weight, bias = normal(12, seed=1), normal(12, seed=2)
    calls = [
        (weight, bias, 4, 1e-5, False),
        (weight, bias, 3, 1e-5, False),
        (weight, bias, 4, 1.0, False),
        (weight, bias, 4, 1e-5, True),
        (weight, None, 4, 1e-5, False),
        (None, bias, 4, 1e-5, False),
        (None, None, 4, 1e-5, False),
    ]
    for n in (1, 2, 3):
        x = normal(2, 5, 12, seed=n)
        for w, b, groups, eps, pytorch in calls:
            w, b = (None if a is None else n * a for a in (w, b))
            got = group_norm(x, groups, w, b, eps, pytorch)
            want = nn.GroupNorm(groups, 12, eps, False, pytorch_compatible=pytorch)(x)
            want = want * (1 if w is None else w) + (0 if b is None else b)
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_groups": 4.0},
        {"num_groups": True},
        {"num_groups": 5},
        {"eps": True},
        {"eps": -1.0},
        {"pytorch_compatible": 1},
        {"weight": mx.ones(11)},
        {"weight": 1.0},
    ],
    ids=str,
)
def test_a_bad_group_norm_raises_after_a_good_one(bad):
    x, options = normal(2, 5, 12), {"num_groups": 1, "eps": 1.0, "pytorch_compatible": True}
    for _ in range(2):
        group_norm(x, **options)
        group_norm(x, **{**options, "num_groups": 4, "weight": mx.ones(12)})
        with pytest.raises((TypeError, ValueError), match=r"\[group_norm\] '\w+' must"):
            group_norm(x, **{**options, **bad})


def test_group_norm_keeps_no_array_of_a_call():
    def call(*shape):
        arrays = mx.ones(shape), mx.ones(12), mx.ones(12)
        mx.eval(group_norm(arrays[0], 4, *arrays[1:]))
        return [weakref.ref(a) for a in arrays]

    for shape in ((2, 5, 12), (2, 5, 12), (0, 5, 12), (0, 5, 12)):
        assert not any(a() is not None for a in call(*shape))


def test_group_norm_in_plain_mlx_keeps_digits_far_from_0():
    x = 1e4 + mx.random.normal((2, 60, 16), key=mx.random.key(0))
    rows = np.array(x).astype(np.float64).reshape(2, -1, 4)
    centred = rows - rows.mean(1, keepdims=True)
    want = (centred / np.sqrt(rows.var(1, keepdims=True) + 1e-5)).reshape(x.shape)

    def f(x):
        return zmlx.kernels.group_norm(x, 4)

    for y in (f(x), mx.vmap(f)(x[None])[0], mx.compile(f, shapeless=True)(x)):
        assert np.abs(np.array(y) - want).max() < 2e-5


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("norm", [add_rms_norm, add_layer_norm], ids=["rms", "layer"])
def test_a_sum_whose_norm_nobody_uses_has_its_own_gradient(norm, width):
    """Rows without a norm: one of equal elements with eps 0, and one with NaN."""
    x, weight = mx.zeros((2, width)), mx.ones((width,))
    x[1, 0] = mx.nan

    def total(x, weight):
        return norm(x, mx.zeros_like(x), weight, eps=0.0)[1].sum()

    for of in (mx.grad(total, (0, 1)), mx.vmap(mx.grad(total, (0, 1)), (0, None))):
        dx, dweight = of(x, weight)
        assert mx.all(dx == 1)
        assert mx.all(dweight == 0)
