"""Ops whose calls are looked at once: a repeated call costs one look into a table.

Checks of arguments, and what follows from shapes and options (axes, geometry, which of several
kernels), take Python longer than a launch. They depend on nothing that changes from call to call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import launch
from .targets import cpu

#: Computes an op of arrays that were looked at.
Way = Callable[..., Any]


class Remembered:
    """An op that keeps, for shapes and dtypes of its arrays and values of its options, the way in
    which it is computed.

    Calls in which an array is traced are looked at each time, and so are all on other targets than
    "cpu", where nothing tells whether one is.

    Args:
        find: takes the arrays and the options, raises where they do not fit, and returns the way: a
            function of the arrays. It must go by nothing but their shapes and dtypes, whether they
            are traced, the options and the settings of `zmlx.launch`.
    """

    __slots__ = ("_find", "_ways")

    def __init__(self, find: Callable[..., Way]) -> None:
        self._find = find
        self._ways: dict[launch.Settings, dict[bytes, Way]] = {}

    def __call__(self, arrays: tuple[mx.array | None, ...], options: tuple[Any, ...] = ()) -> Any:
        """The op of the arrays with the options."""
        settings = launch.settings()
        if settings.target != "cpu":
            return self._find(*arrays, *options)(*arrays)
        ways = self._ways.get(settings)
        if ways is None:
            ways = self._ways[settings] = {}
        found = cpu.known(ways, arrays, options)
        if found is not None and type(found) is not bytes:
            return found(*arrays)
        way = self._find(*arrays, *options)
        if found is not None:  # the key
            if len(ways) >= launch.SHAPES_KEPT:
                ways.clear()
            ways[found] = way
        return way(*arrays)
