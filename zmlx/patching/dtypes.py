"""The dtypes that modules are compared in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from .shadows import detached

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def own_dtype(module: nn.Module) -> mx.Dtype:
    """The dtype in which a module works: that of its first floating parameter."""
    found: list[mx.Dtype] = []

    def look(value: Any) -> Any:
        if isinstance(value, mx.array) and value.dtype in FLOATS:
            found.append(value.dtype)
        return value

    tree_map(look, dict(module.parameters()))
    return found[0] if found else mx.float32


def as_it_may_be(module: nn.Module, dtype: mx.Dtype) -> Iterator[nn.Module]:
    """The module as it may be when it gets an array of a dtype: as it is, and where that is not its
    own dtype with parameters of it, as `set_dtype` makes them: a cast to the dtype that an array
    has leaves no trace."""
    yield module
    if dtype != own_dtype(module):
        twin = detached(module)
        twin.set_dtype(dtype)
        yield twin
