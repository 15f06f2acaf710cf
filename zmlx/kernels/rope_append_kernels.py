"""Texts of `rope_append`: new rows turned, old ones kept."""

from __future__ import annotations

from .. import msl
from .rope_kernels import ARRAYS, HEADER, PACES, START_OF_BODY, TABLE

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
            const bool fits = start >= 0 && start + length <= room;
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
        const bool fits = start >= 0 && start + length <= room;
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
