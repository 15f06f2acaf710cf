"""Reductions of one axis to a state: sums, extremes, their positions, moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .monoids import MONOIDS, RANGES, Monoid, add_merge, check, fill, names_of
from .parts import Operand, Output
from .pattern import Pattern
from .reductions import PREFETCH_HEADER
from .text import STEP_HEADER, Body, add_read_step, unique

#: Steps that are summed before their sum is added to the total.
_BLOCK = 64

#: Rows that are folded at a time along columns, and columns of which the next are asked for.
_ROWS = 8
_COLUMNS = 64


def _across(name: str, type_: str) -> str:
    """The variable of the lane `step_` away. Metal shuffles no 64 bits; MLX adds `simd_shuffle` for
    them, and no `simd_shuffle_xor`."""
    if type_ in ("int64_t", "uint64_t"):
        return f"simd_shuffle({name}, ushort(thread_index_in_simdgroup ^ step_))"
    return f"simd_shuffle_xor({name}, step_)"


@dataclass(frozen=True)
class Fold(Pattern):
    """out = expr(state), where the state is that of the elements along one axis.

    The array `x` is (rows, D) and D is folded, or with `columns` (batches, rows, D) and `rows` is
    folded. With `merges` the elements are states themselves: an array for each variable, named
    after it. Expressions of the outputs name the variables of the state and the scalars.

    With `cut` the folded axis is cut into `parts` of `chunk` elements, an output for each: (rows,
    parts) or (batches, parts, D), the parts of a scan if it is `for_scan`. So a long axis is two
    launches, of which the second merges; both fold in an order that no number of threads changes.

    Rows that are `short` are not shared by threads: each folds N whole ones, side by side, as many
    as a processor's vectors hold. They are never cut.

    Launch of rows: TPR·RPG threads per group and RPG parts of rows per group, groups along x then
    y; of columns: G threads per group, N columns per thread; of short rows: G threads per group.
    """

    op: str
    outputs: tuple[Output, ...]
    type: str = "float"
    columns: bool = False
    merges: bool = False
    cut: bool = False
    for_scan: bool = False
    short: bool = False
    scalars: tuple[Operand, ...] = ()

    def __post_init__(self) -> None:
        check(self.op, self.type)
        if self.short and (self.columns or self.merges or self.cut):
            raise ValueError(
                "[codegen] 'short' must be False with columns, merges or cut but got True."
            )
        for x in self.scalars:
            if x.kind != "scalar":
                raise ValueError(f"[codegen] 'scalars' must be of kind scalar but got {x.kind}.")
        super().__post_init__()

    @property
    def monoid(self) -> Monoid:
        """What is folded."""
        return MONOIDS[self.op]

    @property
    def inputs(self) -> tuple[Operand, ...]:  # type: ignore[override]
        """The operands."""
        types = self.monoid.types(self.type)
        elements = (
            tuple(Operand(name, "row", types[name]) for name in types)
            if self.merges
            else (Operand("x", "row", self.type),)
        )
        return (*elements, *self.scalars)

    def names(self) -> tuple[str, ...]:
        """What the pattern names; outputs may be variables of the state."""
        return unique([*(x.name for x in self.inputs), *(y.name for y in self.outputs)])

    @property
    def constants(self) -> tuple[str, ...]:
        """The launch constants that follow the inputs."""
        leading = ("batches", "rows") if self.columns else ("rows",)
        return (*leading, "D", "parts", "chunk")

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        if self.short:
            return ""
        steps = "" if self.columns and self.merges else STEP_HEADER
        return steps + ("" if self.merges else PREFETCH_HEADER)

    def source(self) -> str:
        """The body."""
        body = Body()
        if self.columns:
            self._columns(body)
        elif self.short:
            self._short_rows(body)
        else:
            self._rows(body)
        return body.text()

    # ---- rows -----------------------------------------------------------------------------------

    def _rows(self, body: Body) -> None:
        types = self.monoid.types(self.type)
        for name, type_ in types.items():
            body.add(f"threadgroup {type_} {name}_scratch[TPR % 32 == 0 ? TPR / 32 : TPR];")
        body.add("const uint lane_ = thread_position_in_threadgroup.x % TPR;")
        body.add(
            "const uint group_ = threadgroup_position_in_grid.x"
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;"
        )
        body.add("const uint items_ = rows * parts;")
        body.open("if (group_ * RPG >= items_)")
        body.add("return;")
        body.close()
        # A surplus item of the last group repeats the last one and stores nothing, so that every
        # thread reaches every simd operation.
        body.add("const uint slot_ = group_ * RPG + thread_position_in_threadgroup.x / TPR;")
        body.add("const bool live_ = RPG == 1 || slot_ < items_;")
        body.add("const uint item_ = live_ ? slot_ : items_ - 1;")
        body.add("const uint first_ = item_ % parts * chunk;")
        body.add("const uint stop_ = chunk < D - first_ ? first_ + chunk : D;")
        body.add("const uint whole_ = first_ + (stop_ - first_) / U * U;")
        for x in self._elements:
            body.add(f"auto {x.name}_in_row = {x.name}_in + size_t(item_ / parts) * D;")
        if self.monoid.shifted and not self.merges:
            last = self._last("D", "x_in_row[D - 1]")
            body.add(f"const {self.type} shift_ = {last};")
        self._walk(body, "U", "u_", "TPR * U", ("first_ + lane_ * U", "whole_"), self._row_step)
        body.open("for (uint k_ = 0; whole_ < stop_ && k_ < (U + TPR - 1) / TPR; ++k_)")
        body.add("const uint j = whole_ + k_ * TPR + lane_;")
        body.open("if (j < stop_)")
        other = self._load(body, "row[j]", "j")
        add_merge(body, self.monoid, self._own("k_"), other)
        body.close()
        body.close()
        self._fold_row(body, types)
        body.open("if (lane_ == 0 && live_)")
        self._store(body, "[item_]")
        body.close()

    def _row_step(self, body: Body, suffix: str) -> None:
        if not self.merges:
            self._prefetch(body)
        # From a pointer, since a sum of indices that may wrap keeps the loop from vectorising.
        for x in self._elements:
            add_read_step(body, x, "U", f"{x.name}_in_row + i_")
        body.open_step()
        body.add("const uint j = i_ + u_;")
        other = self._load(body, "step[u_]", "j")
        add_merge(body, self.monoid, self._own("u_", suffix), other, quick=not self.merges)
        body.close()

    def _prefetch(self, body: Body) -> None:
        """Asks for what one thread reads a page of 4096 bytes later: a processor's own fetching
        ahead ends with a page."""
        body.add("const uint page_ = 4096 / sizeof(*x_in);")
        body.add("const uint places_ = ZMLX_PLACES_AHEAD;")
        body.add("const uint turn_ = (i_ - first_) / U % ((places_ * page_ - 1) / U + 1);")
        body.add(
            "const uint ahead_ = (places_ + turn_ % places_) * page_"
            " + turn_ / places_ * U - turn_ * U;"
        )
        body.open("for (uint p_ = 0; TPR == 1 && p_ < U; p_ += 64 / sizeof(*x_in))")
        body.add("ZMLX_PREFETCH_WALK_FAR(x_in_row + i_ + ahead_ + p_);")
        body.close()

    def _fold_row(self, body: Body, types: dict[str, str]) -> None:
        """The accumulators of a thread, then the threads of a row: by shuffles where simdgroups
        are full or a row is a power of two of their lanes, and over threadgroup memory."""
        monoid = self.monoid
        body.open("for (uint w_ = U / 2; w_ > 0; w_ /= 2)")
        body.open_step("w_")
        add_merge(body, monoid, self._own("u_"), self._own("u_ + w_"))
        body.close()
        body.close()
        for name, type_ in types.items():
            body.add(f"{type_} {name} = {name}_part[0];")
        state = names_of(monoid, lambda n: n)
        other = names_of(monoid, lambda n: f"{n}_next")
        body.add("const uint width_ = TPR % 32 == 0 ? 32 : (TPR & (TPR - 1)) == 0 ? TPR : 1;")
        body.open("for (ushort step_ = ushort(width_ / 2); step_ > 0; step_ /= 2)")
        for name, type_ in types.items():
            body.add(f"const {type_} {name}_next = {_across(name, type_)};")
        add_merge(body, monoid, state, other)
        body.close()
        body.open("if (TPR > width_)")
        body.open("if (lane_ % width_ == 0)")
        for name in types:
            body.add(f"{name}_scratch[lane_ / width_] = {name};")
        body.close()
        body.add("threadgroup_barrier(mem_flags::mem_threadgroup);")
        for name in types:
            body.add(f"{name} = {name}_scratch[0];")
        body.open("for (uint s_ = 1; s_ < TPR / width_; ++s_)")
        for name, type_ in types.items():
            body.add(f"const {type_} {name}_next = {name}_scratch[s_];")
        add_merge(body, monoid, state, other)
        body.close()
        body.close()

    # ---- short rows -----------------------------------------------------------------------------

    def _short_rows(self, body: Body) -> None:
        monoid = self.monoid
        body.add(
            "const uint group_ = threadgroup_position_in_grid.x"
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;"
        )
        body.add("const uint item_ = (group_ * G + thread_position_in_threadgroup.x) * N;")
        body.open("if (item_ >= rows)")
        body.add("return;")
        body.close()
        body.add("const uint first_ = 0, width_ = min(uint(N), rows - item_);")
        # From a pointer and a constant, so that loops over the rows are vectorised.
        body.add("auto x_in_first = x_in + size_t(item_) * D;", "const size_t apart_ = D;")
        if monoid.shifted:
            body.add(f"{self.type} shift_[N];")
            body.open("for (uint n_ = 0; n_ < width_; ++n_)")
            last = self._last("D", "x_in_first[n_ * apart_ + (apart_ - 1)]")
            body.add(f"shift_[n_] = {last};")
            body.close()
        self._start(body, "N", "n_")
        if monoid.step:
            body.add("uint steps_ = 0;")
        body.open("for (uint i_ = 0; i_ < D; ++i_)")
        if monoid.step:
            body.add(monoid.step)
        body.add("auto x_in_at = x_in_first + i_;")
        body.open("if (width_ == N)")
        for loop in ("n_ < N", "n_ < width_"):
            body.open(f"for (uint n_ = 0; {loop}; ++n_)")
            other = self._load(body, "at[n_ * apart_]", "i_")
            add_merge(body, monoid, self._own("n_"), other, quick=True)
            body.close()
            if loop == "n_ < N":
                body.depth -= 1
                body.open("} else")
        body.close()
        body.close()
        self._after(body, "n_")
        for y in self.outputs:
            body.add(f"auto {y.name}_out_first = {y.name}_out + item_;")
        self._store_all(body)

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
        body.add("const uint first_ = item_ % parts * chunk;")
        body.add("const uint stop_ = chunk < rows - first_ ? first_ + chunk : rows;")
        body.add("const uint width_ = min(uint(N), D - column_);")
        for x in self._elements:
            body.add(
                f"auto {x.name}_in_first = {x.name}_in"
                " + size_t(item_ / parts) * rows * D + column_;"
            )
        if self.monoid.shifted and not self.merges:
            body.add(f"{self.type} shift_[N];")
            body.open("for (uint n_ = 0; n_ < width_; ++n_)")
            last = self._last("rows", "x_in_first[size_t(rows - 1) * D + n_]")
            body.add(f"shift_[n_] = {last};")
            body.close()
        self._walk(body, "N", "n_", "1", ("first_", "stop_"), self._column_step)
        # From a pointer, as a loop that reads D again after every store is not vectorised.
        for y in self.outputs:
            body.add(f"auto {y.name}_out_first = {y.name}_out + size_t(item_) * D + column_;")
        self._store_all(body)

    def _column_step(self, body: Body, suffix: str) -> None:
        for x in self._elements:
            body.add(f"auto {x.name}_in_row = {x.name}_in_first + size_t(i_) * D;")
        body.open("if (width_ == N)")
        for loop in ("n_ < N", "n_ < width_"):
            body.open(f"for (uint n_ = 0; {loop}; ++n_)")
            other = self._load(body, "row[n_]", "i_")
            add_merge(body, self.monoid, self._own("n_", suffix), other, quick=not self.merges)
            body.close()
            if loop == "n_ < N":
                body.depth -= 1
                body.open("} else")
        body.close()

    def _columns_together(self, body: Body, stop: str, suffix: str) -> None:
        """Some rows at a time, whose states are loaded and stored once. The rows after them are
        asked for meanwhile, for some columns at a time, since g++ makes no vectors of a loop that
        asks."""
        monoid, types = self.monoid, self.monoid.types(self.type)
        body.open(f"for (; width_ == N && {stop} - i_ >= {_ROWS}; i_ += {_ROWS})")
        body.add("auto x_in_rows = x_in_first + size_t(i_) * D;", "const size_t apart_ = D;")
        body.add(f"const uint some_ = N % {_COLUMNS} == 0 ? {_COLUMNS} : N;")
        body.open("for (uint m_ = 0; m_ < N; m_ += some_)")
        body.open(f"for (uint q_ = 0; q_ < {_ROWS}; ++q_)")
        body.open("for (uint p_ = 0; p_ < some_; p_ += 64 / sizeof(*x_in))")
        body.add(f"ZMLX_PREFETCH_FAR(x_in_rows + (q_ + {_ROWS}) * apart_ + m_ + p_);")
        body.close()
        body.close()
        body.open("for (uint n_ = m_; n_ < m_ + some_; ++n_)")
        for name, type_ in types.items():
            body.add(f"{type_} {name} = {name}{suffix}[n_];")
        body.open_few_rows(_ROWS)
        if monoid.step:
            body.add(monoid.step.replace("++steps_", "steps_ + r_ + 1"))
        other = self._load(body, "rows[r_ * apart_ + n_]", "(i_ + r_)")
        add_merge(body, monoid, names_of(monoid, lambda n: n), other, quick=True)
        body.close()
        for name in types:
            body.add(f"{name}{suffix}[n_] = {name};")
        body.close()
        body.close()
        if monoid.step:
            body.add(f"steps_ += {_ROWS};")
        body.close()

    # ---- all ------------------------------------------------------------------------------------

    @property
    def _is_wide(self) -> bool:
        """Whether a thread folds N columns or rows side by side."""
        return self.columns or self.short

    @property
    def _elements(self) -> tuple[Operand, ...]:
        return tuple(x for x in self.inputs if x.kind == "row")

    def _own(self, index: str, suffix: str = "_part") -> dict[str, str]:
        """The state of an accumulator."""
        return names_of(self.monoid, lambda n: f"{n}{suffix}[{index}]")

    def _last(self, count: str, element: str) -> str:
        """The last of `count` elements, or 0 where there are none."""
        return f"{count} > 0 ? {self.type}({element}) : {self.type}(0)"

    def _load(self, body: Body, place: str, index: str) -> dict[str, str]:
        """Declares the element at `place`, and gives its state."""
        if not self.merges:
            value = f"{self.type}(x_in_{place})"
            if self.monoid.shifted:
                value += " - shift_[n_]" if self._is_wide else " - shift_"
            body.add(f"const {self.type} v_ = {value};")
            return self.monoid.lifted(index)
        for x in self._elements:
            body.add(f"const {x.type} {x.name}_next = {x.type}({x.name}_in_{place});")
        return names_of(self.monoid, lambda n: f"{n}_next")

    def _start(self, body: Body, count: str, index: str, suffix: str = "_part") -> None:
        """Declares accumulators."""
        types = self.monoid.types(self.type)
        for name, type_ in types.items():
            body.add(f"{type_} {name}{suffix}[{count}];")
        self._open_loop(body)
        own = self._own(index, suffix)
        # Merging takes the lower of equal positions, so that no position is the highest.
        front = RANGES["uint"][1] if self.merges else "first_"
        for name, value in self.monoid.started(self.type, front).items():
            body.add(f"{own[name]} = {value};")
        body.close()

    def _open_loop(self, body: Body) -> None:
        """The loop over the accumulators."""
        if self._is_wide:
            body.open("for (uint n_ = 0; n_ < width_; ++n_)")
        else:
            body.open_step()

    def _walk(
        self,
        body: Body,
        count: str,
        index: str,
        step: str,
        ends: tuple[str, str],
        take: Callable[[Body, str], None],
    ) -> None:
        """All whole steps from the first of `ends` to the second."""
        monoid = self.monoid
        first, stop = ends
        self._start(body, count, index)
        plain = self.merges or not monoid.blocked
        if not plain:
            body.open(f"for (uint b_ = {first}; b_ < {stop}; b_ += {_BLOCK} * {step})")
            self._start(body, count, index, "_block")
            body.add(f"const uint end_ = min({stop}, b_ + {_BLOCK} * {step});")
            first, stop = "b_", "end_"
        if monoid.step and not self.merges:
            body.add("uint steps_ = 0;")
        start = f"uint i_ = {first}"
        if self.columns and not self.merges:
            body.add(f"{start};")
            self._columns_together(body, stop, "_part" if plain else "_block")
            start = ""
        body.open(f"for ({start}; i_ < {stop}; i_ += {step})")
        if monoid.step and not self.merges:
            body.add(monoid.step)
        take(body, "_part" if plain else "_block")
        body.close()
        if not plain:
            self._open_loop(body)
            add_merge(body, monoid, self._own(index), self._own(index, "_block"))
            body.close()
            body.close()
        if not self.merges:
            self._after(body, index)

    def _after(self, body: Body, index: str) -> None:
        """What follows the last step, for each accumulator."""
        if not self.monoid.after:
            return
        self._open_loop(body)
        body.add(*(fill(line, self._own(index), {}) for line in self.monoid.after))
        body.close()

    def _store_all(self, body: Body) -> None:
        """Stores the states of all columns or rows of a thread."""
        body.open("for (uint n_ = 0; n_ < width_; ++n_)")
        for name, type_ in self.monoid.types(self.type).items():
            body.add(f"const {type_} {name} = {name}_part[n_];")
        self._store(body, "_first[n_]")
        body.close()

    def _store(self, body: Body, place: str) -> None:
        """Stores the results at `place`, which follows the name of an output array."""
        for x in self.scalars:
            body.add(f"const {x.type} {x.name} = {x.type}({x.name}_in);")
        for y in self.outputs:
            body.add(f"{y.name}_out{place} = {y.name}_t({y.expr});")
