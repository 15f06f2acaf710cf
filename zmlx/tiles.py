"""Tiles: what a matrix kernel is written against, on a GPU and on the CPU.

A tile is a matrix of M rows and N lanes, in the threads of a group. On a GPU a simdgroup holds
eight lanes in `simdgroup_matrix` fragments: a thread has one lane, and M / 4 of its rows. On the
CPU the one thread has it all, with a row's lanes side by side, so that loops over them vectorise.
A kernel declares `float tile[M / SHARE * LANES]` and visits elements with

    for (int i = 0; i < M / SHARE; ++i)
        for (int j = 0; j < LANES; ++j)
            ... tile[i * LANES + j] is at row zmlx_row(place, i), lane zmlx_lane(place, j)

Products take their left operand from threadgroup memory, rows as they lie in the array, and their
right operand and the sums from tiles. Softmax over the rows of a tile needs no lane but its own:
`zmlx_across_max` and `zmlx_across_sum` fold over the SHARE threads of a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from . import launch

#: Simdgroups of a group, and lanes of a tile, on a GPU.
_SIMDGROUPS = 4
#: Lanes and rows of a tile on the CPU, and of one where there is not more.
_CPU_SIDE = 64
_CPU_SHORT_SIDE = 32
#: Widths together, for a kernel that keeps half a dozen tiles on a thread's stack of 8 MiB.
_WIDEST = 2048
#: Metal's threadgroup memory, in floats.
_SHARED_FLOATS = 8192

_COMMON = """\
// Where a thread's part of a tile begins.
struct zmlx_place {
    int row;
    int lane;
};

// turned[m][n] = source[n][m], whose rows are a stride apart; the CPU target has a faster one.
#ifndef ZMLX_LOAD_TRANSPOSED
template <int M, int N, class Source>
inline void zmlx_load_transposed(thread float* turned, Source source, size_t stride) {
    for (int n = 0; n < N; ++n) {
        for (int m = 0; m < M; ++m) {
            turned[m * N + n] = float(source[n * stride + m]);
        }
    }
}
#endif
"""

_GPU = """\
#define ZMLX_STAGED threadgroup
// Simdgroups: a fragment has its rows along lanes (Apple's order of a simdgroup_matrix).
inline zmlx_place zmlx_place_of(uint simdgroup, uint thread_in_simdgroup) {
    const uint t = thread_in_simdgroup;
    zmlx_place place = {int((t >> 2 & 2) * 2 + (t & 1) * 2),
                        int(simdgroup * 8 + (t >> 2 & 4) + (t >> 1 & 3))};
    return place;
}
inline int zmlx_row(zmlx_place place, int i) {
    return (i >> 1) * 8 + place.row + (i & 1);
}
inline int zmlx_lane(zmlx_place place, int j) {
    return place.lane + j;
}
inline float zmlx_across_max(float x) {
    x = max(x, simd_shuffle_xor(x, ushort(1)));
    return max(x, simd_shuffle_xor(x, ushort(8)));
}
inline float zmlx_across_sum(float x) {
    x = x + simd_shuffle_xor(x, ushort(1));
    return x + simd_shuffle_xor(x, ushort(8));
}

// staged[m][d] = source[m][d] · by, zeros from row `count` and from column W on.
template <int M, int W, int WIDE, class From>
inline void zmlx_stage(
    threadgroup float* staged, From source, int count, uint thread_, uint threads,
    float by = 1.0f) {
    for (uint spot = thread_; spot < uint(M * WIDE); spot += threads) {
        const int line = int(spot / uint(WIDE)), column = int(spot % uint(WIDE));
        staged[spot] =
            line < count && column < W ? float(source[size_t(line) * W + column]) * by : 0.0f;
    }
}

// sums[m][n] += Σ_k a[m][k] right[k][n], or a[k][m] if ALONG; rows of a are WIDE apart.
template <int M, int K, int N, int WIDE, bool ALONG>
inline void zmlx_product(thread float* sums, threadgroup float* a, thread float* right) {
    for (int m = 0; m < M; m += 8) {
        simdgroup_float8x8 sum;
        sum.thread_elements()[0] = 0.0f;
        sum.thread_elements()[1] = 0.0f;
        for (int k = 0; k < K; k += 8) {
            simdgroup_float8x8 x, y;
            x.thread_elements()[0] = right[k / 4];
            x.thread_elements()[1] = right[k / 4 + 1];
            if (ALONG) {
                simdgroup_load(y, a + k * WIDE + m, WIDE);
            } else {
                simdgroup_load(y, a + m * WIDE + k, WIDE, ulong2(0, 0), true);
            }
            simdgroup_multiply_accumulate(sum, x, y, sum);
        }
        sums[m / 4] += sum.thread_elements()[0];
        sums[m / 4 + 1] += sum.thread_elements()[1];
    }
}
"""

_CPU = """\
// One thread: blocks of BLOCK_ROWS rows and 32 lanes stay in vector registers while k runs. With 16
// lanes, g++ would unroll them before it looks for vectors.
#define ZMLX_STAGED thread
inline zmlx_place zmlx_place_of(uint simdgroup, uint thread_in_simdgroup) {
    zmlx_place place = {0, 0};
    return place;
}
inline int zmlx_row(zmlx_place place, int i) {
    return i;
}
inline int zmlx_lane(zmlx_place place, int j) {
    return j;
}
inline float zmlx_across_max(float x) {
    return x;
}
inline float zmlx_across_sum(float x) {
    return x;
}

