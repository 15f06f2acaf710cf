"""What modules are: their classes, lists and copies stay what they were."""

import copy
import inspect
import threading
from collections import defaultdict

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import residual
from mlx_lm.models.base import scaled_dot_product_attention

import zmlx
from zmlx.patching.plans import plan_of

pytestmark = pytest.mark.usefixtures("kernels_run")


def test_copies_that_did_not_change_leave_the_change_of_another():
    activation = mnn.LeakyReLU()
    model = mnn.Sequential(activation, mnn.Linear(24, 24), activation)
    zmlx.patch(model)
    model.layers[0]._negative_slope = 0.5
    zmlx.unpatch(model)
    assert model.layers[0] is activation
    assert model.layers[2] is activation
    assert activation._negative_slope == 0.5


def test_what_checkpoints_the_layers_of_a_model_leaves_another_model_alone():
    """As mlx-lm does it: by the call of a layer's class, which all of that class then have."""
    first, second = (mnn.Sequential(mnn.RMSNorm(24), mnn.RMSNorm(24)) for _ in range(2))
    zmlx.patch(first)
    cls = type(first.layers[0])
    own, calls = cls.__call__, []

    def checkpointed(module, *arguments):
        calls.append(module)
        return mx.checkpoint(lambda *given: own(module, *given))(*arguments)

    cls.__call__ = checkpointed
    x = mx.ones((2, 24))
    first(x)
    assert calls == first.layers
    zmlx.patch(second)
    zmlx.unpatch(first)
    mx.eval(first(x), second(x))
    assert calls == first.layers


class Core(mnn.Module):
    """Attention without projections, and so without arrays, but with modules below it."""

    def __init__(self):
        super().__init__()
        self.rope, self.units = mnn.RoPE(8), [mnn.SiLU(), {"last": mnn.GELU()}]

    def __call__(self, x):
        unit, more = self.units
        q, k, v = self.rope(x), self.rope(x), more["last"](unit(x))
        return scaled_dot_product_attention(q, k, v, cache=None, scale=0.3, mask=None)


class Cored(mnn.Module):
    """Has it in a dict in a list."""

    def __init__(self, core):
        super().__init__()
        self.into, self.parts = mnn.Linear(24, 24), [{"core": core}]

    def __call__(self, x):
        core = self.parts[0]["core"]
        x = self.into(x).reshape(*x.shape[:-1], 3, 8).swapaxes(1, 2)
        return core(x).swapaxes(1, 2).flatten(-2)


def test_what_is_below_a_copied_module_is_replaced_and_restored():
    core = Core()
    model, other = Cored(core), Cored(core)
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before, modules = model(x), model.modules()
    report = zmlx.patch(model)
    assert report.kinds() == {"attention": 1, "activation": 2, "rope": 1}
    patched = dict(model.named_modules())
    assert all(plan_of(patched[r.path]) is not None for r in report.replaced)
    assert not any(plan_of(m) is not None for m in other.modules())
    assert mx.allclose(model(x), before, atol=1e-5)
    assert not any(r.new for r in zmlx.patch(model).replaced)
    assert zmlx.unpatch(model) == 4
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    assert mx.array_equal(model(x), before)
    assert all("_zmlx" not in name for m in model.modules() for name in vars(m))


def test_a_list_under_two_names_is_patched_once():
    model = mnn.Sequential(mnn.Linear(24, 24), mnn.GELU())
    model.again, unit = model.layers, model.layers[1]
    report = zmlx.patch(model)
    assert report.kinds() == {"activation": 1}
    assert not any(s.module == "GELU" for s in report.skipped)
    assert zmlx.unpatch(model) > 0
    assert model.layers[1] is unit


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


class Typed(Core):
    """Has annotations."""

    def __call__(self, x: mx.array, scale: float = 0.3) -> mx.array:
        return scaled_dot_product_attention(x, x, x, cache=None, scale=scale, mask=None)


@pytest.mark.parametrize("make", [lambda: mnn.RMSNorm(24), residual, Typed])
def test_a_patched_module_has_the_signatures_of_its_own(make):
    model = mnn.Sequential(make())
    module = model.layers[0]
    before = inspect.signature(module), inspect.signature(type(module)), module.__call__.__doc__
    assert zmlx.patch(model).replaced
    module, cls = model.layers[0], type(model.layers[0])
    assert plan_of(module) is not None
    assert (inspect.signature(module), inspect.signature(cls), module.__call__.__doc__) == before


