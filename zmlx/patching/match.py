"""Finds the plan for a module: compares what it computes with the templates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from types import MemberDescriptorType
from typing import Any

import mlx.core as mx
import mlx.nn as mnn
import numpy as np

from ..nn import functional as F
from . import code
from .dtypes import FLOATS, as_it_may_be
from .leaves import SIZES, Leaves, Sizes
from .mixtures import Mixtures
from .plans import CodePlan, DropoutPlan, MLPPlan, NormPlan, Plan, RouterPlan
from .reasons import Reasons, UnmatchedError
from .routing import Routing
from .shadows import child_of, count_of, detached, entries, is_opaque, named
from .steps import Add, AddNorm, BlockPlan, CallChild, Mix
from .surroundings import kept
from .templates import Unit, units
from .wiring import (
    Call,
    Wiring,
    new_random_states,
    parameters_of_call,
    random_states,
    widths,
    wiring,
)

#: Leaves that are never candidates, so that a report does not list them.
_OTHER_LEAVES = (
    mnn.Linear, mnn.QuantizedLinear, mnn.Embedding, mnn.QuantizedEmbedding, mnn.Conv1d, mnn.Conv2d,
    mnn.Identity,
)  # fmt: skip

_ATTENTION = ("scaled_dot_product_attention",)


class Matcher(Mixtures, Leaves):
    """Plans for the modules of a model. Modules of one class with the same attributes and shapes
    of parameters are captured once."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Plan | UnmatchedError] = {}
        self._unit: Unit | None = None  # of the module that is compared

    def plan(self, module: mnn.Module) -> Plan | None:
        """The plan, None for a module that is no candidate; raises `UnmatchedError` with a reason
        for one that is, but does not match. What is patched below it counts as what it was."""
        module = detached(module)
        key = _key(module)
        found = self._known.get(key)
        if found is None and key not in self._known:
            above, self._unit = self._unit, None
            try:
                found = self._that_stays(module)
            except UnmatchedError as reason:
                found = reason
            finally:
                self._unit = above
            self._known[key] = found  # type: ignore[assignment]
        if isinstance(found, UnmatchedError):
            raise found
        return found

    def _find_in_all(self, module: mnn.Module) -> Plan | None:
        """By its graph, or else by what its code calls."""
        calls = code.calls(type(module))
        if F.ATTENTION in calls.ops:
            return _code_plan("attention", module, calls)
        try:
            with kept(module):
                found = self._same_in_all(module)
        except UnmatchedError:
            if not calls.ops:
                raise
            found = None
        return found or (_code_plan("calls", module, calls) if calls.ops else None)

    def _that_stays(self, module: mnn.Module) -> Plan | None:
        """The plan; raises where the code of the module goes by its class, which a patched one has
        another of."""
        found = self._find_in_all(module)
        if found is not None and code.asks_for_its_class(type(module)):
            raise UnmatchedError("its code uses type(self)")
        return found

    def _same_in_all(self, module: mnn.Module) -> Plan | None:
        """A plan runs in evaluation and in training, and for all sizes, so it has to be found in
        both modes and for all of `SIZES`: what drops a part of its values, or has another function,
        in one of them is left alone."""
        settings = product((False, True), SIZES)
        plan = self._find_in(module, *next(settings))
        if plan is None or isinstance(plan, DropoutPlan):
            return plan
        if _has_slots(module):
            raise UnmatchedError("it has attributes in slots")
        for training, sizes in settings:
            try:
                same = self._find_in(module, training, sizes, _routing_of(plan)) == plan
            except UnmatchedError:
                same = False
            if not same:
                where = [f"for {sizes.what}"] * (sizes is not SIZES[0]) + ["in training"] * training
                raise UnmatchedError(f"it computes another thing {' '.join(where)}")
        return plan

    def _find_in(
        self, module: mnn.Module, training: bool, sizes: Sizes, found: Routing | None = None
    ) -> Plan | None:
        """The plan in a mode, for what has these sizes; `found`: the routing to look for."""
        above = self._sizes, self._found
        self._sizes, self._found = sizes, found
        try:
            with in_mode(module, training):
                return self._find(module)
        finally:
            self._sizes, self._found = above

    def _find(self, module: mnn.Module) -> Plan | None:
        if isinstance(module, _OTHER_LEAVES):
            return None
        if type(module) is mnn.Dropout:
            axes = frozenset((d, n) for d in FLOATS for n in range(9))
            return DropoutPlan("dropout", "dropout", 4096, axes)
        _all_found_by_path(module)
        if not _children(module):
            drawn = new_random_states()
            found = self._router(module) or self._leaf(module)
            if found is not None and random_states() != drawn:
                raise UnmatchedError("its call draws random numbers")
            return found
        router = self._router(module)
        if router is not None:
            return router
        try:
            found = self._experts(module) or self._mixture(module) or self._mlp(module)
        except UnmatchedError as reason:
            if (block := self._block(module)) is None:
                raise reason from None
            return block
        return found or self._block(module)

    def _wirings(
        self,
        module: mnn.Module,
        axes: Sequence[int],
        candidates: Iterable[Sequence[int]],
        alone: bool = False,
    ) -> list[tuple[mx.Dtype, int, list[Wiring]]]:
        """The wirings for all dtypes and these numbers of axes that the module takes, of a call on
        arrays with the first of these last axes that it takes, `alone` or with other arguments: of
        the module as it is, and in another dtype than its own also of one in that."""

        def traced(
            n: int, last: Sequence[int], dtype: mx.Dtype = mx.float32, of: mnn.Module = module
        ) -> Wiring:
            own = [mx.zeros((*self._sizes.leads[n - 2], width), dtype) for width in last]
            return wiring(self._graphs, of, *own, few=SIZES[0].leads[n - 2], alone=alone)

        found: list[tuple[mx.Dtype, int, list[Wiring]]] = []
        last: Sequence[int] | None = None
        reasons = Reasons()
        for candidate in candidates:
            try:
                traced(axes[-1], candidate)
                last = candidate
                break
            except UnmatchedError as reason:
                reasons.add(reason)
        if last is None:
            raise reasons.one("its call cannot be captured: nothing shows its width")
        for n in axes:
            for dtype in FLOATS:
                try:
                    found.append((dtype, n, [traced(n, last, dtype, m)
                                             for m in as_it_may_be(module, dtype)]))  # fmt: skip
                except Exception:
                    continue
        return found

    def _mlp(self, module: mnn.Module) -> Plan | None:
        """A module of projections with one array, whose other arguments, if any, are their
        defaults. One that takes others may be attention, or anything else: that it is no
        feed-forward network is no reason then."""
        children = _children(module)
        parameters = parameters_of_call_or_none(module)
        needed = any(p.default is p.empty for p in parameters[1:])
        if len(children) > 4 or not parameters or needed:
            return None
        projections = [c for c in children if _is_projection(c)]
        if len(projections) not in (2, 3):
            return None
        try:
            return self._mlp_alone(module)
        except UnmatchedError:
            if len(parameters) == 1:
                raise
            return None

    def _mlp_alone(self, module: mnn.Module) -> MLPPlan:
        plans: dict[MLPPlan, set[tuple[mx.Dtype, int]]] = {}
        for dtype, axes, found in self._wirings(module, (2, 3), _alone(module), alone=True):
            plan, *others = (self._mlp_of(module, one) for one in found)
            if plan is not None and all(other == plan for other in others):
                plans.setdefault(plan, set()).add((dtype, axes))
        if not plans:
            raise UnmatchedError("what it does between its projections equals no gated unit")
        plan, verified = max(plans.items(), key=lambda item: len(item[1]))
        fields = {**plan.__dict__, "verified": frozenset(verified)}
        return MLPPlan(**fields)

    def _mlp_of(self, module: mnn.Module, found: Wiring) -> MLPPlan | None:
        calls, graphs = found.calls, self._graphs
        if len(calls) not in (2, 3) or not all(_plain(c) for c in calls):
            return None
        *inputs, output = calls
        x, last = graphs.input(0), graphs.input(len(calls))
        if not self._algebra.same([found.result], [last]):
            return None
        if any(c.arguments != (x,) for c in inputs):
            return None
        between = output.arguments[0]
        arrays = [mx.zeros(shape, dtype) for shape, dtype in found.shapes[:-1]]
        width = found.shapes[-2][0][-1] if len(inputs) == 2 else found.shapes[0][0][-1]
        paths = tuple(c.path for c in inputs)
        lead_in = mx.zeros((1,))

        def equals(template: Callable[..., Any]) -> bool:
            try:
                found = graphs.capture(lambda _, *a: [template(*a)], [lead_in, *arrays])
                return self._algebra.same(found, [between])
            except Exception:
                return False

        if len(inputs) == 2 and arrays[0].shape != arrays[1].shape:
            return None
        for unit in self._likely(units(len(inputs))):
            if equals(unit.in_mlx):
                self._unit = unit
                return MLPPlan(
                    "mlp", unit.op, width // 2 if unit.kind == "packed" else width, frozenset(),
                    paths, output.path, unit.kind, unit.gate_first, unit.function,
                )  # fmt: skip
        return None

    def _likely(self, candidates: Sequence[Unit]) -> Iterator[Unit]:
        """The candidates, and before the others the one that was found in another mode, for another
        size or dtype."""
        if self._unit in candidates:
            yield self._unit  # type: ignore[misc]
        yield from (unit for unit in candidates if unit != self._unit)

    def _block(self, module: mnn.Module) -> Plan | None:
        """A block with a sum that is normed."""
        if not any(self._is_norm(c) for c in _children(module)):
            return None
        stacks = (v for v in dict.values(module) if not isinstance(v, mnn.Module))
        if any(isinstance(v, (list, dict)) for v in stacks):
            return None  # a stack of layers, not a layer
        parameters = parameters_of_call_or_none(module)
        if not parameters:
            return None
        try:
            reason, found = None, self._block_of(module, parameters, _alone(module))
        except UnmatchedError as error:
            reason, found = error, None
        # The sum may be one of what a child returns and a second array.
        if found is None and _is_needed(parameters[1:2]):
            normed = {n for c in _children(module) if self._is_norm(c) for n in widths(c)}
            with suppress(UnmatchedError):
                found = self._block_of(module, parameters, product(widths(module), normed))
        if found is None and reason is not None:
            raise reason
        return found

    def _block_of(
        self, module: mnn.Module, parameters: Sequence[Any], candidates: Iterable[Sequence[int]]
    ) -> BlockPlan | None:
        """A block of which the first arguments are arrays with some of these last axes."""
        plans: dict[BlockPlan, set[tuple[mx.Dtype, int]]] = {}
        reason, understood = None, False
        for dtype, axes, found in self._wirings(module, (3,), candidates):
            try:
                programs = [(*self._program(module, one), one) for one in found]
            except UnmatchedError as error:
                reason = reason or error
                continue
            understood = True
            plan, *same = (self._block_plan(parameters, *program) for program in programs)
            if plan is not None and all(other == plan for other in same):
                plans.setdefault(plan, set()).add((dtype, axes))
        if not plans:
            if reason is not None and not understood:
                raise reason
            return None
        plan, verified = max(plans.items(), key=lambda item: len(item[1]))
        return replace(plan, verified=frozenset(verified))

    def _block_plan(
        self, parameters: Sequence[Any], steps: list[Any], result: int, found: Wiring
    ) -> BlockPlan | None:
        """The plan of a block with these steps, None where no sum is normed."""
        others = parameters[1:]
        pair = next((s for s in steps if isinstance(s, AddNorm)), None)
        if pair is None or not all(_adds(steps, i) for i in range(1, found.arrays)):
            return None
        at = next(i for i, call in enumerate(found.calls) if call.path == pair.path)
        return BlockPlan(
            "residual_norm",
            f"add_{pair.norm.op}",
            found.shapes[at][0][-1],
            frozenset(),
            tuple(p.name for p in others),
            tuple(p.default for p in others),
            sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in others),
            tuple(steps),
            result,
            found.arrays,
        )

    def _is_norm(self, child: mnn.Module) -> bool:
        try:
            return isinstance(self.plan(child), NormPlan)
        except UnmatchedError:
            return False

    def _program(self, module: mnn.Module, found: Wiring) -> tuple[list[Any], int]:
        """The wiring as steps. Raises where it holds more than calls and sums."""
        steps: list[Any] = []
        registers = {self._graphs.input(i): i for i in range(found.arrays)}
        count = found.arrays

        def register(number: int) -> int:
            nonlocal count
            if number in registers:
                return registers[number]
            expression = self._graphs[number]
            if expression[0] != "Add" or expression[1] != "[]":
                raise UnmatchedError(f"its call does more than add ({expression[0]})")
            left, right = (register(n) for n in expression[2])
            steps.append(Add(left, right))
            registers[number] = count
            count += 1
            return registers[number]

        for i, call in enumerate(found.calls):
            arguments = tuple(register(v) if isinstance(v, int) else v for v in call.arguments)
            keywords = tuple(
                (n, register(v) if isinstance(v, int) else v) for n, v in call.keywords
            )
            output = self._graphs.input(i + found.arrays)
            previous = steps[-1] if steps else None
            norm = self._normed(module, call)
            if norm and isinstance(previous, Add) and arguments == (count - 1,):
                cls = type(child_of(module, call.path))
                steps[-1] = AddNorm(
                    previous.left, previous.right, call.path, norm.norm, norm.verified, cls
                )
            else:
                steps.append(CallChild(call.path, call.method, arguments, keywords))
            registers[output] = count
            count += 1
        return steps, register(found.result)

    def _normed(self, module: mnn.Module, call: Call) -> NormPlan | None:
        if not _plain(call):
            return None
        try:
            plan = self.plan(child_of(module, call.path))
        except UnmatchedError:
            return None
        # A spelling that rounds between norm and weight rounds there in the fused kernel too late
        # for half precision only, which the probe accepts or refuses.
        return plan if isinstance(plan, NormPlan) else None


