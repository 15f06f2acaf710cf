"""simdgroup_matrix: tiles over the lanes of a simdgroup, in Apple's layout, against NumPy."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from metal_source import Metal, in_every_schedule, run

TYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}
#: One rounding of the result; float sums differ from NumPy's in their order.
TOLERANCE = {"float": 2e-6, "half": 1e-3, "bfloat": 8e-3}

MULTIPLY = """
    simdgroup_matrix<A, 8, 8> a;
    simdgroup_matrix<A, 8, 8> b;
    auto c = make_filled_simdgroup_matrix<C, 8, 8>(C(0.5f));
    simdgroup_load(a, x, 24, ulong2(8, 1), left_transposed);
    simdgroup_load(b, y + 3, 24, ulong2(0, 2), right_transposed);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, out, 8);
"""


def matrices(kind: str) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(0)
    x, y = (mx.array(rng.normal(size=(16, 24)).astype(np.float32)) for _ in range(2))
    return x.astype(TYPES[kind]), y.astype(TYPES[kind])


def tiles(x: mx.array, y: mx.array) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.array(x.astype(mx.float32)), np.array(y.astype(mx.float32))
    return left[1:9, 8:16], right[2:10, 3:11]


@pytest.mark.parametrize(
    "inputs, result", [*((kind, "float") for kind in TYPES), ("half", "half"), ("bfloat", "bfloat")]
)
@pytest.mark.parametrize("left, right", list(product([False, True], repeat=2)))
def test_tiles_are_loaded_multiplied_and_stored(inputs, result, left, right):
    x, y = matrices(inputs)
    template = {
        "A": TYPES[inputs],
        "C": TYPES[result],
        "left_transposed": left,
        "right_transposed": right,
    }
    kernel = Metal(MULTIPLY, {"x": x, "y": y}, (64, TYPES[result]), 32, 32, template)
    a, b = tiles(x, y)
    expected = (a.T if left else a) @ (b.T if right else b) + 0.5
    out = in_every_schedule(kernel).reshape(8, 8)
    bound = TOLERANCE[result] * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, atol=bound, rtol=0)


def test_lanes_hold_two_neighbours_of_a_row_in_apples_layout():
    """As BaseMMAFrag::get_coord of MLX's steel kernels has it."""
    source = """
        simdgroup_float8x8 m;
        simdgroup_load(m, x);
        uint lane = thread_index_in_simdgroup;
        out[2 * lane] = m.thread_elements()[0];
        out[2 * lane + 1] = m.thread_elements()[1];
    """
    x = mx.arange(64).astype(mx.float32)
    out = run(source, {"x": x}, (64, mx.float32), 32, 32).reshape(32, 2)
    for lane, held in enumerate(out):
        quad = lane // 4
        row = (quad & 4) + (lane // 2) % 4
        column = (quad & 2) * 2 + (lane % 2) * 2
        assert held.tolist() == [8 * row + column, 8 * row + column + 1]


def test_diagonals_products_and_elements():
    source = """
        auto eye = make_diagonal_simdgroup_matrix<half, 8, 8>(half(2.0f));
        simdgroup_half8x8 m, twice;
        simdgroup_load(m, x, 8);
        simdgroup_multiply(twice, eye, m);
        twice.thread_elements() += half(1.0f);
        reinterpret_cast<thread half2&>(twice.thread_elements()).x += half(0.0f);
        threadgroup half shared[64];
        simdgroup_store(twice, shared, 8, ulong2(0, 0), true);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint i = thread_position_in_grid.x;
        out[i] = shared[i];
        out[i + 32] = shared[i + 32];
    """
    x = mx.arange(64).astype(mx.float16)
    out = run(source, {"x": x}, (64, mx.float16), 32, 32).reshape(8, 8)
    np.testing.assert_array_equal(out, 2 * np.arange(64).reshape(8, 8).T + 1)


def test_each_simdgroup_multiplies_on_its_own():
    source = """
        simdgroup_float8x8 a, b, c = make_filled_simdgroup_matrix<float, 8>(0.0f);
        for (uint k = 0; k <= simdgroup_index_in_threadgroup; ++k) {
            simdgroup_load(a, x + 64 * simdgroup_index_in_threadgroup, 8);
            simdgroup_load(b, y + 64 * k, 8);
            simdgroup_multiply_accumulate(c, a, b, c);
        }
        simdgroup_store(c, out + 64 * simdgroup_index_in_threadgroup, 8);
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 8, 8)).astype(np.float32)
    kernel = Metal(source, {"x": mx.array(x), "y": mx.array(y)}, ((4, 8, 8), mx.float32), 128, 128)
    expected = np.stack([x[i] @ y[: i + 1].sum(0) for i in range(4)])
    np.testing.assert_allclose(in_every_schedule(kernel), expected, atol=2e-5, rtol=0)


def test_one_thread_cannot_hold_a_tile():
    with pytest.raises(RuntimeError, match="threadgroups of at least 32 threads"):
        run("simdgroup_float8x8 m; simdgroup_load(m, x); out[0] = 0;", {"x": mx.zeros(64)})


HELPERS = """
    inline float sum(simdgroup_float8x8 m) { return simd_sum(m.thread_elements()[0]); }
    inline float total(const device float* x) {
        simdgroup_float8x8 m;
        simdgroup_load(m, x);
        return sum(m);
    }
    inline float half_of(float v) { return v / 2; }
"""


def test_one_thread_may_leave_functions_of_tiles_alone():
    assert run("out[0] = half_of(3);", header=HELPERS) == 1.5
    with pytest.raises(RuntimeError, match="threadgroups of at least 32 threads"):
        run("out[0] = total(x);", {"x": mx.zeros(64)}, header=HELPERS)
