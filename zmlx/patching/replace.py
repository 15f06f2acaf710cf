"""Puts plans in place and takes them out again.

A patched module is the same object with another class: a subclass of its own that runs the plan.
Parameters, their names, frozen state, hooks and `isinstance` stay as they are. A module without
parameters may be shared with other models (mlx-lm has activations as default arguments), so its
parent gets a patched copy and keeps the original for `unpatch`.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..nn import functional as F
from .plans import PLAN, AttentionPlan, Plan, plan_of
from .probe import own_dtype
from .wiring import is_opaque, original_class, shadow

_ORIGINALS = "_zmlx_originals"
_NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]


def _extra_repr(self: Any) -> str:
    shown = type(self)._zmlx_class._extra_repr(self)
    plan = plan_of(self)
    runs = f"{plan.op}={plan.runs(own_dtype(self)).runs}" if plan else "runs=mlx"
    return f"{shown}, {runs}" if shown else runs


def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    plan = plan_of(self)
    original = type(self)._zmlx_class.__call__
    if plan is None or not arguments:
        return original(self, *arguments, **keywords)
    return plan.run(self, original, *arguments, **keywords)


def _setattr(self: Any, name: str, value: Any) -> None:
    """An attribute with another value than the plan was found for gives the module its own call
    back."""
    plan, held = plan_of(self), name in self
    before = vars(self).get(name, _NOTHING)
    type(self)._zmlx_class.__setattr__(self, name, value)
    if plan is not None and held and name not in self:
        restore(self)
    if plan is None or before is _NOTHING or name in (*_STATE, *plan.reads()):
        return
    plain = isinstance(value, (bool, int, float, str))
    if before is not value and not (plain and type(before) is type(value) and before == value):
        restore(self)


def _delattr(self: Any, name: str) -> None:
    """So does one that is gone."""
    type(self)._zmlx_class.__delattr__(self, name)
    restore(self)


def _setitem(self: Any, key: str, value: Any) -> None:
    """So does another entry, unless it is a parameter or a child that the plan calls: those may be
    quantised or get LoRA layers."""
    before = self.get(key)
    type(self)._zmlx_class.__setitem__(self, key, value)
    if plan_of(self) is None or before is value:
        return
    if isinstance(value, mx.array) and isinstance(before, mx.array):
        return
    modules = isinstance(value, nn.Module) and isinstance(before, nn.Module)
    if not (modules and is_opaque(value) and is_opaque(before)):
        restore(self)


_NOTHING = object()

#: Attributes of every module that no plan depends on.
_STATE = ("_training", "_no_grad")

_CLASSES: dict[Any, type[nn.Module]] = {}


def _patched_class(cls: type[nn.Module], methods: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of cls whose modules run a plan, or whose methods run with our attention; one
    for as long as these methods, and what they refer to, stay the same objects."""
    found = {name: inspect.getattr_static(cls, name) for name in methods}
    names = [tuple((n, id(v)) for n, v in _function(f).__globals__.items()) for f in found.values()]
    key = (cls, tuple(found.items()), tuple(names))
    if key not in _CLASSES:
        _CLASSES[key] = _subclass(cls, found)
    return _CLASSES[key]


def _function(method: Any) -> types.FunctionType:
    """The function of a method, of a static one too."""
    return getattr(method, "__func__", method)  # type: ignore[no-any-return]


def _subclass(cls: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    fields: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "_zmlx_class": cls,
        "_extra_repr": _extra_repr,
        "__reduce_ex__": _reduce,
    }
    if not hasattr(cls, "__deepcopy__"):
        fields["__deepcopy__"] = _deepcopy
    if not hasattr(cls, "__copy__"):
        fields["__copy__"] = _copy
    if methods:
        for name, method in methods.items():
            ours = _with_our_attention(_function(method))
            static = isinstance(method, (staticmethod, classmethod))
            fields[name] = type(method)(ours) if static else ours
    else:
        fields.update(
            __call__=_call, __setattr__=_setattr, __delattr__=_delattr, __setitem__=_setitem
        )
    return type(cls.__name__, (_Unannounced, cls), fields)


