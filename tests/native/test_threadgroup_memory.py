"""Variables in threadgroup memory, and what goes in and out of a kernel."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_source import run

from zmlx.language.row import X


def test_threadgroup_memory_without_a_meeting_is_shared_in_the_group() -> None:
    """Thread after thread runs to its end; what one leaves, the next ones see."""
    source = """
        threadgroup float a[4];
        uint i = thread_position_in_threadgroup.x;
        a[i] = i;
        out[i] = a[0];
    """
    assert run(source, output=(4, mx.float32), grid=4, group=4).tolist() == [0] * 4


def test_threadgroup_arrays_of_one_thread_are_its_own() -> None:
    source = """
        threadgroup float a[N], b;
        uint g = threadgroup_position_in_grid.x;
        for (uint k = 0; k < N; ++k) a[k] = g + k;
        b = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[g] = simd_sum(a[N - 1]) + b;
    """
    result = run(source, output=(5, mx.float32), grid=5, group=1, template={"N": 7})
    assert result.tolist() == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("mode", ["meet", "alone"])
@pytest.mark.parametrize(
    "declaration",
    [
        "alignas(16) threadgroup float a[4];",
        "threadgroup alignas(16) float a[4];",
        "__attribute__((aligned(16))) threadgroup float a[4];",
        '_Pragma("unused") threadgroup float a[4];',
        "struct Pair { float x, y; } threadgroup pairs[2]; threadgroup float* a = &pairs[0].x;",
        "switch (N) { case 2: default: threadgroup float b[4];\n a = b; }",
    ],
)
def test_what_stands_before_threadgroup_leaves_it_shared(declaration: str, mode: str) -> None:
    source = f"""
        uint i = thread_position_in_threadgroup.x;
        {"threadgroup float* a = nullptr;" if "a = b" in declaration else ""}
        {declaration}
        a[i] = i;
        {"threadgroup_barrier(mem_flags::mem_threadgroup);" if mode == "meet" else ""}
        out[i] = a[{"3 - i" if mode == "meet" else "0"}];
    """
    result = run(source, output=(4, mx.float32), grid=4, group=4, template={"N": 2})
    assert result.tolist() == ([3, 2, 1, 0] if mode == "meet" else [0] * 4)


def test_a_qualifier_of_a_member_function_declares_nothing() -> None:
    header = """
        struct Cell {
          float v;
          float get() const threadgroup { return v; }
          float get() const volatile threadgroup;
          void set(float a) threadgroup const volatile;
          operator float() threadgroup const { return v; }
          template <typename T> T as(T a) threadgroup { return T(v) + a; }
        };
    """
    source = """
        threadgroup Cell cells[4];
        uint i = thread_position_in_threadgroup.x;
        cells[i].v = i;
        out[i] = cells[0].get() + float(cells[i]) + cells[i].as(2.0f);
    """
    result = run(source, output=(4, mx.float32), grid=4, group=4, header=header)
    assert result.tolist() == [2, 4, 6, 8]


def test_atomic_outputs_from_all_worker_threads() -> None:
    source = """
        uint i = thread_position_in_grid.x % 4;
        atomic_fetch_add_explicit(&out[i], 1.0f, memory_order_relaxed);
    """
    for group in (1, 64):
        result = run(source, output=(4, mx.float32), grid=1 << 16, group=group, atomic=True, init=0)
        assert result.tolist() == [1 << 14] * 4


def test_shapes_strides_and_element_addresses() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        uint at = elem_to_loc(i, x_shape, x_strides, x_ndim);
        out[i] = x[at] + x_shape[0] * 1000;
    """
    x = mx.array(np.arange(12, dtype=np.float32).reshape(3, 4))
    result = run(source, {"x": x}, ((3, 4), mx.float32), grid=12, group=4)
    np.testing.assert_array_equal(result, np.arange(12).reshape(3, 4) + 3000)


@pytest.mark.parametrize("group", [1, 4])
def test_complex_numbers_go_through_shuffles(group: int) -> None:
    source = """
        uint i = thread_position_in_grid.x;
        complex64_t v = simd_shuffle_xor(x[i], ushort(threads_per_threadgroup.x > 1));
        out[i] = v * complex64_t(0, 1);
    """
    x = np.arange(4) + 1j
    result = run(source, {"x": mx.array(x.astype(np.complex64))}, (4, mx.complex64), 4, group)
    np.testing.assert_array_equal(result, 1j * (x[[1, 0, 3, 2]] if group > 1 else x))


@pytest.mark.parametrize("group", [1, 4])
def test_scalar_inputs_are_values(group: int) -> None:
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = x[i] * scale + float(offset) + (flag ? 1 : 0);
    """
    inputs = {
        "x": mx.array(X),
        "scale": mx.array(2.0),
        "offset": mx.array(3),
        "flag": mx.array(True),
    }
    np.testing.assert_array_equal(run(source, inputs, (8, mx.float32), 8, group), 2 * X + 4)
