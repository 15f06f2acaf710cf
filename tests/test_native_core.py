"""The native core: lazy nodes of MLX that run compiled Metal text, and their place in MLX.

The kernels here are the smallest that show a claim; what Metal text means is tested elsewhere.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from zmlx import native

core = native.load()

SQUARE = "uint i = thread_position_in_grid.x; o[i] = x[i] * x[i];"


def kernel(
    name: str,
    source: str,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("o",),
    contiguous: bool = True,
) -> Any:
    return core.kernel(name, inputs, outputs, source, "", contiguous, False, "safe")


def prepare(
    made: Any,
    inputs: tuple[mx.array, ...],
    *,
    shapes: Any = None,
    dtypes: Any = None,
    grid: Any = None,
    group: Any = (1, 1, 1),
    template: Any = (),
    init: float | None = None,
    constants: tuple[mx.array, ...] = (),
    donate: Any = None,
) -> Any:
    return core.prepare(
        made,
        inputs,
        template,
        grid or (inputs[0].size, 1, 1),
        group,
        shapes or (inputs[0].shape,),
        dtypes or (inputs[0].dtype,),
        init,
        constants,
        donate,
    )


class Square:
    """The record of a square: each method as the transform's definition has it."""

    def __call__(self, x: mx.array) -> mx.array:
        return core.launch(prepare(kernel("square", SQUARE), (x,)), (x,), self)

    def vjp(self, primals: Any, cotangents: Any, argnums: Any, outputs: Any) -> Any:
        assert argnums == (0,)
        assert len(outputs) == 1
        return (2 * primals[0] * cotangents[0],)

    def jvp(self, primals: Any, tangents: Any, argnums: Any) -> Any:
        return (2 * primals[0] * tangents[0],)

    def vmap(self, inputs: Any, axes: Any) -> Any:
        return (self(mx.moveaxis(inputs[0], axes[0], 0)),), (0,)


square = Square()
x16 = mx.arange(16, dtype=mx.float32)
mx.eval(x16)  # Another thread could not: the node's stream is this thread's.


# ---- the text ---------------------------------------------------------------------------------


def exported_text(source: str, inputs: tuple[mx.array, ...], template: Any, outputs: int) -> str:
    names = [f"in{i}" for i in range(len(inputs))]
    made = mx.fast.metal_kernel(
        name="t",
        input_names=names,
        output_names=[f"out{i}" for i in range(outputs)],
        source=source,
        header="// header\n",
    )
    events: list[dict[str, Any]] = []
    mx.export_function(
        events.append,
        lambda *arrays: made(
            inputs=list(arrays),
            template=list(template),
            grid=(8, 1, 1),
            threadgroup=(4, 1, 1),
            output_shapes=[(8,)] * outputs,
            output_dtypes=[mx.float16] * outputs,
        ),
        *inputs,
    )
    return next(e for e in events if e.get("name") == "CustomKernel")["arguments"][1]


def text(source: str, inputs: tuple[mx.array, ...], template: Any, outputs: int) -> str:
    made = core.kernel(
        "t",
        [f"in{i}" for i in range(len(inputs))],
        [f"out{i}" for i in range(outputs)],
        source,
        "// header\n",
        True,
        False,
        "safe",
    )
    return core.metal_text(
        made, inputs, template, (8, 1, 1), (4, 1, 1), ((8,),) * outputs, (mx.float16,) * outputs
    )


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    ("inputs", "template"),
    [
        ((), ()),
        # In the device address space, a reference, in the constant address space.
        ((mx.zeros((8, 2)), mx.array(1.0), mx.zeros((3,), dtype=mx.int64)), ()),
        ((mx.zeros((8,), dtype=mx.bfloat16),), (("T", mx.bfloat16), ("N", 3), ("B", True))),
    ],
)
def test_text_is_what_mlx_itself_exports(inputs: Any, template: Any, outputs: int) -> None:
    source = "uint i = thread_position_in_grid.x; out0[i] = 1;"
    assert text(source, inputs, template, outputs) == exported_text(
        source, inputs, template, outputs
    )


