"""What the tiled kernels of attention are written with: their forms and the parts of their text.

See `attention_kernels.py` for the method.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

#: How a mask is given.
NO_MASK, KEEPS, ADDED = "none", "keeps", "added"


class Form(NamedTuple):
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


EACH = """\
for (int i = 0; i < ROWS; ++i) {
    for (int j = 0; j < LANES; ++j) {"""

#: Sizes, and where a group is.
START = """\
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

QUERY_TILE = """\
const int head = int(threadgroup_position_in_grid.y);
const size_t q_row = (size_t(batch) * heads + head) * queries;
const size_t k_row = (size_t(batch) * kv_heads + head / (heads / kv_heads)) * keys;
"""

#: Where the queries of a tile begin.
QUERIES_FROM = "int(threadgroup_position_in_grid.x) * N"

#: The lanes of a tile that are of one sequence, and then those of the next.
_SEQUENCES = """\
const int stop = min(COUNT, FROM + N);
int end = FROM;
while (end < stop) {
    const int first = end;
    end = min(stop, END);
    @lanes
}
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
int from = keys;
int to = 0;
for (int each = first; each < end; ++each) {
    from = min(from, spans[4 * each]);
    to = max(to, spans[4 * each + 1]);
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
    to = min(queries, max(0, first + N - 1 + int(window) - offset));
}
"""
_QUERY_RANGE_SPANS = """\
int from = queries;
int to = 0;
for (int each = first; each < end; ++each) {
    from = min(from, key_spans[3 * each]);
    to = max(to, key_spans[3 * each + 1]);
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


def by_sequence(form: Form, lanes: str, *, of_keys: bool, begin: str) -> str:
    """What is done with the lanes of a tile, from `first` on. Where sequences lie one after another
    it is done with those of each by themselves, up to `end`: in a product of a whole tile, what is
    not finite in a sequence would make NaN of its neighbours, whose weights for it are 0."""
    if not form.spans:
        return f"const int first = {begin};\n{lanes}"
    count, end = (
        ("keys", "key_spans[3 * first + 2]") if of_keys else ("queries", "spans[4 * first + 3]")
    )
    text = _SEQUENCES.replace("COUNT", count).replace("FROM", begin).replace("END", end)
    return fill(text, lanes=lanes)


def lanes_end(form: Form, count: str) -> str:
    """Where lanes end, of so many in all."""
    return "end" if form.spans else count


def tile_range(form: Form, *, of_keys: bool) -> str:
    """`from` and `to` of a walk: of the keys that a tile of queries sees, or the reverse."""
    if form.spans:
        return _KEY_RANGE_SPANS if of_keys else _QUERY_RANGE_SPANS
    text = _KEY_RANGE if of_keys else _KEY_RANGE.replace("keys", "queries")
    if form.causal:
        text += _KEY_RANGE_CAUSAL if of_keys else _QUERY_RANGE_CAUSAL
    if form.window:
        beside = "0" if form.causal else "(int(window) - 1)"
        text += (_KEY_RANGE_WINDOW if of_keys else _QUERY_RANGE_WINDOW).replace("BESIDE", beside)
    return text


def scores(form: Form, *, keys_are_rows: bool) -> str:
    """From products to scores: softcap, mask, and what is out of reach. What a mask drops is
    -FLT_MAX, what is too far or not there -inf."""
    rows, lanes = "start + zmlx_row(place, i)", "first + zmlx_lane(place, j)"
    key, query = (rows, lanes) if keys_are_rows else (lanes, rows)
    low_key, low_query = ("start", "first") if keys_are_rows else ("first", "start")
    span_key, span_query = ("M", "N") if keys_are_rows else ("N", "M")
    text = ""
    if form.softcap:
        text += (
            f"{EACH}\n        s[i * LANES + j] = cap * tanh(s[i * LANES + j] / cap);\n    }}\n}}\n"
        )
    near = []
    edges = [f"{low_key} + {span_key} > keys"]
    if form.causal and not form.spans:
        near.append("key <= position")
        edges.append(f"{low_key} + {span_key} - 1 > {low_query} + offset")
    if form.window and not form.spans:
        near.append("key > position - int(window)")
        edges.append(f"{low_key} <= {low_query} + {span_query} - 1 + offset - int(window)")
        if not form.causal:
            near.append("key < position + int(window)")
            edges.append(f"{low_key} + {span_key} - 1 >= {low_query} + offset + int(window)")
    if form.mask != NO_MASK or form.spans:
        edges = ["true"]
    lines = [
        f"const int key = {key};",
        f"const int query = min({query}, queries - 1);",
        "float x = s[i * LANES + j];",
    ]
    if near:
        lines.append("const int position = query + offset;")
    if form.mask != NO_MASK:
        text += _mask_tile(key, query, keys_are_rows)
        if form.mask == ADDED:
            lines.append("x += mask_part[i * LANES + j];")
            # As low as a score that is dropped, but there, so that it has a gradient.
            lines.append("x = x == -FLT_MAX ? -0.9999999f * FLT_MAX : x;")
        else:
            lines.append("x = mask_part[i * LANES + j] != 0.0f ? x : -FLT_MAX;")
    if near:
        # A query that has no key near has them all alike.
        beside = "position" if form.causal else "position + int(window) - 1"
        lines.append(f"const float far = {beside} < 0 ? -FLT_MAX : -INFINITY;")
        lines.append(f"x = {' && '.join(near)} ? x : far;")
    if form.spans:
        lines.append("const int lost = spans[4 * query + 2];")
        lines.append("x = lost == 0 ? x : lost == 1 ? -FLT_MAX : NAN;")
        inside = "key >= spans[4 * query] && key < spans[4 * query + 1]"
        lines.append(f"x = {inside} ? x : -INFINITY;")
    else:
        lines.append("x = key < keys ? x : -INFINITY;")
    lines.append("s[i * LANES + j] = x;")
    inner = _indented("\n".join(lines) + "\n", 2)
    body = f"{EACH}\n{inner}    }}\n}}\n"
    if edges != ["true"]:
        body = f"if ({' || '.join(edges)}) {{\n{_indented(body, 1)}}}\n"
    return text + body


#: Of a tile whose keys are rows: one thread turns the whole of it, where keys lie side by side.
_MASK_TURNED = """\
if (SHARE == 1 && mask_key == 1 && start + M <= keys && first + N <= queries) {
    const auto mask_tile = mask + (mask_start + size_t(first) * mask_query + size_t(start));
    zmlx_load_transposed<ROWS, LANES>(mask_part, mask_tile, mask_query);
} else {
    @each
}
"""


def _mask_tile(key: str, query: str, keys_are_rows: bool) -> str:
    """The mask of a tile, in `mask_part`."""
    each = f"""\
{EACH}
        const int key = min({key}, keys - 1);
        const int query = min({query}, queries - 1);
        mask_part[i * LANES + j] = float(mask[mask_start + query * mask_query + key * mask_key]);
    }}
}}
"""
    text = fill(_MASK_TURNED, each=each) if keys_are_rows else each
    return "float mask_part[ROWS * LANES];\n" + text


def mask_start(form: Form) -> str:
    """Where a head's mask begins, and its strides."""
    if form.mask == NO_MASK:
        return ""
    return """\
const size_t mask_start = size_t(batch) * size_t(sizes[4]) + size_t(head) * size_t(sizes[5]);
const size_t mask_query = size_t(sizes[6]);
const size_t mask_key = size_t(sizes[7]);
"""


def cap(form: Form) -> str:
    """The softcap, if there is one."""
    return "const float cap = float(softcap);\n" if form.softcap else ""


def zeros(*names: tuple[str, str]) -> str:
    """Loops that clear tiles: names and numbers of rows."""
    return "".join(
        f"for (int i = 0; i < {size} / SHARE * LANES; ++i) {{\n    {name}[i] = 0.0f;\n}}\n"
        for name, size in names
    )


#: A tile of the group's own rows, turned: element (d, n).
OWN = """\
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
STORE = """\
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
