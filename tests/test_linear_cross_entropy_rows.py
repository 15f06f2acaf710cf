"""linear_cross_entropy whose gradient is computed beside the loss, over blocks of rows."""

import sys

import mlx.core as mx
import numpy as np
import pytest
from test_linear_cross_entropy import XP, problem

from zmlx.kernels import cross_entropy, linear_cross_entropy
from zmlx.kernels.linear_cross_entropy import linear_cross_entropy_reference
from zmlx.testing import assert_matches, to_numpy

#: The walk is the CPU's.
pytestmark = pytest.mark.on_cpu

ROWS = sys.modules["zmlx.kernels.linear_cross_entropy_rows"]


@pytest.fixture
def walks(monkeypatch):
    """The calls that walk over rows, of which 16 are enough here, in chunks of 10 classes."""
    monkeypatch.setattr(ROWS, "_FEWEST", 1)
    monkeypatch.setattr(ROWS, "WIDTH", 10)
    made = []
    walk = ROWS.Rows.walk

    def counted(self, *inputs):
        made.append(self)
        return walk(self, *inputs)

    monkeypatch.setattr(ROWS.Rows, "walk", counted)
    return made


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"ignore_index": 3},
    {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0},
    {"ignore_index": 3, "label_smoothing": 1.0, "reduction": "sum", "softcap": 30.0},
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_match_float64(options, weighted, biased, compiled, walks):
    """37 rows are blocks of 2 and one of 1, and 23 classes are three chunks."""
    from autograd import make_vjp
    from autograd.builtins import tuple as traced_tuple

    hidden, weight, targets, bias, weights = problem(1, 37, 5, 23)
    targets[0] = 3
    given = [hidden, weight] + [bias] * biased
    class_weights = weights if weighted else None

    def ours(h, w, b=None):
        return [2.5 * linear_cross_entropy(h, w, targets, b, class_weights, **options)]

    def reference(some):
        w = to_numpy(weights) if weighted else None
        b = some[2] if biased else None
        return linear_cross_entropy_reference(
            some[0], some[1], to_numpy(targets), b, w, xp=XP, **options
        )

    def step(*arrays):
        return mx.vjp(ours, list(arrays), [mx.array(1.0)])

    got, gradients = (mx.compile(step) if compiled else step)(*given)
    assert len(walks) == 1
    vjp, want = make_vjp(reference, 0)(traced_tuple([to_numpy(x) for x in given]))
    # Without the float32 run of the reference as a base.
    assert_matches(got[0], 2.5 * want, rounding=16)
    for a, b in zip(gradients, vjp(2.5), strict=True):
        assert_matches(a, b, rounding=32)


def test_only_a_gradient_of_the_weight_is_worth_the_walk(walks):
    hidden, weight, targets, bias, _ = problem(2, 40, 5, 23)

    def loss(h, w, b=None, **options):
        result = linear_cross_entropy(h, w, targets, b, **options)
        return result[0] + result[1].sum() if options.get("return_lse") else result.sum()

    mx.eval(loss(hidden, weight))
    mx.eval(mx.compile(loss)(hidden, weight))
    mx.eval(mx.grad(lambda h: loss(h, weight))(hidden))
    for options in ({"reduction": "none"}, {"return_lse": True}, {"chunk": 8}):
        mx.eval(mx.grad(loss, (0, 1))(hidden, weight, **options))
    half = [x.astype(mx.bfloat16) for x in (hidden, weight)]
    mx.eval(mx.grad(loss, (0, 1))(*half))
    assert not walks
    mx.eval(mx.grad(lambda w: loss(hidden, w, bias))(weight))
    assert [walk.wanted for walk in walks] == [(False, True, False)]
    mx.eval(mx.grad(loss, (0, 1, 2))(hidden, weight, bias))
    assert walks[-1].wanted == (True, True, True)


def test_gradients_keep_their_digits_far_from_0(walks):
    hidden, weight, targets, bias, _ = problem(5, 33, 4, 25)
    hidden, weight = mx.round(8 * hidden) / 8, mx.round(8 * weight) / 8  # exact logits
    near, far = (
        mx.grad(lambda w, b: linear_cross_entropy(hidden, w, targets, b), (0, 1))(weight, b)
        for b in (mx.zeros_like(bias), mx.full(bias.shape, 30000.0))
    )
    assert walks
    for got, want in zip(far, near, strict=True):
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=5e-6, atol=5e-7)


def test_few_rows_are_not_walked():
    assert ROWS.height(4095) == 0
    assert ROWS.height(4096) == 256
    assert ROWS.height(16400) == 1025


def test_a_bad_target_raises_at_evaluation(walks):
    hidden, weight, targets, _, _ = problem(3, 40, 5, 23)
    targets[31] = 23
    gradient = mx.grad(lambda w: linear_cross_entropy(hidden, w, targets))(weight)
    with pytest.raises(RuntimeError, match=r"'targets' must .* but got 23\."):
        mx.eval(gradient)


def _pair(seed=4):
    hidden, weight, targets, bias, _ = problem(seed, 40, 5, 23)

    def ours(h, w, b):
        return linear_cross_entropy(h, w, targets, b, label_smoothing=0.1)

    def plain(h, w, b):
        return cross_entropy(h @ w.T + b, targets, label_smoothing=0.1)

    return (hidden, weight, bias), ours, plain


def _close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-5)


ALL = (0, 1, 2)


def test_a_gradient_of_the_gradient(walks):
    arrays, ours, plain = _pair()

    def of(loss):
        def length(*some):
            return sum(mx.square(x).sum() for x in mx.grad(loss, ALL)(*some))

        return mx.grad(length, ALL)(*arrays)

    _close(of(ours), of(plain))
    assert walks


def test_a_gradient_along_a_direction(walks):
    arrays, ours, plain = _pair()
    rng = np.random.default_rng(0)
    along = [mx.array(rng.standard_normal(x.shape).astype(np.float32)) for x in arrays]

    def of(loss):
        return [
            *mx.jvp(lambda *some: [loss(*some)], list(arrays), along)[1],
            *mx.jvp(lambda *some: list(mx.grad(loss, ALL)(*some)), list(arrays), along)[1],
        ]

    _close(of(ours), of(plain))
    assert walks


def test_a_gradient_of_every_one_of_many(walks):
    arrays, ours, plain = _pair()
    many = [mx.stack([x, 2 * x, -x]) for x in arrays]

    def of(loss):
        return mx.vmap(mx.grad(loss, ALL))(*many)

    _close(of(ours), of(plain))
    assert walks


def test_a_gradient_of_a_checkpoint(walks):
    arrays, ours, plain = _pair()
    _close(mx.grad(mx.checkpoint(ours), ALL)(*arrays), mx.grad(plain, ALL)(*arrays))


@pytest.mark.on_cpu("alone")
def test_a_walk_holds_a_sixteenth_of_the_logits(monkeypatch):
    monkeypatch.setattr(ROWS, "_FEWEST", 64)
    hidden, weight, targets, _, _ = problem(5, 1024, 256, 8192)
    mx.eval(hidden, weight, targets)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step = mx.value_and_grad(lambda h, w: linear_cross_entropy(h, w, targets), (0, 1))
    mx.eval(step(hidden, weight))
    more = mx.get_peak_memory() - before - hidden.nbytes - weight.nbytes
    # The block and the products of some chunks, but no second copy of a gradient.
    assert more < 1024 * 8192 * 4 / 16 + weight.nbytes
