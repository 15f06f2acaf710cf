"""Functions of MLX in the code of a module: found by what its names stand for, and run by ours.

A method is a candidate if its code, or that of a function that it refers to by a global name, calls
one of `mx.fast`'s norms, rotations or attention, `mx.softmax`, or mlx-lm's attention. It then runs
with other globals, in which ours are in their place.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..choice import use_kernel
from ..nn import functional as F


class _In:
    """A module in which some names stand for something else."""

    def __init__(self, module: types.ModuleType, names: dict[str, Any]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)


# ---- the functions, as MLX has them -------------------------------------------------------------


def _is_float(*arrays: Any) -> bool:
    return all(isinstance(a, mx.array) and mx.issubdtype(a.dtype, mx.floating) for a in arrays)


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, **others: Any) -> mx.array:
    if others or not _is_float(x) or not x.ndim:
        return mx.fast.rms_norm(x, weight, eps, **others)
    return F.rms_norm(x, weight, eps)


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **others: Any
) -> mx.array:
    if others or not _is_float(x) or not x.ndim:
        return mx.fast.layer_norm(x, weight, bias, eps, **others)
    return F.layer_norm(x, weight, bias, eps)


def _rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    **others: Any,
) -> mx.array:
    run = mx.fast.rope if others else F.rope
    return run(
        x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs,
        **others,
    )  # fmt: skip


def _softmax(x: mx.array, axis: Any = None, **others: Any) -> mx.array:
    """The kernel computes in float32 whether that is asked for (`precise`) or not."""
    known = not others.keys() - {"precise"} and isinstance(axis, int) and _is_float(x) and x.ndim
    if known and use_kernel("softmax", x):
        return kernels.softmax(x, axis)
    return mx.softmax(x, axis, **others)


def _fast_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    **others: Any,
) -> mx.array:
    if others or not _is_float(q, k, v) or not q.ndim == k.ndim == v.ndim == 4:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=mask, sinks=sinks, **others
        )
    return F.attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> Any:
    """mlx-lm's `scaled_dot_product_attention`; of quantised caches what has few queries and no
    array for a mask, and the rest goes to the original."""
    if hasattr(cache, "bits"):
        if sinks is None and F.decodes(queries, keys, mask, cache.group_size, cache.bits):
            return F.quantized_attention(
                queries, keys, values, scale=scale, mask=mask, bits=cache.bits
            )
        return _of_mlx_lm()(queries, keys, values, cache, scale, mask, sinks)
    return F.attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


#: MLX's functions by their names, and ours: (op, function).
_OURS: dict[str, tuple[str, Callable[..., Any]]] = {
    "scaled_dot_product_attention": (F.ATTENTION, _fast_attention),
    "rms_norm": ("rms_norm", _rms_norm),
    "layer_norm": ("layer_norm", _layer_norm),
    "rope": ("rope", _rope),
}
_OURS_OF_CORE: dict[str, tuple[str, Callable[..., Any]]] = {"softmax": ("softmax", _softmax)}

#: The ops, the costliest first.
OPS = tuple(op for op, _ in (*_OURS.values(), *_OURS_OF_CORE.values()))

_FAST = _In(mx.fast, {name: ours for name, (_, ours) in _OURS.items()})
_CORE = _In(mx, {"fast": _FAST, **{name: ours for name, (_, ours) in _OURS_OF_CORE.items()}})


def _of_mlx_lm() -> Any:
    """mlx-lm's attention, None where it is not imported."""
    return getattr(sys.modules.get("mlx_lm.models.base"), F.ATTENTION, None)


# ---- what a function refers to ------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """Methods that call functions of MLX, and the catalogue's ops that take their place."""

    methods: tuple[str, ...]
    ops: frozenset[str]


def calls(cls: type) -> Calls:
    """What the methods of cls call."""
    methods, ops = [], set()
    for name in dir(cls):
        function = getattr(cls, name, None)
        if function is getattr(nn.Module, name, None):
            continue
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            continue
        found = _calling(function)
        if function in found:
            methods.append(name)
            ops |= {op for one in found.values() for op in one.ops}
    return Calls(tuple(methods), frozenset(ops))


def with_ours(function: types.FunctionType) -> types.FunctionType:
    """The function with ours; all else that it refers to is what it is now."""
    found = _calling(function)
    twins = {f: _twin(f) for f in found}
    for f, twin in twins.items():
        inner = {name: twins[g] for name, g in found[f].functions.items() if g in twins}
        twin.__globals__.update(found[f].ours | inner)
    return twins[function]


@dataclass(frozen=True)
class _Referred:
    """What the global names of a function stand for: those of MLX's functions with ours, their ops,
    and other functions."""

    ours: dict[str, Any]
    ops: set[str]
    functions: dict[str, types.FunctionType]


def _calling(function: types.FunctionType) -> dict[types.FunctionType, _Referred]:
    """Of a function and those that it refers to, in turn: those that call MLX's functions."""
    known: dict[types.FunctionType, _Referred] = {}
    left = [function]
    while left:
        one = left.pop()
        if one not in known:
            known[one] = _referred(one)
            left += known[one].functions.values()
    calling = {f for f, referred in known.items() if referred.ours}
    while more := {
        f for f in known if f not in calling and calling & {*known[f].functions.values()}
    }:
        calling |= more
    return {f: known[f] for f in calling}


def _referred(function: types.FunctionType) -> _Referred:
    found = _Referred({}, set(), {})
    for name, *attributes in _names(function.__code__):
        value = function.__globals__.get(name)
        if value is None:
            continue
        stands, ours = _CORE if value is mx else _FAST, _OURS_OF_CORE if value is mx else _OURS
        if value is mx and attributes[:1] == ["fast"]:
            attributes, ours = attributes[1:], _OURS
        if (value is mx or value is mx.fast) and attributes and attributes[0] in ours:
            found.ours[name] = stands
            found.ops.add(ours[attributes[0]][0])
        else:
            _add_function(found, name, value)
    return found


def _add_function(found: _Referred, name: str, value: Any) -> None:
    for module, ours in ((mx.fast, _OURS), (mx, _OURS_OF_CORE)):
        for own, (op, function) in ours.items():
            if value is getattr(module, own):
                found.ours[name] = function
                found.ops.add(op)
                return
    if value is _of_mlx_lm():
        found.ours[name] = _attention
        found.ops.add(F.ATTENTION)
    elif isinstance(value, types.FunctionType):
        found.functions[name] = value


def _names(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """The global names that code and the functions in it load, with the attributes that are taken
    of them at once: `mx.fast.rope` is ("mx", "fast", "rope")."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
            continue
        if chain:
            yield tuple(chain)
        chain = [instruction.argval] if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _twin(function: types.FunctionType) -> types.FunctionType:
    """The function with globals of its own."""
    twin = types.FunctionType(
        function.__code__,
        {**function.__globals__},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__doc__, twin.__annotations__ = function.__doc__, function.__annotations__
    return twin
