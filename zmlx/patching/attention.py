"""Attention in the code of a module: found by what its names stand for, and run by ours.

A method is a candidate if its code, or that of a function that it refers to by a global name, calls
`mx.fast.scaled_dot_product_attention` or mlx-lm's function of that name. It then runs with other
globals, in which ours is in their place.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..nn import functional as F

_NAME = F.ATTENTION


class _In:
    """A module in which some names stand for something else."""

    def __init__(self, module: types.ModuleType, names: dict[str, Any]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)


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
    """`mx.fast.scaled_dot_product_attention`; with a stream of its own it is MLX's."""
    if others or not all(isinstance(a, mx.array) and a.ndim == 4 for a in (q, k, v)):
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


_FAST = _In(mx.fast, {_NAME: _fast_attention})
_CORE = _In(mx, {"fast": _FAST})


def _of_mlx_lm() -> Any:
    """mlx-lm's function, None where it is not imported."""
    return getattr(sys.modules.get("mlx_lm.models.base"), _NAME, None)


def methods(cls: type) -> tuple[str, ...]:
    """The methods of cls that call attention."""
    found = []
    for name in dir(cls):
        function = getattr(cls, name, None)
        if function is getattr(nn.Module, name, None):
            continue
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and function in _calling(function):
            found.append(name)
    return tuple(found)


def with_ours(function: types.FunctionType) -> types.FunctionType:
    """The function with our attention; all else that it refers to is what it is now."""
    twins = {f: (_twin(f), names) for f, names in _calling(function).items()}
    for twin, names in twins.values():
        ours = {n: twins[v][0] if v in twins else v for n, v in names.items()}
        twin.__globals__.update(ours)
    return twins[function][0]


def _calling(function: types.FunctionType) -> dict[types.FunctionType, dict[str, Any]]:
    """Of a function and those that it refers to, in turn: those that call attention, and what their
    global names have to stand for, or the functions of these that they stand for."""
    names: dict[types.FunctionType, dict[str, Any]] = {}
    callees: dict[types.FunctionType, dict[str, types.FunctionType]] = {}
    left = [function]
    while left:
        one = left.pop()
        if one not in names:
            names[one], callees[one] = _referred(one)
            left += callees[one].values()
    calling = {f for f in names if names[f]}
    while more := {f for f in names if f not in calling and calling & {*callees[f].values()}}:
        calling |= more
    return {
        f: names[f] | {name: g for name, g in callees[f].items() if g in calling} for f in calling
    }


def _referred(
    function: types.FunctionType,
) -> tuple[dict[str, Any], dict[str, types.FunctionType]]:
    """The global names of a function that stand for attention, with ours, and those that stand for
    other functions."""
    used = set(_names(function.__code__))
    ours: dict[str, Any] = {}
    functions: dict[str, types.FunctionType] = {}
    for name in used & function.__globals__.keys():
        value = function.__globals__[name]
        if value is mx.fast.scaled_dot_product_attention:
            ours[name] = _fast_attention
        elif value is mx.fast and _NAME in used:
            ours[name] = _FAST
        elif value is mx and {"fast", _NAME} <= used:
            ours[name] = _CORE
        elif isinstance(value, types.FunctionType):
            if value is _of_mlx_lm():
                ours[name] = _attention
            else:
                functions[name] = value
    return ours, functions


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code uses, with that of the functions in it."""
    yield from code.co_names
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
