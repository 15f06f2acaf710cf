"""What takes the place of a module's call: one class per kind of replacement.

A plan holds names and numbers, no arrays: parameters are read from the module at each call, so
that training, quantising, LoRA and loading weights work on a patched model as on any other. An
input that the plan was not verified for (another dtype, number of axes or argument) runs the
module's own call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..arguments import INDICES
from ..choice import Choice, choice, use_kernel
from ..nn import functional as F
from ..nn.choosing import TYPICAL_ROWS
from ..nn.dropout import dropped
from ..nn.expert_rows import Experts, combined, each
from .held import holds_the_same
from .routing import Routing
from .templates import OF_X, Norm
from .wiring import Given, child_of, original_class

#: The default of a parameter without one.
EMPTY: Any = inspect.Parameter.empty

Verified = frozenset[tuple[mx.Dtype, int]]

#: The attribute of a module that holds its plan.
PLAN = "_zmlx_plan"


def plan_of(module: nn.Module) -> Any:
    """The plan that a module runs, None if it is not patched."""
    return vars(module).get(PLAN) if hasattr(type(module), "_zmlx_class") else None


@dataclass(frozen=True)
class Plan:
    """A replacement.

    Attributes:
        kind: as `only` and `exclude` name it.
        op: the catalogue's op.
        width: the length of the rows that op works on.
        verified: (dtype, number of axes) of inputs for which the module's graph was compared.
    """

    kind: str
    op: str
    width: int
    verified: Verified

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def runs(self, dtype: mx.Dtype, training: bool = False) -> Choice:
        """What runs op on a few hundred rows in the settings in force; `training`: with its
        gradient."""
        return choice(self.op, (TYPICAL_ROWS, self.width), dtype, training=training)

    def needs(self) -> tuple[str, ...]:
        """Paths of children without whose replacement this one changes nothing."""
        return ()

    def reads(self) -> tuple[str, ...]:
        """Attributes of the module, other than arrays, that are read at each call."""
        return ()

    def computes(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Paths of children with arrays whose call the plan replaces by its own, each with the
        attributes that are read from it at each call."""
        return ()

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        """The module's call."""
        if a or k or not isinstance(x, mx.array) or (x.dtype, x.ndim) not in self.verified:
            return original(module, x, *a, **k)
        return self.apply(module, x)

    def apply(self, module: Any, x: mx.array) -> mx.array:
        """The replacement, for one verified array."""
        raise NotImplementedError


@dataclass(frozen=True)
class NormPlan(Plan):
    """A module that is a norm."""

    norm: Norm

    def reads(self) -> tuple[str, ...]:
        return (self.norm.eps_name,)

    def apply(self, module: Any, x: mx.array) -> mx.array:
        norm = self.norm
        eps = getattr(module, norm.eps_name) if norm.eps_name else norm.eps
        weight, bias = norm.parameters(module)
        if norm.op == "rms_norm":
            y = F.rms_norm(x, weight, eps)
        else:
            y = F.layer_norm(x, weight, bias, eps)
        return y.astype(x.dtype) if norm.spelling in OF_X else y


@dataclass(frozen=True)
class GroupNormPlan(Plan):
    """A module that is a group norm over all axes but the first.

    Attributes:
        groups, eps: names of the attributes that hold them.
        weight, bias: names of the parameters, or None.
        interleaved: whether a group is every `groups`-th channel, as in `mlx.nn.GroupNorm` unless
            it is PyTorch's.
    """

    groups: str
    eps: str
    weight: str | None
    bias: str | None
    interleaved: bool

    def reads(self) -> tuple[str, ...]:
        return self.groups, self.eps

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        known = not a and not k and (x.dtype, x.ndim) in self.verified
        if not known or not use_kernel("group_norm", x):
            return original(module, x, *a, **k)
        weight, bias = (None if n is None else module[n] for n in (self.weight, self.bias))
        return kernels.group_norm(
            x, getattr(module, self.groups), weight, bias, getattr(module, self.eps),
            not self.interleaved,
        )  # fmt: skip


