"""How decoding finds and reads a row of the cache; see `decode_kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

from .attention_text import NO_MASK, fill

PLAIN, PAGED, QUANTIZED = "plain", "paged", "quantized"

#: The ops.
NAMES = {PLAIN: "decode_attention", PAGED: "paged_attention", QUANTIZED: "quantized_attention"}


class Cache(NamedTuple):
    """What is static of a call.

    Attributes:
        kind: how the cache lies.
        bits: of a quantised value.
        lengths: whether each batch has its own number of keys.
        mask: not given, of what to keep, or added; of an array alone.
        causal, window, softcap: whether these are there.
    """

    kind: str = PLAIN
    bits: int = 0
    lengths: bool = False
    mask: str = NO_MASK
    causal: bool = False
    window: bool = False
    softcap: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, in order; sinks are beside them."""
        cached: tuple[str, ...] = ("k", "v")
        if self.kind == QUANTIZED:
            cached = ("k", "k_scales", "k_biases", "v", "v_scales", "v_biases")
        return (
            "q", *cached, "scale",
            *(("mask",) if self.mask != NO_MASK else ()),
            *(("block_table",) if self.kind == PAGED else ()),
            *(("lengths",) if self.lengths else ()),
            *(("window",) if self.window else ()),
            *(("softcap",) if self.softcap else ()),
        )  # fmt: skip


#: A row of the cache in `tile`.
_LOAD = {
    # A loop of its own where values lie side by side, since one with a step does not vectorise.
    PLAIN: """\
if (#_strides[3] == 1) {
    ZMLX_ROLLED
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[rows_#.at(key) + size_t(d)]) : 0.0f;
    }
} else {
    ZMLX_ROLLED
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[rows_#.at(key) + size_t(d) * STEP_#]) : 0.0f;
    }
}
""",
    8: """\
ZMLX_ROLLED
for (int e = 0; e < HALF@; ++e) {
    const int d = e * TPR + lane;
    @group
    tile[key * SLOTS@ + e] = d < D@ ? fma(float(#[rows_#.at(key) + size_t(d)]), by, plus) : 0.0f;
}
""",
    4: """\
ZMLX_ROLLED
for (int e = 0; e < HALF@; ++e) {
    const int at = e * TPR + lane;
    const int d = 2 * at;
    @group
    const int two = d < D@ ? int(#[rows_#.at(key) + size_t(at)]) : 0;
    tile[key * SLOTS@ + e] = d < D@ ? fma(float(two & 15), by, plus) : 0.0f;
    tile[key * SLOTS@ + HALF@ + e] = d < D@ ? fma(float(two >> 4), by, plus) : 0.0f;
}
""",
}

#: The scale and the bias of value d of a row.
_GROUP = """\
const int group_ = min(d, D@ - 1) / GROUP;
const float by = float(#_scales[#_scales_row + size_t(start + key) * size_t(#_scales_strides[2])
    + size_t(group_) * size_t(#_scales_strides[3])]);
const float plus = float(#_biases[#_biases_row + size_t(start + key) * size_t(#_biases_strides[2])
    + size_t(group_) * size_t(#_biases_strides[3])]);
"""

#: The tile, with zeros in rows past the last key.
_TILE = """\
if (count < KEYS) {
    for (int e = 0; e < KEYS * SLOTS@; ++e) {
        tile[e] = 0.0f;
    }
}
for (int key = 0; key < count; ++key) {
    @load
}
"""

#: Rows that one thread has copied, in the way of those in the cache.
_STAGED = {
    PLAIN: "const auto staged_rows = zmlx_rows_from(0, KEYS - 1, 0, SLOTS@);\n",
    PAGED: """\
size_t staged_list[KEYS];
for (int key = 0; key < KEYS; ++key) {
    staged_list[key] = size_t(key * SLOTS@);
}
const zmlx_listed_rows staged_rows = {staged_list};
""",
}

