"""Puts plans in place and takes them out again.

A patched module is the same object with another class: a subclass of its own that runs the plan.
Parameters, their names, frozen state, hooks and `isinstance` stay as they are. What has no
parameters is copied first: see `copies`.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import types
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .code import calling, function_of, with_ours
from .copies import give_back
from .dtypes import own_dtype
from .held import HELD, STATE, hold, holds_the_same, same
from .plans import PLAN, CodePlan, DropoutPlan, Plan, plan_of
from .shadows import entries, is_opaque, original_class, set_class, shadow, slots

#: The attribute of a patched module whose gradient was compared too.
_TRAINED = "_zmlx_trained"

_NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]


def _extra_repr(self: Any) -> str:
    shown = type(self)._zmlx_class._extra_repr(self)
    plan = plan_of(self) if holds_the_same(self) else None
    runs = f"{plan.op}={plan.runs(own_dtype(self)).runs}" if plan else "runs=mlx"
    return f"{shown}, {runs}" if shown else runs


def _init_of(cls: Any) -> Any:
    """A layer that is made of a patched one's class is of the class that it stands for."""

    @wraps(cls.__init__)
    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        take_out(self)
        cls.__init__(self, *arguments, **keywords)

    return init


def _call_of(cls: Any) -> Any:
    """The call of patched modules, with the signature of their own."""
    names = _by_position(cls.__call__)

    @wraps(cls.__call__)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        original = cls.__call__
        plan = plan_of(self) if is_current(self) else None
        if plan is None:
            return original(self, *arguments, **keywords)
        # Plans know by its place what a caller may give by name.
        for name in names[len(arguments) :]:
            if name not in keywords:
                break
            arguments = *arguments, keywords.pop(name)
        if not arguments:
            return original(self, **keywords)
        return plan.run(self, original, *arguments, **keywords)

    return call


def _by_position(call: Any) -> tuple[str, ...]:
    """The parameters after self that may be given by position or by name; none where the signature
    is not known."""
    try:
        parameters = list(inspect.signature(call).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def _setattr(self: Any, name: str, value: Any) -> None:
    """An attribute with another value than the plan was found for gives the module its own call
    back."""
    plan, held = plan_of(self), dict.keys(self)
    had = name in held
    before = vars(self).get(name, _NOTHING)
    type(self)._zmlx_class.__setattr__(self, name, value)
    if plan is None:
        return
    changed = not same(before, vars(self).get(name, _NOTHING))
    if (had and name not in held) or (changed and name not in (*STATE, *plan.reads())):
        take_out(self)


def _delattr(self: Any, name: str) -> None:
    """So does one that is gone."""
    type(self)._zmlx_class.__delattr__(self, name)
    take_out(self)


#: Methods of `dict` that put in or take out an entry; a class may have others of these names.
_CHANGING = ("__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault")


def _changing(cls: Any, name: str) -> Any:
    """One of these methods of a class."""
    method = getattr(cls, name)

    @wraps(method)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        before = dict(entries(self))
        result = method(self, *arguments, **keywords)
        now = dict(entries(self))
        if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items()):
            take_out(self)
        return result

    return run


def _setitem(self: Any, key: str, value: Any) -> None:
    """So does another entry, unless it is a parameter or a child that the plan calls: those may be
    quantised or get LoRA layers."""
    before: Any = dict.get(self, key)
    type(self)._zmlx_class.__setitem__(self, key, value)
    if plan_of(self) is None or before is value:
        return
    if isinstance(value, mx.array) and isinstance(before, mx.array):
        return
    modules = isinstance(value, nn.Module) and isinstance(before, nn.Module)
    if not (modules and is_opaque(value) and is_opaque(before)):
        take_out(self)


_NOTHING = object()

_CLASSES: dict[Any, tuple[type[nn.Module], Any]] = {}


