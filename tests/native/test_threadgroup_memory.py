"""Variables in threadgroup memory, and what goes in and out of a kernel."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from language_case import X
from metal_source import Metal, in_every_schedule, run

THREADGROUP = {
    "constants, expressions and several declarators": (
        """
        threadgroup float a[32 * (1 + 1)], b[4][8 + 1], c;
        a[i] = x[i % 8]; a[i + 32] = 1; if (i < 4) b[i][8] = i; if (i == 31) c = 5;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[31 - i] + a[i + 32] + b[i % 4][8] + c;
        """,
        "",
        lambda i: X[(31 - i) % 8] + 1 + i % 4 + 5,
    ),
    "constexpr locals, template arguments, vectors and structs": (
        """
        constexpr int rows = 2, width = 16;
        threadgroup float4 v[rows * width];
        threadgroup Entry<T, N> entries[N];
        threadgroup T typed[N / 4];
        v[i] = float4(i, 1, 2, 3);
        entries[i].key[0] = T(i); entries[i].value = 2;
        if (i < N / 4) typed[i] = T(i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = v[31 - i].x + v[i].zw.x + float(entries[i ^ 1].key[0]) + float(typed[i / 4]);
        """,
        "template <typename T, int N> struct Entry { T key[N]; float value; };",
        lambda i: (31 - i) + 2 + (i ^ 1) + i // 4,
    ),
    "in nested scopes and loops": (
        """
        out[i] = 0;
        for (uint k = 0; k < 2; ++k) {
            threadgroup uint a[32];
            a[i] = i + k;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            {
                threadgroup uint b[32];
                b[i] = a[31 - i];
                threadgroup_barrier(mem_flags::mem_threadgroup);
                out[i] += b[31 - i];
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        """,
        "",
        lambda i: 2 * i + 1,
    ),
    "pointers, references and casts in helpers": (
        """
        threadgroup float tile[4][8];
        threadgroup float* flat = &tile[0][0];
        threadgroup uint* words = (threadgroup uint*)flat;
        fill(flat, i, float(i));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup auto* rows = (threadgroup float(*)[8])flat;
        out[i] = turned<4, 8>(tile, i) + as_type<float>(words[i]) + rows[1][0];
        """,
        """
        void fill(threadgroup float* to, uint i, float v) { to[i] = v; }
        template <int R, int C> float turned(threadgroup float (&tile)[R][C], uint i) {
            return tile[i % R][i / R];
        }
        """,
        lambda i: (i % 4) * 8 + i // 4 + i + 8,
    ),
    "atomics": (
        """
        threadgroup atomic_uint bins[4];
        threadgroup atomic<int> total;
        if (i < 4) atomic_store_explicit(&bins[i], 0u, memory_order_relaxed);
        if (i == 0) atomic_store_explicit(&total, 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&bins[i % 4], 1u, memory_order_relaxed);
        atomic_fetch_add_explicit(&total, int(i), memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = atomic_load_explicit(&bins[i % 4], memory_order_relaxed) * 1000;
        out[i] += atomic_load_explicit(&total, memory_order_relaxed);
        """,
        "",
        lambda i: 8000 + 31 * 16,
    ),
    "in macros, with barriers and loops in macros": (
        """
        SHARED(float, a, 32);
        a[i] = x[i % 8];
        SYNC;
        float s = 0;
        EACH(k) { s += a[k]; if (k == 3) { SYNC; } }
        out[i] = s + TOTAL(1) + TOTAL(2);
        """,
        "#define SHARED(T, name, n) threadgroup T name[n]\n"
        "#define SYNC threadgroup_barrier(mem_flags::mem_threadgroup)\n"
        "#define EACH(k) for (uint k = 0; k < 8; ++k)\n#define TOTAL(v) simd_sum(float(v))\n",
        lambda i: X.sum() + 96,
    ),
    "barriers in helpers and methods": (
        """
        threadgroup float a[32];
        Group g{a, i};
        out[i] = g.total(x[i % 8]) + scan_then_last(a, i, 1.0f);
        """,
        """
        struct Group {
            threadgroup float* memory;
            uint index;
            float total(float v) {
                memory[index] = v;
                threadgroup_barrier(mem_flags::mem_threadgroup);
                float s = 0;
                for (uint k = 0; k < 32; ++k) s += memory[k];
                threadgroup_barrier(mem_flags::mem_threadgroup);
                return s;
            }
        };
        float scan_then_last(threadgroup float* memory, uint i, float v);
        float scan_then_last(threadgroup float* memory, uint i, float v) {
            memory[i] = simd_prefix_inclusive_sum(v);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            return memory[31];
        }
        """,
        lambda i: 4 * X.sum() + 32,
    ),
    "barriers in lambdas": (
        """
        threadgroup float a[32];
        auto exchange = [&](float v) {
            a[i] = v;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float w = a[31 - i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            return w;
        };
        out[i] = exchange(i) + exchange(exchange(100.0f * i));
        """,
        "",
        lambda i: (31 - i) + 100 * i,
    ),
}


@pytest.mark.parametrize("name", THREADGROUP)
def test_threadgroup_memory(name: str) -> None:
    source, header, expected = THREADGROUP[name]
    kernel = Metal(
        "uint i = thread_position_in_threadgroup.x;" + source,
        {"x": mx.array(X)},
        (32, mx.float32),
        32,
        32,
        {"T": mx.float16, "N": 32},
        header,
    )
    result = in_every_schedule(kernel)
    np.testing.assert_array_equal(result, [np.float32(expected(i)) for i in range(32)])


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
