"""Modules written by hand: what looks like a layer is replaced, and what only looks so is not."""

import copy
import random

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention

import zmlx

EPS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def kernels_run():
    """Everything that is patched runs its kernel, whatever was measured here."""
    with zmlx.prefer("zmlx"):
        yield


class Odd(mnn.Module):
    """Looks like a norm, and is none."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight, self.eps) * 1.5


class Moody(mnn.Module):
    """Computes another thing for another dtype."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        y = mx.fast.rms_norm(x, self.weight, self.eps)
        return y * 2 if x.dtype == mx.float16 else y


class Branching(mnn.Module):
    """Needs a value, which a trace does not have."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        if x.max().item() > 1e3:
            return x
        return mx.fast.rms_norm(x, self.weight, self.eps)


class Stopped(mnn.Module):
    """Has the graph of a norm, but not its gradient."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(mx.stop_gradient(x), self.weight, self.eps)


@pytest.mark.parametrize("cls", [Odd, Branching])
def test_what_only_looks_like_a_norm_is_skipped_with_a_reason(cls):
    model = mnn.Sequential(cls(8), mnn.RMSNorm(8))
    report = zmlx.patch(model)
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert [(s.path, s.why) for s in report.skipped] == [
        ("layers.0", "its graph equals no norm and no activation")
    ]


