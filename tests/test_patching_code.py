"""Attention in the code of modules: whatever name stands for it."""

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest
from mlx.core import fast
from mlx.core.fast import scaled_dot_product_attention as attend
from mlx.nn import softmax as soft
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention

import zmlx
from zmlx import kernels
from zmlx.patching.code import _FAST, _attention
from zmlx.patching.code import calls as calls_of

X = mx.random.normal((2, 5, 16), key=mx.random.key(1))


@pytest.fixture
def calls(monkeypatch):
    """Launches of zmlx's attention."""
    seen, run = [], kernels.scaled_dot_product_attention

    def counted(*arrays, **options):
        seen.append(options)
        return run(*arrays, **options)

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", counted)
    with zmlx.prefer("zmlx"):
        yield seen


class ByNames(mnn.Module):
    """All arguments by name."""

    def __call__(self, x):
        x = mx.fast.rms_norm(x=x, weight=None, eps=1e-5)
        x = mx.fast.layer_norm(x=x, weight=None, bias=None, eps=1e-5)
        return mx.fast.rope(a=x, dims=8, traditional=False, base=1e4, scale=1.0, offset=3)


def test_arrays_may_be_given_by_mlxs_names():
    model = mnn.Sequential(ByNames())
    before = model(X)
    assert zmlx.patch(model).kinds() == {"calls": 1}
    with zmlx.prefer("zmlx"):
        assert mx.allclose(model(X), before, rtol=1e-4, atol=1e-5).item()


def heads(x):
    return mx.unflatten(x, -1, (2, 8)).swapaxes(1, 2)


def helper(x, again=3):
    if again:
        return helper(x, again - 1)
    return attend(x, x, x, scale=0.3)


def of_a_helper(x):
    return helper(x)


class Attention(mnn.Module):
    def __init__(self):
        super().__init__()
        self.linear = mnn.Linear(16, 16)


class ByPath(Attention):
    def __call__(self, x):
        x = heads(self.linear(x))
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.3)


class ByModule(Attention):
    def __call__(self, x):
        x = heads(self.linear(x))
        return fast.scaled_dot_product_attention(x, x, x, scale=0.3, mask="causal")


class ByName(Attention):
    def __call__(self, x):
        x = heads(self.linear(x))
        return attend(x, x, x, scale=0.3)


class ByHelper(Attention):
    def __call__(self, x):
        return of_a_helper(heads(self.linear(x)))


class ByClosure(Attention):
    def __call__(self, x):
        x = heads(self.linear(x))
        return (lambda: mx.fast.scaled_dot_product_attention(x, x, x, scale=0.3))()


class ByMethod(Attention):
    @staticmethod
    def attend(x):
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.3)

    def __call__(self, x):
        return self.attend(heads(self.linear(x)))


class OnAStream(Attention):
    def __call__(self, x):
        x = heads(self.linear(x))
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.3, stream=mx.cpu)


class Lookalike(Attention):
    softmax = fast = "names of its own"

    def __call__(self, x):
        return mx.exp(self.linear(x)) if self.softmax and self.fast else x


@pytest.mark.parametrize("cls", [ByPath, ByModule, ByName, ByHelper, ByClosure, ByMethod])
def test_attention_is_found_by_what_its_name_stands_for(cls, calls):
    model = mnn.Sequential(cls())
    before = model(X)
    assert zmlx.patch(model).kinds() == {"attention": 1}
    assert mx.allclose(model(X), before, rtol=1e-4, atol=1e-5).item()
    assert len(calls) == 1
    zmlx.unpatch(model)
    assert mx.array_equal(model(X), before)
    assert len(calls) == 1


def normed(x):
    return mx.fast.rms_norm(x, None, 1e-6)


class Mixed(Attention):
    """Functions of MLX beside each other, each in a call that no plan is about."""

    def __call__(self, x):
        x = heads(normed(2 * self.linear(x)))
        x = mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1.0, offset=3)
        scores = mx.softmax(x @ x.swapaxes(-1, -2), axis=-1, precise=True)
        y = mx.fast.layer_norm(scores @ x, None, None, eps=1e-5)
        y = y + mnn.softmax(x) + soft(x, axis=-1)
        return y + mx.softmax(x, [-1]) + mx.softmax(x, axis=-1, stream=mx.cpu)


