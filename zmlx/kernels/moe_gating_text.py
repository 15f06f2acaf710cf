"""The Metal text of `topk_gating` forward: template constants are in capitals."""

import re
from collections.abc import Mapping

SOFTMAX = """\
float top = -INFINITY;
for (int i = 0; i < PER; ++i) {
    top = max(top, value[i]);
}
top = zmlx_lanes<LANES, zmlx_lane_max>(top);
// Sums in PARTS vectorise in a fixed order.
float part[PARTS] = {0};
for (int i = 0; i < PER / PARTS * PARTS; i += PARTS) {
    for (int u = 0; u < PARTS; ++u) {
        value[i + u] = exp(value[i + u] - top);
        part[u] += value[i + u];
    }
}
for (int i = PER / PARTS * PARTS; i < PER; ++i) {
    value[i] = exp(value[i] - top);
    part[0] += value[i];
}
float total = 0.0f;
for (int u = 0; u < PARTS; ++u) {
    total += part[u];
}
total = zmlx_lanes<LANES, zmlx_lane_sum>(total);
"""

LOAD = """\
float value[PER];
for (int i = 0; i < PER; ++i) {
    const int e = int(lane) + i * LANES;
    value[i] = e < E ? float(x[e]) : -INFINITY;
}
"""

FORWARD = """\
const uint lane = thread_position_in_threadgroup.x % LANES;
const uint group = threadgroup_position_in_grid.x
    + threadgroup_position_in_grid.y * threadgroups_per_grid.x;
const uint first = (group * RPG + thread_position_in_threadgroup.x / LANES) * ROWS;
if (group * RPG * ROWS >= rows) {
    return;
}
// What the choice goes by: the larger, the sooner an expert is chosen. 0 is an expert that is not
// open to this row, or does not exist. A row has SLOTS of them, a thread those of ROWS rows.
uint rank[ROWS * SLOTS];
float shift[ROWS];
float norm[ROWS];
// 1, or NaN for all weights of a row.
float spoilt[ROWS];
const bool full = ROWS > 1 && first + ROWS <= rows;
// Nothing but the logits counts, and a thread has whole rows, which are one after the other.
constexpr bool FLAT = ROWS > 1 && BY_LOGIT && (NORMALIZE || !SOFTMAX) && SLOTS == E;
// Whether keys are made of the logits as they are, instead of `rank`.
bool direct = false;
// The same rows of the next thread are asked for, if it has as many.
const size_t beyond = first + 2 * ROWS <= rows ? ROWS * E : 0;
if (FLAT) {
    auto x = logits + size_t(first) * E;
    bool odd = true;
    if (full) {
        // Of numbers without their sign, NaN has the largest bits.
        zmlx_bits<T> most = 0;
        for (int i = 0; i < ROWS * E; ++i) {
            most = max(most, zmlx_size(x[i]));
        }
        odd = most > zmlx_size(T(INFINITY));
        // A few at a time are on their way while the network sorts, if it goes row by row.
        for (int i = 0; i < (SPAN == 16 ? 0 : ROWS * E); i += 64 / int(sizeof(T))) {
            ZMLX_PREFETCH_FAR(x + beyond + i);
        }
    }
    direct = SHORT && SPAN == 16 && !odd;
    if (odd) {
        for (int i = 0; i < ROWS * E; ++i) {
            rank[i] = zmlx_rank(x[min(uint(i / E), rows - 1 - first) * E + i % E]);
        }
    } else if (!direct) {
        for (int i = 0; i < ROWS * E; ++i) {
            rank[i] = zmlx_order(x[i]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        norm[r] = 1.0f;
        spoilt[r] = 1.0f;
    }
    if (SOFTMAX && odd) {
        for (int i = 0; i < ROWS * E; ++i) {
            spoilt[i / E] = rank[i] == zmlx_rank(NAN) ? NAN : spoilt[i / E];
        }
    }
}
for (int r = 0; r < (FLAT ? 0 : ROWS); ++r) {
    const int own = r * SLOTS;
    // A surplus row of the last group repeats the last row and stores nothing.
    auto x = logits + size_t(min(first + r, rows - 1)) * E;
    int count = 0;
    for (int i = 0; i < PER; ++i) {
        const int e = int(lane) + i * LANES;
        const T v = e < E ? x[e] : T(-INFINITY);
        count += float(v) != float(v) ? 1 : 0;
        rank[own + i] = e < E ? zmlx_rank(v) : 0u;
    }
    spoilt[r] = 1.0f;
    if (SOFTMAX) {
        const float nans = zmlx_lanes<LANES, zmlx_lane_sum>(float(count));
        spoilt[r] = nans > 0.0f ? NAN : 1.0f;
    }
    shift[r] = 0.0f;
    norm[r] = 1.0f;
    // Unused, and so not there, where the choice goes by the logits and the sum is of the chosen.
    @LOAD@
    if (SOFTMAX && (!BY_LOGIT || !NORMALIZE)) {
        @SOFTMAX@
        shift[r] = top;
        norm[r] = 1.0f / total;
        for (int i = 0; i < PER; ++i) {
            value[i] *= norm[r];
        }
    }
    if (!SOFTMAX && !BY_LOGIT) {
        for (int i = 0; i < PER; ++i) {
            value[i] = 1.0f / (1.0f + exp(-value[i]));
        }
    }
    if (!BY_LOGIT) {
        @BIAS@
        for (int i = 0; i < PER; ++i) {
            rank[own + i] = int(lane) + i * LANES < E ? zmlx_rank(value[i]) : 0u;
        }
    }
    if (!BY_LOGIT && GROUPS > 1) {
        const int width = E / GROUPS;
        // NaN ranks below, and so counts for no more than this.
        const uint least = zmlx_rank(-INFINITY);
        uint mark[GROUPS];
        for (int g = 0; g < GROUPS; ++g) {
            // The experts of a group lie in these places of a lane, beside those of its neighbours.
            const int begin = g * width / LANES;
            const int end = min(((g + 1) * width + LANES - 1) / LANES, PER);
            uint most = least;
            for (int i = begin; i < end; ++i) {
                const int e = int(lane) + i * LANES;
                const bool inside = e >= g * width && e < (g + 1) * width;
                most = max(most, inside ? rank[own + i] : 0u);
            }
            const float best = zmlx_lanes<LANES, zmlx_lane_max>(zmlx_value<float>(most));
            most = zmlx_rank(best);
            // The second largest is the largest again where two are equal.
            uint second = least;
            int equal = 0;
            for (int i = begin; i < end; ++i) {
                const int e = int(lane) + i * LANES;
                const bool inside = e >= g * width && e < (g + 1) * width;
                const uint own_rank = inside ? rank[own + i] : 0u;
                second = max(second, own_rank < most ? own_rank : 0u);
                equal += own_rank == most ? 1 : 0;
            }
            const float next = zmlx_lanes<LANES, zmlx_lane_max>(zmlx_value<float>(second));
            const float ties = zmlx_lanes<LANES, zmlx_lane_sum>(float(equal));
            // Infinities of both signs make NaN, which no comparison finds better or worse.
            mark[g] = zmlx_rank(TOP2 && width > 1 ? best + (ties > 1.0f ? best : next) : best);
        }
        for (int g = 0; g < GROUPS; ++g) {
            int better = 0;
            for (int h = 0; h < GROUPS; ++h) {
                better += mark[h] > mark[g] || (mark[h] == mark[g] && h < g) ? 1 : 0;
            }
            const int end = min(((g + 1) * width + LANES - 1) / LANES, PER);
            for (int i = g * width / LANES; i < end; ++i) {
                const int e = int(lane) + i * LANES;
                if (better >= TOP_GROUPS && e >= g * width && e < (g + 1) * width) {
                    rank[own + i] = 0u;
                }
            }
        }
    }
    for (int i = PER; i < SLOTS; ++i) {
        rank[own + i] = 0;
    }
}
// Expert and rank of choice k of row r, in place k · ROWS + r.
int chosen[K * ROWS];
uint held[K * ROWS];
@NETWORK@
// Where the chosen differ in more than the lower bits from each other, and from all others, the
// keys were in order.
bool known = NETWORK && SHORT;
if (NETWORK && !SHORT) {
    int close[K * ROWS] = {0};
    for (int b = ROWS; b < K * ROWS; ++b) {
        close[b] = (held[b - ROWS] ^ held[b]) <= uint(PLACES) ? 1 : 0;
    }
    int above[SLOTS] = {0};
    for (int r = 0; r < ROWS; ++r) {
        const uint least = held[(K - 1) * ROWS + r] & ~uint(PLACES);
        for (int i = 0; i < SLOTS; ++i) {
            above[i] += rank[r * SLOTS + i] >= least ? 1 : 0;
        }
    }
    int all = 0;
    for (int c = 0; c < K * ROWS; ++c) {
        all += close[c];
    }
    for (int i = 0; i < SLOTS; ++i) {
        all += above[i];
    }
    known = all == ROWS * K;
}
if (NETWORK && !known) {
    for (int r = 0; r < ROWS; ++r) {
        const int own = r * SLOTS;
        const uint worst = held[(K - 1) * ROWS + r];
        const int at = chosen[(K - 1) * ROWS + r];
        int better = 0;
        for (int i = 0; i < SLOTS; ++i) {
            const bool equal = rank[own + i] == worst;
            better += (rank[own + i] > worst) | (equal & (i < at)) ? 1 : 0;
        }
        bool sorted = better == K - 1;
        for (int k = 1; k < K; ++k) {
            const int b = k * ROWS + r;
            const int a = b - ROWS;
            const bool equal = held[a] == held[b];
            sorted = sorted & ((held[a] > held[b]) | (equal & (chosen[a] < chosen[b])));
        }
        if (!sorted) {
            @CHOOSE_ALONE@
        }
    }
}
if (!NETWORK) {
    for (int r = 0; r < ROWS; ++r) {
        const int own = r * SLOTS;
        @CHOOSE@
    }
}
float score[K * ROWS];
if (BY_LOGIT) {
    for (int c = 0; c < K * ROWS; ++c) {
        score[c] = zmlx_value<T>(held[c]);
    }
} else {
    for (int c = 0; c < K * ROWS; ++c) {
        score[c] = float(logits[size_t(min(first + c % ROWS, rows - 1)) * E + chosen[c]]);
    }
}
// Scores that are normalised are divided by the largest, or nearly, so that not all underflow.
float least[ROWS];
for (int r = 0; r < ROWS; ++r) {
    shift[r] = NORMALIZE ? -INFINITY : SOFTMAX ? shift[r] : 0.0f;
}
if (NORMALIZE) {
    for (int k = 0; k < K; ++k) {
        for (int r = 0; r < ROWS; ++r) {
            shift[r] = max(shift[r], score[k * ROWS + r]);
        }
    }
}
for (int r = 0; r < ROWS; ++r) {
    shift[r] = SOFTMAX ? shift[r] : min(shift[r], 0.0f);
    least[r] = SOFTMAX ? 0.0f : exp(shift[r]);
}
float sum[ROWS] = {0};
// Many equal scores, added one by one, would all be rounded the same way.
for (int start = 0; start < K; start += 32) {
    float part[ROWS] = {0};
    for (int k = start; k < min(start + 32, K); ++k) {
        for (int r = 0; r < ROWS; ++r) {
            const float v = score[k * ROWS + r];
            const float p = SOFTMAX ? exp(v - shift[r]) : 1.0f / (least[r] + exp(shift[r] - v));
            score[k * ROWS + r] = p;
            part[r] += p;
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        sum[r] += part[r];
    }
}
const float whole = scale;
for (int r = 0; r < ROWS; ++r) {
    norm[r] = whole * (NORMALIZE ? 1.0f / sum[r] : norm[r]) * spoilt[r];
}
for (int k = 0; k < K; ++k) {
    for (int r = 0; r < ROWS; ++r) {
        score[k * ROWS + r] *= norm[r];
    }
}
const size_t begin = size_t(first) * K;
if (full) {
    // The outputs of one thread are consecutive.
    float by_row[K * ROWS];
    zmlx_transpose<K, ROWS>(by_row, score);
    for (int c = 0; c < ROWS * K; ++c) {
        weights[begin + c] = T(by_row[c]);
    }
    int place_by_row[K * ROWS];
    zmlx_transpose<K, ROWS>(place_by_row, chosen);
    for (int c = 0; c < ROWS * K; ++c) {
        indices[begin + c] = uint(place_by_row[c]);
    }
} else {
    for (int r = 0; r < ROWS; ++r) {
        if (first + r < rows) {
            for (int own = int(lane); own < K; own += LANES) {
                weights[begin + r * K + own] = T(score[own * ROWS + r]);
                indices[begin + r * K + own] = uint(chosen[own * ROWS + r]);
            }
        }
    }
}
"""