def test_signature_that_mlx_closes_too_early_is_mended() -> None:
    # Several outputs, a use of <input>_shape and no thread attribute.
    source = "out0[0] = in0_shape[0]; out1[0] = in0_strides[1]; out2[0] = in0_ndim;"
    inputs = (mx.zeros((8, 2)), mx.array(1.0))
    assert text(source, inputs, (), 3).startswith(
        """// header
[[kernel]] void custom_kernel_t_float_floats_float16_t_float16_t_float16_t(
  const device float* in0 [[buffer(0)]],
  const constant int* in0_shape [[buffer(1)]],
  const constant int64_t* in0_strides [[buffer(2)]],
  const constant int& in0_ndim [[buffer(3)]],
  const constant float& in1 [[buffer(4)]],
  device float16_t* out0 [[buffer(5)]],
  device float16_t* out1 [[buffer(6)]],
  device float16_t* out2 [[buffer(7)]]) {
out0[0]"""
    )


def test_negative_template_arguments_give_a_name_that_compiles() -> None:
    written = text(SQUARE, (x16,), (("N", -3),), 1)
    assert "void custom_kernel_t___3_float_float16_t(" in written
    assert "decltype(custom_kernel_t___3_float_float16_t<-3>)" in written


@pytest.mark.parametrize("shapeless", [False, True])
def test_text_is_available_inside_traces(shapeless: bool) -> None:
    expected = text(SQUARE, (x16,), (), 1)
    seen = []

    def function(x: mx.array) -> mx.array:
        seen.append(text(SQUARE, (x,), (), 1))
        return x * x

    mx.compile(function, shapeless=shapeless)(x16)
    mx.grad(lambda x: function(x).sum())(x16)
    mx.vmap(function)(mx.zeros((2, 16)))
    assert seen == [expected] * 3


# ---- results ----------------------------------------------------------------------------------


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


# ---- strides ----------------------------------------------------------------------------------

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


# ---- transforms -------------------------------------------------------------------------------


def test_gradients_of_any_order_come_from_the_record() -> None:
    loss = lambda x: square(x).sum()  # noqa: E731
    assert mx.array_equal(mx.grad(loss)(x16), 2 * x16)
    assert mx.array_equal(mx.grad(lambda x: mx.grad(loss)(x).sum())(x16), mx.full((16,), 2.0))
    assert mx.array_equal(mx.compile(mx.grad(loss))(x16), 2 * x16)
    assert mx.array_equal(mx.grad(mx.compile(loss))(x16), 2 * x16)
    assert mx.array_equal(mx.grad(lambda x: mx.checkpoint(square)(x).sum())(x16), 2 * x16)


def test_jvp_and_vmap_come_from_the_record() -> None:
    outputs, tangents = mx.jvp(square, [x16], [mx.full((16,), 3.0)])
    assert mx.array_equal(outputs[0], x16 * x16)
    assert mx.array_equal(tangents[0], 6 * x16)
    batch = mx.random.normal((3, 16))
    assert mx.array_equal(mx.vmap(square)(batch), batch * batch)
    assert mx.array_equal(mx.vmap(square, in_axes=1, out_axes=1)(batch), batch * batch)
    gradient = mx.vmap(mx.grad(lambda x: square(x).sum()))
    assert mx.array_equal(gradient(batch), 2 * batch)
    assert mx.array_equal(mx.grad(lambda b: mx.vmap(square)(b).sum())(batch), 2 * batch)


def test_compiled_functions_run_the_kernel_at_every_call() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,))
    compiled = mx.compile(lambda x: core.launch(launch, (x + 1,)) * 2)
    for step in range(3):
        x = x16 + step
        assert mx.array_equal(compiled(x), (x + 1) * (x + 1) * 2)


