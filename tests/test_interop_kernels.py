"""Kernels in the style of what others publish for MLX and for Metal, through `install()` as they
would come: in a GPU's geometry, in two orders of execution, read strictly and compiled for CUDA."""

from __future__ import annotations

import pathlib
from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import metal, strict
from zmlx.targets import cuda, nvrtc

RNG = np.random.default_rng(0)


@pytest.fixture
def launches(monkeypatch):
    """What is launched inside the test; each is then read and compiled for the other targets."""
    recorded = []
    prepare = metal.prepare

    def record(spec, target, *configuration):
        recorded.append((spec, *configuration[:6]))
        return prepare(spec, target, *configuration)

    monkeypatch.setattr(metal, "prepare", record)
    with zmlx.install():
        yield recorded
    assert recorded
    for launch in recorded:
        if nvrtc.unavailable() is None:
            cuda.compiled(*launch, "sm_80")
        if find_spec("ziglang") is not None:
            assert not [str(p) for p in strict.check(strict.metal_text(*launch))]


@pytest.fixture(params=[0, 1], ids=["breadth first", "depth first"])
def order(request):
    core = zmlx.native.load()
    core.set_schedule(request.param)
    yield
    core.set_schedule(0)


pytestmark = pytest.mark.usefixtures("launches", "order")


def close(got: mx.array, want: np.ndarray, bound: float) -> None:
    got = np.array(got.astype(mx.float32)).astype(np.float64)
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


