"""`zmlx.testing` finds what is wrong with a kernel of one's own."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import testing
from zmlx.registry import Argument, Case, Op

CASE = Case((7,), {"D": 31})
SQUARES = Op(
    name="squares",
    family="mine",
    summary="squares",
    formula="x²",
    function=zmlx.expression("x * x"),
    reference=lambda x, *, xp=mx: x * x,
    arguments=(Argument("x"),),
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_an_entry_need_not_be_registered(dtype):
    for case in (*SQUARES.cases[:4], CASE):
        testing.check_forward(SQUARES, case, dtype)
        testing.check_gradient(SQUARES, case, dtype)


def test_a_wrong_kernel_and_a_wrong_gradient_are_found():
    wrong = dataclasses.replace(SQUARES, function=zmlx.expression("x * x * 1.00001"))
    with pytest.raises(AssertionError, match=r"squares output 0 .*217 elements are off"):
        testing.check_forward(wrong, CASE, mx.float32)
    slope = zmlx.autograd.unary_from_expr("x * x", derivative="x")
    with pytest.raises(AssertionError, match="squares gradient of x"):
        testing.check_gradient(dataclasses.replace(SQUARES, function=slope), CASE, mx.float32)


@pytest.mark.parametrize(
    "given, found",
    [(mx.float32, mx.bfloat16), (mx.float16, mx.bfloat16), (mx.bfloat16, mx.float16)],
)
def test_a_result_of_a_coarser_dtype_is_found(given, found):
    op = dataclasses.replace(SQUARES, function=lambda x: (x * x).astype(found))
    with pytest.raises(AssertionError, match=r"squares output 0 is b?float16 for"):
        testing.check_forward(op, CASE, given)


def test_a_reference_must_not_turn_to_float64():
    """Its error in float32, which the bound is made of, would be that of float64."""

    def promotes(x, *, xp=mx):
        return x * x * (xp.sum(xp.zeros_like(x)) + np.float64(1))

    op = dataclasses.replace(SQUARES, reference=promotes)
    with pytest.raises(AssertionError, match="must compute in float32 but gave float64"):
        testing.check_forward(op, CASE, mx.float32)
    with pytest.raises(AssertionError, match="must compute in float32 but gave float64"):
        testing.check_gradient(op, CASE, mx.float32)
    numbers = testing.oracle_namespace(np.float32)
    assert numbers.where(np.arange(3) > 1, 0.0, 1.0).dtype == np.float32
    assert numbers.zeros((2,)).dtype == np.float32


def test_a_sum_of_few_elements_is_given_the_error_of_several():
    """One draw of a sum of terms that cancel may be exact in NumPy by chance."""
    scaled = dataclasses.replace(
        SQUARES,
        function=zmlx.expression("x * s", inputs=("x", "s")),
        reference=lambda x, scale, *, xp=mx: x * scale,
        arguments=(Argument("x"), Argument("scale", "(1,)")),
    )
    for seed in range(40):
        testing.check_gradient(scaled, Case((100,), {"D": 7}), mx.float32, seed=seed)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.float64])
def test_a_reference_may_be_an_array_of_mlx(dtype):
    x = mx.array([1.0, 2.0], dtype=dtype)
    testing.assert_matches(x, x)
    testing.assert_matches(x, x, x)
    apart = 1 + 8 * testing.EPS[dtype]
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        testing.assert_matches(x, np.array([1.0, 2.0 * apart]))


def test_integers_are_compared_as_integers():
    large = mx.array([3, 2**53 + 1])
    testing.assert_matches(large, [3, 2**53 + 1])
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, first \(1,\)"):
        testing.assert_matches(large, [3, 2**53])


@pytest.mark.parametrize("out, reference, message", [
    (np.ones(2), [1.0, 1.0], "'out' must be an mx.array but got ndarray"),
    (mx.array([1j]), [1j], "'out' must be real but got complex64"),
    (mx.array([1.0]), ["1"], "'reference' must be real"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(out, reference, message):
    with pytest.raises(TypeError, match=message):
        testing.assert_matches(out, reference)


def test_a_base_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"'base' must have shape \(1,\) but got \(2,\)"):
        zmlx.testing.assert_matches(mx.array([1.0]), [1.0], [1.0, 1.0])
