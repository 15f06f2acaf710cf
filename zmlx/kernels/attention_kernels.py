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

import dataclasses
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .. import tiles
from ..metal import KernelSpec

#: How a mask is given.
NO_MASK, KEEPS, ADDED = "none", "keeps", "added"


@dataclass(frozen=True)
class Form:
    """What is in the text of the kernels.

    Attributes:
        mask: not given, of what to keep, or added.
        causal, window, softcap, sinks: whether these are there.
        spans: each query has a range of keys of its own (sequences one after another).
    """

    mask: str = NO_MASK
    causal: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    spans: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of every kernel: q, k, v, and what the form adds."""
        return (
            "q", "k", "v", "scale",
            *(("mask",) if self.mask != NO_MASK else ()),
            *(("sinks",) if self.sinks else ()),
            *(("window",) if self.window else ()),
            *(("softcap",) if self.softcap else ()),
            *(("spans", "key_spans") if self.spans else ()),
        )  # fmt: skip

    def named(self, inputs: tuple[mx.array, ...]) -> dict[str, mx.array]:
        """Inputs by name."""
        return dict(zip(self.inputs, inputs, strict=False))


_EACH = """\
for (int i = 0; i < ROWS; ++i) {
    for (int j = 0; j < LANES; ++j) {"""

#: Sizes, and where a group is.
_START = """\
constexpr int ROWS = M / SHARE;
constexpr int DP = (D + 7) / 8 * 8;
constexpr int DVP = (DV + 7) / 8 * 8;
const int queries = int(sizes[0]);
const int keys = int(sizes[1]);
const int heads = int(sizes[2]);
const int kv_heads = int(sizes[3]);
const int offset = keys - queries;
const float factor = float(scale);
const uint thread_ = thread_index_in_threadgroup;
const zmlx_place place =
    zmlx_place_of(simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const int batch = int(threadgroup_position_in_grid.z);
"""

_QUERY_TILE = """\
const int head = int(threadgroup_position_in_grid.y);
const int first = int(threadgroup_position_in_grid.x) * N;
const size_t q_row = (size_t(batch) * heads + head) * queries;
const size_t k_row = (size_t(batch) * kv_heads + head / (heads / kv_heads)) * keys;
"""

#: The keys that the queries of a tile see; all of them where a query sees none.
_KEY_RANGE = """\
int from = 0;
int to = keys;
"""
_KEY_RANGE_CAUSAL = """\
if (first + offset >= 0) {
    to = min(keys, first + N + offset);
}
"""
_KEY_RANGE_WINDOW = """\
if (first + offset + BESIDE >= 0) {
    from = max(0, first + offset - int(window) + 1) / M * M;
    to = min(to, first + N + offset + BESIDE);
}
"""
_KEY_RANGE_SPANS = """\
from = keys;
to = 0;
for (int n = first; n < min(queries, first + N); ++n) {
    from = min(from, spans[3 * n] / M * M);
    to = max(to, spans[3 * n + 1]);
}
"""

#: The queries that see the keys of a tile, and those that see none.
_QUERY_RANGE_CAUSAL = """\
if (offset >= 0) {
    from = max(0, first - offset) / M * M;
}
"""
_QUERY_RANGE_WINDOW = """\
if (offset + BESIDE >= 0) {
    from = max(0, first - offset - BESIDE) / M * M;
}
if (offset + BESIDE >= 0) {
    to = min(queries, max(0, first + N - 1 + int(window) - offset));
}
"""
_QUERY_RANGE_SPANS = """\
from = queries;
to = 0;
for (int n = first; n < min(keys, first + N); ++n) {
    from = min(from, key_spans[2 * n] / M * M);
    to = max(to, key_spans[2 * n + 1]);
}
"""


def _indented(text: str, depth: int) -> str:
    pad = "    " * depth
    return "".join(pad + line if line.strip() else line for line in text.splitlines(keepends=True))


def fill(text: str, **parts: str) -> str:
    """`text` with each line `@name` replaced by a part, at the line's own depth."""
    lines = []
    for line in text.splitlines(keepends=True):
        name = line.strip()
        if name.startswith("@"):
            part = parts[name[1:]]
            lines.append(_indented(part, (len(line) - len(line.lstrip())) // 4))
        else:
            lines.append(line)
    return "".join(lines)


def _range(form: Form, *, of_keys: bool) -> str:
    if form.spans:
        text = _KEY_RANGE_SPANS if of_keys else _QUERY_RANGE_SPANS
        return (
            text.replace("from = keys", "int from = keys")
            .replace("from = queries", "int from = queries")
            .replace("\nto = 0", "\nint to = 0", 1)
        )
    text = _KEY_RANGE if of_keys else _KEY_RANGE.replace("keys", "queries")
    if form.causal:
        text += _KEY_RANGE_CAUSAL if of_keys else _QUERY_RANGE_CAUSAL
    if form.window:
        beside = "0" if form.causal else "(int(window) - 1)"
        text += (_KEY_RANGE_WINDOW if of_keys else _QUERY_RANGE_WINDOW).replace("BESIDE", beside)
    return text


def _scores(form: Form, *, keys_are_rows: bool) -> str:
    """From products to scores: softcap, mask, and what is out of reach. What is dropped is
    -FLT_MAX, what is not there -inf."""
    rows, lanes = "start + zmlx_row(place, i)", "first + zmlx_lane(place, j)"
    key, query = (rows, lanes) if keys_are_rows else (lanes, rows)
    low_key, low_query = ("start", "first") if keys_are_rows else ("first", "start")
    span_key, span_query = ("M", "N") if keys_are_rows else ("N", "M")
    text = ""
    if form.softcap:
        text += (
            f"{_EACH}\n        s[i * LANES + j] = cap * tanh(s[i * LANES + j] / cap);\n    }}\n}}\n"
        )
    keep = []
    edges = [f"{low_key} + {span_key} > keys"]
    if form.causal and not form.spans:
        keep.append("key <= position")
        edges.append(f"{low_key} + {span_key} - 1 > {low_query} + offset")
    if form.window and not form.spans:
        keep.append("key > position - int(window)")
        edges.append(f"{low_key} <= {low_query} + {span_query} - 1 + offset - int(window)")
        if not form.causal:
            keep.append("key < position + int(window)")
            edges.append(f"{low_key} + {span_key} - 1 >= {low_query} + offset + int(window)")
    if form.mask != NO_MASK or form.spans:
        edges = ["true"]
    lines = [
        f"const int key = {key};",
        f"const int query = min({query}, queries - 1);",
        "float x = s[i * LANES + j];",
    ]
    if keep:
        lines.append("const int position = query + offset;")
    if form.mask != NO_MASK:
        at = "mask[mask_start + query * mask_query + min(key, keys - 1) * mask_key]"
        if form.mask == ADDED:
            lines.append(f"x += float({at});")
        else:
            keep.append(f"{at} != 0")
    if keep:
        lines.append(f"x = {' && '.join(keep)} ? x : -FLT_MAX;")
    if form.spans:
        lines.append("x = spans[3 * query + 2] != 0 ? -FLT_MAX : x;")
        inside = "key >= spans[3 * query] && key < spans[3 * query + 1]"
        lines.append(f"x = {inside} ? x : -INFINITY;")
    else:
        lines.append("x = key < keys ? x : -INFINITY;")
    lines.append("s[i * LANES + j] = x;")
    inner = _indented("\n".join(lines) + "\n", 2)
    body = f"{_EACH}\n{inner}    }}\n}}\n"
    if edges != ["true"]:
        body = f"if ({' || '.join(edges)}) {{\n{_indented(body, 1)}}}\n"
    return text + body


def _mask_start(form: Form) -> str:
    if form.mask == NO_MASK:
        return ""
    return """\
const size_t mask_start = size_t(batch) * size_t(sizes[4]) + size_t(head) * size_t(sizes[5]);
const size_t mask_query = size_t(sizes[6]);
const size_t mask_key = size_t(sizes[7]);
"""


def _cap(form: Form) -> str:
    return "const float cap = float(softcap);\n" if form.softcap else ""


def _zeros(*names: tuple[str, str]) -> str:
    return "".join(
        f"for (int i = 0; i < {size} / SHARE * LANES; ++i) {{\n    {name}[i] = 0.0f;\n}}\n"
        for name, size in names
    )


#: A tile of the group's own rows, turned: element (d, n).
_OWN = """\
float {name}[{wide} / SHARE * LANES];
for (int i = 0; i < {wide} / SHARE; ++i) {{
    for (int j = 0; j < LANES; ++j) {{
        const int d = zmlx_row(place, i), n = first + zmlx_lane(place, j);
        {name}[i * LANES + j] = d < {width} && n < {count}
            ? float({array}[({row} + n) * {width} + d]){factor} : 0.0f;
    }}
}}
"""

#: The lanes of a tile back to rows of an array.
_STORE = """\
for (int j = 0; j < LANES; ++j) {{
    const int n = first + zmlx_lane(place, j);
    if (n < {count}) {{
        for (int i = 0; i < {wide} / SHARE; ++i) {{
            const int d = zmlx_row(place, i);
            if (d < {width}) {{
                {array}[({row} + n) * {width} + d] = {value};
            }}
        }}
    }}
}}
"""

_FORWARD = """\
@start
@query_tile
@mask_start
@cap
ZMLX_STAGED float staged_k[M * DP];
ZMLX_STAGED float staged_v[M * DVP];
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
    zmlx_stage<M, D, DP>(staged_k, k + (k_row + start) * D, keys - start, thread_, THREADS);
    zmlx_stage<M, DV, DVP>(staged_v, v + (k_row + start) * DV, keys - start, thread_, THREADS);
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
    if (n < queries && place.row == 0) {
        peak[q_row + n] = top[j];
        weight[q_row + n] = total[j];
    }
}
"""


@cache
def forward(form: Form, statistics: bool, on_cpu: bool) -> KernelSpec:
    """out, and with `statistics` the peak and the total of each query's scores."""
    body = fill(
        _FORWARD,
        start=_START,
        query_tile=_QUERY_TILE,
        mask_start=_mask_start(form),
        cap=_cap(form),
        own_q=_OWN.format(name="own_q", wide="DP", width="D", array="q", row="q_row",
                          count="queries", factor=" * factor"),
        zeros_o=_zeros(("o", "DVP")),
        zeros_s=_zeros(("s", "M")),
        range=_range(form, of_keys=True),
        scores=_scores(form, keys_are_rows=True),
        sink=_SINK if form.sinks else "",
        store=_STORE.format(array="out", row="q_row", count="queries", wide="DVP", width="DV",
                            value="T(o[i * LANES + j] * change[j])"),
        statistics=_STATISTICS if statistics else "",
    )  # fmt: skip
    return KernelSpec(
        "scaled_dot_product_attention__" + ("training" if statistics else "forward"),
        (*form.inputs, "sizes"),
        ("out", "peak", "weight") if statistics else ("out",),
        body,
        tiles.header(on_cpu),
    )


# ---- backward -----------------------------------------------------------------------------------

#: p and ds from the scores s and dp in `t`. What is dropped has the gradient 0 even where a query
#: is NaN, so that it does not poison its neighbours.
_DS = """\
for (int i = 0; i < ROWS; ++i) {
    for (int j = 0; j < LANES; ++j) {
        const float x = s[i * LANES + j];
        const float p = exp(x - PEAK) * INVERSE;
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
    const int first = tile * N;
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
            zmlx_stage<M, D, DP>(
                staged_q, q + (q_row + start) * D, queries - start, thread_, THREADS);
            zmlx_stage<M, DV, DVP>(
                staged_do, dout + (q_row + start) * DV, queries - start, thread_, THREADS);
            float row_peak[ROWS], row_inverse[ROWS], row_delta[ROWS];
            for (int i = 0; i < ROWS; ++i) {
                const int own = start + zmlx_row(place, i);
                const size_t at = q_row + min(own, queries - 1);
                row_peak[i] = peak[at];
                row_inverse[i] = own < queries && weight[at] != 0.0f ? 1.0f / weight[at] : 0.0f;
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
}
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
        scaled_k[n * DN + d] = d < D && first + n < keys
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
for (int m = 0; m < min(M, queries - start); ++m) {
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
    text = _scores(form, keys_are_rows=keys_are_rows)
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
    body = fill(
        _DKV,
        start=_START,
        cap=_cap(form),
        before=_DQ_BEFORE if with_dq else "",
        own_k=_OWN.format(name="own_k", wide="DP", width="D", array="k", row="k_row",
                          count="keys", factor=" * factor"),
        own_v=_OWN.format(name="own_v", wide="DVP", width="DV", array="v", row="k_row",
                          count="keys", factor=""),
        keys=_DQ_KEYS if with_dq else "",
        zeros=_zeros(("sum_k", "DP"), ("sum_v", "DVP")),
        range=_range(form, of_keys=False),
        mask_start=_mask_start(form),
        zeros_st=_zeros(("s", "M"), ("t", "M")),
        scores=_scores_backward(form, keys_are_rows=False),
        ds=_ds(form, keys_are_rows=False),
        dq=_DQ if with_dq else "",
        store_k=_STORE.format(array="dk", row="k_row", count="keys", wide="DP", width="D",
                              value="T(sum_k[i * LANES + j] * factor)"),
        store_v=_STORE.format(array="dv", row="k_row", count="keys", wide="DVP", width="DV",
                              value="T(sum_v[i * LANES + j])"),
    )  # fmt: skip
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
    const size_t at = q_row + min(n, queries - 1);
    row_peak[j] = peak[at];
    row_inverse[j] = n < queries && weight[at] != 0.0f ? 1.0f / weight[at] : 0.0f;
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
@own_q
@own_do
@rows
float sum_q[DP / SHARE * LANES];
@zeros
@range
for (int start = from; start < to; start += M) {
    zmlx_stage<M, D, DP>(staged_k, k + (k_row + start) * D, keys - start, thread_, THREADS);
    zmlx_stage<M, DV, DVP>(staged_v, v + (k_row + start) * DV, keys - start, thread_, THREADS);
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
    body = fill(
        _DQ_TILES,
        start=_START,
        query_tile=_QUERY_TILE,
        mask_start=_mask_start(form),
        cap=_cap(form),
        own_q=_OWN.format(name="own_q", wide="DP", width="D", array="q", row="q_row",
                          count="queries", factor=" * factor"),
        own_do=_OWN.format(name="own_do", wide="DVP", width="DV", array="dout", row="q_row",
                           count="queries", factor=""),
        rows=_ROWS,
        zeros=_zeros(("sum_q", "DP")),
        zeros_st=_zeros(("s", "M"), ("t", "M")),
        range=_range(form, of_keys=True),
        scores=_scores_backward(form, keys_are_rows=True),
        ds=_ds(form, keys_are_rows=True),
        store=_STORE.format(array="dq", row="q_row", count="queries", wide="DP", width="D",
                            value="T(sum_q[i * LANES + j] * factor)"),
    )  # fmt: skip
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
    ds = _ds(dataclasses.replace(form, softcap=False), keys_are_rows=True)
    body = fill(
        _DMASK,
        start=_START,
        cap=_cap(form),
        zeros_sum=_zeros(("sum", "M")),
        mask_start=_mask_start(form).replace("size_t(batch)", "size_t(b)"),
        own_q=_OWN.format(name="own_q", wide="DP", width="D", array="q", row="q_row",
                          count="queries", factor=" * factor"),
        own_do=_OWN.format(name="own_do", wide="DVP", width="DV", array="dout", row="q_row",
                           count="queries", factor=""),
        rows=_ROWS,
        zeros_st=_zeros(("s", "M"), ("t", "M")),
        scores=_scores(form, keys_are_rows=True),
        ds=ds,
    )  # fmt: skip
    return KernelSpec(
        "scaled_dot_product_attention__dmask",
        (*form.inputs, *BACKWARD, "sizes", "given"),
        ("dmask",),
        body,
        tiles.header(on_cpu),
    )
