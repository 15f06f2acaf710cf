"""Modules written by hand: what looks like a layer is replaced, and what only looks so is not."""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed, Residual, residual
from mlx_lm.models.base import scaled_dot_product_attention

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


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
    """It is no norm; that it calls one is another kind."""
    model = mnn.Sequential(cls(8), mnn.RMSNorm(8))
    report = zmlx.patch(model, exclude="calls")
    assert [r.path for r in report.replaced] == ["layers.1"]
    zmlx.unpatch(model)
    assert zmlx.patch(model).kinds() == {"calls": 1, "norm": 1}


def test_a_graph_is_trusted_only_for_the_dtypes_it_was_compared_in():
    model = mnn.Sequential(Moody(8))
    x = mx.random.normal((3, 8))
    before = [model(x.astype(d)) for d in (mx.float32, mx.float16, mx.bfloat16)]
    assert zmlx.patch(model).kinds() == {"norm": 1}
    after = [model(x.astype(d)) for d in (mx.float32, mx.float16, mx.bfloat16)]
    for a, b in zip(before, after, strict=True):
        assert mx.allclose(a, b, rtol=1e-2).item()


def test_a_stopped_gradient_is_found_by_the_probe():
    for mode in ("inference", "training"):
        report = zmlx.patch(mnn.Sequential(Stopped(8)), mode=mode)
        assert not report.replaced
        assert report.skipped[0].why.startswith("its gradient differs")


class InPlaceUnit(mnn.Module):
    def __call__(self, x):
        x *= mx.sigmoid(x)
        return x


class InPlaceNorm(mnn.RMSNorm):
    def __call__(self, x):
        x *= mx.rsqrt(x.square().mean(-1, keepdims=True) + self.eps)
        return x * self.weight


class InPlaceGate(mnn.Module):
    def __call__(self, gate, up):
        up *= mnn.silu(gate)
        return up


class InPlaceBlock(Residual):
    def __call__(self, x):
        x += self.mix(self.norm1(x))
        return x + self.feed(self.norm2(x))


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (InPlaceUnit, {}), (lambda: InPlaceNorm(24), {}), (InPlaceGate, {}),
        (lambda: InPlaceBlock(lambda: mnn.RMSNorm(24)), {"norm": 2}),
    ],
)  # fmt: skip
def test_what_changes_its_argument_in_place_is_left_alone(make, kinds):
    report = zmlx.patch(mnn.Sequential(make()))
    assert report.kinds() == kinds
    assert "its call changes an array in place" in [s.why for s in report.skipped]


class InPlaceSum(Residual):
    """Adds in place to what its own children return, after others got it."""

    def __call__(self, x):
        y = self.mix(self.norm1(x))
        y += x
        z = self.feed(self.norm2(y))
        z += y
        return z


def test_a_block_that_changes_what_it_made_is_replaced():
    model = InPlaceSum(lambda: mnn.RMSNorm(24))
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"norm": 2, "residual_norm": 1}
    assert mx.allclose(model(x), before, atol=1e-5).item()


