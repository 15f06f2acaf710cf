"""Functions of MLX in the code of a module: found by what its names stand for, and run by ours.

A method is a candidate if its code, or that of a function that it refers to by a global name, calls
one of `mx.fast`'s norms, rotations or attention, a softmax, or mlx-lm's attention. A twin of it
then runs, whose code uses other global names, under which its module has ours.
"""

from __future__ import annotations

import dis
import inspect
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


def _in(module: types.ModuleType, names: dict[str, Any]) -> Any:
    """The module as it is at any time, with other values for some names, as long as these stand for
    what they do now."""

    def chosen(name: str, original: Any, ours: Any) -> property:
        def get(self: Any) -> Any:
            value = vars(self)[name]
            return ours if value is original else value

        return property(get)

    found = {name: chosen(name, vars(module)[name], ours) for name, ours in names.items()}
    stand = type(module.__name__, (), found)()
    stand.__dict__ = vars(module)
    return stand


# ---- the functions, as MLX has them -------------------------------------------------------------


def _are_floats(*arrays: Any) -> bool:
    """Whether all that are given are floating arrays."""
    given = [a for a in arrays if a is not None]
    return all(isinstance(a, mx.array) and mx.issubdtype(a.dtype, mx.floating) for a in given)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_row(x: Any) -> bool:
    return _are_floats(x) and x.ndim > 0


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, **others: Any) -> mx.array:
    known = _is_row(x) and _are_floats(weight) and _is_number(eps) and eps >= 0
    run = F.rms_norm if known and not others else mx.fast.rms_norm
    return run(x, weight, eps, **others)


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **others: Any
) -> mx.array:
    known = _is_row(x) and _are_floats(weight, bias) and _is_number(eps) and eps >= 0
    # MLX gives the sum with a bias alone the dtype of x.
    known = known and (weight is not None or bias is None or bias.dtype == x.dtype)
    run = F.layer_norm if known and not others else mx.fast.layer_norm
    return run(x, weight, bias, eps, **others)


def _rope(a: mx.array, dims: int, **options: Any) -> mx.array:
    """The array has MLX's name for it: it may be given by name."""
    offset, base = options.get("offset"), options.get("base")
    known = options.keys() <= {"traditional", "base", "scale", "offset", "freqs"}
    known = known and _are_floats(a) and _is_number(options.get("scale"))
    known = known and (base is None or _is_number(base))
    if isinstance(offset, mx.array):
        known = known and offset.dtype in (mx.int32, mx.uint32, mx.int64)
    return (F.rope if known else mx.fast.rope)(a, dims, **options)


def _softmax(x: mx.array, axis: Any = None, **others: Any) -> mx.array:
    """The kernel computes in float32 whether that is asked for (`precise`) or not."""
    known = not others.keys() - {"precise"} and type(axis) is int and _is_row(x)
    if known and use_kernel("softmax", x):
        return kernels.softmax(x, axis)
    return mx.softmax(x, axis, **others)


def _softmax_of_nn(x: mx.array, axis: Any = -1) -> mx.array:
    return _softmax(x, axis)


def _attends(q: Any, k: Any, v: Any, scale: Any) -> bool:
    """Whether our attention takes what MLX's gets."""
    known = _is_number(scale) and _are_floats(q, k, v)
    return known and q.ndim == k.ndim == v.ndim == 4 and k.shape[2] > 0


def _fast_attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    known = options.keys() <= {"scale", "mask", "sinks"}
    known = known and _attends(q, k, v, options.get("scale"))
    run = F.attention if known else mx.fast.scaled_dot_product_attention
    return run(q, k, v, **options)


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: Any,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> Any:
    """mlx-lm's `scaled_dot_product_attention`; of quantised caches what has few queries and no
    array for a mask, and the rest goes to the original."""
    quantised = hasattr(cache, "bits")
    if not quantised and _attends(queries, keys, values, scale):
        return F.attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    decodes = quantised and sinks is None and _is_number(scale)
    if decodes and F.decodes(queries, keys, mask, cache.group_size, cache.bits):
        return F.quantized_attention(queries, keys, values, scale=scale, mask=mask, bits=cache.bits)
    return _of_mlx_lm()(queries, keys, values, cache, scale, mask, sinks)


