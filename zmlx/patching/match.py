"""Finds the plan for a module: compares what it computes with the templates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..nn import functional as F
from .capture import Graphs
from .plans import (
    ActivationPlan,
    Add,
    AddNorm,
    AttentionPlan,
    BlockPlan,
    CallChild,
    DropoutPlan,
    GatePlan,
    MLPPlan,
    NormPlan,
    Plan,
    RopePlan,
)
from .templates import ACTIVATIONS, GATED, Norm, norms, packed
from .wiring import (
    Call,
    UnmatchedError,
    Wiring,
    child_of,
    parameters_of_call,
    shadow,
    widths,
    wiring,
)

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

#: Axes before the last that a module is traced with: rows, a batch of prompts, heads.
LEADS = ((3,), (2, 3), (2, 2, 3))

#: Leaves that are never candidates, so that a report does not list them.
_OTHER_LEAVES = (
    mnn.Linear, mnn.QuantizedLinear, mnn.Embedding, mnn.QuantizedEmbedding, mnn.Conv1d, mnn.Conv2d,
    mnn.Identity,
)  # fmt: skip

_ATTENTION = ("scaled_dot_product_attention",)


class Matcher:
    """Plans for the modules of a model. Modules of one class with the same attributes and shapes
    of parameters are captured once."""

    def __init__(self) -> None:
        self._graphs = Graphs()
        self._known: dict[Any, Plan | UnmatchedError] = {}
        self._captured: dict[Any, list[int]] = {}

    def plan(self, module: mnn.Module) -> Plan | None:
        """The plan, None for a module that is no candidate; raises `UnmatchedError` with a reason
        for one that is, but does not match."""
        key = _key(module)
        found = self._known.get(key)
        if found is None and key not in self._known:
            try:
                found = self._find(module)
            except UnmatchedError as reason:
                found = reason
            self._known[key] = found  # type: ignore[assignment]
        if isinstance(found, UnmatchedError):
            raise found
        return found

    def _find(self, module: mnn.Module) -> Plan | None:
        if isinstance(module, _OTHER_LEAVES):
            return None
        if type(module) is mnn.Dropout:
            axes = frozenset((d, n) for d in FLOATS for n in range(9))
            return DropoutPlan("dropout", "dropout", 4096, axes)
        if not _children(module):
            return self._leaf(module)
        attention = attention_methods(type(module))
        if attention:
            width = getattr(module, "head_dim", 128)
            width = width if isinstance(width, int) else 128
            return AttentionPlan("attention", F.ATTENTION, width, frozenset(), attention)
        return self._mlp(module) or self._block(module)

    # -- leaves --

    def _leaf(self, module: mnn.Module) -> Plan | None:
        arrays = {k: v for k, v in module.items() if isinstance(v, mx.array)}
        if (
            len(arrays) != len(module)
            or len(arrays) > 2
            or any(v.ndim != 1 for v in arrays.values())
        ):
            return None
        try:
            parameters = parameters_of_call(module)
        except (UnmatchedError, ValueError, TypeError):
            return None
        required = [p for p in parameters if p.default is p.empty]
        rope = self._rope(module, [p.name for p in parameters])
        if rope is not None:
            return rope
        if len(required) == 2 and not arrays:
            return self._gate(module)
        if len(required) != 1:
            return None
        width = next(iter(arrays.values())).shape[0] if arrays else _width_attribute(module)
        found = self._norm(module, arrays, width) or self._activation(module, arrays, width)
        if found is None and (arrays or any("eps" in k for k in vars(module))):
            raise UnmatchedError("its graph equals no norm and no activation")
        return found

    def _rope(self, module: mnn.Module, parameters: list[str]) -> Plan | None:
        """A rotation by position with the attributes of `mlx.nn.RoPE`, or wavelengths."""
        if len(parameters) != 2 or parameters[1] != "offset":
            return None
        own = vars(module)
        if not isinstance(own.get("dims"), int) or not isinstance(own.get("traditional"), bool):
            return None
        arrays = [k for k, v in module.items() if isinstance(v, mx.array)]
        freqs = arrays[0] if len(arrays) == 1 else None
        base = own.get("base") if freqs is None else None
        if arrays[1:] or (freqs is None and not isinstance(base, (int, float))):
            return None
        scale, verified = own.get("scale", 1.0), set()
        offsets = (0, 3, mx.array(3), mx.array([1, 2]))

        def template(x: mx.array, offset: Any) -> Any:
            wavelengths = None if freqs is None else getattr(module, freqs)
            return [
                mx.fast.rope(
                    x, module.dims, traditional=module.traditional, base=base, scale=scale,
                    offset=offset, freqs=wavelengths,
                )
            ]  # fmt: skip

        for lead in ((2, 5), (2, 3, 5)):
            for dtype in FLOATS:
                x = mx.zeros((*lead, module.dims), dtype)
                try:
                    if all(
                        self._graphs.capture(
                            lambda x, o=offset: [type(module).__call__(module, x, o)], [x]
                        )
                        == self._graphs.capture(lambda x, o=offset: template(x, o), [x])
                        for offset in offsets
                    ):
                        verified.add((dtype, len(lead) + 1))
                except Exception:
                    continue
        if not verified:
            raise UnmatchedError("it turns by position in another way than mx.fast.rope")
        return RopePlan("rope", "rope", module.dims, frozenset(verified), freqs)

    def _norm(self, module: mnn.Module, arrays: dict[str, mx.array], width: int) -> Plan | None:
        for norm in norms(module):
            names = [n for n in (norm.weight, norm.bias) if n is not None]

            def template(
                x: mx.array, *given: mx.array, norm: Norm = norm, names: Any = names
            ) -> Any:
                by_name = dict(zip(names, given, strict=True))
                weight = by_name.get(norm.weight)
                return [norm.in_mlx(x, weight, by_name.get(norm.bias))]

            verified = self._compare(module, arrays, names, width, template, ("norm", norm, width))
            if verified:
                return NormPlan("norm", norm.op, width, verified, norm)
        return None

    def _activation(
        self, module: mnn.Module, arrays: dict[str, mx.array], width: int
    ) -> Plan | None:
        if arrays:
            return None
        for name, function in ACTIVATIONS:
            verified = self._compare(
                module, {}, [], width, lambda x, f=function: [f(x)], ("act", id(function), width)
            )
            if verified:
                return ActivationPlan("activation", F.ACTIVATIONS[name], width, verified, name)
        return None

    def _compare(
        self,
        module: mnn.Module,
        arrays: dict[str, mx.array],
        names: Sequence[str],
        width: int,
        template: Callable[..., Any],
        key: Any,
    ) -> frozenset[tuple[mx.Dtype, int]]:
        """The dtypes and numbers of axes for which module and template have the same graph, in
        training and not."""
        verified: set[tuple[mx.Dtype, int]] = set()
        for lead in LEADS:
            for dtype in FLOATS:
                x = mx.zeros((*lead, width), dtype)
                own = [arrays[n] for n in names]

                def call(x: mx.array, *given: mx.array, training: bool = False) -> Any:
                    twin = shadow(module, dict(zip(names, given, strict=True)))
                    twin.__dict__["_training"] = training
                    return [type(module).__call__(twin, x)]

                try:
                    ours = self._graphs.capture(call, [x, *own])
                    if ours != self._template(key, template, x, own):
                        if not verified:
                            return frozenset()  # the first comparison decides for most
                        continue
                    if ours != self._graphs.capture(
                        lambda x, *g: call(x, *g, training=True), [x, *own]
                    ):
                        continue
                except Exception:
                    if not verified:
                        return frozenset()
                    continue
                verified.add((dtype, len(lead) + 1))
        return frozenset(verified)

    def _template(
        self, key: Any, template: Callable[..., Any], x: mx.array, own: Sequence[mx.array]
    ) -> list[int]:
        full = (key, x.shape, x.dtype, tuple((a.shape, a.dtype) for a in own))
        found = self._captured.get(full)
        if found is None:
            found = self._captured[full] = self._graphs.capture(template, [x, *own])
        return found

    def _gate(self, module: mnn.Module) -> Plan | None:
        for op, function in GATED:
            for first in (True, False):
                verified: set[tuple[mx.Dtype, int]] = set()
                for lead in (*LEADS, (2, 2, 2, 3)):
                    for dtype in FLOATS:
                        x = mx.zeros((*lead, 16), dtype)
                        try:
                            ours = self._graphs.capture(
                                lambda a, b: [type(module).__call__(module, a, b)], [x, x]
                            )
                            theirs = self._graphs.capture(
                                lambda a, b, f=function, first=first: [
                                    f(a, b) if first else f(b, a)
                                ],
                                [x, x],
                            )
                        except Exception:
                            continue
                        if ours == theirs:
                            verified.add((dtype, len(lead) + 1))
                if verified:
                    return GatePlan("gated", op, 4096, frozenset(verified), first)
        return None

    # -- modules with children --

    def _wirings(
        self, module: mnn.Module, leads: Sequence[tuple[int, ...]]
    ) -> list[tuple[mx.Dtype, tuple[int, ...], Wiring]]:
        """The wirings for all dtypes and leading axes that the module takes."""
        found = []
        width = None
        reason = UnmatchedError("its call cannot be captured")
        for candidate in widths(module):
            try:
                wiring(self._graphs, module, mx.zeros((*leads[-1], candidate), mx.float32))
                width = candidate
                break
            except UnmatchedError as error:
                reason = error
            except Exception as error:
                reason = UnmatchedError(f"its call cannot be captured: {_short(error)}")
        if width is None:
            raise reason
        for lead in leads:
            for dtype in FLOATS:
                x = mx.zeros((*lead, width), dtype)
                try:
                    found.append((dtype, lead, wiring(self._graphs, module, x)))
                except Exception:
                    continue
        return found

    def _mlp(self, module: mnn.Module) -> Plan | None:
        """A module of projections with one array."""
        children = _children(module)
        if len(children) > 4 or len(parameters_of_call_or_none(module)) != 1:
            return None
        projections = [c for c in children if _is_projection(c)]
        if len(projections) not in (2, 3):
            return None
        plans: dict[MLPPlan, set[tuple[mx.Dtype, int]]] = {}
        for dtype, lead, found in self._wirings(module, LEADS[:2]):
            plan = self._mlp_of(module, found)
            if plan is not None:
                plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
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
        if found.result != last or any(c.arguments != (x,) for c in inputs):
            return None
        between = output.arguments[0]
        arrays = [mx.zeros(shape, dtype) for shape, dtype in found.shapes[:-1]]
        width = found.shapes[-2][0][-1] if len(inputs) == 2 else found.shapes[0][0][-1]
        paths = tuple(c.path for c in inputs)
        lead_in = mx.zeros((1,))
        empty: frozenset[Any] = frozenset()

        def equals(template: Callable[..., Any]) -> bool:
            try:
                found = graphs.capture(lambda _, *a: [template(*a)], [lead_in, *arrays])
                return bool(found[0] == between)
            except Exception:
                return False

        if len(inputs) == 2:
            if arrays[0].shape != arrays[1].shape:
                return None
            for op, unit in GATED:
                for first in (True, False):
                    if equals(lambda a, b, f=unit, s=first: f(a, b) if s else f(b, a)):
                        return MLPPlan(
                            "mlp", op, width, empty, paths, output.path, "gated", first, ""
                        )
            return None
        for op, first, unit in packed():
            if equals(unit):
                return MLPPlan(
                    "mlp", op, width // 2, empty, paths, output.path, "packed", first, ""
                )
        for name, activation in ACTIVATIONS:
            if equals(activation):
                op = F.ACTIVATIONS[name]
                return MLPPlan(
                    "mlp", op, width, empty, paths, output.path, "activation", True, name
                )
        return None

    def _block(self, module: mnn.Module) -> Plan | None:
        """A block with a sum that is normed."""
        if not any(self._is_norm(c) for c in _children(module)):
            return None
        stacks = (v for v in module.values() if not isinstance(v, mnn.Module))
        if any(isinstance(v, (list, dict)) for v in stacks):
            return None  # a stack of layers, not a layer
        parameters = parameters_of_call_or_none(module)
        if not parameters:
            return None
        others = parameters[1:]
        plans: dict[BlockPlan, set[tuple[mx.Dtype, int]]] = {}
        reason, understood = None, False
        for dtype, lead, found in self._wirings(module, ((1, 1), (2, 3))):
            try:
                steps, result = self._program(module, found)
            except UnmatchedError as error:
                reason = reason or error
                continue
            understood = True
            if not any(isinstance(s, AddNorm) for s in steps):
                continue
            width = found.shapes[0][0][-1]
            pair = next(s for s in steps if isinstance(s, AddNorm))
            plan = BlockPlan(
                "residual_norm",
                f"add_{pair.norm.op}",
                width,
                frozenset(),
                tuple(p.name for p in others),
                tuple(None if p.default is p.empty else p.default for p in others),
                sum(p.default is p.empty for p in others),
                tuple(steps),
                result,
            )
            plans.setdefault(plan, set()).add((dtype, len(lead) + 1))
        if not plans:
            if reason is not None and not understood:
                raise reason
            return None
        plan, verified = max(plans.items(), key=lambda item: len(item[1]))
        return BlockPlan(**{**plan.__dict__, "verified": frozenset(verified)})

    def _is_norm(self, child: mnn.Module) -> bool:
        try:
            return isinstance(self.plan(child), NormPlan)
        except UnmatchedError:
            return False

    def _program(self, module: mnn.Module, found: Wiring) -> tuple[list[Any], int]:
        """The wiring as steps. Raises where it holds more than calls and sums."""
        steps: list[Any] = []
        registers: dict[int, int] = {self._graphs.input(0): 0}
        count = 1

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
            output = self._graphs.input(i + 1)
            previous = steps[-1] if steps else None
            norm = self._normed(module, call)
            if norm and isinstance(previous, Add) and arguments == (count - 1,):
                steps[-1] = AddNorm(previous.left, previous.right, call.path, norm)
            else:
                steps.append(CallChild(call.path, call.method, arguments, keywords))
            registers[output] = count
            count += 1
        return steps, register(found.result)

    def _normed(self, module: mnn.Module, call: Call) -> Norm | None:
        if not _plain(call):
            return None
        try:
            plan = self.plan(child_of(module, call.path))
        except UnmatchedError:
            return None
        # A spelling that rounds between norm and weight rounds there in the fused kernel too late
        # for half precision only, which the probe accepts or refuses.
        return plan.norm if isinstance(plan, NormPlan) else None


def parameters_of_call_or_none(module: mnn.Module) -> list[Any]:
    """The parameters of a call, none where they are not all named."""
    try:
        return list(parameters_of_call(module))
    except (UnmatchedError, ValueError, TypeError):
        return []


def attention_methods(cls: type) -> tuple[str, ...]:
    """Methods of cls whose code refers to mlx-lm's attention function by a global name."""
    base = sys.modules.get("mlx_lm.models.base")
    if base is None:
        return ()
    original = base.scaled_dot_product_attention
    found = []
    for name in dir(cls):
        function: Any = getattr(cls, name, None)
        code = getattr(function, "__code__", None)
        if code is None or function.__module__.startswith("mlx.nn"):
            continue
        if any(function.__globals__.get(n) is original for n in code.co_names):
            found.append(name)
    return tuple(found)


def _children(module: mnn.Module) -> list[mnn.Module]:
    found: list[mnn.Module] = []

    def collect(value: Any) -> None:
        if isinstance(value, mnn.Module):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                collect(v)
        elif isinstance(value, dict):
            for v in value.values():
                collect(v)

    for value in module.values():
        collect(value)
    return found


def _is_projection(child: mnn.Module) -> bool:
    weight = child.get("weight")
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


def _width_attribute(module: mnn.Module) -> int:
    """Row length to try for a module without parameters."""
    for name in ("dims", "dim", "head_dim", "hidden_size"):
        value = getattr(module, name, None)
        if isinstance(value, int) and 0 < value <= 1 << 16:
            return value
    return 16


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:100]


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
            return tuple((k, content(v)) for k, v in value.items())
        return attribute(value)

    ignored = ("_no_grad", "_training")
    plain = tuple((k, attribute(v)) for k, v in sorted(vars(module).items()) if k not in ignored)
    return (type(module), plain, tuple((k, content(v)) for k, v in module.items()))
