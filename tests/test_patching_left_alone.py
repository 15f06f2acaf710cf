"""Modules that are left alone for what their calls set, change or lead to."""

import functools
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed, MLPWithUnit, Residual

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


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


class CountingInPlace(MLPWithUnit):
    """Counts its calls in an array."""

    def __init__(self):
        super().__init__()
        self.unit = mnn.SiLU()
        self.seen = mx.zeros((2,), mx.int32)

    def __call__(self, x):
        self.seen[0] += 1
        return self.down(self.unit(self.gate(x)) * self.up(x))


class Peak(CountingInPlace):
    """Keeps a number of its call in a list of arrays."""

    def __init__(self):
        super().__init__()
        self.seen = [mx.zeros((2,))]

    def __call__(self, x):
        h = self.unit(self.gate(x))
        self.seen[0][0] = mx.abs(h).max()
        return self.down(h * self.up(x))


class CountingBlock(Residual):
    """A block whose child counts."""

    def __init__(self):
        super().__init__(lambda: mnn.RMSNorm(8))
        self.mix, self.feed = CountingInPlace(), mnn.Linear(8, 8)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("make", "kinds", "seen"),
    [
        (CountingInPlace, {"activation": 1}, lambda m: m.seen),
        (Peak, {"activation": 1}, lambda m: m.seen[0]),
        (CountingBlock, {"activation": 1, "norm": 2, "residual_norm": 1}, lambda m: m.mix.seen),
    ],
)
def test_arrays_that_a_call_changes_in_place_go_on_changing(make, kinds, seen, mode):
    model, x = make(), mx.ones((1, 2, 8))
    report = zmlx.patch(model, mode=mode, exclude="loss")
    assert report.kinds() == kinds
    assert "its call changes an array in place" in [s.why for s in report.skipped]
    assert seen(model).tolist() == [0, 0]
    model(x)
    assert seen(model)[0].item() > 0


class Backward(mnn.Module):
    """A network with an attribute that leads back to it."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)
        self.beta = mx.array(1.0)

    def own_unit(self, gate, up):
        self.hidden = (mnn.gelu if self.training else mnn.silu)(gate) * up * self.beta
        return self.hidden

    def __call__(self, x):
        return self.down(self.unit(self.gate(x), self.up(x)))


class BackwardInList(Backward):
    """Has it in a list."""

    @property
    def unit(self):
        return self.units[0]


def calling(module):
    return lambda gate, up: module.own_unit(gate, up)


class Holder:
    """A function that is an object."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *arrays):
        return self.module.own_unit(*arrays)


LEADING_BACK = {
    "method": lambda m: m.own_unit,
    "closure": calling,
    "default": lambda m: lambda gate, up, module=m: module.own_unit(gate, up),
    "partial": lambda m: functools.partial(m.own_unit),
    "partial of its class": lambda m: functools.partial(type(m).own_unit, m),
    "compiled": lambda m: mx.compile(calling(m)),
    "object": Holder,
    "inside another": lambda m: functools.partial(lambda f, *a: f(*a), calling(m)),
}


@pytest.mark.parametrize("listed", [False, True], ids=["attribute", "in a list"])
@pytest.mark.parametrize("way", LEADING_BACK)
def test_an_attribute_that_leads_back_to_its_module_leaves_it_alone(way, listed):
    model = BackwardInList() if listed else Backward()
    function = LEADING_BACK[way](model)
    if listed:
        model.units = [function]
    else:
        model.unit = function
    report = zmlx.patch(model)
    assert report.kinds() == {}
    assert [s.why for s in report.skipped] == ["its call uses an attribute that refers to a module"]
    assert "hidden" not in model


class Gate:
    """No module."""

    def run(self, gate, up):
        return mnn.silu(gate) * up


