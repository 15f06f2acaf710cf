"""What patterns are made of: names, kinds and expressions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """An input. `kind` says which element of the array `array` belongs to element j of row r:

    "full"    element i of an elementwise kernel
    "row"     r·parts·D + part·D + j: a (rows, D) array, or slice `part` of a (rows, parts·D) one;
              with `index`, a name known before the first pass, that row instead of row r
    "column"  part·D + j: the same for every row, such as a weight
    "per_row" r: one value a row, such as a row statistic
    "at"      as "row", but the one element j = `index`, a name known before the first pass
    "scalar"  a 0-d array
    "random"  a float in [0, 1): number e of the stream (see philox.py) whose key is the 0-d array
              and whose first counter is `index`, where e is the number of the element, with rows
              padded to a multiple of eight, and `index` a scalar operand of type uint64_t
    """

    name: str
    kind: str = "row"
    type: str = "float"
    array: str = ""
    part: int = 0
    parts: int = 1
    index: str = ""


@dataclass(frozen=True)
class Let:
    """`type name = expr;`, per element or, after a pass, per row; rounded to the dtype of the
    output `rounded` if that is named."""

    name: str
    expr: str
    type: str = "float"
    rounded: str = ""

    def declaration(self) -> str:
        """The let as a statement."""
        value = f"{self.type}({self.rounded}_t({self.expr}))" if self.rounded else self.expr
        return f"const {self.type} {self.name} = {value};"


@dataclass(frozen=True)
class Reduce:
    """`name` = the reduction `op` of `expr` over the elements of a row; see `REDUCTIONS`.

    The op "sum_exp" is the sum of exp(expr - peak), in one walk; `peak` names the largest finite
    or infinite value of expr, at least -FLT_MAX, which comes with it.

    With `shift` it is taken off and given back, as the maximum of a softmax is: the outputs depend
    on it by rounding alone. A derivative in plain MLX leaves it out, since its parts would cancel
    but for their rounding, all of it at the largest element.
    """

    name: str
    op: str
    expr: str
    type: str = "float"
    peak: str = ""
    shift: bool = False


@dataclass(frozen=True)
class Climb:
    """`name` starts at `start` and becomes `step`, an expression of it and of the reductions of its
    pass, for as long as that is larger; NaN ends it, and is then its value."""

    name: str
    start: str
    step: str


@dataclass(frozen=True)
class Pass:
    """One sweep over a row: its reductions, then lets of the whole row. With `climb` the sweep is
    repeated until the climb ends, and only the value of the climb is known after it."""

    reductions: tuple[Reduce, ...]
    then: tuple[Let, ...] = ()
    climb: Climb | None = None


@dataclass(frozen=True)
class Check:
    """Reports that `argument` holds the bad integer `value` in a row where `condition` is true."""

    condition: str
    argument: str
    value: str


@dataclass(frozen=True)
class Output:
    """An output. `kind` is "full" or "row" (an element each), "per_row" (a value a row) or "column"
    (the sum over a chunk of rows, stored to row `chunk` of a (chunks, D) float array)."""

    name: str
    expr: str
    kind: str = "row"
    array: str = ""
    part: int = 0
    parts: int = 1