#: What one thread needs: its view of rows of the cache and of those that it wants next.
_ALONE = {
    PLAIN: """\
const auto soon = zmlx_numbers_of<W, SOON_D, 64 / int(sizeof(T))>(SOON, SOON_ROWS);
if (D@ % W == 0 && #_strides[3] == 1) {
    const auto cache = zmlx_numbers_of<W, D@, 64 / int(sizeof(T))>(#, rows_#);
    @use
} else {
    T staged[KEYS * SLOTS@];
    @staged
    for (int key = 0; key < KEYS; ++key) {
        for (int e = 0; e < SLOTS@; ++e) {
            ZMLX_SCALAR
            staged[key * SLOTS@ + e] =
                e < D@ ? #[rows_#.at(key) + size_t(e) * size_t(#_strides[3])] : T(0.0f);
        }
    }
    // Of the same type on the CPU, which then has one text for both.
    thread const T* values = staged;
    const auto cache = zmlx_numbers_of<W, D@, 64 / int(sizeof(T))>(values, staged_rows);
    @use
}
""",
    # Scales and biases of a tile, group by group, which mostly lie side by side.
    QUANTIZED: """\
if (count < KEYS) {
    for (int e = 0; e < GROUPS@ * KEYS; ++e) {
        scales[e] = 0.0f;
        biases[e] = 0.0f;
    }
}
if (#_scales_strides[2] == GROUPS@ && #_scales_strides[3] == 1
    && #_biases_strides[2] == GROUPS@ && #_biases_strides[3] == 1) {
    for (int key = 0; key < count; ++key) {
        for (int e = 0; e < GROUPS@; ++e) {
            const size_t at = size_t(start + key) * GROUPS@ + e;
            scales[e * KEYS + key] = float(#_scales[#_scales_row + at]);
            biases[e * KEYS + key] = float(#_biases[#_biases_row + at]);
        }
    }
} else {
    ZMLX_ROLLED
    for (int key = 0; key < count; ++key) {
        for (int d = 0; d < D@; d += GROUP) {
            @group
            scales[d / GROUP * KEYS + key] = by;
            biases[d / GROUP * KEYS + key] = plus;
        }
    }
}
float largest[16] = {0};
for (int e = 0; e < GROUPS@ * KEYS; e += 16) {
    for (int u = 0; u < 16; ++u) {
        largest[u] += abs(scales[e + u]) * float(1 << BITS);
    }
}
// Values that overflow are made first, so that infinities are where the plain op has them.
apart = APART@ && zmlx_folded<false>(largest) < INFINITY;
for (int e = 0; e < GROUPS@ * KEYS && apart; ++e) {
    biases[e] = fma(scales[e], float((1 << BITS) / 2), biases[e]);
}
const auto soon = zmlx_coded_of<W, BITS, SOON_D / PLACES>(SOON, SOON_ROWS);
const auto cache = zmlx_coded_of<W, BITS, D@ / PLACES>(#, rows_#);
@use
""",
}

_NUMBERS_USE = {
    "k": "zmlx_dots<ROWS, KEYS, STEPS, W, AT, 1, false>(part, own, own, cache, soon);\n",
    "v": """\
for (int e = 0; e < STEPS_V; e += BLOCK_V) {
    zmlx_weigh<ROWS, KEYS, STEPS_V, W, BLOCK_V>(o, s, e, count, cache, soon);
}
""",
}