#: One choice after the other; threads that share a row agree on each.
CHOOSE = """\
ulong last = ~ulong(0);
for (int k = 0; k < K; ++k) {
    // Rank and expert are one number, the key. The largest below the last one is the nearest to
    // it: no two are equal, and the distance of those above wraps around.
    ulong near = ~ulong(0);
    for (int i = 0; i < PER; ++i) {
        const ulong key = (ulong(rank[own + i]) << 32)
            | ulong(0xffffffffu - uint(int(lane) + i * LANES));
        const ulong distance = last - 1 - key;
        near = distance < near ? distance : near;
    }
    @AGREE@
    last = last - 1 - near;
    chosen[k * ROWS + r] = int(0xffffffffu - uint(last));
    held[k * ROWS + r] = uint(last >> 32);
}
"""

AGREE = """\
for (ushort step = LANES / 2; step > 0; step /= 2) {
    const ulong other = (ulong(simd_shuffle_xor(uint(near >> 32), step)) << 32)
        | ulong(simd_shuffle_xor(uint(near), step));
    near = other < near ? other : near;
}
"""

BIAS = """\
for (int i = 0; i < PER; ++i) {
    value[i] += float(bias[min(int(lane) + i * LANES, E - 1)]);
}
"""

HEADER = """\
// ZMLX_PREFETCH_FAR asks for what is wanted later; the CPU target defines it.
#ifndef ZMLX_PREFETCH_FAR
#define ZMLX_PREFETCH_FAR(pointer)
#endif

struct zmlx_lane_max {
    static float fold(float a, float b) { return max(a, b); }
};
struct zmlx_lane_sum {
    static float fold(float a, float b) { return a + b; }
};

template <int LANES, typename Op> float zmlx_lanes(float value) {
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        value = Op::fold(value, simd_shuffle_xor(value, step));
    }
    return value;
}

// The bits of a number; of one without its sign.
template <typename T> struct zmlx_bits_of {
    typedef ushort type;
};
template <> struct zmlx_bits_of<float> {
    typedef uint type;
};
template <typename T> using zmlx_bits = typename zmlx_bits_of<T>::type;

template <typename T> zmlx_bits<T> zmlx_size(T value) {
    constexpr zmlx_bits<T> all = ~zmlx_bits<T>(0);
    return as_type<zmlx_bits<T>>(value) & zmlx_bits<T>(all >> 1);
}

// Larger for the larger number, the same for -0 and 0, and not for NaN. That of a number of 16 bits
// has its upper bits alone.
inline uint zmlx_order(float value) {
    const uint bits = as_type<uint>(value + 0.0f);
    return bits ^ (uint(int(bits) >> 31) | 0x80000000u);
}
template <typename T> uint zmlx_order(T value) {
    const ushort bits = as_type<ushort>(value);
    const ushort order = bits ^ (ushort(short(bits) >> 15) | ushort(0x8000));
    return uint(ushort(order == 0x7fff ? 0x8000 : order)) << 16;
}

// NaN below all.
template <typename T> uint zmlx_rank(T value) {
    return float(value) != float(value) ? 0x00100000u : zmlx_order(value);
}

// to[r * K + k] = from[k * ROWS + r]; `from` is used up. For K a power of two by dealing out halves
// like cards: a gather of each takes longer.
template <int K, int ROWS, typename T> void zmlx_transpose(thread T* to, thread T* from) {
    constexpr int HALF = K * ROWS / 2;
    constexpr bool DEAL = (K & (K - 1)) == 0;
    for (int dealt = 1; dealt < (DEAL ? K : 0); dealt *= 2) {
        for (int i = 0; i < HALF; ++i) {
            to[2 * i] = from[i];
            to[2 * i + 1] = from[HALF + i];
        }
        for (int i = 0; i < 2 * HALF; ++i) {
            from[i] = to[i];
        }
    }
    for (int c = 0; c < K * ROWS; ++c) {
        to[c] = from[DEAL ? c : c % K * ROWS + c / K];
    }
}

// The number in an order.
template <typename T> T zmlx_value(uint order) {
    const uint bits = order >> 31 ? order ^ 0x80000000u : ~order;
    return as_type<T>(zmlx_bits<T>(bits >> (32 - 8 * sizeof(T))));
}
"""


def expanded(body: str, **parts: str) -> str:
    """The body with the parts that it names between @ signs, on lines of their own."""
    return "    " + _filled(body, parts).replace("\n", "\n    ").replace("    \n", "\n") + "\n"


def _filled(body: str, parts: Mapping[str, str]) -> str:
    def part(found: re.Match[str]) -> str:
        margin, name = found.groups()
        lines = _filled(parts[name], parts).split("\n")
        return "\n".join(margin + line if line else "" for line in lines)

    return re.sub(r"^( *)@(\w+)@$", part, body.strip("\n"), flags=re.MULTILINE)
