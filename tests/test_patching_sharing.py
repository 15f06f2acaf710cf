"""Modules, lists and dicts in several places stay one, patched and after they were unpatched."""

from itertools import permutations

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed

import zmlx
from zmlx.patching.plans import plan_of

pytestmark = pytest.mark.usefixtures("kernels_run")


class Holder(mnn.Module):
    """Runs the layers of a list or dict, which may be another's, too."""

    def __init__(self, layers):
        super().__init__()
        self.into, self.layers = mnn.Linear(24, 24), layers

    def __call__(self, x):
        x = self.into(x)
        for layer in self.layers.values() if isinstance(self.layers, dict) else self.layers:
            for one in layer if isinstance(layer, list) else [layer]:
                x = one(x)
        return x


class Bare(mnn.Module):
    """Has no arrays, and a list under two names."""

    def __init__(self, layers):
        super().__init__()
        self.first, self.second = layers, layers

    def __call__(self, x):
        for layer in [*self.first, *self.second]:
            x = layer(x)
        return x


def structure(value, seen=None):
    """All that is below, by identity."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, mnn.Module):
        attributes = {k: id(v) for k, v in vars(value).items()}
        return type(value), id(value), attributes, structure(dict(value), seen)[1]
    if isinstance(value, dict):
        return id(value), [(k, structure(v, seen)) for k, v in value.items()]
    if isinstance(value, list):
        return id(value), [structure(v, seen) for v in value]
    return id(value)


def lists():
    act = mnn.GELU()
    return [
        [act, mnn.RMSNorm(24), mnn.SiLU()],
        {"a": act, "b": mnn.RMSNorm(24)},
        [[act, mnn.SiLU()], [act], mnn.LayerNorm(24)],
        [Bare([act]), Bare([mnn.SiLU(), act]), act],
    ]


X = mx.random.normal((2, 3, 24), key=mx.random.key(1))


@pytest.mark.parametrize("which", range(4))
def test_a_list_of_two_modules_is_one_list(which):
    layers = lists()[which]
    model = mnn.Sequential(Holder(layers), mnn.Linear(24, 24), Holder(layers))
    before, was = model(X), structure(model)
    assert zmlx.patch(model).replaced
    first, _, second = model.layers
    assert first.layers is second.layers is layers
    assert all(
        plan_of(m) is not None for m in model.modules() if type(m).__name__ in ("GELU", "RMSNorm")
    )
    assert mx.allclose(model(X), before, rtol=1e-4, atol=1e-5)
    assert all(not r.new for r in zmlx.patch(model).replaced)
    zmlx.unpatch(model)
    assert structure(model) == was


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("which", range(4))
def test_parts_are_patched_and_unpatched_in_any_order(which, order):
    layers = lists()[which]
    first, second = Holder(layers), Holder(layers)
    model = mnn.Sequential(first, mnn.Linear(24, 24), second)
    was = structure(model)
    parts = [first, second, model]
    for i, options in zip(order, ({"only": "activation"}, {"only": "norm"}, {}), strict=True):
        try:
            zmlx.patch(parts[i], **options)
        except ValueError as error:  # it has none of these
            raise AssertionError from error
    for i in reversed(order):
        zmlx.unpatch(parts[i])
    assert structure(model) == was


def test_a_container_that_was_patched_itself_is_unpatched_with_its_model():
    bare = Bare([mnn.GELU(), mnn.Dropout(0.5)])
    model = mnn.Sequential(mnn.Linear(24, 24), bare)
    was = structure(model)
    zmlx.patch(bare)
    zmlx.patch(model, mode="training")
    assert zmlx.unpatch(model) > 0
    assert structure(model) == was


@pytest.mark.parametrize("part", [0, 2])
def test_what_changes_in_one_place_changes_in_all(part):
    act = mnn.LeakyReLU()
    bare = Bare([act])
    model = mnn.Sequential(Feed(act), bare, Feed(act), bare)
    zmlx.patch(model)
    assert model.layers[1] is model.layers[3]
    assert model.layers[1].first is model.layers[1].second
    model.layers[part].act._negative_slope = 0.9
    model.layers[1].second.append(mnn.Tanh())
    after = model(X)
    zmlx.unpatch(model)
    assert mx.allclose(after, model(X), rtol=1e-4, atol=1e-5)
    assert model.layers[0].act is act
    assert act._negative_slope == 0.9
    assert len(bare.first) == 2


def test_a_head_below_a_model_goes_with_it():
    inner = mnn.Sequential(mnn.Embedding(64, 24), mnn.Linear(24, 64))
    model = Feed(inner)
    was = structure(model)
    assert "loss" in zmlx.patch(inner, mode="training").kinds()
    zmlx.unpatch(model)
    assert structure(model) == was
