"""QK-norm with RoPE: equality with MLX's two ops, weight gradients, no recompilation, errors."""

import re
import weakref

import mlx.core as mx
import numpy as np
import pytest

from zmlx import launch, metal
from zmlx.kernels import qk_norm_rope, rope
from zmlx.testing import to_numpy


def normal(*shape, dtype=mx.float32, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def draw(batch=2, heads=4, groups=2, steps=5, d=16, dtype=mx.float32):
    return (
        normal(batch, heads, steps, d, dtype=dtype),
        normal(batch, groups, steps, d, dtype=dtype, seed=1),
        1 + 0.1 * normal(d, seed=2).astype(dtype),
        1 + 0.1 * normal(d, seed=3).astype(dtype),
    )


def in_two(q, k, q_weight, k_weight, eps=1e-6, **options):
    return tuple(rope(mx.fast.rms_norm(x, w, eps), **options)
                 for x, w in ((q, q_weight), (k, k_weight)))  # fmt: skip


@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "options",
    [
        {"offset": mx.array([3, 50])},
        {"positions": mx.array([[4, 0, 9, 9, 1], [7, 7, 7, 2, 3]]), "traditional": True},
        {"positions": mx.arange(30).reshape(3, 2, 5), "sections": (3, 3, 2)},
        {"freqs": 10.0 ** mx.linspace(0, 3, 8), "scale": 0.5},
        {"base": 1e6, "eps": 1e-2, "dims": 10},
    ],
    ids=lambda o: ",".join(o),
)
def test_it_equals_rms_norm_and_then_rope(options, geometry):
    arrays = draw()
    cotangents = [normal(*a.shape, seed=9) for a in arrays[:2]]
    with launch.geometry(geometry):
        got = mx.vjp(lambda *a: qk_norm_rope(*a, **options), arrays, cotangents)
    want = mx.vjp(lambda *a: in_two(*a, **options), arrays, cotangents)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_heads_last_is_the_same_transposed():
    q, k, *weights = draw()
    last = [mx.contiguous(x.transpose(0, 2, 1, 3)) for x in (q, k)]
    for a, b in zip(
        qk_norm_rope(*last, *weights, layout="BLHD"), qk_norm_rope(q, k, *weights), strict=True
    ):
        np.testing.assert_array_equal(a.transpose(0, 2, 1, 3), b)


def test_result_dtypes_are_promoted():
    q, k, q_weight, k_weight = draw(dtype=mx.bfloat16)
    y, z = qk_norm_rope(q, k.astype(mx.float16), q_weight.astype(mx.float32), k_weight)
    assert (y.dtype, z.dtype) == (mx.float32, mx.result_type(mx.float16, mx.bfloat16))


def test_weight_gradients_sum_over_rows_in_float32():
    """Ones in bfloat16: a sum in that dtype would stop at 256."""
    q = mx.ones((1, 1, 3000, 8), mx.bfloat16)
    one = mx.ones((8,), mx.bfloat16)

    def total(weight):
        y, _ = qk_norm_rope(q, q, weight, one, freqs=mx.full((4,), np.inf))
        return y.astype(mx.float32).sum()

    for geometry in ("cpu", "gpu"):
        with launch.geometry(geometry):
            np.testing.assert_allclose(to_numpy(mx.grad(total)(one)), 3000, rtol=2**-8)