class _Unannounced:
    """Keeps a patched class from the `__init_subclass__` of the class that it stands for, which may
    keep a list or want arguments."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _reduce(self: Any, protocol: Any) -> Any:
    """What is pickled is the module without its plan, whose class can be found by name."""
    cls: Any = type(self)._zmlx_class
    twin = dict.__new__(cls)
    vars(twin).update((k, v) for k, v in vars(self).items() if k not in (PLAN, _ORIGINALS))
    dict.update(twin, self)
    made: Any = twin.__reduce_ex__(protocol)
    # pickle takes `__newobj__` for objects of that very class alone.
    return (cls.__new__, *made[1:]) if made[0] is _NEW else made


def _copy(self: Any) -> Any:
    return shadow(self, {})


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    cls: Any = type(self)
    twin = dict.__new__(cls)
    memo[id(self)] = twin
    vars(twin).update(copy.deepcopy(vars(self), memo))
    dict.update(twin, ((k, copy.deepcopy(v, memo)) for k, v in self.items()))
    return twin


def _with_our_attention(function: types.FunctionType) -> types.FunctionType:
    """The function with our attention under the name of mlx-lm's; all else that it refers to is
    what it was when the class was patched."""
    original = sys.modules["mlx_lm.models.base"].scaled_dot_product_attention
    names = {
        n: _attention if value is original else value for n, value in function.__globals__.items()
    }
    twin = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__doc__ = function.__doc__
    return twin


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
        original = sys.modules["mlx_lm.models.base"].scaled_dot_product_attention
        return original(queries, keys, values, cache, scale, mask, sinks)
    return F.attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def put(module: nn.Module, plan: Plan) -> None:
    """Makes a module run a plan."""
    methods = plan.methods if isinstance(plan, AttentionPlan) else ()
    cls = _patched_class(type(module), methods)
    object.__setattr__(module, PLAN, plan)
    object.__setattr__(module, "__class__", cls)


Keys = tuple[str | int, ...]


def _holder(parent: nn.Module, keys: Keys) -> Any:
    """What holds an entry directly: the module, or a list or dict in it."""
    found: Any = parent
    for key in keys[:-1]:
        found = found[key]
    return found


def put_copy(parent: nn.Module, keys: Keys, module: nn.Module, plan: Plan) -> nn.Module:
    """Gives the parent a patched copy of a child that may be shared; returns the copy."""
    twin = shadow(module, {})
    put(twin, plan)
    vars(parent).setdefault(_ORIGINALS, {})[keys] = module
    holder = _holder(parent, keys)
    if isinstance(holder, dict):
        dict.__setitem__(holder, keys[-1], twin)
    else:
        holder[keys[-1]] = twin
    return twin  # type: ignore[no-any-return]


def restore(module: nn.Module) -> bool:
    """Takes the plan out of a module, and gives it its shared children back; returns whether it had
    a plan."""
    for keys, original in vars(module).pop(_ORIGINALS, {}).items():
        try:
            holder = _holder(module, keys)
            held = holder[keys[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        # Someone may have put another module there since, which is theirs.
        if isinstance(held, nn.Module) and type(held) is not type(original):
            if getattr(type(held), "_zmlx_class", None) is not type(original):
                continue
            if isinstance(holder, dict):
                dict.__setitem__(holder, keys[-1], original)
            else:
                holder[keys[-1]] = original
    if plan_of(module) is None:
        return False
    object.__setattr__(module, "__class__", original_class(module))
    vars(module).pop(PLAN)
    return True


def parents(model: nn.Module) -> Iterator[tuple[str, nn.Module, Keys, nn.Module]]:
    """(path of the child, parent, its place there, child) for every child that can be replaced."""

    def entries(value: Any, keys: Keys) -> Iterator[tuple[Keys, nn.Module]]:
        if isinstance(value, nn.Module):
            yield keys, value
        elif isinstance(value, (list, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                yield from entries(inner, (*keys, key))

    for path, module in model.named_modules():
        for key, value in module.items():
            for keys, child in entries(value, (key,)):
                below = ".".join(map(str, keys))
                yield (f"{path}.{below}" if path else below), module, keys, child
