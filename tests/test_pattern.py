"""Patterns as functions of arrays."""

from __future__ import annotations

import mlx.core as mx
import pytest

import zmlx
from zmlx import launch
from zmlx.codegen import (
    Columnwise,
    Elementwise,
    Fold,
    Let,
    Operand,
    Output,
    Pass,
    Reduce,
    Rowwise,
    Scan,
    elementwise_unary,
)
from zmlx.pattern import PatternKernel


@pytest.mark.parametrize("kind", ["row", "per_row"])
def test_an_output_of_a_0d_array_is_0d(kind):
    largest = Rowwise(
        (Operand("x"),), (Output("y", "m", kind),), (Pass((Reduce("m", "max", "x"),)),)
    )
    y = PatternKernel("largest", largest, (mx.float32,))(mx.array(3.0))
    assert y.shape == ()
    assert y.item() == 3


def test_an_array_that_is_a_scalar_and_has_elements_is_refused():
    both = Rowwise(
        (Operand("x", array="a"), Operand("s", "scalar", array="a")), (Output("y", "x + s"),)
    )
    with pytest.raises(ValueError, match=r"^\[both\] 'a' must be a scalar or have elements but"):
        PatternKernel("both", both, (mx.float32,))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_step_may_use_vectors(dtype):
    """Of both, the CPU target's prelude has a section."""
    pattern = elementwise_unary("dot(float2(x, 2.0f), float2(1.0f, 0.5f))")
    y = PatternKernel("dot", pattern, (("x",),))(mx.arange(40).astype(dtype))
    assert y.tolist() == list(range(1, 41))
    named = zmlx.expression("half2 * float4", inputs=("half2", "float4"))
    assert named(mx.arange(5).astype(dtype), mx.array(2.0, dtype)).tolist() == [0, 2, 4, 6, 8]


def test_a_let_that_is_an_int_has_no_slope():
    times = Elementwise(
        (Operand("x", "full"),), (Output("y", "x * k", "full"),), (Let("k", "x", "int"),)
    )
    f = PatternKernel("times", times, (mx.float32,))
    x = mx.array([1.5, -2.75, 0.5])
    assert mx.grad(lambda x: f(x).sum())(x).tolist() == [1, -2, 0]


@pytest.mark.parametrize("kind", ["row", "per_row"])
def test_an_output_of_a_single_row_has_no_leading_axes(kind):
    first = Rowwise(
        (Operand("x"), Operand("r", "per_row")),
        (Output("y", "x + r" if kind == "row" else "r", kind),),
    )
    y = PatternKernel("first", first, (mx.float32,))(mx.array([3.0, 4.0]), mx.array(1.0))
    assert y.tolist() == ([4, 5] if kind == "row" else 1)


@pytest.mark.parametrize("pattern", [Columnwise, Rowwise])
def test_column_outputs_of_both_patterns_are_sums_over_rows(pattern):
    sums = pattern((Operand("x"),), (Output("y", "x", "column"),))
    kernel = PatternKernel("sums", sums, (mx.float32,), chunks=1)
    assert kernel(mx.array([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[4, 6]]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_folds_and_scans_take_arrays_of_their_number_of_axes(shape, columns):
    axes = 3 if columns else 2
    if len(shape) == axes:
        return
    for make in (Fold, Scan):
        kernel = PatternKernel(
            "case", make("sum", (Output("y", "total"),), columns=columns), (mx.float32,)
        )
        with pytest.raises(ValueError, match=rf"^\[case\] 'x' must have {axes} axes but got \d\.$"):
            kernel(mx.zeros(shape))


def test_folds_refuse_arrays_whose_bytes_64_bits_do_not_count():
    kernel = PatternKernel(
        "case", Fold("sum", (Output("y", "total"),), columns=True), (mx.float32,)
    )
    with pytest.raises(ValueError, match=r"^\[case\] arrays must be smaller than 2\^60 but got"):
        kernel(mx.broadcast_to(mx.array(1.0), (1 << 20, 1 << 20, 1 << 20)))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "shape, options", [((2, 0), {}), ((2, 0), {"short": True}), ((2, 0, 3), {"columns": True})]
)
def test_moments_of_no_elements_are_zeros(shape, options, kind):
    """There is no last element to take off each."""
    outputs = tuple(Output(n, n) for n in ("count", "mean", "m2"))
    kernel = PatternKernel("moments", Fold("moments", outputs, **options), (mx.float32,) * 3)
    with launch.geometry(kind):
        for y in kernel(mx.zeros(shape)):
            assert mx.array_equal(y, mx.zeros((2, *shape[2:])))


@pytest.mark.parametrize("shape", [(2, 3), (3,), ()], ids=str)
def test_rows_that_have_not_equal_parts_are_refused(shape):
    first = Rowwise((Operand("x", parts=2),), (Output("y", "x"),))
    kernel = PatternKernel("first", first, (mx.float32,))
    with pytest.raises(ValueError, match=r"^\[first\] 'x' must have a last axis divisible by 2"):
        kernel(mx.zeros(shape))


@pytest.mark.parametrize("keep, kind", [(("x",), "row"), ((), "column")])
def test_rows_that_are_too_long_to_be_kept_or_summed_are_refused(keep, kind):
    """An array of them would overflow the stack."""
    pattern = Rowwise((Operand("x"),), (Output("y", "x", kind),), keep=keep)
    kernel = PatternKernel("held", pattern, (mx.float32,))
    message = r"^\[held\] rows must have at most 32768 elements .* but got 32769\.$"
    assert kernel(mx.ones((2, 32768))).shape[-1] == 32768
    with pytest.raises(ValueError, match=message):
        kernel(mx.ones((2, 32769)))


def test_a_kernel_remembers_some_launches(monkeypatch):
    monkeypatch.setattr(launch, "SHAPES_KEPT", 3)
    kernel = PatternKernel("double", elementwise_unary("x + x"), (("x",),))
    for n in (1, 2, 3, 4, 5, 2):
        assert kernel(mx.ones((n,))).tolist() == [2.0] * n
        assert all(len(kept) <= 3 for kept in kernel._launches.values())
