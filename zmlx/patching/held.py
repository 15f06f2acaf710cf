"""What a plan was found from besides its module's own attributes: the lists and dicts that the
module holds, its children without arrays, and the norms that a block computes itself.

A module notices when its own attributes change; these can change behind it, as in
`model.layers[1] = nn.ReLU()`, so that they are looked at in each call. Most modules have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .shadows import child_of, entries, is_opaque, original_class
from .surroundings import surroundings

#: The attribute of a patched module that has what it held when it was patched.
HELD = "_zmlx_held"

#: Attributes of every module that no plan depends on.
STATE = ("_training", "_no_grad")


class _Any(Enum):
    """What may be another of its kind."""

    NOTHING = 0
    ARRAY = 1
    OPAQUE = 2


@dataclass(frozen=True)
class _Module:
    cls: type
    attributes: dict[str, Any]
    entries: dict[Any, Any]


@dataclass(frozen=True)
class _Entries:
    """Of a list, a tuple or a dict."""

    cls: type
    entries: dict[Any, Any]


def same(before: Any, value: Any) -> bool:
    """Whether an attribute has the value that it had."""
    plain = isinstance(value, (bool, int, float, str))
    return before is value or (plain and type(before) is type(value) and bool(before == value))


def hold(
    module: nn.Module, computed: Iterable[tuple[str, tuple[str, ...]]], own_code: bool
) -> None:
    """Notes what the module holds, and what its code goes by besides, unless it is that code that
    runs; `computed`: paths of norms, and what may change in them."""
    own = {key: _noted(value) for key, value in entries(module) if _is_held(value)}
    reads = dict(computed)
    norms = {path: _whole(child_of(module, path), names) for path, names in reads.items()}
    inner = [child_of(module, path) for path in norms]
    around = None if own_code else surroundings(module, inner)
    vars(module)[HELD] = own, norms, reads, around


def holds_the_same(module: nn.Module) -> bool:
    """Whether the module still holds what it did."""
    held = vars(module).get(HELD)
    if held is None:
        return True
    own, norms, reads, around = held
    now = dict(entries(module))
    return (
        (around is None or around.is_same())
        and all(_equals(now.get(key, _Any.NOTHING), was) for key, was in own.items())
        and all(_equals(child_of(module, path), was, reads[path]) for path, was in norms.items())
    )


def noted(module: nn.Module) -> Any:
    """A module's attributes and what it holds."""
    return _whole(module)


def is_as_noted(module: nn.Module, was: Any) -> bool:
    """Whether a module still has the attributes, and holds what it did."""
    return _equals(module, was)


def _is_held(value: Any) -> bool:
    """Whether it can change behind the module: not where it is called as it is at the time."""
    if isinstance(value, nn.Module):
        return not is_opaque(value)
    return isinstance(value, (list, tuple, dict))


def _attributes(module: nn.Module, without: tuple[str, ...]) -> dict[str, Any]:
    ignored = (*STATE, *without)
    return {k: v for k, v in vars(module).items() if k not in ignored and k[:6] != "_zmlx_"}


def _whole(module: nn.Module, without: tuple[str, ...] = ()) -> _Module:
    held = {key: _noted(value) for key, value in entries(module)}
    return _Module(original_class(module), _attributes(module, without), held)


def _noted(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return _Any.OPAQUE if is_opaque(value) else _whole(value)
    if isinstance(value, (list, tuple, dict)):
        return _Entries(type(value), {key: _noted(v) for key, v in entries(value)})
    return _Any.ARRAY if isinstance(value, mx.array) else value


def _equals(value: Any, was: Any, without: tuple[str, ...] = ()) -> bool:
    """Arrays may be others, and so may modules with arrays, which are called as they are."""
    if isinstance(was, _Module):
        if not isinstance(value, nn.Module) or original_class(value) is not was.cls:
            return False
        now = _attributes(value, without)
        return (
            len(now) == len(was.attributes)
            and all(same(was.attributes.get(k, _Any.NOTHING), v) for k, v in now.items())
            and _all_equal(value, was.entries)
        )
    if isinstance(was, _Entries):
        return type(value) is was.cls and _all_equal(value, was.entries)
    if was is _Any.OPAQUE:
        return isinstance(value, nn.Module) and is_opaque(value)
    return isinstance(value, mx.array) if was is _Any.ARRAY else same(was, value)


def _all_equal(value: Any, was: dict[Any, Any]) -> bool:
    now = dict(entries(value))
    return len(now) == len(was) and all(
        _equals(v, was.get(key, _Any.NOTHING)) for key, v in now.items()
    )
