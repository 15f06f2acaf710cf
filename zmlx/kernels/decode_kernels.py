"""The kernels of attention for few queries over many keys: split over the keys, then combined.

The heads that share keys, times the queries of a head, are the rows of a group. A group reads the
keys and values of a span once, for ROWS of them: products along D are sums over the threads of a
simdgroup (one thread on the CPU, in lanes: see `decode_lanes.py`), with the softmax kept per row.
What the spans found is combined by their peaks (flash decoding, Dao et al. 2023). Groups of one
span are neighbours in the grid, since the heads of a key may lie side by side.

How a row of the cache is found and read is a `Cache`: an array (B, K, S, D); blocks of an array
(blocks, size, K, D) through a table; or 4 or 8 bits a value with a scale and a bias per group, as
`mx.quantize` packs them. Threads of a simdgroup read bytes: with 4 bits a thread's values are first
the low halves of its bytes, then the high ones, so that no lane waits for another.
"""

from __future__ import annotations

from functools import cache

from ..metal import KernelSpec
from .attention_text import ADDED, NO_MASK, fill
from .decode_cache import NAMES, PAGED, QUANTIZED, ROWS, SHIFT_K, SHIFT_V, Cache, alone, room, tile
from .decode_lanes import LANES, PRODUCTS

HEADER = """\
// ZMLX_FAIL reports a value that only the kernel sees; the CPU target defines it to record it.
#ifndef ZMLX_FAIL
#define ZMLX_FAIL(argument, value)
#endif

// ZMLX_PREFETCH asks for what is wanted soon, ZMLX_PREFETCH_FAR for what is wanted later; the CPU
// target defines both.
#ifndef ZMLX_PREFETCH
#define ZMLX_PREFETCH(pointer)
#endif
#ifndef ZMLX_PREFETCH_FAR
#define ZMLX_PREFETCH_FAR(pointer)
#endif
"""

#: Values `slot` of a thread. One thread has them in steps of W lanes: lane u of step e is value
#: ((e / PLACES) W + u) PLACES + e % PLACES of a row, a value of byte u for packed ones.
_SLOTS = """\
constexpr bool ALONE = TPR == 1;
constexpr int PLACES = ALONE && BITS > 0 ? 8 / BITS : 1;
constexpr int W = ZMLX_LANES;
constexpr int STEPS = (D + W - 1) / W;
constexpr int STEPS_V = (DV + W - 1) / W;
// Of a simdgroup: with 4 bits first the low halves of a thread's bytes, then the high ones.
constexpr int PARTS = BITS == 4 ? 2 : 1;
constexpr int HALF = (D / PARTS + TPR - 1) / TPR;
constexpr int HALF_V = (DV / PARTS + TPR - 1) / TPR;
constexpr int SLOTS = ALONE ? STEPS * W : HALF * PARTS;
constexpr int SLOTS_V = ALONE ? STEPS_V * W : HALF_V * PARTS;
// Keys that are taken at a time, and steps of W values, 64 at most: what has its sums in registers.
constexpr int AT = 4 * ROWS <= ZMLX_SUMS ? 4 : 2;
constexpr int BLOCK_V = zmlx_block(ROWS, BITS > 0 && ALONE ? GROUP / W : STEPS_V, 64 / W);
// Sums that add up to the total of a row.
constexpr int TOTALS = ALONE ? 16 : 1;
const int lane = int(thread_index_in_simdgroup);
"""

