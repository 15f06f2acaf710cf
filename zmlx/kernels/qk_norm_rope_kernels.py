"""Texts of `qk_norm_rope`: a row normed and turned, back again, and the sums for the weights."""

from __future__ import annotations

from .rope_kernels import ARRAYS, HEADER, PACES, START_OF_BODY, TABLE

ROW_HEADER = (
    HEADER
    + """\

// The sum over the LANES threads of a row, which are a simdgroup or one thread.
template <int LANES>
float zmlx_lanes_sum(float value) {
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        value += simd_shuffle_xor(value, step);
    }
    return value;
}

// 1 / sqrt(mean x^2 + eps) of the row x. U sums a thread, in a fixed order, make a loop that
// vectorises.
template <int D, int LANES, int U, typename X>
float zmlx_row_rstd(X x, float eps, uint lane) {
    float parts[U] = {0};
    for (uint i = 0; i < D / (U * LANES); ++i) {
        for (uint u = 0; u < U; ++u) {
            const float value = float(x[(i * U + u) * LANES + lane]);
            parts[u] += value * value;
        }
    }
    float squares = 0.0f;
    for (uint j = D / (U * LANES) * (U * LANES) + lane; j < D; j += LANES) {
        squares += float(x[j]) * float(x[j]);
    }
    for (uint u = 0; u < U; ++u) {
        squares += parts[u];
    }
    return rsqrt(zmlx_lanes_sum<LANES>(squares) / float(D) + eps);
}

// Norms the row x by its rstd and turns it.
template <typename T, int D, int HALF, int PAIRS, int LANES, bool TRADITIONAL,
          typename X, typename W, typename Y>
void zmlx_norm_turn(X x, W weight, Y y, const thread float* cosine, const thread float* sine,
                    float rstd, uint lane) {
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (PAIRS * LANES == HALF || pair < HALF) {
            const uint one = TRADITIONAL ? 2 * pair : pair;
            const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
            const float n1 = float(x[one]) * rstd * float(weight[one]);
            const float n2 = float(x[two]) * rstd * float(weight[two]);
            y[one] = T(n1 * cosine[i] - n2 * sine[i]);
            y[two] = T(n1 * sine[i] + n2 * cosine[i]);
        }
    }
    for (uint j = 2 * HALF + lane; j < D; j += LANES) {
        y[j] = T(float(x[j]) * rstd * float(weight[j]));
    }
}

// dx of a row, and its part of dweight: sums[i] of first elements of pairs, sums[PAIRS + i] of
// second ones, then of those that do not turn. `sine` is that of the forward.
template <typename T, int D, int HALF, int PAIRS, int LANES, int U, bool TRADITIONAL,
          typename X, typename W, typename G, typename Y>
void zmlx_norm_turn_back(X x, W weight, G dy, Y dx, const thread float* cosine,
                         const thread float* sine, float eps, uint lane, thread float* sums) {
    float squares_parts[U] = {0}, along_parts[U] = {0};
    float squares = 0.0f, along = 0.0f;
    for (uint i = 0; i < PAIRS / U; ++i) {
        for (uint u = 0; u < U; ++u) {
            const uint pair = (i * U + u) * LANES + lane;
            const bool live = PAIRS * LANES == HALF || pair < HALF;
            const uint at = live ? pair : 0;
            const uint one = TRADITIONAL ? 2 * at : at;
            const uint two = TRADITIONAL ? 2 * at + 1 : at + HALF;
            const float x1 = live ? float(x[one]) : 0.0f, x2 = live ? float(x[two]) : 0.0f;
            const float c = cosine[i * U + u], s = sine[i * U + u];
            const float g1 = float(dy[one]), g2 = float(dy[two]);
            squares_parts[u] += x1 * x1 + x2 * x2;
            along_parts[u] += x1 * float(weight[one]) * (g1 * c + g2 * s)
                + x2 * float(weight[two]) * (g2 * c - g1 * s);
        }
    }
    for (uint i = PAIRS / U * U; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        const bool live = PAIRS * LANES == HALF || pair < HALF;
        const uint at = live ? pair : 0;
        const uint one = TRADITIONAL ? 2 * at : at;
        const uint two = TRADITIONAL ? 2 * at + 1 : at + HALF;
        const float x1 = live ? float(x[one]) : 0.0f, x2 = live ? float(x[two]) : 0.0f;
        const float g1 = float(dy[one]), g2 = float(dy[two]);
        squares += x1 * x1 + x2 * x2;
        along += x1 * float(weight[one]) * (g1 * cosine[i] + g2 * sine[i])
            + x2 * float(weight[two]) * (g2 * cosine[i] - g1 * sine[i]);
    }
    for (uint j = 2 * HALF + lane; j < D; j += LANES) {
        const float value = float(x[j]);
        squares += value * value;
        along += value * float(weight[j]) * float(dy[j]);
    }
    for (uint u = 0; u < U; ++u) {
        squares += squares_parts[u];
        along += along_parts[u];
    }
    const float rstd = rsqrt(zmlx_lanes_sum<LANES>(squares) / float(D) + eps);
    const float pull = rstd * rstd * zmlx_lanes_sum<LANES>(along) / float(D);
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (PAIRS * LANES == HALF || pair < HALF) {
            const uint one = TRADITIONAL ? 2 * pair : pair;
            const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
            const float x1 = float(x[one]), x2 = float(x[two]);
            const float g1 = float(dy[one]), g2 = float(dy[two]);
            const float z1 = g1 * cosine[i] + g2 * sine[i];
            const float z2 = g2 * cosine[i] - g1 * sine[i];
            dx[one] = T(rstd * (z1 * float(weight[one]) - x1 * pull));
            dx[two] = T(rstd * (z2 * float(weight[two]) - x2 * pull));
            sums[i] += z1 * x1 * rstd;
            sums[PAIRS + i] += z2 * x2 * rstd;
        }
    }
    for (uint i = 0; i < (D - 2 * HALF + LANES - 1) / LANES; ++i) {
        const uint j = 2 * HALF + i * LANES + lane;
        if (j < D) {
            const float value = float(x[j]);
            dx[j] = T(rstd * (float(dy[j]) * float(weight[j]) - value * pull));
            sums[2 * PAIRS + i] += float(dy[j]) * value * rstd;
        }
    }
}
"""
)