#: Σ_key p (scale code + bias) has the scales in the weights, and the biases in sums of their own:
#: a step of a key takes one product less. So do scores of few rows. Codes lie about 0, or their
#: sums would cancel with those of the biases.
_CODED_USE = {
    "k": """\
if (apart) {
    zmlx_dots<ROWS, KEYS, STEPS, W, AT, PER, true>(part, own, scales, cache, soon);
} else {
    const auto values = zmlx_decoded_of<W, BITS, PER, KEYS>(cache, scales, biases);
    zmlx_dots<ROWS, KEYS, STEPS, W, AT, PER, false>(part, own, scales, values, soon);
}
""",
    "v": """\
for (int r = 0; r < ROWS; ++r) {
    for (int e = 0; e < GROUPS_V; ++e) {
        const int at = r * GROUPS_V + e;
        for (int key = 0; key < KEYS; ++key) {
            scaled[at * KEYS + key] = s[r * KEYS + key] * scales[e * KEYS + key];
        }
        zmlx_floats<W> sums = zmlx_fma<W>(
            zmlx_read<W>(shift + at * W), zmlx_splat<W>(change[r]), zmlx_splat<W>(0.0f));
        for (int key = 0; key < KEYS && apart; key += W) {
            sums = zmlx_fma<W>(
                zmlx_read<W>(s + r * KEYS + key), zmlx_read<W>(biases + e * KEYS + key), sums);
        }
        zmlx_write<W>(shift + at * W, sums);
    }
}
if (apart) {
    for (int e = 0; e < STEPS_V; e += BLOCK_V) {
        zmlx_weigh<ROWS, GROUPS_V * KEYS, STEPS_V, W, BLOCK_V>(
            o, scaled + e / PER * KEYS, e, count, cache, soon);
    }
} else {
    const auto values = zmlx_decoded_of<W, BITS, PER, KEYS>(cache, scales, biases);
    for (int e = 0; e < STEPS_V; e += BLOCK_V) {
        zmlx_weigh<ROWS, KEYS, STEPS_V, W, BLOCK_V>(o, s, e, count, values, soon);
    }
}
""",
}

#: Where the scales and biases of a head begin, and room for those of a tile.
_ROOM = {
    PLAIN: "",
    QUANTIZED: "".join(
        f"const size_t {part}_row = size_t(batch) * size_t({part}_strides[0])\n"
        f"    + size_t(kv_head) * size_t({part}_strides[1]);\n"
        for part in ("k_scales", "k_biases", "v_scales", "v_biases")
    )
    + """\
constexpr int GROUPS = ALONE ? D / GROUP : 1;
constexpr int GROUPS_V = ALONE ? DV / GROUP : 1;
constexpr int PER = GROUP / W;
// Whether codes are summed apart from scales and biases, and whether those of this tile are.
constexpr bool APART = ROWS <= 2, APART_V = true;
bool apart = false;
float scales[KEYS * (GROUPS > GROUPS_V ? GROUPS : GROUPS_V)];
float biases[KEYS * (GROUPS > GROUPS_V ? GROUPS : GROUPS_V)];
// Scores of codes miss the biases of K times the sums of q in each group.
float own_sums[ROWS * GROUPS];
for (int e = 0; e < ROWS * GROUPS; ++e) {
    own_sums[e] = 0.0f;
    for (int i = 0; i < GROUP && ALONE; ++i) {
        own_sums[e] += own[e * GROUP + i];
    }
}
// Weights times the scales of V, and W sums of weights times its biases for each group.
float scaled[ROWS * GROUPS_V * KEYS];
float shift[ROWS * GROUPS_V * W];
for (int e = 0; e < ROWS * GROUPS_V * W; ++e) {
    shift[e] = 0.0f;
}
""",
}

#: What codes alone leave out of scores and of sums of values.
SHIFT_K = """\
if (apart) {
    for (int r = 0; r < ROWS; ++r) {
        for (int e = 0; e < GROUPS; ++e) {
            for (int key = 0; key < KEYS; ++key) {
                s[r * KEYS + key] += own_sums[r * GROUPS + e] * biases[e * KEYS + key];
            }
        }
    }
}
"""
SHIFT_V = """\
if (ALONE) {
    for (int r = 0; r < ROWS; ++r) {
        for (int e = 0; e < GROUPS_V; ++e) {
            float sum = 0.0f;
            for (int u = 0; u < W; ++u) {
                sum += shift[(r * GROUPS_V + e) * W + u];
            }
            for (int i = 0; i < GROUP; ++i) {
                o[r * SLOTS_V + e * GROUP + i] += sum;
            }
        }
    }
}
"""