def _patched_class(cls: type[nn.Module], methods: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of cls whose modules run a plan, or whose methods run with our functions; one
    for as long as its call and these methods, and the functions that they call, stay the same
    objects, and its own call what it was: who checkpoints a layer sets that of its class, and means
    the layers of this model."""
    found = {name: inspect.getattr_static(cls, name) for name in methods}
    called = tuple(frozenset(calling(_function(f))) for f in found.values())
    key = (cls, cls.__call__, tuple(found.items()), called)
    made, call = _CLASSES.get(key, (None, None))
    if made is None or made.__call__ is not call:
        made = _subclass(cls, found)
        _CLASSES[key] = made, made.__call__
    return made


def _function(method: Any) -> types.FunctionType:
    function = function_of(method)
    assert function is not None
    return function


def _method(cls: type[nn.Module], name: str, method: Any) -> Any:
    """A method with our functions, for as long as it is what its class has."""
    function = _function(method)
    ours = with_ours(function)

    @wraps(ours)
    def run(*arguments: Any, **keywords: Any) -> Any:
        current = getattr(cls, name)
        current = getattr(current, "__func__", current)
        return (ours if current is function else current)(*arguments, **keywords)

    return type(method)(run) if isinstance(method, (staticmethod, classmethod)) else run


def _subclass(cls: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    fields: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        # `super(self.__class__, self)` goes on above the class that it stands for.
        "__class__": property(lambda _: cls, set_class),
        "_zmlx_class": cls,
        "_zmlx_class_call": cls.__call__,
        "__init__": _init_of(cls),
        "_extra_repr": _extra_repr,
        "__reduce_ex__": _reduce,
    }
    if not hasattr(cls, "__deepcopy__"):
        fields["__deepcopy__"] = _deepcopy
    if not hasattr(cls, "__copy__"):
        fields["__copy__"] = _copy
    if methods:
        fields.update((name, _method(cls, name, method)) for name, method in methods.items())
    else:
        fields.update(
            __call__=_call_of(cls), __setattr__=_setattr, __delattr__=_delattr,
            __setitem__=_setitem, **{name: _changing(cls, name) for name in _CHANGING},
        )  # fmt: skip
    return type(cls.__name__, (_Unannounced, cls), fields)


class _Unannounced:
    """Keeps a patched class from the `__init_subclass__` of the class that it stands for, which may
    keep a list or want arguments."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _unpatched(self: Any) -> Any:
    """The module without its plan."""
    twin = shadow(self, {})
    set_class(twin, original_class(self))
    for name in [n for n in vars(twin) if n.startswith("_zmlx_")]:
        del vars(twin)[name]
    return twin


def _reduce(self: Any, protocol: Any) -> Any:
    """What is pickled is the module without its plan, whose class can be found by name."""
    cls: Any = original_class(self)
    made: Any = _unpatched(self).__reduce_ex__(protocol)
    # pickle takes `__newobj__` for objects of that very class alone.
    return (cls.__new__, *made[1:]) if made[0] is _NEW else made


def _says_its_state(cls: Any) -> bool:
    """Whether a class has its own way to be copied."""
    names = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
    return any(getattr(cls, n, None) is not getattr(object, n, None) for n in names)


def _copy(self: Any) -> Any:
    return _as_it_says(self, None) if _says_its_state(original_class(self)) else shadow(self, {})


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if _says_its_state(original_class(self)):
        return _as_it_says(self, memo)
    plan = plan_of(self) if is_current(self) else None
    cls: Any = type(self)
    twin = dict.__new__(cls)
    memo[id(self)] = twin
    own = {name: value for name, value in vars(self).items() if name != HELD}
    vars(twin).update(copy.deepcopy(own, memo))
    for slot, value in slots(self):
        slot.__set__(twin, copy.deepcopy(value, memo))
    dict.update(twin, ((k, copy.deepcopy(v, memo)) for k, v in entries(self)))
    if plan is not None:
        _hold(twin, plan)
    return twin


def _as_it_says(self: Any, memo: dict[int, Any] | None) -> Any:
    """A copy, a deep one with a memo, that the class of the module makes of its state; with the
    plan, if it is what the module runs."""
    made: Any = _unpatched(self).__reduce_ex__(4)
    twin = copy._reconstruct(self, memo, *made)  # type: ignore[attr-defined]
    kept = (PLAN, HELD, _TRAINED)
    for name, value in vars(self).items():
        if name.startswith("_zmlx_") and name not in kept:
            vars(twin)[name] = value if memo is None else copy.deepcopy(value, memo)
    if plan_of(self) is not None and is_current(self):
        put(twin, plan_of(self), is_trained(self))
    return twin


def put(module: nn.Module, plan: Plan, training: bool) -> None:
    """Makes a module run a plan; `training`: whose gradient was compared too."""
    methods = plan.methods if isinstance(plan, CodePlan) else ()
    cls = _patched_class(type(module), methods)
    _hold(module, plan)
    object.__setattr__(module, PLAN, plan)
    set_class(module, cls)
    if training:
        set_trained(module)


def _hold(module: nn.Module, plan: Plan) -> None:
    hold(module, plan.computes(), own_code=isinstance(plan, (CodePlan, DropoutPlan)))


def set_trained(module: nn.Module) -> None:
    """Notes that the gradient of what runs in its place was compared."""
    vars(module)[_TRAINED] = True


def is_trained(module: nn.Module) -> bool:
    """Whether it was."""
    return _TRAINED in vars(module)


def is_current(module: nn.Module) -> bool:
    """Whether what a patched module holds, and the call of its class, are still what its plan was
    found from; the plan is taken out if not."""
    cls: Any = type(module)
    # mlx-lm's `grad_checkpoint` gives a class another call.
    same_call = plan_of(module) is None or cls._zmlx_class.__call__ == cls._zmlx_class_call
    return (same_call and holds_the_same(module)) or not take_out(module)


def take_out(module: nn.Module) -> bool:
    """Takes the plan out of a module, and of nothing below it; returns whether it had one."""
    had = plan_of(module) is not None
    if "_zmlx_class" in vars(type(module)):
        set_class(module, original_class(module))
    for name in (PLAN, HELD, _TRAINED):
        vars(module).pop(name, None)
    return had


def restore(module: nn.Module) -> bool:
    """Takes the plan out of a module, and gives it its shared children back; returns whether it had
    a plan."""
    give_back(module)
    return take_out(module)
