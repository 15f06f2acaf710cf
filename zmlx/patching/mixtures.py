"""Finds the plan for experts, for routers, and for blocks of a router and experts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..nn.expert_rows import SORTED
from .capture import Graphs
from .leaves import FLOATS
from .plans import (
    ELEMENTWISE,
    PRODUCTS,
    Add,
    Apply,
    BlockPlan,
    CallChild,
    Cast,
    Combine,
    ExpertsPlan,
    Mix,
    Plan,
    Reshape,
    RouterPlan,
    flattened,
)
from .probe import own_dtype
from .routing import SUMS, Routing, choices, weighings
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
        """A module with a stacked row per expert, or a child that returns a logit for each, that
        returns two arrays."""
        arrays = {k: v for k, v in module.items() if isinstance(v, mx.array)}
        matrices = [k for k, v in arrays.items() if v.ndim == 2]
        vectors = [k for k, v in arrays.items() if v.ndim == 1]
        if len(matrices) + len(module.children()) != 1 or len(vectors) > 1:
            return None
        if len(matrices) + len(vectors) < len(arrays) or _arguments(module) != 1:
            return None
        plans: dict[RouterPlan, set[_Found]] = {}
        tiny: set[float] = set()
        understood = False
        lengths = [module[k].shape[1] for k in matrices] or widths(module)
        for width, dtype, lead in product(lengths, FLOATS, ((3,), (2, 3))):
            x = mx.zeros((*lead, width), dtype)
            try:
                found = self._pair(module, x, matrices, vectors)
                # Nothing is computed.
                shapes = {y.shape for y in type(module).__call__(module, x)}
            except Exception:
                continue  # not a router, as far as can be seen
            top_k = next(iter(shapes))[-1]
            if len(shapes) > 1 or not 0 < top_k <= found.experts:
                continue
            understood = True
            tiny |= _tiny(self._graphs, found.results)
            plan = self._router_of(module, found, top_k, tiny)
            if plan is not None:
                plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            if understood:
                raise UnmatchedError("its routing equals no known one")
            return None
        return _best(plans, own_dtype(module))  # type: ignore[no-any-return]

    def _pair(
        self, module: mnn.Module, x: mx.array, matrices: list[str], vectors: list[str]
    ) -> _Pair:
        """The trace of a call that returns two arrays; raises where it does not."""
        names = [*matrices, *vectors]
        call = type(module).__call__
        if not matrices:
            own = _unlike(module)
            found = wiring(self._graphs, shadow(module, own), x, pairs=True)
            (only,) = found.calls
            if found.second is None or only.arguments != (self._graphs.input(0),):
                raise UnmatchedError("it is no router")
            if only.method != "__call__" or only.keywords or len(found.shapes) != 1:
                raise UnmatchedError("it is no router")
            logits = mx.zeros(*found.shapes[0])
            bias = _fixed(own[vectors[0]]) if vectors else None
            return _Pair([x, logits], (found.result, found.second), logits.shape[-1],
                         [("child", only.path, _input(1))], bias, vectors)  # fmt: skip
        (weight,) = matrices
        inputs = [x, mx.zeros(module[weight].shape, x.dtype)]
        inputs += [mx.zeros(module[k].shape) for k in vectors]

        def traced(x: mx.array, *given: mx.array) -> Any:
            first, second = call(shadow(module, dict(zip(names, given, strict=True))), x)
            return [first, second]

        one, two = self._graphs.capture(traced, inputs)
        spellings = [(name, weight, _product(f)) for name, f in PRODUCTS.items()]
        return _Pair(inputs, (one, two), inputs[1].shape[0], spellings,
                     _input(2) if vectors else None, vectors)  # fmt: skip

    def _router_of(
        self, module: mnn.Module, found: _Pair, top_k: int, tiny: set[float]
    ) -> RouterPlan | None:
        experts, (one, two) = found.experts, found.results
        if any(module[k].shape != (experts,) for k in found.vectors):
            return None
        numbers, bias = _numbers(module, experts), next(iter(found.vectors), None)
        for spelling, weight, logits in found.spellings:
            search = _Search(logits, found.bias, top_k, numbers, tiny)
            for first, indices, weights in ((True, one, two), (False, two, one)):
                route = self._routing(search, found.inputs, indices, {weights}, [lambda a, w: w])
                if route is not None:
                    return RouterPlan("router", "topk_gating", experts, frozenset(), spelling,
                                      weight, bias, route[0], top_k, first)  # fmt: skip
        return None

    def _routing(
        self,
        search: _Search,
        inputs: Sequence[mx.array],
        indices: int,
        wanted: Container[int],
        finishes: Sequence[Callable[[Sequence[mx.array], mx.array], mx.array]],
        dtype: mx.Dtype | None = None,
    ) -> tuple[Routing, int] | None:
        """The routing that chooses `indices` and whose weights, finished, are wanted (and have this
        dtype); which expression that is."""
        logits, bias, k = search.logits, search.bias or _none, search.top_k
        scales, groups = search.numbers
        known = choices(groups, search.bias is not None)
        options = [(c, lambda a, c=c: c.indices(logits(a), bias(a), k)) for c in known]
        for choice, *_ in self._matching(options, inputs, {indices}):
            ways = [
                (routing, lambda a, f=finish, w=weigh, c=choice: f(
                    a, w(c.weights(logits(a), bias(a), k), a[0].dtype)))
                for routing, weigh in weighings(choice, scales, sorted(search.tiny))
                for finish in finishes
            ]  # fmt: skip
            for routing, number, kind in self._matching(ways, inputs, wanted):
                if dtype is None or dtype == kind:
                    return routing, number
        return None

    def _matching(
        self,
        options: Sequence[tuple[Any, Callable[[Sequence[mx.array]], mx.array]]],
        inputs: Sequence[mx.array],
        wanted: Container[int],
    ) -> list[tuple[Any, int, mx.Dtype]]:
        """Of (value, function of the inputs), those whose expression is wanted: value, expression
        and dtype."""
        kept: list[tuple[Any, mx.Dtype]] = []

        def traced(*a: mx.array) -> list[mx.array]:
            kept.clear()
            results = []
            for value, function in options:
                try:
                    results.append(function(a))
                except Exception:
                    continue  # does not take such arrays
                kept.append((value, results[-1].dtype))
            return results or [a[0]]

        numbers = self._graphs.capture(traced, inputs)
        return [(v, n, d) for (v, d), n in zip(kept, numbers, strict=False) if n in wanted]

    # -- blocks --

    def _mixture(self, module: mnn.Module) -> Plan | None:
        """A block whose call chooses experts, or has a child choose them, and adds up what they
        return."""
        stacked = {name for name, child in module.children().items() if _holds_stacks(child)}
        if not stacked or _arguments(module) != 1:
            return None
        own = _unlike(module)
        twin = shadow(module, own)
        plans: dict[BlockPlan, set[_Found]] = {}
        tiny: set[float] = set()
        reason: Exception | None = None
        for width, dtype, lead in product(widths(module), FLOATS, ((3,), (2, 3))):
            x = mx.zeros((*lead, width), dtype)
            try:
                found = wiring(self._graphs, twin, x, pairs=True)
                if found.second is not None:
                    raise UnmatchedError("it does not return one array")
                tiny |= _tiny(self._graphs, _results(found))
                steps, result, experts = self._mixed(module, found, x, stacked, own, tiny)
            except UnmatchedError as error:
                reason = reason or error
                continue
            except Exception:
                continue
            runs = "router", "topk_gating", experts
            if not any(isinstance(s, Mix) for s in steps):
                summed = next(s for s in steps if isinstance(s, Combine))
                inner = self._experts(module[summed.path])
                if inner is None:
                    raise UnmatchedError("its experts are no gated networks")
                runs = inner.kind, inner.op, inner.width
            plan = BlockPlan(*runs, frozenset(), (), (), 0, tuple(steps), result)
            plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            raise reason or UnmatchedError("its call cannot be captured")
        return _best(plans, own_dtype(module))  # type: ignore[no-any-return]

    def _mixed(
        self,
        module: mnn.Module,
        found: Wiring,
        x: mx.array,
        stacked: set[str],
        own: dict[str, mx.array],
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
            if call.path in stacked and len(call.arguments) == 2 and not call.keywords:
                experts, *_ = next(_stacks(module[call.path])).shape
                step, summed = (
                    self._combined(found, x, i, registers, experts)
                    or self._mix(module, found, x, i, registers, own, tiny)
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
        """Arrays like the block's and those that children returned; which are the experts' rows."""
        arrays = [x, *(mx.zeros(*s) for s in found.shapes)]
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
            ways = [(None, lambda a, f=f, w=which: f(a[rows], a[w])) for f in SUMS]
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
        own: Mapping[str, mx.array],
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
            vectors = [k for k, v in own.items() if v.shape == (experts,)]
            for bias in (None, *vectors):
                given = None if bias is None else _fixed(own[bias])
                numbers = _numbers(module, experts)
                search = _Search(_input(j), given, top_k, numbers, tiny)
                indices = call.arguments[1]
                route = self._routing(search, arrays, indices, inside, finishes, x.dtype)
                if route is not None:
                    logits = registers[graphs.input(j)]
                    return Mix(0, logits, call.path, route[0], top_k, bias), route[1]
        raise UnmatchedError("its routing, or what it adds to it, equals no known one")


_Of = Callable[[Sequence[mx.array]], mx.array]


def _input(index: int) -> _Of:
    return lambda a: a[index]


def _fixed(array: mx.array) -> _Of:
    return lambda a: array


def _none(a: Sequence[mx.array]) -> None:
    return None


def _product(function: Callable[[mx.array, mx.array], mx.array]) -> _Of:
    return lambda a: function(a[0], a[1])


@dataclass(frozen=True)
class _Pair:
    """A traced call that returns two arrays.

    Attributes:
        inputs: of the trace.
        results: the two.
        experts: how many logits there are.
        spellings: (as in `RouterPlan.logits`, weight, logits of the trace's inputs).
        bias: the bias, of those, or None.
        vectors: its name, if it has one.
    """

    inputs: list[mx.array]
    results: tuple[int, int]
    experts: int
    spellings: list[tuple[str, str, _Of]]
    bias: _Of | None
    vectors: list[str]


@dataclass(frozen=True)
class _Search:
    """What a routing may be made of: logits and bias, or None, as functions of a trace's inputs,
    choices a token, factors and groups, and small numbers."""

    logits: _Of
    bias: _Of | None
    top_k: int
    numbers: tuple[tuple[float, ...], tuple[tuple[int, int], ...]]
    tiny: set[float]


def _unlike(module: mnn.Module) -> dict[str, mx.array]:
    """The module's vectors, equal to nothing else, so that a trace shows where each of them
    goes."""
    return {
        k: mx.random.uniform(shape=v.shape, key=mx.random.key(i))
        for i, (k, v) in enumerate(module.items())
        if isinstance(v, mx.array) and v.ndim < 2
    }


def _results(found: Wiring) -> list[int]:
    """What a call returns and hands to its children."""
    numbers = [found.result, *([] if found.second is None else [found.second])]
    for call in found.calls:
        numbers += [v for v in (*call.arguments, *(w for _, w in call.keywords))
                    if isinstance(v, int)]  # fmt: skip
    return numbers


def _tiny(graphs: Graphs, numbers: Sequence[int]) -> set[float]:
    """Numbers in these expressions that keep a sum from being 0."""
    return {v for v in graphs.scalars(numbers) if 0 < v < 1e-3}


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


def _best(plans: dict[Any, set[_Found]], dtype: mx.Dtype) -> Any:
    """The plan that holds in the module's own dtype, and there for most inputs. In float32 casts
    leave no trace, so that what is found in float32 alone counts for a plan with casts, too."""
    for plan, verified in list(plans.items()):
        if all(d == mx.float32 for d, _ in verified):
            for other in plans:
                if other != plan and _in_float32(other) == _in_float32(plan):
                    plans[other] |= verified

    def worth(item: tuple[Any, set[_Found]]) -> tuple[bool, int]:
        return any(d == dtype for d, _ in item[1]), len(item[1])

    plan, verified = max(plans.items(), key=worth)
    return replace(plan, verified=frozenset(verified))


def _in_float32(plan: Any) -> Any:
    """The plan without its router's casts."""
    if isinstance(plan, RouterPlan):
        logits = plan.logits if plan.logits == "child" else next(iter(PRODUCTS))
        return replace(plan, logits=logits, routing=plan.routing.in_float32())
    steps = (
        replace(s, routing=s.routing.in_float32()) if isinstance(s, Mix) else s for s in plan.steps
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
        if 1 <= kept <= n and n > 1 and experts % n == 0 and experts // n > 1
    }
    return tuple(sorted(factors - {1.0})), tuple(sorted(groups))
