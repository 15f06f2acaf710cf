"""The Metal text of `topk_gating`: template constants are in capitals."""

#: LANES threads share a row of E experts, of which each holds PER; K are chosen.
ROW = """\
const uint lane = thread_position_in_threadgroup.x % LANES;
const uint group = threadgroup_position_in_grid.x
    + threadgroup_position_in_grid.y * threadgroups_per_grid.x;
const uint slot = group * RPG + thread_position_in_threadgroup.x / LANES;
if (group * RPG >= rows) {
    return;
}
// A surplus row of the last group repeats the last row and stores nothing.
const bool live = slot < rows;
const uint row = live ? slot : rows - 1;
auto x = logits + size_t(row) * E;
"""

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

FORWARD = (
    ROW
    + """\
// What the choice goes by, and the expert, as one number: the larger, the sooner it is chosen.
// 0 is an expert that is not open to this row, or does not exist.
ulong key[PER];
"""
    + LOAD
    + """\
float nan = 0.0f;
if (SOFTMAX) {
    int count = 0;
    for (int i = 0; i < PER; ++i) {
        count += value[i] != value[i] ? 1 : 0;
    }
    nan = zmlx_lanes<LANES, zmlx_lane_sum>(float(count));
}
float shift = 0.0f;
float norm = 1.0f;
if (BY_LOGIT) {
    for (int i = 0; i < PER; ++i) {
        const int e = int(lane) + i * LANES;
        key[i] = e < E ? zmlx_choice(value[i], e) : ulong(0);
    }
}
if (SOFTMAX && (!BY_LOGIT || !NORMALIZE)) {
    @SOFTMAX@
    shift = top;
    norm = 1.0f / total;
    for (int i = 0; i < PER; ++i) {
        value[i] *= norm;
    }
}
if (!SOFTMAX && !BY_LOGIT) {
    for (int i = 0; i < PER; ++i) {
        value[i] = 1.0f / (1.0f + exp(-value[i]));
    }
}
if (!BY_LOGIT) {
    @BIAS@
}
if (!BY_LOGIT && GROUPS > 1) {
    const int width = E / GROUPS;
    float mark[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
        // The experts of a group lie in these places of a lane, beside those of its neighbours.
        const int begin = g * width / LANES;
        const int end = min(((g + 1) * width + LANES - 1) / LANES, PER);
        float best = -INFINITY;
        for (int i = begin; i < end; ++i) {
            const int e = int(lane) + i * LANES;
            const bool inside = e >= g * width && e < (g + 1) * width;
            best = max(best, inside ? value[i] : -INFINITY);
        }
        best = zmlx_lanes<LANES, zmlx_lane_max>(best);
        // The second largest is the largest again where two are equal.
        float next = -INFINITY;
        int equal = 0;
        for (int i = begin; i < end; ++i) {
            const int e = int(lane) + i * LANES;
            const bool inside = e >= g * width && e < (g + 1) * width;
            next = max(next, inside && value[i] < best ? value[i] : -INFINITY);
            equal += inside && value[i] == best ? 1 : 0;
        }
        next = zmlx_lanes<LANES, zmlx_lane_max>(next);
        const float ties = zmlx_lanes<LANES, zmlx_lane_sum>(float(equal));
        mark[g] = TOP2 && width > 1 ? best + (ties > 1.0f ? best : next) : best;
    }
    int better[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
        better[g] = 0;
        for (int h = 0; h < GROUPS; ++h) {
            better[g] += mark[h] > mark[g] || (mark[h] == mark[g] && h < g) ? 1 : 0;
        }
    }
    for (int g = 0; g < GROUPS; ++g) {
        for (int i = g * width / LANES; i < min(((g + 1) * width + LANES - 1) / LANES, PER); ++i) {
            const int e = int(lane) + i * LANES;
            if (e >= g * width && e < (g + 1) * width) {
                key[i] = better[g] < TOP_GROUPS ? ulong(1) : ulong(0);
            }
        }
    }
}
if (!BY_LOGIT) {
    for (int i = 0; i < PER; ++i) {
        const int e = int(lane) + i * LANES;
        const bool open = e < E && (GROUPS == 1 || key[i] != 0);
        key[i] = open ? zmlx_choice(value[i], e) : ulong(0);
    }
}
int chosen[K];
float score[K];
ulong last = ~ulong(0);
for (int k = 0; k < K; ++k) {
    // The largest key below the last one is the nearest to it: no two are equal, and the distance
    // of those above wraps around.
    ulong near = ~ulong(0);
    for (int i = 0; i < PER; ++i) {
        const ulong distance = last - 1 - key[i];
        near = distance < near ? distance : near;
    }
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        const ulong other = (ulong(simd_shuffle_xor(uint(near >> 32), step)) << 32)
            | ulong(simd_shuffle_xor(uint(near), step));
        near = other < near ? other : near;
    }
    last = last - 1 - near;
    chosen[k] = int(0xffffffffu - uint(last));
    score[k] = float(x[chosen[k]]);
}
if (SOFTMAX && NORMALIZE) {
    shift = -INFINITY;
    for (int k = 0; k < K; ++k) {
        shift = max(shift, score[k]);
    }
}
float sum = 0.0f;
for (int k = 0; k < K; ++k) {
    score[k] = SOFTMAX ? exp(score[k] - shift) : 1.0f / (1.0f + exp(-score[k]));
    sum += score[k];
}
float factor = scale * (NORMALIZE ? 1.0f / sum : norm);
if (SOFTMAX) {
    factor = nan > 0.0f ? NAN : factor;
}
if (live) {
    for (int c = int(lane); c < K; c += LANES) {
        weights[size_t(row) * K + c] = T(score[c] * factor);
        indices[size_t(row) * K + c] = uint(chosen[c]);
    }
}
"""
)

