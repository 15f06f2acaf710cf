"""The backward kernels of attention; see `attention_kernels.py` for the method.

backward_keys       dk and dv by tiles of keys, on the CPU with dq in partial sums
backward_queries    dq by tiles of queries
backward_mask       the gradient of an added mask by its own tiles
"""

from __future__ import annotations

from functools import cache

from .. import tiles
from ..metal import KernelSpec
from .attention_text import (
    OWN,
    QUERIES_FROM,
    QUERY_TILE,
    START,
    STORE,
    Form,
    by_sequence,
    cap,
    fill,
    lanes_end,
    mask_start,
    scores,
    tile_range,
    zeros,
)

#: p and ds from the scores s and dp in `t`. What is dropped has the gradient 0 even where a query
#: is NaN, so that it does not poison its neighbours. The peak is the forward's; where that added up
#: in another order, a large score may be above it.
_DS = """\
for (int i = 0; i < ROWS; ++i) {
    for (int j = 0; j < LANES; ++j) {
        const float x = s[i * LANES + j];
        const float above = x - PEAK;
        const float p = exp(above > 0.0f ? 0.0f : above) * INVERSE;
        const float ds = p * (t[i * LANES + j] - DELTA)SLOPE;
        s[i * LANES + j] = p;
        t[i * LANES + j] = x <= -FLT_MAX ? 0.0f : ds;
    }
}
"""

_DKV = """\
@start
const int kv_head = int(threadgroup_position_in_grid.y);
const int group = heads / kv_heads;
const size_t k_row = (size_t(batch) * kv_heads + kv_head) * keys;
@cap
ZMLX_STAGED float staged_q[M * DP];
ZMLX_STAGED float staged_do[M * DVP];
@before
for (int tile = int(threadgroup_position_in_grid.x); tile * N < keys;
     tile += int(threadgroups_per_grid.x)) {
    @lanes
}
"""

_DKV_LANES = """\
@own_k
@own_v
@keys
float sum_k[DP / SHARE * LANES], sum_v[DVP / SHARE * LANES];
@zeros
@range
for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const size_t q_row = (size_t(batch) * heads + head) * queries;
    @mask_start
    for (int start = from; start < to; start += M) {
        // Scaled as in the forward: another rounding would be another score.
        zmlx_stage<M, D, DP>(
            staged_q, q + (q_row + start) * D, to - start, thread_, THREADS, factor);
        zmlx_stage<M, DV, DVP>(
            staged_do, dout + (q_row + start) * DV, to - start, thread_, THREADS);
        float row_peak[ROWS], row_inverse[ROWS], row_delta[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            const int own = start + zmlx_row(place, i);
            const size_t at = q_row + min(own, to - 1);
            row_peak[i] = peak[at];
            row_inverse[i] = own < to && weight[at] != 0.0f ? 1.0f / weight[at] : 0.0f;
            row_delta[i] = delta[at];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float s[ROWS * LANES], t[ROWS * LANES];
        @zeros_st
        zmlx_product<M, DP, N, DP, false>(s, staged_q, own_k);
        zmlx_product<M, DVP, N, DVP, false>(t, staged_do, own_v);
        @scores
        @ds
        zmlx_product<DVP, M, N, DVP, true>(sum_v, staged_do, s);
        zmlx_product<DP, M, N, DP, true>(sum_k, staged_q, t);
        @dq
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
@store_k
@store_v
"""

#: dq along with dk and dv: partial sums of this group's tiles of keys.
_DQ_BEFORE = """\
constexpr int DN = (D + 31) / 32 * 32;
const size_t dq_rows = size_t(batch) * heads * queries
    + size_t(threadgroup_position_in_grid.x) * size_t(threadgroups_per_grid.z) * heads * queries;
for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (size_t e = 0; e < size_t(queries) * D; ++e) {
        dq[(dq_rows + size_t(head) * queries) * D + e] = 0.0f;
    }
}
"""
_DQ_KEYS = """\
float scaled_k[N * DN];
for (int n = 0; n < N; ++n) {
    for (int d = 0; d < DN; ++d) {
        scaled_k[n * DN + d] = d < D && first + n < COUNT
            ? float(k[(k_row + first + n) * D + d]) * factor : 0.0f;
    }
}
"""
_DQ = """\
float part[M * DN];
for (int e = 0; e < M * DN; ++e) {
    part[e] = 0.0f;
}
zmlx_product<M, N, DN, N, false>(part, t, scaled_k);
for (int m = 0; m < min(M, to - start); ++m) {
    for (int d = 0; d < D; ++d) {
        dq[(dq_rows + size_t(head) * queries + start + m) * D + d] += part[m * DN + d];
    }
}
"""


