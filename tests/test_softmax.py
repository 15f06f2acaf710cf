"""What the softmax family promises beyond its registry entries."""

import weakref

import mlx.core as mx
import numpy as np
import pytest
from plain_gradients import WAYS, assert_plain_gradients

import zmlx
from zmlx import launch
from zmlx.codegen import Climb, Operand, Output, Pass, Reduce, Rowwise
from zmlx.interpret import evaluate
from zmlx.kernels import log_softmax, logsumexp, masked_softmax, softmax, sparsemax
from zmlx.kernels.masked_softmax import _MASKED_SOFTMAX
from zmlx.pattern import PatternKernel
from zmlx.testing import to_numpy

INF = float("inf")
GEOMETRIES = ("cpu", "gpu")
LENGTHS = (1, 5, 33, 1000, 40001)


def normal(*shape, seed=0, scale=1.0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape) * scale, dtype=mx.float32)


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("transform", [
    lambda loss: mx.grad(lambda x: mx.vmap(loss)(x).sum()),
    lambda loss: mx.compile(mx.grad(lambda x: loss(x).sum()), shapeless=True),
])  # fmt: skip
def test_gradients_in_plain_mlx_keep_their_digits_at_the_largest_element(transform):
    x = mx.random.normal((2, 40001), key=mx.random.key(0))
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


# ---- masked_softmax -----------------------------------------------------------------------------

SHAPE = (3, 4, 7, 40)
MASKS = ((40,), (1, 40), (7, 40), (4, 1, 40), (3, 1, 7, 40), (3, 1, 1, 40), (1, 4, 7, 40), SHAPE,
         (7, 1), (1,), ())  # fmt: skip


def plain(x, mask=None, scale=1.0, keep=None):
    """The same in MLX's own operations."""
    z = scale * x
    if mask is not None:
        z = mx.where(mask, z, -INF) if mask.dtype == mx.bool_ else z + mask
    return mx.softmax(z if keep is None else mx.where(keep, z, -INF), axis=-1, precise=True)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_a_mask_that_broadcasts(shape, geometry):
    x, added, weights = normal(*SHAPE), normal(*shape, seed=1), normal(*SHAPE, seed=2)
    keeps = normal(*shape, seed=3) > -1.0
    with launch.geometry(geometry):
        close(masked_softmax(x, keeps, scale=0.5), plain(x, keeps, 0.5))
        close(masked_softmax(x, added, scale=0.5), plain(x, added, 0.5))

        def of(function):
            return mx.grad(lambda x, m: (function(x, m) * weights).sum(), argnums=(0, 1))(x, added)

        got = of(lambda x, m: masked_softmax(x, m, scale=0.5))
        for a, b in zip(got, of(lambda x, m: plain(x, m, 0.5)), strict=True):
            assert a.shape == b.shape
            close(a, b, 1e-5)
        close(
            mx.grad(lambda x: (masked_softmax(x, keeps) * weights).sum())(x),
            dropped(mx.grad(lambda x: (plain(x, keeps) * weights).sum())(x)),
        )


def test_a_mask_of_rows_too_long_to_keep():
    x, mask, weights = normal(2, 3, 33001), normal(3, 33001, seed=1), normal(2, 3, 33001, seed=2)
    for m in (mask, mask[0], mask > 0):
        close(masked_softmax(x, m), plain(x, m))
    for m in (mask, mask[0]):
        close(
            mx.grad(lambda m: (masked_softmax(x, m) * weights).sum())(m),
            mx.grad(lambda m: (plain(x, m) * weights).sum())(m),
        )


def dropped(gradient):
    """0 instead of MLX's NaN, which is 0 times NaN, in rows without scores."""
    return mx.where(mx.isnan(gradient), 0.0, gradient)


def causal_mask(queries, keys, offset):
    return mx.arange(keys)[None] <= mx.arange(queries)[:, None] + keys - queries + offset


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("queries, keys", [(7, 7), (3, 40), (40, 3), (1, 9)])
@pytest.mark.parametrize("offset", [None, -2, 3])
def test_causal(queries, keys, offset, geometry):
    x, weights = normal(2, 4, queries, keys), normal(2, 4, queries, keys, seed=1)
    keep = causal_mask(queries, keys, offset or 0)
    mask = normal(queries, keys, seed=2)
    with launch.geometry(geometry):
        close(masked_softmax(x, causal=True, offset=offset), plain(x, keep=keep))
        close(
            masked_softmax(x, mask > -1, causal=True, offset=offset), plain(x, mask > -1, 1, keep)
        )
        got = masked_softmax(x, mask, scale=0.3, causal=True, offset=offset)
        close(got, plain(x, mask, 0.3, keep))

        def of(function):
            return mx.grad(lambda x, m: (function(x, m) * weights).sum(), argnums=(0, 1))(x, mask)

        got = of(lambda x, m: masked_softmax(x, m, causal=True, offset=offset))
        for a, b in zip(got, of(lambda x, m: plain(x, m, keep=keep)), strict=True):
            close(a, dropped(b), 1e-5)


