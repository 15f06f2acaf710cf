"""What a name in a jitted function may stand for: functions of `math`, `mlx` and Python."""

from __future__ import annotations

import builtins
import math
from functools import cache
from types import ModuleType
from typing import Any

from ..expr import ALIASES, FUNCTIONS

#: Functions of `math` under the names that `zmlx.expr` knows; the others have a meaning of theirs.
_MATH = """
acos acosh asin asinh atan atan2 atanh cos cosh erf exp exp2 expm1 fmod hypot isfinite isinf isnan
log10 log1p log2 pow sin sinh sqrt tan tanh
"""
_MATH_OWN = ("floor", "ceil", "trunc", "fabs", "log")
_PYTHON = ("abs", "bool", "float", "int", "max", "min", "pow", "round")
_NN = "gelu gelu_approx log_sigmoid mish relu sigmoid silu softplus tanh"
#: Operations of MLX that are not the `mlx` column of a row.
_MLX = {"clip": "clip", "not_equal": "!=", "reciprocal": "reciprocal", "sign": "sign"}


@cache
def known() -> dict[int, tuple[str, str]]:
    """Functions by identity: (origin, name), where origin is "python", "math" or "expr"."""
    import mlx.core as mx
    import mlx.nn as nn

    found: dict[int, tuple[str, str]] = {}
    for n in _MATH.split():
        if hasattr(math, n):
            found[id(getattr(math, n))] = ("expr", ALIASES.get(n, n))
    for n in _MATH_OWN:
        found[id(getattr(math, n))] = ("math", n)
    for n in _PYTHON:
        found[id(getattr(builtins, n))] = ("python", n)
    for f in FUNCTIONS.values():
        if hasattr(mx, f.mlx):
            found[id(getattr(mx, f.mlx))] = ("expr", f.name)
    for n, meaning in _MLX.items():
        found[id(getattr(mx, n))] = ("expr", meaning)
    for n in _NN.split():
        found[id(getattr(nn, n))] = ("expr", ALIASES.get(n, n))
    return found


def resolve(function: Any, name: str) -> Any:
    """What the free name `name` is for `function` now. Raises KeyError if it is nothing."""
    code = function.__code__
    if name in code.co_freevars:
        try:
            return function.__closure__[code.co_freevars.index(name)].cell_contents
        except ValueError:
            raise KeyError(name) from None
    if name in function.__globals__:
        return function.__globals__[name]
    return vars(builtins)[name]


def is_module(value: Any) -> bool:
    """Whether `value` is a module, whose attributes may be functions and constants."""
    return isinstance(value, ModuleType)