def _ds(form: Form, *, keys_are_rows: bool) -> str:
    slope = ""
    if form.softcap:
        # The score before the mask: an added mask is not known here, so tanh is kept in u.
        slope = " * (1.0f - u[i * LANES + j] * u[i * LANES + j])"
    index = "j" if keys_are_rows else "i"
    names = ("PEAK", "INVERSE", "DELTA")
    text = _DS.replace("SLOPE", slope)
    for name in names:
        text = text.replace(name, f"row_{name.lower()}[{index}]")
    return text


def _scores_backward(form: Form, *, keys_are_rows: bool) -> str:
    text = scores(form, keys_are_rows=keys_are_rows)
    if form.softcap:
        old = "s[i * LANES + j] = cap * tanh(s[i * LANES + j] / cap);"
        new = ("u[i * LANES + j] = tanh(s[i * LANES + j] / cap);\n"
               "        s[i * LANES + j] = cap * u[i * LANES + j];")  # fmt: skip
        assert old in text
        text = "float u[ROWS * LANES];\n" + text.replace(old, new)
    return text


#: What the backward reads besides the inputs of the forward.
BACKWARD = ("dout", "peak", "weight", "delta")


@cache
def backward_keys(form: Form, with_dq: bool, on_cpu: bool) -> KernelSpec:
    """dk and dv, and with `with_dq` the chunks of dq."""
    count = lanes_end(form, "keys")
    lanes = fill(
        _DKV_LANES,
        own_k=OWN.format(name="own_k", wide="DP", width="D", array="k", row="k_row",
                          count=count, factor=""),
        own_v=OWN.format(name="own_v", wide="DVP", width="DV", array="v", row="k_row",
                          count=count, factor=""),
        keys=_DQ_KEYS.replace("COUNT", count) if with_dq else "",
        zeros=zeros(("sum_k", "DP"), ("sum_v", "DVP")),
        range=tile_range(form, of_keys=False),
        mask_start=mask_start(form),
        zeros_st=zeros(("s", "M"), ("t", "M")),
        scores=_scores_backward(form, keys_are_rows=False),
        ds=_ds(form, keys_are_rows=False),
        dq=_DQ if with_dq else "",
        store_k=STORE.format(array="dk", row="k_row", count=count, wide="DP", width="D",
                              value="T(sum_k[i * LANES + j])"),
        store_v=STORE.format(array="dv", row="k_row", count=count, wide="DVP", width="DV",
                              value="T(sum_v[i * LANES + j])"),
    )  # fmt: skip
    body = fill(
        _DKV,
        start=START,
        cap=cap(form),
        before=_DQ_BEFORE if with_dq else "",
        lanes=by_sequence(form, lanes, of_keys=True, begin="tile * N"),
    )
    return KernelSpec(
        "scaled_dot_product_attention__dkv" + ("_dq" if with_dq else ""),
        (*form.inputs, *BACKWARD, "sizes"),
        ("dk", "dv", "dq") if with_dq else ("dk", "dv"),
        body,
        tiles.header(on_cpu),
    )


#: What the backward knows of the query of each lane.
_ROWS = """\
float row_peak[LANES], row_inverse[LANES], row_delta[LANES];
for (int j = 0; j < LANES; ++j) {
    const int n = first + zmlx_lane(place, j);
    const size_t at = q_row + min(n, COUNT - 1);
    row_peak[j] = peak[at];
    row_inverse[j] = n < COUNT && weight[at] != 0.0f ? 1.0f / weight[at] : 0.0f;
    row_delta[j] = delta[at];
}
"""

_DQ_TILES = """\
@start
@query_tile
@mask_start
@cap
ZMLX_STAGED float staged_k[M * DP];
ZMLX_STAGED float staged_v[M * DVP];
@lanes
"""

_DQ_LANES = """\
@own_q
@own_do
@rows
float sum_q[DP / SHARE * LANES];
@zeros
@range
for (int start = from; start < to; start += M) {
    zmlx_stage<M, D, DP>(staged_k, k + (k_row + start) * D, to - start, thread_, THREADS);
    zmlx_stage<M, DV, DVP>(staged_v, v + (k_row + start) * DV, to - start, thread_, THREADS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float s[ROWS * LANES], t[ROWS * LANES];
    @zeros_st
    zmlx_product<M, DP, N, DP, false>(s, staged_k, own_q);
    zmlx_product<M, DVP, N, DVP, false>(t, staged_v, own_do);
    @scores
    @ds
    zmlx_product<DP, M, N, DP, true>(sum_q, staged_k, t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
@store
"""


