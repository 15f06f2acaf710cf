"""Which graphs are the same but for rounding, and which modules are found by that."""

import math

import mlx.core as mx
import mlx.nn as mnn
import pytest

import zmlx
from zmlx.patching.algebra import Algebra
from zmlx.patching.capture import Graphs
from zmlx.patching.plans import plan_of

X = [mx.zeros((3, 4)), mx.zeros((3, 4)), mx.zeros((3, 1)), mx.zeros((4,))]


def same(f, g, inputs=X):
    graphs = Graphs()
    return Algebra(graphs).same(*(graphs.capture(lambda *a, f=f: [f(*a)], inputs) for f in (f, g)))


SAME = {
    "order of a product": (lambda x, y, c, r: x * y * 2, lambda x, y, c, r: 2 * (y * x)),
    "numbers": (lambda x, y, c, r: x * 2 / 4, lambda x, y, c, r: 0.5 * x),
    "six digits": (lambda x, y, c, r: x / math.sqrt(2), lambda x, y, c, r: x * math.sqrt(0.5)),
    "order of a sum": (lambda x, y, c, r: x + (y + 1), lambda x, y, c, r: 1 + x + y),
    "differences": (lambda x, y, c, r: x - (y - 1), lambda x, y, c, r: 1 - y + x),
    "negative": (lambda x, y, c, r: -x * y, lambda x, y, c, r: x * (-1 * y)),
    "squares": (lambda x, y, c, r: mx.square(x), lambda x, y, c, r: x**2),
    "cubes": (lambda x, y, c, r: x**3, lambda x, y, c, r: x * mx.square(x)),
    "roots": (lambda x, y, c, r: x * mx.rsqrt(y), lambda x, y, c, r: x / mx.sqrt(y)),
    "a root as a power": (lambda x, y, c, r: x * y**-0.5, lambda x, y, c, r: x / mx.sqrt(y)),
    "over a quotient": (lambda x, y, c, r: x / (1 / y), lambda x, y, c, r: x * y),
    "sigmoid": (lambda x, y, c, r: x / (1 + mx.exp(-x)), lambda x, y, c, r: mx.sigmoid(x) * x),
    "columns": (
        lambda x, y, c, r: x * (2 * mx.rsqrt(c)),
        lambda x, y, c, r: 2 * (x / mx.sqrt(c)),
    ),
    "rows": (lambda x, y, c, r: (x + r) + y, lambda x, y, c, r: x + (y + r)),
    "inside another": (
        lambda x, y, c, r: mx.maximum(2 * x, y).sum(-1),
        lambda x, y, c, r: mx.maximum(x * 4 / 2, y).sum(-1),
    ),
}