class StoppedBeforeNorm(Residual):
    """Half of it learns nothing from what is below."""

    def __call__(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.feed(self.norm2(mx.stop_gradient(x)))


class PostNorm(Residual):
    """A block without a residual from end to end."""

    def __call__(self, x):
        x = self.norm1(x + self.mix(x))
        return self.norm2(self.mix(x) + self.feed(x))


@pytest.mark.parametrize("norm", [mnn.RMSNorm, mnn.LayerNorm])
def test_the_probe_of_a_block_goes_through_its_norms(norm):
    report = zmlx.patch(StoppedBeforeNorm(lambda: norm(24)), mode="training")
    assert report.kinds() == {"norm": 2}
    assert report.skipped[0].why.startswith("its gradient differs")
    report = zmlx.patch(PostNorm(lambda: norm(24)), mode="training")
    assert report.kinds() == {"residual_norm": 1, "norm": 2}


def test_a_gradient_that_is_stopped_after_patching_for_inference_is_found_for_training(monkeypatch):
    model = mnn.Sequential(Stopped(8), mnn.RMSNorm(8))
    with monkeypatch.context() as patch:
        patch.setattr(mx, "stop_gradient", lambda x: x)
        assert zmlx.patch(model).kinds() == {"norm": 2}
    report = zmlx.patch(model, mode="training")
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert report.skipped[0].path == "layers.0"
    assert report.skipped[0].why.startswith("its gradient differs")
    assert type(model.layers[0]) is Stopped
    assert zmlx.unpatch(model) == 1


class OfWidth(mnn.Module):
    """An activation that says a width, and goes by that of its array."""

    def __init__(self):
        super().__init__()
        self.dim = 24

    def __call__(self, x):
        return mnn.relu(x) if x.shape[-1] > 100 else mnn.silu(x)


def test_a_width_that_a_module_says_is_not_the_only_one():
    model = mnn.Sequential(OfWidth())
    assert not zmlx.patch(model).replaced
    assert not model(-mx.ones((2, 128))).any().item()


class FixedBase(mnn.RoPE):
    def __call__(self, x, offset=0):
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=1e4, scale=self.scale, offset=offset
        )


class Returning(mnn.RoPE):
    """Begins again after 4096 positions."""

    def __call__(self, x, offset=0):
        return super().__call__(x, offset % 4096 if isinstance(offset, int) else offset)


@pytest.mark.parametrize("cls", [FixedBase, Returning])
def test_a_rotation_that_goes_by_other_numbers_is_left_alone(cls):
    model = mnn.Sequential(cls(8))
    assert "rope" not in zmlx.patch(model).kinds()


class Between(mnn.RMSNorm):
    """Another norm for 100 to 199 tokens, which are not compared."""

    def __call__(self, x):
        return super().__call__(x) * (2 if 100 <= x.shape[-2] < 200 else 1)


def test_a_block_does_not_compute_a_norm_that_is_excluded():
    model = Residual(lambda: Between(24))
    x = mx.random.normal((2, 150, 24), key=mx.random.key(2))
    before = model(x)
    report = zmlx.patch(model, exclude=["norm1", "norm2"])
    assert not report.replaced
    assert "it would compute norm2, which is excluded" in [s.why for s in report.skipped]
    assert mx.allclose(model(x), before, atol=1e-5).item()


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


class StoppedUnit(mnn.SiLU):
    def __call__(self, x):
        return super().__call__(mx.stop_gradient(x))


stop = mx.stop_gradient
stopping = mx.compile(lambda x: mnn.silu(mx.stop_gradient(x)))


class UnitByAnotherName(mnn.Module):
    def __call__(self, x):
        return mnn.silu(stop(x))


class CompiledUnit(mnn.Module):
    def __call__(self, x):
        return stopping(x)


class UnitInAttribute(mnn.Module):
    def __init__(self):
        super().__init__()
        self.unit = lambda x: mnn.silu(mx.stop_gradient(x))

    def __call__(self, x):
        return self.unit(x)


class StoppedRouter(mnn.Module):
    def __init__(self):
        super().__init__()
        self.project = mnn.Linear(24, 8, bias=False)

    def __call__(self, x):
        scores = mx.softmax(self.project(mx.stop_gradient(x)), axis=-1)
        indices = mx.stop_gradient(mx.argpartition(-scores, kth=1, axis=-1)[..., :2])
        return mx.take_along_axis(scores, indices, axis=-1), indices


class Inheriting(StoppedUnit):
    """Stops it in the call that its own calls."""

    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "make",
    [
        StoppedWeight, StoppedBlock, StoppedRouter, lambda: Feed(StoppedUnit()),
        lambda: Feed(Inheriting()), UnitByAnotherName, CompiledUnit, UnitInAttribute,
    ],
)  # fmt: skip
def test_a_stopped_gradient_of_a_part_is_found_by_the_probe(make, mode):
    report = zmlx.patch(mnn.Sequential(make()), mode=mode)
    assert not report.replaced
    assert report.skipped[0].why.startswith("its gradient differs")


