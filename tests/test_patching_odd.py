"""Modules with names, shapes and classes that few have: patched, they compute what they did."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Residual

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


def compares(model, x, **options):
    """Patches a model, which computes the same then and after it was unpatched."""
    before = model(x)
    report = zmlx.patch(model, **options)
    # The rounding of a few norms and products of rows of 24.
    assert mx.allclose(model(x), before, rtol=1e-4, atol=1e-5)
    zmlx.unpatch(model)
    assert mx.array_equal(model(x), before)
    return report


X = mx.random.normal((2, 3, 24), key=mx.random.key(1))


class Times(mnn.Module):
    """A factor in an array of any shape."""

    def __init__(self, shape):
        super().__init__()
        self.weight = mx.random.normal(shape, key=mx.random.key(2))

    def __call__(self, x):
        return x * self.weight


class Factor(Residual):
    """A block with one."""

    def __init__(self, shape):
        super().__init__(lambda: mnn.RMSNorm(24))
        self.factor = Times(shape)

    def __call__(self, x):
        return super().__call__(x + self.factor(x))


SHAPES = [(), (1,), (1, 1), (24, 1)[::-1], (3, 24), (2, 3, 24), (1, 2, 3, 24), (1, 1, 1, 1, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_have_any_number_of_axes(shape):
    x = X.reshape(1, 1, 2, 3, 24) if len(shape) > 3 else X
    assert "norm" in compares(Factor(shape), x).kinds()


@pytest.mark.parametrize("shape", [(0,), (0, 24), (24, 0)])
def test_weights_may_be_empty(shape):
    model = Residual(lambda: mnn.RMSNorm(24))
    model.unused = Times(shape)
    assert "norm" in compares(model, X).kinds()


#: Names that MLX itself does not need of a module that is only called.
NAMES = (
    "values", "items", "keys", "update", "pop", "children", "parameters", "modules",
    "named_modules", "state", "copy", "bits", "dims", "head_dim", "name",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_attributes_may_have_names_of_methods(name):
    model = Residual(lambda: mnn.RMSNorm(24))
    model.act = mnn.SiLU()
    for module in model, model.norm1, model.act:
        vars(module)[name] = 3
    report = compares(model, X)
    assert report.kinds()["norm"] == 2
    assert report.kinds()["residual_norm"] == 1


@pytest.mark.parametrize("name", [*NAMES, "__getitem__", "__iter__", "__len__"])
def test_methods_may_have_names_of_others(name):
    def method(self, *arguments, **keywords):
        """MLX's modules pop names while they are made."""
        if vars(self).get("made"):
            raise TypeError("it does something else")

    def of(base):
        return type("Own", (base,), {name: method})

    def made(module):
        vars(module)["made"] = True
        return module

    class Block(Residual):
        def __call__(self, x):
            return super().__call__(self.act(x))

    # MLX's norms read their weight by `self["weight"]`.
    norm = mnn.RMSNorm if name == "__getitem__" else of(mnn.RMSNorm)
    model = of(Block)(lambda: made(norm(24)))
    model.act = made(of(mnn.SiLU)())
    made(model)
    kinds = compares(model, X).kinds()
    assert (kinds["norm"], kinds["activation"]) == (2, 1)


def test_an_entry_that_comes_or_goes_by_any_method_of_a_dict_counts():
    ways = {
        "setdefault": lambda m: m.setdefault("bias", mx.ones(24)),
        "|=": lambda m: m.__ior__({"bias": mx.ones(24)}),
        "popitem": lambda m: (m.setdefault("bias", mx.ones(24)), zmlx.patch(m), m.popitem()),
    }
    for way, change in ways.items():
        model = mnn.LayerNorm(24, bias=False)
        assert zmlx.patch(model).replaced
        change(model)
        after = model(X)
        zmlx.unpatch(model)
        assert mx.allclose(after, model(X), atol=1e-5), way


class Unready(mnn.RMSNorm):
    """A norm with a property that cannot be read."""

    @property
    def dims(self):
        raise RuntimeError("it is not known yet")

    head_dim = dims


def test_a_property_may_raise():
    assert compares(mnn.Sequential(Unready(24), mnn.SiLU()), X).kinds()["norm"] == 1


class Above(mnn.RMSNorm):
    """Goes up from `self.__class__`, and clones itself."""

    def __init__(self, dims):
        super(self.__class__, self).__init__(dims)

    def __call__(self, x):
        return super(self.__class__, self).__call__(x)

    def _extra_repr(self):
        return super(self.__class__, self)._extra_repr()

    def clone(self):
        return self.__class__(self.weight.shape[0])

    def kin(self):
        return [self.__class__ is Above, self.__class__.__name__, type(self).__name__]


def test_a_module_may_go_by_its_class():
    norm = Above(24)
    model, wide = mnn.Sequential(norm), X.reshape(2, 1, 1, 1, 1, 3, 24)
    before, kin = model(wide), norm.kin()
    assert zmlx.patch(model).kinds() == {"norm": 1}
    # In as many axes as no plan was compared for.
    assert mx.allclose(model(wide), before, rtol=1e-5, atol=1e-6)
    assert norm.kin() == kin
    assert type(norm.clone()) is Above
    assert "24" in repr(norm)
    for copied in copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)):
        twin = copied(norm)
        assert twin.__class__ is Above
        assert mx.allclose(twin(wide), before, rtol=1e-5, atol=1e-6)
    zmlx.unpatch(model)
    assert type(norm) is Above
    assert mx.array_equal(model(wide), before)


class ByType(mnn.RMSNorm):
    """Goes by the type of itself."""

    def kin(self):
        return type(self) is ByType


class AboveType(mnn.RMSNorm):
    def _extra_repr(self):
        return super(type(self), self)._extra_repr()


class NameOfType(mnn.RMSNorm):
    def name(self):
        return type(self).__name__


@pytest.mark.parametrize(("cls", "replaced"), [(ByType, 0), (AboveType, 0), (NameOfType, 1)])
def test_what_uses_type_of_itself_is_left_alone_with_a_reason(cls, replaced):
    model = mnn.Sequential(cls(24))
    report = zmlx.patch(model)
    assert len(report.replaced) == replaced
    reasons = [s.why for s in report.skipped if s.path == "layers.0"]
    assert reasons == ["its code uses type(self)"] * (1 - replaced)
    assert "24" in repr(model)


@pytest.mark.parametrize("given", [(X,), (X, 3), (3.0,)], ids=["one", "too many", "a number"])
@pytest.mark.parametrize("kept", [0.5, 0.0, 1.5, float("nan"), "all"])
@pytest.mark.parametrize("training", [False, True])
def test_dropout_takes_what_it_took(given, kept, training):
    model = mnn.Sequential(mnn.Dropout(0.5))
    model.layers[0]._p_1 = kept
    model.train(training)

    def outcome():
        try:
            y = model.layers[0](*given)
            return y if isinstance(y, float) else (y.shape, y.dtype)
        except Exception as error:
            return type(error)

    before = outcome()
    assert zmlx.patch(model, mode="training").kinds() == {"dropout": 1}
    assert outcome() == before
