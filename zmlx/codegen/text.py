"""Tools for writing a body: indentation, names, and which lets an expression reaches."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .parts import Let, Operand, Output

_IDENTIFIER = re.compile(r"(?<![\w.])[A-Za-z_]\w*", re.ASCII)


def identifiers(text: str) -> list[str]:
    """The identifiers that `text` names, in order, without repeats."""
    return list(dict.fromkeys(_IDENTIFIER.findall(text)))


def array(item: Operand | Output, suffix: str) -> str:
    """The parameter behind an operand or an output."""
    return (item.array or item.name) + suffix


class Body:
    """Lines of Metal at a running indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def add(self, *lines: str) -> None:
        """Lines at the current depth."""
        self.lines.extend("    " * self.depth + line for line in lines)

    def open(self, line: str) -> None:
        """A line that opens a block."""
        self.add(line + " {")
        self.depth += 1

    def open_step(self, count: str = "U") -> None:
        """The loop over the elements `u_` of a step; it needs `STEP_HEADER`."""
        self.add("ZMLX_STEP_LOOP")
        self.open(f"for (uint u_ = 0; u_ < {count}; ++u_)")

    def open_few_rows(self, count: int) -> None:
        """The loop over the rows `r_` that are taken at a time, in one over their columns; it needs
        `STEP_HEADER`."""
        self.add("ZMLX_ROWS_LOOP")
        self.open(f"for (uint r_ = 0; r_ < {count}; ++r_)")

    def close(self) -> None:
        """The end of a block."""
        self.depth -= 1
        self.add("}")

    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines) + "\n"


def needed_names(
    exprs: Iterable[str], lets: tuple[Let, ...], known: Iterable[str] = ()
) -> set[str]:
    """Names that `exprs` reach through `lets`, not looking behind the names in `known`."""
    by_name = {let.name: let for let in lets}
    stop = set(known)
    found: set[str] = set()
    work = [name for expr in exprs for name in identifiers(expr)]
    while work:
        name = work.pop()
        if name in found:
            continue
        found.add(name)
        if name in by_name and name not in stop:
            work.extend(identifiers(by_name[name].expr))
    return found


def place(item: Operand | Output, index: str) -> str:
    """Where element `index` of the item's slice lies in its row."""
    if item.part == 0:
        return index
    return f"D_ + {index}" if item.part == 1 else f"D_ * {item.part} + {index}"


def add_width(body: Body, items: Iterable[Operand | Output]) -> None:
    """D as `place` names it: a copy, since for the compiler a store may change D itself, and in 64
    bits, since a sum that may wrap in 32 keeps a loop from vectorising."""
    if any(item.part > 0 for item in items):
        body.add("const size_t D_ = D;")


def unique(items: Iterable[str]) -> tuple[str, ...]:
    """Items without repeats, in order."""
    return tuple(dict.fromkeys(items))


#: Header of every kernel that takes steps of elements.
STEP_HEADER = """
// `count` elements that lie side by side, which a thread reads or sets one after the other, and
// keeps if `live`. The CPU target converts those of half at once, and has the compiler make vectors
// of a loop over them before it unrolls it, and unroll a loop over a few rows before it makes
// vectors of the loop over their columns.
#ifndef ZMLX_READ_STEP
#define ZMLX_STEP_LOOP
#define ZMLX_ROWS_LOOP
#define ZMLX_READ_STEP(count, pointer) (pointer)
#define ZMLX_WRITE_STEP(count, pointer, live) (pointer)
#define ZMLX_SET(step, index, type, ...) step[index] = type(__VA_ARGS__)
#endif
"""


def add_read_step(body: Body, x: Operand, count: str, pointer: str) -> None:
    """Declares the elements that `at_step` reads."""
    body.add(f"const auto {x.name}_in_step = ZMLX_READ_STEP({count}, {pointer});")


def add_write_step(body: Body, y: Output, count: str, pointer: str, live: str) -> None:
    """Declares the elements that `set_step` sets."""
    body.add(f"auto {y.name}_out_step = ZMLX_WRITE_STEP({count}, {pointer}, {live});")


def at_step(x: Operand, index: str) -> str:
    """An element of a step."""
    return f"{x.type}({x.name}_in_step[{index}])"


def set_step(y: Output, index: str) -> str:
    """Sets an element of a step."""
    return f"ZMLX_SET({y.name}_out_step, {index}, {y.name}_t, {y.expr});"
