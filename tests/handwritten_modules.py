"""Modules written by hand that several tests of patching use."""

import mlx.nn as mnn


class Residual(mnn.Module):
    """A block of two projections, as of a vision transformer."""

    def __init__(self, norm):
        super().__init__()
        self.norm1, self.mix, self.norm2, self.feed = (
            norm(), mnn.Linear(24, 24), norm(), mnn.Linear(24, 24)
        )  # fmt: skip

    def __call__(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.feed(self.norm2(x))


def residual():
    return Residual(lambda: mnn.RMSNorm(24))


class Feed(mnn.Module):
    """A feed-forward network with an activation of its own."""

    def __init__(self, act):
        super().__init__()
        self.up, self.act, self.down = mnn.Linear(24, 32), act, mnn.Linear(32, 24)

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


class UnitOfMode(mnn.Module):
    """A gated unit that is another one in training."""

    def __call__(self, gate, up):
        return (mnn.gelu if self.training else mnn.silu)(gate) * up


class MLPWithUnit(mnn.Module):
    """Its unit is a child."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)
        self.unit = UnitOfMode()

    def __call__(self, x):
        return self.down(self.unit(self.gate(x), self.up(x)))
