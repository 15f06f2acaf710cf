"""Bad arguments raise `[op] 'argument' must … but got …` before anything runs."""

import re

import mlx.core as mx
import numpy as np
import pytest

from zmlx.arguments import dimensions
from zmlx.testing import draw

from .sweep import OPS

EACH = [
    pytest.param(op, i, id=f"{op.name}-{a.name}") for op in OPS for i, a in enumerate(op.arguments)
]


def message(op, argument):
    return re.escape(f"[{op.name}] '{argument.name}' must ") + r".* but got .*\."


@pytest.mark.parametrize("op, index", EACH)
def test_wrong_dtype(op, index):
    values = draw(op, op.cases[1], mx.float32)
    values[index] = values[index].astype(mx.complex64)
    with pytest.raises(ValueError, match=message(op, op.arguments[index])):
        op.function(*values)


@pytest.mark.parametrize("op, index", EACH)
def test_not_an_array(op, index):
    values = draw(op, op.cases[1], mx.float32)
    values[index] = np.array(values[index])
    with pytest.raises(TypeError, match=message(op, op.arguments[index])):
        op.function(*values)


def shared_axis(op, index):
    """An axis that the argument shares with one before it; None where it has a size of its own."""
    known = {s for a in op.arguments[:index] for _, s in dimensions(a.shape)}
    axes = [s for _, s in dimensions(op.arguments[index].shape)]
    return next((i for i, s in enumerate(axes) if s in known), None)


@pytest.mark.parametrize("op, index", [p for p in EACH if shared_axis(*p.values) is not None])
def test_a_shape_that_does_not_match_an_argument_before(op, index):
    values = draw(op, op.cases[1], mx.float32)
    axis = shared_axis(op, index)
    values[index] = mx.concatenate([values[index], values[index]], axis=axis)
    with pytest.raises(ValueError, match=message(op, op.arguments[index])):
        op.function(*values)


@pytest.mark.parametrize(
    "op", [o for o in OPS if "D" in o.arguments[0].shape], ids=lambda o: o.name
)
def test_too_few_axes(op):
    values = draw(op, op.cases[1], mx.float32)
    values[0] = mx.array(1.0)
    with pytest.raises(ValueError, match=re.escape(f"[{op.name}] '")):
        op.function(*values)