FLASH_ATTENTION = """
    constexpr int BQ = 8, BK = 32;
    threadgroup T Qs[BQ*D]; threadgroup T Ks[BK*D]; threadgroup T Vs[BK*D];
        threadgroup float Ss[BQ*BK];
    threadgroup float row_m[BQ], row_l[BQ], row_a[BQ]; threadgroup float Os[BQ*D];
    const uint tid = thread_index_in_threadgroup, lane = thread_index_in_simdgroup,
        sg = simdgroup_index_in_threadgroup;
    const uint qb = threadgroup_position_in_grid.x, h = threadgroup_position_in_grid.y;
    const int L = q_shape[1], S = k_shape[1];
    const device T* qp = q + (h*L + qb*BQ)*D; const device T* kp = k + h*S*D;
        const device T* vp = v + h*S*D;
    for (uint i = tid; i < BQ*D; i += NT) { Qs[i] = (qb*BQ + i/D) < uint(L) ? qp[i] : T(0);
        Os[i] = 0; }
    if (tid < BQ) { row_m[tid] = -INFINITY; row_l[tid] = 0; }
    for (int kb = 0; kb < S; kb += BK) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < BK*D; i += NT) { bool in = kb + int(i/D) < S;
            Ks[i] = in ? kp[kb*D+i] : T(0); Vs[i] = in ? vp[kb*D+i] : T(0); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // S = Q K^T: each simdgroup one 8x8 block of keys
        simdgroup_matrix<float,8,8> acc = make_filled_simdgroup_matrix<float,8,8>(0.f);
        #pragma clang loop unroll(full)
        for (int d = 0; d < D; d += 8) {
            simdgroup_matrix<T,8,8> a, b;
            simdgroup_load(a, Qs + d, D); simdgroup_load(b, Ks + sg*8*D + d, D, ulong2(0), true);
            simdgroup_multiply_accumulate(acc, a, b, acc);
        }
        simdgroup_store(acc, Ss + sg*8, BK);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint r = sg; r < BQ; r += NT/32) {
            float s = Ss[r*BK + lane] * scale;
            if (kb + int(lane) >= S || (CAUSAL && kb + int(lane) > int(qb*BQ + r))) s = -INFINITY;
            float m_old = row_m[r], m_new = max(m_old, simd_max(s));
            float p = m_new == -INFINITY ? 0.f : metal::fast::exp(s - m_new);
            float l = simd_sum(p);
            if (lane == 0) { float al = m_old == -INFINITY ? 0 : fast::exp(m_old - m_new);
                row_a[r] = al; row_l[r] = row_l[r]*al + l; row_m[r] = m_new; }
            Ss[r*BK + lane] = p;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < BQ*D; i += NT) {
            uint r = i / D, c = i % D; float o = Os[i] * row_a[r];
            for (int j = 0; j < BK; j++) o = fma(Ss[r*BK+j], float(Vs[j*D+c]), o);
            Os[i] = o;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < BQ*D; i += NT)
        if (qb*BQ + i/D < uint(L))
            out[(h*L + qb*BQ)*D + i] = static_cast<T>(Os[i] / row_l[i/D]);
"""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype, bound", [(mx.float32, 1e-5), (mx.float16, 2e-3)], ids=str)
def test_flash_attention_on_simdgroup_matrices(dtype, bound, causal):
    h, length, s, d = 2, 19, 75, 64
    q, k, v = (
        mx.array(RNG.normal(size=(h, n, d)).astype(np.float32)).astype(dtype)
        for n in (length, s, s)
    )
    kernel = mx.fast.metal_kernel(
        name="flash", input_names=["q", "k", "v", "scale"], output_names=["out"],
        source=FLASH_ATTENTION,
    )  # fmt: skip
    (out,) = kernel(
        inputs=[q, k, v, d**-0.5],
        template=[("T", dtype), ("D", d), ("NT", 128), ("CAUSAL", causal)],
        grid=(128 * -(-length // 8), h, 1), threadgroup=(128, 1, 1),
        output_shapes=[q.shape], output_dtypes=[dtype],
    )  # fmt: skip
    q, k, v = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) * d**-0.5
    if causal:
        scores += np.where(np.tri(length, s), 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    close(out, weights / weights.sum(-1, keepdims=True) @ v, bound)


GRID_SAMPLE_GRADIENT = """
        uint elem = thread_position_in_grid.x;
        int H = x_shape[1]; int W = x_shape[2]; int C = x_shape[3];
        // Pad C to the nearest larger simdgroup size multiple
        int C_padded = ceildiv(C, threads_per_simdgroup) * threads_per_simdgroup;
        int gH = grid_shape[1]; int gW = grid_shape[2];
        int w_stride = C; int h_stride = W * w_stride; int b_stride = H * h_stride;
        uint grid_idx = elem / C_padded * 2;
        float ix = ((grid[grid_idx] + 1) * W - 1) / 2;
            float iy = ((grid[grid_idx + 1] + 1) * H - 1) / 2;
        int ix_nw = floor(ix); int iy_nw = floor(iy);
        T nw = (ix_nw + 1 - ix) * (iy_nw + 1 - iy); T se = (ix - ix_nw) * (iy - iy_nw);
        int batch_idx = elem / C_padded / gH / gW * b_stride; int channel_idx = elem % C_padded;
            int base_idx = batch_idx + channel_idx;
        T gix = T(0); T giy = T(0);
        if (channel_idx < C) {
            int cot_index = elem / C_padded * C + channel_idx;
            T cot = cotangent[cot_index];
            if (iy_nw >= 0 && iy_nw <= H - 1 && ix_nw >= 0 && ix_nw <= W - 1) {
                int offset = base_idx + iy_nw * h_stride + ix_nw * w_stride;
                atomic_fetch_add_explicit(&x_grad[offset], nw * cot, memory_order_relaxed);
                gix -= x[offset] * (iy_nw + 1 - iy) * cot;
                    giy -= x[offset] * (ix_nw + 1 - ix) * cot;
            }
        }
        T gix_mult = W / 2; T giy_mult = H / 2;
        // Reduce across each simdgroup first.
        gix = simd_sum(gix); giy = simd_sum(giy);
        if (thread_index_in_simdgroup == 0) {
            atomic_fetch_add_explicit(&grid_grad[grid_idx], gix * gix_mult, memory_order_relaxed);
            atomic_fetch_add_explicit(&grid_grad[grid_idx + 1], giy * giy_mult,
                memory_order_relaxed);
        }
    """


def test_gradient_of_grid_sample_by_atomics():
    b, h, w, c, rows, columns = 2, 8, 8, 5, 4, 3
    x = RNG.normal(size=(b, h, w, c)).astype(np.float32)
    grid = RNG.uniform(-0.7, 0.7, (b, rows, columns, 2)).astype(np.float32)
    cotangent = RNG.normal(size=(b, rows, columns, c)).astype(np.float32)
    kernel = mx.fast.metal_kernel(
        name="grid_sample_grad", input_names=["x", "grid", "cotangent"],
        output_names=["x_grad", "grid_grad"], source=GRID_SAMPLE_GRADIENT, atomic_outputs=True,
    )  # fmt: skip
    x_grad, grid_grad = kernel(
        inputs=[mx.array(x), mx.array(grid), mx.array(cotangent)], template=[("T", mx.float32)],
        output_shapes=[x.shape, grid.shape], output_dtypes=[mx.float32] * 2,
        grid=(b * rows * columns * 32, 1, 1), threadgroup=(256, 1, 1), init_value=0,
    )  # fmt: skip
    ix, iy = ((grid[..., k] + 1) * n / 2 - 0.5 for k, n in ((0, w), (1, h)))
    left, top = np.floor(ix).astype(int), np.floor(iy).astype(int)
    batch = np.broadcast_to(np.arange(b)[:, None, None], left.shape)
    want = np.zeros_like(x)
    np.add.at(want, (batch, top, left), ((left + 1 - ix) * (top + 1 - iy))[..., None] * cotangent)
    close(x_grad, want, 1e-5)
    slope = -(x[batch, top, left] * cotangent).sum(-1)
    want = np.stack([slope * (top + 1 - iy) * (w // 2), slope * (left + 1 - ix) * (h // 2)], -1)
    close(grid_grad, want, 1e-5)


GEMM_HEADER = """
template <typename T, int R, int C, int LD>
METAL_FUNC void load_tile(const device T* src, threadgroup T* dst, int ld, int rows, int cols,
    uint lid) {
    for (uint i = lid; i < R * C; i += 128) { int r = i / C, c = i % C;
        dst[r * LD + c] = (r < rows && c < cols) ? src[r * ld + c] : T(0); }
}
template <typename T, int TM, int TN>
struct Tile {
    simdgroup_matrix<T, 8, 8> m[TM][TN];
    METAL_FUNC void clear() { for (short i = 0; i < TM; i++) for (short j = 0; j < TN;
        j++) m[i][j] = simdgroup_matrix<T, 8, 8>(0); }
    template <typename U>
    METAL_FUNC void mma(const threadgroup U* a, const threadgroup U* b, int lda, int ldb) {
        simdgroup_matrix<U, 8, 8> fa[TM], fb[TN];
        MLX_MTL_PRAGMA_UNROLL
        for (short i = 0; i < TM; i++) simdgroup_load(fa[i], a + i * 8 * lda, lda);
        for (short j = 0; j < TN; j++) simdgroup_load(fb[j], b + j * 8, ldb);
        for (short i = 0; i < TM; i++) for (short j = 0; j < TN;
            j++) simdgroup_multiply_accumulate(m[i][j], fa[i], fb[j], m[i][j]);
    }
};
"""

GEMM = """
    using namespace metal;
    constexpr short TM = 4, TN = 4; constexpr int LDA = BK + 4, LDB = BN + 4;
    threadgroup T As[BM * LDA]; threadgroup T Bs[BK * LDB];
    const int M = A_shape[0], K = A_shape[1], N = B_shape[1];
    const uint3 tid = threadgroup_position_in_grid, lid = thread_position_in_threadgroup;
    const short sid = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup; (void)lane;
    Tile<float, BM / 16, BN / 16> acc; acc.clear();
    const short sm = (sid / 2) * (BM/2), sn = (sid % 2) * (BN/2);
    for (int k0 = 0; k0 < K; k0 += BK) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile<T, BM, BK, LDA>(A + size_t(tid.y) * BM * K + k0, As, K, M - int(tid.y) * BM,
            K - k0, lid.x);
        load_tile<T, BK, BN, LDB>(B + size_t(k0) * N + tid.x * BN, Bs, N, K - k0,
            N - int(tid.x) * BN, lid.x);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (short kk = 0; kk < BK; kk += 8) acc.mma(As + sm * LDA + kk, Bs + kk * LDB + sn, LDA,
            LDB);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* scratch = reinterpret_cast<threadgroup float*>(As);
    for (short i = 0; i < BM/16; i++) for (short j = 0; j < BN/16; j++) {
        threadgroup float* p = scratch + sid * 64;
        simdgroup_store(acc.m[i][j], p, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (short e = lane; e < 64; e += 32) { int r = tid.y*BM + sm + i*8 + e/8,
            c = tid.x*BN + sn + j*8 + e%8; if (r < M && c < N) C[r*N+c] = T(p[e]); }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_matrix_product_with_tiles_in_a_class(dtype):
    a, b = (RNG.integers(-2, 3, shape).astype(np.float32) for shape in ((45, 70), (70, 50)))
    kernel = mx.fast.metal_kernel(
        name="gemm", input_names=["A", "B"], output_names=["C"], source=GEMM, header=GEMM_HEADER
    )
    (out,) = kernel(
        inputs=[mx.array(a).astype(dtype), mx.array(b).astype(dtype)],
        template=[("T", dtype), ("BM", 32), ("BN", 32), ("BK", 16)],
        grid=(256, 2, 1), threadgroup=(128, 1, 1), output_shapes=[(45, 50)], output_dtypes=[dtype],
    )  # fmt: skip
    close(out, a @ b, 0)


Q4_HEADER = """
#define QK4_0 32
#define N_SIMDWIDTH 32
typedef struct { half d; uint8_t qs[QK4_0/2]; } block_q4_0;
static_assert(sizeof(block_q4_0) == sizeof(half) + QK4_0/2, "wrong q4_0 block size");
inline float block_q_n_dot_y(device const block_q4_0 * qb, float sumy, thread float * yl, int il) {
    float d = qb->d; float2 acc = 0.f;
    device const uint16_t * qs = ((device const uint16_t *)qb + 1 + il/2);
    for (int i = 0; i < 8; i += 2) {
        acc[0] += yl[i + 0] * (qs[i / 2] & 0x000F) + yl[i + 1] * (qs[i / 2] & 0x0F00);
        acc[1] += yl[i + 8] * (qs[i / 2] & 0x00F0) + yl[i + 9] * (qs[i / 2] & 0xF000);
    }
    return d * (sumy * -8.f + acc[0] + acc[1]);
}
"""

Q4 = """
    const int nr = NR, nb = ne00 / QK4_0; const int nsg = 2;
    const uint sg = simdgroup_index_in_threadgroup;
    const int first_row = (threadgroup_position_in_grid.x * nsg + sg) * nr;
    device const block_q4_0 * x = (device const block_q4_0 *) src0 + first_row * nb;
    device const float * y = src1; uint tiisg = thread_index_in_simdgroup;
    float yl[16]; float sumf[NR] = {0.f};
    const short ix = tiisg/2; const short il = 8*(tiisg%2);
    device const float * yb = y + ix * QK4_0 + il;
    for (int ib = ix; ib < nb; ib += N_SIMDWIDTH/2) {
        float sumy = 0;
        for (int i = 0; i < 8; i += 2) {
            sumy += yb[i] + yb[i+1]; yl[i+0] = yb[i+ 0]; yl[i+1] = yb[i+ 1]/256.f;
            sumy += yb[i+16] + yb[i+17]; yl[i+8] = yb[i+16]/16.f; yl[i+9] = yb[i+17]/4096.f;
        }
        for (int row = 0; row < nr; row++) sumf[row] += block_q_n_dot_y(x+ib+row*nb, sumy, yl, il);
        yb += QK4_0 * 16;
    }
    for (int row = 0; row < nr; ++row) { const float tot = simd_sum(sumf[row]);
        if (tiisg == 0 && first_row + row < ne01) dst[first_row + row] = tot; }
"""


def test_product_with_a_matrix_of_4_bit_blocks():
    rows, columns = 16, 1024
    q = RNG.integers(0, 16, (rows, columns // 32, 32))
    d = RNG.uniform(0.01, 0.1, (rows, columns // 32)).astype(np.float16)
    packed = (q[..., :16] | (q[..., 16:] << 4)).astype(np.uint8)
    scales = d[..., None].view(np.uint8).reshape(rows, columns // 32, 2)
    y = RNG.normal(size=columns).astype(np.float32)
    kernel = mx.fast.metal_kernel(
        name="q4", input_names=["src0", "src1", "ne00", "ne01"], output_names=["dst"],
        source=Q4, header=Q4_HEADER,
    )  # fmt: skip
    (out,) = kernel(
        inputs=[mx.array(np.concatenate([scales, packed], -1).ravel()), mx.array(y), columns, rows],
        template=[("NR", 4)], grid=(8 * rows, 1, 1), threadgroup=(64, 1, 1),
        output_shapes=[(rows,)], output_dtypes=[mx.float32],
    )  # fmt: skip
    close(out, ((q - 8) * d[..., None].astype(np.float64)).reshape(rows, columns) @ y, 1e-5)


FILE_OF_BLOCKS = """
#pragma once
#include <metal_stdlib>
#include <simd/simd.h>
using namespace metal;
#if defined(__has_include)
#if __has_include(<metal_simdgroup>)
#define LANES 32
#endif
#endif
struct Block {  // 32 values of 4 bits
    union { struct { half step, least; }; half2 both; };
    uchar low[16];
};
static_assert(sizeof(Block) == 20, "no padding");
inline float4 unpack(device const Block& b, ushort at) {
    const uchar4 packed = *(device const uchar4*)(b.low + 4 * (at % 4));
    uchar4 q = {0};
    q.xyzw.xy = (at < 4 ? packed & 15 : packed >> 4).xy;
    q.zw = (at < 4 ? packed & 15 : packed >> 4).zw;
    return (float4)q * float(b.both.x) + float(b.least);
}
template <typename B, float4 (*load)(device const B&, ushort)>
float dot_block(device const B& b, constant float* x) {
    float4 sum = {0.f};
    for (ushort at = 0; at < 8; ++at) {
        sum += load(b, at) * float4(x[4 * at], x[4 * at + 1], x[4 * at + 2], x[4 * at + 3]);
    }
    return sum.x + sum.y + sum.z + sum.w;
}
kernel void unpack_all(device const Block* b [[buffer(0)]], device float4* y [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
    threadgroup float4 shared[LANES];
    shared[i % LANES] = unpack(b[i / 8], i % 8);
    y[i] = shared[i % LANES];
}
constant float ONES[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                           1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
"""

BLOCK_SUMS = """
    device const Block* row = (device const Block*)w + threadgroup_position_in_grid.x * ROWS * N;
    float sums[ROWS] = {[0 ... ROWS - 1] = 0.0f};
    for (uint k = thread_index_in_simdgroup; k < N; k += LANES) {
        for (ushort r = 0; r < ROWS; ++r) {
            sums[r] += dot_block<Block, unpack>(row[r * N + k], ONES);
        }
    }
    simdgroup_barrier(mem_flags::mem_none);
    for (ushort r = 0; r < ROWS; ++r) {
        T total = 0;
        total = T(simd_sum(sums[r]));
        if (simd_is_first()) out[threadgroup_position_in_grid.x * ROWS + r] = total;
    }
"""


@pytest.mark.parametrize("dtype, bound", [(mx.float32, 1e-6), (mx.bfloat16, 4e-3)], ids=str)
def test_a_whole_file_as_header(dtype, bound):
    """Half a unit in the last place of the output: the sums are float32."""
    rows, n = 6, 40
    q = RNG.integers(0, 16, (rows, n, 32)).astype(np.uint8)
    both = RNG.uniform(0.5, 2, (rows, n, 2)).astype(np.float16)
    packed = q[..., :16] | q[..., 16:] << 4
    kernel = mx.fast.metal_kernel(
        name="3_sums", input_names=["w"], output_names=["out"], source=BLOCK_SUMS,
        header=FILE_OF_BLOCKS,
    )  # fmt: skip
    (out,) = kernel(
        inputs=[mx.array(np.concatenate([both.view(np.uint8), packed], -1))],
        template=[("T", dtype), ("ROWS", 3), ("N", n)], grid=(32 * rows // 3, 1, 1),
        threadgroup=(32, 1, 1), output_shapes=[(rows,)], output_dtypes=[dtype],
    )  # fmt: skip
    both = both.astype(np.float64)
    close(out, (q * both[..., :1] + both[..., 1:]).sum((1, 2)), bound)


RADIX_SORT = """
    threadgroup uint keys[256]; threadgroup uint tmp[256]; threadgroup atomic_uint hist[16];
        threadgroup uint offs[16]; threadgroup uint sgs[8];
    const uint l = thread_index_in_threadgroup; keys[l] = x[threadgroup_position_in_grid.x*256 + l];
    for (uint shift = 0; shift < 32; shift += 4) {
        if (l < 16) atomic_store_explicit(&hist[l], 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint key = keys[l]; uint digit = (key >> shift) & 15u;
        atomic_fetch_add_explicit(&hist[digit], 1, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (l < 16) offs[l] = simd_prefix_exclusive_sum(atomic_load_explicit(&hist[l],
            memory_order_relaxed));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // stable rank by ballots
        for (uint d = 0; d < 16; ++d) {
            bool mine = digit == d; uint mask = uint((ulong)simd_ballot(mine));
                uint before = popcount(mask & ((1u << thread_index_in_simdgroup) - 1));
            if (simd_is_first()) sgs[simdgroup_index_in_threadgroup] = popcount(mask);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            uint base = offs[d]; for (uint s = 0; s < simdgroup_index_in_threadgroup;
                ++s) base += sgs[s];
            if (mine) tmp[base + before] = key;
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        keys[l] = tmp[l];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    y[threadgroup_position_in_grid.x*256 + l] = keys[l];
"""


def test_radix_sort_by_ballots():
    x = RNG.integers(0, 2**32, 512, dtype=np.uint64).astype(np.uint32)
    kernel = mx.fast.metal_kernel(
        name="radix_sort", input_names=["x"], output_names=["y"], source=RADIX_SORT
    )
    (out,) = kernel(
        inputs=[mx.array(x)], grid=(512, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(512,)],
        output_dtypes=[mx.uint32],
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(out), np.sort(x.reshape(2, 256), 1).ravel())


WKV = """
    const uint b = threadgroup_position_in_grid.y, h = threadgroup_position_in_grid.x,
        i = thread_position_in_threadgroup.x;
    const uint H = threadgroups_per_grid.x; const uint T_len = r_shape[1];
    threadgroup float _r[HS], _k[HS], _u[HS], _w[HS];
    float state[HS] = {0};
    threadgroup_barrier(mem_flags::mem_threadgroup);
    _w[i] = w[h*HS+i]; _u[i] = u[h*HS+i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = 0; t < T_len; t++) {
        const uint at = ((b*T_len + t)*H + h)*HS + i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        _r[i] = float(r[at]); _k[i] = float(k[at]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const float vv = float(v[at]); float y = 0;
        #pragma unroll
        for (int j = 0; j < HS; j += 4) {
            const float4 kk = *(threadgroup float4*)(_k + j), rr = *(threadgroup float4*)(_r+j),
                ww = *(threadgroup float4*)(_w+j), uu = *(threadgroup float4*)(_u+j);
            thread float4& s = *(thread float4*)(state + j);
            float4 x = kk * vv;
            y += dot(rr, uu * x + s);
            s = s * ww + x;
        }
        out[at] = T(y);
    }
"""


def test_rwkv_with_vectors_over_threadgroup_memory():
    b, length, h, size = 2, 9, 3, 32
    r, k, v = (RNG.normal(size=(b, length, h, size)).astype(np.float32) for _ in range(3))
    w = RNG.uniform(0.5, 0.99, (h, size)).astype(np.float32)
    u = RNG.normal(size=(h, size)).astype(np.float32)
    kernel = mx.fast.metal_kernel(
        name="wkv5", input_names=["r", "k", "v", "w", "u"], output_names=["out"], source=WKV
    )
    (out,) = kernel(
        inputs=[mx.array(x) for x in (r, k, v, w, u)], template=[("T", mx.float32), ("HS", size)],
        grid=(h * size, b, 1), threadgroup=(size, 1, 1), output_shapes=[r.shape],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    state, want = np.zeros((b, h, size, size)), np.zeros(r.shape)
    for t in range(length):
        step = k[:, t, :, :, None] * v[:, t, :, None, :]
        want[:, t] = np.einsum("bhj,bhji->bhi", r[:, t], u[:, :, None] * step + state)
        state = state * w[:, :, None] + step
    close(out, want, 1e-5)


def mlx_header(path: str, seen: set[str]) -> str:
    """A header that MLX installs, with those that it includes, as its own build joins them."""
    if path in seen:
        return ""
    seen.add(path)
    text = (pathlib.Path(mx.__file__).parent / "include" / path).read_text()
    lines = [line for line in text.splitlines() if line != "#pragma once"]
    include = '#include "mlx/'
    return "\n".join(
        mlx_header(line.split('"')[1], seen) if line.startswith(include) else line for line in lines
    )


STEEL_GEMM = """
    using Kernel = mlx::steel::GEMMKernel<T, T, 32, 64, 16, 2, 2, false, true, true, true>;
    threadgroup T a_tile[Kernel::tgp_mem_size_a], b_tile[Kernel::tgp_mem_size_b];
    const uint row = threadgroup_position_in_grid.y * 32;
    const uint column = threadgroup_position_in_grid.x * 64;
    const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    thread typename Kernel::mma_t tile(sg, lane);
    thread typename Kernel::loader_a_t a_loader(a + row * K, K, a_tile, sg, lane);
    thread typename Kernel::loader_b_t b_loader(b + column * K, K, b_tile, sg, lane);
    for (int k = 0; k < K; k += 16) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        a_loader.load_unsafe();
        b_loader.load_unsafe();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile.mma(a_tile, b_tile);
        a_loader.next();
        b_loader.next();
    }
    tile.store_result(out + row * N + column, N);
"""


@pytest.mark.parametrize(
    "dtype, bound", [(mx.float32, 1e-5), (mx.float16, 1e-3), (mx.bfloat16, 8e-3)], ids=str
)
def test_tiles_of_mlx_itself(dtype, bound):
    """Half a unit in the last place of the output: the tiles add up in float32."""
    m, n, k = 64, 128, 48
    a, b = (mx.array(RNG.normal(size=(rows, k))).astype(dtype) for rows in (m, n))
    kernel = mx.fast.metal_kernel(
        name="steel", input_names=["a", "b"], output_names=["out"], source=STEEL_GEMM,
        header=mlx_header("mlx/backend/metal/kernels/steel/gemm/gemm.h", set()) + "\n",
    )  # fmt: skip
    (out,) = kernel(
        inputs=[a, b], template=[("T", dtype), ("K", k), ("N", n)],
        grid=(32 * n // 64, 2 * m // 32, 2), threadgroup=(32, 2, 2),
        output_shapes=[(m, n)], output_dtypes=[dtype],
    )  # fmt: skip
    a, b = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (a, b))
    close(out, a @ b.T, bound)


STRUCTS = """
typedef float4 quaternion;
struct Body {
    float3 place;
    float mass;
    quaternion turn;
};
struct Lamp {
    uchar kind;
    vec<float, 4> colour;
    Body body;
    packed_float3 aim;
    int3 cell, other;
};
static_assert(sizeof(Body) == 48 && sizeof(Lamp) == 128, "as Metal has them");
"""


@pytest.mark.on_cpu
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
@pytest.mark.parametrize("group", [1, 16])
def test_structs_with_vectors_lie_over_arrays_that_start_anywhere(offset, group):
    n = 16
    bodies = RNG.normal(size=(n, 12)).astype(np.float32)
    lamp = RNG.normal(size=32).astype(np.float32)
    memory = mx.array(np.concatenate([np.zeros(offset, np.float32), bodies.ravel()]))
    kernel = mx.fast.metal_kernel(
        name="structs", input_names=["x", "w"], output_names=["y"], header=STRUCTS,
        source="""
            uint i = thread_position_in_grid.x;
            device Body& b = reinterpret_cast<device Body*>(y)[i];
            b = ((const device Body*)x)[i];
            const device Lamp* lamp = (const device Lamp*)w;
            b.mass += lamp->body.mass + lamp->aim.z;
            b.turn = b.turn.wzyx * lamp->colour.y;""",
    )  # fmt: skip
    (y,) = kernel(
        inputs=[memory[offset:], mx.array(lamp)], grid=(n, 1, 1), threadgroup=(group, 1, 1),
        output_shapes=[(n, 12)], output_dtypes=[mx.float32],
    )  # fmt: skip
    y = np.array(y)
    np.testing.assert_array_equal(y[:, :3], bodies[:, :3])
    np.testing.assert_allclose(y[:, 4], bodies[:, 4] + (lamp[12] + lamp[22]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[:, 8:], bodies[:, :7:-1] * lamp[5])
