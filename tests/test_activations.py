"""Activations beyond the sweep of tests/ops: ties, extremes, parameters, the public functions."""

import inspect
import pickle
from itertools import count

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from zmlx import kernels, metal
from zmlx.registry import ops
from zmlx.testing import to_numpy

OPS = tuple(ops("activations"))
EACH = pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
EXTREMES = (88.0, -88.0, 100.0, -100.0, 1e4, -1e4, 1e15, -1e15, 1e20, -1e20, -3e38, 0.0, -0.0)


def gradient(function, *points):
    """The derivative at each point."""
    return mx.grad(lambda x: function(x).sum())(mx.array(points, dtype=mx.float32))


@pytest.mark.parametrize(
    "name, mlx, ties",
    [
        ("relu", nn.relu, (0.0, -0.0)),
        ("relu2", nn.relu2, (0.0, -0.0)),
        ("leaky_relu", nn.leaky_relu, (0.0, -0.0)),
        ("elu", nn.elu, (0.0, -0.0)),
        ("selu", nn.selu, (0.0, -0.0)),
        ("hardswish", nn.hardswish, (-3.0, 3.0, 0.0)),
        ("hardtanh", nn.hard_tanh, (-1.0, 1.0)),
    ],
)
def test_gradients_at_ties_are_those_of_mlx(name, mlx, ties):
    got, want = gradient(getattr(kernels, name), *ties), gradient(mlx, *ties)
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-6)


def test_celu_has_its_derivative_at_zero():
    """MLX's is 0 there, because both its max and its min pass a tie to the constant."""
    assert gradient(kernels.celu, 0.0, -0.0).tolist() == [1.0, 1.0]
    assert gradient(nn.celu, 0.0).tolist() == [0.0]


@EACH
def test_finite_where_mlx_is(op):
    x = mx.array(EXTREMES)
    for got, want in (
        (op.function(x), op.reference(x)),
        (gradient(op.function, *EXTREMES), gradient(op.reference, *EXTREMES)),
    ):
        got, want = to_numpy(got), to_numpy(want)
        fine = np.isfinite(want)
        if op.name == "celu":
            # MLX's gradient is wrong at 0; see above.
            fine[-2:] = False
        assert np.isfinite(got[fine]).all(), got
        np.testing.assert_allclose(got[fine], want[fine], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu_tanh", "mish"])
def test_the_gradient_at_the_tails_is_that_of_the_asymptote(name):
    """An exponential that is 0 is not multiplied by a power of x that is infinite."""
    got = gradient(getattr(kernels, name), 1e15, 1e20, 3e38, -1e15, -1e20, -3e38)
    np.testing.assert_allclose(np.array(got), [1.0, 1.0, 1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", ["elu", "selu"])
def test_the_gradient_of_the_linear_part_does_not_overflow(name):
    """MLX's is 0 · exp(100), which is NaN."""
    slope = {"elu": 1.0, "selu": 1.0507}[name]
    function = getattr(kernels, name)
    np.testing.assert_allclose(np.array(gradient(function, 100.0, 1e4)), slope, rtol=1e-6)
    tangent = mx.jvp(function, [mx.array([100.0])], [mx.array([1.0])])[1][0]
    np.testing.assert_allclose(tangent.item(), slope, rtol=1e-6)


@EACH
def test_half_precision_is_rounded_once(op):
    """The result of float16 numbers is the float32 result, rounded."""
    x = mx.abs(mx.random.normal((1000,), key=mx.random.key(0))).astype(mx.float16)
    wide = op.function(x.astype(mx.float32)).astype(mx.float16)
    assert mx.array_equal(op.function(x), wide)


@EACH
def test_a_call_does_not_depend_on_how_elements_are_arranged(op):
    x = mx.abs(mx.random.normal((5003,), key=mx.random.key(1)))
    order = mx.random.permutation(5003, key=mx.random.key(2))
    assert mx.array_equal(op.function(x)[order], op.function(x[order]))


@pytest.mark.parametrize("dtype", [mx.int32, mx.bool_])
@EACH
def test_integers_are_an_error(op, dtype):
    with pytest.raises(ValueError, match=rf"\[{op.name}\] 'x' must have dtype float32"):
        op.function(mx.zeros((4,), dtype))


# ---- parameters ----------------------------------------------------------------------------------

PARAMETERS = pytest.mark.parametrize("op", [o for o in OPS if o.options], ids=lambda o: o.name)
_fresh = count()


@PARAMETERS
def test_a_new_value_compiles_nothing(op):
    x = mx.random.normal((33,))
    name = op.options[0].name

    def step(value):
        mx.eval(mx.value_and_grad(lambda x: op.function(x, **{name: value}).sum())(x))

    step(op.options[0].default)
    before = metal.statistics()["compiles"]
    for _ in range(4):
        step(0.1 + next(_fresh) / 1024)
    step(2)
    assert metal.statistics()["compiles"] == before


@PARAMETERS
def test_a_parameter_must_be_a_number(op):
    name = op.options[0].name
    for bad in ("1.0", None, mx.array(1.0), True):
        with pytest.raises(TypeError, match=rf"\[{op.name}\] '{name}' must be a number but got"):
            op.function(mx.ones((2,)), **{name: bad})


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match=r"elu\(\) got an unexpected keyword argument 'slope'"):
        kernels.elu(mx.ones((2,)), slope=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        kernels.relu(mx.ones((2,)), alpha=1.0)


def test_numpy_numbers_are_numbers():
    x = mx.array([-1.0])
    assert kernels.elu(x, alpha=np.float32(0.5)).item() == kernels.elu(x, alpha=0.5).item()


# ---- the public functions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", [*OPS, *ops("gated")], ids=lambda o: o.name
)  # fmt: skip
def test_the_public_function_is_complete(op):
    function = op.function
    assert getattr(kernels, op.name) is function
    assert function.__name__ == function.__qualname__ == op.name
    assert function.__module__.startswith("zmlx.kernels.")
    assert pickle.loads(pickle.dumps(function)) is function
    for section in (op.formula, "Args:", "Returns:", "Gradient"):
        assert section in function.__doc__
    names = [*(a.name for a in op.arguments), *(o.name for o in op.options)]
    signature = inspect.signature(function)
    assert list(signature.parameters) == names
    for option in op.options:
        assert signature.parameters[option.name].default == option.default
        assert f"    {option.name}: " in function.__doc__
