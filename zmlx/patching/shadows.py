"""Shadows of modules: of the same class, with what the module holds, but for some entries; and what
is below a module by path.

What a module holds is read as `dict` has it: its class and its attributes may use the names of the
methods of `dict` and of `nn.Module` for something else.

A trace runs a shadow, so that nothing that a call sets reaches the program's module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .reasons import UnmatchedError, notice

#: Where something is in a module's entries: its name, then indices and keys in lists and dicts.
Keys = tuple[Any, ...]


def shadow(module: nn.Module, changed: Mapping[str, Any]) -> Any:
    """A module of the same class with the same attributes, but these entries."""
    twin: Any = dict.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for slot, value in slots(module):
        slot.__set__(twin, value)
    dict.update(twin, entries(module))
    dict.update(twin, changed)
    return twin


def slots(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The slots of a module's classes that have a value, and these."""
    for cls in type(module).__mro__:
        if not vars(cls).get("__slots__"):
            continue
        for slot in vars(cls).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    yield slot, slot.__get__(module)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was patched."""
    return getattr(type(module), "_zmlx_class", type(module))


def set_class(module: nn.Module, cls: type) -> None:
    """Gives a module another class, whatever `__class__` is to the one that it has."""
    vars(object)["__class__"].__set__(module, cls)


def entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and entries of a list, a tuple or a dict."""
    return dict.items(value) if isinstance(value, dict) else enumerate(value)


def entry(value: Any, key: Any) -> Any:
    """An entry of a module, or of a list or a dict in it."""
    return (dict if isinstance(value, dict) else list).__getitem__(value, key)


def rebuilt(value: Any, parts: Mapping[Any, Any]) -> Any:
    """A copy of a list, a tuple or a dict with these entries, of the same class: code may read it
    by attributes. A tuple of the same entries is itself."""
    if isinstance(value, tuple):
        if all(parts[i] is v for i, v in enumerate(value)):
            return value
        twin: Any = tuple.__new__(type(value), parts.values())
        if hasattr(value, "__dict__"):
            vars(twin).update(vars(value))
        return twin
    twin, base = _copy_of(value), dict if isinstance(value, dict) else list
    for key, part in parts.items():
        base.__setitem__(twin, key, part)
    return twin


def _copy_of(value: Any) -> Any:
    """A copy of a list or a dict."""
    cls: Any = type(value)
    if cls in (list, dict):
        return cls(value)
    try:
        twin = copy.copy(value)
    except Exception:  # a `__getattr__` that looks among the entries fails for the names of `copy`
        base: Any = dict if isinstance(value, dict) else list
        twin = base.__new__(cls)
        (dict.update if base is dict else list.extend)(twin, value)
        vars(twin).update(vars(value))
    if getattr(value, "__dict__", None) is value:  # its entries are its attributes
        twin.__dict__ = twin
    return twin


class Unread:
    """What a module gets in a trace for what leads out of it: a call that goes by it is left
    alone."""

    __slots__ = ("_why",)

    def __init__(self, why: str) -> None:
        object.__setattr__(self, "_why", why)

    def _read(self, *_: Any, **__: Any) -> Any:
        notice(object.__getattribute__(self, "_why"))

    __setattr__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __call__ = _read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._read()


#: For a module above, which a tuple hides from MLX.
_ABOVE = Unread("its call reads a module above it")


def _leads_to(value: Any, module: nn.Module, seen: set[int]) -> bool:
    """Whether a module is in a value."""
    if value is module:
        return True
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_leads_to(v, module, seen) for _, v in entries(value))


def detached(value: Any) -> Any:
    """Shadows of a module and of all below it, as they were before they were patched, so that a
    call which sets what they hold, as that of a batch norm does in training, or changes an array
    in place, leaves them as they are. What is one module or array in two places has one shadow."""
    made: dict[int, Any] = {}

    def within(value: Any, holder: nn.Module | None, hidden: bool) -> Any:
        if isinstance(value, nn.Module):
            if hidden and holder is not None and _leads_to(value, holder, set()):
                return _ABOVE
            if id(value) in made:
                return made[id(value)]
            twin = made[id(value)] = shadow(
                value, {k: within(v, value, False) for k, v in entries(value)}
            )
            set_class(twin, original_class(value))
            for name in [n for n in vars(twin) if n.startswith("_zmlx_")]:
                del vars(twin)[name]
            return twin
        if isinstance(value, (list, tuple, dict)):
            hidden = hidden or isinstance(value, tuple)
            return rebuilt(value, {k: within(v, holder, hidden) for k, v in entries(value)})
        if isinstance(value, mx.array):
            return made.setdefault(id(value), copy.copy(value))
        return value

    return within(value, None, False)


