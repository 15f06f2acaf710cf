"""The Metal text of `topk_gating`'s gradient for the logits."""

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
    if (NORMALIZE) {
        shift = -INFINITY;
        for (int k = 0; k < K; ++k) {
            shift = max(shift, float(x[min(int(where[k]), E - 1)]));
        }
        shift = SOFTMAX ? shift : min(shift, 0.0f);
    }
    const float least = exp(shift);
    float sum = 0.0f;
    float dot = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float v = float(x[min(int(where[k]), E - 1)]);
        const float p = SOFTMAX ? exp(v - shift) : 1.0f / (least + exp(shift - v));
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
        const float p = SOFTMAX ? exp(v - shift) : 1.0f / (least + exp(shift - v));
        const float slope = SOFTMAX ? p : p * (1.0f / (1.0f + exp(v)));
        if (live && e % LANES == int(lane)) {
            out[e] = T(scale * norm * slope * (float(dw[k]) - dot));
        }
    }
}
"""
)
