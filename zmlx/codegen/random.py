"""Random operands: how a body draws their numbers."""

from __future__ import annotations

from collections.abc import Iterable

from .. import msl
from .parts import Operand
from .text import Body, array

#: The numbers of a block. The CPU target defines the macro to draw the same ones for several
#: counters at once.
BLOCK_HEADER = """\
// Numbers of a stream whose first four come from counter `first`: `count` of them, a multiple of
// four.
#ifndef ZMLX_UNIFORMS
#define ZMLX_UNIFORMS(out, count, first, key) zmlx_uniforms(out, count, first, key)
inline void zmlx_uniforms(thread float* out, uint count, uint64_t first, uint64_t key) {
    for (uint q = 0; q < count / 4; ++q) {
        zmlx_words words = zmlx_philox(first + q, key);
        out[4 * q] = zmlx_uniform(words.a);
        out[4 * q + 1] = zmlx_uniform(words.b);
        out[4 * q + 2] = zmlx_uniform(words.c);
        out[4 * q + 3] = zmlx_uniform(words.d);
    }
}
#endif
"""


def drawn(inputs: Iterable[Operand]) -> tuple[Operand, ...]:
    """The operands that are random."""
    return tuple(x for x in inputs if x.kind == "random")


def header(inputs: Iterable[Operand]) -> str:
    """The functions that draws call."""
    return msl.header_for("zmlx_draw") + BLOCK_HEADER if drawn(inputs) else ""


def add_keys(body: Body, inputs: Iterable[Operand]) -> None:
    """The key of every random operand."""
    for x in drawn(inputs):
        body.add(f"const uint64_t {x.name}_key = uint64_t({array(x, '_in')});")


def add_row_counters(body: Body, inputs: Iterable[Operand]) -> None:
    """The counter of element 0 of a row."""
    for x in drawn(inputs):
        body.add(f"const uint64_t {x.name}_first = {x.index} + uint64_t(row) * ((D + 3) / 4);")


def add_block(body: Body, x: Operand, width: str, first: str) -> None:
    """Numbers for `width` elements, a multiple of four, from counter `first` on."""
    body.add(f"float {x.name}_drawn[{width}];")
    body.add(f"ZMLX_UNIFORMS({x.name}_drawn, {width}, {first}, {x.name}_key);")


def draw(x: Operand, first: str, index: str) -> str:
    """The number of one element, where no block is."""
    return f"const float {x.name} = zmlx_draw({first}, {index}, {x.name}_key);"
