"""Scans along one axis: running sums, products and linear recurrences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .monoids import MONOIDS, Monoid, add_merge, check, names_of
from .parts import Operand, Output
from .pattern import Pattern
from .text import STEP_HEADER, Body, add_read_step, add_write_step, set_step, unique

#: Neighbours that a thread scans one after another.
_RUN = 16
#: The loop over the elements of a step that ends with them.
_PART_OF_STEP = "for (uint u_ = 0; u_ < U && i_ + u_ < stop_; ++u_)"


@dataclass(frozen=True)
class Scan(Pattern):
    """out[j] = expr(state), where the state is that of the elements up to j.

    The array `x` is (rows, D) and is scanned along D, or with `columns` (batches, rows, D) and is
    scanned along `rows`. `others` are further operands of the same shape. `lift` writes the state
    of an element in terms of the operands (default: that of `x`), and the outputs name variables of
    the state and operands. With `reverse` the state is that of the elements from j on; with
    `exclusive` element j is not in it.

    The scanned axis is cut into `parts` of `chunk` elements. With more than one, an input for each
    variable holds the states of the parts, as a `Fold` with `cut` makes them: two launches.

    Launch: as that of `Fold`. A thread scans U neighbours of a row in short runs, and the threads
    of a row scan their totals.
    """

    op: str
    outputs: tuple[Output, ...]
    type: str = "float"
    columns: bool = False
    reverse: bool = False
    exclusive: bool = False
    others: tuple[str, ...] = ()
    lift: tuple[str, ...] = ()
    cut: bool = False

    def __post_init__(self) -> None:
        check(self.op, self.type)
        count, wanted = len(self.lift or ("x",)), len(self.monoid.states)
        if count != wanted:
            raise ValueError(f"[codegen] 'lift' must have {wanted} entries but got {count}.")
        super().__post_init__()

    @property
    def monoid(self) -> Monoid:
        """What is scanned."""
        return MONOIDS[self.op]

    @property
    def inputs(self) -> tuple[Operand, ...]:  # type: ignore[override]
        """The operands."""
        elements = tuple(Operand(n, "row", self.type) for n in ("x", *self.others))
        types = self.monoid.types(self.type)
        states = tuple(Operand(f"{n}_of_part", "row", t) for n, t in types.items())
        return (*elements, *states) if self.cut else elements

    def names(self) -> tuple[str, ...]:
        """What the pattern names."""
        return unique([*(x.name for x in self.inputs), *(y.name for y in self.outputs)])

    @property
    def constants(self) -> tuple[str, ...]:
        """The launch constants that follow the inputs."""
        leading = ("batches", "rows") if self.columns else ("rows",)
        return (*leading, "D", "parts", "chunk")

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        return STEP_HEADER

    def source(self) -> str:
        """The body."""
        body = Body()
        if self.columns:
            self._columns(body)
        else:
            self._rows(body)
        return body.text()

    @property
    def _types(self) -> dict[str, str]:
        return self.monoid.types(self.type)

    def _start(self, body: Body, spell: Callable[[str], str], declare: bool = True) -> None:
        for name, value in self.monoid.started(self.type, "0").items():
            body.add(f"{self._types[name] + ' ' if declare else ''}{spell(name)} = {value};")

    def _load(self, body: Body, place: str) -> dict[str, str]:
        """Declares the operands at `place`, and gives the state of the element."""
        for name in ("x", *self.others):
            body.add(f"const {self.type} {name} = {self.type}({name}_in_{place});")
        lift = self.lift or ("x",)
        return dict(zip(self.monoid.names, lift, strict=True))

    def _before(self, body: Body, place: str, carry: Callable[[str], str]) -> None:
        """Takes the states of the parts before this one into the carry."""
        if not self.cut:
            return
        ends = ("parts - 1", "p_ > part_", "--p_") if self.reverse else ("0", "p_ < part_", "++p_")
        body.open(f"for (uint p_ = {ends[0]}; {ends[1]}; {ends[2]})")
        if self.columns:
            body.open("for (uint n_ = 0; n_ < width_; ++n_)")
        for name, type_ in self._types.items():
            body.add(f"const {type_} {name}_next = {name}_of_part_in[{place}];")
        other = names_of(self.monoid, lambda n: f"{n}_next")
        add_merge(body, self.monoid, names_of(self.monoid, carry), other)
        if self.columns:
            body.close()
        body.close()

    # ---- rows -----------------------------------------------------------------------------------

    def _rows(self, body: Body) -> None:
        types = self._types
        for name, type_ in types.items():
            body.add(f"threadgroup {type_} {name}_scratch[(TPR + 31) / 32];")
        body.add("const uint lane_ = thread_position_in_threadgroup.x % TPR;")
        body.add(
            "const uint group_ = threadgroup_position_in_grid.x"
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;"
        )
        body.add("const uint items_ = rows * parts;")
        body.open("if (group_ * RPG >= items_)")
        body.add("return;")
        body.close()
        body.add("const uint slot_ = group_ * RPG + thread_position_in_threadgroup.x / TPR;")
        body.add("const bool live_ = RPG == 1 || slot_ < items_;")
        body.add("const uint item_ = live_ ? slot_ : items_ - 1;")
        body.add("const uint part_ = item_ % parts;")
        body.add("const uint first_ = part_ * chunk;")
        body.add("const uint stop_ = chunk < D - first_ ? first_ + chunk : D;")
        # As many steps for every part, so that all threads reach every simd operation.
        body.add("const uint steps_ = (chunk + TPR * U - 1) / (TPR * U);")
        for name in ("x", *self.others):
            body.add(f"auto {name}_in_row = {name}_in + size_t(item_ / parts) * D;")
        for y in self.outputs:
            body.add(f"auto {y.name}_out_row = {y.name}_out + size_t(item_ / parts) * D;")
        self._start(body, lambda n: f"{n}_carry")
        self._before(body, "item_ / parts * parts + p_", lambda n: f"{n}_carry")
        body.open("for (uint t_ = 0; t_ < steps_; ++t_)")
        # A reversed scan visits steps and lanes from the end.
        step, lane = ("steps_ - 1 - t_", "TPR - 1 - lane_") if self.reverse else ("t_", "lane_")
        body.add(f"const uint i_ = first_ + (({step}) * TPR + ({lane})) * U;")
        body.add("const bool full_ = i_ + U <= stop_;")
        # From a pointer, since a sum of indices that may wrap keeps the loops from vectorising.
        for name in ("x", *self.others):
            body.add(f"auto {name}_in_step = {name}_in_row + i_;")
        for y in self.outputs:
            body.add(f"auto {y.name}_out_step = {y.name}_out_row + i_;")
        for name, type_ in types.items():
            body.add(f"{type_} {name}_part[U], {name}_own[U];")
        # In a loop of its own, which converts whole registers.
        body.open("if (full_)")
        for name in ("x", *self.others):
            add_read_step(body, Operand(name), "U", f"{name}_in_row + i_")
        body.open_step()
        lifted = self._load(body, "step[u_]")
        for name in types:
            body.add(f"{name}_own[u_] = {lifted[name]};")
        body.close()
        body.depth -= 1
        body.open("} else")
        body.open_step()
        self._start(body, lambda n: f"{n}_own[u_]", declare=False)
        body.close()
        body.open(_PART_OF_STEP)
        lifted = self._load(body, "step[u_]")
        for name in types:
            body.add(f"{name}_own[u_] = {lifted[name]};")
        body.close()
        body.close()
        self._runs(body)
        self._lanes(body)
        self._join_runs(body)
        self._row_outputs(body)
        for name in types:
            body.add(f"{name}_carry = TPR > 1 ? {name}_after : {name}_before;")
        body.close()

    def _runs(self, body: Body) -> None:
        """The elements of a thread: runs of neighbours, which do not wait for each other."""
        monoid, types = self.monoid, self._types
        # Signed, since an index that may wrap keeps the loops from vectorising.
        body.add(f"const int run_ = U % {_RUN} == 0 ? {_RUN} : U;")
        for name, type_ in types.items():
            body.add(f"{type_} {name}_run[U % {_RUN} == 0 ? U / {_RUN} : 1];")
        body.open("for (int r_ = 0; r_ < int(U) / run_; ++r_)")
        self._start(body, lambda n: n)
        body.open("for (int q_ = 0; q_ < run_; ++q_)")
        body.add(f"const int k_ = r_ * run_ + {'run_ - 1 - q_' if self.reverse else 'q_'};")
        stores = [f"{name}_part[k_] = {name};" for name in types]
        if self.exclusive:
            body.add(*stores)
        own = names_of(monoid, lambda n: n)
        add_merge(body, monoid, own, names_of(monoid, lambda n: f"{n}_own[k_]"))
        if not self.exclusive:
            body.add(*stores)
        body.close()
        for name in types:
            body.add(f"{name}_run[r_] = {name};")
        body.close()

    def _join_runs(self, body: Body) -> None:
        """Takes `before`, and then each run, into the elements that follow."""
        monoid, types = self.monoid, self._types
        before = names_of(monoid, lambda n: f"{n}_before")
        body.open("for (int r_ = 0; r_ < int(U) / run_; ++r_)")
        body.add(f"const int front_ = {'int(U) / run_ - 1 - r_' if self.reverse else 'r_'};")
        body.open("for (int u_ = 0; u_ < run_; ++u_)")
        for name, type_ in types.items():
            body.add(f"{type_} {name} = {name}_before;")
        part = names_of(monoid, lambda n: f"{n}_part[front_ * run_ + u_]")
        add_merge(body, monoid, names_of(monoid, lambda n: n), part)
        for name in types:
            body.add(f"{part[name]} = {name};")
        body.close()
        add_merge(body, monoid, before, names_of(monoid, lambda n: f"{n}_run[front_]"))
        body.close()

    def _lanes(self, body: Body) -> None:
        """`before`: the state before this thread's elements; `after`: that after the step."""
        monoid, types = self.monoid, self._types
        total = names_of(monoid, lambda n: f"{n}_total")
        for name, type_ in types.items():
            body.add(f"{type_} {name}_before = {name}_carry;")
            body.add(f"{type_} {name}_after = {name}_carry;")
        before = names_of(monoid, lambda n: f"{n}_before")
        after = names_of(monoid, lambda n: f"{n}_after")
        body.open("if (TPR > 1)")
        end = "int(U) / run_ - 1" if self.reverse else "0"
        for name, type_ in types.items():
            body.add(f"{type_} {name}_total = {name}_run[{end}];")
        body.open("for (int r_ = 1; r_ < int(U) / run_; ++r_)")
        body.add(f"const int front_ = {'int(U) / run_ - 1 - r_' if self.reverse else 'r_'};")
        add_merge(body, monoid, total, names_of(monoid, lambda n: f"{n}_run[front_]"))
        body.close()
        # An inclusive scan of the totals over the lanes of a simdgroup that share a row.
        body.add("const uint place_ = lane_ % 32;")
        body.open("for (ushort step_ = 1; step_ < (TPR < 32 ? TPR : 32); step_ *= 2)")
        for name, type_ in types.items():
            body.add(f"{type_} {name}_left = simd_shuffle_up({name}_total, step_);")
        left = names_of(monoid, lambda n: f"{n}_left")
        add_merge(body, monoid, left, total)
        for name in types:
            body.add(f"{name}_total = place_ >= step_ ? {name}_left : {name}_total;")
        body.close()
        for name, type_ in types.items():
            body.add(f"const {type_} {name}_next = simd_shuffle_up({name}_total, ushort(1));")
        lefts = names_of(monoid, lambda n: f"{n}_next")
        body.open("if (TPR > 32)")
        body.add("threadgroup_barrier(mem_flags::mem_threadgroup);")
        body.open("if (place_ == 31 || lane_ == TPR - 1)")
        for name in types:
            body.add(f"{name}_scratch[lane_ / 32] = {name}_total;")
        body.close()
        body.add("threadgroup_barrier(mem_flags::mem_threadgroup);")
        for name in types:
            body.add(f"{name}_after = {name}_carry;")
        body.open("for (uint s_ = 0; s_ < (TPR + 31) / 32; ++s_)")
        body.open("if (s_ == lane_ / 32)")
        for name in types:
            body.add(f"{name}_before = {name}_after;")
        body.close()
        add_merge(body, monoid, after, names_of(monoid, lambda n: f"{n}_scratch[s_]"))
        body.close()
        body.depth -= 1
        body.open("} else")
        body.add("const uint last_ = thread_index_in_simdgroup - lane_ + TPR - 1;")
        for name, type_ in types.items():
            body.add(
                f"const {type_} {name}_right = simd_shuffle({name}_total, ushort(last_));",
                f"{name}_after = {name}_carry;",
            )
        add_merge(body, monoid, after, names_of(monoid, lambda n: f"{n}_right"))
        body.close()
        body.open("if (place_ > 0)")
        add_merge(body, monoid, before, lefts)
        body.close()
        body.close()

    def _row_outputs(self, body: Body) -> None:
        types = self._types
        body.open("if (live_ && full_)")
        for whole in (True, False):
            if whole:
                for name in self.others:
                    add_read_step(body, Operand(name), "U", f"{name}_in_row + i_")
                for y in self.outputs:
                    add_write_step(body, y, "U", f"{y.name}_out_row + i_", "true")
                body.open_step()
            else:
                body.open(_PART_OF_STEP)
            for name, type_ in types.items():
                body.add(f"const {type_} {name} = {name}_part[u_];")
            for name in self.others:
                body.add(f"const {self.type} {name} = {self.type}({name}_in_step[u_]);")
            for y in self.outputs:
                alone = f"{y.name}_out_step[u_] = {y.name}_t({y.expr});"
                body.add(set_step(y, "u_") if whole else alone)
            body.close()
            if whole:
                body.depth -= 1
                body.open("} else if (live_)")
        body.close()

    # ---- columns --------------------------------------------------------------------------------

    def _columns(self, body: Body) -> None:
        body.add(
            "const uint group_ = threadgroup_position_in_grid.x"
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;"
        )
        body.add("const uint blocks_ = (D + N * G - 1) / (N * G);")
        body.add("const uint item_ = group_ / blocks_;")
        body.add("const uint place_ = group_ % blocks_ * G + thread_position_in_threadgroup.x;")
        body.add("const uint column_ = place_ * N;")
        body.open("if (item_ >= batches * parts || column_ >= D)")
        body.add("return;")
        body.close()
        body.add("const uint part_ = item_ % parts;")
        body.add("const uint first_ = part_ * chunk;")
        body.add("const uint stop_ = chunk < rows - first_ ? first_ + chunk : rows;")
        body.add("const uint width_ = min(uint(N), D - column_);")
        body.add("const size_t base_ = size_t(item_ / parts) * rows * D + column_;")
        for name, type_ in self._types.items():
            body.add(f"{type_} {name}_carry[N];")
        body.open("for (uint n_ = 0; n_ < width_; ++n_)")
        self._start(body, lambda n: f"{n}_carry[n_]", declare=False)
        body.close()
        place = "size_t(item_ / parts * parts + p_) * D + column_ + n_"
        self._before(body, place, lambda n: f"{n}_carry[n_]")
        body.add("uint t_ = first_;", "const size_t apart_ = D;")
        # Some rows at a time, so that what they carry is stored once: stores that hit the cache
        # wait behind those of the outputs, which miss it. Rows that a thread has whole are one
        # stretch of memory, which it had better walk from one end to the other.
        count = self._together
        body.open(f"for (; D > N && width_ == N && stop_ - t_ >= {count}; t_ += {count})")
        body.add(f"const uint i_ = {f'stop_ - {count} - (t_ - first_)' if self.reverse else 't_'};")
        self._column_rows(body)
        body.open("for (uint n_ = 0; n_ < N; ++n_)")
        self._column_state(body)
        body.open_few_rows(count)
        row = f"({count - 1} - r_)" if self.reverse else "r_"
        body.add(f"const size_t at_ = {row} * apart_ + n_;")
        self._column_element(body, "at_")
        body.close()
        self._column_carry(body)
        body.close()
        body.close()
        body.open("for (; t_ < stop_; ++t_)")
        body.add(f"const uint i_ = {'stop_ - 1 - (t_ - first_)' if self.reverse else 't_'};")
        self._column_rows(body)
        body.open("for (uint n_ = 0; n_ < width_; ++n_)")
        self._column_state(body)
        self._column_element(body, "n_")
        self._column_carry(body)
        body.close()
        body.close()

    @property
    def _together(self) -> int:
        """Rows that a thread scans at a time: each has a pointer for every operand, and a compiler
        checks each output's against all of them."""
        return 4 if self.others else 8

    def _column_rows(self, body: Body) -> None:
        for name in ("x", *self.others):
            body.add(f"auto {name}_in_row = {name}_in + base_ + size_t(i_) * D;")
        for y in self.outputs:
            body.add(f"auto {y.name}_out_row = {y.name}_out + base_ + size_t(i_) * D;")

    def _column_state(self, body: Body) -> None:
        for name, type_ in self._types.items():
            body.add(f"{type_} {name} = {name}_carry[n_];")

    def _column_carry(self, body: Body) -> None:
        for name in self._types:
            body.add(f"{name}_carry[n_] = {name};")

    def _column_element(self, body: Body, place: str) -> None:
        monoid, types = self.monoid, self._types
        lifted = self._load(body, f"row[{place}]")
        body.add(*(f"const {t} {n}_next = {lifted[n]};" for n, t in types.items()))
        own = names_of(monoid, lambda n: n)
        other = names_of(monoid, lambda n: f"{n}_next")
        stores = [f"{y.name}_out_row[{place}] = {y.name}_t({y.expr});" for y in self.outputs]
        if self.exclusive:
            body.add(*stores)
        add_merge(body, monoid, own, other)
        if not self.exclusive:
            body.add(*stores)