def silu_gated(unit, gate, up):
    return unit(gate) * up


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(silu_gated, mnn.silu), mx.compile(lambda g, u: mnn.silu(g) * u),
        functools.partial(functools.partial(silu_gated), mnn.silu),
        Gate().run,
    ],
)  # fmt: skip
def test_attributes_that_lead_to_no_module_leave_it_as_it_is(function):
    model = Backward()
    model.unit, model.config, model.kind = function, SimpleNamespace(width=8), mnn.Linear
    model.unused = model.own_unit
    assert zmlx.patch(model).kinds() == {"mlp": 1}


class SlottedByHand(mnn.Module):
    """Computes a norm by an eps in a slot."""

    __slots__ = ("eps",)

    def __init__(self):
        super().__init__()
        self.weight, self.eps = mx.ones(24), 1e-5

    def __call__(self, x):
        return self.weight * (x * mx.rsqrt(x.square().mean(-1, keepdims=True) + self.eps))


class SlottedUnit(mnn.Module):
    """An activation with a slot."""

    __slots__ = ("slope",)

    def __init__(self):
        super().__init__()
        self.slope = 0.01

    def __call__(self, x):
        return mx.maximum(self.slope * x, x)


@pytest.mark.parametrize("make", [SlottedByHand, SlottedUnit, lambda: Feed(SlottedUnit())])
def test_what_has_attributes_in_slots_is_left_alone_with_a_reason(make):
    report = zmlx.patch(mnn.Sequential(make()))
    assert not report.replaced
    assert {s.why for s in report.skipped} == {"it has attributes in slots"}


class Swallowing(MLPWithUnit):
    """Takes any error for a sign that there is nothing to look into."""

    def __call__(self, x):
        try:
            found = self.look()
        except Exception:
            found = False
        return super().__call__(x) * (3 if found else 1)

    def look(self):
        return self.up.weight.shape is not None


class SwallowingAll(Swallowing):
    def __call__(self, x):
        try:
            found = self.look()
        except:  # noqa: E722
            found = False
        return super(Swallowing, self).__call__(x) * (3 if found else 1)


class ByKey(Swallowing):
    def look(self):
        return "weight" in self.up and self.up["weight"] is not None


class ByBoundMethod(Swallowing):
    def __init__(self):
        super().__init__()
        self.own = self.look_again

    def look(self):
        return self.own()

    def look_again(self):
        return True


class SwallowingBlock(Residual):
    """A block of which one without a mask is another."""

    def __call__(self, x, mask=None):
        try:
            return super().__call__(x) * mask.shape[0]
        except Exception:
            return super().__call__(x)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (Swallowing, {}),
        (SwallowingAll, {}),
        (ByKey, {}),
        (ByBoundMethod, {}),
        (lambda: SwallowingBlock(lambda: mnn.RMSNorm(24)), {"mask": mx.ones((2,))}),
    ],
    ids=["a child's array", "whatever is raised", "a child's key", "a method", "a mask"],
)
def test_what_takes_all_errors_for_its_own_is_left_alone(make, given):
    model = make()
    x = mx.random.normal((2, 3, 24 if "mix" in model else 8), key=mx.random.key(1))
    before = model(x, **given)
    report = zmlx.patch(model)
    assert [s.why for s in report.skipped if not s.path]
    assert mx.allclose(model(x, **given), before, rtol=1e-5, atol=1e-5)


class AskingChild(MLPWithUnit):
    """Asks for what stands for a child in a trace does not have."""

    def __call__(self, x):
        return super().__call__(x) * (3 if hasattr(self.up, "weight") else 1)


class AskingForKey(MLPWithUnit):
    def __call__(self, x):
        return super().__call__(x) * (3 if "weight" in self.up else 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [(AskingChild, "its call reads up.weight"), (AskingForKey, "its call looks into up")],
)
def test_what_asks_for_the_parts_of_a_child_is_left_alone(make, why):
    report = zmlx.patch(make())
    assert not report.replaced
    assert why in [s.why for s in report.skipped]
