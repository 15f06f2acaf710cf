"""Elementwise bodies."""

from __future__ import annotations

from dataclasses import dataclass

from .parts import Let, Operand, Output
from .pattern import Pattern
from .random import add_block, add_keys, draw, drawn, header
from .text import (
    STEP_HEADER,
    Body,
    add_read_step,
    add_write_step,
    array,
    at_step,
    needed_names,
    set_step,
    unique,
)

#: Elements of a step: few, so that memory is read and written while numbers are drawn.
_BLOCK = 256


@dataclass(frozen=True)
class Elementwise(Pattern):
    """out[i] = expr(inputs[i], …) for `size` elements; inputs are "full" or "scalar".

    Launch: one thread per N elements. Extra input: `size` (0-d uint32 or uint64).
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    lets: tuple[Let, ...] = ()

    def names(self) -> tuple[str, ...]:
        """What the pattern names: operands, lets and outputs."""
        return unique([*super().names(), *(let.name for let in self.lets)])

    @property
    def constants(self) -> tuple[str, ...]:
        """The launch constants that follow the inputs."""
        return ("size",)

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        return STEP_HEADER + header(self.inputs)

    def source(self) -> str:
        """The body."""
        body = Body()
        needed = needed_names((y.expr for y in self.outputs), self.lets)
        needed.update(x.index for x in drawn(self.inputs))
        for x in self.inputs:
            if x.kind == "scalar" and x.name in needed:
                body.add(f"const {x.type} {x.name} = {x.type}({array(x, '_in')});")
        add_keys(body, self.inputs)
        body.add("const size_t start_ = size_t(thread_position_in_grid.x) * N;")
        body.open("if (start_ + N <= size_t(size))")
        random = drawn(self.inputs)
        # Numbers of 32 bits are not converted, and were a little slower in short steps.
        short = "" if random else f" && sizeof(*{array(self.outputs[0], '_out')}) < 4"
        body.add(f"const uint block_ = N % {_BLOCK} == 0{short} ? {_BLOCK} : N;")
        body.open("for (uint b_ = 0; b_ < N; b_ += block_)")
        for x in random:
            add_block(body, x, "block_", f"{x.index} + (start_ + b_) / 8")
        for x in self.inputs:
            if x.kind == "full" and x.name in needed:
                add_read_step(body, x, "block_", f"{array(x, '_in')} + start_ + b_")
        for y in self.outputs:
            add_write_step(body, y, "block_", f"{array(y, '_out')} + start_ + b_", "true")
        body.open("for (uint k_ = 0; k_ < block_; ++k_)")
        for x in random:
            body.add(f"const float {x.name} = {x.name}_drawn[k_];")
        self._element(body, needed, "k_")
        body.close()
        body.close()
        body.depth -= 1
        body.open("} else")
        body.open("for (size_t i_ = start_; i_ < size_t(size); ++i_)")
        for x in drawn(self.inputs):
            body.add(draw(x, x.index, "i_"))
        self._element(body, needed)
        body.close()
        body.close()
        return body.text()

    def _element(self, body: Body, needed: set[str], step: str = "") -> None:
        """Element `step` of a step, or element i_."""
        for x in self.inputs:
            if x.kind == "full" and x.name in needed:
                value = at_step(x, step) if step else f"{x.type}({array(x, '_in')}[i_])"
                body.add(f"const {x.type} {x.name} = {value};")
        for let in self.lets:
            if let.name in needed:
                body.add(let.declaration())
        for y in self.outputs:
            if step:
                body.add(set_step(y, step))
            else:
                body.add(f"{array(y, '_out')}[i_] = {y.name}_t({y.expr});")
