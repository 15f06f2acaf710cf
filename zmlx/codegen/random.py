"""Random operands: how a body draws their numbers."""

from __future__ import annotations

from collections.abc import Iterable

from .. import msl
from .parts import Operand
from .text import Body, array

#: The numbers of a block. The CPU target defines the macro to draw the same ones for several
#: counters at once.
BLOCK_HEADER = """\
// Numbers of a stream whose first eight come from counter `first`: `count` of them, a multiple of
// eight.
#ifndef ZMLX_UNIFORMS
#define ZMLX_UNIFORMS(out, count, first, key) zmlx_uniforms(out, count, first, key)
inline void zmlx_uniforms(thread float* out, uint count, uint64_t first, uint64_t key) {
    for (uint q = 0; q < count / 8; ++q) {
        zmlx_words words = zmlx_philox(first + q, key);
        out[8 * q] = zmlx_uniform(words.a);
        out[8 * q + 1] = zmlx_uniform(words.b);
        out[8 * q + 2] = zmlx_uniform(words.c);
        out[8 * q + 3] = zmlx_uniform(words.d);
        out[8 * q + 4] = zmlx_uniform(zmlx_exchanged(words.a));
        out[8 * q + 5] = zmlx_uniform(zmlx_exchanged(words.b));
        out[8 * q + 6] = zmlx_uniform(zmlx_exchanged(words.c));
        out[8 * q + 7] = zmlx_uniform(zmlx_exchanged(words.d));
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
        body.add(f"const uint64_t {x.name}_first = {x.index} + uint64_t(row) * ((D + 7) / 8);")


def add_rest(body: Body, inputs: Iterable[Operand]) -> None:
    """Numbers for what is left of a row after whole steps, where one thread has all of it."""
    for x in drawn(inputs):
        body.add(f"float {x.name}_rest[TPR == 1 ? U : 1];")
        body.open("if (TPR == 1 && whole_ < D)")
        body.add(f"ZMLX_UNIFORMS({x.name}_rest, U, {x.name}_first + whole_ / 8, {x.name}_key);")
        body.close()


def add_block(body: Body, x: Operand, width: str, first: str) -> None:
    """Numbers for `width` elements, a multiple of eight, from counter `first` on."""
    body.add(f"float {x.name}_drawn[{width}];")
    body.add(f"ZMLX_UNIFORMS({x.name}_drawn, {width}, {first}, {x.name}_key);")


def draw_of_rest(x: Operand) -> str:
    """The number of element j of that rest."""
    alone = f"zmlx_draw({x.name}_first, j, {x.name}_key)"
    return f"const float {x.name} = TPR == 1 ? {x.name}_rest[j - whole_] : {alone};"


def draw(x: Operand, first: str, index: str) -> str:
    """The number of one element, where no block is."""
    return f"const float {x.name} = zmlx_draw({first}, {index}, {x.name}_key);"
