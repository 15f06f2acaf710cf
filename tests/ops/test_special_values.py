"""NaN and infinities come out where the reference has them, and other values are its values."""

import mlx.core as mx
import numpy as np
import pytest

from zmlx import launch
from zmlx.testing import draw

from .sweep import DIFFERENTIABLE, OPS, outputs, with_gradients

SPECIAL = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, 0.0, -0.0)


def assert_same(got, want):
    for a, b in zip(outputs(got), outputs(want), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-5)


def reference(op):
    """In MLX; in NumPy of what passes over NaN in MLX 0.32.2."""
    if op.name not in ("argmax", "argmin"):
        return op.reference
    return lambda x: op.reference(np.array(x), xp=np)


def with_element(op, values, but=()):
    """Arguments of an op with each of the values in one element of each argument in turn, but for
    those of some names."""
    drawn = draw(op, op.cases[1], mx.float32)
    for index, argument in enumerate(op.arguments):
        if mx.float32 not in argument.dtypes or argument.name in but:
            continue
        for value in values:
            array = np.array(drawn[index])
            array.reshape(-1)[1 if array.size > 1 else 0] = value
            yield [*drawn[:index], mx.array(array), *drawn[index + 1 :]]


def with_row_of_minus_infinity(op):
    drawn = draw(op, op.cases[1], mx.float32)
    first = np.array(drawn[0])
    first[0] = -np.inf
    return [mx.array(first), *drawn[1:]]


@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_special_value_in_an_element(op, value):
    for changed in with_element(op, [value]):
        assert_same(op.function(*changed), reference(op)(*changed))


@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_special_values_in_the_geometry_of_a_gpu(op):
    with launch.geometry("gpu"):
        for changed in with_element(op, SPECIAL):
            assert_same(op.function(*changed), reference(op)(*changed))


@pytest.mark.parametrize(
    "op", [o for o in OPS if mx.float32 in o.arguments[0].dtypes], ids=lambda o: o.name
)
def test_a_row_of_minus_infinity(op):
    changed = with_row_of_minus_infinity(op)
    assert_same(op.function(*changed), reference(op)(*changed))


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda o: o.name)
def test_a_gradient_is_the_references_where_that_is_finite(op):
    """MLX's rules multiply by 0 what is selected here, and have NaN in more places."""
    # At NaN, `mx.maximum` passes a gradient to neither of its arguments.
    nan = () if op.name == "leaky_relu" else (np.nan,)
    # The reference of varlen_attention takes what is not finite in v out of its product.
    but = ("v",) if op.name == "varlen_attention" else ()
    for changed in (
        *with_element(op, (*nan, np.inf, -np.inf), but),
        with_row_of_minus_infinity(op),
    ):
        results = with_gradients(op, changed)
        wants = with_gradients(op, changed, op.reference)
        for got, want in zip(results, wants, strict=True):
            got, want = np.array(got), np.array(want)
            finite = np.isfinite(want)
            np.testing.assert_allclose(got[finite], want[finite], rtol=1e-4, atol=1e-5)