def _code_plan(kind: str, module: mnn.Module, calls: code.Calls) -> CodePlan:
    op = next(op for op in code.OPS if op in calls.ops)
    width = count_of(module, "head_dim", 128) if op == F.ATTENTION else 4096
    return CodePlan(kind, op, width, frozenset(), calls.methods)


def _routing_of(plan: Plan) -> Routing | None:
    """The routing that a plan has, if any."""
    if isinstance(plan, RouterPlan):
        return plan.routing
    steps = plan.steps if isinstance(plan, BlockPlan) else ()
    return next((s.routing for s in steps if isinstance(s, Mix)), None)


def _alone(module: mnn.Module) -> Iterator[Sequence[int]]:
    """Last axes that the module's array may have, if it is one."""
    return ((width,) for width in widths(module))


def _adds(steps: Sequence[Any], register: int) -> bool:
    """Whether a register is in a sum: what is only handed on may be no array."""
    sums = [s for s in steps if isinstance(s, (Add, AddNorm))]
    return any(register in (s.left, s.right) for s in sums)


def _is_needed(parameters: Sequence[Any]) -> bool:
    """Whether there is a parameter, without a default, that may be given by position."""
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def parameters_of_call_or_none(module: mnn.Module) -> list[Any]:
    """The named parameters of a call, none where one cannot be given by name."""
    try:
        return list(parameters_of_call(module))
    except (UnmatchedError, ValueError, TypeError):
        return []