class ByHand(mnn.Module):
    """A norm in float32, its weight too."""

    def __init__(self, centred, square, over):
        super().__init__()
        self.scale, self.eps = mx.random.uniform(0.5, 2, (24,), key=mx.random.key(3)), 1e-6
        self.centred, self.square, self.over = centred, square, over

    def __call__(self, x):
        y = x.astype(mx.float32)
        y = y - mx.mean(y, axis=-1, keepdims=True) if self.centred else y
        v = mx.mean(self.square(y), -1, keepdims=True) + self.eps
        y = y / mx.sqrt(v) if self.over else y * mx.rsqrt(v)
        return (y * self.scale.astype(mx.float32)).astype(x.dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("over", [False, True], ids=["rsqrt", "divided"])
@pytest.mark.parametrize(
    "square", [mx.square, lambda y: y * y, lambda y: y**2], ids=["square", "product", "power"]
)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norms_by_hand_with_the_weight_in_float32_are_replaced(centred, square, over, dtype):
    """To one rounding of the output: the sums differ in order."""
    model = mnn.Sequential(ByHand(centred, square, over))
    model.layers[0].scale = model.layers[0].scale.astype(dtype)
    x = mx.random.normal((2, 5, 24), key=mx.random.key(4)).astype(dtype)
    before = model(x)
    report = zmlx.patch(model)
    assert [r.op for r in report.replaced] == ["layer_norm" if centred else "rms_norm"]
    after = model(x)
    assert after.dtype == before.dtype
    eps = EPS.get(dtype, 2.0**-21)
    assert mx.allclose(after, before, rtol=eps, atol=eps).item()


class Renamed(mnn.Module):
    """PyTorch's group norm by hand, under other names."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift, self.parts, self.tiny = mx.ones(12), mx.zeros(12), 3, 1e-3

    def __call__(self, x):
        batch, *rest, width = x.shape
        y = x.reshape(batch, -1, self.parts, width // self.parts)
        y = y.transpose(0, 2, 1, 3).reshape(batch, self.parts, -1)
        y = mx.fast.layer_norm(y, eps=self.tiny, weight=None, bias=None)
        y = y.reshape(batch, self.parts, -1, width // self.parts)
        return self.gain * y.transpose(0, 2, 1, 3).reshape(batch, *rest, width) + self.shift


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: mnn.GroupNorm(4, 12),
        lambda: mnn.GroupNorm(4, 12, affine=False),
        lambda: mnn.GroupNorm(3, 12, eps=1e-3, pytorch_compatible=True),
        Renamed,
    ],
    ids=["interleaved", "without parameters", "as PyTorch", "by hand"],
)
def test_group_norms_are_replaced(make, mode):
    model = mnn.Sequential(mnn.Conv2d(2, 12, 3), make())
    x = mx.random.normal((2, 6, 5, 2), key=mx.random.key(1))
    grad = mnn.value_and_grad(model, lambda x: (model(x) * mx.cos(mx.arange(12))).sum())
    (before, d_before), out = grad(x), model(x)
    report = zmlx.patch(model, mode=mode)
    assert [(r.path, r.op) for r in report.replaced] == [("layers.1", "group_norm")]
    after, d_after = grad(x)
    assert mx.allclose(before, after, rtol=1e-4)
    for (name, a), (_, b) in zip(tree_flatten(d_before), tree_flatten(d_after), strict=True):
        assert mx.allclose(a, b, rtol=1e-3, atol=1e-4), name
    zmlx.unpatch(model)
    assert mx.array_equal(model(x), out)


def test_a_graph_is_trusted_only_for_the_dtypes_it_was_compared_in():
    model = mnn.Sequential(Moody(8))
    x = mx.random.normal((3, 8))
    before = [model(x.astype(d)) for d in (mx.float32, mx.float16, mx.bfloat16)]
    assert zmlx.patch(model).kinds() == {"norm": 1}
    after = [model(x.astype(d)) for d in (mx.float32, mx.float16, mx.bfloat16)]
    for a, b in zip(before, after, strict=True):
        assert mx.allclose(a, b, rtol=1e-2).item()


def test_a_stopped_gradient_is_found_by_the_probe():
    assert zmlx.patch(mnn.Sequential(Stopped(8))).kinds() == {"norm": 1}
    report = zmlx.patch(mnn.Sequential(Stopped(8)), mode="training")
    assert not report.replaced
    assert report.skipped[0].why.startswith("its gradient differs")


def test_a_block_that_looks_into_its_cache_is_left_alone():
    class Block(mnn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = mnn.RMSNorm(8), mnn.Linear(8, 8)

        def __call__(self, x, cache=None):
            y = x + (self.other(x) if cache is None else cache.other)
            return self.norm(y)

    report = zmlx.patch(Block())
    assert report.kinds() == {"norm": 1}
    assert report.skipped[0].why.startswith("its call cannot be captured")


class Residual(mnn.Module):
    """A block of two projections, as of a vision transformer."""

    def __init__(self, norm):
        super().__init__()
        self.norm1, self.mix, self.norm2, self.feed = (
            norm(), mnn.Linear(24, 24), norm(), mnn.Linear(24, 24)
        )  # fmt: skip

    def __call__(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.feed(self.norm2(x))


def test_a_block_of_two_projections_is_no_feed_forward_network():
    model = Residual(lambda: mnn.LayerNorm(24))
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"residual_norm": 1, "norm": 2}
    assert mx.allclose(model(x), before, atol=1e-5).item()


@pytest.mark.parametrize("prefer", ["auto", "zmlx", "mlx"])
def test_layers_of_zmlx_are_found_as_those_of_mlx(prefer):
    model = mnn.Sequential(residual(), Feed(mnn.GELU()), mnn.LayerNorm(24))
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before, kinds = model(x), zmlx.patch(model).kinds()
    zmlx.unpatch(model)
    zmlx.nn.convert(model)
    with zmlx.prefer(prefer):
        assert zmlx.patch(model, mode="training").kinds() == kinds
    assert mx.allclose(model(x), before, atol=1e-5).item()
    zmlx.unpatch(model)
    assert type(model.layers[2]) is zmlx.nn.LayerNorm


class Casting(mnn.Module):
    """A norm whose weight follows the dtype of its array."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = mx.ones(24), 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight.astype(x.dtype), self.eps)


@pytest.mark.parametrize(
    ("norm", "patched_in"),
    [(lambda: ByHand(False, mx.square, False), mx.bfloat16), (Casting, mx.float32)],
    ids=["by hand", "casting"],
)
def test_a_norm_in_float32_between_projections_in_half_precision(norm, patched_in):
    """It returns the dtype of the sum, in whatever dtype it was compared."""
    model = Residual(norm)
    model.set_dtype(patched_in)
    assert "residual_norm" in zmlx.patch(model).kinds()
    model.set_dtype(mx.bfloat16)
    model.norm1.set_dtype(mx.float32)
    model.norm2.set_dtype(mx.float32)
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2)).astype(mx.bfloat16)
    after = model(x)
    zmlx.unpatch(model)
    assert after.dtype == model(x).dtype == mx.bfloat16


class Switched(mnn.Module):
    """A feed-forward network whose activation is named by an attribute."""

    def __init__(self, kind="silu"):
        super().__init__()
        self.up, self.down, self.kind = mnn.Linear(24, 32), mnn.Linear(32, 24), kind

    def __call__(self, x):
        return self.down(getattr(mnn, self.kind)(self.up(x)))