_BODY = """\
@slots
const int queries = int(sizes[0]);
const int keys = int(sizes[1]);
const int heads = int(sizes[2]);
const int kv_heads = int(sizes[3]);
const int span = int(sizes[4]);
const int group = heads / kv_heads;
const int rows = group * queries;
const int chunks = (rows + ROWS - 1) / ROWS;
const int split = int(threadgroup_position_in_grid.y);
const int splits = int(threadgroups_per_grid.y);
const int kv_head = int(threadgroup_position_in_grid.x) / chunks;
const int first = int(threadgroup_position_in_grid.x) % chunks * ROWS;
const int batch = int(threadgroup_position_in_grid.z);
const float factor = float(scale);
int length = keys;
bool good = true;
@length
const int from = split * span;
const int to = min(length, from + span);
int low = from;
@low
float own[ROWS * SLOTS];
ZMLX_ROLLED
for (int r = 0; r < ROWS; ++r) {
    const int row = min(first + r, rows - 1);
    const size_t at = size_t(batch) * size_t(q_strides[0])
        + size_t(kv_head * group + row / queries) * size_t(q_strides[1])
        + size_t(row % queries) * size_t(q_strides[2]);
    for (int e = 0; e < SLOTS; ++e) {
        ZMLX_SCALAR
        const int d = ALONE ? (e / (W * PLACES) * W + e % W) * PLACES + e / W % PLACES
                            : (e % HALF * TPR + lane) * PARTS + e / HALF;
        own[r * SLOTS + e] =
            d < D ? float(q[at + size_t(d) * size_t(q_strides[3])]) * factor : 0.0f;
    }
}
float o[ROWS * SLOTS_V];
float top[ROWS], total[ROWS * TOTALS];
for (int e = 0; e < ROWS * SLOTS_V; ++e) {
    o[e] = 0.0f;
}
for (int r = 0; r < ROWS; ++r) {
    top[r] = -FLT_MAX;
}
for (int e = 0; e < ROWS * TOTALS; ++e) {
    total[e] = 0.0f;
}
// Rows of the cache, or for one thread sums for each of them.
float tile[ALONE ? 1 : KEYS * (SLOTS > SLOTS_V ? SLOTS : SLOTS_V)];
float part[ALONE ? ROWS * KEYS * W / AT : 1];
@room
@rows
for (int start = low; start < to && good; start += KEYS) {
    const int count = min(KEYS, to - start);
    float s[ROWS * KEYS];
    @rows_of_tile
    if (ALONE) {
        @dots
        zmlx_fold<ROWS * KEYS, W / AT>(s, part);
        @shift_k
    } else {
        @tile_k
        for (int r = 0; r < ROWS; ++r) {
            for (int key = 0; key < KEYS; ++key) {
                float sum = 0.0f;
                for (int e = 0; e < SLOTS; ++e) {
                    sum += own[r * SLOTS + e] * tile[key * SLOTS + e];
                }
                s[r * KEYS + key] = simd_sum(sum);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        @scores
    }
    ZMLX_ROLLED
    for (int r = 0; r < ROWS; ++r) {
        for (int key = count; key < KEYS; ++key) {
            ZMLX_SCALAR
            s[r * KEYS + key] = -INFINITY;
        }
    }
    float change[ROWS];
    if (ALONE) {
        ZMLX_ROLLED
        for (int r = 0; r < ROWS; ++r) {
            zmlx_weights<KEYS>(s + r * KEYS, top + r, total + r * TOTALS, change + r);
        }
    } else {
        for (int r = 0; r < ROWS; ++r) {
            float most = top[r];
            for (int key = 0; key < KEYS; ++key) {
                most = max(most, s[r * KEYS + key]);
            }
            float sum = 0.0f;
            for (int key = 0; key < KEYS; ++key) {
                const float p = exp(s[r * KEYS + key] - most);
                s[r * KEYS + key] = p;
                sum += p;
            }
            change[r] = exp(top[r] - most);
            total[r] = total[r] * change[r] + sum;
            top[r] = most;
        }
    }
    ZMLX_ROLLED
    for (int r = 0; r < ROWS; ++r) {
        for (int e = 0; e < SLOTS_V; ++e) {
            o[r * SLOTS_V + e] *= change[r];
        }
    }
    if (ALONE) {
        @weigh
    } else {
        @tile_v
        for (int e = 0; e < SLOTS_V; ++e) {
            for (int r = 0; r < ROWS; ++r) {
                for (int key = 0; key < KEYS; ++key) {
                    o[r * SLOTS_V + e] += s[r * KEYS + key] * tile[key * SLOTS_V + e];
                }
            }
        }
    }
}
if (ALONE) {
    ZMLX_ROLLED
    for (int r = 0; r < ROWS; ++r) {
        total[r] = zmlx_folded<false>(total + r * TOTALS);
    }
}
@shift_v
ZMLX_ROLLED
for (int r = 0; r < ROWS && first + r < rows; ++r) {
    const size_t at =
        ((size_t(batch) * kv_heads + kv_head) * rows + first + r) * splits + split;
    for (int e = 0; e < SLOTS_V; ++e) {
        ZMLX_SCALAR
        const int d = ALONE ? (e / (W * PLACES) * W + e % W) * PLACES + e / W % PLACES
                            : (e % HALF_V * TPR + lane) * PARTS + e / HALF_V;
        if (d < DV) {
            found[at * DV + d] = o[r * SLOTS_V + e];
        }
    }
    if (lane == 0) {
        peak[at] = top[r];
        weight[at] = good ? total[r] : NAN;
    }
}
"""

_LENGTH = """\
const int64_t own_length = int64_t(lengths[size_t(batch) * size_t(lengths_strides[0])]);
good = own_length >= 0 && own_length <= keys;
length = good ? int(own_length) : 0;
if (!good) {
    ZMLX_FAIL("NAME", own_length);
}
"""

#: Keys that are out of every row's window are not read.
_LOW = """\
if (length - queries + BESIDE >= 0) {
    low = max(from, length - queries - int(window) + 1);
}
"""

#: Where the mask of a row begins; an axis of one is for all.
_MASK_ROW = """\
const int row = min(first + r, rows - 1);
const auto mask_row = mask
    + (mask_shape[0] > 1 ? size_t(batch) * size_t(mask_strides[0]) : 0)
    + (mask_shape[1] > 1 ? size_t(kv_head * group + row / queries) * size_t(mask_strides[1]) : 0)
    + (mask_shape[2] > 1 ? size_t(row % queries) * size_t(mask_strides[2]) : 0);
const size_t mask_key = mask_shape[3] > 1 ? size_t(mask_strides[3]) : 0;
"""


