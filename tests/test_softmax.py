"""What the softmax family promises beyond its registry entries."""

import mlx.core as mx
import numpy as np
import pytest
from softmax_arrays import GEOMETRIES, INF, close, normal

import zmlx
from zmlx import launch
from zmlx.codegen import Climb, Operand, Output, Pass, Reduce, Rowwise
from zmlx.interpret import evaluate
from zmlx.kernels import log_softmax, logsumexp, masked_softmax, softmax, sparsemax
from zmlx.pattern import PatternKernel
from zmlx.testing import to_numpy

LENGTHS = (1, 5, 33, 1000, 40001)


def sparsemax_by_sorting(x):
    """The rows of x projected onto the simplex, in float64."""
    x = np.asarray(x, dtype=np.float64)
    ordered = -np.sort(-x, axis=-1)
    k = np.arange(1, x.shape[-1] + 1)
    sums = np.cumsum(ordered, axis=-1)
    count = (1 + k * ordered > sums).sum(axis=-1)
    tau = (np.take_along_axis(sums, count[..., None] - 1, -1) - 1) / count[..., None]
    return np.maximum(x - tau, 0)


# ---- all three ----------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("d", LENGTHS)
@pytest.mark.parametrize("op", [softmax, masked_softmax, sparsemax], ids=lambda f: f.__name__)
def test_rows_sum_to_one(op, d, geometry):
    with launch.geometry(geometry):
        y = op(normal(4, d, scale=3.0))
    np.testing.assert_allclose(to_numpy(y).sum(axis=-1), 1.0, rtol=2e-6)


