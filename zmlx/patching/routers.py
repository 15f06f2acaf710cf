"""Finds the plan for routers: the routing whose trace equals theirs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..arguments import INDICES
from .capture import Graphs
from .dtypes import FLOATS, as_it_may_be, own_dtype
from .experts import Found
from .leaves import Sizes
from .plans import PRODUCTS, Plan, RouterPlan
from .reasons import UnmatchedError
from .routing import Choice, Routing, choices, weighings
from .shadows import detached, entries, entry, shadow
from .steps import Mix
from .wiring import arguments_needed, own_call, widths, wiring


class Routers:
    """Compares routers with the choices and weighings of `routing`."""

    _graphs: Graphs
    _sizes: Sizes

    #: What to look for where it was found for other sizes; None for any.
    _found: Routing | None = None

    def _router(self, module: mnn.Module) -> Plan | None:
        """A module with a stacked row per expert, or a child that returns a logit for each, that
        returns two arrays."""
        arrays = {k: v for k, v in entries(module) if isinstance(v, mx.array)}
        matrices = [k for k, v in arrays.items() if v.ndim == 2]
        vectors = [k for k, v in arrays.items() if v.ndim == 1]
        inner = [v for v in dict.values(module) if isinstance(v, (list, dict))]
        if len(matrices) + len(inner) != 1 or len(vectors) > 1:
            return None
        if len(matrices) + len(vectors) < len(arrays) or arguments_needed(module) != 1:
            return None
        plans: dict[RouterPlan, set[Found]] = {}
        tiny: set[float] = set()
        understood = False
        lengths = [entry(module, k).shape[1] for k in matrices] or widths(module)
        for width, dtype, lead in product(lengths, FLOATS, self._sizes.leads[:2]):
            x = mx.zeros((*lead, width), dtype)
            traced: list[tuple[mnn.Module, _Pair, mx.array, mx.array]] = []
            every: list[RouterPlan | None] = []
            try:
                for may_be in as_it_may_be(module, dtype):
                    found = self._pair(may_be, x, matrices, vectors)
                    # Nothing is computed.
                    first, second = own_call(detached(may_be), x)
                    traced.append((may_be, found, first, second))
            except Exception:
                continue  # not a router, as far as can be seen
            for may_be, found, first, second in traced:
                chosen = [y for y in (first, second) if y.dtype in INDICES]
                k = first.shape[-1] if first.ndim else 0
                if len(chosen) != 1 or first.shape != second.shape or not 0 < k <= found.experts:
                    every = []
                    break
                understood = True
                tiny |= small_numbers(self._graphs, found.results)
                every.append(self._router_of(may_be, found, k, tiny))
            if every and every[0] is not None and all(other == every[0] for other in every):
                plans.setdefault(every[0], set()).add((dtype, len(lead) + 1))
        if not plans:
            if understood:
                raise UnmatchedError("its routing equals no known one")
            return None
        return best_plan(plans, own_dtype(module))  # type: ignore[no-any-return]

    def _pair(
        self, module: mnn.Module, x: mx.array, matrices: list[str], vectors: list[str]
    ) -> _Pair:
        """The trace of a call that returns two arrays; raises where it does not."""
        names = [*matrices, *vectors]
        if not matrices:
            found = wiring(self._graphs, module, x, pairs=True)
            (only,) = found.calls
            if found.second is None or only.arguments != (self._graphs.input(0),):
                raise UnmatchedError("it is no router")
            if only.method != "__call__" or only.keywords or len(found.shapes) != 1:
                raise UnmatchedError("it is no router")
            logits = mx.zeros(*found.shapes[0])
            bias = input_at(found.input_of(entry(module, vectors[0]))) if vectors else None
            return _Pair(found.given(x), (found.result, found.second), logits.shape[-1],
                         [("child", only.path, input_at(1))], bias, vectors)  # fmt: skip
        (weight,) = matrices
        inputs = [x, mx.zeros(entry(module, weight).shape, entry(module, weight).dtype)]
        inputs += [mx.zeros(entry(module, k).shape) for k in vectors]

        def traced(x: mx.array, *given: mx.array) -> Any:
            first, second = own_call(shadow(module, dict(zip(names, given, strict=True))), x)
            return [first, second]

        one, two = self._graphs.capture(traced, inputs)
        spellings = [(name, weight, _product(f)) for name, f in PRODUCTS.items()]
        return _Pair(inputs, (one, two), inputs[1].shape[0], spellings,
                     input_at(2) if vectors else None, vectors)  # fmt: skip

    def _router_of(
        self, module: mnn.Module, found: _Pair, top_k: int, tiny: set[float]
    ) -> RouterPlan | None:
        experts, (one, two) = found.experts, found.results
        if any(entry(module, k).shape != (experts,) for k in found.vectors):
            return None
        numbers, bias = numbers_of(module, experts), next(iter(found.vectors), None)
        for spelling, weight, logits in found.spellings:
            search = Search(logits, found.bias, top_k, numbers, tiny)
            for first, indices, weights in ((True, one, two), (False, two, one)):
                route = self._routing(search, found.inputs, indices, {weights}, [lambda a, w: w])
                if route is not None:
                    return RouterPlan("router", "topk_gating", experts, frozenset(), spelling,
                                      weight, bias, route[0], top_k, first)  # fmt: skip
        return None

    def _routing(
        self,
        search: Search,
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
        known, found = choices(groups, search.bias is not None), self._found
        if found is not None:
            known = tuple(c for c in known if c.routing.chooses_like(found))

        def chosen(a: Sequence[mx.array]) -> Options:
            given = logits(a), bias(a)
            for choice in known:
                yield choice, partial(choice.indices, *given, k)

        for choice, *_ in self._matching(chosen, inputs, {indices}):

            def weighed(a: Sequence[mx.array], choice: Choice = choice) -> Options:
                of_chosen, kind = choice.weights(logits(a), bias(a), k), a[0].dtype
                for routing, weigh in weighings(choice, scales, sorted(search.tiny)):
                    if found is not None and routing.in_float32() != found.in_float32():
                        continue
                    for finish in finishes:
                        yield routing, partial(_finished, finish, weigh, a, of_chosen, kind)

            for routing, number, kind in self._matching(weighed, inputs, wanted):
                if dtype is None or dtype == kind:
                    return routing, number
        return None

    def _matching(
        self,
        options: Callable[[Sequence[mx.array]], Options],
        inputs: Sequence[mx.array],
        wanted: Container[int],
    ) -> list[tuple[Any, int, mx.Dtype]]:
        """Of the options for these inputs, those whose expression is wanted: value, expression and
        dtype."""
        kept: list[tuple[Any, mx.Dtype]] = []

        def traced(*a: mx.array) -> list[mx.array]:
            kept.clear()
            results = []
            for value, function in options(a):
                try:
                    results.append(function())
                except Exception:
                    continue  # does not take such arrays
                kept.append((value, results[-1].dtype))
            return results or [a[0]]

        numbers = self._graphs.capture(traced, inputs)
        return [(v, n, d) for (v, d), n in zip(kept, numbers, strict=False) if n in wanted]


#: Values, each with a function that returns an array.
Options = Iterator[tuple[Any, Callable[[], mx.array]]]

_Of = Callable[[Sequence[mx.array]], mx.array]


def input_at(index: int) -> _Of:
    """An input of a trace."""
    return lambda a: a[index]


def _none(a: Sequence[mx.array]) -> None:
    return None


def _finished(
    finish: Callable[[Sequence[mx.array], mx.array], mx.array],
    weigh: Callable[[mx.array, mx.Dtype], mx.array],
    a: Sequence[mx.array],
    scores: mx.array,
    dtype: mx.Dtype,
) -> mx.array:
    return finish(a, weigh(scores, dtype))


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
class Search:
    """What a routing may be made of: logits and bias, or None, as functions of a trace's inputs,
    choices a token, factors and groups, and small numbers."""

    logits: _Of
    bias: _Of | None
    top_k: int
    numbers: tuple[tuple[float, ...], tuple[tuple[int, int], ...]]
    tiny: set[float]


def vectors_of(module: mnn.Module) -> dict[str, mx.array]:
    """The module's own arrays that are no matrices."""
    return {k: v for k, v in entries(module) if isinstance(v, mx.array) and v.ndim < 2}


def small_numbers(graphs: Graphs, numbers: Sequence[int]) -> set[float]:
    """Numbers in these expressions that keep a sum from being 0."""
    return {v for v in graphs.scalars(numbers) if 0 < v < 1e-3}


def best_plan(plans: dict[Any, set[Found]], dtype: mx.Dtype) -> Any:
    """The plan that holds in the module's own dtype, and there for most inputs. In float32 casts
    leave no trace, so that what is found in float32 alone counts for a plan with casts, too."""
    for plan, verified in list(plans.items()):
        if all(d == mx.float32 for d, _ in verified):
            for other in plans:
                if other != plan and _in_float32(other) == _in_float32(plan):
                    plans[other] |= verified

    def worth(item: tuple[Any, set[Found]]) -> tuple[bool, int]:
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


def numbers_of(
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