def test_causal_is_aligned_as_in_attention():
    """Row i of attention to the identity is the softmax of its scores."""
    q, k = normal(1, 1, 5, 16), normal(1, 1, 8, 16, seed=1)
    want = mx.fast.scaled_dot_product_attention(
        q, k, mx.eye(8)[None, None], scale=0.25, mask="causal"
    )
    close(masked_softmax(q @ k.swapaxes(-1, -2), scale=0.25, causal=True), want, 1e-5)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_an_offset_far_away(target):
    """Positions in 32 bits would wrap around."""
    x = normal(3, 7)
    every, none = mx.softmax(x, axis=-1), mx.full((3, 7), mx.nan)
    with zmlx.target(target):
        for far in (2**31 - 1, mx.array(2**31 - 1), 2**31, 2**40):
            close(masked_softmax(x, causal=True, offset=far), every)
        for far in (-(2**31), mx.array(-(2**31)), -(2**40)):
            close(masked_softmax(x, causal=True, offset=far), none)


def test_the_offset_may_be_an_array():
    x = normal(5, 9)
    close(
        masked_softmax(x, causal=True, offset=mx.array(2)),
        masked_softmax(x, causal=True, offset=2),
    )


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_row_without_scores_is_nan_and_has_the_gradient_0(geometry):
    """NaN as mx.softmax of -inf; MLX's own gradient there is 0 times NaN and poisons the rest."""
    x, mask = normal(3, 40), mx.ones((3, 40), dtype=mx.bool_)
    mask[1] = False
    with launch.geometry(geometry):
        y = masked_softmax(x, mask)
        close(y, plain(x, mask))
        assert mx.isnan(y[1]).all()
        assert not mx.isnan(y[::2]).any()
        weights = normal(3, 40, seed=1)
        gradient = mx.grad(lambda x: (masked_softmax(x, mask) * weights).sum())(x)
        np.testing.assert_array_equal(to_numpy(gradient[1]), 0.0)
        lowest = mx.where(mask, 0.0, mx.finfo(mx.float32).min)
        assert mx.isfinite(masked_softmax(x, lowest)).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [7, 40001])
@pytest.mark.parametrize("mask", ["bool", "causal", "bool and causal", "added and causal"])
def test_rows_without_scores_have_the_same_gradients_in_plain_mlx(mask, d, way):
    """0 where a score is dropped. A row whose last score is -inf or inf is NaN, but for those."""
    x = to_numpy(normal(3, 9, d)).astype(np.float32)
    x[0, 5], x[1, 6, 0] = -INF, INF
    keep, added = np.ones((9, d), bool), np.zeros((9, d), np.float32)
    keep[3], keep[6, 2:], added[7] = False, False, -INF
    options = {"causal": True, "offset": -2 if d == 7 else 4 - d} if "causal" in mask else {}
    values = [mx.array(x)]
    if mask != "causal":
        values.append(mx.array(added if "added" in mask else keep))
    which = (0, 1) if "added" in mask else (0,)
    dx, *_ = assert_plain_gradients(lambda *xs: masked_softmax(*xs, **options), values, which, way)
    assert np.isnan(to_numpy(dx)[0, 5]).any()
    assert not to_numpy(dx)[2, 3, 5:].any()


def test_a_new_scale_or_offset_compiles_nothing():
    from zmlx import metal

    x = normal(5, 9)
    mx.eval(masked_softmax(x, scale=0.1, causal=True, offset=1))
    before = metal.statistics()["compiles"]
    mx.eval(masked_softmax(x, scale=0.7, causal=True, offset=-3))
    assert metal.statistics()["compiles"] == before


def test_the_dtype_is_that_of_the_sum():
    x = normal(2, 5).astype(mx.bfloat16)
    assert masked_softmax(x, scale=0.5).dtype == mx.bfloat16
    assert masked_softmax(x, mx.zeros((5,))).dtype == mx.float32
    gradient = mx.grad(lambda x: masked_softmax(x, mx.zeros((5,)))[0, 0])(x)
    assert gradient.dtype == mx.bfloat16


