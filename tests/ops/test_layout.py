"""Inputs as users have them: transposed, sliced, broadcast, empty."""

from math import prod

import mlx.core as mx
import numpy as np
import pytest

from zmlx import launch
from zmlx.testing import draw, to_numpy

from .sweep import OPS, case_with_gradients, outputs


def assert_same(got, want):
    for a, b in zip(outputs(got), outputs(want), strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


LAYOUTS = {
    "transposed": lambda x: mx.array(np.array(x.T, copy=True)).T if x.ndim > 1 else x,
    "every second element": lambda x: mx.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x,
    "offset": lambda x: mx.concatenate([x[:1], x])[1:] if x.ndim else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_layout_does_not_change_the_result(op, layout):
    values = draw(op, op.cases[1], mx.float32)
    plain = op.function(*values)
    moved = op.function(*[None if v is None else LAYOUTS[layout](v) for v in values])
    assert_same(moved, plain)


@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_a_broadcast_argument_is_read_correctly(op):
    values = draw(op, op.cases[1], mx.float32)
    first = values[0]
    flat = mx.broadcast_to(first[:1], first.shape)
    copied = mx.array(np.array(flat))
    assert_same(op.function(flat, *values[1:]), op.function(copied, *values[1:]))


@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_the_result_is_the_same_every_time(op):
    """Of the largest case in the geometry of a GPU, whose groups go to several threads of a CPU."""
    case = max(op.cases, key=lambda case: prod((*case.lead, *case.sizes.values())))
    with launch.geometry("gpu"):
        first = case_with_gradients(op, case, mx.float32)
        for _ in range(3):
            assert_same(case_with_gradients(op, case, mx.float32), first)
