"""Norms written by hand, in any words, and what has their parameters and is none."""

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Residual
from mlx.utils import tree_flatten

import zmlx
from zmlx.patching.plans import plan_of

pytestmark = pytest.mark.usefixtures("kernels_run")

EPS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class NoNorm(mnn.Module):
    """Has the parameters of a norm."""

    def __init__(self, dims):
        super().__init__()
        self.weight, self.eps = mx.ones((dims,)), 1e-5

    def __call__(self, x):
        return x * self.weight + self.eps


def test_what_has_parameters_and_equals_nothing_is_skipped_with_a_reason():
    report = zmlx.patch(mnn.Sequential(NoNorm(8), mnn.RMSNorm(8)))
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert [(s.path, s.why) for s in report.skipped] == [
        ("layers.0", "its graph equals no norm and no activation")
    ]


SQUARES = {"square": mx.square, "product": lambda y: y * y, "power": lambda y: y**2}
ROOTS = {
    "rsqrt": lambda y, v: y * mx.rsqrt(v),
    "divided": lambda y, v: y / mx.sqrt(v),
    "reciprocal": lambda y, v: (1 / mx.sqrt(v)) * y,
    "power": lambda y, v: y * v**-0.5,
}


class ByHand(mnn.Module):
    """A norm, computed in float32 in whole, up to the weight, or not at all, by an eps that is an
    attribute or a number in the call."""

    def __init__(self, centred, square, root, casts, eps=None):
        super().__init__()
        self.scale = mx.random.uniform(0.5, 2, (24,), key=mx.random.key(3))
        if eps is None:
            self.eps = 1e-6
        self.how = (centred, square, root, casts)
        self._eps = eps

    def __call__(self, x):
        centred, square, root, casts = self.how
        y = x if casts == "none" else x.astype(mx.float32)
        y = y - mx.mean(y, axis=-1, keepdims=True) if centred else y
        y = root(y, mx.mean(square(y), -1, keepdims=True) + (self._eps or self.eps))
        y = y.astype(x.dtype) if casts == "norm" else y
        y = y * (self.scale.astype(mx.float32) if casts == "all" else self.scale)
        return y.astype(x.dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("casts", ["all", "norm", "none"])
@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
@pytest.mark.parametrize("square", SQUARES.values(), ids=SQUARES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norms_by_hand_are_replaced(centred, square, root, casts, dtype):
    """To one rounding of the output, or of each step: the sums differ in order."""
    model = mnn.Sequential(ByHand(centred, square, root, casts))
    model.layers[0].scale = model.layers[0].scale.astype(dtype)
    x = mx.random.normal((2, 5, 24), key=mx.random.key(4)).astype(dtype)
    before = model(x)
    report = zmlx.patch(model)
    assert [r.op for r in report.replaced] == ["layer_norm" if centred else "rms_norm"]
    after = model(x)
    assert after.dtype == before.dtype
    eps = EPS.get(dtype, 2.0**-21) * (1 if casts == "all" else 8)
    assert mx.allclose(after, before, rtol=eps, atol=eps).item()


class Fixed(mnn.Module):
    """MLX's own norms, with numbers in the call."""

    def __init__(self, op, eps):
        super().__init__()
        self.weight, self._op, self._eps = mx.ones((24,)), op, eps

    def __call__(self, x):
        if self._op == "rms_norm":
            return mx.fast.rms_norm(x, self.weight, self._eps)
        return mx.fast.layer_norm(x, self.weight, None, self._eps)


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 3e-8, 1e-12])
def test_a_norms_eps_may_be_a_number_in_its_call(eps):
    norms = [Fixed("rms_norm", eps), Fixed("layer_norm", eps)]
    norms += [ByHand(c, mx.square, ROOTS["rsqrt"], "all", eps) for c in (False, True)]
    model = mnn.Sequential(*norms)
    x = 1e-4 * mx.random.normal((5, 24), key=mx.random.key(4))
    before = [norm(x) for norm in norms]
    report = zmlx.patch(model)
    assert [r.op for r in report.replaced] == ["rms_norm", "layer_norm"] * 2
    for norm, y in zip(norms, before, strict=True):
        assert mx.allclose(norm(x), y, rtol=1e-5, atol=1e-6 * float(mx.abs(y).max())).item()


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