@dataclass(frozen=True)
class ActivationPlan(Plan):
    """A module that is an activation of one array."""

    function: str

    def apply(self, module: Any, x: mx.array) -> mx.array:
        return F.activations[self.function](x)


@dataclass(frozen=True)
class GatePlan(Plan):
    """A module that is a gated unit of two arrays."""

    gate_first: bool

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        if k or len(a) != 1 or (x.dtype, x.ndim) not in self.verified or a[0].dtype != x.dtype:
            return original(module, x, *a, **k)
        gate, up = (x, a[0]) if self.gate_first else (a[0], x)
        return F.gated[self.op](gate, up)


@dataclass(frozen=True)
class MLPPlan(Plan):
    """A feed-forward network: projections in, a unit, a projection out.

    Attributes:
        inputs: paths of the projections of x, in the order of the module's calls: gate and up in
            either order, or one.
        output: path of the last projection.
        unit: "gated" (two projections), "packed" (one, of both halves) or "activation" (one).
        gate_first: whether the gate is the first projection or half.
        function: mlx.nn's name, of an activation.
    """

    inputs: tuple[str, ...]
    output: str
    unit: str
    gate_first: bool
    function: str

    def apply(self, module: Any, x: mx.array) -> mx.array:
        parts = [child_of(module, path)(x) for path in self.inputs]
        if self.unit == "activation":
            y = F.activations[self.function](parts[0])
        else:
            if self.unit == "packed":
                parts = list(mx.split(parts[0], 2, axis=-1))
            a, b = parts
            y = F.gated[self.op](a, b) if self.gate_first else F.gated[self.op](b, a)
        return child_of(module, self.output)(y)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AddNorm:
    """A step: sum and norm of two registers, into two registers. `norm` is that of the module at
    a path while its class is `cls`, for the inputs in `verified`."""

    left: int
    right: int
    path: str
    norm: Norm
    verified: Verified
    cls: type


@dataclass(frozen=True)
class Add:
    """A step: the sum of two registers."""

    left: int
    right: int


#: Operations of arrays that a block may apply to what its children return, besides sums.
ELEMENTWISE: dict[str, Callable[..., mx.array]] = {
    "Multiply": mx.multiply,
    "Sigmoid": mx.sigmoid,
}


@dataclass(frozen=True)
class Apply:
    """A step: one of `ELEMENTWISE`, of registers."""

    op: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Cast:
    """A step: the array in a register in another dtype."""

    operand: int
    dtype: mx.Dtype


def flattened(x: mx.array) -> mx.array:
    """(*, D) → (N, D)."""
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Reshape:
    """A step: the rows of a register, flattened or in the shape of the block's array."""

    operand: int
    flat: bool


@dataclass(frozen=True)
class Mix:
    """A step: routes the array in a register by the logits in another, and adds up what the experts
    at a path return for it; `bias`: the block's parameter that counts for the choice, or None."""

    x: int
    logits: int
    path: str
    routing: Routing
    top_k: int
    bias: str | None = None


@dataclass(frozen=True)
class Combine:
    """A step: adds up what the experts at a path return for the array in a register, with the
    weights and for the choices in two more; `experts`: how many there are."""

    x: int
    indices: int
    weights: int
    path: str
    experts: int


@dataclass(frozen=True)
class CallChild:
    """A step: a child's call; arguments are registers (int), `Given`, or a value in a tuple. It
    returns one array, or a tuple of as many as `results`."""

    path: str
    method: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: int = 1


