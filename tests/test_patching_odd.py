"""Modules with names, shapes and classes that few have: patched, they compute what they did."""

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Residual

import zmlx


@pytest.fixture(autouse=True)
def kernels_run():
    """Everything that is patched runs its kernel, whatever was measured here."""
    with zmlx.prefer("zmlx"):
        yield


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