class UnstoppedRouter(StoppedRouter):
    """MLX has no gradient by the indices that it gathers by."""

    def __call__(self, x):
        scores = mx.softmax(self.project(x), axis=-1)
        indices = mx.argpartition(-scores, kth=1, axis=-1)[..., :2]
        return mx.take_along_axis(scores, indices, axis=-1), indices


def test_what_mlx_has_no_gradient_of_is_replaced_for_inference_alone():
    model = mnn.Sequential(UnstoppedRouter())
    assert zmlx.patch(model).kinds() == {"router": 1}
    report = zmlx.patch(model, mode="training")
    assert not report.replaced
    assert report.skipped[0].why.startswith("MLX has no gradient of it")


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


class Config(NamedTuple):
    """What a network is made of."""

    act: mnn.Module


class AttributeConfig(dict):
    """The same as a dict with attributes."""

    __getattr__ = dict.__getitem__


class Configured(mnn.Module):
    """A network that reads its activation from what it was configured with."""

    def __init__(self, config):
        super().__init__()
        self.config, self.up, self.down = config, mnn.Linear(8, 16), mnn.Linear(16, 8)

    def __call__(self, x):
        return self.down(self.config.act(self.up(x)))


@pytest.mark.parametrize("cls", [Config, AttributeConfig])
def test_a_configuration_is_read_by_attributes(cls):
    model = Configured(cls(act=mnn.GELU()))
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model).kinds()["mlp"] == 1
    # The rounding of a few products of rows of 16.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


class Named(mnn.Module):
    """Its children are called as methods of a dict, and with a dot."""

    def __init__(self):
        super().__init__()
        self["keys"], self["values"] = mnn.Linear(8, 16), mnn.Linear(16, 8)
        self["norm.1"], self["norm.2"] = mnn.RMSNorm(8), mnn.RMSNorm(8)

    def __call__(self, x):
        y = self["values"](mnn.silu(self["keys"](self["norm.1"](x))))
        return self["norm.2"](x + y)


class NamedMLP(mnn.Module):
    """A network of such."""

    def __init__(self):
        super().__init__()
        self["keys.in"], self["values"] = mnn.Linear(8, 16), mnn.Linear(16, 8)

    def __call__(self, x):
        return self["values"](mnn.silu(self["keys.in"](x)))


def test_children_of_any_name_are_found():
    model = mnn.Sequential(Named(), NamedMLP())
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model, mode="training").kinds() == {"norm": 2, "mlp": 1}
    # The rounding of a few products of rows of 16.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


class Hiding(mnn.GELU):
    """An activation that knows the module above it, and may go by it."""

    reads = False

    def __call__(self, x):
        return super().__call__(x) * (self.hidden[0].down.weight.shape[0] if self.reads else 1)


@pytest.mark.parametrize(("reads", "kinds"), [(False, {"activation": 1}), (True, {})])
def test_a_module_above_that_a_tuple_hides_is_not_entered(reads, kinds):
    model = Feed(Hiding())
    model.act.reads, model.act.hidden = reads, (model,)
    x = mx.random.normal((2, 3, 24), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model).kinds() == kinds
    # The rounding of a few products of rows of 32.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-5)


def test_two_activations_that_know_their_sequence_are_replaced():
    model = mnn.Sequential(Hiding(), mnn.Tanh())
    model.layers[0].hidden = (model,)
    x = mx.random.normal((2, 24), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"activation": 2}
    assert mx.allclose(model(x), before, atol=1e-5)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_gradient_that_a_call_stops_is_stopped(mode):
    class Stopping(mnn.RMSNorm):
        def __call__(self, x):
            return mx.fast.rms_norm(mx.stop_gradient(x), self.weight, self.eps)

    x = mx.random.normal((2, 16), key=mx.random.key(0))
    model = mnn.Sequential(mnn.Linear(16, 16), Stopping(16))
    zmlx.patch(model, mode=mode)
    gradients = mnn.value_and_grad(model, lambda m, x: m(x).sin().sum())(model, x)[1]
    assert not gradients["layers"][0]["weight"].any().item()
    assert gradients["layers"][1]["weight"].any().item()