def test_without_a_record_transforms_raise_as_for_mlx_kernels() -> None:
    launch = prepare(kernel("bare", SQUARE), (x16,))
    bare = lambda x: core.launch(launch, (x,))  # noqa: E731
    for transform, name in (
        (lambda: mx.grad(lambda x: bare(x).sum())(x16), "vjp"),
        (lambda: mx.jvp(bare, [x16], [x16]), "jvp"),
        (lambda: mx.vmap(bare)(mx.zeros((2, 16))), "vmap"),
    ):
        with pytest.raises(ValueError, match=rf"\[Primitive::{name}\] Not implemented for bare"):
            transform()
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        mx.eval(mx.compile(bare, shapeless=True)(x16))


def answer_with(gradients: Any) -> Any:
    class Answer:
        def vjp(self, *_: Any) -> Any:
            return gradients() if callable(gradients) else gradients

    record = Answer()
    launch = prepare(kernel("square", SQUARE), (x16,))
    return mx.grad(lambda x: core.launch(launch, (x,), record).sum())(x16)


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        ((), ValueError, r"\[square\] 'vjp' must return 1 gradients but got 0"),
        ((x16, x16), ValueError, "must return 1 gradients but got 2"),
        ((x16[:4],), ValueError, r"shape \(16\) and dtype float32 but got \(4\)"),
        ((x16.astype(mx.float16),), ValueError, "but got .* float16"),
        ((None,), ValueError, "must hold mx.array objects but got NoneType"),
        (None, RuntimeError, "TypeError"),
        (lambda: [][1], IndexError, "out of range"),
        (lambda: int("?"), ValueError, "invalid literal"),
        (lambda: 1 / 0, RuntimeError, "ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_answers_of_a_record_raise(gradients: Any, error: Any, message: str) -> None:
    # MLX itself would take the cotangent for a missing gradient, and any shape for right.
    with pytest.raises(error, match=message):
        answer_with(gradients)
    assert mx.array_equal(square(x16), x16 * x16)


def test_wrong_numbers_of_tangents_and_batched_outputs_raise() -> None:
    class Wrong:
        def jvp(self, primals: Any, tangents: Any, argnums: Any) -> Any:
            return ()

        def vmap(self, inputs: Any, axes: Any) -> Any:
            return inputs, ()

    launch = prepare(kernel("square", SQUARE), (x16,))
    function = lambda x: core.launch(launch, (x,), Wrong())  # noqa: E731
    with pytest.raises(ValueError, match="'jvp' must return 1 tangents but got 0"):
        mx.jvp(function, [x16], [x16])
    with pytest.raises(ValueError, match="'vmap' must return 1 axes but got 0"):
        mx.vmap(function)(mx.zeros((2, 16)))


def test_export_shows_the_metal_text() -> None:
    def primitives(function: Any) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        mx.export_function(events.append, function, x16)
        return [e for e in events if e["type"] == "primitive"]

    made = kernel("scale", "uint i = thread_position_in_grid.x; o[i] = x[i] * a;", ("x", "a"))
    launch = prepare(made, (x16,), constants=(mx.array(3.0),))
    (node,) = primitives(lambda x: core.launch(launch, (x,)))
    assert node["name"] == "CustomKernel"
    assert len(node["inputs"]) == 2
    assert "const constant float& a [[buffer(1)]]" in node["arguments"][1]
    assert node["arguments"][2:8] == [16, 1, 1, 1, 1, 1]

    ones = kernel("ones", "o[thread_position_in_grid.x] = 1;", ())
    filled = core.prepare(ones, (), (), (16, 1, 1), (1, 1, 1), ((16,),), (mx.float32,), None, ())
    assert primitives(lambda x: x + core.launch(filled, ()))[0]["name"] == "CustomKernel"

    gradient = mx.grad(lambda x: square(square(x)).sum())
    names = [node["name"] for node in primitives(gradient)]
    assert "CustomKernel" in names
    assert "Multiply" in names


# ---- life and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (x16, x16)}, r"\[square\] 'inputs' must hold 1 array \(x\) but got 2"),
        ({"shapes": ((4,), (4,))}, r"'output_shapes' must hold 1 shape \(o\) but got 2"),
        ({"dtypes": ()}, r"'output_dtypes' must hold 1 dtype \(o\) but got 0"),
        ({"shapes": ((-1,),)}, "'output_shapes' must not be negative"),
        ({"grid": (16, -1, 1)}, r"'grid' must not be negative but got \(16, -1, 1\)"),
        ({"grid": (16, 1)}, "'grid' must hold 3 integers but got 2"),
        ({"group": (0, 1, 1)}, r"'threadgroup' must be positive but got \(0, 1, 1\)"),
        ({"group": (1024, 2, 1)}, "at most 1024 threads"),
        ({"grid": (2**31, 1, 1)}, "'grid' must be from"),
        ({"donate": ((1, 0),)}, "'donate' must pair an input's index"),
        ({"donate": ((0, 0),), "init": 0}, "'donate' must be empty with 'init_value'"),
    ],
)
def test_prepare_names_the_argument_that_is_wrong(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shapes": ((16,),), "dtypes": (mx.float32,), "grid": (16, 1, 1)}
    arguments |= change
    inputs = arguments.pop("inputs", (x16,))
    with pytest.raises(ValueError, match=message):
        core.prepare(
            kernel("square", SQUARE),
            inputs,
            (),
            arguments["grid"],
            arguments.get("group", (1, 1, 1)),
            arguments["shapes"],
            arguments["dtypes"],
            arguments.get("init"),
            (),
            arguments.get("donate"),
        )


def test_only_arrays_of_the_prepared_shapes_and_dtypes_are_launched() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,))
    for inputs in ((x16[:8],), (x16.astype(mx.int32),), (x16, x16), ()):
        with pytest.raises(ValueError, match=r"\[square\] 'inputs' must have the shapes"):
            core.launch(launch, inputs)
    for thing in (None, 1.5, np.zeros(16), object(), mx.float32):
        with pytest.raises(TypeError, match=r"'inputs' must hold mx\.array objects but got"):
            core.launch(launch, (thing,))
    with pytest.raises(ValueError, match="incorrect name"):
        core.launch(kernel("square", SQUARE), (x16,))
    with pytest.raises(TypeError, match="takes 2 to 4 arguments but got 1"):
        core.launch(launch)


