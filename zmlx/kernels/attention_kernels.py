"""The tiled kernels of attention: forward, and backward from the forward's peaks and totals.

A tile of the forward has queries as lanes and keys as rows (`zmlx.tiles`), so that the softmax of a
query is the business of its lane. With the peak m and the total l of a query's scores

    p = exp(s - m) / l        dp = dO · v        ds = p (dp - δ)        δ = Σ dO · O
    dv = pᵀ dO                dk = scale · dsᵀ q                        dq = scale · ds k

are computed again in the backward, tile by tile, so that no array of scores is ever stored
(Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691). m and l are kept apart: a query
that a mask leaves without keys has scores of -FLT_MAX, whose logarithm of a sum would swallow l.
Sums have a fixed order and no atomics: dk and dv by tiles of keys, dq by tiles of queries, or,
where one thread has tiles of its own, along with dk and dv in `chunks` partial sums.

What is static is a `Form`; lengths, scale, window and softcap are inputs.
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

_FORWARD = """\
@start
@query_tile
@mask_start
@cap
ZMLX_STAGED float staged_k[M * DP];
ZMLX_STAGED float staged_v[M * DVP];
@lanes
"""

_FORWARD_LANES = """\
@own_q
float o[DVP / SHARE * LANES];
float s[ROWS * LANES];
float top[LANES], total[LANES], change[LANES];
@zeros_o
for (int j = 0; j < LANES; ++j) {
    top[j] = -FLT_MAX;
    total[j] = 0.0f;
}
@range
for (int start = from; start < to; start += M) {
    zmlx_stage<M, D, DP>(staged_k, k + (k_row + start) * D, to - start, thread_, THREADS);
    zmlx_stage<M, DV, DVP>(staged_v, v + (k_row + start) * DV, to - start, thread_, THREADS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    @zeros_s
    zmlx_product<M, DP, N, DP, false>(s, staged_k, own_q);
    @scores
    for (int j = 0; j < LANES; ++j) {
        change[j] = top[j];
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < LANES; ++j) {
            top[j] = max(top[j], s[i * LANES + j]);
        }
    }
    float sum[LANES];
    for (int j = 0; j < LANES; ++j) {
        top[j] = zmlx_across_max(top[j]);
        change[j] = exp(change[j] - top[j]);
        sum[j] = 0.0f;
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < LANES; ++j) {
            const float p = exp(s[i * LANES + j] - top[j]);
            s[i * LANES + j] = p;
            sum[j] += p;
        }
    }
    for (int j = 0; j < LANES; ++j) {
        total[j] = total[j] * change[j] + zmlx_across_sum(sum[j]);
    }
    for (int i = 0; i < DVP / SHARE; ++i) {
        for (int j = 0; j < LANES; ++j) {
            o[i * LANES + j] *= change[j];
        }
    }
    zmlx_product<DVP, M, N, DVP, true>(o, staged_v, s);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
@sink
for (int j = 0; j < LANES; ++j) {
    change[j] = 1.0f / total[j];
}
@store
@statistics
"""

_SINK = """\
const float sink = float(sinks[head]);
for (int j = 0; j < LANES; ++j) {
    const float higher = max(top[j], sink);
    change[j] = exp(top[j] - higher);
    total[j] = total[j] * change[j] + exp(sink - higher);
    top[j] = higher;
}
for (int i = 0; i < DVP / SHARE; ++i) {
    for (int j = 0; j < LANES; ++j) {
        o[i * LANES + j] *= change[j];
    }
}
"""

_STATISTICS = """\
for (int j = 0; j < LANES; ++j) {
    const int n = first + zmlx_lane(place, j);
    if (n < COUNT && place.row == 0) {
        peak[q_row + n] = top[j];
        weight[q_row + n] = total[j];
    }
}
"""


@cache
def forward(form: Form, statistics: bool, on_cpu: bool) -> KernelSpec:
    """out, and with `statistics` the peak and the total of each query's scores."""
    count = lanes_end(form, "queries")
    lanes = fill(
        _FORWARD_LANES,
        own_q=OWN.format(name="own_q", wide="DP", width="D", array="q", row="q_row",
                          count=count, factor=" * factor"),
        zeros_o=zeros(("o", "DVP")),
        zeros_s=zeros(("s", "M")),
        range=tile_range(form, of_keys=True),
        scores=scores(form, keys_are_rows=True),
        sink=_SINK if form.sinks else "",
        store=STORE.format(array="out", row="q_row", count=count, wide="DVP", width="DV",
                            value="T(o[i * LANES + j] * change[j])"),
        statistics=_STATISTICS.replace("COUNT", count) if statistics else "",
    )  # fmt: skip
    body = fill(
        _FORWARD,
        start=START,
        query_tile=QUERY_TILE,
        mask_start=mask_start(form),
        cap=cap(form),
        lanes=by_sequence(form, lanes, of_keys=False, begin=QUERIES_FROM),
    )
    return KernelSpec(
        "scaled_dot_product_attention__" + ("training" if statistics else "forward"),
        (*form.inputs, "sizes"),
        ("out", "peak", "weight") if statistics else ("out",),
        body,
        tiles.header(on_cpu),
    )
