"""What MLX puts in front of every kernel: indexing, limits, complex numbers, small helpers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .row import INDEX, Row, X

_MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


def _matrix(body: str, expected: object) -> Row:
    return Row(body, expected, x=_MATRIX, threads=12)


UTILITIES = {
    "x_shape, x_strides, x_ndim": _matrix(
        "r = x[i] + 100 * x_shape[0] + 10 * float(x_strides[0]) + x_ndim;",
        np.arange(12) + 300 + 40 + 2,
    ),
    "elem_to_loc": _matrix(
        "r = x[elem_to_loc(11 - i, x_shape, x_strides, x_ndim)];", 11 - np.arange(12)
    ),
    "elem_to_loc of a position": _matrix(
        "r = x[elem_to_loc(uint3(i % 4, i / 4, 0), x_shape, x_strides, x_ndim)];", np.arange(12)
    ),
    "elem_to_loc_1, elem_to_loc_2, elem_to_loc_3": _matrix(
        "const constant int64_t* c = x_strides;\n"
        "r = elem_to_loc_1(i, c[0]) + elem_to_loc_2(uint2(1, 2), c);",
        4 * np.arange(12) + 8 + 1,
    ),
    "elem_to_loc_2_nd, elem_to_loc_3_nd": _matrix(
        "auto two = elem_to_loc_2_nd(uint3(1, 2, 0), x_shape, x_strides, x_strides, x_ndim);\n"
        "auto three = elem_to_loc_3_nd(uint3(1, 2, 0), x_shape, x_strides, x_strides, x_strides, "
        "x_ndim);\n"
        "r = two.x + two.y * 10 + three.z * 100;",
        9 + 90 + 900,
    ),
    "LoopedElemToLoc": _matrix(
        "LoopedElemToLoc<2> at(x_ndim); for (uint k = 0; k < i; ++k) at.next(x_shape, x_strides);\n"
        "r = x[at.location()];",
        np.arange(12),
    ),
    "ceildiv": Row("r = ceildiv(int(i) + 1, 3);", -(-(INDEX + 1) // 3)),
    "Limits": Row(
        "r = (Limits<half>::max == half(INFINITY)) + (Limits<int>::min == INT_MIN) * 2"
        " + (Limits<float>::finite_min == -FLT_MAX) * 4 + (Limits<uchar>::max == 255) * 8;",
        15,
    ),
    "complex64_t": Row(
        "complex64_t z(x[i], 1), w = z * z + z / complex64_t(0, 1) - complex64_t(2, 0);\n"
        "w = -w; r = -w.real * 1000 + -w.imag + (z == z);",
        (X * X - 1 + 1 - 2) * 1000 + 2 * X - X + 1,
        within=1e-6,
    ),
    "complex64_t to and from float": Row(
        "complex64_t z = x[i]; z = z + 1.0f; float f = static_cast<float>(z.real); r = f + z.imag;",
        X + 1,
    ),
    "cast_to": Row(
        "r = cast_to<int>(x[i] / 2) + cast_to<float>(i > 3);", np.trunc(X / 2) + (INDEX > 3)
    ),
    "ConditionalType": Row(
        "typename ConditionalType<(N > 3), half, float>::type v = 1; r = sizeof(v);",
        2,
        template={"N": 4},
    ),
    "WorkPerThread": Row("r = WorkPerThread<half>::n * 10 + WorkPerThread<float>::n;", 42),
    "float16_t, bfloat16_t": Row(
        "float16_t h = x[i]; bfloat16_t b = static_cast<bfloat16_t>(x[i]); "
        "r = float(h) + float(b);",
        2 * X,
    ),
    "bfloat16_to_uint16, uint16_to_bfloat16": Row(
        "uint16_t u = bfloat16_to_uint16(bfloat16_t(x[i])); "
        "r = float(uint16_to_bfloat16(u)) + u * 0;",
        X,
    ),
    "log1p": Row("r = log1p(abs(x[i]));", np.log1p(np.abs(X)), within=2e-6),
    "MLX_MTL_PRAGMA_UNROLL": Row(
        "r = 0; MLX_MTL_PRAGMA_UNROLL for (int k = 0; k < 4; ++k) { r += x[i]; }", 4 * X
    ),
    "constants of defines.h": Row(
        "r = RMS_LOOPED_LIMIT + REDUCE_N_READS + SOFTMAX_N_READS + MAX_REDUCE_SPECIALIZED_DIMS;",
        4096 + 4 + 4 + 4,
    ),
    "os_log": Row('mlx::os_log logger("a", "b"); logger.log_debug("%d", 3); r = 1;', 1),
    "inputs of fewer than 8 elements, in constant": Row(
        "const constant float* p = c; r = p[i] * 2;", 2 * X[:7], x=X[:7]
    ),
    "template arguments: type, int, bool": Row(
        "T v = T(x[i]); threadgroup float a[N]; a[0] = v; r = float(v) + N + (F ? 10 : 0);",
        np.float16(X) + 13,
        template={"T": mx.float16, "N": 3, "F": True},
    ),
}