def test_a_kernel_failure_raises_at_eval_and_leaves_the_process_well() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    if (x[i] > 3) { ZMLX_FAIL("x", i); }
    o[i] = 1;
    """
    launch = prepare(kernel("strict", source), (x16,))
    for _ in range(3):
        result = core.launch(launch, (x16,))
        with pytest.raises(RuntimeError, match=r"\[strict\] 'x' .* got"):
            mx.eval(result)
        assert mx.array_equal(square(x16), x16 * x16)
    small = mx.zeros((16,))
    assert core.launch(launch, (small,)).tolist() == [1] * 16


def test_a_prefetch_is_a_hint_that_any_address_will_do_for() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    ZMLX_PREFETCH(x + (size_t(i) << 40));
    ZMLX_PREFETCH_FAR(x - (size_t(i) << 40));
    o[i] = x[i] + 1;
    """
    launch = prepare(kernel("hint", source), (x16,))
    assert mx.array_equal(core.launch(launch, (x16,)), x16 + 1)


def test_many_failures_block_nothing() -> None:
    """MLX goes on counting a task whose enqueuing an earlier error has stopped."""
    fails = prepare(kernel("strict", 'if (x[0] == 0) { ZMLX_FAIL("x", 0); } o[0] = 1;'), (x16,))
    for _ in range(300):
        y = core.launch(fails, (mx.zeros((16,)),))
        with pytest.raises(RuntimeError, match="strict"):
            mx.eval(mx.exp(mx.exp(mx.exp(y))))
    y = x16
    for _ in range(2000):
        y = mx.tanh(y)
    mx.eval(y)


