"""What kernels do not take, layers leave to MLX: its numbers, axes, sizes and dtypes."""

import math

import mlx.core as mx
import mlx.nn as mnn
import pytest

import zmlx
import zmlx.nn as nn


@pytest.mark.parametrize(
    "call",
    [
        lambda n, x: n.elu(x, mx.array(0.5)),
        lambda n, x: n.elu(x, float("inf")),
        lambda n, x: n.celu(x, alpha=mx.array(0.5)),
        lambda n, x: n.celu(x, mx.full((24,), 0.5)),
        lambda n, x: mx.compile(n.celu)(x, mx.array(0.5)),
        lambda n, x: n.CELU(0.0)(x),
        lambda n, x: n.leaky_relu(x, mx.full((24,), 0.1)),
        lambda n, x: n.hard_tanh(x, mx.array(-1.0), mx.array(1.0)),
        lambda n, x: n.celu(x, 1e-46),
        lambda n, x: n.softmax(x, axis=(1, 2)),
        lambda n, x: n.softmax(x, None),
        lambda n, x: n.losses.cross_entropy(x[0], mx.arange(6), label_smoothing=mx.array(0.5)),
    ],
)
def test_numbers_and_axes_that_kernels_do_not_take_are_left_to_mlx(call):
    x = mx.random.normal((2, 6, 24))
    with zmlx.prefer("zmlx"):
        assert mx.array_equal(call(nn, x), call(mnn, x), equal_nan=True)


def with_eps(layer, eps):
    """A constructor refuses some of these; a config that is read later sets them."""
    layer.eps = eps
    return layer


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1e39, -1e39, math.inf, math.nan, True, mx.array(0.5)], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda n, x, number: n.hard_tanh(x, -1.0, number),
        lambda n, x, number: n.hard_tanh(x, number),
        lambda n, x, number: n.LeakyReLU(number)(x),
        lambda n, x, number: n.ELU(number)(x),
        lambda n, x, number: n.CELU(number)(x),
        lambda n, x, number: with_eps(n.RMSNorm(24), number)(x),
        lambda n, x, number: with_eps(n.LayerNorm(24), number)(x),
        lambda n, x, number: with_eps(n.GroupNorm(4, 24), number)(x),
        lambda n, x, number: n.RoPE(24, base=number)(x, offset=3),
        lambda n, x, number: n.RoPE(24, scale=number)(x, offset=3),
    ],
)
def test_numbers_beyond_float32_and_what_else_kernels_refuse_is_left_to_mlx(call, number, dtype):
    x = mx.random.normal((2, 6, 24), key=mx.random.key(4)).astype(dtype)

    def outcome(module):
        def loss(x):
            return call(module, x, number).astype(mx.float32).sum()

        return call(module, x, number), mx.grad(loss)(x)

    with zmlx.prefer("zmlx"):
        ours, theirs = outcome(nn), outcome(mnn)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b, equal_nan=True)


def test_dropout_by_an_array_is_left_to_mlx():
    x = mx.ones((64, 64))
    mx.random.seed(3)
    with zmlx.prefer("zmlx"):
        ours = nn.Dropout(mx.array(0.5))(x)
    mx.random.seed(3)
    assert mx.array_equal(ours, mnn.Dropout(mx.array(0.5))(x))


@pytest.mark.parametrize(
    ("name", "numbers"), [("silu", (3.0,)), ("elu", (0.5, 0.2)), ("gelu", (1,))]
)
def test_a_number_too_many_is_an_error_as_in_mlx(name, numbers):
    with pytest.raises(TypeError, match="positional argument"):
        getattr(nn, name)(mx.ones((2, 6)), *numbers)


@pytest.mark.parametrize("dtype", [mx.int32, mx.float64])
@pytest.mark.parametrize("layer", ["RMSNorm", "LayerNorm", "GroupNorm"])
def test_a_parameter_of_another_dtype_is_left_to_mlx(layer, dtype):
    sizes = (2, 16) if layer == "GroupNorm" else (16,)
    x = mx.random.normal((3, 16), key=mx.random.key(0))
    ours, theirs = getattr(nn, layer)(*sizes), getattr(mnn, layer)(*sizes)
    for m in (ours, theirs):
        m.weight = mx.ones((16,), dtype)
    assert mx.array_equal(ours(x), theirs(x))


TARGETS = mx.zeros((2, 3, 4), mx.int32)
OTHERS = [mx.int32, mx.bool_, mx.float64]
GIVEN = {"traditional": False, "base": None, "scale": 1.0, "offset": 1}
HEADS = (2, 3, 4, 16)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (
            lambda x, a: nn.functional.add_rms_norm(x, a, None, 1e-5)[0],
            lambda x, a: mx.fast.rms_norm(x + a, None, 1e-5),
            HEADS,
        ),
        (
            lambda x, a: nn.functional.add_layer_norm(x, a, None, None, 1e-5)[0],
            lambda x, a: mx.fast.layer_norm(x + a, None, None, 1e-5),
            HEADS,
        ),
        (nn.functional.gated["swiglu"], lambda x, a: mnn.silu(x) * a, HEADS),
        (
            lambda x, a: nn.functional.rope(x, 16, freqs=a, **GIVEN),
            lambda x, a: mx.fast.rope(x, 16, freqs=a, **GIVEN),
            (8,),
        ),
        (
            lambda x, a: nn.losses.linear_cross_entropy(x, a, TARGETS),
            lambda x, a: mnn.losses.cross_entropy(x @ a.T, TARGETS),
            (7, 16),
        ),
        (
            lambda x, a: nn.losses.linear_cross_entropy(x, x[0, 0], TARGETS, a),
            lambda x, a: mnn.losses.cross_entropy(x @ x[0, 0].T + a, TARGETS),
            (4,),
        ),
    ],
    ids=["add_rms_norm", "add_layer_norm", "swiglu", "rope", "weight", "bias"],
)
def test_an_argument_of_another_dtype_is_left_to_mlx(ours, theirs, shape, dtype):
    x = mx.random.normal(HEADS, key=mx.random.key(0))
    other = (mx.random.normal(shape, key=mx.random.key(1)) * 3 + 0.1).astype(dtype)
    with zmlx.prefer("zmlx"):
        got = ours(x, other)
    want = theirs(x, other)
    assert got.dtype == want.dtype
    assert mx.allclose(got, want, 1e-6, 1e-6, equal_nan=True)


def test_sinks_of_another_dtype_are_left_to_mlx():
    x, sinks = mx.random.normal(HEADS, key=mx.random.key(0)), mx.array([0, 1, 2])
    with zmlx.prefer("zmlx"):
        got = nn.functional.attention(x, x, x, scale=0.3, sinks=sinks)
    want = mx.fast.scaled_dot_product_attention(x, x, x, scale=0.3, sinks=sinks)
    assert mx.array_equal(got, want)


def test_more_dims_than_the_kernel_turns_are_left_to_mlx():
    x = mx.random.normal((1, 1, 2, 1 << 18))
    given = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 1}
    expected = mx.fast.rope(x, 1 << 18, **given)
    assert mx.array_equal(nn.functional.rope(x, 1 << 18, **given), expected).item()
