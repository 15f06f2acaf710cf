"""kl_div and js_div: PyTorch's conventions, zeros, and the ends of beta."""

import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import zmlx
from zmlx import metal
from zmlx.kernels import js_div, kl_div
from zmlx.kernels.divergences import js_div_reference, kl_div_reference

RNG = np.random.default_rng(0)
REDUCTIONS = ("none", "mean", "sum", "batchmean")


def log_probabilities(*shape):
    x = RNG.standard_normal(shape)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl(x, t):
    return np.where(t > 0, t * (np.log(np.where(t > 0, t, 1.0)) - x), 0.0)


def array(x):
    return mx.array(np.asarray(x, dtype=np.float32))


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_kl_div_reduces_as_pytorch(reduction, log_target):
    x, log_t = log_probabilities(4, 3, 6), log_probabilities(4, 3, 6)
    loss = kl(x, np.exp(log_t))
    want = {"none": loss, "mean": loss.mean(), "sum": loss.sum(), "batchmean": loss.sum() / 4}
    target = log_t if log_target else np.exp(log_t)
    got = kl_div(array(x), array(target), reduction=reduction, log_target=log_target)
    np.testing.assert_allclose(np.array(got), want[reduction], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_kl_div_equals_torch_in_both_gradients(reduction, log_target):
    torch = pytest.importorskip("torch")
    x, t = log_probabilities(5, 7), log_probabilities(5, 7)
    t = t if log_target else np.exp(t)
    tensors = [torch.tensor(v.astype(np.float32), requires_grad=True) for v in (x, t)]
    torch.nn.functional.kl_div(
        *tensors, reduction=reduction, log_target=log_target
    ).sum().backward()

    def loss(a, b):
        return kl_div(a, b, reduction=reduction, log_target=log_target).sum()

    for got, want in zip(mx.grad(loss, (0, 1))(array(x), array(t)), tensors, strict=True):
        np.testing.assert_allclose(np.array(got), want.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", [kl_div, js_div])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_of_one_element_without_axes(function, reduction):
    x, t = mx.array(-0.7), mx.array(0.3)
    got = function(x, t, reduction=reduction)
    assert got.shape == ()
    assert got.item() == function(x[None], t[None], reduction="sum").item()
    gradients = mx.grad(lambda x, t: function(x, t, reduction=reduction), (0, 1))(x, t)
    wants = mx.grad(lambda x, t: function(x[None], t[None], reduction="sum"), (0, 1))(x, t)
    assert [g.item() for g in gradients] == [w.item() for w in wants]


def test_kl_div_relates_to_mlx_as_documented():
    x, t = array(log_probabilities(6, 9)), array(log_probabilities(6, 9))
    per_row = nn.losses.kl_div_loss(x, t)
    got = kl_div(x, t, log_target=True, reduction="none").sum(axis=-1)
    np.testing.assert_allclose(np.array(got), np.array(per_row), rtol=1e-5, atol=1e-6)
    mean = kl_div(x, t, log_target=True, reduction="batchmean").item()
    assert mean == pytest.approx(per_row.mean().item(), rel=1e-5)


@pytest.mark.parametrize("function", [kl_div, js_div])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_probability_of_0_counts_nothing(function, reduction):
    x = array([[-1.0, -float("inf"), -2.0]])
    t = array([[0.0, 0.0, 0.7]])
    some = function(x, t, reduction=reduction).sum().item()
    assert np.isfinite(some)
    gradients = mx.grad(lambda a, b: function(a, b, reduction=reduction).sum(), (0, 1))(x, t)
    assert all(np.isfinite(np.array(g)).all() for g in gradients)
    assert gradients[1][0, 0].item() == 0
    if function is kl_div:
        assert some == pytest.approx(0.7 * (np.log(0.7) + 2.0), rel=1e-5)


@pytest.mark.parametrize("function", [kl_div, js_div])
@pytest.mark.parametrize("log_target", [False, True])
def test_a_probability_of_0_counts_nothing_under_transforms(function, log_target):
    x = array([[-1.0, -float("inf"), -2.0, -1.0]])
    t = array([[0.3, 0.0, 0.0, 0.7]])
    t = mx.log(t) if log_target else t

    def loss(x, t):
        return function(x, t, reduction="none", log_target=log_target)

    def total(x, t):
        return loss(x, t).sum()

    want = loss(x, t)
    wants = mx.grad(total, (0, 1))(x, t)
    assert want[0, 1].item() == 0
    assert wants[1][0, 1:3].tolist() == [0, 0]
    ones = [mx.ones_like(x), mx.ones_like(t)]
    under = [
        (mx.vmap(loss)(x, t), want),
        (mx.jvp(loss, [x, t], ones)[1][0], wants[0] + wants[1]),
        *zip(mx.grad(lambda x, t: mx.vmap(loss)(x, t).sum(), (0, 1))(x, t), wants, strict=True),
    ]
    for got, right in under:
        np.testing.assert_allclose(np.array(got), np.array(right), rtol=1e-5, atol=1e-6)
    again = mx.grad(lambda x, t: sum(g.sum() for g in mx.grad(total, (0, 1))(x, t)), (0, 1))(x, t)
    assert all(np.isfinite(np.array(g)).all() for g in again)


def test_a_mean_over_more_elements_than_float32_counts_one_by_one():
    """A total of ones in float32 ends at 2^24."""
    x, t = (mx.full((1 << 12, 1 << 13), value, dtype=mx.float16) for value in (-1.0, 0.5))
    want = 0.5 * (np.log(0.5) + 1.0)
    assert kl_div(x, t).item() == pytest.approx(want, rel=2e-3)


@pytest.mark.parametrize("reduction", ["mean", "batchmean"])
@pytest.mark.parametrize("function", [kl_div, js_div])
def test_a_shapeless_compile_divides_by_the_new_size(function, reduction):
    def loss(x, t):
        return function(x, t, reduction=reduction)

    compiled = mx.compile(loss, shapeless=True)
    for shape in ((2, 6), (5, 9), (1, 4)):
        x, t = array(log_probabilities(*shape)), array(np.exp(log_probabilities(*shape)))
        assert compiled(x, t).item() == pytest.approx(loss(x, t).item(), rel=1e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_js_div_is_two_divergences_from_the_mixture(beta):
    q, p = np.exp(log_probabilities(4, 8)), np.exp(log_probabilities(4, 8))
    m = beta * p + (1 - beta) * q
    want = beta * kl(np.log(m), p) + (1 - beta) * kl(np.log(m), q)
    for target, log_target in ((p, False), (np.log(p), True)):
        got = js_div(array(np.log(q)), array(target), beta=beta, reduction="none",
                     log_target=log_target)  # fmt: skip
        np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("beta, p", [(0.5, 1e-45), (0.1, 1e-45), (0.01, 1e-44)])
def test_a_probability_whose_share_of_the_mixture_rounds_to_0(beta, p, target):
    with zmlx.target(target):
        slope = mx.grad(lambda t: js_div(mx.array([-132.0]), t, beta=beta, reduction="sum"))
        got = slope(mx.array(np.float32([p]))).item()
    assert got == pytest.approx(-beta * np.log(beta), rel=1e-5)


def test_js_div_is_symmetric_and_at_most_log_2():
    x, y = array(log_probabilities(5, 9)), array(log_probabilities(5, 9))
    forth = js_div(x, y, log_target=True, reduction="batchmean").item()
    assert forth == pytest.approx(js_div(y, x, log_target=True, reduction="batchmean").item(), 1e-5)
    apart = js_div(array([[0.0, -200.0]]), array([[0.0, 1.0]]), reduction="sum").item()
    assert apart == pytest.approx(np.log(2), rel=1e-6)


def test_js_div_approaches_kl_div_at_its_ends():
    x, t = array(log_probabilities(3, 6)), array(np.exp(log_probabilities(3, 6)))
    near = js_div(x, t, beta=1e-3, reduction="sum").item() / 1e-3
    assert near == pytest.approx(kl_div(x, t, reduction="sum").item(), rel=1e-2)


@pytest.mark.parametrize("beta", [0.0, 1.0, -1.0, float("nan")])
def test_a_beta_out_of_range_is_refused(beta):
    x = array(log_probabilities(3, 6))
    with pytest.raises(ValueError, match=r"\[js_div\] 'beta' must be between 0 and 1"):
        js_div(x, x, beta=beta)


@pytest.mark.parametrize("function", [kl_div, js_div])
def test_an_unknown_reduction_is_refused(function):
    x = array(log_probabilities(3, 6))
    with pytest.raises(ValueError, match=r"'reduction' must be one of none, mean, sum, batchmean"):
        function(x, x, reduction="average")


@pytest.mark.parametrize("function", [kl_div, js_div])
def test_a_mean_over_nothing_is_nan(function):
    assert np.isnan(function(mx.zeros((0, 4)), mx.zeros((0, 4))).item())


def test_a_new_beta_compiles_nothing():
    x, t = array(log_probabilities(3, 6)), array(np.exp(log_probabilities(3, 6)))
    mx.eval(mx.grad(lambda a: js_div(a, t, beta=0.3))(x))
    before = metal.statistics()["compiles"]
    mx.eval(mx.grad(lambda a: js_div(a, t, beta=0.6))(x))
    assert metal.statistics()["compiles"] == before


@pytest.mark.parametrize("function", [kl_div, js_div])
def test_a_repeated_call_is_right_for_other_values_and_options(function):
    reference = kl_div_reference if function is kl_div else js_div_reference
    options = [{}, {"log_target": True}, {"reduction": "sum"}, {"reduction": "batchmean"}]
    options += [{"beta": 0.1}, {"beta": 0.75}] if function is js_div else []
    for seed in range(3):
        keys = mx.random.split(mx.random.key(seed))
        x, t = (mx.softmax(mx.random.normal((5, 7), key=k), axis=-1) for k in keys)
        x = mx.log(x)
        losses = [function(x, t, **some) for some in options]
        for loss, some in zip(losses, options, strict=True):
            np.testing.assert_allclose(loss.item(), reference(x, t, **some).item(), rtol=1e-5)
        assert len({loss.item() for loss in losses}) == len(losses)


@pytest.mark.parametrize("function", [kl_div, js_div])
def test_a_bad_call_raises_after_a_good_one(function):
    x, name = mx.zeros((2, 3)), function.__name__
    for _ in range(2):
        function(x, x, log_target=True)
        with pytest.raises(TypeError, match=rf"\[{name}\] 'log_target' must be"):
            function(x, x, log_target=1)
        with pytest.raises(ValueError, match=rf"\[{name}\] 'target' must have shape"):
            function(x, x[:1], log_target=True)
        with pytest.raises(TypeError, match=rf"\[{name}\] 'target' must be an mx.array"):
            function(x, [0.0], log_target=True)


def test_a_bad_beta_raises_after_a_good_one():
    x = mx.zeros((2, 3))
    for _ in range(2):
        js_div(x, x, beta=0.5)
        for beta in (0.0, 1.0, 1, True, "0.5"):
            with pytest.raises((TypeError, ValueError), match=r"\[js_div\] 'beta' must be"):
                js_div(x, x, beta=beta)


@pytest.mark.parametrize("function", [kl_div, js_div])
def test_no_array_of_a_call_is_kept(function):
    x, t = mx.zeros((3, 8)), mx.ones((3, 8))
    kept = [weakref.ref(x), weakref.ref(t)]
    mx.eval(function(x, t), function(x, t, reduction="none"))
    del x, t
    assert [y() for y in kept] == [None, None]
