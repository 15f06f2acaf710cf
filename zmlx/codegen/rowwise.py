"""Rowwise bodies: reductions over rows, and maps that use them."""

from __future__ import annotations

from dataclasses import dataclass

from .parts import Check, Let, Operand, Output, Pass, Reduce
from .pattern import Pattern
from .random import (
    add_block,
    add_keys,
    add_rest,
    add_row_counters,
    draw_of_rest,
    drawn,
    header,
)
from .reductions import REDUCTIONS, ROW_HEADER, fold_parts, start_parts, update_part
from .text import (
    STEP_HEADER,
    Body,
    add_read_step,
    add_width,
    add_write_step,
    array,
    at_step,
    needed_names,
    place,
    set_step,
    unique,
)

#: Rows longer than this are not asked for ahead: they would leave the cache before their turn.
_LONGEST_AHEAD = 32768


@dataclass(frozen=True)
class Rowwise(Pattern):
    """Any number of reductions over rows of D elements, then any number of outputs.

    Launch: TPR·RPG threads per group and RPG rows per group, groups along x then y. Extra inputs:
    `rows` and `D` (0-d uint32), and `chunk` (rows per group, RPG = 1) if there are column outputs.

    `before` are lets of the whole row that come before its first pass, `lets` are element-level; a
    pass computes those that its expressions reach. Expressions may name `j` (the element), `row`,
    `rows` and `D`. Names in `keep`
    (operands or lets) are computed once and stay in registers for later passes; a kernel that
    keeps, or that has column outputs, covers rows of up to TPR·U·STEPS elements, others any row.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    passes: tuple[Pass, ...] = ()
    lets: tuple[Let, ...] = ()
    keep: tuple[str, ...] = ()
    before: tuple[Let, ...] = ()
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for y in self.outputs:
            if y.kind not in ("row", "per_row", "column"):
                raise ValueError(
                    f"[codegen] 'kind' of {y.name!a} must be row, per_row or column but got "
                    f"{y.kind!a}."
                )
            name = array(y, "")
            written = {x.part for x in self.outputs if array(x, "") == name}
            if len(written) < y.parts:
                raise ValueError(
                    f"[codegen] 'outputs' must have all {y.parts} parts of {name!a} but have "
                    f"{len(written)}."
                )
        ops = (*REDUCTIONS, "sum_exp")
        for op in (r.op for p in self.passes for r in p.reductions):
            if op not in ops:
                raise ValueError(f"[codegen] 'op' must be one of {', '.join(ops)} but got {op!a}.")
        for name in self.keep:
            if name not in self._types:
                raise ValueError(
                    f"[codegen] 'keep' must name operands or lets of the elements but got {name!a}."
                )

    @property
    def _types(self) -> dict[str, str]:
        """The type of every operand and element-level let."""
        return {x.name: x.type for x in self.inputs} | {x.name: x.type for x in self.lets}

    def names(self) -> tuple[str, ...]:
        """What the pattern names: operands, lets, reductions and outputs."""
        reductions = [r for p in self.passes for r in p.reductions]
        lets = (*self.before, *self.lets, *(let for p in self.passes for let in p.then))
        found = [*super().names(), *(let.name for let in lets), *(r.name for r in reductions)]
        found += [r.peak for r in reductions if r.peak]
        return unique([*found, *(p.climb.name for p in self.passes if p.climb)])

    @property
    def columns(self) -> tuple[Output, ...]:
        """Outputs that are summed over rows."""
        return tuple(y for y in self.outputs if y.kind == "column")

    @property
    def constants(self) -> tuple[str, ...]:
        """The launch constants that follow the inputs."""
        return ("rows", "D", "chunk") if self.columns else ("rows", "D")

    @property
    def capped(self) -> bool:
        """Whether a row must fit in TPR·U·STEPS elements."""
        return bool(self.keep or self.columns)

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        ops = unique(r.op for p in self.passes for r in p.reductions)
        rows = [ROW_HEADER, *(REDUCTIONS[op].header for op in ops if op in REDUCTIONS)]
        return STEP_HEADER + header(self.inputs) + ("".join(rows) if self.passes else "")

    def source(self) -> str:
        """The body."""
        body = Body()
        for type_ in unique(r.type for p in self.passes for r in p.reductions):
            body.add(f"threadgroup {type_} scratch_{type_}[(TPR + 31) / 32];")
        body.add("const uint lane_ = thread_position_in_threadgroup.x % TPR;")
        body.add(
            "const uint group_ = threadgroup_position_in_grid.x"
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;"
        )
        body.add("const uint whole_ = D / U * U;")
        add_width(body, (*self.inputs, *self.outputs))
        for x in self.inputs:
            if x.kind == "scalar":
                body.add(f"const {x.type} {x.name} = {x.type}({array(x, '_in')});")
        add_keys(body, self.inputs)
        for y in self.columns:
            body.add(f"float {y.name}_sum[STEPS * U] = {{0}};")
            body.add(f"float {y.name}_sum_tail[(U + TPR - 1) / TPR] = {{0}};")
        if self.columns:
            body.add("const uint stop_ = uint(min(size_t(rows), (size_t(group_) + 1) * chunk));")
            body.open("for (uint row = group_ * chunk; row < stop_; ++row)")
            body.add("const bool live_ = true;")
        else:
            body.add("const uint slot_ = group_ * RPG + thread_position_in_threadgroup.x / TPR;")
            body.open("if (group_ * RPG >= rows)")
            body.add("return;")
            body.close()
            # A surplus row of the last group repeats the last row and stores nothing, so that
            # every thread reaches every simd operation.
            body.add("const bool live_ = RPG == 1 || slot_ < rows;")
            body.add("const uint row = live_ ? slot_ : rows - 1;")
        self._row(body)
        if self.columns:
            body.close()
            self._store_columns(body)
        return body.text()

    def _row(self, body: Body) -> None:
        self._row_pointers(body)
        add_row_counters(body, self.inputs)
        add_rest(body, self.inputs)
        for let in self.before:
            body.add(let.declaration())
        for check in self.checks:
            body.open(f"if (lane_ == 0 && live_ && ({check.condition}))")
            body.add(f'ZMLX_FAIL("{check.argument}", {check.value});')
            body.close()
        for name, x in {array(x, "_in"): x for x in self.inputs if elsewhere(x)}.items():
            body.add(row_pointer(x, name, x.index))
        for x in self.inputs:
            if x.kind == "at":
                spot = f"{array(x, '_in')}_row[{place(x, x.index)}]"
                body.add(f"const {x.type} {x.name} = {x.type}({spot});")
        kept: set[str] = set()
        sweeps = [tuple(r.expr for r in p.reductions) for p in self.passes]
        sweeps.append(tuple(y.expr for y in self.outputs if y.kind != "per_row"))
        last = len(self.passes) - (not sweeps[-1])
        types = self._types
        for name in self.keep:
            kind = types[name]
            body.add(f"{kind} {name}_kept[STEPS * U];")
            body.add(f"{kind} {name}_kept_tail[(U + TPR - 1) / TPR];")
        for index, step in enumerate(self.passes):
            climb = step.climb
            if climb:
                body.add(f"float {climb.name} = {climb.start};")
                body.open("for (;;)")
            for r in step.reductions:
                start_parts(body, r)
            later = needed_names((e for s in sweeps[index + 1 :] for e in s), self.lets)
            ahead = index == last and index > 0 and not climb
            self._sweep(body, sweeps[index], kept, later, step.reductions, ahead=ahead)
            for r in step.reductions:
                fold_parts(body, r)
            if climb:
                name, after = climb.name, f"{climb.name}_next"
                body.add(f"const float {after} = {climb.step};")
                body.add(f"const bool more_ = {after} > {name};")
                body.add(f"{name} = {after} <= {name} ? {name} : {after};")
                # Rows that share a simdgroup climb together: simd operations need all lanes.
                body.open("if (!simd_any(more_))")
                body.add("break;")
                body.close()
                body.close()
            for let in step.then:
                body.add(let.declaration())
        self._sweep(body, sweeps[-1], kept, set(), (), ahead=last > 0)
        per_row = [y for y in self.outputs if y.kind == "per_row"]
        if per_row:
            body.open("if (lane_ == 0 && live_)")
            for y in per_row:
                body.add(f"{array(y, '_out')}[row] = {y.name}_t({y.expr});")
            body.close()

    def _row_pointers(self, body: Body) -> None:
        done: set[str] = set()
        items: list[tuple[Operand | Output, str]] = [(x, "_in") for x in self.inputs]
        items += [(y, "_out") for y in self.outputs]
        for item, suffix in items:
            name = array(item, suffix)
            if item.kind in ("row", "at") and name not in done and not elsewhere(item):
                done.add(name)
                body.add(row_pointer(item, name, "row"))
        for x in self.inputs:
            if x.kind == "per_row":
                body.add(f"const {x.type} {x.name} = {x.type}({array(x, '_in')}[row]);")

    def _sweep(
        self,
        body: Body,
        exprs: tuple[str, ...],
        kept: set[str],
        later: set[str],
        reductions: tuple[Reduce, ...],
        *,
        ahead: bool = False,
    ) -> None:
        """One walk over the row: whole steps of U elements, then the tail."""
        if not exprs:
            return
        needed = needed_names(exprs, self.lets, kept)
        keeping = [n for n in self.keep if n in needed and n not in kept and n in later]
        if self.capped:
            body.open("for (uint s_ = 0; s_ < STEPS; ++s_)")
            body.add("const uint i_ = (s_ * TPR + lane_) * U;")
            body.open("if (i_ >= whole_)")
            body.add("break;")
            body.close()
        else:
            body.open("for (uint i_ = lane_ * U; i_ < whole_; i_ += TPR * U)")
        random = [x for x in drawn(self.inputs) if x.name in needed]
        if ahead:
            self._prefetch(body)
        for x in random:
            add_block(body, x, "U", f"{x.name}_first + i_ / 8")
        for x in self.inputs:
            if x.name in needed and x.kind in ("row", "column"):
                name = array(x, "_in") + ("_row" if x.kind == "row" else "")
                add_read_step(body, x, "U", f"{name} + {place(x, 'i_')}")
        for y in () if reductions else self.outputs:
            if y.kind == "row":
                pointer = f"{array(y, '_out')}_row + {place(y, 'i_')}"
                add_write_step(body, y, "U", pointer, "live_")
        body.open_step()
        body.add("const uint j = i_ + u_;")
        for x in random:
            body.add(f"const float {x.name} = {x.name}_drawn[u_];")
        self._element(body, needed, kept, keeping, reductions, "u_", "", "s_ * U + u_")
        body.close()
        body.close()
        body.open("for (uint k_ = 0; k_ < (U + TPR - 1) / TPR; ++k_)")
        body.add("const uint j = whole_ + k_ * TPR + lane_;")
        body.open("if (j < D)")
        for x in random:
            body.add(draw_of_rest(x))
        self._element(body, needed, kept, keeping, reductions, "0", "_tail", "k_")
        body.close()
        body.close()
        kept.update(keeping)

    def _prefetch(self, body: Body) -> None:
        """Asks for the next row, which one thread otherwise waits for in the first sweep while it
        has little arithmetic to do. The last sweep has the row itself in the cache."""
        rows = [x for x in self.inputs if x.kind == "row" and not x.index]
        if not rows:
            return
        body.open(f"if (TPR == 1 && D <= {_LONGEST_AHEAD})")
        body.add("const uint places_ = ZMLX_PLACES_AHEAD;")
        body.add(
            "const uint ahead_ = i_ / U % places_ * (whole_ / U / places_ * U)"
            " + i_ / U / places_ * U;"
        )
        for x in rows:
            width = "D" if x.parts == 1 else f"(D * {x.parts})"
            pointer = f"{array(x, '_in')}_row"
            spot = place(x, "ahead_")
            body.open(f"for (uint p_ = 0; p_ < U; p_ += 64 / sizeof(*{pointer}))")
            body.add(f"ZMLX_PREFETCH_FAR({pointer} + {width} + {spot} + p_);")
            body.close()
        body.close()

    def _element(
        self,
        body: Body,
        needed: set[str],
        kept: set[str],
        keeping: list[str],
        reductions: tuple[Reduce, ...],
        part: str,
        tail: str,
        slot: str,
    ) -> None:
        for x in self.inputs:
            if x.name not in needed or x.kind not in ("row", "column"):
                continue
            name = array(x, "_in") + ("_row" if x.kind == "row" else "")
            value = f"{x.type}({name}[{place(x, 'j')}])" if tail else at_step(x, "u_")
            if x.name in kept:
                # One thread has its row in the cache already; a copy of it would only push it out.
                value = f"TPR == 1 ? {value} : {x.name}_kept{tail}[{slot}]"
            body.add(f"const {x.type} {x.name} = {value};")
        for let in self.lets:
            if let.name in kept and let.name in needed:
                body.add(f"const {let.type} {let.name} = {let.name}_kept{tail}[{slot}];")
            elif let.name in needed:
                body.add(let.declaration())
        for name in keeping:
            body.add(f"{name}_kept{tail}[{slot}] = {name};")
        for r in reductions:
            update_part(body, r, part)
        if not reductions:
            self._store(body, tail, slot)

    def _store(self, body: Body, tail: str, slot: str) -> None:
        rows = [y for y in self.outputs if y.kind == "row"]
        guarded = bool(rows) and not self.columns
        if guarded:
            body.open("if (live_)")
        for y in rows:
            spot = f"{array(y, '_out')}_row[{place(y, 'j')}]"
            body.add(f"{spot} = {y.name}_t({y.expr});" if tail else set_step(y, "u_"))
        if guarded:
            body.close()
        for y in self.columns:
            body.add(f"{y.name}_sum{tail}[{slot}] += {y.expr};")

    def _store_columns(self, body: Body) -> None:
        body.open("for (uint s_ = 0; s_ < STEPS; ++s_)")
        body.add("const uint i_ = (s_ * TPR + lane_) * U;")
        body.open_step()
        body.open("if (i_ + u_ < whole_)")
        for y in self.columns:
            body.add(
                f"{array(y, '_out')}[size_t(group_) * D + i_ + u_] = {y.name}_sum[s_ * U + u_];"
            )
        body.close()
        body.close()
        body.close()
        body.open("for (uint k_ = 0; k_ < (U + TPR - 1) / TPR; ++k_)")
        body.add("const uint j = whole_ + k_ * TPR + lane_;")
        body.open("if (j < D)")
        for y in self.columns:
            body.add(f"{array(y, '_out')}[size_t(group_) * D + j] = {y.name}_sum_tail[k_];")
        body.close()
        body.close()


def elsewhere(item: Operand | Output) -> bool:
    """Whether an operand's row is not the row of the outputs."""
    return isinstance(item, Operand) and item.kind == "row" and bool(item.index)


def row_pointer(item: Operand | Output, name: str, row: str) -> str:
    """The declaration of a pointer to a row of the array `name`."""
    width = "D" if item.parts == 1 else f"(D * {item.parts})"
    return f"auto {name}_row = {name} + size_t({row}) * {width};"
