"""NaN and infinities come out where the reference has them."""

import mlx.core as mx
import numpy as np
import pytest

from zmlx import launch
from zmlx.testing import draw

from .sweep import OPS, outputs

SPECIAL = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, 0.0, -0.0)


def assert_same_kinds(got, want):
    for a, b in zip(outputs(got), outputs(want), strict=True):
        a, b = np.array(a), np.array(b)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_special_value_in_an_element(op, value):
    check_element(op, value)


@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_special_values_in_the_geometry_of_a_gpu(op):
    with launch.geometry("gpu"):
        for value in SPECIAL:
            check_element(op, value)


def check_element(op, value):
    """In one element of each argument in turn."""
    values = draw(op, op.cases[1], mx.float32)
    for index, argument in enumerate(op.arguments):
        if mx.float32 not in argument.dtypes:
            continue
        array = np.array(values[index])
        array.reshape(-1)[1 if array.size > 1 else 0] = value
        changed = [*values[:index], mx.array(array), *values[index + 1 :]]
        assert_same_kinds(op.function(*changed), op.reference(*changed))


@pytest.mark.parametrize(
    "op", [o for o in OPS if mx.float32 in o.arguments[0].dtypes], ids=lambda o: o.name
)
def test_a_row_of_minus_infinity(op):
    values = draw(op, op.cases[1], mx.float32)
    first = np.array(values[0])
    first[0] = -np.inf
    changed = [mx.array(first), *values[1:]]
    assert_same_kinds(op.function(*changed), op.reference(*changed))