@dataclass(frozen=True)
class BlockPlan(Plan):
    """A block that calls children and adds what they return, with a sum and the norm after it in
    one launch.

    Attributes:
        names: the parameters of the block's call after the array; defaults: their defaults, EMPTY
            for those without.
        positional: how many of them may be given without a name.
        steps: each appends to the registers what it computes; register 0 is the array.
        result: the register that the block returns.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    positional: int
    steps: tuple[Any, ...]
    result: int

    def needs(self) -> tuple[str, ...]:
        own = any(isinstance(s, (AddNorm, Mix)) for s in self.steps)
        return () if own else tuple(s.path for s in self.steps if isinstance(s, Combine))

    def computes(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((s.path, (s.norm.eps_name,)) for s in self.steps if isinstance(s, AddNorm))

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        given = dict(zip(self.names, self.defaults, strict=True))
        given.update(zip(self.names, a, strict=False))
        given.update(k)
        wrong = len(a) > self.positional or len(given) != len(self.names)
        wrong = wrong or any(name in k for name in self.names[: len(a)])
        wrong = wrong or any(value is EMPTY for value in given.values())
        # The module's own call has the error.
        if wrong or (x.dtype, x.ndim) not in self.verified:
            return original(module, x, *a, **k)
        mixes = [s for s in self.steps if isinstance(s, Mix) and s.bias]
        if not all(s.routing.takes(module[s.bias]) for s in mixes):
            return original(module, x, *a, **k)
        registers = [x]

        def value(v: Any) -> Any:
            if isinstance(v, int):
                return registers[v]
            return given[v.name] if isinstance(v, Given) else v[0]

        for step in self.steps:
            if isinstance(step, CallChild):
                child = child_of(module, step.path)
                call = child if step.method == "__call__" else getattr(child, step.method)
                arguments = [value(v) for v in step.arguments]
                y = call(*arguments, **{n: value(v) for n, v in step.keywords})
                registers += [y] if step.results == 1 else y
            elif isinstance(step, Add):
                registers.append(registers[step.left] + registers[step.right])
            elif isinstance(step, Apply):
                registers.append(ELEMENTWISE[step.op](*(registers[i] for i in step.operands)))
            elif isinstance(step, Reshape):
                y = registers[step.operand]
                registers.append(flattened(y) if step.flat else y.reshape(x.shape))
            elif isinstance(step, Cast):
                registers.append(registers[step.operand].astype(step.dtype))
            elif isinstance(step, Mix):
                registers.append(_mix(module, step, registers))
            elif isinstance(step, Combine):
                weights, indices = registers[step.weights], registers[step.indices]
                registers.append(_combine(module, step.path, registers[step.x], weights, indices))
            else:
                registers.extend(_add_norm(module, step, registers))
        return registers[self.result]


def _add_norm(module: Any, step: AddNorm, registers: list[mx.array]) -> tuple[mx.array, mx.array]:
    """(sum, normed)."""
    a, b, norm = registers[step.left], registers[step.right], step.norm
    child = child_of(module, step.path)
    known = (mx.result_type(a, b), a.ndim) in step.verified
    if not known or original_class(child) is not step.cls:
        total = a + b
        return total, child(total)
    eps = getattr(child, norm.eps_name) if norm.eps_name else norm.eps
    weight, bias = norm.parameters(child)
    if norm.op == "rms_norm":
        y, total = F.add_rms_norm(a, b, weight, eps)
    else:
        y, total = F.add_layer_norm(a, b, weight, bias, eps)
    return total, y.astype(total.dtype) if norm.spelling in OF_X else y


def _mix(module: Any, step: Mix, registers: list[mx.array]) -> mx.array:
    bias = None if step.bias is None else module[step.bias]
    logits, dtype = registers[step.logits], registers[0].dtype
    weights, indices = step.routing.gate(logits, bias, step.top_k, dtype)
    return _combine(module, step.path, registers[step.x], weights, indices)


def _combine(module: Any, path: str, x: mx.array, weights: mx.array, indices: mx.array) -> mx.array:
    experts = child_of(module, path)
    plan = plan_of(experts) if holds_the_same(experts) else None
    if isinstance(plan, ExpertsPlan) and (x.dtype, x.ndim) in plan.verified:
        return combined(plan.experts(experts), x, weights, indices)
    y = experts(x, indices)
    return (y * weights[..., None]).sum(axis=-2).astype(y.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ExpertsPlan(Plan):
    """Stacked gated networks, of which each token gets some.

    Attributes:
        gate, up, down: paths of the projections.
        count: how many experts there are.
        linear: the class of projections that are known to be a gathered product of their weight.
        unit: the gated unit.
    """

    gate: str
    up: str
    down: str
    count: int
    linear: type | None
    unit: str

    def experts(self, module: Any) -> Experts:
        """The networks as they are now: quantised, with LoRA layers or plain."""
        parts: list[Any] = [child_of(module, path) for path in (self.gate, self.up, self.down)]
        same = [type(p) for p in parts] == [self.linear] * 3
        plain = same and all(p.keys() == {"weight"} for p in parts)
        gate, up, down = parts
        unit, fused = F.gated[self.unit], plain and self.unit == "swiglu"
        return Experts(gate, up, down, lambda u, g: unit(g, u), self.count, fused)

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        if k or len(a) != 1 or (x.dtype, x.ndim) not in self.verified:
            return original(module, x, *a, **k)
        if a[0].ndim != x.ndim or a[0].dtype not in INDICES:
            return original(module, x, *a, **k)
        return each(self.experts(module), x, a[0])


#: Logits of an array and a router's matrix.
PRODUCTS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "product": lambda x, w: x @ w.T,
    "product in float32": lambda x, w: x.astype(mx.float32) @ w.astype(mx.float32).T,
}


@dataclass(frozen=True)
class RouterPlan(Plan):
    """A module that is a router: its logits, the choice, and the weights.

    Attributes:
        logits: how they come to be: one of `PRODUCTS` with a parameter, or "child".
        weight: the name of that parameter, or the path of that child.
        bias: the name of the parameter that counts for the choice only, or None.
        indices_first: the order of what it returns.
    """

    logits: str
    weight: str
    bias: str | None
    routing: Routing
    top_k: int
    indices_first: bool

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        if a or k or (x.dtype, x.ndim) not in self.verified:
            return original(module, x, *a, **k)
        bias = None if self.bias is None else module[self.bias]
        if not self.routing.takes(bias):
            return original(module, x)
        if self.logits == "child":
            logits = child_of(module, self.weight)(x)
        else:
            logits = PRODUCTS[self.logits](x, module[self.weight])
        weights, indices = self.routing.gate(logits, bias, self.top_k, x.dtype)
        return (indices, weights) if self.indices_first else (weights, indices)


@dataclass(frozen=True)
class RopePlan(Plan):
    """A module that turns its array by position.

    Attributes:
        freqs: name of the attribute that holds the wavelengths, or None where it has a base.
    """

    freqs: str | None

    def reads(self) -> tuple[str, ...]:
        return "base", "scale"

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        offset = a[0] if len(a) == 1 else k.get("offset", 0)
        if len(a) > 1 or set(k) - {"offset"} or (len(a) and k):
            return original(module, x, *a, **k)
        if (x.dtype, x.ndim) not in self.verified or not _is_offset(offset, x):
            return original(module, x, *a, **k)
        freqs = None if self.freqs is None else getattr(module, self.freqs)
        return F.rope(
            x,
            module.dims,
            traditional=module.traditional,
            base=module.base if self.freqs is None else None,
            scale=getattr(module, "scale", 1.0),
            offset=offset,
            freqs=freqs,
        )


def _is_offset(offset: Any, x: mx.array) -> bool:
    if isinstance(offset, mx.array):
        kinds = (mx.int32, mx.uint32, mx.int64)
        return offset.dtype in kinds and offset.shape in ((), (1,), (x.shape[0],))
    return isinstance(offset, int) and 0 <= offset < 2**31


@dataclass(frozen=True)
class DropoutPlan(Plan):
    """`mlx.nn.Dropout`."""

    def reads(self) -> tuple[str, ...]:
        return ("_p_1",)

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        return dropped(module, lambda x: original(module, x), x)


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """A module whose code calls mlx-lm's attention function; its own code runs with ours in the
    place of that name."""

    methods: tuple[str, ...]

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        return original(module, x, *a, **k)