BIAS = """\
for (int i = 0; i < PER; ++i) {
        value[i] += float(bias[min(int(lane) + i * LANES, E - 1)]);
    }"""

HEADER = """\
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

// Larger for the larger value, and among equal ones for the lower expert; NaN is below all.
inline ulong zmlx_choice(float value, int expert) {
    // -0 becomes 0.
    const uint bits = as_type<uint>(value + 0.0f);
    const uint order = bits ^ (uint(int(bits) >> 31) | 0x80000000u);
    const uint rank = value != value ? 1u : order;
    return (ulong(rank) << 32) | ulong(0xffffffffu - uint(expert));
}
"""

BACKWARD = (
    ROW
    + """\
auto where = indices + size_t(row) * K;
auto dw = dweights + size_t(row) * K;
auto out = dlogits + size_t(row) * E;
float shift = 0.0f;
float norm = 1.0f;
if (SOFTMAX && !NORMALIZE) {
    @LOAD@
    @SOFTMAX@
    shift = top;
    norm = 1.0f / total;
    float dot = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float p = exp(float(x[min(int(where[k]), E - 1)]) - shift) * norm;
        dot += float(dw[k]) * p;
    }
    for (int i = 0; i < PER; ++i) {
        const int e = int(lane) + i * LANES;
        if (live && e < E) {
            out[e] = T(-scale * dot * (value[i] * norm));
        }
    }
    for (int k = 0; k < K; ++k) {
        const int e = min(int(where[k]), E - 1);
        const float p = exp(float(x[e]) - shift) * norm;
        // By the lane that stored the element before.
        if (live && e % LANES == int(lane)) {
            out[e] = T(scale * p * (float(dw[k]) - dot));
        }
    }
} else {
    if (SOFTMAX) {
        shift = -INFINITY;
        for (int k = 0; k < K; ++k) {
            shift = max(shift, float(x[min(int(where[k]), E - 1)]));
        }
    }
    float sum = 0.0f;
    float dot = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float v = float(x[min(int(where[k]), E - 1)]);
        const float p = SOFTMAX ? exp(v - shift) : 1.0f / (1.0f + exp(-v));
        sum += p;
        dot += float(dw[k]) * p;
    }
    norm = NORMALIZE ? 1.0f / sum : 1.0f;
    dot = NORMALIZE ? dot * norm : 0.0f;
    for (int i = 0; i < PER; ++i) {
        const int e = int(lane) + i * LANES;
        if (live && e < E) {
            out[e] = T(0.0f);
        }
    }
    for (int k = 0; k < K; ++k) {
        const int e = min(int(where[k]), E - 1);
        const float v = float(x[e]);
        const float p = SOFTMAX ? exp(v - shift) : 1.0f / (1.0f + exp(-v));
        const float slope = SOFTMAX ? p : p * (1.0f / (1.0f + exp(v)));
        if (live && e % LANES == int(lane)) {
            out[e] = T(scale * norm * slope * (float(dw[k]) - dot));
        }
    }
}
"""
)


def expanded(body: str, **parts: str) -> str:
    """The body with the parts that it names between @ signs."""
    for name, part in parts.items():
        body = body.replace(f"@{name}@", part.strip("\n").replace("\n", "\n    "))
    return "    " + body.strip("\n").replace("\n", "\n    ") + "\n"
