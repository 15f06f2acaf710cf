"""Finds the plan for experts, for routers, and for blocks of a router and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..nn.expert_rows import SORTED
from .capture import Graphs
from .leaves import FLOATS
from .plans import Add, BlockPlan, CallChild, ExpertsPlan, Mix, Plan, RouterPlan
from .routing import SUMS, Routing, templates
from .templates import GATED
from .wiring import UnmatchedError, Wiring, parameters_of_call, shadow, widths, wiring

#: Axes before the last of tokens: few, and with two choices of each as many as are sorted.
_TOKENS = (((3,), (SORTED // 2,)), ((2, 3), (2, SORTED // 4)))

_Found = tuple[mx.Dtype, int]


class Mixtures:
    """Compares mixtures with the templates of `routing`."""

    _graphs: Graphs

    # -- experts --

    def _experts(self, module: mnn.Module) -> Plan | None:
        """Three stacked projections, called with tokens and indices."""
        projections = [c for c in module.children().values() if _is_stacked(c)]
        if len(projections) != 3 or _arguments(module) != 2:
            return None
        count, *_ = next(_stacks(projections[0])).shape
        plans: dict[ExpertsPlan, set[_Found]] = {}
        reason: Exception = UnmatchedError("its call equals no gated experts")
        for width, dtype, tokens in product(widths(module), FLOATS, _TOKENS):
            try:
                both = [self._experts_of(module, (*lead, width), dtype, count) for lead in tokens]
            except Exception as error:
                reason = error if isinstance(error, UnmatchedError) else reason
                continue
            if both[0] is not None and both[0] == both[1]:
                plans.setdefault(both[0], set()).add((dtype, len(tokens[0]) + 1))
        if not plans:
            raise reason
        plan, verified = max(plans.items(), key=lambda item: len(item[1]))
        return replace(plan, verified=frozenset(verified))

    def _experts_of(
        self, module: mnn.Module, shape: tuple[int, ...], dtype: mx.Dtype, count: int
    ) -> ExpertsPlan | None:
        graphs = self._graphs
        x, indices = mx.zeros(shape, dtype), mx.zeros((*shape[:-1], 2), mx.uint32)
        found = wiring(graphs, module, x, indices)
        if len(found.calls) != 3 or any(c.method != "__call__" for c in found.calls):
            return None
        first, second, last = found.calls
        ascend = indices.size >= SORTED
        flag = (("sorted_indices", (ascend,)),)
        if any(len(c.arguments) != 2 or c.keywords != flag for c in found.calls):
            return None
        outputs = [mx.zeros(*s) for s in found.shapes]

        def template(x: mx.array, i: mx.array, *y: mx.array) -> list[mx.array]:
            spread = mx.expand_dims(x, (-2, -3))
            if not ascend:
                return [spread, i, y[2].squeeze(-2)]
            flat = i.flatten()
            order = mx.argsort(flat)
            back = mx.unflatten(y[2][mx.argsort(order)], 0, i.shape)
            return [spread.flatten(0, -3)[order // i.shape[-1]], flat[order], back.squeeze(-2)]

        rows, owners, result = graphs.capture(template, [x, indices, *outputs])
        wired = first.arguments == second.arguments == (rows, owners)
        if not wired or last.arguments[1] != owners or found.result != result:
            return None
        for op, unit in GATED:
            for gate, up, flip in ((first, second, False), (second, first, True)):

                def between(x: Any, i: Any, *y: mx.array, f: Any = unit, flip: Any = flip) -> Any:
                    return [f(y[1], y[0]) if flip else f(y[0], y[1])]

                if graphs.capture(between, [x, indices, *outputs])[0] == last.arguments[0]:
                    linear = self._linear(module)
                    runs = "expert_ffn" if linear and op == "swiglu" else "moe_dispatch"
                    return ExpertsPlan("experts", runs, found.shapes[0][0][-1], frozenset(),
                                       gate.path, up.path, last.path, count, linear,
                                       op)  # fmt: skip
        raise UnmatchedError("what it does between its projections equals no gated unit")

    def _linear(self, module: mnn.Module) -> type | None:
        """The class of the projections, where its call is a gathered product of the weight."""
        kinds = {type(c) for c in module.children().values() if _is_stacked(c)}
        layer = next(c for c in module.children().values() if _is_stacked(c))
        if len(kinds) != 1 or set(layer) != {"weight"}:
            return None
        weight = layer["weight"]
        x, owners = mx.zeros((5, 1, weight.shape[-1])), mx.zeros((5,), mx.uint32)

        def own(x: mx.array, i: mx.array, w: mx.array) -> Any:
            return [type(layer).__call__(shadow(layer, {"weight": w}), x, i, sorted_indices=True)]

        def template(x: mx.array, i: mx.array, w: mx.array) -> Any:
            return [mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=i, sorted_indices=True)]

        inputs = [x, owners, mx.zeros(weight.shape)]
        same = self._graphs.capture(own, inputs) == self._graphs.capture(template, inputs)
        return type(layer) if same else None

    # -- routers --

    def _router(self, module: mnn.Module) -> Plan | None:
        """A leaf with a stacked row per expert that returns two arrays."""
        arrays = {k: v for k, v in module.items() if isinstance(v, mx.array)}
        matrices = [k for k, v in arrays.items() if v.ndim == 2]
        vectors = [k for k, v in arrays.items() if v.ndim == 1]
        if len(matrices) != 1 or len(vectors) > 1 or _arguments(module) != 1:
            return None
        weight, bias = arrays[matrices[0]], arrays[vectors[0]] if vectors else None
        experts, width = weight.shape
        if bias is not None and bias.shape != (experts,):
            return None
        names = [*matrices, *vectors]
        plans: dict[RouterPlan, set[_Found]] = {}
        for dtype, lead in product(FLOATS, ((3,), (2, 3))):
            own = [mx.zeros(weight.shape, dtype)] + ([] if bias is None else [mx.zeros(bias.shape)])
            inputs = [mx.zeros((*lead, width), dtype), *own]

            def call(x: mx.array, *given: mx.array) -> Any:
                twin = shadow(module, dict(zip(names, given, strict=True)))
                found = type(module).__call__(twin, x)
                if not isinstance(found, tuple) or len(found) != 2:
                    raise UnmatchedError("it does not return two arrays")
                return list(found)

            try:
                ours = self._graphs.capture(call, inputs)
                shapes = [y.shape for y in call(*inputs)]
            except Exception:
                return None  # not a router, as far as can be seen
            top_k = shapes[0][-1] if shapes[0] else 0
            if shapes[0] != shapes[1] or not 0 < top_k <= experts:
                return None
            for first in (True, False):
                indices, weights = ours if first else ours[::-1]
                routing = self._routing(module, inputs, top_k, indices, weights)
                if routing is not None:
                    plan = RouterPlan("router", "topk_gating", experts, frozenset(), names[0],
                                      names[1] if vectors else None, routing, top_k,
                                      first)  # fmt: skip
                    plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            raise UnmatchedError("its routing equals no known one")
        return _best(plans)  # type: ignore[no-any-return]

    def _routing(
        self, module: mnn.Module, inputs: Sequence[mx.array], k: int, indices: int, weights: int
    ) -> Routing | None:
        experts = inputs[1].shape[0]
        for routing, router in templates(*_numbers(module, experts)):

            def template(x: mx.array, w: mx.array, b: Any = None, router: Any = router) -> Any:
                return list(router(x @ w.T, b, k))

            try:
                if self._graphs.capture(template, inputs) == [indices, weights]:
                    return routing
            except Exception:
                continue
        return None

    # -- blocks --

    def _mixture(self, module: mnn.Module) -> Plan | None:
        """A block whose call chooses experts and adds up what they return."""
        stacked = {name for name, child in module.children().items() if _holds_stacks(child)}
        if not stacked or _arguments(module) != 1:
            return None
        plans: dict[BlockPlan, set[_Found]] = {}
        reason: Exception | None = None
        for width, dtype, lead in product(widths(module), FLOATS, ((3,), (2, 3))):
            x = mx.zeros((*lead, width), dtype)
            try:
                found = wiring(self._graphs, module, x)
                steps, result, experts = self._mixed(module, found, x, stacked)
            except UnmatchedError as error:
                reason = reason or error
                continue
            except Exception:
                continue
            plan = BlockPlan("router", "topk_gating", experts, frozenset(), (), (), 0,
                             tuple(steps), result)  # fmt: skip
            plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            raise reason or UnmatchedError("its call cannot be captured")
        return _best(plans)  # type: ignore[no-any-return]

    def _mixed(
        self, module: mnn.Module, found: Wiring, x: mx.array, stacked: set[str]
    ) -> tuple[list[Any], int, int]:
        """Steps, the register that is returned, and the number of experts."""
        graphs, width = self._graphs, 0
        steps: list[Any] = []
        registers = {graphs.input(0): 0}

        def register(number: int) -> int:
            if number not in registers:
                expression = graphs[number]
                if expression[0] != "Add" or expression[1] != "[]":
                    raise UnmatchedError("its routing, or what it adds to it, equals no known one")
                left, right = (register(n) for n in expression[2])
                steps.append(Add(left, right))
                registers[number] = len(steps)
            return registers[number]

        for i, call in enumerate(found.calls):
            if call.path in stacked and len(call.arguments) == 2 and not call.keywords:
                x_number, indices = call.arguments
                summed, logits, routing, top_k = self._chosen(module, found, x, i, indices)
                mix = Mix(register(x_number), registers[logits], call.path, routing, top_k)
                steps.append(mix)
                registers[summed] = len(steps)
                width = next(
                    found.shapes[j][0][-1] for j in range(i) if graphs.input(j + 1) == logits
                )
                continue
            arguments = tuple(register(v) if isinstance(v, int) else v for v in call.arguments)
            keywords = tuple(
                (n, register(v) if isinstance(v, int) else v) for n, v in call.keywords
            )
            steps.append(CallChild(call.path, call.method, arguments, keywords))
            registers[graphs.input(i + 1)] = len(steps)
        if not any(isinstance(s, Mix) for s in steps):
            raise UnmatchedError("its experts are not chosen in it")
        return steps, register(found.result), width

    def _chosen(
        self, module: mnn.Module, found: Wiring, x: mx.array, at: int, indices: int
    ) -> tuple[int, int, Routing, int]:
        """Of the experts' call: (the weighted sum, the logits, the routing, choices a token)."""
        graphs = self._graphs
        arrays = [x, *(mx.zeros(*s) for s in found.shapes)]
        inside = set(_sums(graphs, found.result))
        returned = arrays[at + 1]
        if returned.ndim != x.ndim + 1:
            raise UnmatchedError("its experts do not return a row for each choice")
        top_k = returned.shape[-2]
        for j in range(1, at + 1):
            if arrays[j].ndim != x.ndim or arrays[j].shape[-1] < top_k:
                continue
            for routing, router in templates(*_numbers(module, arrays[j].shape[-1])):
                for add in SUMS:

                    def template(*a: mx.array, j: int = j, f: Any = router, add: Any = add) -> Any:
                        chosen, weights = f(a[j], None, top_k)
                        return [chosen, add(a[at + 1], weights)]

                    try:
                        own, summed = graphs.capture(template, arrays)
                        dtype = template(*arrays)[1].dtype
                    except Exception:
                        break
                    if own != indices:
                        break
                    if summed in inside and dtype == x.dtype:
                        return summed, graphs.input(j), routing, top_k
        raise UnmatchedError("its routing, or what it adds to it, equals no known one")