def residual():
    return Residual(lambda: mnn.RMSNorm(24))


def biased():
    norm = mnn.LayerNorm(24)
    norm.bias = mx.ones(24)
    return norm


CHANGES = {
    "attribute": (Switched, lambda m: setattr(m, "kind", "relu")),
    "activation": (
        lambda: Feed(mnn.GELU()), lambda m: m.update_modules({"act": mnn.ReLU()})
    ),
    "norm of another kind": (residual, lambda m: setattr(m, "norm2", mnn.LayerNorm(24))),
    "no norm": (residual, lambda m: setattr(m, "norm2", mnn.Linear(24, 24))),
    "new bias": (
        lambda: mnn.LayerNorm(24, bias=False), lambda m: setattr(m, "bias", mx.ones(24))
    ),
    "no bias": (biased, lambda m: setattr(m, "bias", None)),
    "deleted bias": (biased, lambda m: delattr(m, "bias")),
}  # fmt: skip


class Feed(mnn.Module):
    """A feed-forward network with an activation of its own."""

    def __init__(self, act):
        super().__init__()
        self.up, self.act, self.down = mnn.Linear(24, 32), act, mnn.Linear(32, 24)

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_changed_after_patching_computes_what_it_became(change):
    make, changed = CHANGES[change]
    model = make()
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    assert zmlx.patch(model).replaced
    changed(model)
    after = model(x)
    zmlx.unpatch(model)
    assert mx.allclose(after, model(x), atol=1e-5).item()
    assert not mx.allclose(after, before, atol=1e-2).item()


def test_what_a_plan_reads_and_what_it_calls_may_change():
    model = residual()
    zmlx.patch(model)
    model.norm1.eps = 0.5
    model.mix = mnn.Linear(24, 24, bias=False)
    model.update(model.parameters())
    model.freeze()
    model.train()
    model.set_dtype(mx.float16)
    assert all(not r.new for r in zmlx.patch(model).replaced)


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
    assert ("", "it computes another thing in training") in [
        (s.path, s.why) for s in report.skipped
    ]


class Announced(mnn.Module):
    """Wants an argument of each class derived from it."""

    derived = ()

    def __init_subclass__(cls, *, name, **keywords):
        super().__init_subclass__(**keywords)
        Announced.derived += (name,)


class Guarded(Announced, name="guarded"):
    """A norm that takes no more attributes."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = mx.ones(24), 1e-5
        object.__setattr__(self, "ready", True)

    def __setattr__(self, name, value):
        if "ready" in vars(self):
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)

    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight, self.eps)


def test_a_class_does_not_notice_that_its_modules_are_patched():
    model = mnn.Sequential(mnn.RMSNorm(24), Guarded())
    x = mx.random.normal((2, 24), key=mx.random.key(2))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"norm": 2}
    assert mx.allclose(model(x), before, atol=1e-5).item()
    assert zmlx.unpatch(model) == 2
    assert type(model.layers[1]) is Guarded
    assert Announced.derived == ("guarded",)


class Last(type):
    """Allows no class to be derived from its own."""

    def __new__(cls, name, bases, fields):
        if any(isinstance(base, Last) for base in bases):
            raise TypeError(f"{name} is final")
        return super().__new__(cls, name, bases, fields)


class Final(mnn.RMSNorm, metaclass=Last):
    """A norm."""


class Fixed(mnn.RMSNorm):
    """A norm that is made with an argument."""

    def __new__(cls, dims):
        return super().__new__(cls)


def test_classes_that_are_hard_to_copy_or_derive_from():
    model = residual()
    model.norm1, model.norm2 = Final(24), Fixed(24)
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    report = zmlx.patch(model, mode="training")
    assert report.kinds() == {"residual_norm": 1, "norm": 1}
    assert ("norm1", "no class can be derived from its own: Final is final") in [
        (s.path, s.why) for s in report.skipped
    ]
    assert mx.allclose(copy.deepcopy(model)(x), before, atol=1e-5).item()
    zmlx.unpatch(model)
    assert mx.array_equal(model(x), before)


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


class UnitOfMode(mnn.Module):
    """A gated unit that is another one in training."""

    def __call__(self, gate, up):
        return (mnn.gelu if self.training else mnn.silu)(gate) * up


class MLPWithUnit(mnn.Module):
    """Its unit is a child."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)
        self.unit = UnitOfMode()

    def __call__(self, x):
        return self.down(self.unit(self.gate(x), self.up(x)))


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


