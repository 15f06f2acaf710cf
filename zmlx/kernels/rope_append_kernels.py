"""Texts of `rope_append` and its gradient: new rows turned, old ones kept."""

from __future__ import annotations

import mlx.core as mx

from .. import msl
from .rope_kernels import ARRAYS, HEADER, PACES, START_OF_BODY, TABLE, Rotation

ROW_HEADER = (
    msl.header_for("ZMLX_FAIL")
    + HEADER
    + """\

// A row of x turned to y.
template <typename T, int D, int HALF, int PAIRS, int LANES, bool TRADITIONAL,
          typename X, typename Y>
void zmlx_turn_row(X x, Y y, const thread float* cosine, const thread float* sine, uint lane) {
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (PAIRS * LANES == HALF || pair < HALF) {
            const uint one = TRADITIONAL ? 2 * pair : pair;
            const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
            const float x1 = float(x[one]);
            const float x2 = float(x[two]);
            y[one] = T(x1 * cosine[i] - x2 * sine[i]);
            y[two] = T(x1 * sine[i] + x2 * cosine[i]);
        }
    }
    for (uint j = 2 * HALF + lane; j < D; j += LANES) {
        y[j] = T(float(x[j]));
    }
}

// Elements lane, lane + LANES, … of a row.
template <typename T, int LANES, typename X, typename Y>
void zmlx_copy_row(X x, Y y, uint size, uint lane) {
    for (uint j = lane; j < size; j += LANES) {
        y[j] = T(x[j]);
    }
}
template <typename T, int LANES, typename Y>
void zmlx_fill_row(Y y, float value, uint size, uint lane) {
    for (uint j = lane; j < size; j += LANES) {
        y[j] = T(value);
    }
}
"""
)

# The first `blocks` groups turn new rows, the others keep old ones: a group each for a batch and a
# run of positions.
BODY = (
    START_OF_BODY
    + """\
    const uint heads = sizes[5];
    const uint room = sizes[6];
    const uint blocks = sizes[7];
    const uint run = sizes[8];
    const uint runs = sizes[9];
    const uint group = threadgroup_position_in_grid.x;
    const size_t room_step = sizes[10];
    const size_t room_head = sizes[11];
    const size_t new_step = sizes[12];
    const size_t new_head = sizes[13];
    if (group < blocks) {
"""
    + PACES
    + ARRAYS
    + """\
        const uint first = group * BLOCK;
        const uint count = min(uint(BLOCK), places - first);
"""
    + TABLE
    + """\
        for (uint b = 0; b < count; ++b) {
            const int64_t start = int64_t(positions[batch[b] * batch_stride]);
            const bool fits = start >= 0 && start <= int64_t(room) - int64_t(length);
            if (!fits && lane == 0) {
                ZMLX_FAIL("offset", start);
            }
QUERIES
            const size_t place = fits ? size_t(start) + step[b] : 0;
            for (uint head = 0; head < heads && fits; ++head) {
                const size_t source = size_t(batch[b]) * heads * length + step[b] * new_step
                    + head * new_head;
                const size_t target = size_t(batch[b]) * heads * room + place * room_step
                    + head * room_head;
                zmlx_turn_row<K, D, HALF, PAIRS, LANES, TRADITIONAL>(
                    k + source * D, k_out + target * D, cosines + b * PAIRS, sines + b * PAIRS,
                    lane);
                zmlx_copy_row<V, LANES>(v + source * DV, v_out + target * DV, DV, lane);
            }
        }
    } else {
        const uint which = (group - blocks) / runs;
        const uint from = (group - blocks) % runs * run;
        const int64_t start = int64_t(positions[which * batch_stride]);
        const bool fits = start >= 0 && start <= int64_t(room) - int64_t(length);
        // As numbers, since a cache of few elements is in constant.
        const bool same = (size_t)k_cache == (size_t)k_out && (size_t)v_cache == (size_t)v_out;
        if (!fits || !same) {
            const uint upto = min(room, from + run);
            for (uint head = 0; head < heads; ++head) {
                for (uint p = from; p < upto; ++p) {
                    const size_t row = size_t(which) * heads * room + p * room_step
                        + head * room_head;
                    if (!fits) {
                        zmlx_fill_row<K, LANES>(k_out + row * D, NAN, D, lane);
                        zmlx_fill_row<V, LANES>(v_out + row * DV, NAN, DV, lane);
                    } else if (int64_t(p) < start || int64_t(p) >= start + length) {
                        zmlx_copy_row<K, LANES>(k_cache + row * D, k_out + row * D, D, lane);
                        zmlx_copy_row<V, LANES>(v_cache + row * DV, v_out + row * DV, DV, lane);
                    }
                }
            }
        }
    }
"""
)