// staged[m][d] = source[m][d] · by, zeros from row `count` and from column W on.
template <int M, int W, int WIDE, class From>
inline void zmlx_stage(
    thread float* staged, From source, int count, uint thread_, uint threads,
    float by = 1.0f) {
    for (int m = 0; m < M; ++m) {
        if (m < count) {
            for (int d = 0; d < W; ++d) {
                staged[m * WIDE + d] = float(source[size_t(m) * W + d]) * by;
            }
            for (int d = W; d < WIDE; ++d) {
                staged[m * WIDE + d] = 0.0f;
            }
        } else {
            for (int d = 0; d < WIDE; ++d) {
                staged[m * WIDE + d] = 0.0f;
            }
        }
    }
}

// A block of sums. What a tile adds is summed by itself first: fewer roundings of a long sum.
template <int K, int N, int WIDE, bool ALONG, class Left, class Right>
inline void zmlx_block(thread float* sums, Left a, Right right) {
    float block[BLOCK_ROWS][32];
    for (int i = 0; i < BLOCK_ROWS; ++i) {
        for (int j = 0; j < 32; ++j) {
            block[i][j] = 0.0f;
        }
    }
    for (int k = 0; k < K; ++k) {
        for (int i = 0; i < BLOCK_ROWS; ++i) {
            const float x = ALONG ? a[k * WIDE + i] : a[i * WIDE + k];
            for (int j = 0; j < 32; ++j) {
                block[i][j] += x * right[k * N + j];
            }
        }
    }
    for (int i = 0; i < BLOCK_ROWS; ++i) {
        for (int j = 0; j < 32; ++j) {
            sums[i * N + j] += block[i][j];
        }
    }
}

// sums[m][n] += Σ_k a[m][k] right[k][n], or a[k][m] if ALONG; rows of a are WIDE apart.
template <int M, int K, int N, int WIDE, bool ALONG, class Left, class Right>
inline void zmlx_product(thread float* sums, Left a, Right right) {
    for (int n = 0; n < N; n += 32) {
        for (int m = 0; m < M; m += BLOCK_ROWS) {
            zmlx_block<K, N, WIDE, ALONG>(
                sums + m * N + n, a + (ALONG ? m : m * WIDE), right + n);
        }
    }
}
"""


def header(on_cpu: bool) -> str:
    """The functions for the kind of machine."""
    if not on_cpu:
        return _COMMON + _GPU
    return _COMMON + _CPU.replace("BLOCK_ROWS", str(8 if _many_registers() else 4))


@cache
def _many_registers() -> bool:
    """Whether 16 sums of 16 floats fit in registers: AVX-512."""
    try:
        with open("/proc/cpuinfo") as file:
            return " avx512f " in file.read()
    except OSError:
        return False


@dataclass(frozen=True)
class Tiling:
    """Rows and lanes of the tiles of a kernel, and how threads hold them."""

    rows: int
    lanes: int
    share: int
    held: int
    threads: int

    @property
    def template(self) -> tuple[tuple[str, int], ...]:
        """Template arguments: rows M and lanes N of a tile, SHARE threads of a lane, LANES lanes
        of a thread, THREADS of a group."""
        return (("M", self.rows), ("N", self.lanes), ("SHARE", self.share), ("LANES", self.held),
                ("THREADS", self.threads))  # fmt: skip


def padded(width: int) -> int:
    """`width` in whole fragments and blocks."""
    return -(-width // 8) * 8


def tiling(chosen: launch.Settings, *staged: int, longest: int) -> Tiling | None:
    """Tiles for a kernel that stages rows of these widths; None where they do not fit. The sides of
    the matrices that it goes through are up to `longest`."""
    if launch.is_cpu(chosen):
        if sum(map(padded, staged)) > _WIDEST:
            return None
        side = _CPU_SHORT_SIDE if longest <= _CPU_SHORT_SIDE else _CPU_SIDE
        return Tiling(side, side, 1, side, 1)
    width = sum(map(padded, staged))
    rows = next((m for m in (32, 16, 8) if m * width <= _SHARED_FLOATS), None)
    if rows is None:
        return None
    return Tiling(rows, 8 * _SIMDGROUPS, 4, 1, 32 * _SIMDGROUPS)