@pytest.mark.parametrize("make", [lambda: mnn.RMSNorm(24), lambda: Fixed(24)])
def test_a_module_made_of_a_patched_class_is_not_patched(make):
    model = mnn.Sequential(make())
    own = type(model.layers[0])
    zmlx.patch(model)
    patched = type(model.layers[0])
    assert type(patched(16)) is own
    assert patched(16).weight.shape == (16,)

    class Derived(patched):
        """Is of its own class."""

    model.layers.append(Derived(24))
    zmlx.unpatch(model)
    assert [type(m) for m in model.layers] == [own, Derived]


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


class ByAttribute(dict):
    """A dict that is read by attributes."""

    __getattr__ = dict.__getitem__


class Stack(list):
    """A list with a method."""

    def last(self):
        return self[-1]


class Filling(mnn.Module):
    """Keeps its activations in such, and puts what it computes where others see it."""

    def __init__(self):
        super().__init__()
        self.named, self.stack = ByAttribute(a=mnn.GELU(), b=mnn.Tanh()), Stack([mnn.SiLU()])
        self.log, self.counts = [], defaultdict(int)

    def __call__(self, x):
        y = self.named.a(x) + self.named.b(x) + self.stack.last()(x)
        self.log.append(y.shape)
        self.counts["calls"] += 1
        return y


def test_lists_and_dicts_of_their_own_classes_stay_what_they_are():
    filling = Filling()
    names = ("named", "stack", "log", "counts")
    kept = [filling[name] for name in names]
    model = mnn.Sequential(mnn.Linear(24, 24), filling)
    x = mx.random.normal((2, 24), key=mx.random.key(2))
    assert zmlx.patch(model).kinds() == {"activation": 3}
    assert (filling.log, filling.counts) == ([], {})
    after = model(x)
    assert (filling.log, filling.counts) == ([(2, 24)], {"calls": 1})
    model.layers[1].stack.append(mnn.ReLU())
    zmlx.unpatch(model)
    assert all(
        filling[n] is v for n, v in zip(("named", "stack", "log", "counts"), kept, strict=True)
    )
    assert [type(m) for m in filling.stack] == [mnn.SiLU, mnn.ReLU]
    filling.stack.pop()
    assert mx.allclose(model(x), after, atol=1e-5)


def test_a_copied_module_leads_to_no_change_of_lists_that_did_not_change():
    stack, unit = Stack([mnn.SiLU()]), Core()
    unit.units = stack
    model = mnn.Sequential(unit, mnn.Linear(24, 24), unit)
    zmlx.patch(model)
    model.layers[0].units.append(mnn.ReLU())
    zmlx.unpatch(model)
    assert unit.units is stack
    assert [type(m) for m in stack] == [mnn.SiLU, mnn.ReLU]


class Locked(mnn.RMSNorm):
    """A norm with a lock, which no copy has in common with it."""

    def __init__(self):
        super().__init__(24)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {k: v for k, v in vars(self).items() if k != "lock"}

    def __setstate__(self, state):
        vars(self).update(state)
        self.lock = threading.Lock()


class Slotted(mnn.RMSNorm):
    """A norm with a slot."""

    __slots__ = ("name",)

    def __init__(self):
        super().__init__(24)
        self.name = "slotted"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_patched_module_is_what_its_class_makes_of_its_state(copied):
    locked, slotted = Locked(), Slotted()
    x = mx.random.normal((2, 24), key=mx.random.key(2))
    assert zmlx.patch(mnn.Sequential(locked, slotted)).kinds() == {"norm": 1, "calls": 1}
    for norm in locked, slotted:
        twin = copied(norm)
        assert plan_of(twin) is not None
        assert mx.array_equal(twin(x), norm(x))
        assert zmlx.unpatch(twin) == 1
        assert type(twin) in (Locked, Slotted)
        assert plan_of(norm) is not None
    twin = copied(locked)
    assert twin.lock is not locked.lock
    assert copied(slotted).name == "slotted"
