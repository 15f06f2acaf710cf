"""Lanes that part and meet again: random programs of branches, loops, helpers and collectives, run
here and by a model that carries a mask of active lanes through the program's structure, as a GPU
does. Every collective sees exactly the lanes that the model says."""

from __future__ import annotations

import random
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from metal_source import Metal, in_every_schedule, run

Mask = np.ndarray  # one bool per lane
WORD = 0xFFFFFFFF


class Machine:
    """A simdgroup whose lanes each hold an accumulator `a`."""

    def __init__(self, lanes: int) -> None:
        self.lane = np.arange(lanes, dtype=np.uint64)
        self.a = self.lane * 2654435761 & WORD

    def collective(self, kind: str, constant: int, mask: Mask) -> None:
        value = self.a ^ constant
        if kind == "simd_sum":
            result = np.full_like(self.a, value[mask].sum() & WORD)
        elif kind == "simd_xor":
            result = np.full_like(self.a, np.bitwise_xor.reduce(value[mask]))
        elif kind == "simd_broadcast_first":
            result = np.full_like(self.a, value[mask][0])
        else:
            assert kind == "simd_prefix_exclusive_sum"
            result = np.zeros_like(self.a)
            result[mask] = (np.cumsum(value[mask]) - value[mask]) & WORD
        self.a = np.where(mask, (self.a * 3 + result) & WORD, self.a)


class Flow:
    """Lanes that left the statement sequence, by where they go."""

    def __init__(self, lanes: int) -> None:
        self.broke = np.zeros(lanes, bool)
        self.continued = np.zeros(lanes, bool)
        self.returned = np.zeros(lanes, bool)

    def gone(self) -> Mask:
        return self.broke | self.continued | self.returned


class Block(list):
    def run(self, machine: Machine, mask: Mask, flow: Flow) -> None:
        for statement in self:
            active = mask & ~flow.gone()
            if active.any():
                statement.run(machine, active, flow)

    def text(self) -> str:
        return "{\n" + "".join(statement.text() for statement in self) + "}\n"


class Collective:
    def __init__(self, rng: random.Random) -> None:
        self.kind = rng.choice(
            ["simd_sum", "simd_xor", "simd_broadcast_first", "simd_prefix_exclusive_sum"]
        )
        self.constant = rng.getrandbits(32)

    def run(self, machine: Machine, mask: Mask, flow: Flow) -> None:
        machine.collective(self.kind, self.constant, mask)

    def text(self) -> str:
        return f"a = a * 3 + {self.kind}(a ^ {self.constant}u);\n"


class Condition:
    """A condition on the lane's accumulator and index."""

    def __init__(self, rng: random.Random) -> None:
        self.shift, self.bits = rng.randrange(20), rng.choice([1, 1, 3, 7])
        self.wanted = rng.randrange(self.bits + 1)
        self.of_lane = rng.random() < 0.4

    def holds(self, machine: Machine) -> Mask:
        value = machine.lane if self.of_lane else machine.a >> self.shift
        return (value & self.bits) == self.wanted

    def text(self) -> str:
        value = "lane" if self.of_lane else f"a >> {self.shift}"
        return f"(({value}) & {self.bits}) == {self.wanted}"


class Branch:
    def __init__(self, rng: random.Random, depth: int, in_loop: bool) -> None:
        self.test = Condition(rng)
        self.yes = block(rng, depth - 1, in_loop)
        self.no = block(rng, depth - 1, in_loop)

    def run(self, machine: Machine, mask: Mask, flow: Flow) -> None:
        taken = self.test.holds(machine)
        self.yes.run(machine, mask & taken, flow)
        self.no.run(machine, mask & ~taken, flow)

    def text(self) -> str:
        return f"if ({self.test.text()}) {self.yes.text()} else {self.no.text()}"


