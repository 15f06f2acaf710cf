"""The Metal text that the core makes of a kernel: the one that MLX makes."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
from core_kernels import SQUARE, core, x16

NUMBERS = itertools.count(31)


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


def test_a_few_elements_and_many_compile_once() -> None:
    """MLX passes up to 8 elements as constant, and says so in the kernel's name."""
    number = next(NUMBERS)  # a text that this process has not compiled yet
    source = f"uint i = thread_position_in_grid.x; y[i] = x[i] * {number} + w[0];"
    made = core.kernel("few", ("x", "w"), ("y",), source, "", True, False, "safe")

    def compiled(n: int) -> int:
        before = core.statistics()
        inputs = (mx.arange(n, dtype=mx.float32), mx.array([2.0]))
        launch = core.prepare(
            made, inputs, (), (n, 1, 1), (1, 1, 1), ((n,),), (mx.float32,), None, ()
        )
        assert core.launch(launch, inputs).tolist() == [number * i + 2 for i in range(n)]
        after = core.statistics()
        return sum(after[k] - before[k] for k in ("compiles", "cache_hits"))

    assert compiled(4) == 1
    assert compiled(40) == 0