class Remembering(mnn.Module):
    """Computes a norm, and keeps a number of each call."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.calls = mx.ones((8,)), 1e-5, 0

    def __call__(self, x):
        self.calls += 1
        return mx.fast.rms_norm(x, self.weight, self.eps)


class RememberingMLP(MLPWithUnit):
    """Computes a gated network, and keeps what is between its projections."""

    def __call__(self, x):
        self.hidden = mnn.silu(self.gate(x)) * self.up(x)
        return self.down(self.hidden)


def test_what_keeps_something_of_its_calls_runs_as_it_is_written():
    norm, mlp = Remembering(), RememberingMLP()
    report = zmlx.patch(mnn.Sequential(norm, mlp))
    assert norm.calls == 0
    assert "hidden" not in mlp
    assert not {"norm", "mlp"} & set(report.kinds())
    assert ("layers.1", "its call sets hidden") in [(s.path, s.why) for s in report.skipped]
    x = mx.ones((2, 8))
    assert mlp(norm(norm(x))).shape == (2, 8)
    assert norm.calls == 2
    assert mlp.hidden.shape == (2, 16)


class BatchNormed(mnn.Module):
    """A block whose other child has statistics that change in training."""

    def __init__(self):
        super().__init__()
        self.other, self.norm = mnn.BatchNorm(8), mnn.LayerNorm(8)

    def __call__(self, x):
        return self.norm(x + self.other(x))


def test_patching_leaves_the_statistics_of_a_batch_norm_as_they_are():
    model = BatchNormed()
    x = mx.random.normal((4, 8), key=mx.random.key(1))
    model(x)
    model.eval()
    before, mean = model(x), mx.array(model.other.running_mean)
    assert "residual_norm" in zmlx.patch(model, mode="training").kinds()
    assert mx.array_equal(model.other.running_mean, mean)
    # The rounding of a norm of 8.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


class StoppedWeight(mnn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = mx.ones((8,)), 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(x, mx.stop_gradient(self.weight), self.eps)


class StoppedBlock(mnn.Module):
    """A block with such a norm after its sum."""

    def __init__(self):
        super().__init__()
        self.other, self.norm = mnn.Linear(8, 8), StoppedWeight()

    def __call__(self, x):
        return self.norm(x + self.other(x))


@pytest.mark.parametrize("cls", [StoppedWeight, StoppedBlock])
def test_a_stopped_gradient_of_a_weight_is_found_by_the_probe(cls):
    report = zmlx.patch(mnn.Sequential(cls()), mode="training")
    assert not report.replaced
    assert report.skipped[0].why.startswith("its gradient differs")


class MLPInDict(mnn.Module):
    def __init__(self):
        super().__init__()
        self.parts = {"in": [mnn.Linear(8, 16), mnn.Linear(8, 16)], 2: mnn.Linear(16, 8)}

    def __call__(self, x):
        gate, up = self.parts["in"]
        return self.parts[2](mnn.silu(gate(x)) * up(x))


def test_children_in_dicts_are_found():
    model = MLPInDict()
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model, mode="training").kinds() == {"mlp": 1}
    # The rounding of a few products of rows of 16.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


class SpreadAttention(mnn.Module):
    """Attends in methods without self."""

    def __init__(self):
        super().__init__()
        self.scale, self.o_proj = 0.5, mnn.Linear(8, 8)

    @staticmethod
    def once(x, scale):
        return scaled_dot_product_attention(x, x, x, None, scale, None)

    @classmethod
    def twice(cls, x, scale):
        return scaled_dot_product_attention(x, x, x, None, scale, None) + cls.once(x, scale)

    def __call__(self, x):
        return self.o_proj(self.once(x, self.scale) + self.twice(x, self.scale))


def test_attention_in_a_static_or_class_method_is_replaced():
    model = mnn.Sequential(SpreadAttention())
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"attention": 1}
    # The rounding of a few products of rows of 8.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


def test_a_class_that_was_changed_since_it_was_patched_is_read_again(monkeypatch):
    model = mnn.Sequential(SpreadAttention())
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(1))
    zmlx.patch(model)
    zmlx.unpatch(model)

    def once(x, scale):
        return 3 * scaled_dot_product_attention(x, x, x, None, scale, None)

    monkeypatch.setattr(SpreadAttention, "once", staticmethod(once))
    before = model(x)
    zmlx.patch(model)
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)