def test_many_unevaluated_nodes() -> None:
    y = mx.zeros((1,))
    launch = prepare(kernel("increment", "o[0] = x[0] + 1;"), (y,))
    for _ in range(20_000):
        y = core.launch(launch, (y,))
    assert y.item() == 20_000


def test_streams_and_threads() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,))
    stream = mx.new_stream(mx.cpu)
    assert mx.array_equal(core.launch(launch, (x16,), None, stream), x16 * x16)
    with pytest.raises(TypeError, match=r"'stream' must be an mx\.Stream"):
        core.launch(launch, (x16,), None, "cpu")

    wrong = []

    def work(value: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                x = mx.full((16,), float(value))
                y = core.launch(launch, (x,), square)
                mx.async_eval(y)
                if not mx.array_equal(y, x * x):
                    wrong.append(value)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)


def test_records_die_with_their_nodes_without_a_deadlock() -> None:
    # Nodes are let go of by whatever thread evaluates; the record waits for the next call.
    class Counted(Square):
        pass

    launch = prepare(kernel("square", SQUARE), (x16,))
    record = Counted()
    alive = weakref.ref(record)
    rounds = []

    def work(record: Square) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for i in range(50):
                mx.eval([core.launch(launch, (x16,), record) for _ in range(20)])
                rounds.append(i)

    worker = threading.Thread(target=work, args=(record,))
    worker.start()
    while worker.is_alive():
        core.launch(launch, (x16,), record)
    mx.eval(core.launch(launch, (x16,), record))
    assert len(rounds) == 50
    del record, worker
    gc.collect()
    for _ in range(100):
        core.statistics()
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_a_large_output_starts_where_no_load_has_to_wait_for_a_store() -> None:
    """On a line of 64 bytes, and just before an input in the low 12 bits of their addresses. An
    allocator that puts arrays behind each other has the output a few bytes after the input."""

    def address(a: mx.array) -> int:
        return np.array(a, copy=False).ctypes.data

    total = kernel("total", "uint i = thread_position_in_grid.x; o[i] = x[i] + y[i];", ("x", "y"))
    for size in (1 << 14, (1 << 14) + 3, 1 << 18):
        block = mx.random.normal((2, size + 1024))
        mx.eval(block)
        # A contiguous view lies at any multiple of four bytes.
        for first in range(0, 1024, 93):
            views = [block[row, first : first + size] for row in range(2)]
            mx.eval(views)
            o = core.launch(prepare(total, tuple(views)), tuple(views))
            assert np.array_equal(np.array(o), np.array(views[0]) + np.array(views[1]))
            behind = [(address(o) - address(view) - 1) % 4096 + 1 for view in views]
            assert address(o) % 64 == 0
            assert max(behind) > 4096 - 64
            assert min(behind) >= 2048 - 64


