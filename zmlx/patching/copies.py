"""Copies of modules without arrays, such as activations and dropout.

Such a module may be shared with other models (mlx-lm has activations as default arguments), so
that each place of it gets a copy of its own, with all that is below it, and the nearest module
above that stays keeps the original for `unpatch`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from .held import same
from .shadows import Keys, children, entries, entry, is_opaque, joined, rebuilt, shadow

#: The attribute of a module that has the originals of what was copied directly below it: (original,
#: copy, attributes of the copy when it was made), those further below too. Lists and dicts with
#: modules in them are copied as well, and have their entries in the place of attributes.
ORIGINALS = "_zmlx_originals"


@dataclass(frozen=True)
class Place:
    """Where a module is.

    Attributes:
        path: as `named_modules` says it.
        module: the module.
        parent: the nearest module above that stays, None for a module that itself does.
        keys: of that parent's entry that is copied, which the module is or is in.
        below: from there to the module.
    """

    path: str
    module: nn.Module
    parent: nn.Module | None = None
    keys: Keys = ()
    below: Keys = ()


def places(model: nn.Module) -> Iterator[Place]:
    """All places of all modules; the model itself stays."""
    left = [Place("", model)]
    while left:
        here = left.pop()
        yield here
        for keys, child in children(here.module):
            path = joined(here.path, keys)
            if here.parent is not None:
                left.append(Place(path, child, here.parent, here.keys, (*here.below, *keys)))
            elif is_opaque(child):
                left.append(Place(path, child))
            else:
                left.append(Place(path, child, here.module, keys))


def own(place: Place) -> nn.Module:
    """The module at a place, in a copy if it does not stay."""
    if place.parent is None:
        return place.module
    child = _at(place.parent, place.keys)
    made = vars(place.parent).setdefault(ORIGINALS, [])
    if not any(child is copied for _, copied, _ in made):
        child = _copied(child, made)
        _put(place.parent, place.keys, child)
    return _at(child, place.below)  # type: ignore[no-any-return]


def give_back(parent: nn.Module) -> None:
    """Puts originals where copies of them still are, with what has changed in the copies."""
    made = vars(parent).pop(ORIGINALS, ())
    originals = {id(copied): original for original, copied, _ in made}
    for keys, child in list(children(parent)):
        if id(child) in originals:
            _put(parent, keys, originals[id(child)])
    for original, copied, before in made:
        if isinstance(original, nn.Module):
            _take_over(original, copied, before, originals)
        else:
            _take_over_entries(original, copied, before, originals)


def _at(value: Any, keys: Keys) -> Any:
    for key in keys:
        value = entry(value, key)
    return value


def _put(parent: nn.Module, keys: Keys, new: nn.Module) -> None:
    holder = _at(parent, keys[:-1])
    if isinstance(holder, dict):
        dict.__setitem__(holder, keys[-1], new)
    else:
        list.__setitem__(holder, keys[-1], new)


def _mapped(value: Any, function: Any, made: list[Any] | None = None) -> Any:
    """A list or dict with other modules, itself where it has none: others may hold it too, and what
    a call puts in is theirs."""
    if isinstance(value, nn.Module):
        return function(value)
    if not isinstance(value, (list, dict)):
        return value
    parts = {k: _mapped(v, function, made) for k, v in entries(value)}
    if all(parts[k] is v for k, v in entries(value)):
        return value
    copied = rebuilt(value, parts)
    if made is not None:
        made.append((value, copied, parts))
    return copied


def _copied(module: nn.Module, made: list[Any]) -> nn.Module:
    below = {k: _mapped(v, lambda m: _copied(m, made), made) for k, v in entries(module)}
    copied: nn.Module = shadow(module, below)
    made.append((module, copied, _attributes(copied)))
    return copied


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if not k.startswith("_zmlx_")}


def _take_over(
    original: nn.Module, copied: nn.Module, before: Mapping[str, Any], originals: dict[int, Any]
) -> None:
    """What changed in the copy, as a mode or a rate of dropout does, changes in the original."""
    now = _attributes(copied)
    for name in [k for k in before if k not in now]:
        vars(original).pop(name, None)
    vars(original).update((k, v) for k, v in now.items() if k not in before or v is not before[k])
    for key in dict.keys(original) - dict.keys(copied):
        dict.pop(original, key)
    for key, value in entries(copied):
        value = _given_back(value, originals)
        if not _equal(dict.get(original, key), value):
            dict.__setitem__(original, key, value)


def _take_over_entries(
    original: Any, copied: Any, before: Mapping[Any, Any], originals: dict[int, Any]
) -> None:
    """What changed in a copied list or dict changes in the original, which others may hold."""
    now = dict(entries(copied))
    if len(now) == len(before) and all(before.get(k, before) is v for k, v in now.items()):
        return
    parts = {k: _given_back(v, originals) for k, v in now.items()}
    if isinstance(original, list):
        list.__setitem__(original, slice(None), list(parts.values()))
        return
    base: Any = OrderedDict if isinstance(original, OrderedDict) else dict
    for key in [k for k in original if k not in parts]:
        base.pop(original, key)
    for key, value in parts.items():
        base.__setitem__(original, key, value)


def _given_back(value: Any, originals: dict[int, Any]) -> Any:
    if id(value) in originals:
        return originals[id(value)]
    return _mapped(value, lambda m: originals.get(id(m), m))


def _equal(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b) or isinstance(a, nn.Module):
        return a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return same(a, b)
