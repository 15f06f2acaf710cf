"""Whole kernels whose threads work together, in groups of every awkward size and in every order of
execution, which must not change a bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_source import Metal, in_every_schedule, run

# One thread; one short of, exactly and one past a simdgroup; several; the most there are.
GROUPS = (1, 31, 32, 33, 96, 1024)

RNG = np.random.default_rng(42)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 3])
def test_row_sums(group: int, rows: int) -> None:
    """A row per group, reduced over lanes and then over simdgroups."""
    source = """
        threadgroup float partial[32];
        uint row = threadgroup_position_in_grid.y, lane = thread_index_in_simdgroup;
        float sum = 0;
        for (uint i = thread_index_in_threadgroup; i < D; i += threads_per_threadgroup.x)
            sum += x[row * D + i];
        sum = simd_sum(sum);
        if (lane == 0) partial[simdgroup_index_in_threadgroup] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum = simd_sum(lane < simdgroups_per_threadgroup ? partial[lane] : 0.0);
        if (thread_index_in_threadgroup == 0) out[row] = sum;
    """
    x = RNG.integers(-50, 50, (rows, 1000)).astype(np.float32)
    kernel = Metal(
        source, {"x": mx.array(x)}, (rows, mx.float32), (group, rows), group, {"D": 1000}
    )
    np.testing.assert_array_equal(in_every_schedule(kernel), x.sum(1))


@pytest.mark.parametrize("group", GROUPS)
def test_edge_groups_reduce_over_the_threads_they_have(group: int) -> None:
    """77 threads, whatever the group: the last group is smaller and its simdgroups too."""
    source = """
        threadgroup atomic_uint total;
        uint i = thread_position_in_grid.x;
        auto relaxed = memory_order_relaxed;
        if (thread_index_in_threadgroup == 0) atomic_store_explicit(&total, 0u, relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint in_simdgroup = simd_sum(1u);
        if (simd_is_first()) atomic_fetch_add_explicit(&total, in_simdgroup, relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = atomic_load_explicit(&total, relaxed) * 1000 + in_simdgroup;
    """
    result = in_every_schedule(Metal(source, output=(77, mx.uint32), grid=77, group=group))
    group = min(group, 77)
    for i in range(77):
        size = min(group, 77 - i // group * group)
        lanes = min(32, size - i % group // 32 * 32)
        assert result[i] == size * 1000 + lanes


def test_transpose_by_tiles() -> None:
    source = """
        threadgroup float tile[T][T + 1];
        uint2 at = thread_position_in_threadgroup.xy, group = threadgroup_position_in_grid.xy;
        uint2 from = group * T + at, to = group.yx * T + at;
        if (from.x < x_shape[1] && from.y < x_shape[0]) {
            tile[at.y][at.x] = x[from.y * x_shape[1] + from.x];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (to.x < x_shape[0] && to.y < x_shape[1]) {
            out[to.y * x_shape[0] + to.x] = tile[at.x][at.y];
        }
    """
    x = RNG.normal(size=(45, 70)).astype(np.float32)
    kernel = Metal(
        source, {"x": mx.array(x)}, ((70, 45), mx.float32), (80, 48), (16, 16), {"T": 16}
    )
    np.testing.assert_array_equal(in_every_schedule(kernel), x.T)


@pytest.mark.parametrize("group", GROUPS)
def test_histogram(group: int) -> None:
    source = """
        threadgroup atomic_uint bins[64];
        uint l = thread_index_in_threadgroup, size = threads_per_threadgroup.x;
        for (uint b = l; b < 64; b += size)
            atomic_store_explicit(&bins[b], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&bins[x[i]], 1u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint b = l; b < 64; b += size) {
            uint count = atomic_load_explicit(&bins[b], memory_order_relaxed);
            atomic_fetch_add_explicit(&out[b], count, memory_order_relaxed);
        }
    """
    x = RNG.integers(0, 64, 5000).astype(np.uint8)
    kernel = Metal(source, {"x": mx.array(x)}, (64, mx.uint32), 5000, group, atomic=True, init=0)
    np.testing.assert_array_equal(in_every_schedule(kernel), np.bincount(x, minlength=64))


@pytest.mark.parametrize("group", GROUPS)
def test_scan_of_a_group(group: int) -> None:
    """Hillis and Steele: two buffers, a barrier per step."""
    source = """
        threadgroup int a[2][1024];
        uint i = thread_index_in_threadgroup, size = threads_per_threadgroup.x, from = 0;
        a[0][i] = x[thread_position_in_grid.x];
        for (uint step = 1; step < size; step *= 2) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            a[1 - from][i] = a[from][i] + (i >= step ? a[from][i - step] : 0);
            from = 1 - from;
        }
        out[thread_position_in_grid.x] = a[from][i];
    """
    x = RNG.integers(-9, 9, 2100).astype(np.int32)
    result = in_every_schedule(Metal(source, {"x": mx.array(x)}, (2100, mx.int32), 2100, group))
    expected = [np.cumsum(x[i : i + group]) for i in range(0, 2100, group)]
    np.testing.assert_array_equal(result, np.concatenate(expected))


@pytest.mark.parametrize("group", [32, 64, 1024])
def test_bitonic_sort(group: int) -> None:
    """Near partners are exchanged by shuffles, far ones through threadgroup memory."""
    source = """
        threadgroup float a[1024];
        uint i = thread_index_in_threadgroup;
        float v = x[thread_position_in_grid.x];
        for (uint run = 2; run <= threads_per_threadgroup.x; run *= 2) {
            for (uint step = run / 2; step > 0; step /= 2) {
                float w;
                if (step < 32) {
                    w = simd_shuffle_xor(v, ushort(step));
                } else {
                    a[i] = v;
                    threadgroup_barrier(mem_flags::mem_threadgroup);
                    w = a[i ^ step];
                    threadgroup_barrier(mem_flags::mem_threadgroup);
                }
                bool up = (i & run) == 0, low = (i & step) == 0;
                v = up == low ? min(v, w) : max(v, w);
            }
        }
        out[thread_position_in_grid.x] = v;
    """
    x = RNG.normal(size=2 * group).astype(np.float32)
    kernel = Metal(source, {"x": mx.array(x)}, (2 * group, mx.float32), 2 * group, group)
    result = in_every_schedule(kernel)
    np.testing.assert_array_equal(result, np.sort(x.reshape(2, group), 1).ravel())


def test_matrix_product_by_tiles() -> None:
    source = """
        constexpr int B = 8;
        threadgroup T left[B][B], right[B][B];
        uint2 p = thread_position_in_grid.xy, l = thread_position_in_threadgroup.xy;
        uint rows = a_shape[0], inner = a_shape[1], columns = b_shape[1];
        float sum = 0;
        for (uint k = 0; k < inner; k += B) {
            left[l.y][l.x] = p.y < rows && k + l.x < inner ? a[p.y * inner + k + l.x] : T(0);
            bool inside = p.x < columns && k + l.y < inner;
            right[l.y][l.x] = inside ? b[(k + l.y) * columns + p.x] : T(0);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            #pragma unroll
            for (int j = 0; j < B; ++j) sum += float(left[l.y][j]) * float(right[j][l.x]);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (p.y < rows && p.x < columns) out[p.y * columns + p.x] = sum;
    """
    a, b = (RNG.integers(-4, 4, s).astype(np.float16) for s in ((13, 21), (21, 10)))
    inputs = {"a": mx.array(a), "b": mx.array(b)}
    kernel = Metal(source, inputs, ((13, 10), mx.float32), (16, 16), (8, 8), {"T": mx.float16})
    np.testing.assert_array_equal(in_every_schedule(kernel), a.astype(np.float32) @ b)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_matrix_product_by_simdgroup_matrices(dtype: mx.Dtype) -> None:
    """Two simdgroups, each with its own 8x8 tile, in a loop over the inner dimension."""
    source = """
        uint tile = simdgroup_index_in_threadgroup;
        simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0);
        for (uint k = 0; k < K; k += 8) {
            simdgroup_matrix<T, 8, 8> left, right;
            simdgroup_load(left, a + k, K);
            simdgroup_load(right, b + k * 16 + tile * 8, 16);
            simdgroup_multiply_accumulate(sum, left, right, sum);
        }
        sum.thread_elements()[0] *= 2;
        sum.thread_elements()[1] *= 2;
        simdgroup_store(sum, out + tile * 8, 16);
    """
    a, b = (RNG.integers(-4, 4, s).astype(np.float32) for s in ((8, 24), (24, 16)))
    inputs = {"a": mx.array(a).astype(dtype), "b": mx.array(b).astype(dtype)}
    kernel = Metal(source, inputs, ((8, 16), mx.float32), 64, 64, {"T": dtype, "K": 24})
    np.testing.assert_array_equal(in_every_schedule(kernel), 2 * a @ b)


@pytest.mark.parametrize("shape", [(8, 4, 2), (3, 5, 7), (1, 1, 33)])
def test_groups_in_three_dimensions(shape: tuple[int, int, int]) -> None:
    """Simdgroups run along x, then y, then z of the group, also in edge groups."""
    source = """
        uint3 p = thread_position_in_grid, n = threads_per_grid;
        uint first = simd_broadcast_first(thread_index_in_threadgroup);
        uint size = simd_sum(1u);
        threadgroup_barrier(mem_flags::mem_none);
        out[(p.z * n.y + p.y) * n.x + p.x] = first * 100 + size;
    """
    grid = (9, 10, 40)
    result = in_every_schedule(
        Metal(source, output=(grid[::-1], mx.uint32), grid=grid, group=shape)
    )
    for z, y, x in np.ndindex(*grid[::-1]):
        begin = [v // s * s for v, s in zip((x, y, z), shape, strict=True)]
        extent = [min(s, n - b) for s, n, b in zip(shape, grid, begin, strict=True)]
        i = [v - b for v, b in zip((x, y, z), begin, strict=True)]
        linear = (i[2] * extent[1] + i[1]) * extent[0] + i[0]
        first = linear // 32 * 32
        assert result[z, y, x] == first * 100 + min(32, int(np.prod(extent)) - first)


def test_aligned_types_side_by_side_in_threadgroup_memory() -> None:
    source = """
        threadgroup char one;
        threadgroup ulong4 wide[32];
        threadgroup half odd[3];
        threadgroup float4x4 matrices[2];
        uint i = thread_index_in_threadgroup;
        wide[i] = ulong4(i, 1, 2, 3);
        if (i == 0) { one = 7; odd[2] = 5; matrices[1] = float4x4(2.0f); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = wide[31 - i].x + wide[i].w + one + odd[2] + matrices[1][3][3];
    """
    result = run(source, output=(32, mx.float32), grid=32, group=32)
    np.testing.assert_array_equal(result, 31 - np.arange(32) + 3 + 7 + 5 + 2)


def test_many_groups_over_all_workers_reuse_stacks_and_memory() -> None:
    source = """
        threadgroup float a[64];
        uint i = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
        a[i] = g + i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = a[63 - i];
    """
    result = run(source, output=((5000, 64), mx.float32), grid=5000 * 64, group=64)
    np.testing.assert_array_equal(result, np.arange(5000)[:, None] + np.arange(63, -1, -1))


def test_groups_of_different_sizes_after_one_another() -> None:
    """Fibers are made for the largest group so far; a smaller or larger one follows."""
    for group in (1024, 2, 64, 1024, 33):
        source = "out[thread_position_in_grid.x] = simd_sum(1);"
        result = run(source, output=(group, mx.int32), grid=group, group=group)
        assert result.sum() == sum(min(32, group - i // 32 * 32) for i in range(group))


def test_a_helper_may_use_thousands_of_bytes_of_stack() -> None:
    source = """
        uint i = thread_index_in_threadgroup;
        float a[4096];
        for (uint k = 0; k < 4096; ++k) a[k] = k + i;
        float s = simd_sum(a[i]);
        for (uint k = 0; k < 4096; ++k) s += a[(k * 31) % 4096] - k;
        out[i] = s;
    """
    result = run(source, output=(64, mx.float32), grid=64, group=64)
    for i in range(64):
        lanes = range(i // 32 * 32, i // 32 * 32 + 32)
        assert result[i] == sum(2 * lane for lane in lanes) + 4096 * i


def test_threads_meet_in_loops_over_lists() -> None:
    source = """
        threadgroup float shared[64];
        uint i = thread_position_in_threadgroup.x;
        float v = x[i];
        for (ushort lanes : {16, 8, 4, 2, 1}) v += simd_shuffle_xor(v, lanes);
        for (auto factor : {2.0f, 3.0f}) {
            shared[i] = v * factor;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            v += shared[63 - i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        out[i] = v;
    """
    x = np.arange(64, dtype=np.float32)
    sums = x.reshape(2, 32).sum(1).repeat(32)
    first = sums + 2 * sums[::-1]
    kernel = Metal(source, {"x": mx.array(x)}, (64, mx.float32), 64, 64)
    np.testing.assert_array_equal(in_every_schedule(kernel), first + 3 * first[::-1])