def test_memory_is_taken_over_only_where_declared_and_safe() -> None:
    made = kernel("square", SQUARE)
    plain, donating = prepare(made, (x16,)), prepare(made, (x16,), donate=((0, 0),))

    def donations(launch: Any, x: Any) -> int:
        before = core.statistics()["donations"]
        # Not inside the assertion, which pytest rewrites to hold on to every part of it.
        result = core.launch(launch, (x(),))
        assert mx.array_equal(result, (x16 + 1) * (x16 + 1))
        return core.statistics()["donations"] - before

    held = x16 + 1
    mx.eval(held)
    assert donations(donating, lambda: x16 + 1) == 1
    assert donations(plain, lambda: x16 + 1) == 0
    assert donations(donating, lambda: held) == 0
    assert mx.array_equal(held, x16 + 1)


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists(), reason="this system has no huge pages to ask for")
def test_large_outputs_ask_for_huge_pages() -> None:
    """Their pages are new at every launch: 4 KiB at a time that takes longer than the kernel."""
    large = mx.zeros((16 << 20,), mx.uint8)
    y = core.launch(prepare(kernel("square", SQUARE), (large,)), (large,))
    mx.eval(y)
    middle = np.asarray(y).ctypes.data + (8 << 20)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= middle < int(area[2], 16)
        elif inside and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the output is in no area of memory")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_forked_child_has_its_own_threads() -> None:
    code = """
import os, mlx.core as mx
from zmlx import native
core = native.load()
core.set_threads(4)
made = core.kernel("fork", ("x",), ("o",),
                   "uint i = thread_position_in_grid.x; o[i] = x[i] + 1;", "", True, False, "safe")
x = mx.zeros((1 << 20,))
launch = core.prepare(made, (x,), (), (x.size, 1, 1), (1, 1, 1), (x.shape,), (x.dtype,), None, ())
def run():
    with mx.stream(mx.new_stream(mx.cpu)):  # MLX's own threads do not survive a fork either
        assert core.launch(launch, (x,)).sum().item() == x.size
run()
child = os.fork()
if child == 0:
    run()
    os._exit(7)
run()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = python(code)
    assert done.stdout.strip() == "7", done.stderr


def test_threads_are_set_by_the_environment() -> None:
    code = "from zmlx import native; print(native.load().threads())"
    assert python(code, ZMLX_NUM_THREADS="3").stdout.strip() == "3"
    assert python(code, ZMLX_NUM_THREADS="").stdout.strip() == str(
        min(len(os.sched_getaffinity(0)), int(python(code).stdout))
    )
    assert (
        "ZMLX_NUM_THREADS must be a positive integer but got 'x'"
        in python(code, ZMLX_NUM_THREADS="x").stderr
    )
    with pytest.raises(ValueError, match="'n' must be from 0"):
        core.set_threads(-1)


def test_objects_of_an_unknown_layout_are_refused_by_name() -> None:
    code = """
import ctypes, mlx.core as mx
from zmlx import native
path = native._built(native._installed_mlx())
table = ctypes.PyDLL(str(path)).zmlx_python
table.restype, table.argtypes = ctypes.py_object, [ctypes.py_object] * 5
class Other:
    __slots__ = ("a", "b", "c", "d", "e")
good = mx.array([[1, 2, 3], [4, 5, 6]], dtype=mx.int32)
stream = mx.default_stream(mx.cpu)
for arguments in [
    (Other(), good.__copy__, mx.bfloat16, stream, ""),
    (good.T, good.__copy__, mx.bfloat16, stream, ""),
    (good, good.__copy__, mx.float16, stream, ""),
    (good, mx.array(1).__copy__, mx.bfloat16, mx.new_stream(mx.cpu), ""),
]:
    try:
        table(*arguments)
    except RuntimeError as error:
        print(error)
"""
    done = python(code)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    for line, name in zip(lines, ("mx.array", "mx.array", "mx.Dtype", "mx.Stream"), strict=True):
        assert f"layout of {name} in MLX {mx.__version__} is not one that zmlx knows" in line


def test_only_the_binding_knows_of_python() -> None:
    # The Zig shim is built from the other files, in a process without Python.
    for path in sorted(native.HERE.glob("*.cc")):
        if not path.name.startswith("python"):
            assert not re.search(r"\bPy[A-Z]|python_", path.read_text()), path.name


def test_import_builds_nothing(tmp_path: Any) -> None:
    code = "import zmlx, sys; print('mlx.core' in sys.modules and 'zmlx.native' in sys.modules)"
    done = python(code, ZMLX_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("version", "remedy"), [("0.31.2", "0.32.2 or newer"), ("0.9", "0.32.2")])
def test_an_older_mlx_is_refused_by_name(
    version: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "__version__", version)
    native._installed_mlx.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=f"{remedy}.* but got {version}"):
            native._installed_mlx()
    finally:
        monkeypatch.undo()
        native._installed_mlx.cache_clear()