class Leave:
    """`if (…) break;`, `continue` or `return`."""

    def __init__(self, rng: random.Random, ways: list[str]) -> None:
        self.test, self.way = Condition(rng), rng.choice(ways)

    def run(self, machine: Machine, mask: Mask, flow: Flow) -> None:
        left = {"break": flow.broke, "continue": flow.continued, "return a": flow.returned}
        left[self.way] |= mask & self.test.holds(machine)

    def text(self) -> str:
        return f"if ({self.test.text()}) {self.way};\n"


class Loop:
    """A loop whose lanes take different numbers of turns, in one of four spellings."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.name = f"i{rng.getrandbits(30)}"
        self.factor, self.least, self.modulo = rng.randrange(1, 7), rng.randrange(3), 4
        self.body = block(rng, depth - 1, True)
        self.spelling = rng.choice(["for", "bare for", "while", "endless", "do"])

    def run(self, machine: Machine, mask: Mask, flow: Flow) -> None:
        turns = (machine.lane * self.factor % self.modulo + self.least).astype(int)
        if self.spelling == "do":
            turns = np.maximum(turns, 1)
        inner = Flow(len(mask))
        for turn in range(turns[mask].max()):
            active = mask & (turn < turns) & ~inner.broke & ~inner.returned
            inner.continued[:] = False
            self.body.run(machine, active, inner)
        flow.returned |= inner.returned

    def text(self) -> str:
        i, body = self.name, self.body.text()
        turns = f"lane * {self.factor} % {self.modulo} + {self.least}"
        if self.spelling == "while":
            return f"{{ uint {i} = 0; while ({i}++ < {turns}) {body} }}"
        if self.spelling == "endless":
            return f"for (uint {i} = 0;; ++{i}) {{ if ({i} >= {turns}) break; {body} }}"
        if self.spelling == "do":
            return f"{{ uint {i} = 0; do {body} while (++{i} < {turns}); }}"
        if self.spelling == "bare for":
            return f"for (uint {i} = 0; {i} < {turns}; ++{i}) if (true) {body} else lane = 0;\n"
        return f"for (uint {i} = 0; {i} < {turns}; ++{i}) {body}"


class Call:
    """A call of a helper, at any number of places; its collectives are apart at each of them."""

    helpers: ClassVar[list[Block]] = []

    def __init__(self, rng: random.Random) -> None:
        self.number = rng.randrange(len(self.helpers))

    def run(self, machine: Machine, mask: Mask, flow: Flow) -> None:
        self.helpers[self.number].run(machine, mask, Flow(len(mask)))

    def text(self) -> str:
        return f"a = helper{self.number}(a, lane);\n"


def block(rng: random.Random, depth: int, in_loop: bool) -> Block:
    statements: list[object] = []
    for _ in range(rng.randrange(1, 4)):
        choice = rng.random()
        if choice < 0.35 or depth == 0:
            statements.append(Collective(rng))
        elif choice < 0.55:
            statements.append(Branch(rng, depth, in_loop))
        elif choice < 0.75:
            statements.append(Loop(rng, depth))
        elif choice < 0.9 and Call.helpers:
            statements.append(Call(rng))
        else:
            ways = ["return a"] + (["break", "continue"] * 2 if in_loop else [])
            statements.append(Leave(rng, ways))
    return Block(statements)


def program(seed: int) -> tuple[str, Block]:
    """A header of helpers and a body."""
    rng = random.Random(seed)
    Call.helpers = []
    header = ""
    for number in range(2):
        helper = block(rng, 2, False)
        header += f"inline uint helper{number}(uint a, uint lane) "
        header += "{\n" + "".join(s.text() for s in helper) + "return a;\n}\n"
        Call.helpers.append(helper)
    body = block(rng, 4, False)
    body.append(Collective(rng))
    return header, body


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_see_the_lanes_that_the_structure_says(seed: int) -> None:
    header, body = program(seed)
    header += "inline uint everything(uint a, uint lane) {\n"
    header += "".join(statement.text() for statement in body) + "return a;\n}\n"
    source = """
        uint lane = thread_index_in_simdgroup;
        out[thread_position_in_grid.x] = everything(lane * 2654435761u, lane);
    """
    result = in_every_schedule(
        Metal(source, output=(32 + 13, mx.uint32), grid=45, group=45, header=header)
    )
    for lanes, part in ((32, result[:32]), (13, result[32:])):
        machine = Machine(lanes)
        body.run(machine, np.ones(lanes, bool), Flow(lanes))
        np.testing.assert_array_equal(part, machine.a)


def test_a_helper_called_in_both_branches_meets_in_neither() -> None:
    source = """
        uint lane = thread_index_in_simdgroup;
        out[lane] = lane < 10 ? total(1) : total(100);
    """
    header = "uint total(uint x) { return simd_sum(x); }"
    result = run(source, output=(32, mx.uint32), grid=32, group=32, header=header)
    assert result.tolist() == [10] * 10 + [2200] * 22


def test_lanes_that_continue_wait_for_the_rest_of_the_turn() -> None:
    source = """
        uint lane = thread_index_in_simdgroup, sum = 0;
        for (uint turn = 0; turn < 3; ++turn) {
            if ((lane + turn) % 2 == 0) {
                sum += simd_sum(1);
                continue;
            }
            sum += 100 * simd_sum(1);
        }
        out[lane] = sum;
    """
    result = run(source, output=(32, mx.uint32), grid=32, group=32)
    assert set(result.tolist()) == {16 + 1600 + 16, 1600 + 16 + 1600}


def test_collectives_in_conditions_and_in_steps_of_a_loop() -> None:
    source = """
        uint lane = thread_index_in_simdgroup, turns = 0, left = lane % 5;
        while (simd_any(left > 0)) { left -= left > 0; ++turns; }
        for (uint i = 0; i < 2; i += simd_max(1)) ++turns;
        do { ++turns; } while (simd_all(turns < 10));
        out[lane] = turns;
    """
    assert run(source, output=(32, mx.uint32), grid=32, group=32).tolist() == [10] * 32


def test_conditions_of_a_loop_that_declare() -> None:
    source = """
        uint lane = thread_index_in_simdgroup, sum = 0, left = 1 + lane % 2, k = 0;
        while (uint n = left) { left -= 1; if (lane % 2 == n - 1) continue; sum += simd_sum(n); }
        for (; thread uint* p = k < 2 ? &k : nullptr; ++k) {
            if ((lane + *p) % 2) continue;
            sum += 100 * simd_sum(1);
        }
        while (bool more = simd_any(left < 2)) { left += more; sum += 1000; }
        out[lane] = sum;
    """
    result = run(source, output=(32, mx.uint32), grid=32, group=32)
    assert result.tolist() == [3600, 3616] * 16


def test_an_else_behind_a_loop_over_a_range() -> None:
    source = """
        uint lane = thread_index_in_simdgroup, a[2] = {1, 2}, sum = 0;
        if (lane < 10) for (auto v : a) if (v == 1) sum += simd_sum(v); else continue;
        else sum = 77;
        out[lane] = sum;
    """
    result = run(source, output=(32, mx.uint32), grid=32, group=32)
    assert result.tolist() == [10] * 10 + [77] * 22


def test_a_helper_whose_list_says_that_it_is_empty() -> None:
    source = """
        uint lane = thread_index_in_simdgroup;
        out[lane] = lane < 10 ? total() : total();
    """
    header = "uint total(void);\nuint total(void) { return simd_sum(1); }"
    result = run(source, output=(32, mx.uint32), grid=32, group=32, header=header)
    assert result.tolist() == [10] * 10 + [22] * 22


def test_short_circuits_leave_lanes_out_of_a_vote() -> None:
    source = """
        uint lane = thread_index_in_simdgroup;
        out[lane] = (lane >= 8 && simd_sum(1) == 24) ? simd_sum(1) : 0;
    """
    assert run(source, output=(32, mx.uint32), grid=32, group=32).tolist() == [0] * 8 + [24] * 24
