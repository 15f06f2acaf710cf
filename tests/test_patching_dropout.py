"""What is random or differs in training: replaced where it can be, and left alone elsewhere."""

import random

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest
from handwritten_modules import MLPWithUnit, Residual

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


DRAWS = {
    "MLX": lambda: mx.random.uniform().item(),
    "Python": random.random,
    "NumPy": np.random.random,
}


class Skipping(Residual):
    """A block that is skipped at times in training, by a number that is drawn."""

    draw = None

    def __call__(self, x):
        if self.training and DRAWS[self.draw]() < 1e-6:
            return x
        return super().__call__(x)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_block_that_is_skipped_at_times_is_left_alone(draw):
    model = Skipping(lambda: mnn.RMSNorm(24))
    model.draw = draw
    report = zmlx.patch(model)
    assert report.kinds() == {"norm": 2}
    assert ("", "its call draws random numbers") in [(s.path, s.why) for s in report.skipped]


class Norm(mnn.RMSNorm):
    """A norm that is skipped so."""

    draw = None

    def __call__(self, x):
        return x if self.training and DRAWS[self.draw]() < 1e-6 else super().__call__(x)


class Unit(mnn.Module):
    """An activation that goes by a number that is drawn in any mode."""

    draw = None

    def __call__(self, x):
        return x if DRAWS[self.draw]() < 1e-6 else mnn.silu(x)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_norm_and_an_activation_that_are_skipped_at_times_are_left_alone(draw):
    model = mnn.Sequential(Norm(24), Unit())
    model.layers[0].draw = model.layers[1].draw = draw
    report = zmlx.patch(model)
    assert report.kinds() == {}
    assert {s.why for s in report.skipped} == {"its call draws random numbers"}


#: Generators that a module has itself, or a function that draws from one.
GENERATORS = {
    "Python": lambda: random.Random(0),
    "NumPy": lambda: np.random.default_rng(0),
    "old NumPy": lambda: np.random.RandomState(0),
    "system": random.SystemRandom,
}


class Drawing(Residual):
    """A block that is skipped by a number from a generator of its own."""

    def __call__(self, x):
        if self.training and self.random() < 1e-6:
            return x
        return super().__call__(x)

    def random(self):
        return self.draw() if hasattr(self, "draw") else self.generator.random_sample()


@pytest.mark.parametrize("bound", [False, True], ids=["generator", "its method"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_block_that_draws_from_a_generator_of_its_own_is_left_alone(kind, bound):
    generator = GENERATORS[kind]()
    model = Drawing(lambda: mnn.RMSNorm(24))
    if bound:
        model.draw = generator.random
    else:
        model.generator = generator
    before = [repr(generator.__getstate__())] if kind != "system" else []
    assert zmlx.patch(model).kinds() == {"norm": 2}
    assert not before or before == [repr(generator.__getstate__())]


def test_random_numbers_go_on_where_they_were():
    def drawn():
        return [mx.random.uniform().item(), random.random(), np.random.random()]

    model = mnn.Sequential(*(Skipping(lambda: mnn.RMSNorm(24)) for _ in DRAWS))
    for layer, draw in zip(model.layers, DRAWS, strict=True):
        layer.draw = draw
    found = []
    for patched in (False, True):
        for seed in (mx.random.seed, random.seed, np.random.seed):
            seed(7)
        if patched:
            zmlx.patch(model)
        found.append(drawn())
    assert found[0] == found[1]


def test_dropout_is_replaced_for_training_only():
    model = mnn.Sequential(mnn.Linear(8, 8), mnn.Dropout(0.25))
    assert not zmlx.patch(model).replaced
    assert zmlx.patch(model, mode="training").kinds() == {"dropout": 1}
    x = mx.ones((1000, 8))
    model.layers[1].train()
    y = np.array(model.layers[1](x))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02
    model.eval()
    assert mx.array_equal(model.layers[1](x), x)


class DroppedMLP(mnn.Module):
    """A gated network that drops what is between its projections."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)
        self.dropout = mnn.Dropout(0.5)

    def __call__(self, x):
        return self.down(self.dropout(mnn.silu(self.gate(x)) * self.up(x)))


class DroppedBlock(mnn.Module):
    """A block that drops what it adds."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = mnn.Linear(8, 8), mnn.Linear(8, 8)
        self.norm1, self.norm2 = mnn.RMSNorm(8), mnn.RMSNorm(8)
        self.dropout = mnn.Dropout(0.5)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("cls", [DroppedMLP, DroppedBlock])
def test_a_model_drops_in_training_in_whatever_mode_it_was_patched(cls, mode, training):
    model = cls()
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    model.eval()
    before = model(x)
    model.train(training)
    report = zmlx.patch(model, mode=mode)
    assert ("", "it computes another thing in training") in [
        (s.path, s.why) for s in report.skipped
    ]
    assert all(m.training is training for m in model.modules())
    model.eval()
    # The rounding of a few products of rows of 16.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)
    model.train()
    assert not mx.allclose(model(x), model(x), rtol=1e-2)


class MLPOfMode(mnn.Module):
    """Has another unit in training."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)

    def __call__(self, x):
        unit = mnn.gelu if self.training else mnn.silu
        return self.down(unit(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("cls", [MLPOfMode, MLPWithUnit])
@pytest.mark.parametrize("training", [False, True])
def test_what_differs_in_training_runs_as_it_is_written(cls, training):
    """Beside one of the same class in the other mode, whose plan is not its own."""
    model = mnn.Sequential(cls(), cls())
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    before = []
    for mode in (False, True):
        model.train(mode)
        before.append(model(x))
    model.layers[0].train(training)
    model.layers[1].train(not training)
    zmlx.patch(model)
    for mode in (False, True):
        model.train(mode)
        assert mx.array_equal(model(x), before[mode])


def test_patching_leaves_the_random_numbers_as_they_are():
    model = DroppedMLP()
    mx.random.seed((7 << 32) + 5)
    expected = mx.random.normal((4,))
    mx.random.seed((7 << 32) + 5)
    zmlx.patch(model, mode="training")
    assert mx.array_equal(mx.random.normal((4,)), expected)