#: MLX's functions by their module and name, with our op and function; the costliest first.
_OURS: dict[types.ModuleType, dict[str, tuple[str, Callable[..., Any]]]] = {
    mx.fast: {
        F.ATTENTION: (F.ATTENTION, _fast_attention),
        "rms_norm": ("rms_norm", _rms_norm),
        "layer_norm": ("layer_norm", _layer_norm),
        "rope": ("rope", _rope),
    },
    mx: {"softmax": ("softmax", _softmax)},
    nn: {"softmax": ("softmax", _softmax_of_nn)},
}

#: The ops, in that order.
OPS = tuple(dict.fromkeys(op for names in _OURS.values() for op, _ in names.values()))

_FAST = _in(mx.fast, {name: ours for name, (_, ours) in _OURS[mx.fast].items()})

#: The modules with ours.
_STANDS = {
    mx.fast: _FAST,
    mx: _in(mx, {"fast": _FAST, **{name: ours for name, (_, ours) in _OURS[mx].items()}}),
    nn: _in(nn, {name: ours for name, (_, ours) in _OURS[nn].items()}),
}


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
        function = function_of(inspect.getattr_static(cls, name, None))
        inherited = name in vars(nn.Module) and function is vars(nn.Module)[name]
        special = name.startswith("__") and name != "__call__"
        if function is None or inherited or special:
            continue
        found = calling(function)
        if function in found:
            methods.append(name)
            ops |= {op for one in found.values() for op in one.ops}
    return Calls(tuple(methods), frozenset(ops))


def asks_for_its_class(cls: type) -> bool:
    """Whether a method uses `type(self)`, which is another class while patched, for more than its
    attributes."""
    own = (vars(c) for c in cls.__mro__ if c not in nn.Module.__mro__)
    methods = (getattr(m, "fget", m) for names in own for m in names.values())
    functions = (function_of(m) for m in methods)
    return any(f is not None and _asks(f.__code__, f.__code__.co_varnames[:1]) for f in functions)


def _asks(code: types.CodeType, own: tuple[str, ...]) -> bool:
    skipped = ("CACHE", "COPY_FREE_VARS", "PRECALL", "PUSH_NULL")
    steps = [i for i in dis.get_instructions(code) if i.opname not in skipped]
    for function, argument, _, after in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        of_itself = function.argval == "type" and argument.argval in own
        if of_itself and after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return True
    return any(_asks(c, own) for c in code.co_consts if isinstance(c, types.CodeType))


def function_of(method: Any) -> types.FunctionType | None:
    """The function of a method, of a static or class method too."""
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    return function if isinstance(function, types.FunctionType) else None


def with_ours(function: types.FunctionType) -> types.FunctionType:
    """The function with ours, also in the functions that it refers to and that call MLX's."""
    found = calling(function)
    inner = {f: {n: g for n, g in r.functions.items() if g in found} for f, r in found.items()}
    twins = {f: _twin(f, {*referred.ours, *inner[f]}) for f, referred in found.items()}
    for f, referred in found.items():
        known = referred.ours | {name: (g, twins[g]) for name, g in inner[f].items()}
        for name, (value, ours) in known.items():
            stands = ours if isinstance(value, types.ModuleType) else _of(f, name, value, ours)
            f.__globals__[_OTHER_NAME + name] = stands
    return twins[function]


