"""Modules written by hand: what looks like a layer is replaced, and what only looks so is not."""

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed, Residual, residual
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
    """It is no norm; that it calls one is another kind."""
    model = mnn.Sequential(cls(8), mnn.RMSNorm(8))
    report = zmlx.patch(model, exclude="calls")
    assert [r.path for r in report.replaced] == ["layers.1"]
    zmlx.unpatch(model)
    assert zmlx.patch(model).kinds() == {"calls": 1, "norm": 1}


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


def test_a_stopped_gradient_of_what_was_patched_for_inference_is_found_for_training():
    model = mnn.Sequential(Stopped(8), mnn.RMSNorm(8))
    assert zmlx.patch(model).kinds() == {"norm": 2}
    report = zmlx.patch(model, mode="training")
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert report.skipped[0].path == "layers.0"
    assert report.skipped[0].why.startswith("its gradient differs")
    assert type(model.layers[0]) is Stopped
    assert zmlx.unpatch(model) == 1


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
    assert report.skipped[0].why == "its call looks into cache"


UNSET = object()

#: Ways to go by an argument, the default, and a value for which it goes the other way.
CHOOSING = {
    "is equal": (lambda how: how == "skip", None, "skip"),
    "is one of": (lambda how: how in {"skip", "stop"}, None, "skip"),
    "has the type": (lambda how: isinstance(how, str), None, "skip"),
    "has the attribute": (lambda how: hasattr(how, "real"), None, 1),
    "is false": (lambda how: how is False, True, False),
    "is true": (lambda how: how is True, None, True),
    "is not given": (lambda how: how is UNSET, UNSET, UNSET),
    "is not none": (lambda how: how is not None, None, 1),
    "is not so": (lambda how: not how, True, 0),
}


@pytest.mark.parametrize("way", CHOOSING)
def test_a_block_that_goes_by_an_argument_is_left_alone(way):
    goes, default, value = CHOOSING[way]

    class Block(Residual):
        def __call__(self, x, how=default):
            return x if goes(how) else super().__call__(x)

    model = Block(lambda: mnn.RMSNorm(24))
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x, value), model(x, "run")
    assert zmlx.patch(model).kinds() == {"norm": 2}
    for a, b in zip(before, (model(x, value), model(x, "run")), strict=True):
        assert mx.allclose(a, b, atol=1e-5).item()


class OfTwoWidths(mnn.Module):
    """Looks into its cache behind a projection to another width."""

    def __init__(self):
        super().__init__()
        self.wide, self.down = mnn.RMSNorm(32), mnn.Linear(32, 24)
        self.up, self.norm = mnn.Linear(24, 32), mnn.RMSNorm(24)

    def __call__(self, x, cache=None):
        y = self.up(self.norm(x))
        return x + self.down(self.wide(y if cache is None else y[:, cache.offset :]))


def test_the_reason_is_that_of_the_call_and_not_of_a_wrong_width():
    (skipped,) = zmlx.patch(OfTwoWidths()).skipped
    assert (skipped.path, skipped.why) == ("", "its call looks into cache")


class Handing(Residual):
    """Hands arguments on, with and without defaults."""

    def __init__(self):
        super().__init__(lambda: mnn.RMSNorm(24))
        self.mix, self.feed = Given(), Given()

    def __call__(self, x, mask, how="run", *, bias, cache=UNSET):
        x = x + self.mix(self.norm1(x), mask, how, bias)
        return x + self.feed(self.norm2(x), cache, scale=2.0)


class Given(mnn.Module):
    """Says what it got."""

    def __init__(self):
        super().__init__()
        self.weight = mx.eye(24)
        object.__setattr__(self, "got", None)

    def __call__(self, x, *given, scale=1.0):
        object.__setattr__(self, "got", given)
        return x @ self.weight * scale


def test_a_block_hands_on_what_it_is_called_with():
    model, x = Handing(), mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x, None, bias=1)
    assert zmlx.patch(model, mode="training").kinds() == {"residual_norm": 1, "norm": 2}
    assert mx.allclose(model(x, None, bias=1), before, atol=1e-5).item()
    assert (model.mix.got, model.feed.got) == ((None, "run", 1), (UNSET,))
    model(x, mask=3, cache=4, how=None, bias=2)
    assert (model.mix.got, model.feed.got) == ((3, None, 2), (4,))


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((), {"bias": 1}),
        ((), {"how": 1, "bias": 1}),
        ((1,), {}),
        ((1, 2, 3), {}),
        ((1,), {"mask": 1, "bias": 1}),
        ((1,), {"other": 1, "bias": 1}),
    ],
)
def test_a_call_that_a_block_does_not_take_is_an_error(arguments, keywords):
    model, x = Handing(), mx.random.normal((2, 3, 24), key=mx.random.key(2))
    assert "residual_norm" in zmlx.patch(model).kinds()
    with pytest.raises(TypeError, match=r"__call__\(\)"):
        model(x, *arguments, **keywords)


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