def test_other_functions_of_mlx_are_replaced_in_the_code_of_what_has_no_plan(monkeypatch):
    seen = []
    names = ("rms_norm", "rope", "softmax", "layer_norm")
    for name in names:
        run = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, run=run, name=name, **o: seen.append(name) or run(*a, **o)
        )
    model = mnn.Sequential(Mixed(), mnn.RMSNorm(8))
    before = model(X)
    with zmlx.prefer("zmlx"):
        assert zmlx.patch(model).kinds() == {"calls": 1, "norm": 1}
        seen.clear()
        assert mx.allclose(model(X), before, rtol=1e-4, atol=1e-5).item()
        assert seen == [*names, "softmax", "softmax", "rms_norm"]
    assert calls_of(Mixed).ops == {*names}
    zmlx.unpatch(model)
    assert zmlx.patch(model, exclude="calls").kinds() == {"norm": 1}


def test_a_norm_that_is_none_in_training_runs_its_code(monkeypatch):
    class Moody(mnn.Module):
        def __call__(self, x):
            return mx.fast.rms_norm(x, None, 1e-5) * (2 if self.training else 1)

    model = mnn.Sequential(Moody())
    x = mx.random.normal((3, 8))
    assert zmlx.patch(model).kinds() == {"calls": 1}
    for training in (False, True):
        model.train(training)
        expected = mx.fast.rms_norm(x, None, 1e-5) * (2 if training else 1)
        assert mx.allclose(model(x), expected, rtol=1e-5).item()


def test_what_names_a_stream_stays_with_it(calls):
    model = mnn.Sequential(OnAStream())
    before = model(X)
    zmlx.patch(model)
    assert mx.array_equal(model(X), before)
    assert not calls


def test_no_other_code_is_a_candidate():
    assert [calls_of(cls).methods for cls in (Lookalike, mnn.Linear, mnn.LSTM)] == [()] * 3
    assert calls_of(mnn.MultiHeadAttention).methods == ("__call__",)


FACTOR = 2.0


class Scaled(Attention):
    def __call__(self, x):
        return FACTOR * mx.softmax(self.linear(x), axis=-1)


def test_what_a_method_refers_to_is_looked_up_when_it_runs(monkeypatch):
    """All but MLX's functions is as it is at the time."""
    model = mnn.Sequential(Scaled())
    assert zmlx.patch(model).kinds() == {"calls": 1}
    before = model(X)
    monkeypatch.setitem(globals(), "FACTOR", 6.0)
    assert mx.allclose(model(X), 3 * before).item()
    monkeypatch.setattr(mx, "some_flag", 3, raising=False)
    ours = globals()["__zmlx_mx"]
    assert ours.some_flag == 3
    assert ours.fast.metal_kernel is mx.fast.metal_kernel
    assert ours.softmax is not mx.softmax


COUNT = 0


class Counting(Attention):
    def __call__(self, x):
        global COUNT
        COUNT += 1
        return mx.softmax(self.linear(x), axis=-1)


def test_code_may_assign_to_a_global_name():
    model = mnn.Sequential(Counting())
    assert zmlx.patch(model).kinds() == {"calls": 1}
    before = COUNT
    model(X)
    assert before + 1 == COUNT


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_transformer_of_mlx_trains_with_our_attention(dtype, calls):
    """In half precision as near the gradient in float32 as MLX comes."""
    mx.random.seed(3)
    model = mnn.Transformer(32, 4, 2, 2, 64, dropout=0.0)
    source, target = (mx.random.normal((2, n, 32), key=mx.random.key(n)) for n in (9, 7))
    mask = mnn.MultiHeadAttention.create_additive_causal_mask(7)

    def gradients(dtype):
        def loss(model):
            y = model(*(a.astype(dtype) for a in (source, target)), None, mask.astype(dtype), None)
            return (y.astype(mx.float32) * mx.random.normal(y.shape, key=mx.random.key(2))).sum()

        model.set_dtype(dtype)
        _, found = mnn.value_and_grad(model, loss)(model)
        return {name: np.array(a.astype(mx.float32)) for name, a in tree_flatten(found)}

    model.set_dtype(dtype)  # rounds the parameters
    exact, expected = gradients(mx.float32), gradients(dtype)
    assert zmlx.patch(model, mode="training").kinds()["attention"] == 6
    for name, got in gradients(dtype).items():
        off = max(np.abs(expected[name] - exact[name]).max(), 1e-4 * np.abs(exact[name]).max())
        assert np.abs(got - exact[name]).max() <= 3 * off + 1e-4, name
    assert calls


def test_masks_of_integers_are_added_as_in_mlx(calls):
    x = heads(X)
    mask = mx.array([[0, -5, 0, -1000, 1]])
    expected = mx.fast.scaled_dot_product_attention(x, x, x, scale=0.3, mask=mask)
    got = zmlx.nn.functional.attention(x, x, x, scale=0.3, mask=mask)
    assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5).item()
    assert calls


def counted(x):
    counted.count += 1
    return mx.softmax(x, axis=-1)


counted.count = 0


def weighed(x):
    return mx.softmax(x, axis=-1)


