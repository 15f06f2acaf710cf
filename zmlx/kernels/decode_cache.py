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
        tile[key * SLOTS@ + e] = d < D@ ? float(#[ROW_# + size_t(d)]) : 0.0f;
    }
} else {
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        tile[key * SLOTS@ + e] = d < D@ ? float(#[ROW_# + size_t(d) * STEP_#]) : 0.0f;
    }
}
""",
    8: """\
if (TPR == 1) {
    for (int g = 0; g < D@ / GROUP; ++g) {
        const float by = float(#_scales[row_# * (D@ / GROUP) + g]);
        const float plus = float(#_biases[row_# * (D@ / GROUP) + g]);
        for (int e = 0; e < GROUP; ++e) {
            const float value = float(#[row_# * D@ + g * GROUP + e]);
            tile[key * SLOTS@ + g * GROUP + e] = fma(value, by, plus);
        }
    }
} else {
    for (int e = 0; e < HALF@; ++e) {
        const int d = e * TPR + lane;
        const size_t g = row_# * (D@ / GROUP) + min(d, D@ - 1) / GROUP;
        tile[key * SLOTS@ + e] = d < D@
            ? fma(float(#[row_# * D@ + d]), float(#_scales[g]), float(#_biases[g])) : 0.0f;
    }
}
""",
    4: """\
if (TPR == 1) {
    for (int g = 0; g < D@ / GROUP; ++g) {
        const float by = float(#_scales[row_# * (D@ / GROUP) + g]);
        const float plus = float(#_biases[row_# * (D@ / GROUP) + g]);
        for (int e = 0; e < GROUP / 2; ++e) {
            const int two = int(#[row_# * (D@ / 2) + g * (GROUP / 2) + e]);
            tile[key * SLOTS@ + g * (GROUP / 2) + e] = fma(float(two & 15), by, plus);
            tile[key * SLOTS@ + HALF@ + g * (GROUP / 2) + e] = fma(float(two >> 4), by, plus);
        }
    }
} else {
    for (int e = 0; e < HALF@; ++e) {
        const int at = e * TPR + lane;
        const size_t g = row_# * (D@ / GROUP) + 2 * min(at, D@ / 2 - 1) / GROUP;
        const float by = float(#_scales[g]), plus = float(#_biases[g]);
        const int two = at < D@ / 2 ? int(#[row_# * (D@ / 2) + at]) : 0;
        tile[key * SLOTS@ + e] = at < D@ / 2 ? fma(float(two & 15), by, plus) : 0.0f;
        tile[key * SLOTS@ + HALF@ + e] = at < D@ / 2 ? fma(float(two >> 4), by, plus) : 0.0f;
    }
}
""",
}

#: Where row `start + key` of the cache begins.
ROWS = {
    PLAIN: """\
const size_t row_k = size_t(batch) * size_t(k_strides[0]) + size_t(kv_head) * size_t(k_strides[1])
    + size_t(start + key) * size_t(k_strides[2]);
const size_t row_v = size_t(batch) * size_t(v_strides[0]) + size_t(kv_head) * size_t(v_strides[1])
    + size_t(start + key) * size_t(v_strides[2]);
""",
    PAGED: """\
int block = int(block_table[size_t(batch) * size_t(block_table_strides[0])
    + size_t((start + key) / SIZE) * size_t(block_table_strides[1])]);
if (block < 0 || block >= int(k_shape[0])) {
    ZMLX_FAIL("block_table", block);
    good = false;
    block = 0;
}
const size_t row_k = size_t(block) * size_t(k_strides[0])
    + size_t((start + key) % SIZE) * size_t(k_strides[1]) + size_t(kv_head) * size_t(k_strides[2]);
const size_t row_v = size_t(block) * size_t(v_strides[0])
    + size_t((start + key) % SIZE) * size_t(v_strides[1]) + size_t(kv_head) * size_t(v_strides[2]);
""",
    QUANTIZED: """\
const size_t row_k = (size_t(batch) * kv_heads + kv_head) * keys + start + key;
const size_t row_v = row_k;
""",
}


def load(form: Cache, name: str) -> str:
    """A row of k or v into the tile."""
    text = _LOAD[form.bits or PLAIN]
    text = text.replace("ROW_#", f"row_{name}").replace("STEP_#", f"size_t({name}_strides[3])")
    return text.replace("#", name).replace("@", "_V" if name == "v" else "").replace("D_V", "DV")