_START = (
    START_OF_BODY
    + """\
    const uint chunk = sizes[5];
    const uint slot = threadgroup_position_in_grid.x;
"""
    + PACES
    + ARRAYS
)

_LOOP = (
    """\
    const uint stop = min(places, (slot + 1) * chunk);
    for (uint first = slot * chunk; first < stop; first += BLOCK) {
        const uint count = min(uint(BLOCK), stop - first);
"""
    + TABLE
)

#: What is done with the rows of q; those of k follow with other names and sizes. The sum of a row
#: ends in a chain of additions, a root and a division. A few rows are summed before they turn, so
#: that their chains overlap, and are still in the nearest cache then.
_FORWARD_ROWS = """\
        for (uint head = 0; head < sizes[6]; ++head) {
            for (uint start = 0; start < count; start += 8) {
                const uint few = min(8u, count - start);
                size_t rows[8];
                float rstds[8];
                for (uint i = 0; i < few; ++i) {
                    const uint b = start + i;
                    rows[i] = size_t(batch[b]) * sizes[7] + size_t(step[b]) * sizes[8]
                        + size_t(head) * sizes[9];
                    rstds[i] = zmlx_row_rstd<D, LANES, U>(q + rows[i] * D, eps, lane);
                }
                for (uint i = 0; i < few; ++i) {
                    const uint place = (start + i) * PAIRS;
                    zmlx_norm_turn<q_t, D, HALF, PAIRS, LANES, TRADITIONAL>(
                        q + rows[i] * D, q_weight, q_out + rows[i] * D, cosines + place,
                        sines + place, rstds[i], lane);
                }
            }
        }
"""

_BACKWARD_ROWS = """\
        for (uint head = 0; head < sizes[6]; ++head) {
            for (uint b = 0; b < count; ++b) {
                const size_t row = size_t(batch[b]) * sizes[7] + size_t(step[b]) * sizes[8]
                    + size_t(head) * sizes[9];
                zmlx_norm_turn_back<q_t, D, HALF, PAIRS, LANES, U, TRADITIONAL>(
                    q + row * D, q_weight, dq_out + row * D, dq + row * D, cosines + b * PAIRS,
                    sines + b * PAIRS, eps, lane, q_sums);
            }
        }
"""

_STORE = """\
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (pair < HALF) {
            dq_weight[slot * size_t(D) + (TRADITIONAL ? 2 * pair : pair)] = q_sums[i];
            dq_weight[slot * size_t(D) + (TRADITIONAL ? 2 * pair + 1 : pair + HALF)] =
                q_sums[PAIRS + i];
        }
    }
    for (uint i = 0; i < RESTS; ++i) {
        const uint j = 2 * HALF + i * LANES + lane;
        if (j < D) {
            dq_weight[slot * size_t(D) + j] = q_sums[2 * PAIRS + i];
        }
    }
"""


def _of_k(text: str) -> str:
    """Text about q as text about k."""
    for i in (6, 7, 8, 9):
        text = text.replace(f"sizes[{i}]", f"sizes[{i + 4}]")
    for name in ("dq_weight", "q_weight", "dq_out", "q_out", "q_sums", "q_t", "dq"):
        text = text.replace(name, name.replace("q", "k"))
    return text.replace("q + row", "k + row")


FORWARD = f"{_START}{_LOOP}{_FORWARD_ROWS}{_of_k(_FORWARD_ROWS)}    }}\n"
BACKWARD = f"""\
{_START}\
    float q_sums[2 * PAIRS + RESTS] = {{0}}, k_sums[2 * PAIRS + RESTS] = {{0}};
{_LOOP}{_BACKWARD_ROWS}{_of_k(_BACKWARD_ROWS)}    }}
"""
#: What follows it where the gradients of the weights are wanted.
SUMS = _STORE + _of_k(_STORE)
