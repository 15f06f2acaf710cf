"""What masked_softmax promises beyond its registry entry."""

import weakref

import mlx.core as mx
import numpy as np
import pytest
from plain_gradients import WAYS, assert_plain_gradients
from softmax_arrays import GEOMETRIES, INF, close, normal

import zmlx
from zmlx import launch
from zmlx.kernels import log_softmax, logsumexp, masked_softmax, softmax, sparsemax
from zmlx.kernels.masked_softmax import _MASKED_SOFTMAX
from zmlx.testing import to_numpy

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


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_a_bool_mask_may_be_an_argument_of_a_checkpoint(shape):
    """Which asks for the gradient of all arguments."""
    x, keeps = normal(*SHAPE), normal(*shape, seed=3) > -1.0

    def gradient(function):
        return mx.grad(lambda x: (mx.checkpoint(function)(x, keeps) * x).sum())(x)

    close(gradient(masked_softmax), gradient(plain))


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