def _sums(graphs: Graphs, number: int) -> Iterator[int]:
    """An expression and, where it is a sum, its parts."""
    yield number
    if graphs[number][0] == "Add":
        for part in graphs[number][2]:
            yield from _sums(graphs, part)


def _arguments(module: mnn.Module) -> int:
    """How many arguments a call needs, -1 where they are not all named."""
    try:
        return sum(p.default is p.empty for p in parameters_of_call(module))
    except (UnmatchedError, ValueError, TypeError):
        return -1


def _stacks(child: Any) -> Iterator[mx.array]:
    """The stacked weights of a projection, or of the one that it wraps."""
    if not isinstance(child, mnn.Module):
        return
    weight = child.get("weight")
    if isinstance(weight, mx.array) and weight.ndim == 3:
        yield weight
    for inner in child.children().values():
        yield from _stacks(inner)


def _is_stacked(child: Any) -> bool:
    return next(_stacks(child), None) is not None


def _holds_stacks(child: Any) -> bool:
    return isinstance(child, mnn.Module) and any(map(_is_stacked, child.children().values()))


def _best(plans: dict[Any, set[_Found]]) -> Any:
    """The plan that most inputs have. In float32 taking logits to float32 leaves no trace, so that
    a plan of float32 alone counts for the one that does, too."""
    for plan, verified in list(plans.items()):
        wide = _in_float32(plan)
        if wide in plans and wide != plan and all(d == mx.float32 for d, _ in verified):
            plans[wide] |= verified
    plan, verified = max(plans.items(), key=lambda item: len(item[1]))
    return replace(plan, verified=frozenset(verified))


def _in_float32(plan: Any) -> Any:
    """The plan whose router takes its logits to float32."""
    if isinstance(plan, RouterPlan):
        return replace(plan, routing=replace(plan.routing, wide=True))
    steps = (
        replace(s, routing=replace(s.routing, wide=True)) if isinstance(s, Mix) else s
        for s in plan.steps
    )
    return replace(plan, steps=tuple(steps))


def _numbers(
    module: mnn.Module, experts: int
) -> tuple[tuple[float, ...], tuple[tuple[int, int], ...]]:
    """Factors and (number, kept) groups that a router with these attributes may have."""
    own = list(vars(module).items())
    for value in vars(module).values():
        if hasattr(value, "__dataclass_fields__"):
            own += vars(value).items()
    factors = {v for n, v in own if isinstance(v, float) and "scal" in n}
    counts = sorted({v for n, v in own if type(v) is int and "group" in n})
    groups = {
        (n, kept)
        for n in counts
        for kept in counts
        if 1 <= kept < n and n > 1 and experts % n == 0 and experts // n > 1
    }
    return tuple(sorted(factors - {1.0})), tuple(sorted(groups))
