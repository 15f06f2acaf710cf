"""Finds the plan for blocks of a router and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from .dtypes import FLOATS, as_it_may_be, own_dtype
from .experts import Experts, Found, is_stacked, stacks
from .plans import Plan
from .reasons import Reasons, UnmatchedError
from .routers import (
    Options,
    Routers,
    Search,
    best_plan,
    input_at,
    numbers_of,
    small_numbers,
    vectors_of,
)
from .routing import SUMS
from .shadows import entries, entry
from .steps import (
    ELEMENTWISE,
    Add,
    Apply,
    BlockPlan,
    CallChild,
    Cast,
    Combine,
    Mix,
    Reshape,
    flattened,
)
from .wiring import Call, Wiring, arguments_needed, widths, wiring


class Mixtures(Experts, Routers):
    """Compares mixtures with blocks of what `experts` and `routers` find."""

    def _mixture(self, module: mnn.Module) -> Plan | None:
        """A block whose call chooses experts, or has a child choose them, and adds up what they
        return."""
        stacked = {name for name, child in entries(module) if _holds_stacks(child)}
        if not stacked or arguments_needed(module) != 1:
            return None
        plans: dict[BlockPlan, set[Found]] = {}
        tiny: set[float] = set()
        reasons, captured, chooses = Reasons(), False, False
        for width, dtype, lead in product(widths(module), FLOATS, self._sizes.leads[:2]):
            x = mx.zeros((*lead, width), dtype)
            every: list[tuple[list[Any], int, int]] = []
            try:
                for may_be in as_it_may_be(module, dtype):
                    found = wiring(self._graphs, may_be, x, pairs=True)
                    captured = True
                    if not any(_chooses(call, stacked) for call in found.calls):
                        break
                    chooses = True
                    if found.second is not None:
                        raise UnmatchedError("it does not return one array")
                    tiny |= small_numbers(self._graphs, _results(found))
                    every.append(self._mixed(may_be, found, x, stacked, tiny))
                if not every:
                    continue
                if any(other != every[0] for other in every):
                    raise UnmatchedError("what it computes goes by the dtype of its parameters")
            except UnmatchedError as reason:
                reasons.add(reason)
                continue
            except Exception:
                continue
            steps, result, experts = every[0]
            runs = "router", "topk_gating", experts
            if not any(isinstance(s, Mix) for s in steps):
                summed = next(s for s in steps if isinstance(s, Combine))
                try:
                    inner = self._experts(entry(module, summed.path))
                except UnmatchedError as reason:
                    raise UnmatchedError(f"its {summed.path}: {reason}") from None
                if inner is None:
                    raise UnmatchedError("its experts are no gated networks")
                runs = inner.kind, inner.op, inner.width
            plan = BlockPlan(*runs, frozenset(), (), (), 0, tuple(steps), result)
            plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            if captured and not chooses:
                return None  # other children with stacked weights, such as convolutions
            raise reasons.one("its call cannot be captured")
        return best_plan(plans, own_dtype(module))  # type: ignore[no-any-return]

    def _mixed(
        self,
        module: mnn.Module,
        found: Wiring,
        x: mx.array,
        stacked: set[str],
        tiny: set[float],
    ) -> tuple[list[Any], int, int]:
        """Steps, the register that is returned, and the number of experts."""
        graphs, experts = self._graphs, 0
        steps: list[Any] = []
        registers = {graphs.input(0): 0}

        def put(step: Any, *numbers: int) -> None:
            steps.append(step)
            for number in numbers:
                registers[number] = count()

        def count() -> int:
            return 1 + max(registers.values())

        def register(number: int) -> int:
            if number not in registers:
                put(self._step(number, register, x), number)
            return registers[number]

        for i, call in enumerate(found.calls):
            first = found.first[i]
            if _chooses(call, stacked):
                experts, *_ = next(stacks(entry(module, call.path))).shape
                step, summed = (
                    self._combined(found, x, i, registers, experts)
                    or self._mix(module, found, x, i, registers, tiny)
                )  # fmt: skip
                put(replace(step, x=register(call.arguments[0])), summed)
                continue
            arguments = tuple(register(v) if isinstance(v, int) else v for v in call.arguments)
            keywords = tuple(
                (n, register(v) if isinstance(v, int) else v) for n, v in call.keywords
            )
            last = (*found.first, len(found.shapes))[i + 1]
            outputs = [graphs.input(j + 1) for j in range(first, last)]
            put(CallChild(call.path, call.method, arguments, keywords, len(outputs)), *outputs)
        if not experts:
            raise UnmatchedError("its experts are not chosen in it")
        return steps, register(found.result), experts

    def _step(self, number: int, register: Callable[[int], int], x: mx.array) -> Any:
        """An expression that is no child's as a step."""
        name, arguments, operands, *_ = self._graphs[number]
        rows = mx.zeros((x.size // x.shape[-1], x.shape[-1]))
        for flat, function in ((True, flattened), (False, lambda y: y.reshape(x.shape))):
            (same,) = self._graphs.capture(lambda y, f=function: [f(y)], [x if flat else rows])
            equal = self._graphs[same][:2] == (name, arguments) and x.ndim > 2
            if equal and (not flat or operands == (self._graphs.input(0),)):
                return Reshape(register(operands[0]), flat)
        if name == "AsType":
            dtype = next((d for d in FLOATS if arguments == f"[{d!r}]"), None)
            if dtype is not None:
                return Cast(register(operands[0]), dtype)
        if name == "Add" or name in ELEMENTWISE:
            # Arrays of several shapes are broadcast again by the operation itself.
            inner = (self._graphs[n] for n in operands)
            registers = [
                register(e[2][0] if e[0] == "Broadcast" else n)
                for n, e in zip(operands, inner, strict=True)
            ]
            return Add(*registers) if name == "Add" else Apply(name, tuple(registers))
        raise UnmatchedError("its routing, or what it adds to it, equals no known one")

    def _added(self, found: Wiring, x: mx.array, at: int) -> tuple[list[mx.array], int]:
        """Arrays like the inputs of the trace; which are the experts' rows."""
        arrays = found.given(x)
        rows = found.first[at] + 1
        if arrays[rows].ndim not in (3, x.ndim + 1):
            raise UnmatchedError("its experts do not return a row for each choice")
        return arrays, rows

    def _combined(
        self, found: Wiring, x: mx.array, at: int, registers: Mapping[int, int], experts: int
    ) -> tuple[Combine, int] | None:
        """Of the experts' call, whose choices a child returned with their weights: the step, and
        the weighted sum."""
        graphs, indices = self._graphs, found.calls[at].arguments[1]
        arrays, rows = self._added(found, x, at)
        for first, after in zip(found.first, (*found.first[1:], len(found.shapes)), strict=True):
            pair = [graphs.input(j + 1) for j in range(first, after)]
            if len(pair) != 2 or indices not in pair:
                continue
            which = first + 1 + (pair[0] == indices)
            weights = graphs.input(which)

            def ways(a: Sequence[mx.array], which: int = which) -> Options:
                for f in SUMS:
                    yield None, partial(f, a[rows], a[which])

            inside = set(graphs.below(_results(found)))
            for _, summed, dtype in self._matching(ways, arrays, inside):
                if dtype == x.dtype:
                    path = found.calls[at].path
                    return Combine(0, registers[indices], registers[weights], path,
                                   experts), summed  # fmt: skip
        return None

    def _mix(
        self,
        module: mnn.Module,
        found: Wiring,
        x: mx.array,
        at: int,
        registers: Mapping[int, int],
        tiny: set[float],
    ) -> tuple[Mix, int]:
        """Of the experts' call, whose choices are made from logits: the step, and the weighted
        sum."""
        graphs, call = self._graphs, found.calls[at]
        arrays, rows = self._added(found, x, at)
        inside = set(graphs.below(_results(found)))
        top_k = arrays[rows].shape[-2]
        finishes = [lambda a, w, f=f: f(a[rows], w) for f in SUMS]
        for j in range(1, rows):
            experts = arrays[j].shape[-1]
            if (
                arrays[j].ndim != arrays[rows].ndim - 1
                or experts < top_k
                or graphs.input(j) not in registers
            ):
                continue
            vectors = {k: v for k, v in vectors_of(module).items() if v.shape == (experts,)}
            for bias in (None, *vectors):
                given = None if bias is None else input_at(found.input_of(vectors[bias]))
                numbers = numbers_of(module, experts)
                search = Search(input_at(j), given, top_k, numbers, tiny)
                indices = call.arguments[1]
                route = self._routing(search, arrays, indices, inside, finishes, x.dtype)
                if route is not None:
                    logits = registers[graphs.input(j)]
                    return Mix(0, logits, call.path, route[0], top_k, bias), route[1]
        raise UnmatchedError("its routing, or what it adds to it, equals no known one")


def _results(found: Wiring) -> list[int]:
    """What a call returns and hands to its children."""
    numbers = [found.result, *([] if found.second is None else [found.second])]
    for call in found.calls:
        numbers += [v for v in (*call.arguments, *(w for _, w in call.keywords))
                    if isinstance(v, int)]  # fmt: skip
    return numbers


def _chooses(call: Call, stacked: set[str]) -> bool:
    """Whether a call is one of experts, with tokens and choices."""
    return call.path in stacked and len(call.arguments) == 2 and not call.keywords


def _holds_stacks(child: Any) -> bool:
    return isinstance(child, mnn.Module) and any(map(is_stacked, dict.values(child)))
