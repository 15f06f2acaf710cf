"""Sums over rows."""

from __future__ import annotations

from dataclasses import dataclass

from .parts import Let, Operand, Output
from .pattern import Pattern
from .random import add_keys, add_row_counters, draw, header
from .text import Body, add_width, array, needed_names, place, unique


@dataclass(frozen=True)
class Columnwise(Pattern):
    """Sums over rows: out[c, j] = Σ of expr over the rows of chunk c, in float.

    Launch: x covers D columns, N per thread; y the chunks. Extra inputs: `rows`, `D`, `chunk`
    (0-d uint32). A full reduction is two launches: one over chunks, one over their sums.
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
        return ("rows", "D", "chunk")

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        return header(self.inputs)

    def source(self) -> str:
        """The body."""
        body = Body()
        body.add("const uint first_ = thread_position_in_grid.x * N;")
        body.add("const uint part_ = thread_position_in_grid.y;")
        body.add("const uint stop_ = uint(min(size_t(rows), (size_t(part_) + 1) * chunk));")
        add_width(body, self.inputs)
        for x in self.inputs:
            if x.kind == "scalar":
                body.add(f"const {x.type} {x.name} = {x.type}({array(x, '_in')});")
        add_keys(body, self.inputs)
        for y in self.outputs:
            body.add(f"float {y.name}_sum[N] = {{0}};")
        body.open("for (uint row = part_ * chunk; row < stop_; ++row)")
        done: set[str] = set()
        for x in self.inputs:
            name = array(x, "_in")
            if x.kind == "row" and name not in done:
                done.add(name)
                width = "D" if x.parts == 1 else f"(D * {x.parts})"
                body.add(f"auto {name}_row = {name} + size_t(row) * {width};")
            elif x.kind == "per_row":
                body.add(f"const {x.type} {x.name} = {x.type}({name}[row]);")
        add_row_counters(body, self.inputs)
        body.open("if (first_ + N <= D)")
        body.open("for (uint n_ = 0; n_ < N; ++n_)")
        self._element(body)
        body.close()
        body.depth -= 1
        body.open("} else")
        body.open("for (uint n_ = 0; n_ < N && first_ + n_ < D; ++n_)")
        self._element(body)
        body.close()
        body.close()
        body.close()
        body.open("for (uint n_ = 0; n_ < N && first_ + n_ < D; ++n_)")
        for y in self.outputs:
            body.add(
                f"{array(y, '_out')}[size_t(part_) * D + first_ + n_]"
                f" = {y.name}_t({y.name}_sum[n_]);"
            )
        body.close()
        return body.text()

    def _element(self, body: Body) -> None:
        needed = needed_names((y.expr for y in self.outputs), self.lets)
        body.add("const uint j = first_ + n_;")
        for x in self.inputs:
            if x.name in needed and x.kind in ("row", "column"):
                name = array(x, "_in") + ("_row" if x.kind == "row" else "")
                body.add(f"const {x.type} {x.name} = {x.type}({name}[{place(x, 'j')}]);")
            elif x.name in needed and x.kind == "random":
                body.add(draw(x, f"{x.name}_first", "j"))
        for let in self.lets:
            if let.name in needed:
                body.add(let.declaration())
        for y in self.outputs:
            body.add(f"{y.name}_sum[n_] += {y.expr};")
