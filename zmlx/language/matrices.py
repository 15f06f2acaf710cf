"""simdgroup_matrix<T, 8, 8>: tiles over the lanes of a simdgroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .row import Row

# Whole numbers, whose products and sums every type holds.
_A = np.arange(64).reshape(8, 8) % 5 - 2.0
_B = np.arange(64).reshape(8, 8) * 3 % 7 - 3.0
_INPUT = np.concatenate([_A.ravel(), _B.ravel()]).astype(np.float32)
_TYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}

#: In the type of the tiles, in threadgroup memory.
_TILES = """
    threadgroup T a[64], b[64];
    threadgroup float c[64];
    for (uint k = i; k < 64; k += 32) { a[k] = T(x[k]); b[k] = T(x[k + 64]); c[k] = 0; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<T, 8, 8> left, right;
    simdgroup_load(left, a, 8);
    simdgroup_load(right, b, 8, ulong2(0, 0), false);
"""
_STORE = """
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = i; k < 64; k += 32) out[k] = float(c[k]);
"""


def _row(body: str, expected: np.ndarray, dtype: mx.Dtype | None = None) -> Row:
    template: dict[str, Any] = {"T": dtype} if dtype is not None else {}
    values: Sequence[float] = np.ascontiguousarray(expected, np.float32)  # type: ignore[assignment]
    return Row(body, values, "", template, _INPUT, threads=32, together=True, stores=True)


MATRICES = {
    **{
        f"multiply, multiply and accumulate of {name}": _row(
            _TILES
            + """
            simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
            simdgroup_multiply_accumulate(sum, left, right, sum);
            simdgroup_multiply_accumulate(sum, left, right, sum);
            simdgroup_store(sum, c, 8);
            """
            + _STORE,
            2 * _A @ _B + 2,
            dtype,
        )
        for name, dtype in _TYPES.items()
    },
    **{
        f"a result of {name}": _row(
            _TILES
            + """
            simdgroup_matrix<T, 8, 8> sum;
            simdgroup_multiply(sum, left, right);
            simdgroup_store(sum, a, 8);
            """
            + _STORE.replace("c[k]", "a[k]"),
            _A @ _B,
            dtype,
        )
        for name, dtype in _TYPES.items()
    },
    "load and store, transposed, with an origin": _row(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x, 8, ulong2(0, 8), true);
        simdgroup_store(m, out, 8, ulong2(0, 0), false);
        """,
        _B.T,
    ),
    "load from and store to threadgroup memory": _row(
        """
        threadgroup float tile[128], c[64];
        for (uint k = i; k < 64; k += 32) tile[(k / 8) * 16 + k % 8 + 4] = x[k];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 m;
        simdgroup_load(m, tile, 16, ulong2(4, 0));
        simdgroup_store(m, c, 8, ulong2(0, 0), true);
        """
        + _STORE,
        _A.T,
    ),
    "filled and diagonal": _row(
        """
        auto eye = make_diagonal_simdgroup_matrix<float, 8, 8>(3.0f);
        simdgroup_float8x8 m, one = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_load(m, x, 8);
        simdgroup_multiply_accumulate(m, eye, m, one);
        simdgroup_store(m, out, 8);
        """,
        3 * _A + 1,
    ),
    "thread_elements, two neighbours of a row": _row(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x, 8);
        m.thread_elements()[0] *= 2;
        thread float2& both = (thread float2&)m.thread_elements();
        both.y += 1;
        uint quad = i / 4, row = (quad & 4) + i / 2 % 4, column = (quad & 2) * 2 + i % 2 * 2;
        out[row * 8 + column] = both.x;
        out[row * 8 + column + 1] = both.y;
        """,
        np.where(np.arange(8) % 2, _A + 1, 2 * _A),
    ),
    "a tile of each simdgroup": Row(
        """
        uint group = simdgroup_index_in_threadgroup;
        simdgroup_float8x8 m, n;
        simdgroup_load(m, x + 64 * group, 8);
        simdgroup_load(n, x + 64 * (1 - group), 8);
        simdgroup_multiply(m, m, n);
        simdgroup_store(m, out + 64 * group, 8);
        """,
        np.concatenate([(_A @ _B).ravel(), (_B @ _A).ravel()]),
        x=_INPUT,
        threads=64,
        together=True,
        stores=True,
    ),
}
