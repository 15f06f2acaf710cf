"""How decoding finds and reads a row of the cache; see `decode_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

from .attention_text import NO_MASK, fill

PLAIN, PAGED, QUANTIZED = "plain", "paged", "quantized"

#: The ops.
NAMES = {PLAIN: "decode_attention", PAGED: "paged_attention", QUANTIZED: "quantized_attention"}


@dataclass(frozen=True)
class Cache:
    """What is static of a call.

    Attributes:
        kind: how the cache lies.
        bits: of a quantised value.
        lengths: whether each batch has its own number of keys.
        mask: not given, of what to keep, or added; of an array alone.
        causal, window, softcap, sinks: whether these are there.
    """

    kind: str = PLAIN
    bits: int = 0
    lengths: bool = False
    mask: str = NO_MASK
    causal: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, in order."""
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
            *(("sinks",) if self.sinks else ()),
        )  # fmt: skip


#: A row of the cache in `tile`.
_LOAD = {
    # A loop of its own where values lie side by side, since one with a step does not vectorise.
    PLAIN: """\
if (#_strides[3] == 1) {
    ZMLX_ROLLED
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[rows_#[key] + size_t(d)]) : 0.0f;
    }
} else {
    ZMLX_ROLLED
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[rows_#[key] + size_t(d) * STEP_#]) : 0.0f;
    }
}
""",
    8: """\
ZMLX_ROLLED
for (int e = 0; e < HALF@; ++e) {
    const int d = e * TPR + lane;
    @group
    tile[key * SLOTS@ + e] = d < D@ ? fma(float(#[rows_#[key] + size_t(d)]), by, plus) : 0.0f;
}
""",
    4: """\
ZMLX_ROLLED
for (int e = 0; e < HALF@; ++e) {
    const int at = e * TPR + lane;
    const int d = 2 * at;
    @group
    const int two = d < D@ ? int(#[rows_#[key] + size_t(at)]) : 0;
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

#: The tile, with zeros in rows past the last key and, for one thread, in slots past a row.
_TILE = """\
if (count < KEYS || (ALONE && SLOTS@ > D@)) {
    for (int e = 0; e < KEYS * SLOTS@; ++e) {
        tile[e] = 0.0f;
    }
}
for (int key = 0; key < count; ++key) {
    @load
}
"""

#: What one thread needs: its view of rows of the cache and of those that it wants next.
_ALONE = {
    PLAIN: """\
const auto soon = zmlx_numbers_of<16, SOON_D, 64 / int(sizeof(SOON[0]))>(SOON, SOON_ROWS);
if (D@ % 16 == 0 && #_strides[3] == 1) {
    const auto cache = zmlx_numbers_of<16, D@, 64 / int(sizeof(#[0]))>(#, rows_#);
    @use
} else {
    @tile
    size_t staged[KEYS];
    for (int key = 0; key < KEYS; ++key) {
        staged[key] = size_t(key * SLOTS@);
    }
    const auto cache = zmlx_numbers_of<16, SLOTS@, 16>(tile, staged);
    @use
}
""",
    # Scales and biases of a tile, which mostly lie side by side.
    QUANTIZED: """\
constexpr int PER_ROW@ = D@ / GROUP;
if (#_scales_strides[2] == PER_ROW@ && #_scales_strides[3] == 1
    && #_biases_strides[2] == PER_ROW@ && #_biases_strides[3] == 1) {
    for (int e = 0; e < count * PER_ROW@; ++e) {
        scales[e] = float(#_scales[#_scales_row + size_t(start) * PER_ROW@ + e]);
        biases[e] = float(#_biases[#_biases_row + size_t(start) * PER_ROW@ + e]);
    }
} else {
    ZMLX_ROLLED
    for (int key = 0; key < count; ++key) {
        for (int d = 0; d < D@; d += GROUP) {
            @group
            scales[key * PER_ROW@ + d / GROUP] = by;
            biases[key * PER_ROW@ + d / GROUP] = plus;
        }
    }
}
const auto soon =
    zmlx_packed_of<W, BITS, GROUP / PLACES, SOON_D / PLACES>(SOON, SOON_ROWS, scales, biases);
const auto cache =
    zmlx_packed_of<W, BITS, GROUP / PLACES, D@ / PLACES>(#, rows_#, scales, biases);
@use
""",
}

_USE = {
    "k": "zmlx_dots<ROWS, KEYS, STEPS, W, PLACES>(part, own, cache, soon);\n",
    "v": """\
constexpr int BLOCK = ROWS <= 4 && STEPS_V % 4 == 0 ? 4 : STEPS_V % 2 == 0 ? 2 : 1;
for (int e = 0; e < STEPS_V; e += BLOCK) {
    zmlx_weigh<ROWS, KEYS, STEPS_V, W, BLOCK>(o, s, e, count, cache, soon);
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
constexpr int GROUPS = ALONE ? KEYS * (D > DV ? D : DV) / GROUP : 1;
float scales[GROUPS], biases[GROUPS];
""",
}

_STRIDED = """\
const size_t row_k = size_t(batch) * size_t(k_strides[0]) + size_t(kv_head) * size_t(k_strides[1])
    + size_t(position) * size_t(k_strides[2]);
const size_t row_v = size_t(batch) * size_t(v_strides[0]) + size_t(kv_head) * size_t(v_strides[1])
    + size_t(position) * size_t(v_strides[2]);
"""

#: Where row `position` of the cache begins.
ROWS = {
    PLAIN: _STRIDED,
    QUANTIZED: _STRIDED,
    PAGED: """\
int64_t block = int64_t(block_table[size_t(batch) * size_t(block_table_strides[0])
    + size_t(position / SIZE) * size_t(block_table_strides[1])]);
if (block < 0 || block >= int64_t(k_shape[0])) {
    ZMLX_FAIL("block_table", block);
    good = false;
    block = 0;
}
const size_t row_k = size_t(block) * size_t(k_strides[0])
    + size_t(position % SIZE) * size_t(k_strides[1]) + size_t(kv_head) * size_t(k_strides[2]);
const size_t row_v = size_t(block) * size_t(v_strides[0])
    + size_t(position % SIZE) * size_t(v_strides[1]) + size_t(kv_head) * size_t(v_strides[2]);
""",
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
    text = fill(text, use=_USE[name], tile=tile(form, name), group=_GROUP)
    soon, d, rows = {"k": ("v", "DV", "rows_v"), "v": ("k", "D", "next_k")}[name]
    text = text.replace("SOON_D", d).replace("SOON_ROWS", rows).replace("SOON", soon)
    return _named(text, name)


def _named(text: str, name: str) -> str:
    text = text.replace("#", name).replace("@", "_V" if name == "v" else "")
    return text.replace("D_V", "DV")