def _children(module: mnn.Module) -> list[mnn.Module]:
    found: list[mnn.Module] = []

    def collect(value: Any) -> None:
        if isinstance(value, mnn.Module):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                collect(v)
        elif isinstance(value, dict):
            for v in dict.values(value):
                collect(v)

    for value in dict.values(module):
        collect(value)
    return found


def _all_found_by_path(module: mnn.Module) -> None:
    """Raises where a plan could not find a child again, as one whose name has a dot."""

    def look(value: Any, path: str) -> None:
        if isinstance(value, mnn.Module):
            try:
                found = child_of(module, path)
            except Exception:
                found = None
            if found is not value:
                raise UnmatchedError(f"its child {path!r} is not found by that path")
        elif isinstance(value, (list, tuple, dict)):
            for k, v in entries(value):
                look(v, f"{path}.{k}")

    for key, value in entries(module):
        look(value, key)


def _has_slots(module: mnn.Module) -> bool:
    """Whether the module, or one without arrays in it, may have attributes in `__slots__`, whose
    changes nothing notices."""
    own = (vars(cls) for cls in type(module).__mro__ if cls not in mnn.Module.__mro__)
    return any(isinstance(v, MemberDescriptorType) for names in own for v in names.values()) or any(
        _has_slots(child) for child in _children(module) if not is_opaque(child)
    )


