"""What takes the place of a module's call: one class per kind of replacement.

A plan holds names and numbers, no arrays: parameters are read from the module at each call, so
that training, quantising, LoRA and loading weights work on a patched model as on any other. An
input that the plan was not verified for (another dtype, number of axes or argument) runs the
module's own call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ..nn.expert_rows import Experts, each
from .routing import Routing
from .shadows import child_of, entry
from .templates import OF_X, Norm, fit

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

    def is_of(self, dtype: mx.Dtype) -> bool:
        """Whether it was compared for arrays of this dtype."""
        return any(d == dtype for d, _ in self.verified)

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

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        if isinstance(x, mx.array) and not self.norm.takes(module, x.shape[-1:], x.dtype):
            return original(module, x, *a, **k)
        return super().run(module, original, x, *a, **k)

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
        dtypes: of the parameters, as they were compared besides in the dtype of x.
    """

    groups: str
    eps: str
    weight: str | None
    bias: str | None
    interleaved: bool
    dtypes: tuple[mx.Dtype, ...]

    def reads(self) -> tuple[str, ...]:
        return self.groups, self.eps

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        known = not a and not k and isinstance(x, mx.array) and (x.dtype, x.ndim) in self.verified
        names = self.weight, self.bias
        known = known and fit(module, names, x.shape[-1:], (x.dtype, *self.dtypes))
        weight, bias = (None if n is None else entry(module, n) for n in names)
        if not known or not use_kernel("group_norm", x, weight, bias):
            return original(module, x, *a, **k)
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
    """A module that is a gated unit of two arrays, or (`packed`) of the halves of one."""

    gate_first: bool
    packed: bool = False

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        if self.packed:
            return super().run(module, original, x, *a, **k)
        # A number may stand for either array.
        known = not k and len(a) == 1 and all(isinstance(v, mx.array) for v in (x, *a))
        if not known or (x.dtype, x.ndim) not in self.verified or a[0].dtype != x.dtype:
            return original(module, x, *a, **k)
        gate, up = (x, a[0]) if self.gate_first else (a[0], x)
        return F.gated[self.op](gate, up)

    def apply(self, module: Any, x: mx.array) -> mx.array:
        return F.packed(self.op, x, self.gate_first)


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
        elif self.unit == "packed":
            y = F.packed(self.op, parts[0], self.gate_first)
        else:
            a, b = parts
            y = F.gated[self.op](a, b) if self.gate_first else F.gated[self.op](b, a)
        return child_of(module, self.output)(y)  # type: ignore[no-any-return]


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
        fused = plain and self.unit == "swiglu" and _returns_as_wide(parts)
        count = entry(gate, "weight").shape[0] if "weight" in gate else self.count
        unit = F.gated[self.unit]
        return Experts(gate, up, down, lambda u, g: unit(g, u), count, fused)

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        if k or len(a) != 1 or (x.dtype, x.ndim) not in self.verified:
            return original(module, x, *a, **k)
        if a[0].ndim != x.ndim or a[0].dtype not in INDICES:
            return original(module, x, *a, **k)
        return each(self.experts(module), x, a[0])


def _returns_as_wide(parts: Sequence[Any]) -> bool:
    """Whether plain projections, gate, up and down, return rows as wide as they get, as
    `expert_ffn` does."""
    gate, up, down = (entry(p, "weight").shape for p in parts)
    return bool(gate == up and down == (*gate[:1], *gate[:0:-1]))


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
        bias = None if self.bias is None else entry(module, self.bias)
        if not self.routing.takes(bias):
            return original(module, x)
        if self.logits == "child":
            logits = child_of(module, self.weight)(x)
        else:
            logits = PRODUCTS[self.logits](x, entry(module, self.weight))
        weights, indices = self.routing.gate(logits, bias, self.top_k, x.dtype)
        return (indices, weights) if self.indices_first else (weights, indices)


@dataclass(frozen=True)
class RopePlan(Plan):
    """A module that turns its array by position.

    Attributes:
        freqs: name of the attribute that holds the wavelengths, or None where it has a base.
        numbers: which of base and scale it reads.
    """

    freqs: str | None
    numbers: tuple[str, ...]

    def reads(self) -> tuple[str, ...]:
        return self.numbers

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
            scale=module.scale if "scale" in self.numbers else 1.0,
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
        rate = module._p_1
        known = not a and not k and isinstance(x, mx.array) and isinstance(rate, (int, float))
        if not known or not 0 < rate <= 1:
            return original(module, x, *a, **k)
        return dropped(module, lambda x: original(module, x), x)


@dataclass(frozen=True)
class CodePlan(Plan):
    """A module whose code calls functions of MLX; it runs with ours in the place of their names."""

    methods: tuple[str, ...]

    def is_of(self, dtype: mx.Dtype) -> bool:
        return True

    def run(self, module: Any, original: Callable[..., Any], x: Any, *a: Any, **k: Any) -> Any:
        return original(module, x, *a, **k)