WEIGHTS = {weighed: 2.0}


class Named(Attention):
    """Refers to functions as objects, too, and to attributes of its methods."""

    def attend(self, x):
        return mx.softmax(x, axis=-1) * self.attend.factor

    attend.factor = 3.0

    def __call__(self, x):
        x = self.linear(x)
        return self.attend(x) + counted(x) + WEIGHTS[weighed] * weighed(x)


class Other:
    factor = 5.0

    def times(self, x):
        return self.factor * mx.softmax(x, axis=-1)


class Borrowing(Attention):
    times = Other().times

    def __call__(self, x):
        return self.times(self.linear(x)) + mx.softmax(x, axis=-1)


class Initialised(Attention):
    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale * mx.softmax(mx.ones((16,)), axis=-1)

    def __call__(self, x):
        return self.scale * mx.softmax(self.linear(x), axis=-1)


@pytest.mark.parametrize("cls", [Named, Borrowing, Initialised])
def test_code_that_is_more_than_calls_runs_as_it_did(cls):
    model = mnn.Sequential(cls())
    before = model(X)
    with zmlx.prefer("zmlx"):
        assert zmlx.patch(model).kinds() == {"calls": 1}
        assert mx.allclose(model(X), before, rtol=1e-5, atol=1e-6).item()
    assert type(type(model.layers[0])()) is cls


class Raises:
    def __get__(self, instance, owner):
        raise RuntimeError("not now")

    def __getattr__(self, name):
        raise RuntimeError(name)


class Unfriendly(Attention):
    one, two = Raises(), [Raises()]

    def __call__(self, x):
        return self.linear(x)


def test_attributes_that_raise_are_not_looked_at():
    assert zmlx.patch(mnn.Sequential(Unfriendly())).kinds() == {}


def test_a_function_or_method_that_is_another_later_is_called(monkeypatch):
    model = mnn.Sequential(ByHelper(), Scaled())
    zmlx.patch(model)
    monkeypatch.setitem(globals(), "of_a_helper", lambda x: x - x)
    assert not model.layers[0](X).any().item()
    monkeypatch.setattr(Scaled, "__call__", lambda self, x: x + 1)
    assert mx.array_equal(model.layers[1](X), X + 1)


def test_what_takes_the_place_of_mlxs_function_is_called(monkeypatch):
    model = mnn.Sequential(Scaled())
    zmlx.patch(model)
    monkeypatch.setattr(mx, "softmax", lambda x, axis: x - x)
    assert not model(X).any().item()


ODD = {
    "eps of an array": lambda f, x: f.rms_norm(x, None, mx.array(1e-5)),
    "negative eps": lambda f, x: f.rms_norm(2 * x, None, -1e-3),
    "weight of integers": lambda f, x: f.rms_norm(x, mx.ones(16, mx.int32), 1e-5),
    "bias alone": lambda f, x: f.layer_norm(x.astype(mx.float16), None, mx.zeros(16), 1e-5),
    "small offset": lambda f, x: f.rope(
        x, 16, traditional=False, base=1e4, scale=1.0, offset=mx.array(3, mx.uint8)
    ),
    "no keys": lambda f, x: f.scaled_dot_product_attention(
        x[None], x[None, :, :0], x[None, :, :0], scale=1.0
    ),
    "scale of an array": lambda f, x: f.scaled_dot_product_attention(
        x[None], x[None], x[None], scale=mx.array(0.5)
    ),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_arguments_that_only_mlx_takes_go_to_it(odd):
    expected = odd(mx.fast, X)
    with zmlx.prefer("zmlx"):
        got = odd(_FAST, X)
    assert got.dtype == expected.dtype
    assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True).item()


@pytest.mark.parametrize(("keys", "scale"), [(5, mx.array(0.5)), (0, 1.0)], ids=str)
def test_what_only_mlx_takes_goes_to_mlx_lms_attention(keys, scale):
    given = X[None], X[None, :, :keys], X[None, :, :keys], None, scale, None
    expected = scaled_dot_product_attention(*given)
    with zmlx.prefer("zmlx"):
        got = _attention(*given)
    assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True).item()


@pytest.mark.parametrize("axis", [[-1], (0, 2), True])
def test_axes_that_only_mlx_takes_go_to_it(axis):
    class Module(Attention):
        def __call__(self, x):
            return mnn.softmax(x, axis) + mx.softmax(x, axis)

    model = mnn.Sequential(Module())
    expected = 2 * mx.softmax(X, axis)
    with zmlx.prefer("zmlx"):
        assert zmlx.patch(model).kinds() == {"calls": 1}
        assert mx.allclose(model(X), expected, rtol=1e-5).item()