QUERIES = """\
            for (uint head = 0; head < sizes[14]; ++head) {
                const size_t row = size_t(batch[b]) * sizes[14] * length
                    + step[b] * size_t(sizes[15]) + head * size_t(sizes[16]);
                zmlx_turn_row<Q, D, HALF, PAIRS, LANES, TRADITIONAL>(
                    q + row * D, q_out + row * D, cosines + b * PAIRS, sines + b * PAIRS, lane);
            }
"""

# New rows of the caches' cotangents, turned back.
TAKEN = (
    START_OF_BODY
    + """\
    const uint heads = sizes[5];
    const uint room = sizes[6];
    const size_t room_step = sizes[7];
    const size_t room_head = sizes[8];
    const size_t new_step = sizes[9];
    const size_t new_head = sizes[10];
"""
    + PACES
    + ARRAYS
    + """\
    const uint first = threadgroup_position_in_grid.x * BLOCK;
    const uint count = min(uint(BLOCK), places - first);
    {
"""
    + TABLE
    + """\
    }
    for (uint b = 0; b < count; ++b) {
        const int64_t start = int64_t(positions[batch[b] * batch_stride]);
        const bool fits = start >= 0 && start <= int64_t(room) - int64_t(length);
        const size_t place = fits ? size_t(start) + step[b] : 0;
        for (uint head = 0; head < heads; ++head) {
            const size_t source = size_t(batch[b]) * heads * room + place * room_step
                + head * room_head;
            const size_t target = size_t(batch[b]) * heads * length + step[b] * new_step
                + head * new_head;
            if (fits) {
                zmlx_turn_row<K, D, HALF, PAIRS, LANES, TRADITIONAL>(
                    dk_cache + source * D, dk + target * D, cosines + b * PAIRS,
                    sines + b * PAIRS, lane);
                zmlx_copy_row<V, LANES>(dv_cache + source * DV, dv + target * DV, DV, lane);
            } else {
                zmlx_fill_row<K, LANES>(dk + target * D, 0.0f, D, lane);
                zmlx_fill_row<V, LANES>(dv + target * DV, 0.0f, DV, lane);
            }
        }
    }
"""
)

# A group for a batch and a run of positions, as the groups of the forward that keep old rows.
KEPT = """\
    const uint lane = thread_position_in_threadgroup.x;
    const uint length = sizes[0];
    const uint heads = sizes[2];
    const uint room = sizes[3];
    const uint run = sizes[4];
    const uint runs = sizes[5];
    const size_t room_step = sizes[6];
    const size_t room_head = sizes[7];
    const uint which = threadgroup_position_in_grid.x / runs;
    const uint from = threadgroup_position_in_grid.x % runs * run;
    const uint upto = min(room, from + run);
    const int64_t start = int64_t(positions[size_t(which) * sizes[1]]);
    const bool fits = start >= 0 && start <= int64_t(room) - int64_t(length);
    const uint low = fits ? uint(start) : 0;
    const uint high = fits ? uint(start) + length : room;
    // As numbers, since a cache of few elements is in constant.
    const bool same = (size_t)dcache == (size_t)dx;
    for (uint head = 0; head < heads; ++head) {
        const size_t row = size_t(which) * heads * room + head * room_head;
        for (uint p = max(from, low); p < min(upto, high); ++p) {
            zmlx_fill_row<T, LANES>(dx + (row + p * room_step) * D, 0.0f, D, lane);
        }
        if (!same) {
            for (uint p = from; p < upto; ++p) {
                if (p < low || p >= high) {
                    const size_t place = (row + p * room_step) * D;
                    zmlx_copy_row<T, LANES>(dcache + place, dx + place, D, lane);
                }
            }
        }
    }
"""


# ---- in plain MLX -------------------------------------------------------------------------------


def starts(
    rotation: Rotation, positions: mx.array, x: mx.array, cache: mx.array
) -> tuple[mx.array, mx.array]:
    """Where new steps start, (batches, 1), and whether they fit, (batches, 1, 1, 1)."""
    batches, _, room, _ = rotation.shape(cache)
    start = mx.broadcast_to(positions.astype(mx.int64).reshape(-1, 1), (batches, 1))
    fits = mx.logical_and(start >= 0, start <= room - rotation.shape(x)[2])
    return start.astype(mx.int32), fits.reshape(-1, 1, 1, 1)


def is_new(rotation: Rotation, start: mx.array, x: mx.array, cache: mx.array) -> mx.array:
    """Which positions of a cache are new, as an array that broadcasts to it."""
    batches, _, room, _ = rotation.shape(cache)
    step = mx.arange(room) - start
    new = mx.logical_and(step >= 0, step < rotation.shape(x)[2])
    return new.reshape((batches, room, 1, 1) if rotation.heads_last else (batches, 1, room, 1))