@pytest.mark.parametrize("options, message", [
    ({"offset": 1}, r"'offset' must be None unless causal=True but got 1"),
    ({"causal": 1}, r"'causal' must be True or False but got int"),
    ({"causal": True, "offset": 1.5}, r"'offset' must be an int or an mx.array but got float"),
    ({"causal": True, "offset": mx.array([1])}, r"'offset' must have shape \(\) but got \(1,\)"),
    ({"scale": "2"}, r"'scale' must be a number but got str"),
    ({"mask": mx.ones((3, 9))}, r"'mask' must broadcast to \(2, 9\) but got \(3, 9\)"),
    ({"mask": mx.ones((1, 2, 9))}, r"'mask' must broadcast to \(2, 9\) but got \(1, 2, 9\)"),
], ids=str)  # fmt: skip
def test_bad_options(options, message):
    for good in ({}, {"mask": mx.ones((2, 9))}, {"causal": True}, {"causal": True, "offset": 1}):
        masked_softmax(normal(2, 9), **good)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=rf"\[masked_softmax\] {message}"):
            masked_softmax(normal(2, 9), **options)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_repeated_call_goes_by_its_own_mask_scale_and_offset(target):
    shapes = [(), (1,), (9,), (4, 1), (1, 9), (4, 9), (3, 1, 9), (3, 4, 9), (1, 4, 1)]
    with zmlx.target(target):
        for n in (1, 2, 3):
            x, scale = normal(3, 4, 9, seed=n), 0.25 * n
            close(masked_softmax(x, scale=scale), plain(x, scale=scale))
            for shape in shapes:
                added = normal(*shape, seed=n + 1)
                for mask in (added, added > -1.5):
                    close(masked_softmax(x, mask, scale=scale), plain(x, mask, scale))
            for offset in (n, np.int64(n), mx.array(n), None):
                keep = causal_mask(4, 9, 0 if offset is None else n)
                got = masked_softmax(x, scale=scale, causal=True, offset=offset)
                close(got, plain(x, scale=scale, keep=keep))


@pytest.mark.on_cpu
def test_a_new_scale_or_offset_is_no_new_call():
    x = normal(5, 9)
    masked_softmax(x, causal=True)
    before = len(_MASKED_SOFTMAX._ways[launch.settings()])
    for n in range(20):
        masked_softmax(x, scale=n / 8, causal=True)
        masked_softmax(x, causal=True, offset=n)
    assert len(_MASKED_SOFTMAX._ways[launch.settings()]) == before


def test_no_array_of_a_call_is_kept():
    def call(shape):
        arrays = mx.ones((2, 4, 9)), mx.zeros(shape), mx.ones(shape) > 0
        mx.eval(masked_softmax(arrays[0], arrays[1]), masked_softmax(arrays[0], arrays[2]))
        return [weakref.ref(a) for a in arrays]

    for shape in ((4, 9), (4, 9), (4, 1), (4, 1), (9,), (9,)):
        assert not any(a() is not None for a in call(shape))


def in_vmap(op, x):
    return mx.vmap(op)(x)


def in_jvp(op, x):
    (y,), (tangent,) = mx.jvp(op, [x], [mx.ones_like(x)])
    assert mx.isfinite(tangent).all()
    return y


def in_reference(op, x):
    with zmlx.target("reference"):
        return op(x)


@pytest.mark.parametrize("way", [in_vmap, in_jvp, in_reference], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "op",
    [
        softmax,
        log_softmax,
        logsumexp,
        masked_softmax,
        zmlx.rowwise.reduce("max"),
        zmlx.rowwise.reduce("min"),
    ],
    ids=["softmax", "log_softmax", "logsumexp", "masked_softmax", "max", "min"],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("d", [1, 7, 3001])
def test_rows_of_the_least_and_the_largest_number_in_plain_mlx(op, way, d, sign):
    x = mx.full((3, d), sign * mx.finfo(mx.float32).min)
    want = op(x)
    assert mx.isfinite(want).all()
    close(way(op, x), want)


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("op", [softmax, log_softmax, masked_softmax, sparsemax],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_empty_rows(op, target):
    with zmlx.target(target):
        assert op(mx.zeros((3, 0))).shape == (3, 0)
        assert mx.grad(lambda x: op(x).sum())(mx.zeros((3, 0))).shape == (3, 0)
        assert mx.vmap(op)(mx.zeros((2, 3, 0))).shape == (2, 3, 0)
        half = masked_softmax(mx.zeros((3, 0), dtype=mx.float16), mx.zeros((3, 0)))
        assert half.dtype == mx.float32


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