def _scores(form: Cache) -> str:
    text = ""
    if form.softcap:
        text += """\
for (int key = 0; key < count; ++key) {
    s[r * KEYS + key] = float(softcap) * tanh(s[r * KEYS + key] / float(softcap));
}
"""
    near = []
    if form.causal:
        near.append("start + key <= position")
    if form.window:
        near.append("start + key > position - int(window)")
        if not form.causal:
            near.append("start + key < position + int(window)")
    if form.mask != NO_MASK:
        text += _MASK_ROW
        given = "mask_row[size_t(start + key) * mask_key]"
        change = f"s[r * KEYS + key] = {given} ? s[r * KEYS + key] : -FLT_MAX;"
        if form.mask == ADDED:
            # As the tiles of the backward, which takes the peak of these scores.
            change = f"""\
const float x = s[r * KEYS + key] + float({given});
    s[r * KEYS + key] = x == -FLT_MAX ? -0.9999999f * FLT_MAX : x;"""
        text += f"for (int key = 0; key < count; ++key) {{\n    {change}\n}}\n"
    if near:
        # A query that has no key near has them all alike.
        beside = "position" if form.causal else "position + int(window) - 1"
        text += f"""\
const int position = length - queries + (first + r) % queries;
const float far = {beside} < 0 ? -FLT_MAX : -INFINITY;
for (int key = 0; key < count; ++key) {{
    const float x = s[r * KEYS + key];
    s[r * KEYS + key] = {" && ".join(near)} ? x : far;
}}
"""
    return text


@cache
def spans(form: Cache) -> KernelSpec:
    """Of each span of keys: Σ exp(s - peak) v, the peak and the total."""
    low = ""
    if form.window:
        low = _LOW.replace("BESIDE", "0" if form.causal else "int(window) - 1")
    body = fill(
        _BODY,
        slots=_SLOTS,
        length=_LENGTH.replace("NAME", "context_lens" if form.kind == PAGED else "lengths")
        if form.lengths
        else "",
        low=low,
        rows=ROWS[form.kind][0],
        rows_of_tile=ROWS[form.kind][1],
        room=room(form),
        tile_k=tile(form, "k"),
        tile_v=tile(form, "v"),
        dots=alone(form, "k"),
        weigh=alone(form, "v"),
        scores=_scores(form),
        shift_k=SHIFT_K if form.kind == QUANTIZED else "",
        shift_v=SHIFT_V if form.kind == QUANTIZED else "",
    )
    return KernelSpec(
        NAMES[form.kind] + "__spans",
        (*form.inputs, "sizes"),
        ("found", "peak", "weight"),
        body,
        HEADER + LANES + PRODUCTS,
        ensure_row_contiguous=False,
    )


#: out = Σ exp(peak - most) found / Σ exp(peak - most) weight, a thread per value of a row.
_COMBINE = """\
const int splits = int(sizes[0]);
const size_t row = size_t(thread_position_in_grid.y);
float most = START;
for (int i = 0; i < splits; ++i) {
    most = max(most, peak[row * splits + i]);
}
float total = TOTAL;
for (int i = 0; i < splits; ++i) {
    total += exp(peak[row * splits + i] - most) * weight[row * splits + i];
}
constexpr int SLOTS = (DV + TPR - 1) / TPR;
const int lane = int(thread_position_in_grid.x);
float sums[SLOTS];
for (int e = 0; e < SLOTS; ++e) {
    sums[e] = 0.0f;
}
for (int i = 0; i < splits; ++i) {
    const float by = exp(peak[row * splits + i] - most) / total;
    for (int e = 0; e < SLOTS; ++e) {
        const int d = min(e * TPR + lane, DV - 1);
        sums[e] += by * found[(row * splits + i) * DV + d];
    }
}
for (int e = 0; e < SLOTS; ++e) {
    const int d = e * TPR + lane;
    if (d < DV) {
        out[row * DV + d] = T(sums[e]);
    }
}
"""

_STATISTICS = """\
if (lane == 0) {
    whole_peak[row] = most;
    whole_weight[row] = total;
}
"""


@cache
def combine(name: str, sinks: bool, statistics: bool) -> KernelSpec:
    """The spans of each row together; with `statistics` also the peak and the total of each."""
    start = "float(sinks[row / size_t(sizes[1]) % size_t(sizes[2])])" if sinks else "-FLT_MAX"
    body = _COMBINE.replace("START", start).replace(
        "TOTAL", f"exp({start} - most)" if sinks else "0.0f"
    )
    return KernelSpec(
        f"{name}__combine",
        ("found", "peak", "weight", *(("sinks",) if sinks else ()), "sizes"),
        ("out", "whole_peak", "whole_weight") if statistics else ("out",),
        body + (_STATISTICS if statistics else ""),
    )
