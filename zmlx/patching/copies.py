"""Copies of modules without arrays, such as activations and dropout.

Such a module may be shared with other models (mlx-lm has activations as default arguments), so
that the places of it in a model get a copy, with all that is below it, which keeps the original for
`unpatch`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.nn as nn

from .held import same
from .shadows import Keys, children, entries, entry, is_opaque, joined, rebuilt, shadow

#: The attribute of a copy that has the originals of what was copied below it, and last its own:
#: (original, copy, attributes of the copy when it was made). Lists and dicts with modules in them
#: are copied as well, and have their entries in the place of attributes.
ORIGINALS = "_zmlx_originals"

Plan = TypeVar("Plan")


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


def make_own(chosen: Iterable[Place]) -> None:
    """Puts copies in these places, but where one is or the module stays. What is one module, list
    or dict in two places is one copy, if the same is chosen in both."""
    below: dict[tuple[int, Keys], tuple[nn.Module, set[Keys]]] = {}
    for place in chosen:
        if place.parent is not None:
            at = id(place.parent), place.keys
            below.setdefault(at, (place.parent, set()))[1].add(place.below)
    known: dict[Any, tuple[Any, list[Any]]] = {}
    for (_, keys), (parent, inner) in below.items():
        child = _at(parent, keys)
        if _original(child) is None:
            _put(parent, keys, _copied(child, frozenset(inner), known)[0])


def own(place: Place) -> nn.Module:
    """The module that is at a place by now."""
    if place.parent is None:
        return place.module
    return _at(place.parent, (*place.keys, *place.below))  # type: ignore[no-any-return]


def distinct(found: Iterable[tuple[Place, Plan]]) -> Iterator[tuple[Place, Plan]]:
    """Without places that were met before by another name of a list or a dict in them."""
    seen = set()
    for place, plan in found:
        slots: Any = id(place.module)
        if place.parent is not None:
            inner = (*place.keys, *place.below)
            slots = (*((id(_at(place.parent, k[:-1])), k[-1]) for k in (place.keys, inner)),)
        if slots not in seen:
            seen.add(slots)
            yield place, plan


def give_back(parent: nn.Module) -> None:
    """Puts originals where copies of them still are, with what has changed in the copies."""
    made: list[Any] = []
    for keys, child in list(children(parent)):
        if (original := _original(child)) is not None:
            made += vars(child)[ORIGINALS]
            _put(parent, keys, original)
    originals = {id(copied): original for original, copied, _ in made}
    for original, copied, before in made:
        if isinstance(original, nn.Module):
            _take_over(original, copied, before, originals)
        else:
            _take_over_entries(original, copied, before, originals)


def _original(module: nn.Module) -> Any:
    """What a module is a copy of, None if it is none."""
    made = vars(module).get(ORIGINALS)
    return made[-1][0] if made and made[-1][1] is module else None


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


def _mapped(value: Any, parts: Mapping[Any, Any]) -> Any:
    """A list or dict with other entries, itself where these are its own: others may hold it too,
    and what a call puts in is theirs."""
    return value if all(parts[k] is v for k, v in entries(value)) else rebuilt(value, parts)


def _copied(
    value: Any, chosen: frozenset[Keys], known: dict[Any, tuple[Any, list[Any]]]
) -> tuple[Any, list[Any]]:
    """The copy of a module, or of a list or dict with modules, and what `ORIGINALS` has of it;
    `chosen`: where in it something is replaced."""
    if not isinstance(value, (list, dict)):
        return value, []
    key = id(value), chosen
    if key not in known:
        made: list[Any] = []
        parts: dict[Any, Any] = {}
        for k, v in entries(value):
            below = frozenset(keys[1:] for keys in chosen if keys[:1] == (k,))
            parts[k], more = _copied(v, below, known)
            made += more
        if isinstance(value, nn.Module):
            copied: Any = shadow(value, parts)
            made.append((value, copied, _attributes(copied)))
            vars(copied)[ORIGINALS] = made
        elif (copied := _mapped(value, parts)) is not value:
            made.append((value, copied, parts))
        known[key] = copied, made
    return known[key]


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
    if isinstance(value, nn.Module) or not isinstance(value, (list, dict)):
        return value
    return _mapped(value, {k: _given_back(v, originals) for k, v in entries(value)})


def _equal(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b) or isinstance(a, nn.Module):
        return a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return same(a, b)
