"""Memory of a threadgroup, barriers, atomics."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from .row import Row, X


def _tile(body: str, header: str, expected: Callable[[int], float]) -> Row:
    """A row of 32 threads that share memory; `expected(i)` is what thread i stores."""
    values = np.array([expected(i) for i in range(32)], np.float32)
    template = {"T": mx.float16, "N": 32}
    return Row(body, values, header, template, threads=32, together=True, stores=True)


THREADGROUP = {
    "constants, expressions and several declarators": _tile(
        """
        threadgroup float a[32 * (1 + 1)], b[4][8 + 1], c;
        threadgroup union { float f[32]; uint bits[32]; } d;
        a[i] = x[i % 8]; a[i + 32] = 1; if (i < 4) b[i][8] = i; if (i == 31) c = 5;
        d.f[i] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[31 - i] + a[i + 32] + b[i % 4][8] + c + (d.bits[31 - i] == 0x3f800000);
        """,
        "",
        lambda i: X[(31 - i) % 8] + 1 + i % 4 + 5 + 1,
    ),
    "constexpr locals, template arguments, vectors and structs": _tile(
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
    "in nested scopes and loops": _tile(
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
    "pointers, references and casts in helpers": _tile(
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
}

BARRIERS = {
    "threadgroup_barrier with every flag": _tile(
        """
        threadgroup float a[32];
        a[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float v = a[31 - i];
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        a[i] = v;
        threadgroup_barrier(mem_flags::mem_device);
        threadgroup_barrier(mem_flags::mem_none);
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        out[i] = a[(i + 1) % 32];
        """,
        "",
        lambda i: 31 - (i + 1) % 32,
    ),
    "simdgroup_barrier": _tile(
        """
        threadgroup float a[32];
        a[i] = i;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[i ^ 1];
        """,
        "",
        lambda i: i ^ 1,
    ),
    "with a scope": _tile(
        """
        threadgroup float a[32];
        a[i] = i;
        simdgroup_barrier(mem_flags::mem_threadgroup, thread_scope_simdgroup);
        float v = a[i ^ 1];
        threadgroup_barrier(mem_flags::mem_device, thread_scope_device);
        a[i] = v;
        threadgroup_barrier(mem_flags::mem_threadgroup, thread_scope_threadgroup);
        out[i] = a[31 - i];
        """,
        "",
        lambda i: 31 - i ^ 1,
    ),
    "in a loop": _tile(
        """
        threadgroup int a[2][32];
        int from = 0;
        a[0][i] = 1;
        for (uint step = 1; step < 32; step *= 2) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            a[1 - from][i] = a[from][i] + (i >= step ? a[from][i - step] : 0);
            from = 1 - from;
        }
        out[i] = a[from][i];
        """,
        "",
        lambda i: i + 1,
    ),
    "in a branch that all threads take": _tile(
        """
        threadgroup float a[32];
        a[i] = i;
        if (x[0] > 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            out[i] = a[31 - i];
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            out[i] = -1;
        }
        """,
        "",
        lambda i: 31 - i,
    ),
    "between branches that part": _tile(
        """
        threadgroup float a[32];
        if (i < 10) { a[i] = simd_sum(1.0f); } else { a[i] = -simd_sum(1.0f); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float v = a[31 - i];
        if (i % 2) { v += simd_max(i); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = v;
        """,
        "",
        lambda i: (10 if 31 - i < 10 else -22) + (31 if i % 2 else 0),
    ),
    "in a loop that is left by break": _tile(
        """
        threadgroup uint a[32];
        a[i] = i;
        uint stride = 16;
        while (true) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (i < stride) a[i] += a[i + stride];
            stride /= 2;
            if (stride == 0) break;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[0];
        """,
        "",
        lambda i: 31 * 16,
    ),
    "in macros, with loops around them": _tile(
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
    "in helpers and methods": _tile(
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
    "in lambdas": _tile(
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

_RELAXED = "memory_order_relaxed"


def _atomic(kind: str, operations: str, expected: int) -> Row:
    """Every thread of 64 applies the operations to one object in threadgroup memory."""
    body = f"""
        threadgroup atomic<{kind}> a;
        if (i == 0) atomic_store_explicit(&a, {kind}(0), {_RELAXED});
        threadgroup_barrier(mem_flags::mem_threadgroup);
        {operations}
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = atomic_load_explicit(&a, {_RELAXED});
    """
    body = body.replace(", relaxed", f", {_RELAXED}")
    return Row(body, np.full(64, expected, np.float32), threads=64, together=True, stores=True)


def _output(body: str, expected: np.ndarray) -> Row:
    body = body.replace(", relaxed", f", {_RELAXED}")
    return Row(body, expected, threads=64, stores=True, atomic=True)


ATOMICS = {
    **{
        f"atomic_fetch_{name}_explicit": _atomic(
            "int", f"atomic_fetch_{name}_explicit(&a, {operand}, relaxed);", expected
        )
        for name, operand, expected in (
            ("add", "int(i)", 32 * 63),
            ("sub", "2", -128),
            ("min", "5 - int(i)", 5 - 63),
            ("max", "int(i)", 63),
            ("or", "1 << (i % 9)", 511),
            ("and", "int(i)", 0),
            ("xor", "int(i)", 0),
        )
    },
    "atomic_exchange_explicit": _atomic(
        "uint", "if (i == 7) atomic_exchange_explicit(&a, 9u, relaxed);", 9
    ),
    "atomic_compare_exchange_weak_explicit": _atomic(
        "uint",
        """
        uint seen = atomic_load_explicit(&a, relaxed);
        while (!atomic_compare_exchange_weak_explicit(&a, &seen, seen + i, relaxed, relaxed)) {}
        """,
        32 * 63,
    ),
    "the value before": _atomic(
        "uint",
        """
        threadgroup uint seen[64];
        seen[atomic_fetch_add_explicit(&a, 1u, relaxed)] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i > 0) atomic_fetch_add_explicit(&a, 0u, relaxed);
        if (i == 0) for (uint k = 0; k < 64; ++k) atomic_fetch_add_explicit(&a, seen[k], relaxed);
        """,
        128,
    ),
    "atomic_bool": _atomic("bool", "if (i == 3) atomic_store_explicit(&a, true, relaxed);", 1),
    "atomic_int, atomic_uint by name": _atomic(
        "int",
        """
        threadgroup atomic_int* p = &a;
        threadgroup atomic_uint q[2];
        if (i < 2) atomic_store_explicit(q + i, 0u, relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(q + i % 2, 1u, relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i == 0) atomic_fetch_add_explicit(p, int(atomic_load_explicit(q, relaxed)), relaxed);
        """,
        32,
    ),
    "atomic_thread_fence": _atomic(
        "int",
        "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);\n"
        "atomic_fetch_add_explicit(&a, 1, relaxed);",
        64,
    ),
    "atomic_outputs of float": _output(
        "atomic_fetch_add_explicit(&out[i % 4], x[i % 8], relaxed);",
        np.array([8 * (X[k] + X[k + 4]) for k in range(4)], np.float32),
    ),
    "atomic_outputs of int": _output(
        "atomic_fetch_max_explicit(out + i % 4, int(i), relaxed);",
        np.array([60, 61, 62, 63], np.int32),
    ),
    "atomic_outputs of uint": _output(
        "atomic_fetch_or_explicit(&out[i % 2], 1u << (i / 2), relaxed);",
        np.array([2**32 - 1] * 2, np.uint32),
    ),
    "atomic_float by compare and exchange": _output(
        """
        float seen = atomic_load_explicit(&out[0], relaxed);
        float larger = max(seen, float(i));
        while (seen < larger &&
               !atomic_compare_exchange_weak_explicit(&out[0], &seen, larger, relaxed, relaxed)) {
            larger = max(seen, float(i));
        }
        """,
        np.array([63], np.float32),
    ),
}
