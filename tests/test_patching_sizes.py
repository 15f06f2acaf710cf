"""Modules whose call goes by the size of an axis: what differs between the sizes that are compared
is left alone."""

import sys

import mlx.core as mx
import mlx.nn as mnn
import pytest
from handwritten_modules import Feed, Residual, residual

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


#: Ways to go by the size of an axis.
SIZES = {
    "few rows": lambda x: x.shape[-2] < 50,
    "many rows": lambda x: x.shape[-2] > 4096,
    "one row": lambda x: x.shape[-2] == 1,
    "a batch": lambda x: x.shape[0] > 1,
    "a large batch of tokens": lambda x: x.shape[0] > 100 and x.size == 24 * x.shape[0],
    "one prompt": lambda x: x.shape[0] == 1 and x.size > 24,
    "long before the heads": lambda x: x.shape[0 if x.ndim == 2 else 1] > 4096,
}


class Sized(mnn.RMSNorm):
    """Is another norm for some sizes, or (`trained`) only in training."""

    def __init__(self, goes, trained=False):
        super().__init__(24)
        self._goes, self._trained = goes, trained

    def __call__(self, x):
        y = super().__call__(x)
        return y * 2 if self._goes(x) and (self.training or not self._trained) else y


@pytest.mark.parametrize("trained", [False, True], ids=["always", "in training"])
@pytest.mark.parametrize("way", SIZES)
def test_a_norm_that_goes_by_the_size_of_an_axis_is_left_alone(way, trained):
    report = zmlx.patch(mnn.Sequential(Sized(SIZES[way], trained), mnn.RMSNorm(24)))
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert [s.path for s in report.skipped] == ["layers.0"]


def is_long(x):
    return x.shape[-2] > 50


@pytest.mark.parametrize("trained", [False, True])
def test_the_reason_says_for_which_sizes_it_differs(trained):
    (skipped,) = zmlx.patch(mnn.Sequential(Sized(is_long, trained))).skipped
    where = "for a long prompt in training" if trained else "for a long prompt"
    assert skipped.why == f"it computes another thing {where}"


class SizedBlock(Residual):
    """Leaves out a half for a long prompt."""

    def __call__(self, x):
        return x + self.feed(self.norm2(x)) if is_long(x) else super().__call__(x)


class SizedFeed(Feed):
    """Has another unit for a long prompt."""

    def __call__(self, x):
        y = self.up(x)
        return self.down(mnn.relu(y) if is_long(x) else self.act(y))


class SizedUnit(mnn.Module):
    """Has another function for long rows."""

    def __call__(self, x):
        return mnn.relu(x) if x.shape[-1] > 100 else mnn.silu(x)


class SizedGate(mnn.Module):
    """So has this one."""

    def __call__(self, gate, up):
        return (mnn.relu if gate.shape[-1] > 100 else mnn.silu)(gate) * up


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: SizedBlock(lambda: mnn.RMSNorm(24)), {"norm": 2}),
        (lambda: SizedFeed(mnn.GELU()), {"activation": 1}),
        (SizedUnit, {}),
        (SizedGate, {}),
    ],
    ids=["block", "feed-forward network", "activation", "gated unit"],
)
def test_what_goes_by_the_size_of_an_axis_is_left_alone(make, kinds):
    assert zmlx.patch(mnn.Sequential(make())).kinds() == kinds


class Sliced(mnn.RoPE):
    """Returns what it turns, and drops the rest of wider rows."""

    def __call__(self, x, offset=0):
        return super().__call__(x[..., : self.dims], offset)


def test_a_rotation_is_compared_on_rows_that_are_wider_than_it():
    assert zmlx.patch(mnn.Sequential(mnn.RoPE(8), Sliced(8))).kinds() == {"rope": 1}


class Steps(mnn.Module):
    """Goes through a prompt step by step."""

    def __init__(self):
        super().__init__()
        self.weight = mx.ones(24)

    def __call__(self, x):
        return mx.stack([x[..., i, :] * self.weight for i in range(x.shape[-2])], axis=-2)


def test_children_are_not_called_with_the_long_prompts_of_a_trace():
    model = residual()
    model.mix = Steps()
    lengths = []

    def seen(frame, event, _):
        if event == "call" and frame.f_code is Steps.__call__.__code__:
            lengths.append(frame.f_locals["x"].shape[-2])

    sys.setprofile(seen)  # a list that the call itself added to would be an effect
    try:
        assert zmlx.patch(model).kinds() == {"residual_norm": 1, "norm": 2}
    finally:
        sys.setprofile(None)
    assert 0 < max(lengths) < 10
