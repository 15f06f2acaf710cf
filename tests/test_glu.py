"""Gated units beyond the sweep of tests/ops: forms, biases, gpt-oss, extremes."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from zmlx import kernels, launch, metal
from zmlx.registry import get
from zmlx.testing import to_numpy

NAMES = ("glu", "swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_clamped")
EACH = pytest.mark.parametrize("name", NAMES)


def normal(seed, *shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def packed_of(name, gate, up):
    """The packed array of a gate and an up."""
    return mx.concatenate([up, gate] if name == "glu" else [gate, up], axis=-1)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=tolerance, atol=tolerance)


@EACH
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (1, 33), (4, 1)])
def test_packed_equals_two_operands(name, shape):
    """Values and gradients, for more than one row."""
    gate, up, dy = (normal(i, *shape) for i in range(3))
    pair, packed = getattr(kernels, name), getattr(kernels, f"{name}_packed")
    close(packed(packed_of(name, gate, up)), pair(gate, up))
    dgate, dup = mx.vjp(lambda *v: pair(*v), [gate, up], [dy])[1]
    (dx,) = mx.vjp(lambda x: packed(x), [packed_of(name, gate, up)], [dy])[1]
    close(dx, packed_of(name, dgate, dup))


@EACH
def test_a_bias_is_added_to_every_row(name):
    gate, up, b, c = normal(0, 2, 3, 37), normal(1, 2, 3, 37), normal(2, 37), normal(3, 37)
    pair, packed = getattr(kernels, name), getattr(kernels, f"{name}_packed")
    want = pair(gate + b, up + c)
    close(pair(gate, up, b, c), want)
    close(pair(gate, up, b), pair(gate + b, up))
    close(pair(gate, up, None, c), pair(gate, up + c))
    close(packed(packed_of(name, gate, up), packed_of(name, b, c)), want)


@EACH
@pytest.mark.parametrize("d", [5, 130, launch.LONGEST_KEPT_ROW + 3])
def test_a_bias_gradient_is_the_sum_of_the_input_gradient_over_all_rows(name, d):
    gate, up, dy = (normal(i, 2, 3, d) for i in range(3))
    b, c = normal(3, d), normal(4, d)
    pair, packed = getattr(kernels, name), getattr(kernels, f"{name}_packed")
    dgate, dup, db, dc = mx.vjp(lambda *v: pair(*v), [gate, up, b, c], [dy])[1]
    assert db.shape == dc.shape == (d,)
    close(db, dgate.sum((0, 1)))
    close(dc, dup.sum((0, 1)))
    x, bias = packed_of(name, gate, up), packed_of(name, b, c)
    dx, dbias = mx.vjp(lambda *v: packed(*v), [x, bias], [dy])[1]
    close(dx, packed_of(name, dgate, dup))
    close(dbias, packed_of(name, db, dc))


@EACH
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 3), (2, 3)])
def test_a_gradient_asked_for_alone_is_the_same(name, which):
    values = [normal(0, 4, 9), normal(1, 4, 9), normal(2, 9), normal(3, 9)]
    function = getattr(kernels, name)

    def loss(*v):
        return (function(*v) * mx.arange(9)).sum()

    every = mx.grad(loss, argnums=(0, 1, 2, 3))(*values)
    some = mx.grad(loss, argnums=which)(*values)
    some = some if len(which) > 1 else [some]
    for i, got in zip(which, some, strict=True):
        close(got, every[i])


@EACH
def test_bias_gradients_are_summed_in_float32(name):
    """4096 rows of float16, whose sum in float16 would stop growing at 2048."""
    gate, up = mx.ones((4096, 8), mx.float16), mx.ones((4096, 8), mx.float16)
    bias = mx.zeros((8,), mx.float16)
    got = mx.grad(lambda b: getattr(kernels, name)(gate, up, None, b).sum())(bias)
    wide = [v.astype(mx.float32) for v in (gate, up)]
    want = mx.grad(lambda b: get(name).reference(wide[0], wide[1] + b).sum())(mx.zeros((8,)))
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=2e-3)


@EACH
def test_bias_gradients_are_the_same_every_time(name):
    gate, up, b, c = normal(0, 300, 65), normal(1, 300, 65), normal(2, 65), normal(3, 65)

    def run():
        return mx.grad(lambda b, c: getattr(kernels, name)(gate, up, b, c).sum(), (0, 1))(b, c)

    first = run()
    for _ in range(3):
        assert all(mx.array_equal(a, b) for a, b in zip(run(), first, strict=True))


@EACH
@pytest.mark.parametrize("value", [88.0, -88.0, 1e4, -1e4])
def test_finite_where_mlx_is(name, value):
    gate, up = mx.full((2, 3), value), normal(1, 2, 3)
    pair, reference = getattr(kernels, name), get(name).reference
    for a, b in ((gate, up), (up, gate)):
        got = [pair(a, b), *mx.grad(lambda *v: pair(*v).sum(), (0, 1))(a, b)]
        want = [reference(a, b), *mx.grad(lambda *v: reference(*v).sum(), (0, 1))(a, b)]
        for g, w in zip(got, want, strict=True):
            g, w = to_numpy(g), to_numpy(w)
            assert np.isfinite(g[np.isfinite(w)]).all()
            np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-6)


def test_glu_packed_is_the_one_of_mlx():
    x = normal(0, 4, 10)
    close(kernels.glu_packed(x), nn.glu(x))


def test_swiglu_clamped_is_the_one_of_gpt_oss():
    activations = pytest.importorskip("mlx_lm.models.activations")
    gate, up = 6 * normal(0, 5, 64), 6 * normal(1, 5, 64)
    close(kernels.swiglu_clamped(gate, up), activations.swiglu_oai(gate, up), 1e-4)
    got = mx.grad(lambda *v: kernels.swiglu_clamped(*v).sum(), (0, 1))(gate, up)
    want = mx.grad(lambda *v: activations.swiglu_oai(*v).sum(), (0, 1))(gate, up)
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-4)


def test_swiglu_clamped_clamps_the_gate_only_above():
    gate, up = mx.array([[20.0, -20.0, 7.0]]), mx.array([[1.0, 1.0, 1.0]])
    dgate = mx.grad(lambda g: kernels.swiglu_clamped(g, up).sum())(gate)
    assert dgate[0, 0].item() == 0.0
    assert dgate[0, 1].item() != 0.0
    dup = mx.grad(lambda u: kernels.swiglu_clamped(up, u).sum())(gate)
    assert dup[0, 0].item() == dup[0, 1].item() == 0.0


def test_a_new_limit_compiles_nothing():
    gate, up = normal(0, 2, 5), normal(1, 2, 5)
    kernels.swiglu_clamped(gate, up)
    before = metal.statistics()["compiles"]
    for limit in (1.0, 2, 3.5):
        mx.eval(kernels.swiglu_clamped(gate, up, limit=limit, alpha=limit / 2))
    assert metal.statistics()["compiles"] == before


@EACH
def test_bad_arguments(name):
    pair, packed = getattr(kernels, name), getattr(kernels, f"{name}_packed")
    x = normal(0, 2, 6)
    for call, message in (
        (lambda: pair(x.astype(mx.int32), x), rf"\[{name}\] 'gate' must have dtype float32"),
        (lambda: pair(x, x[:, :3]), rf"\[{name}\] 'up' must have shape \(2, 6\)"),
        (lambda: pair(x, x, mx.zeros(5)), rf"\[{name}\] 'gate_bias' must have shape \(6,\)"),
        (lambda: pair(x, x, None, mx.zeros(5)), rf"\[{name}\] 'up_bias' must have shape \(6,\)"),
        (lambda: packed(x[:, :5]), rf"\[{name}_packed\] 'x' must have shape \(\*, 2D\)"),
        (lambda: packed(x, mx.zeros(3)), rf"\[{name}_packed\] 'bias' must have shape \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