class Casting(mnn.Module):
    """A norm whose weight follows the dtype of its array."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = mx.ones(24), 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight.astype(x.dtype), self.eps)


@pytest.mark.parametrize(
    ("norm", "patched_in"),
    [(lambda: ByHand(False, mx.square, ROOTS["rsqrt"], "all"), mx.bfloat16), (Casting, mx.float32)],
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


def by_hand(x, eps):
    return x * mx.rsqrt(x.square().mean(-1, keepdims=True) + eps)


class Gained(mnn.Module):
    """Has attributes that equal its eps and are none."""

    def __init__(self, length=24):
        super().__init__()
        self.init_std, self.eps, self.margin = 1e-5, 1e-5, 1e-5
        self.gain = mx.random.uniform(0.5, 2, (length,), key=mx.random.key(3))

    def __call__(self, x):
        return self.gain * by_hand(x, self.eps)


def test_a_weight_of_one_element_is_no_norms():
    report = zmlx.patch(mnn.Sequential(Gained(1)))
    assert [s.why for s in report.skipped] == [
        "a parameter of one element does not say how long its rows are"
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 24)], ids=str)
def test_a_weight_of_another_shape_is_the_norms_own_affair(shape):
    model, x = mnn.Sequential(Gained()), mx.random.normal((2, 5, 24), key=mx.random.key(4))
    assert zmlx.patch(model).kinds() == {"norm": 1}
    norm = model.layers[0]
    assert norm(x[..., :1]).shape == (2, 5, 24)
    norm.gain = mx.full(shape, 2.0)
    assert mx.allclose(model(x), 2 * by_hand(x, 1e-5), rtol=1e-5)


def test_the_norm_of_a_sum_may_get_a_weight_of_another_shape():
    model, x = Residual(Gained), mx.random.normal((2, 5, 24), key=mx.random.key(4))
    assert "residual_norm" in zmlx.patch(model).kinds()
    model.norm1.gain = model.norm2.gain = mx.full((1,), 2.0)
    after = model(x)
    zmlx.unpatch(model)
    assert mx.allclose(after, model(x), rtol=1e-4, atol=1e-5)


def test_an_attribute_that_happens_to_equal_eps_is_not_taken_for_it():
    model, x = mnn.Sequential(Gained()), mx.random.normal((2, 5, 24), key=mx.random.key(4))
    norm, before = model.layers[0], model(x)
    zmlx.patch(model)
    assert plan_of(norm).norm.eps_name == "eps"
    norm.eps = 0.5
    assert plan_of(norm) is not None
    assert mx.allclose(model(x), norm.gain * by_hand(x, 0.5), rtol=1e-4, atol=1e-5)
    norm.eps, norm.init_std, norm.margin = 1e-5, 0.5, 0.5
    assert mx.allclose(model(x), before, rtol=1e-4, atol=1e-5)


class Least(Gained):
    """Has a least eps."""

    def __init__(self):
        super().__init__()
        del self.init_std, self.margin

    def __call__(self, x):
        return self.gain * by_hand(x, max(self.eps, 1e-6))


def test_an_eps_that_is_changed_in_the_call_is_not_read_from_its_attribute():
    model, x = mnn.Sequential(Least()), mx.random.normal((2, 5, 24), key=mx.random.key(4))
    norm, before = model.layers[0], model(x)
    assert zmlx.patch(model).kinds() == {"norm": 1}
    norm.eps = 0.0
    assert plan_of(norm) is None
    assert mx.allclose(model(x), before, rtol=1e-4, atol=1e-4)


class Parted(Renamed):
    """Has attributes before its own that equal them."""

    def __init__(self):
        super().__init__()
        own = dict(vars(self))
        vars(self).clear()
        vars(self).update({"kernel_size": 3, "margin": 1e-3, **own})


def test_attributes_that_happen_to_equal_a_group_norms_are_not_taken_for_them():
    model = mnn.Sequential(Parted())
    norm = model.layers[0]
    assert zmlx.patch(model).kinds() == {"norm": 1}
    plan = plan_of(norm)
    assert (plan.groups, plan.eps) == ("parts", "tiny")
