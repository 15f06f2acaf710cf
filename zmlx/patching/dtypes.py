"""The dtypes that modules are compared in."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from .shadows import detached, parameters

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def own_dtype(module: nn.Module) -> mx.Dtype:
    """The dtype in which a module works: that of its first floating parameter."""
    dtypes = (value.dtype for value in parameters(module).values())
    return next((dtype for dtype in dtypes if dtype in FLOATS), mx.float32)


def as_it_may_be(module: nn.Module, dtype: mx.Dtype) -> Iterator[nn.Module]:
    """The module as it may be when it gets an array of a dtype: as it is, and where that is not its
    own dtype with parameters of it, as `set_dtype` makes them: a cast to the dtype that an array
    has leaves no trace."""
    yield module
    if dtype != own_dtype(module):
        twin = detached(module)
        twin.set_dtype(dtype)
        yield twin
