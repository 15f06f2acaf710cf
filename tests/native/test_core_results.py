"""Lazy nodes of MLX that run compiled Metal text: launches, outputs, inputs of any strides."""

from __future__ import annotations

from itertools import permutations

import mlx.core as mx
import numpy as np
import pytest
from core_kernels import SQUARE, core, kernel, prepare, square, x16


def test_scalars_constants_templates_and_two_outputs() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    sum[i] = T(a * x[i] + y[i] + N);
    difference[i] = x[i] - y[i];
    """
    made = kernel("axpy", source, ("x", "y", "a"), ("sum", "difference"))
    x, y = x16, mx.ones((16,))
    launch = prepare(
        made,
        (x, y),
        template=(("T", mx.int32), ("N", -3), ("B", False)),
        shapes=((16,), (4, 4)),
        dtypes=(mx.int32, mx.float32),
        constants=(mx.array(2.0),),
    )
    total, difference = core.launch(launch, (x, y))
    assert total.dtype == mx.int32
    assert total.tolist() == [2 * i - 2 for i in range(16)]
    assert difference.shape == (4, 4)
    assert difference.flatten().tolist() == (x - y).tolist()


def test_prepared_launches_are_found_by_shapes_and_dtypes() -> None:
    plans = {core.signature((x16,)): prepare(kernel("square", SQUARE), (x16,))}
    assert core.run(plans, (x16,)).tolist() == (x16 * x16).tolist()
    assert core.run(plans, (x16.astype(mx.int32),)) is None
    assert core.run(plans, (x16[:8],)) is None
    assert core.run(plans, (x16.reshape(4, 4),)) is None
    assert core.run(plans, (2.0,)) is None

    def traced(x: mx.array) -> mx.array:
        assert core.run(plans, (x,)) is None
        return x

    mx.compile(traced)(x16)
    mx.grad(lambda x: traced(x).sum())(x16)


def test_tracing_tells_tracers_and_shapeless_traces() -> None:
    seen = []

    def function(x: mx.array) -> mx.array:
        seen.append((core.tracing((x,)), core.tracing((x16,)), core.tracing(())))
        return x.sum()

    function(x16)
    mx.compile(function)(x16)
    mx.grad(function)(x16)
    mx.compile(function, shapeless=True)(x16)
    mx.compile(mx.grad(function), shapeless=True)(x16)
    assert seen == [(0, 0, 0), (1, 0, 0), (1, 0, 0), (2, 0, 0), (2, 0, 0)]


def test_what_waits_for_others_is_itself_to_every_transform() -> None:
    x, other = mx.arange(6.0).reshape(2, 3), mx.ones((4,))

    def function(x: mx.array) -> mx.array:
        return mx.sin(core.after((x,), (other, mx.cos(x))))

    for of in (
        lambda f: f(x),
        lambda f: mx.compile(f)(x),
        lambda f: mx.grad(lambda x: f(x).sum())(x),
        lambda f: mx.jvp(f, [x], [x])[1][0],
        lambda f: mx.vmap(f, in_axes=1, out_axes=1)(x),
    ):
        assert mx.array_equal(of(function), of(mx.sin))
    a, b = core.after((x, other), (x,))
    assert mx.array_equal(a, x)
    assert mx.array_equal(b, other)


def test_what_a_gradient_is_taken_of_is_told_from_what_is_made_of_it() -> None:
    seen = []

    def function(x: mx.array) -> mx.array:
        seen.append((core.is_primal(x), core.is_primal(2 * x), core.is_primal(x16)))
        return x.sum()

    function(x16)
    mx.compile(function)(x16)
    mx.grad(function)(x16)
    mx.compile(mx.grad(function))(x16)
    mx.jvp(function, [x16], [x16])
    assert seen == [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0)]


def test_every_group_of_the_grid_runs_once() -> None:
    # Group sizes that do not divide the grid, on one thread and on several.
    source = """
    uint3 p = thread_position_in_grid;
    o[(p.z * 5 + p.y) * 7000 + p.x] += 1;
    """
    made = kernel("count", source, inputs=())
    before = core.threads()
    try:
        for threads in (1, 4):
            core.set_threads(threads)
            for group in ((1, 1, 1), (32, 2, 1), (1024, 1, 1), (96, 5, 2)):
                launch = core.prepare(
                    made, (), (), (7000, 5, 3), group, ((3, 5, 7000),), (mx.int32,), 0, ()
                )
                assert (core.launch(launch, ()) == 1).all()
    finally:
        core.set_threads(before)


@pytest.mark.parametrize(
    "dtype", [mx.bool_, mx.uint8, mx.int16, mx.float16, mx.bfloat16, mx.float32, mx.int64]
)
def test_init_value_fills_outputs_as_astype_converts(dtype: mx.Dtype) -> None:
    launch = prepare(
        kernel("nothing", "if (x[0] > 100) o[0] = T(x[0]);"),
        (x16,),
        shapes=((5,),),
        dtypes=(dtype,),
        template=(("T", dtype),),
        init=3.7,
        grid=(1, 1, 1),
    )
    expected = mx.full((5,), 3.7).astype(dtype)
    assert mx.array_equal(core.launch(launch, (x16,)), expected)


def test_empty_outputs_and_empty_grids_run_nothing() -> None:
    made = kernel("square", SQUARE)
    empty = mx.zeros((0, 4))
    before = core.statistics()["launches"]
    assert core.launch(prepare(made, (empty,), grid=(0, 1, 1)), (empty,)).shape == (0, 4)
    assert core.launch(prepare(made, (empty,), grid=(8, 1, 1)), (empty,)).tolist() == []
    filled = prepare(made, (x16,), grid=(0, 1, 1), init=2)
    assert core.launch(filled, (x16,)).tolist() == [2] * 16
    assert core.statistics()["launches"] == before


STRIDED = {
    "transposed": lambda x: x.transpose(2, 1, 0),
    "rotated": lambda x: x.transpose(1, 2, 0),
    "sliced": lambda x: x[1:, ::2, 1:-1],
    "reversed": lambda x: x[:, ::-1],
    "broadcast": lambda x: mx.broadcast_to(x[:, :1, :1], (6, 20, 33)),
    "column": lambda x: x[:, :, 3],
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("dtype", [mx.int8, mx.float16, mx.float32, mx.int64])
def test_strided_inputs_are_copied_in_row_major_order(view: str, dtype: mx.Dtype) -> None:
    base = mx.arange(6 * 20 * 33).reshape(6, 20, 33).astype(dtype)
    x = STRIDED[view](base)
    launch = prepare(kernel("copy", "uint i = thread_position_in_grid.x; o[i] = x[i];"), (x,))
    mx.eval(x)
    before = core.statistics()["contiguous_copies"]
    assert mx.array_equal(core.launch(launch, (x,)), x)
    assert core.statistics()["contiguous_copies"] == before + 1


@pytest.mark.parametrize("dtype", [mx.uint8, mx.float16, mx.float32, mx.int64])
def test_copies_of_several_blocks_are_in_row_major_order(dtype: mx.Dtype) -> None:
    """Blocks of rows, turned blocks, the rests of both, whatever the axes and the steps."""
    base = mx.random.randint(0, 100, (3, 34, 5, 270)).astype(dtype)
    views = [base.transpose(axes) for axes in permutations(range(4))]
    views += [base[::-1, ::3].transpose(axes) for axes in permutations(range(4))]
    wide = mx.random.randint(0, 100, (150_000, 3)).astype(dtype)
    square = mx.random.randint(0, 100, (1300, 1100)).astype(dtype)
    views += [wide.T, wide[:, :2], wide[::-2].T, square.T, square[7:, ::2].T, square[:, ::-1].T]
    made = kernel("copy", "uint i = thread_position_in_grid.x; o[i] = x[i];")
    for x in views:
        mx.eval(x)
        launch = prepare(made, (x,), grid=(x.size, 1, 1), group=(256, 1, 1))
        copy = np.array(core.launch(launch, (x,)))
        assert np.array_equal(copy, np.array(x)), (x.shape, memoryview(x).strides)


def test_contiguous_inputs_are_not_copied() -> None:
    before = core.statistics()["contiguous_copies"]
    mx.eval(square(x16), square(x16[4:]), square(x16.reshape(4, 4)))
    assert core.statistics()["contiguous_copies"] == before


def test_strides_are_passed_where_the_kernel_asks_for_them() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    uint width = x_shape[1];
    o[i] = x[(i / width) * x_strides[0] + (i % width) * x_strides[1]] * x_ndim;
    """
    x = mx.arange(48, dtype=mx.float32).reshape(6, 8)
    for contiguous, copies in ((False, 0), (True, 1)):
        made = kernel("strided", source, contiguous=contiguous)
        before = core.statistics()["contiguous_copies"]
        result = core.launch(prepare(made, (x.T,)), (x.T,))
        assert mx.array_equal(result, 2 * x.T)
        assert core.statistics()["contiguous_copies"] == before + copies


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        # Just above the middle of two numbers, where float or double lies on it.
        ("1.00048828126h", 1 + 2**-10),
        ("1.000488281250000000001h", 1 + 2**-10),
        ("1.00048828125h", 1.0),
        ("1.00146484375h", 1 + 2**-9),
        ("1.00390625001bf", 1 + 2**-7),
        ("2.98023224e-8h", 2.0**-24),
        ("2.98e-8h", 0.0),
        ("65519.99h", 65504.0),
        ("65520.0h", float("inf")),
        ("0.0h", 0.0),
    ],
)
def test_a_narrow_literal_is_rounded_once(literal: str, expected: float) -> None:
    made = kernel("literal", f"o[0] = float({literal});")
    one = (1, 1, 1)
    launch = core.prepare(made, (x16,), (), one, one, ((1,),), (mx.float32,), None, ())
    assert core.launch(launch, (x16,)).item() == expected