def children(module: nn.Module) -> Iterator[tuple[Keys, nn.Module]]:
    """The modules directly below one, and where they are in its entries."""

    def below(value: Any, keys: Keys) -> Iterator[tuple[Keys, nn.Module]]:
        if isinstance(value, nn.Module):
            yield keys, value
        elif isinstance(value, (list, dict)):  # MLX looks for no modules in a tuple
            for key, inner in entries(value):
                yield from below(inner, (*keys, key))

    for key, value in entries(module):
        yield from below(value, (key,))


def named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a model, as its `named_modules` has them; what is below one is looked up when
    it was yielded."""
    left = [("", model)]
    while left:
        path, module = left.pop()
        yield path, module
        left += [(joined(path, keys), child) for keys, child in children(module)]


def joined(path: str, keys: Keys) -> str:
    """The path of what is below another."""
    return ".".join(map(str, (path, *keys) if path else keys))


def parameters(module: nn.Module) -> dict[str, mx.array]:
    """The parameters of a module and of those below it, by path."""
    found: dict[str, mx.array] = {}

    def look(value: Any, path: str) -> None:
        if isinstance(value, mx.array):
            found[path] = value
        elif isinstance(value, (list, dict)):
            for key, inner in entries(value):
                if not (isinstance(value, nn.Module) and key.startswith("_")):
                    look(inner, joined(path, (key,)))

    look(module, "")
    return found


def count_of(module: nn.Module, name: str, default: int) -> int:
    """A positive number that a module has under a name, or else the default: what has that name may
    be another thing, and may raise."""
    try:
        value = getattr(module, name, default)
    except Exception:
        return default
    return value if type(value) is int and value > 0 else default


def placed(module: Any, children: Mapping[str, Any]) -> Any:
    """The module with these children and arrays, by path."""
    here: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, child in children.items():
        key, rest = _first_of(module, path)
        if rest:
            below.setdefault(key, {})[rest] = child
        else:
            here[key] = child
    if isinstance(module, nn.Module):
        inner = {k: placed(dict.get(module, k), v) for k, v in below.items()}
        return shadow(module, {**here, **inner})
    parts = {k: here.get(str(k), v) for k, v in entries(module)}
    return rebuilt(
        module, {k: placed(v, below[str(k)]) if str(k) in below else v for k, v in parts.items()}
    )


def is_opaque(module: nn.Module) -> bool:
    """Whether a child is a stand-in in a trace: not an activation, which has no parameters, and
    leads to no module above."""

    def holds(value: Any, above: frozenset[int]) -> bool:
        if not isinstance(value, (list, tuple, dict)) or id(value) in above:
            return True
        above |= {id(value)}
        return any(holds(v, above) for _, v in entries(value))

    return holds(module, frozenset())


def _first_of(module: Any, path: str) -> tuple[str, str]:
    """The name that a path begins with, and the rest; names of children may have dots in them."""
    first, _, left = path.partition(".")
    if not isinstance(module, dict) or first in module:
        return first, left
    names: Any = module if isinstance(module, nn.Module) else set(map(str, module))
    name, rest = first, left
    while name not in names and rest:
        more, _, rest = rest.partition(".")
        name = f"{name}.{more}"
    return (name, rest) if name in names else (first, left)


def _key_of(held: dict[Any, Any], name: str) -> Any:
    """The key of a dict that a path calls so."""
    return name if name in held else next((k for k in held if str(k) == name), name)


def child_of(module: Any, path: str) -> Any:
    """The module at a path; raises `UnmatchedError` where there is none."""
    rest = path
    try:
        while rest:
            key, rest = _first_of(module, rest)
            if isinstance(module, (list, tuple)):
                module = module[int(key)]
            elif isinstance(module, nn.Module):  # which may have a child of a method's name
                held = dict.__contains__(module, key)
                module = entry(module, key) if held else getattr(module, key)
            else:
                module = module[_key_of(module, key)]
    except (AttributeError, LookupError, ValueError, TypeError):
        raise UnmatchedError(f"there is no {path} in it") from None
    return module
