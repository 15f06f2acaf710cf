"""Blocks by their call: one that goes by more than arrays is left alone, others hand theirs on."""

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed, Residual

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


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


#: Ways to go by two arguments together, and values for which it goes the other way.
TOGETHER = {
    "one given": (lambda mask, causal: causal and mask is None, {"causal": True}),
    "one not given": (lambda mask, causal: mask is None and causal is not None, {"causal": 1}),
    "one alone": (lambda mask, causal: mask is None and causal is False, {"causal": False}),
}


@pytest.mark.parametrize("way", TOGETHER)
def test_a_block_that_goes_by_two_arguments_together_is_left_alone(way):
    goes, given = TOGETHER[way]

    class Block(Residual):
        def __call__(self, x, mask=None, causal=None):
            return x if goes(mask, causal) else super().__call__(x)

    model = Block(lambda: mnn.RMSNorm(24))
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    assert zmlx.patch(model).kinds() == {"norm": 2}
    assert mx.array_equal(model(x, **given), x)


#: Ways to go by what a child is.
CHILDREN = {
    "class": lambda m: isinstance(m.feed, mnn.Linear),
    "type": lambda m: type(m.feed) is mnn.Linear,
    "type in a method": lambda m: m.is_linear(),
    "identity": lambda m: m.feed is m.again,
    "name": lambda m: "feed" in m.children(),
}


@pytest.mark.parametrize("way", CHILDREN)
def test_a_block_that_goes_by_what_its_child_is_is_left_alone(way):
    goes = CHILDREN[way]

    class Block(Residual):
        def is_linear(self):
            return type(self.feed) is mnn.Linear

        def __call__(self, x):
            h = x + self.mix(self.norm1(x))
            return h if goes(self) else h + self.feed(self.norm2(h))

    model = Block(lambda: mnn.RMSNorm(24))
    if way == "identity":
        model.again = model.feed
    x = mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"norm": 2}
    assert mx.allclose(model(x), before, atol=1e-5).item()


class Asserting(Feed):
    def __call__(self, x):
        if x.shape[-1] != 24:
            raise ValueError("it is too short")
        return super().__call__(x)


class Forwarding(Residual):
    """Calls a method of a child."""

    def __init__(self):
        super().__init__(lambda: mnn.RMSNorm(24))
        self.mix = WithForward(24, 24)

    def __call__(self, x):
        x = x + self.mix.forward(self.norm1(x))
        return x + self.feed(self.norm2(x))


class WithForward(mnn.Linear):
    def forward(self, x):
        return self(x)


@pytest.mark.parametrize("make", [lambda: Asserting(mnn.SiLU()), Forwarding])
def test_what_raises_in_its_probe_is_left_alone(make):
    report = zmlx.patch(make())
    assert not {"mlp", "residual_norm"} & set(report.kinds())
    assert any(s.why.startswith("its probe failed") for s in report.skipped)


def test_a_default_of_a_block_may_have_no_hash():
    class Block(Residual):
        def __call__(self, x, options={}):  # noqa: B006
            return super().__call__(x)

    model = Block(lambda: mnn.RMSNorm(24))
    assert zmlx.patch(model).kinds() == {"residual_norm": 1, "norm": 2}


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


class Taking(Residual):
    """A block that may get more than it has names for, and hands it on."""

    def __init__(self):
        super().__init__(lambda: NormTaking(24))
        self.feed = FeedTaking(mnn.SiLU())

    def __call__(self, x, *more, **named):
        x = x + self.mix(self.norm1(x, *more, **named))
        return x + self.feed(self.norm2(x), *more, **named)


class NormTaking(mnn.RMSNorm):
    def __call__(self, x, *more, scale=1, **named):
        y = super().__call__(x) * scale
        return y * sum(more) + named.get("shift", 0) if more or named else y


class FeedTaking(Feed):
    def __call__(self, x, *more, **named):
        y = super().__call__(x)
        return y * sum(more) + named.get("shift", 0) if more or named else y


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [((), {}), ((2,), {}), ((2, 3), {"shift": 4}), ((), {"shift": 4}), ((), {"other": 5})],
)
def test_what_a_call_may_get_without_a_name_reaches_it(arguments, keywords):
    model, x = Taking(), mx.random.normal((2, 3, 24), key=mx.random.key(2))
    before = model(x, *arguments, **keywords)
    kinds = zmlx.patch(model, mode="training").kinds()
    assert kinds == {"residual_norm": 1, "norm": 2, "mlp": 1, "activation": 1}
    assert mx.allclose(model(x, *arguments, **keywords), before, atol=1e-4).item()
    assert mx.allclose(model.norm1(x, scale=2), 2 * mnn.RMSNorm(24)(x), atol=1e-5).item()


def test_a_call_that_takes_its_array_by_position_only_is_left_alone():
    class Norm(mnn.RMSNorm):
        def __call__(self, x, /):
            return super().__call__(x)

    model, x = Norm(24), mx.random.normal((3, 24), key=mx.random.key(2))
    before = model(x)
    assert not zmlx.patch(model).replaced
    assert mx.array_equal(model(x), before).item()