def _is_projection(child: mnn.Module) -> bool:
    weight = dict.get(child, "weight")
    if isinstance(weight, mx.array):
        return bool(weight.ndim == 2)
    return any(_is_projection(c) for c in _children(child))


def _plain(call: Call) -> bool:
    """Whether a child is called with one array and nothing else."""
    return (
        call.method == "__call__"
        and not call.keywords
        and len(call.arguments) == 1
        and isinstance(call.arguments[0], int)
    )


@contextmanager
def in_mode(module: mnn.Module, training: bool) -> Iterator[None]:
    """The module and all below it in a mode; after it in their own."""
    modes = [(m, vars(m)["_training"]) for _, m in named(module) if "_training" in vars(m)]
    try:
        for m, _ in modes:
            vars(m)["_training"] = training
        yield
    finally:
        for m, own in modes:
            vars(m)["_training"] = own


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is traced meanwhile may draw; the random numbers of MLX, Python and NumPy go on where
    they were."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
        random.setstate(pythons)
        np.random.set_state(numpys)


def _key(module: mnn.Module) -> Any:
    """Equal for modules whose calls do the same."""

    def attribute(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return (type(value), value)
        if isinstance(value, (list, tuple)) and len(value) < 64:
            return (type(value), tuple(attribute(v) for v in value))
        return id(value)

    def content(value: Any) -> Any:
        if isinstance(value, mx.array):
            return ("array", tuple(value.shape), value.dtype)
        if isinstance(value, mnn.Module):
            return _key(value)
        if isinstance(value, (list, tuple)):
            return tuple(content(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, content(v)) for k, v in entries(value))
        return attribute(value)

    ignored = ("_no_grad", "_training")
    plain = tuple((k, attribute(v)) for k, v in sorted(vars(module).items()) if k not in ignored)
    return (type(module), plain, tuple((k, content(v)) for k, v in entries(module)))