def _of(
    function: types.FunctionType, name: str, value: Any, ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Ours, for as long as a global name of a function stands for what it does now."""
    names = function.__globals__

    def call(*arguments: Any, **keywords: Any) -> Any:
        current = names[name]
        return (ours if current is value else current)(*arguments, **keywords)

    return call


@dataclass(frozen=True)
class Referred:
    """What the global names of a function stand for: those of MLX's functions and modules with
    ours, their ops, and functions that it calls."""

    ours: dict[str, tuple[Any, Any]]
    ops: set[str]
    functions: dict[str, types.FunctionType]


def calling(function: types.FunctionType) -> dict[types.FunctionType, Referred]:
    """Of a function and those that it calls, in turn: those that call MLX's functions."""
    known: dict[types.FunctionType, Referred] = {}
    left = [function]
    while left:
        one = left.pop()
        if one not in known:
            known[one] = _referred(one)
            left += known[one].functions.values()
    found = {f for f, referred in known.items() if referred.ours}
    while more := {f for f in known if f not in found and found & {*known[f].functions.values()}}:
        found |= more
    return {f: known[f] for f in found}


def _referred(function: types.FunctionType) -> Referred:
    """A name that is used for something else, too, is left as it is."""
    found = Referred({}, set(), {})
    used: dict[str, list[_Use]] = {}
    for use in _uses(function.__code__):
        used.setdefault(use.name, []).append(use)
    for name, uses in used.items():
        value = function.__globals__.get(name)
        if value is None or any(use.other for use in uses):
            continue
        if isinstance(value, types.ModuleType):
            ops = {op for use in uses if (op := _op_of(value, use.attributes))}
            if ops and all(use.attributes for use in uses):
                found.ours[name] = (value, _STANDS[value])
                found.ops.update(ops)
        elif all(use.called for use in uses):
            op, ours = _ours_of(value)
            if op:
                found.ours[name] = (value, ours)
                found.ops.add(op)
            elif isinstance(value, types.FunctionType):
                found.functions[name] = value
    return found


def _op_of(module: types.ModuleType, attributes: tuple[str, ...]) -> str:
    if module is mx and attributes[:1] == ("fast",):
        module, attributes = mx.fast, attributes[1:]
    op, _ = _OURS.get(module, {}).get(attributes[0] if attributes else "", ("", None))
    return op


def _ours_of(value: Any) -> tuple[str, Any]:
    for module, names in _OURS.items():
        for name, (op, ours) in names.items():
            if value is getattr(module, name):
                return op, ours
    return (F.ATTENTION, _attention) if value is _of_mlx_lm() else ("", None)


@dataclass(frozen=True)
class _Use:
    """A name where code uses it: of a global name that is loaded, the attributes that are taken of
    it at once, and whether it is called. `mx.fast.rope` is ("mx", ("fast", "rope")). `other`: it is
    an attribute, or assigned to."""

    name: str
    attributes: tuple[str, ...] = ()
    called: bool = False
    other: bool = False


def _uses(code: types.CodeType) -> Iterator[_Use]:
    """The uses of names in code and the functions in it."""
    name, called, attributes = "", False, []
    for instruction in dis.get_instructions(code):
        loads = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        if instruction.opcode in dis.hasname and not loads:
            yield _Use(instruction.argval, other=True)
        if name and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.append(instruction.argval)
            continue
        if name:
            yield _Use(name, tuple(attributes), called)
        name = ""
        if loads:
            name, attributes = instruction.argval, []
            # Python 3.10 does not say it.
            called = "NULL" in instruction.argrepr or sys.version_info < (3, 11)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _uses(constant)


#: Before a global name, that of what stands for it in our functions.
_OTHER_NAME = "__zmlx_"


def _renamed(code: types.CodeType, names: set[str]) -> types.CodeType:
    """Code with other global names."""
    inner = (_renamed(c, names) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    own = (_OTHER_NAME + n if n in names else n for n in code.co_names)
    return code.replace(co_names=tuple(own), co_consts=tuple(inner))


def _twin(function: types.FunctionType, names: set[str]) -> types.FunctionType:
    """The function with other global names, and with the same attributes."""
    twin = types.FunctionType(
        _renamed(function.__code__, names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__", "__kwdefaults__"):
        setattr(twin, name, getattr(function, name))
    twin.__dict__ = function.__dict__
    return twin
