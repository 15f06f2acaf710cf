"""How decoding finds and reads a row of the cache; see `decode_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

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
        causal, window, softcap, sinks: whether these are there.
    """

    kind: str = PLAIN
    bits: int = 0
    lengths: bool = False
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
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[rows_#[key] + size_t(d)]) : 0.0f;
    }
} else {
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[rows_#[key] + size_t(d) * STEP_#]) : 0.0f;
    }
}
""",
    8: """\
if (TPR == 1) {
    for (int g = 0; g < D@ / GROUP; ++g) {
        const float by = scales[key * (D@ / GROUP) + g], plus = biases[key * (D@ / GROUP) + g];
        for (int e = 0; e < GROUP; ++e) {
            const float value = float(#[rows_#[key] * D@ + g * GROUP + e]);
            tile[key * SLOTS@ + g * GROUP + e] = fma(value, by, plus);
        }
    }
} else {
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        const size_t g = rows_#[key] * (D@ / GROUP) + min(d, D@ - 1) / GROUP;
        tile[key * SLOTS@ + e] = d < D@
            ? fma(float(#[rows_#[key] * D@ + d]), float(#_scales[g]), float(#_biases[g])) : 0.0f;
    }
}
""",
    4: """\
if (TPR == 1) {
    for (int g = 0; g < D@ / GROUP; ++g) {
        const float by = scales[key * (D@ / GROUP) + g], plus = biases[key * (D@ / GROUP) + g];
        for (int e = 0; e < GROUP / 2; ++e) {
            const int two = int(#[rows_#[key] * (D@ / 2) + g * (GROUP / 2) + e]);
            tile[key * SLOTS@ + g * (GROUP / 2) + e] = fma(float(two & 15), by, plus);
            tile[key * SLOTS@ + HALF@ + g * (GROUP / 2) + e] = fma(float(two >> 4), by, plus);
        }
    }
} else {
    for (int e = 0; e < HALF@; ++e) {
        const int at = e * TPR + lane;
        const size_t g = rows_#[key] * (D@ / GROUP) + 2 * min(at, D@ / 2 - 1) / GROUP;
        const float by = float(#_scales[g]), plus = float(#_biases[g]);
        const int two = at < D@ / 2 ? int(#[rows_#[key] * (D@ / 2) + at]) : 0;
        tile[key * SLOTS@ + e] = at < D@ / 2 ? fma(float(two & 15), by, plus) : 0.0f;
        tile[key * SLOTS@ + HALF@ + e] = at < D@ / 2 ? fma(float(two >> 4), by, plus) : 0.0f;
    }
}
""",
}

#: The scales and biases of a tile, which lie side by side, before its rows: all at once.
_SCALES = """\
if (TPR == 1) {
    for (int e = 0; e < count * (D@ / GROUP); ++e) {
        scales[e] = float(#_scales[rows_#[0] * (D@ / GROUP) + e]);
        biases[e] = float(#_biases[rows_#[0] * (D@ / GROUP) + e]);
    }
}
"""

#: Lines of 64 bytes of a tile's rows, which arrive while there is arithmetic to do: every PARTS-th
#: of each row. In a loop of its own: g++ keeps no sums in registers around it.
_PREFETCH = """\
if (TPR == 1) {
    constexpr int line = 64 / int(sizeof(#[0]));
    for (int key = 0; key < KEYS; ++key) {
        for (int d = (PART) * line; d < SIZE; d += PARTS * line) {
            ZMLX_PREFETCH(# + AT + d);
        }
    }
}
"""

#: Where row `position` of the cache begins.
ROWS = {
    PLAIN: """\
const size_t row_k = size_t(batch) * size_t(k_strides[0]) + size_t(kv_head) * size_t(k_strides[1])
    + size_t(position) * size_t(k_strides[2]);
const size_t row_v = size_t(batch) * size_t(v_strides[0]) + size_t(kv_head) * size_t(v_strides[1])
    + size_t(position) * size_t(v_strides[2]);
""",
    PAGED: """\
int block = int(block_table[size_t(batch) * size_t(block_table_strides[0])
    + size_t(position / SIZE) * size_t(block_table_strides[1])]);
if (block < 0 || block >= int(k_shape[0])) {
    ZMLX_FAIL("block_table", block);
    good = false;
    block = 0;
}
const size_t row_k = size_t(block) * size_t(k_strides[0])
    + size_t(position % SIZE) * size_t(k_strides[1]) + size_t(kv_head) * size_t(k_strides[2]);
const size_t row_v = size_t(block) * size_t(v_strides[0])
    + size_t(position % SIZE) * size_t(v_strides[1]) + size_t(kv_head) * size_t(v_strides[2]);
""",
    QUANTIZED: """\
const size_t row_k = (size_t(batch) * kv_heads + kv_head) * keys + position;
const size_t row_v = row_k;
""",
}


def load(form: Cache, name: str) -> str:
    """A row of k or v into the tile."""
    text = _LOAD[form.bits or PLAIN].replace("STEP_#", f"size_t({name}_strides[3])")
    return _named(text, name)


def scales(form: Cache, name: str) -> str:
    """What the rows of a tile of k or v need beside themselves."""
    return _named(_SCALES, name) if form.kind == QUANTIZED else ""


def prefetch(form: Cache, name: str, rows: str, part: str, parts: str) -> str:
    """Asks for the lines `part`, `part` + `parts`, … of a tile's rows of k or v."""
    at, size = f"{rows}[key]", "D@"
    if form.kind == QUANTIZED:
        size = "D@ * BITS / 8"
        at = f"{at} * ({size})"
    text = _PREFETCH.replace("PARTS", parts).replace("PART", part)
    return _named(text.replace("AT", at).replace("SIZE", size), name)


def _named(text: str, name: str) -> str:
    text = text.replace("#", name).replace("@", "_V" if name == "v" else "")
    return text.replace("D_V", "DV")