def test_a_gradient_is_the_same_every_time_and_in_any_number_of_threads():
    arrays = draw(steps=300)
    grad = mx.grad(lambda *a: sum(y.sum() for y in qk_norm_rope(*a)), argnums=(2, 3))
    first = grad(*arrays)
    for _ in range(3):
        for a, b in zip(grad(*arrays), first, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_new_length_offset_or_eps_compiles_nothing():
    def run(steps, **options):
        arrays = draw(steps=steps)
        mx.eval(mx.grad(lambda *a: sum(y.sum() for y in qk_norm_rope(*a, **options)),
                        argnums=(0, 1, 2, 3))(*arrays))  # fmt: skip
        mx.eval(qk_norm_rope(*arrays, **options))

    run(9)
    before = metal.statistics()
    run(1, offset=7)
    run(33, eps=0.1, base=5e5)
    after = metal.statistics()
    assert after["compiles"] + after["cache_hits"] == before["compiles"] + before["cache_hits"]


@pytest.mark.parametrize(
    "index, shape, message",
    [
        (1, (2, 2, 6, 16), "'k' must have shape (2, 2, 5, 16) but got (2, 2, 6, 16)."),
        (1, (2, 2, 5, 8), "'k' must have shape"),
        (2, (8,), "'q_weight' must have shape (16,) but got (8,)."),
        (3, (16, 1), "'k_weight' must have shape (16,) but got (16, 1)."),
        (0, (2, 5, 16), "'q' must have 4 axes but got (2, 5, 16)."),
    ],
)
def test_errors(index, shape, message):
    arrays = list(draw())
    arrays[index] = mx.zeros(shape)
    with pytest.raises(ValueError, match=re.escape(f"[qk_norm_rope] {message}")):
        qk_norm_rope(*arrays)


def test_rows_as_long_as_a_stack_has_room_for():
    q, weight = mx.ones((1, 1, 1, 2**17 + 2)), mx.ones((2**17 + 2,))
    message = "[qk_norm_rope] 'q' must have a last axis of at most 131072 but got"
    with pytest.raises(ValueError, match=re.escape(message)):
        qk_norm_rope(q, q, weight, weight, 8)
    q, weight = q[..., 2:], weight[2:]
    dw = mx.grad(lambda w: qk_norm_rope(q, q, w, weight, 8)[0].sum())(weight)
    assert mx.isfinite(dw).all()


@pytest.mark.parametrize(
    "options",
    [
        lambda n: {"offset": n},
        lambda n: {"offset": np.int64(n)},
        lambda n: {"offset": mx.array([n, 2 * n])},
        lambda n: {"positions": n * mx.arange(5)},
        lambda n: {"freqs": n + mx.arange(8).astype(mx.float32)},
    ],
)
def test_a_repeated_call_goes_by_its_own_arrays(options):
    for n in (1, 3, 7):
        q, k, q_weight, k_weight = draw()
        arrays = n * q, n + k, n + q_weight, n * k_weight
        for got, want in zip(
            qk_norm_rope(*arrays, **options(n)), in_two(*arrays, **options(n)), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_an_option_that_changes_alone_changes_the_result():
    arrays = draw(steps=4, heads=4, groups=4)
    calls = [
        {},
        {"eps": 1.0},
        {"dims": 6},
        {"traditional": True},
        {"base": 100.0},
        {"scale": 0.5},
        {"offset": 1},
        {"layout": "BLHD"},
        {"positions": mx.array([0, 2, 4, 6])},
    ]
    for _ in range(2):
        found = [np.array(qk_norm_rope(*arrays, **options)[0]) for options in calls]
        for i, y in enumerate(found):
            assert not any(np.array_equal(y, other) for other in found[:i])


@pytest.mark.parametrize(
    "bad",
    [
        {"eps": -1.0},
        {"eps": True},
        {"offset": True},
        {"offset": 1.0},
        {"offset": None},
        {"traditional": 1},
        {"positions": mx.arange(5), "offset": 1},
    ],
    ids=str,
)
def test_a_bad_call_raises_after_a_good_one(bad):
    arrays = draw()
    qk_norm_rope(*arrays, eps=1.0, offset=1, traditional=True)
    qk_norm_rope(*arrays, positions=mx.arange(5))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=r"\[qk_norm_rope\] '\w+' must be"):
            qk_norm_rope(*arrays, **bad)
    with pytest.raises(ValueError, match=r"\[qk_norm_rope\] 'k' must have shape"):
        qk_norm_rope(arrays[0], arrays[1][:, :, 1:], *arrays[2:])


def test_no_array_of_a_call_is_kept():
    def call():
        arrays = (*draw(), mx.ones(8), mx.arange(5))
        mx.eval(qk_norm_rope(*arrays[:4], freqs=arrays[4], positions=arrays[5]))
        return [weakref.ref(a) for a in arrays]

    for _ in range(2):
        assert not any(a() is not None for a in call())
