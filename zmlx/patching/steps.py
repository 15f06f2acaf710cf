"""A block's call as steps: each appends to the registers what it computes; the first registers are
the arrays that the block is called with, most often one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..nn import functional as F
from ..nn.expert_rows import combined
from .plans import ExpertsPlan, Plan, Verified, plan_of
from .replace import is_current
from .routing import Routing
from .shadows import child_of, entry, original_class
from .templates import OF_X, Norm
from .wiring import Given

#: The default of a parameter without one.
EMPTY: Any = inspect.Parameter.empty


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
        steps: each appends to the registers what it computes.
        result: the register that the block returns.
        arrays: how many arrays the block is called with, the first registers; those after the first
            are the first of `names`.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...] = field(compare=False)  # which may have no hash
    positional: int
    steps: tuple[Any, ...]
    result: int
    arrays: int = 1

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
        if not all(s.routing.takes(entry(module, s.bias)) for s in mixes):
            return original(module, x, *a, **k)
        registers = [x, *(given[name] for name in self.names[: self.arrays - 1])]
        if not all(_like(y, x) for y in registers[1:]):
            return original(module, x, *a, **k)

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


def _like(y: Any, x: mx.array) -> bool:
    """Whether it is an array of as many rows, of the same dtype."""
    return isinstance(y, mx.array) and y.dtype == x.dtype and y.shape[:-1] == x.shape[:-1]


def _add_norm(module: Any, step: AddNorm, registers: list[mx.array]) -> tuple[mx.array, mx.array]:
    """(sum, normed)."""
    a, b, norm = registers[step.left], registers[step.right], step.norm
    child = child_of(module, step.path)
    dtype = mx.result_type(a, b)
    known = (dtype, a.ndim) in step.verified and a.shape == b.shape
    known = known and original_class(child) is step.cls
    if not known or not norm.takes(child, a.shape[-1:], dtype):
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
    bias = None if step.bias is None else entry(module, step.bias)
    logits, dtype = registers[step.logits], registers[0].dtype
    weights, indices = step.routing.gate(logits, bias, step.top_k, dtype)
    return _combine(module, step.path, registers[step.x], weights, indices)


def _combine(module: Any, path: str, x: mx.array, weights: mx.array, indices: mx.array) -> mx.array:
    experts = child_of(module, path)
    plan = plan_of(experts) if is_current(experts) else None
    if isinstance(plan, ExpertsPlan) and (x.dtype, x.ndim) in plan.verified:
        return combined(plan.experts(experts), x, weights, indices)
    y = experts(x, indices)
    return (y * weights[..., None]).sum(axis=-2).astype(y.dtype)  # type: ignore[no-any-return]
