"""Bodies over several sets of arrays in one launch, as optimizers need them: a parameter tree has
many small arrays, and each launch has its cost.

Arrays of one role share a dtype and an address space, so that a thread picks its set by a pointer.
Sizes are an input, `table`: for every set the number of its first thread (group), then for every
set its elements. The text knows the number of sets and nothing else about them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .elementwise import Elementwise
from .reductions import ROW_HEADER
from .text import Body, needed_names


def _choose(body: Body, index: str, names: list[str], count: int, span: str) -> None:
    """Declares the set of thread or group `index`, its pointers, and the elements that it covers,
    from `start_` to before `stop_`."""
    found = [f"uint({index} >= table[{k}])" for k in range(1, count)]
    body.add(f"const uint set_ = {' + '.join(found) or '0'};")
    body.add(f"const size_t start_ = size_t({index} - table[set_]) * {span};")
    body.add(f"const size_t stop_ = min(start_ + {span}, size_t(table[{count} + set_]));")
    for name in names:
        body.add(f"auto {name} = {name}_0;")
        for k in range(1, count):
            body.open(f"if (set_ == {k})")
            body.add(f"{name} = {name}_{k};")
            body.close()


@dataclass(frozen=True)
class Packed:
    """`each`, applied to `count` sets of arrays; its scalars are elements of the array `numbers`.

    Launch: one thread per N consecutive elements of a set, U at a time. The arrays of set k are
    `x_in_k` and `y_out_k`. An output may be the very array that an input is: a thread reads U
    elements of all inputs before it stores any.
    """

    each: Elementwise
    count: int

    @property
    def arrays(self) -> tuple[str, ...]:
        """The input arrays of a set."""
        return tuple(x.name for x in self.each.inputs if x.kind == "full")

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of `numbers`, in order."""
        return tuple(x.name for x in self.each.inputs if x.kind == "scalar")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are inputs."""
        sets = (f"{x}_in_{k}" for k in range(self.count) for x in self.arrays)
        return (*sets, "numbers", "table")

    @property
    def output_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are outputs."""
        return tuple(f"{y.name}_out_{k}" for k in range(self.count) for y in self.each.outputs)

    def source(self) -> str:
        """The body."""
        body, each = Body(), self.each
        body.add("const size_t thread_ = thread_position_in_grid.x;")
        names = [f"{x}_in" for x in self.arrays] + [f"{y.name}_out" for y in each.outputs]
        _choose(body, "thread_", names, self.count, "N")
        for k, name in enumerate(self.scalars):
            body.add(f"const float {name} = numbers[{k}];")
        body.add("size_t i_ = start_;")
        body.open("for (; i_ + U <= stop_; i_ += U)")
        for x in self.arrays:
            body.add(f"float {x}_kept[U];")
            body.open("for (uint u_ = 0; u_ < U; ++u_)")
            body.add(f"{x}_kept[u_] = float({x}_in[i_ + u_]);")
            body.close()
        for y in each.outputs:
            body.add(f"float {y.name}_kept[U];")
        body.open("for (uint u_ = 0; u_ < U; ++u_)")
        for x in self.arrays:
            body.add(f"const float {x} = {x}_kept[u_];")
        self._lets(body)
        for y in each.outputs:
            body.add(f"{y.name}_kept[u_] = {y.expr};")
        body.close()
        for y in each.outputs:
            body.open("for (uint u_ = 0; u_ < U; ++u_)")
            body.add(f"{y.name}_out[i_ + u_] = {y.name}_t({y.name}_kept[u_]);")
            body.close()
        body.close()
        body.open("for (; i_ < stop_; ++i_)")
        for x in self.arrays:
            body.add(f"const float {x} = float({x}_in[i_]);")
        self._lets(body)
        for y in each.outputs:
            body.add(f"const float {y.name} = {y.expr};")
        for y in each.outputs:
            body.add(f"{y.name}_out[i_] = {y.name}_t({y.name});")
        body.close()
        return body.text()

    def _lets(self, body: Body) -> None:
        needed = needed_names((y.expr for y in self.each.outputs), self.each.lets)
        for let in self.each.lets:
            if let.name in needed:
                body.add(let.declaration())


@dataclass(frozen=True)
class PackedSum:
    """Sums of `expr`, an expression of x, over the blocks of `count` arrays: an element of
    `total_out` per block.

    Launch: one group of TPR threads per BLOCK consecutive elements of an array.
    """

    expr: str
    count: int

    @property
    def input_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are inputs."""
        return (*(f"x_in_{k}" for k in range(self.count)), "table")

    @property
    def output_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are outputs."""
        return ("total_out",)

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        return ROW_HEADER

    def source(self) -> str:
        """The body."""
        body = Body()
        body.add("threadgroup float scratch_[(TPR + 31) / 32];")
        body.add("const uint lane_ = thread_position_in_threadgroup.x;")
        body.add("const size_t group_ = threadgroup_position_in_grid.x;")
        _choose(body, "group_", ["x_in"], self.count, "BLOCK")
        body.add("float sum_[U] = {0};")
        body.add("const size_t whole_ = start_ + (stop_ - start_) / U * U;")
        body.open("for (size_t i_ = start_ + lane_ * U; i_ < whole_; i_ += TPR * U)")
        body.open("for (uint u_ = 0; u_ < U; ++u_)")
        body.add("const float x = float(x_in[i_ + u_]);")
        body.add(f"sum_[u_] += {self.expr};")
        body.close()
        body.close()
        body.open("for (size_t i_ = whole_ + lane_; i_ < stop_; i_ += TPR)")
        body.add("const float x = float(x_in[i_]);")
        body.add(f"sum_[0] += {self.expr};")
        body.close()
        body.open("for (uint w_ = U / 2; w_ > 0; w_ /= 2)")
        body.open("for (uint u_ = 0; u_ < w_; ++u_)")
        body.add("sum_[u_] += sum_[u_ + w_];")
        body.close()
        body.close()
        body.add("const float all_ = zmlx_row_reduce<TPR, zmlx_sum>(sum_[0], scratch_, lane_);")
        body.open("if (lane_ == 0)")
        body.add("total_out[group_] = all_;")
        body.close()
        return body.text()


@dataclass(frozen=True)
class PackedInto:
    """`expr`, an expression of x and number, of all elements of `count` arrays, into one array:
    arrays that are written beside those that are read would take twice the buffers.

    Launch: one thread per N consecutive elements of an array. `table` has a third part, for every
    array the place of its first element in `y_out`.
    """

    expr: str
    count: int

    @property
    def input_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are inputs."""
        return (*(f"x_in_{k}" for k in range(self.count)), "numbers", "table")

    @property
    def output_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are outputs."""
        return ("y_out",)

    def source(self) -> str:
        """The body."""
        body = Body()
        body.add("const size_t thread_ = thread_position_in_grid.x;")
        _choose(body, "thread_", ["x_in"], self.count, "N")
        body.add(f"const size_t place_ = size_t(table[{2 * self.count} + set_]);")
        body.add("const float number = numbers[0];")
        body.open("for (size_t i_ = start_; i_ < stop_; ++i_)")
        body.add("const float x = float(x_in[i_]);")
        body.add(f"y_out[place_ + i_] = y_t({self.expr});")
        body.close()
        return body.text()
