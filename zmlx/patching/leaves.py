"""Finds the plan for a module without children: a norm, an activation, a gated unit, a rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as mnn
from mlx.utils import tree_flatten

from ..nn import functional as F
from .algebra import Algebra
from .capture import Graphs
from .dtypes import FLOATS
from .plans import ActivationPlan, GatePlan, GroupNormPlan, NormPlan, Plan, RopePlan
from .reasons import UnmatchedError
from .shadows import count_of, entries, shadow
from .templates import ACTIVATIONS, GATED, Norm, norms, packed
from .wiring import own_call, parameters_of_call


@dataclass(frozen=True)
class Sizes:
    """What a module is traced with.

    Attributes:
        what: as reasons name it.
        leads: axes before the last, by their number: rows, a batch of prompts, heads, and one more.
        width: the last axis, where no parameter and no attribute of the module says it.
        times: what it is multiplied by where an attribute does.
    """

    what: str
    leads: tuple[tuple[int, ...], ...]
    width: int
    times: int


#: A call may go by the size of an axis, and a trace sees but one: each axis is small, one and
#: large. Nothing is computed, so that a large one costs no more.
SIZES = (
    Sizes("a few rows", ((3,), (2, 3), (2, 2, 3), (2, 2, 2, 3)), 16, 1),
    Sizes("one row", ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)), 8, 256),
    Sizes("a long prompt", ((4099,), (1, 4099), (1, 4099, 2053), (1, 2, 4099, 2053)), 4096, 1),
    Sizes("a large batch", ((257,), (257, 1), (257, 1, 1), (257, 1, 1, 1)), 64, 4),
)

#: Positions that a rotation is traced from, besides those in arrays.
_OFFSETS = (0, 3, 4099, 1 << 20)

#: Of a number that a norm's call may have without a name.
_LARGEST_EPS = 1e-2


class Leaves:
    """Compares leaves with the templates. What templates capture is kept."""

    def __init__(self) -> None:
        self._graphs = Graphs()
        self._algebra = Algebra(self._graphs)
        self._captured: dict[Any, list[int]] = {}
        self._own: dict[Any, list[int]] = {}  # of the module that is compared
        self._sizes = SIZES[0]

    def _leaf(self, module: mnn.Module) -> Plan | None:
        arrays = {k: v for k, v in entries(module) if isinstance(v, mx.array)}
        if len(arrays) > 2 or any(v.ndim != 1 for v in arrays.values()):
            return None
        # Lists, tuples and dicts may say something of a module, like a shape.
        rest = dict(tree_flatten([v for k, v in entries(module) if k not in arrays]))
        if any(isinstance(v, (mx.array, mnn.Module)) for v in rest.values()):
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
        if any(a.shape == (1,) for a in arrays.values()):
            raise UnmatchedError("a parameter of one element does not say how long its rows are")
        width = next(iter(arrays.values())).shape[0] if arrays else _width_attribute(module) or 16
        self._own.clear()
        found = (
            self._norm(module, arrays, width)
            or self._group_norm(module, arrays, width)
            or self._activation(module, arrays, width)
            or self._packed(module, arrays, width)
        )
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
        arrays = [k for k, v in entries(module) if isinstance(v, mx.array)]
        freqs = arrays[0] if len(arrays) == 1 else None
        base = own.get("base") if freqs is None else None
        if arrays[1:] or (freqs is None and not isinstance(base, (int, float))):
            return None
        numbers: dict[str, Any] = {} if freqs is not None else {"base": base}
        numbers |= {"scale": own["scale"]} if "scale" in own else {}

        def template(x: mx.array, offset: Any, **changed: Any) -> mx.array:
            given = {"base": None, "scale": 1.0, **numbers, **changed}
            wavelengths = None if freqs is None else getattr(module, freqs)
            return mx.fast.rope(
                x, module.dims, traditional=module.traditional, offset=offset, freqs=wavelengths,
                **given,
            )  # fmt: skip

        def same(
            lead: tuple[int, ...],
            dtype: mx.Dtype,
            changed: Mapping[str, Any] = MappingProxyType({}),
        ) -> bool:
            # As wide as what it turns, and wider.
            inputs = [mx.zeros((*lead, n * module.dims), dtype) for n in (1, 2)]
            offsets = (*_OFFSETS, mx.array(3), 1 + mx.arange(lead[0]))
            twin = shadow(module, {})
            vars(twin).update(changed)

            def turned(turn: Callable[..., mx.array]) -> Callable[..., Any]:
                return lambda x, wider: [turn(wider, 3), *(turn(x, o) for o in offsets)]

            try:
                ours = self._graphs.capture(turned(partial(own_call, twin)), inputs)
                theirs = self._graphs.capture(turned(partial(template, **changed)), inputs)
            except Exception:
                return False
            return ours == theirs

        leads = self._sizes.leads[1:3]
        verified = {(d, len(lead) + 1) for lead in leads for d in FLOATS if same(lead, d)}
        if not verified or not all(
            same(leads[0], mx.float32, {n: 2.5 * v}) for n, v in numbers.items()
        ):
            raise UnmatchedError("it turns by position in another way than mx.fast.rope")
        reads = tuple(numbers)
        return RopePlan("rope", "rope", module.dims, frozenset(verified), freqs, reads)

    def _norm(self, module: mnn.Module, arrays: dict[str, mx.array], width: int) -> Plan | None:
        """Spellings that differ in their casts alone are the same in float32: one that holds in
        the module's own dtype comes first."""
        own_dtype = next((a.dtype for a in arrays.values() if a.dtype in FLOATS), mx.float32)
        found = None
        for norm in norms(module, self._small_numbers(module, arrays, width)):
            names = [n for n in (norm.weight, norm.bias) if n is not None]
            template = partial(_normed, norm, names)
            verified = self._compare(module, arrays, names, width, template, ("norm", norm, width))
            others = [(norm.eps_name, eps) for eps in _other_eps(norm.eps) if norm.eps_name]
            if verified and all(
                self._follows(module, arrays, names, width, name, eps,
                              partial(_normed, replace(norm, eps=eps), names))
                for name, eps in others
            ):  # fmt: skip
                # The value of an attribute is read at each call: plans do not differ by it.
                read = replace(norm, eps=0.0) if norm.eps_name else norm
                plan = NormPlan("norm", norm.op, width, verified, read)
                if any(dtype == own_dtype for dtype, _ in verified):
                    return plan
                found = found or plan
        return found

    def _follows(
        self,
        module: mnn.Module,
        arrays: dict[str, mx.array],
        names: Sequence[str],
        width: int,
        attribute: str,
        value: Any,
        template: Callable[..., Any],
    ) -> bool:
        """Whether the module with another value of an attribute equals the template with it: the
        one that was looked for may be in another attribute, or in the call, too."""
        twin = shadow(module, {})
        vars(twin)[attribute] = value
        inputs = [mx.zeros((*self._sizes.leads[0], self._width(module, arrays, width)))]
        inputs += [arrays[n] for n in names]
        try:
            ours = self._graphs.capture(partial(_called, twin, names), inputs)
            return self._algebra.same(ours, self._graphs.capture(template, inputs))
        except Exception:
            return False

    def _small_numbers(
        self, module: mnn.Module, arrays: dict[str, mx.array], width: int
    ) -> list[float]:
        """Numbers in the module's call that may be an eps."""
        x = mx.zeros((*self._sizes.leads[0], self._width(module, arrays, width)))
        try:
            ours = self._graph(module, list(arrays), x, list(arrays.values()))
        except Exception:
            return []
        numbers = self._graphs.scalars(ours) | self._graphs.arguments(ours)
        return sorted(v for v in numbers if 0 < v < _LARGEST_EPS)

    def _group_norm(
        self, module: mnn.Module, arrays: dict[str, mx.array], width: int
    ) -> Plan | None:
        """`mlx.nn.GroupNorm` in both of its orders, under any names."""
        if len(arrays) == 1:
            return None
        own = vars(module)
        counts = [k for k, v in own.items() if type(v) is int and v > 0 and width % v == 0]
        numbers = [k for k, v in own.items() if isinstance(v, float) and 0 <= v < 1]
        orders = [tuple(arrays), tuple(arrays)[::-1]] if arrays else [()]
        for groups, eps, names, interleaved in product(counts, numbers, orders, (True, False)):
            template = partial(_group_normed, own[groups], own[eps], interleaved)
            key = ("group_norm", own[groups], own[eps], names, interleaved, width)
            verified = self._compare(module, arrays, names, width, template, key)
            follows = partial(self._follows, module, arrays, names, width)
            if verified and all(
                follows(eps, e, partial(_group_normed, own[groups], e, interleaved))
                for e in _other_eps(own[eps])
            ) and all(
                follows(groups, n, partial(_group_normed, n, own[eps], interleaved))
                for n in {1, width} - {own[groups]}
            ):  # fmt: skip
                weight, bias = names or (None, None)
                return GroupNormPlan(
                    "norm", "group_norm", width, verified, groups, eps, weight, bias, interleaved,
                    tuple(arrays[n].dtype for n in names),
                )  # fmt: skip
        return None

    def _activation(
        self, module: mnn.Module, arrays: dict[str, mx.array], width: int
    ) -> Plan | None:
        if arrays:
            return None
        for name in F.ACTIVATIONS:
            verified = frozenset().union(
                *(
                    self._compare(
                        module, {}, [], width, lambda x, f=f: [f(x)], ("act", id(f), width)
                    )
                    for other, f in ACTIVATIONS
                    if other == name
                )
            )
            if verified:
                return ActivationPlan("activation", F.ACTIVATIONS[name], width, verified, name)
        return None

    def _packed(self, module: mnn.Module, arrays: dict[str, mx.array], width: int) -> Plan | None:
        """A gated unit of the halves of one array."""
        if arrays:
            return None
        found: dict[tuple[str, bool], frozenset[tuple[mx.Dtype, int]]] = {}
        for unit in packed():
            template, key = partial(_alone, unit.in_mlx), ("packed", unit, width)
            verified = self._compare(module, {}, [], width, template, key)
            plan = unit.op, unit.gate_first
            found[plan] = found.get(plan, frozenset()) | verified
        (op, first), verified = max(found.items(), key=lambda item: len(item[1]))
        if not verified:
            return None
        return GatePlan("gated", op, 4096, verified, first, packed=True)

    def _compare(
        self,
        module: mnn.Module,
        arrays: dict[str, mx.array],
        names: Sequence[str],
        width: int,
        template: Callable[..., Any],
        key: Any,
    ) -> frozenset[tuple[mx.Dtype, int]]:
        """The dtypes and numbers of axes for which module and template have the same graph, of the
        parameters as they are, and of the dtype of the array."""
        verified: set[tuple[mx.Dtype, int]] = set()
        width = self._width(module, arrays, width)
        found = [arrays[n] for n in names]

        def same(x: mx.array) -> bool:
            of_x = [mx.zeros(a.shape, x.dtype) for a in found]
            return all(
                self._algebra.same(
                    self._graph(module, names, x, own), self._template(key, template, x, own)
                )
                for own in (found, of_x)
            )

        for lead in self._sizes.leads[:3]:
            for dtype in FLOATS:
                try:
                    if not same(mx.zeros((*lead, width), dtype)):
                        if not verified:
                            return frozenset()  # the first comparison decides for most
                        continue
                except UnmatchedError:
                    raise
                except Exception:
                    if not verified:
                        return frozenset()
                    continue
                verified.add((dtype, len(lead) + 1))
        return frozenset(verified)

    def _width(self, module: mnn.Module, arrays: dict[str, mx.array], width: int) -> int:
        """The last axis that a module is traced with: without parameters a multiple of what it says
        itself, or any."""
        if arrays:
            return width
        own = _width_attribute(module)
        return self._sizes.width if own is None else own * self._sizes.times

    def _graph(
        self,
        module: mnn.Module,
        names: Sequence[str],
        x: mx.array,
        own: Sequence[mx.array],
    ) -> list[int]:
        """The module's own graph, of x and the parameters of these names."""
        of = *names, x.shape, x.dtype, *(a.dtype for a in own)
        found = self._own.get(of)
        if found is None:
            call = partial(_called, module, names)
            found = self._own[of] = self._graphs.capture(call, [x, *own])
        return found

    def _template(
        self, key: Any, template: Callable[..., Any], x: mx.array, own: Sequence[mx.array]
    ) -> list[int]:
        full = (key, x.shape, x.dtype, tuple((a.shape, a.dtype) for a in own))
        found = self._captured.get(full)
        if found is None:
            found = self._captured[full] = self._graphs.capture(template, [x, *own])
        return found

    def _gate(self, module: mnn.Module) -> Plan | None:
        found: dict[tuple[str, bool], set[tuple[mx.Dtype, int]]] = {}
        for lead, dtype in product(self._sizes.leads, FLOATS):
            x = mx.zeros((*lead, self._sizes.width), dtype)
            try:
                ours = self._graphs.capture(
                    lambda a, b: [own_call(shadow(module, {}), a, b)], [x, x]
                )
            except UnmatchedError:
                raise
            except Exception:
                continue
            for (op, f), first in product(GATED, (True, False)):
                theirs = self._graphs.capture(
                    lambda a, b, f=f, first=first: [f(a, b) if first else f(b, a)], [x, x]
                )
                if self._algebra.same(ours, theirs):
                    found.setdefault((op, first), set()).add((dtype, len(lead) + 1))
                    break
        if not found:
            return None
        (op, first), verified = max(found.items(), key=lambda item: len(item[1]))
        return GatePlan("gated", op, 4096, frozenset(verified), first)