OTHER = {
    "another number": (lambda x, y, c, r: 1.702 * x, lambda x, y, c, r: 1.7 * x),
    "the fifth digit": (lambda x, y, c, r: 0.044715 * x, lambda x, y, c, r: 0.044714 * x),
    "a quotient": (lambda x, y, c, r: x / y, lambda x, y, c, r: y / x),
    "a difference": (lambda x, y, c, r: x - y, lambda x, y, c, r: y - x),
    "a maximum, whose gradient at a tie goes by its order": (
        lambda x, y, c, r: mx.maximum(x, y),
        lambda x, y, c, r: mx.maximum(y, x),
    ),
    "a root": (lambda x, y, c, r: mx.sqrt(x), lambda x, y, c, r: mx.rsqrt(x)),
    "a power": (lambda x, y, c, r: x**3, lambda x, y, c, r: x**2),
    "a cast": (
        lambda x, y, c, r: x.astype(mx.float16).astype(mx.float32) * y,
        lambda x, y, c, r: x * y,
    ),
    "nothing times infinity": (lambda x, y, c, r: 0 * x + y, lambda x, y, c, r: y),
    "what cancels unless it is infinite": (lambda x, y, c, r: x - x + y, lambda x, y, c, r: y),
    "what cancels in part": (lambda x, y, c, r: 2 * x - x, lambda x, y, c, r: x),
    "a number that rounds": (lambda x, y, c, r: (x + 1e5) - 1e5, lambda x, y, c, r: x),
    "what overflows in between": (lambda x, y, c, r: x * 1e-30 * 1e30, lambda x, y, c, r: x),
    "what overflows step by step": (
        lambda x, y, c, r: x * 1e5 * 1e5 * 1e5 * 1e-5 * 1e-5 * 1e-5,
        lambda x, y, c, r: x,
    ),
    "a logarithm that overflows": (
        lambda x, y, c, r: mx.log1p(mx.exp(x)),
        lambda x, y, c, r: mx.logaddexp(x, mx.array(0.0)),
    ),
    "rows for columns": (
        lambda x, y, c, r: x + mx.broadcast_to(c.sum(), (4,)),
        lambda x, y, c, r: x + c,
    ),
    "a sum of what was broadcast": (
        lambda x, y, c, r: mx.broadcast_to(c, (3, 4)).sum(-1, keepdims=True),
        lambda x, y, c, r: c.sum(-1, keepdims=True),
    ),
    "a sum of a product of what was broadcast": (
        lambda x, y, c, r: (mx.broadcast_to(c, (3, 4)) * mx.broadcast_to(c, (3, 4))).sum(),
        lambda x, y, c, r: (c * c).sum(),
    ),
    "a shape": (lambda x, y, c, r: mx.broadcast_to(c, (3, 4)), lambda x, y, c, r: c),
    "an axis": (lambda x, y, c, r: x.sum(0), lambda x, y, c, r: x.sum(1)),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_graphs_are_the_same_but_for_rounding(pair):
    assert same(*pair)


@pytest.mark.parametrize("pair", OTHER.values(), ids=OTHER)
def test_graphs_are_not_the_same(pair):
    assert not same(*pair)


class Sinkhorn(mnn.Module):
    def __call__(self, x):
        x = mx.exp(x)
        for _ in range(30):
            x = x / x.sum(-1, keepdims=True)
            x = x / x.sum(-2, keepdims=True)
        return x


class Squares(mnn.Module):
    def __call__(self, x):
        for _ in range(30):
            x = (mx.tanh(x) + x).square()
        return x


class Deep(mnn.Module):
    def __call__(self, a, b):
        for _ in range(2000):
            a = mx.tanh(a) * 0.5
        return a * b


@pytest.mark.parametrize("cls", [Sinkhorn, Squares, Deep])
def test_graphs_that_grow_by_powers_or_are_deep_are_compared_all_the_same(cls):
    """As trees they would have 2³⁰ leaves."""
    assert zmlx.patch(mnn.Sequential(mnn.Linear(4, 4), cls())).kinds() == {}


#: Activations as models write them: the op, and its gated unit.
WRITTEN = {
    "x·σ": ("silu", "swiglu", lambda x: mx.sigmoid(x) * x),
    "x/(1+e⁻ˣ)": ("silu", "swiglu", lambda x: x / (1 + mx.exp(-x))),
    "½x(1+erf)": ("gelu", "geglu", lambda x: 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))),
    "x½(1+erf)": ("gelu", "geglu", lambda x: x * 0.5 * (1.0 + mx.erf(x * 0.7071067811865475))),
    "cubes": (
        "gelu_tanh",
        "geglu_tanh",
        lambda x: 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    ),
    "squares": (
        "gelu_tanh",
        "geglu_tanh",
        lambda x: 0.5 * x * (1 + mx.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    ),
    "x·σ(1.702x)": ("gelu_quick", None, lambda x: x * mx.sigmoid(1.702 * x)),
    "max²": ("relu2", None, lambda x: mx.square(mx.maximum(x, 0))),
    "max² of zero first": ("relu2", None, lambda x: mx.square(mx.maximum(0, x))),
    "where": ("leaky_relu", None, lambda x: mx.where(x >= 0, x, x * 0.01)),
    "eˣ-1": ("elu", None, lambda x: mx.where(x > 0, x, mx.exp(x) - 1)),
}


class Activation(mnn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def __call__(self, x):
        return self._function(x)


class Feed(mnn.Module):
    def __init__(self, function, gated):
        super().__init__()
        self.gate, self.down = mnn.Linear(16, 24), mnn.Linear(24, 16)
        if gated:
            self.up = mnn.Linear(16, 24)
        self._function = function

    def __call__(self, x):
        y = self._function(self.gate(x))
        return self.down(y * self.up(x) if "up" in self else y)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_activations_in_other_words_are_replaced(written, dtype):
    op, unit, function = written
    layers = [Activation(function), Feed(function, False)]
    layers += [Feed(function, True)] if unit else []
    model = mnn.Sequential(*layers)
    model.set_dtype(dtype)
    x = mx.random.normal((5, 16), key=mx.random.key(1)).astype(dtype)
    before = [layer(x) for layer in layers]
    with zmlx.prefer("zmlx"):
        report = zmlx.patch(model)
        assert [r.op for r in report.replaced] == [op, op, unit][: len(layers)]
        assert all((dtype, 2) in plan_of(layer).verified for layer in model.layers)
        eps = {mx.float32: 2.0**-21, mx.float16: 2.0**-8, mx.bfloat16: 2.0**-5}[dtype]
        for layer, y in zip(model.layers, before, strict=True):
            assert mx.allclose(layer(x), y, rtol=eps, atol=eps).item()


#: Activations whose gradient at 0 is not that of the kernel, which have its values.
OTHER_AT_ZERO = {
    "relu": lambda x: mx.maximum(0, x),
    "leaky_relu": lambda x: mx.maximum(x, 0.01 * x),
    "leaky_relu by where": lambda x: mx.where(x > 0, x, 0.01 * x),
    "celu": mnn.celu,
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("function", OTHER_AT_ZERO.values(), ids=OTHER_AT_ZERO)
def test_an_activation_with_another_gradient_at_zero_is_left_alone(function, mode):
    model = mnn.Sequential(Activation(function), Feed(function, False))
    assert zmlx.patch(model, mode=mode).kinds() == {}


@pytest.mark.parametrize("plain", [mnn.relu, mnn.leaky_relu, mnn.elu, mnn.selu, mnn.hardswish])
def test_the_gradient_at_zero_is_that_of_mlx(plain):
    model, x = mnn.Sequential(Activation(plain)), mx.zeros((2, 16))
    assert zmlx.patch(model, mode="training").kinds() == {"activation": 1}
    with zmlx.prefer("zmlx"):
        assert mx.allclose(
            mx.grad(lambda x: model(x).sum())(x), mx.grad(lambda x: plain(x).sum())(x)
        )
