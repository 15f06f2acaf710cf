"""The recipes against MLX's own ops, values and gradients."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from differentiable import rms_norm, silu

# A dozen roundings of float32, relative to values near 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("shape", [(1,), (33,), (5, 1025)])
def test_silu_and_its_gradient(shape):
    x, dy = mx.random.normal(shape), mx.random.normal(shape)
    (y,), (dx,) = mx.vjp(silu, [x], [dy])
    (want,), (dwant,) = mx.vjp(nn.silu, [x], [dy])
    assert mx.allclose(y, want, **CLOSE).item()
    assert mx.allclose(dx, dwant, **CLOSE).item()


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (7, 96), (33, 1000)])
def test_rms_norm_and_its_gradients(shape):
    x, w, dy = mx.random.normal(shape), mx.random.normal(shape[1:]), mx.random.normal(shape)
    (y,), found = mx.vjp(rms_norm, [x, w], [dy])
    (want,), wanted = mx.vjp(lambda x, w: mx.fast.rms_norm(x, w, 1e-5), [x, w], [dy])
    assert mx.allclose(y, want, **CLOSE).item()
    for gradient, expected in zip(found, wanted, strict=True):
        # A row of one element: its gradient is a difference of equal terms, of up to 1 / |x|.
        scale = mx.maximum(mx.abs(expected).max(), mx.abs(1 / x).max() if shape[1] == 1 else 1.0)
        assert (mx.abs(gradient - expected).max() <= 2e-5 * scale).item()


def test_a_training_step_may_be_compiled():
    x, w = mx.random.normal((4, 64)), mx.random.normal((64,))

    def loss(x, w):
        return silu(rms_norm(x, w)).square().sum()

    eager = mx.grad(loss, argnums=(0, 1))(x, w)
    compiled = mx.compile(mx.grad(loss, argnums=(0, 1)))(x, w)
    assert all(mx.array_equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_the_gradient_of_the_weight_is_the_same_in_every_run():
    x, w = mx.random.normal((1000, 48)), mx.random.normal((48,))
    gradient = mx.grad(lambda w: rms_norm(x, w).sum())
    assert all(mx.array_equal(gradient(w), gradient(w)) for _ in range(3))