@cache
def backward_queries(form: Form, on_cpu: bool) -> KernelSpec:
    """dq by tiles of queries."""
    count = lanes_end(form, "queries")
    lanes = fill(
        _DQ_LANES,
        own_q=OWN.format(name="own_q", wide="DP", width="D", array="q", row="q_row",
                          count=count, factor=" * factor"),
        own_do=OWN.format(name="own_do", wide="DVP", width="DV", array="dout", row="q_row",
                           count=count, factor=""),
        rows=_ROWS.replace("COUNT", count),
        zeros=zeros(("sum_q", "DP")),
        zeros_st=zeros(("s", "M"), ("t", "M")),
        range=tile_range(form, of_keys=True),
        scores=_scores_backward(form, keys_are_rows=True),
        ds=_ds(form, keys_are_rows=True),
        store=STORE.format(array="dq", row="q_row", count=count, wide="DP", width="D",
                            value="T(sum_q[i * LANES + j] * factor)"),
    )  # fmt: skip
    body = fill(
        _DQ_TILES,
        start=START,
        query_tile=QUERY_TILE,
        mask_start=mask_start(form),
        cap=cap(form),
        lanes=by_sequence(form, lanes, of_keys=False, begin=QUERIES_FROM),
    )
    return KernelSpec(
        "scaled_dot_product_attention__dq",
        (*form.inputs, *BACKWARD, "sizes"),
        ("dq",),
        body,
        tiles.header(on_cpu),
    )


#: A tile of an added mask's gradient: summed over everything that the mask is broadcast to.
_DMASK = """\
@start
@cap
ZMLX_STAGED float staged_k[M * DP];
ZMLX_STAGED float staged_v[M * DVP];
const int mask_batches = int(given[0]), mask_heads = int(given[1]);
const int mask_queries = int(given[2]), mask_keys = int(given[3]);
const int slice = batch;
const int slice_batch = slice / mask_heads, slice_head = slice % mask_heads;
const int query_tile = int(threadgroup_position_in_grid.x) * N;
const int key_tile = int(threadgroup_position_in_grid.y) * M;
const int batch_end = mask_batches > 1 ? slice_batch + 1 : int(given[4]);
const int head_end = mask_heads > 1 ? slice_head + 1 : heads;
const int query_end = mask_queries > 1 ? query_tile + N : queries;
const int key_end = mask_keys > 1 ? key_tile + M : keys;
float sum[ROWS * LANES];
@zeros_sum
for (int b = slice_batch; b < batch_end; ++b) {
    for (int head = slice_head; head < head_end; ++head) {
        const size_t q_row = (size_t(b) * heads + head) * queries;
        const size_t k_row = (size_t(b) * kv_heads + head / (heads / kv_heads)) * keys;
        @mask_start
        for (int first = query_tile; first < query_end; first += N) {
            @own_q
            @own_do
            @rows
            for (int start = key_tile; start < key_end; start += M) {
                zmlx_stage<M, D, DP>(
                    staged_k, k + (k_row + start) * D, keys - start, thread_, THREADS);
                zmlx_stage<M, DV, DVP>(
                    staged_v, v + (k_row + start) * DV, keys - start, thread_, THREADS);
                threadgroup_barrier(mem_flags::mem_threadgroup);
                float s[ROWS * LANES], t[ROWS * LANES];
                @zeros_st
                zmlx_product<M, DP, N, DP, false>(s, staged_k, own_q);
                zmlx_product<M, DVP, N, DVP, false>(t, staged_v, own_do);
                @scores
                @ds
                for (int i = 0; i < ROWS * LANES; ++i) {
                    sum[i] += t[i];
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
        }
    }
}
const int lines = mask_queries > 1 ? queries : N;
const int columns = mask_keys > 1 ? keys : M;
for (int j = 0; j < LANES; ++j) {
    const int query = query_tile + zmlx_lane(place, j);
    for (int i = 0; i < ROWS; ++i) {
        const int key = key_tile + zmlx_row(place, i);
        if (query < lines && key < columns) {
            dmask[(size_t(slice) * lines + query) * columns + key] = sum[i * LANES + j];
        }
    }
}
"""


@cache
def backward_mask(form: Form, on_cpu: bool) -> KernelSpec:
    """The gradient of an added mask: a group per tile of it."""
    ds = _ds(form._replace(softcap=False), keys_are_rows=True)
    body = fill(
        _DMASK,
        start=START,
        cap=cap(form),
        zeros_sum=zeros(("sum", "M")),
        mask_start=mask_start(form).replace("size_t(batch)", "size_t(b)"),
        own_q=OWN.format(name="own_q", wide="DP", width="D", array="q", row="q_row",
                          count="queries", factor=" * factor"),
        own_do=OWN.format(name="own_do", wide="DVP", width="DV", array="dout", row="q_row",
                           count="queries", factor=""),
        rows=_ROWS.replace("COUNT", "queries"),
        zeros_st=zeros(("s", "M"), ("t", "M")),
        scores=scores(form, keys_are_rows=True),
        ds=ds,
    )  # fmt: skip
    return KernelSpec(
        "scaled_dot_product_attention__dmask",
        (*form.inputs, *BACKWARD, "sizes", "given"),
        ("dmask",),
        body,
        tiles.header(on_cpu),
    )