_STRIDED = (
    """\
const size_t head_k =
    size_t(batch) * size_t(k_strides[0]) + size_t(kv_head) * size_t(k_strides[1]);
const size_t head_v =
    size_t(batch) * size_t(v_strides[0]) + size_t(kv_head) * size_t(v_strides[1]);
""",
    """\
const auto rows_k = zmlx_rows_from(start, to - 1, head_k, size_t(k_strides[2]));
const auto rows_v = zmlx_rows_from(start, to - 1, head_v, size_t(v_strides[2]));
const auto next_k =
    zmlx_rows_from(min(start + KEYS, to - 1), to - 1, head_k, size_t(k_strides[2]));
""",
)

#: Rows of a tile, block by block: those of one are a step apart, and behind the last key is its row
#: again.
_BLOCKS = """\
for (int key = 0; key < KEYS;) {
    const int position = min(FIRST + key, to - 1);
    int64_t block = int64_t(block_table[size_t(batch) * size_t(block_table_strides[0])
        + size_t(position / SIZE) * size_t(block_table_strides[1])]);
    if (block < 0 || block >= int64_t(k_shape[0])) {
        ZMLX_FAIL("block_table", block);
        good = false;
        block = 0;
    }
    const int within = position % SIZE;
    const size_t first_k = size_t(block) * size_t(k_strides[0])
        + size_t(within) * size_t(k_strides[1]) + size_t(kv_head) * size_t(k_strides[2]);
    const size_t first_v = size_t(block) * size_t(v_strides[0])
        + size_t(within) * size_t(v_strides[1]) + size_t(kv_head) * size_t(v_strides[2]);
    const int run = min(SIZE - within, KEYS - key);
    for (int i = 0; i < run; ++i) {
        const size_t step = size_t(min(i, to - 1 - position));
        after_k[key + i] = first_k + step * size_t(k_strides[1]);
        after_v[key + i] = first_v + step * size_t(v_strides[1]);
    }
    key += run;
}
"""

_LISTED = (
    """\
size_t own_k[KEYS], own_v[KEYS], after_k[KEYS], after_v[KEYS];
const zmlx_listed_rows rows_k = {own_k}, rows_v = {own_v}, next_k = {after_k};
if (low < to) {
    @from_low
}
""",
    """\
for (int key = 0; key < KEYS; ++key) {
    own_k[key] = after_k[key];
    own_v[key] = after_v[key];
}
if (start + KEYS < to) {
    @from_next
}
""",
)

#: Where rows begin: what is said before the first tile, and in each tile of it and of the next one,
#: whose rows are on their way then.
ROWS = {
    PLAIN: _STRIDED,
    QUANTIZED: _STRIDED,
    PAGED: tuple(
        fill(
            text,
            from_low=_BLOCKS.replace("FIRST", "low"),
            from_next=_BLOCKS.replace("FIRST", "start + KEYS"),
        )
        for text in _LISTED
    ),
}


def room(form: Cache) -> str:
    """Declarations that `alone` needs."""
    return _ROOM[QUANTIZED if form.kind == QUANTIZED else PLAIN]


def tile(form: Cache, name: str) -> str:
    """Rows of k or v in the tile."""
    load = _LOAD[form.bits or PLAIN].replace("STEP_#", f"size_t({name}_strides[3])")
    load = fill(load, group=_GROUP)
    return _named(fill(_TILE, load=load), name)


def alone(form: Cache, name: str) -> str:
    """One thread's product with rows of k or v, while the others are on their way."""
    text = _ALONE[QUANTIZED if form.kind == QUANTIZED else PLAIN]
    use = _CODED_USE if form.kind == QUANTIZED else _NUMBERS_USE
    text = fill(text, use=use[name], group=_GROUP, staged=_STAGED.get(form.kind, ""))
    soon, d, rows = {"k": ("v", "DV", "rows_v"), "v": ("k", "D", "next_k")}[name]
    text = text.replace("SOON_D", d).replace("SOON_ROWS", rows).replace("SOON", soon)
    return _named(text, name)


def _named(text: str, name: str) -> str:
    text = text.replace("#", name).replace("@", "_V" if name == "v" else "")
    return text.replace("D_V", "DV")
