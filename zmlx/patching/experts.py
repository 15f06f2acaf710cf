"""Finds the plan for stacked experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..nn.choosing import weights
from ..nn.expert_rows import SORTED
from .algebra import Algebra
from .capture import Graphs
from .dtypes import FLOATS, as_it_may_be
from .leaves import Sizes
from .plans import ExpertsPlan, Plan
from .reasons import Reasons, UnmatchedError
from .shadows import entry, shadow
from .templates import GATED
from .wiring import arguments_needed, own_call, widths, wiring

#: A dtype and a number of axes that a plan was seen to hold for.
Found = tuple[mx.Dtype, int]


class Experts:
    """Compares experts with gated networks of three projections."""

    _graphs: Graphs
    _algebra: Algebra
    _sizes: Sizes

    def _experts(self, module: mnn.Module) -> Plan | None:
        """Three stacked projections, called with tokens and indices."""
        projections = [c for c in dict.values(module) if is_stacked(c)]
        if len(projections) != 3 or arguments_needed(module) != 2:
            return None
        count, *_ = next(stacks(projections[0])).shape
        plans: dict[ExpertsPlan, set[Found]] = {}
        reasons = Reasons()
        for width, dtype, lead in product(widths(module), FLOATS, self._sizes.leads[:2]):
            try:
                plan, *others = (
                    self._experts_of(m, (*lead, width), dtype, count)
                    for m in as_it_may_be(module, dtype)
                )
                if any(other != plan for other in others):
                    raise UnmatchedError("what it computes goes by the dtype of its parameters")
            except UnmatchedError as reason:
                reasons.add(reason)
                continue
            except Exception:
                continue
            if plan is None:
                reasons.add(UnmatchedError("its call equals no gated experts"))
            else:
                plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            raise reasons.one("its call cannot be captured")
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

                unit_of = graphs.capture(between, [x, indices, *outputs])
                if self._algebra.same(unit_of, [last.arguments[0]]):
                    plan = ExpertsPlan("experts", "", found.shapes[0][0][-1], frozenset(),
                                       gate.path, up.path, last.path, count,
                                       self._linear(module), op)  # fmt: skip
                    return replace(plan, op=plan.experts(module).op())
        raise UnmatchedError("what it does between its projections equals no gated unit")

    def _linear(self, module: mnn.Module) -> type | None:
        """The class of the projections, where its call is a gathered product of the weight."""
        kinds = {type(c) for c in dict.values(module) if is_stacked(c)}
        layer = next(c for c in dict.values(module) if is_stacked(c))
        if len(kinds) != 1 or set(layer) != {"weight"}:
            return None
        weight = entry(layer, "weight")
        x, owners = mx.zeros((5, 1, weight.shape[-1])), mx.zeros((5,), mx.uint32)

        def own(x: mx.array, i: mx.array, w: mx.array) -> Any:
            return [own_call(shadow(layer, {"weight": w}), x, i, sorted_indices=True)]

        def template(x: mx.array, i: mx.array, w: mx.array) -> Any:
            return [mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=i, sorted_indices=True)]

        inputs = [x, owners, mx.zeros(weight.shape)]
        same = self._graphs.capture(own, inputs) == self._graphs.capture(template, inputs)
        return type(layer) if same else None


def stacks(child: Any) -> Iterator[mx.array]:
    """The stacked weights of a projection, or of the one that it wraps."""
    return (weight for weight in weights(child) if weight.ndim == 3)


def is_stacked(child: Any) -> bool:
    """Whether it is a projection with a matrix per expert."""
    return next(stacks(child), None) is not None