@pytest.mark.parametrize("op", [softmax, log_softmax, masked_softmax, sparsemax],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_a_shift_changes_nothing(op):
    x = mx.round(normal(3, 70) * 64) / 64  # so that the shifted values are exact
    close(op(x + 1024.0), op(x))


@pytest.mark.parametrize("d", [70, 40001])
@pytest.mark.parametrize("op", [log_softmax, logsumexp])
def test_a_shift_changes_no_gradient(op, d):
    """The log-sum-exp of logits that are far from 0 has lost the digits that exp(x - lse) needs."""
    x = mx.round(normal(3, d) * 64) / 64

    def gradient(x):
        weights = mx.cos(mx.arange(op(x).size)).reshape(op(x).shape)
        return to_numpy(mx.grad(lambda x: (weights * op(x)).sum())(x))

    far, near = gradient(x + 32768.0), gradient(x)
    np.testing.assert_allclose(far, near, rtol=2e-6, atol=2e-6 * np.abs(near).max())


@pytest.mark.parametrize("op", [softmax, log_softmax, masked_softmax, sparsemax],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_a_permutation_of_the_elements_permutes_the_result(op):
    x, order = normal(3, 515), mx.array(np.random.default_rng(1).permutation(515))
    close(op(x[:, order]), op(x)[:, order])


@pytest.mark.parametrize("op", [softmax, log_softmax, sparsemax], ids=lambda f: f.__name__)
@pytest.mark.parametrize("axis", range(-3, 3))
def test_any_axis(op, axis):
    x = normal(4, 5, 6)
    got = op(x, axis=axis)
    close(got, op(x.swapaxes(axis, -1)).swapaxes(axis, -1))
    if op is softmax:
        close(got, mx.softmax(x, axis=axis))


@pytest.mark.parametrize("op", [softmax, log_softmax, logsumexp, sparsemax])
def test_an_axis_that_x_does_not_have(op):
    with pytest.raises(ValueError, match=rf"\[{op.__name__}\] 'axis' must be in \[-2, 2\)"):
        op(normal(2, 3), axis=2)


@pytest.mark.parametrize("op", [softmax, log_softmax, logsumexp, sparsemax])
def test_axes_are_any_integers(op):
    x = normal(2, 3, 4)
    for axis in (np.int64(1), np.int32(-1), mx.array(1)):
        close(op(x, axis=axis), op(x, axis=int(axis)), 0.0)
    for axis in (1.0, True, "1", (0.5,)):
        with pytest.raises(TypeError, match=rf"\[{op.__name__}\] 'axis' must be an int.* but got"):
            op(x, axis=axis)


# ---- maximum and sum in one walk ----------------------------------------------------------------


def sum_exp(d, geometry, row):
    pattern = Rowwise(
        (Operand("x"),),
        (Output("total", "s", "per_row"), Output("largest", "m", "per_row")),
        (Pass((Reduce("s", "sum_exp", "x", peak="m"),)),),
    )
    kernel = PatternKernel("sum_exp", pattern, (mx.float32, mx.float32))
    with launch.geometry(*geometry[:1], **dict(geometry[1:])):
        got = kernel(row)
    return got, evaluate(pattern, (row,), (mx.float32, mx.float32))


@pytest.mark.parametrize("geometry", [
    ("cpu",), ("gpu",), ("gpu", ("TPR", 31)), ("gpu", ("TPR", 33)), ("gpu", ("TPR", 1024)),
    ("gpu", ("TPR", 4), ("RPG", 8)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [1, 7, 130, 3001])
def test_the_sum_is_rescaled_to_the_maximum(d, geometry):
    """Rising, falling and mixed rows: the maximum moves at every step, once, at times."""
    rising = mx.arange(d, dtype=mx.float32) * 0.5
    rows = mx.stack([rising, -rising, normal(d, scale=30.0), mx.full((d,), 3.0)])
    got, want = sum_exp(d, geometry, rows)
    close(got[0], want[0], 1e-5)
    np.testing.assert_array_equal(to_numpy(got[1]), to_numpy(want[1]))


@pytest.mark.parametrize("geometry", [("cpu",), ("gpu",)], ids=str)
def test_the_sum_of_a_row_with_infinities(geometry):
    row = normal(5, 300)
    row[0, 7] = -INF
    row[1, :] = -INF
    row[2, 3] = row[2, 250] = INF
    row[3, 299] = float("nan")
    row[4, 0] = 3.4e38
    got, want = sum_exp(300, geometry, row)
    close(got[0], want[0], 1e-5)
    np.testing.assert_array_equal(to_numpy(got[1])[[0, 1, 2, 4]], to_numpy(want[1])[[0, 1, 2, 4]])
    assert got[0][2].item() == 2.0  # equal infinities count


# ---- logsumexp and log_softmax ------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("d", [3, 200, 40001])
def test_infinite_rows_as_in_mlx(d, geometry):
    x = normal(6, d)
    x[0, :] = -INF
    x[1, 1] = INF
    x[2, 0] = x[2, 2] = INF
    x[3, :-1] = -INF
    x[4, 2] = float("nan")
    with launch.geometry(geometry):
        close(logsumexp(x), mx.logsumexp(x, axis=-1))
        close(softmax(x), mx.softmax(x, axis=-1))
        close(log_softmax(x), x - mx.logsumexp(x, axis=-1, keepdims=True))


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (1, 2), (2, 0), [0, 1, 2], None], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_logsumexp_over_several_axes(axis, keepdims):
    x = normal(4, 5, 6)
    got, want = logsumexp(x, axis, keepdims), mx.logsumexp(x, axis, keepdims)
    assert got.shape == want.shape
    close(got, want)
    weights = normal(*want.shape, seed=1)
    close(
        mx.grad(lambda x: (logsumexp(x, axis, keepdims) * weights).sum())(x),
        mx.grad(lambda x: (mx.logsumexp(x, axis, keepdims) * weights).sum())(x),
    )


@pytest.mark.parametrize("axis", [(0, 0), (1, -1), ()], ids=str)
def test_logsumexp_of_axes_that_repeat(axis):
    with pytest.raises(ValueError, match=r"\[logsumexp\] 'axis' must name different axes"):
        logsumexp(normal(2, 3), axis)


def test_a_shapeless_gradient_over_several_axes_has_the_new_shape():
    gradient = mx.compile(mx.grad(lambda x: logsumexp(x, None)), shapeless=True)
    for shape in ((3, 5), (4, 7)):
        x = normal(*shape)
        close(gradient(x), mx.softmax(x.reshape(-1)).reshape(shape))


def test_a_shapeless_gradient_over_the_first_axes_has_the_new_shape():
    gradient = mx.compile(mx.grad(lambda x: logsumexp(x, (0, 1)).square().sum()), shapeless=True)
    for shape in ((2, 3, 5), (4, 7, 6)):
        x = normal(*shape)
        y = mx.logsumexp(x, axis=(0, 1), keepdims=True)
        close(gradient(x), 2 * y * mx.exp(x - y))


def test_logsumexp_of_no_elements():
    np.testing.assert_array_equal(to_numpy(logsumexp(mx.zeros((2, 0)))), [-np.inf, -np.inf])


def test_log_softmax_does_not_cancel():
    """y = (x - max) - log Σ keeps what x - (max + log Σ) would round away."""
    x = mx.array([[1e6, 1e6 - 1.0, 1e6 - 3.0]])
    exact = np.array([0.0, -1.0, -3.0]) - np.log(1 + np.exp(-1.0) + np.exp(-3.0))
    np.testing.assert_allclose(to_numpy(log_softmax(x))[0], exact, rtol=1e-6)


@pytest.mark.parametrize("d", [600, 4000, 40001])
@pytest.mark.parametrize("transform", [
    lambda loss: mx.grad(lambda x: mx.vmap(loss)(x).sum()),
    lambda loss: mx.compile(mx.grad(lambda x: loss(x).sum()), shapeless=True),
])  # fmt: skip
def test_gradients_in_plain_mlx_keep_their_digits_at_the_largest_element(transform, d):
    x = mx.random.normal((2, d), key=mx.random.key(0), scale=0.1)
    z = to_numpy(x).astype(np.float64)
    want = np.exp(z - np.log(np.exp(z).sum(-1, keepdims=True)))
    np.testing.assert_allclose(to_numpy(transform(logsumexp)(x)), want, rtol=1e-5)


def test_gradients_in_half_precision_come_from_x():
    """exp(y) of a y rounded to bfloat16 is off by percents; exp(x - lse) is not."""
    x = (normal(4, 4000, scale=0.1)).astype(mx.bfloat16)
    weights = mx.zeros((4, 4000), dtype=mx.bfloat16)
    weights[:, 0] = 1.0
    got = to_numpy(mx.grad(lambda x: (log_softmax(x) * weights).sum())(x))[:, 1:]
    p = np.exp(to_numpy(x))
    want = -(p / p.sum(axis=-1, keepdims=True))[:, 1:]
    np.testing.assert_allclose(got, want, rtol=2.0**-8)


# ---- sparsemax ----------------------------------------------------------------------------------

GROUPS = [
    ("cpu",), ("gpu",), ("gpu", ("TPR", 31)), ("gpu", ("TPR", 33)), ("gpu", ("TPR", 4), ("RPG", 8))
]  # fmt: skip


@pytest.mark.parametrize("geometry", GROUPS, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 30.0])
def test_sparsemax_is_the_projection(scale, geometry):
    """From a support of everything to one of a single element, side by side in a simdgroup."""
    x = normal(11, 300, scale=scale) * mx.exp(normal(11, 1, seed=1))
    with launch.geometry(geometry[0], **dict(geometry[1:])):
        got = to_numpy(sparsemax(x))
    want = sparsemax_by_sorting(np.array(x))
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_array_equal(got > 1e-6, want > 1e-6)


@pytest.mark.parametrize("row, want", [
    ([1.0, 1.0, 1.0, 1.0], [0.25] * 4),
    ([2.0, 2.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]),
    ([1.0, 0.0, 0.0, -5.0], [1.0, 0.0, 0.0, 0.0]),  # 0 lies on the threshold
    ([1e30, 1.0, 0.0, -1e30], [1.0, 0.0, 0.0, 0.0]),
    ([1e4, 1e4 - 0.5, 0.0, -INF], [0.75, 0.25, 0.0, 0.0]),
    ([-7.0], [1.0]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_sparsemax_of_ties_and_dominant_elements(row, want, geometry):
    with launch.geometry(geometry):
        np.testing.assert_array_equal(to_numpy(sparsemax(mx.array([row])))[0], want)


def test_sparsemax_leaves_the_simplex_alone():
    x = mx.array(np.random.default_rng(0).dirichlet(np.ones(64), size=5), dtype=mx.float32)
    close(sparsemax(x), x, 2e-7)
    y = sparsemax(normal(5, 64))
    close(sparsemax(y), y, 2e-7)


@pytest.mark.parametrize("geometry", GROUPS, ids=str)
def test_a_row_that_is_nan_does_not_hold_up_its_neighbours(geometry):
    x = normal(9, 20)
    x[1, 3] = float("nan")
    x[4, :] = -INF
    x[6, 0] = INF
    with launch.geometry(geometry[0], **dict(geometry[1:])):
        got = to_numpy(sparsemax(x))
    odd = [1, 4, 6]
    assert np.isnan(got[odd]).all()
    rest = np.delete(np.arange(9), odd)
    np.testing.assert_allclose(got[rest], sparsemax_by_sorting(np.array(x)[rest]), atol=1e-6)


def test_a_pattern_that_climbs_needs_a_reference():
    pattern = Rowwise(
        (Operand("x"),),
        (Output("y", "x - t"),),
        (Pass((Reduce("s", "sum", "x > t ? x : 0.0f"),), climb=Climb("t", "0.0f", "s")),),
    )
    with pytest.raises(ValueError, match=r"\[t\] 'reference' must be given"):
        evaluate(pattern, (normal(2, 3),), (mx.float32,))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "masked_softmax"])
def test_a_gradient_of_a_tangent_is_the_tangent_of_a_gradient(name):
    f = getattr(zmlx.kernels, name)
    z, t = (mx.random.normal((3, 5), key=mx.random.key(i)) for i in range(2))
    backward = mx.grad(lambda z: mx.jvp(lambda z: f(z) ** 2, [z], [t])[1][0].sum())(z)
    forward = mx.jvp(mx.grad(lambda z: (f(z) ** 2).sum()), [z], [t])[1][0]
    assert mx.allclose(backward, forward, rtol=1e-4, atol=1e-5)
