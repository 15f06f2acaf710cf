"""What modules keep: state and random numbers stay theirs, and later changes count."""

import copy
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed, Residual, residual

import zmlx
from zmlx.patching.plans import plan_of

pytestmark = pytest.mark.usefixtures("kernels_run")


class Switched(mnn.Module):
    """A feed-forward network whose activation is named by an attribute."""

    def __init__(self, kind="silu"):
        super().__init__()
        self.up, self.down, self.kind = mnn.Linear(24, 32), mnn.Linear(32, 24), kind

    def __call__(self, x):
        return self.down(getattr(mnn, self.kind)(self.up(x)))


def biased():
    norm = mnn.LayerNorm(24)
    norm.bias = mx.ones(24)
    return norm


class Standard(mnn.Module):
    """A norm with a number that all of its class have."""

    eps = 1e-5

    def __init__(self):
        super().__init__()
        self.weight = mx.ones(24)

    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight, self.eps)


class Doubled(Standard):
    """A norm that is another one with an attribute of its own."""

    def __call__(self, x):
        return super().__call__(x) * 2 if hasattr(self, "double") else super().__call__(x)


def sequence():
    return mnn.Sequential(mnn.Linear(24, 32), mnn.GELU(), mnn.Linear(32, 24))


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
    "deleted entry": (biased, lambda m: m.__delitem__("bias")),
    "popped entry": (biased, lambda m: m.pop("bias")),
    "another class": (
        lambda: mnn.LayerNorm(24, bias=False), lambda m: setattr(m, "__class__", mnn.RMSNorm)
    ),
    "attribute of the class": (Standard, lambda m: setattr(m, "eps", 0.5)),
    "new attribute": (Doubled, lambda m: setattr(m, "double", True)),
    "entry of a list": (sequence, lambda m: m.layers.__setitem__(1, mnn.ReLU())),
    "longer list": (sequence, lambda m: m.layers.append(mnn.Tanh())),
    "attribute of an activation": (
        lambda: Feed(mnn.LeakyReLU()), lambda m: setattr(m.act, "_negative_slope", 0.9)
    ),
    "attribute of a norm without arrays": (
        lambda: Residual(lambda: mnn.LayerNorm(24, affine=False)),
        lambda m: setattr(m.norm2, "eps", 0.5),
    ),
    "new bias of a norm": (
        lambda: Residual(lambda: mnn.LayerNorm(24, bias=False)),
        lambda m: setattr(m.norm2, "bias", mx.ones(24)),
    ),
    "new attribute of a norm": (
        lambda: Residual(Doubled), lambda m: setattr(m.norm2, "double", True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
@pytest.mark.parametrize("only", [None, "", "mlp"], ids=["all", "itself alone", "mlp"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_changed_after_patching_computes_what_it_became(change, only, copied):
    make, changed = CHANGES[change]
    model = make()
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    report = zmlx.patch(model, only=only)
    assert report.replaced or only is not None
    model = copy.deepcopy(model) if copied else model
    assert all(not r.new for r in zmlx.patch(model, only=only).replaced)
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
    assert all(not r.new for r in zmlx.patch(model).replaced)


def test_what_was_compared_in_another_dtype_is_compared_again():
    model, x = residual(), mx.random.normal((2, 3, 24), key=mx.random.key(2)).astype(mx.float16)
    kinds = zmlx.patch(model).kinds()
    model.set_dtype(mx.float16)
    report = zmlx.patch(model)
    assert report.kinds() == kinds
    assert [r.kind for r in report.replaced if r.new] == ["residual_norm", "norm", "norm"]
    assert plan_of(model.norm1).norm.dtypes == (mx.float16,)
    after = model(x)
    zmlx.unpatch(model)
    # A few roundings of half precision.
    assert mx.allclose(after, model(x), rtol=1e-2, atol=1e-2).item()


class Configured(Switched):
    """Its activation is named by an object."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(kind="silu")

    def __call__(self, x):
        return self.down(getattr(mnn, self.config.kind)(self.up(x)))


class OwnCall(mnn.RMSNorm):
    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Configured, lambda m, _: setattr(m.config, "kind", "relu")),
        (
            lambda: Residual(lambda: OwnCall(24)),
            lambda m, patch: patch.setattr(OwnCall, "__call__", lambda self, x: 2 * x),
        ),
    ],
    ids=["an object", "the class of a norm"],
)
def test_patching_again_notices_what_has_changed_in(make, change, monkeypatch):
    model, x = make(), mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    assert zmlx.patch(model).replaced
    change(model, monkeypatch)
    zmlx.patch(model)
    after = model(x)
    zmlx.unpatch(model)
    assert mx.allclose(after, model(x), atol=1e-5).item()
    assert not mx.allclose(after, before, atol=1e-2).item()


class CastMLP(mnn.Module):
    """Its casts do nothing in float32."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = mnn.Linear(24, 32), mnn.Linear(24, 32)
        self.down = mnn.Linear(32, 24)

    def __call__(self, x):
        return self.down(mnn.silu(self.gate(x).astype(mx.float32)) * self.up(x))


class CastWeight(mnn.RMSNorm):
    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight.astype(mx.float32), self.eps)


class CastToWeight(mnn.RMSNorm):
    def __call__(self, x):
        return mx.fast.rms_norm(x.astype(self.weight.dtype), self.weight, self.eps)


class CastLogits(mnn.Module):
    """A router."""

    def __init__(self):
        super().__init__()
        self.project = mnn.Linear(24, 8, bias=False)

    def __call__(self, x):
        scores = mx.softmax(self.project(x).astype(mx.float32), axis=-1)
        indices = mx.argpartition(-scores, kth=1, axis=-1)[..., :2]
        return mx.take_along_axis(scores, indices, axis=-1), indices


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize(
    "make", [CastMLP, lambda: CastWeight(24), lambda: CastToWeight(24), CastLogits]
)
def test_parameters_in_another_dtype_after_patching_give_their_own_result(make, dtype):
    model, x = mnn.Sequential(make()), mx.zeros((2, 3, 24), dtype)
    assert zmlx.patch(model).replaced
    model.set_dtype(mx.float16)
    after = model(x)
    zmlx.unpatch(model)
    assert [y.dtype for y in after] == [y.dtype for y in model(x)]


class NormedSum(Residual):
    """Returns the norm of its sum."""

    def __call__(self, x):
        return self.norm2(x + self.mix(self.norm1(x)))


def test_the_norm_of_a_sum_goes_by_the_dtype_of_the_sum():
    model, x = NormedSum(lambda: CastToWeight(24)), mx.ones((2, 3, 24), mx.float16)
    model.norm1.set_dtype(mx.float16)
    model.mix.set_dtype(mx.float16)
    assert "residual_norm" in zmlx.patch(model).kinds()
    model.mix.set_dtype(mx.float32)
    model.norm2.set_dtype(mx.float16)
    after = model(x)
    zmlx.unpatch(model)
    assert after.dtype == model(x).dtype == mx.float16


class Open(Residual):
    """A block that its own array opens."""

    def __init__(self):
        super().__init__(lambda: mnn.RMSNorm(24))
        self.open = mx.array(True)

    def __call__(self, x):
        return super().__call__(x) if self.open else x


class Gained(Feed):
    """A network that does more for some values of its own array."""

    def __init__(self, does):
        super().__init__(mnn.SiLU())
        self.gain, self._does = mx.array([1.0, 2.0]), does

    def __call__(self, x):
        return super().__call__(x) * (3 if self._does(self.gain) else 1)


@pytest.mark.parametrize(
    "does",
    [
        lambda gain: gain.min().item() < 0,
        lambda gain: not gain.any(),
        lambda gain: gain.max().item() < 0.5,
        lambda gain: gain.max().item() > 1e4,
        lambda gain: gain.tolist() == [3, 4],
    ],
    ids=["negative", "zero", "small", "large", "certain"],
)
def test_a_network_that_goes_by_the_values_of_its_own_array_is_left_alone(does):
    report = zmlx.patch(mnn.Sequential(Gained(does)))
    assert report.kinds() == {"activation": 1}
    assert report.skipped[0].why.startswith("its call cannot be captured")


def test_a_block_that_goes_by_its_own_array_is_left_alone():
    model, x = Open(), mx.ones((2, 3, 24))
    assert zmlx.patch(model).kinds() == {"norm": 2}
    model.open = mx.array(False)
    assert mx.array_equal(model(x), x)


class Counting(mnn.SiLU):
    """An activation that counts its calls."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


def test_an_activation_that_counts_its_calls_goes_on_counting():
    model = Feed(Counting())
    assert not zmlx.patch(model).replaced
    model(mx.ones((2, 24)))
    assert model.act.calls == 1


@pytest.mark.parametrize("again", [False, True], ids=["before", "and patched again"])
def test_a_class_that_gets_another_call_runs_it(again, monkeypatch):
    """As mlx-lm's `grad_checkpoint` gives it one."""

    class Norm(mnn.RMSNorm):
        def __call__(self, x):
            return super().__call__(x)

    model, x = mnn.Sequential(Norm(24)), mx.random.normal((2, 24), key=mx.random.key(1))
    assert zmlx.patch(model).kinds() == {"norm": 1}
    before, own = model(x), Norm.__call__
    monkeypatch.setattr(Norm, "__call__", lambda self, x: 2 * own(self, x))
    if again:
        zmlx.patch(model)
    # The rounding of a norm of 24 elements.
    assert mx.allclose(model(x), 2 * before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [False, True], ids=["evaluation", "training"])
def test_a_mode_and_a_rate_that_were_set_while_patched_stay(mode):
    model = mnn.Sequential(mnn.Linear(24, 24), mnn.Dropout(0.5))
    dropout = model.layers[1]
    model.train(not mode)
    assert "dropout" in zmlx.patch(model, mode="training").kinds()
    model.train(mode)
    model.layers[1]._p_1 = 0.75
    zmlx.unpatch(model)
    assert model.layers[1] is dropout
    assert [m.training for m in model.modules()] == [mode] * 3
    assert dropout._p_1 == 0.75