def _alone(f: Callable[[mx.array], mx.array], x: mx.array) -> list[mx.array]:
    return [f(x)]


def _called(module: mnn.Module, names: Sequence[str], x: mx.array, *given: mx.array) -> Any:
    """The module's own call, with arrays for its parameters of these names."""
    return [own_call(shadow(module, dict(zip(names, given, strict=True))), x)]


def _normed(norm: Norm, names: Sequence[str], x: mx.array, *given: mx.array) -> Any:
    by_name: dict[str | None, mx.array] = dict(zip(names, given, strict=True))
    return [norm.in_mlx(x, by_name.get(norm.weight), by_name.get(norm.bias))]


def _group_normed(groups: int, eps: float, interleaved: bool, x: mx.array, *given: mx.array) -> Any:
    norm = mnn.GroupNorm(groups, x.shape[-1], eps, bool(given), not interleaved)
    norm.update(dict(zip(("weight", "bias"), given, strict=False)))
    return [norm(x)]


def _other_eps(eps: float) -> tuple[float, float]:
    """Less and more, as a call may have a least or a largest one."""
    return eps / 1024, eps + 0.25


def _width_attribute(module: mnn.Module) -> int | None:
    """What a module without parameters says that the length of its rows is."""
    for name in ("dims", "dim", "head_dim", "hidden_size"):
        if 0 < (value := count_of(module, name, 0)) <= 1 << 16:
            return value
    return None
