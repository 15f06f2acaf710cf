"""The value of an expression in plain MLX ops.

This is what an expression means: the reference of its kernel, and the fallback under vmap, jvp and
second order. Arithmetic is in the dtype of the floating arrays (float32 without any), into which
literals are cast; in a kernel it is in float. Bool arrays are 0 and 1. Integer arrays promote as in
MLX, which agrees with Metal except in division: that raises, because Metal's would truncate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .functions import FUNCTIONS
from .nodes import Expr, literal_value
from .parse import rule

if TYPE_CHECKING:
    import mlx.core as mx


def _hypot(x: mx.array, y: mx.array) -> mx.array:
    """`hypot`, without overflow on the way. MLX takes no derivative of the scale, which would
    overflow, and which the value does not depend on."""
    import mlx.core as mx

    larger = mx.stop_gradient(mx.maximum(mx.abs(x), mx.abs(y)))
    value = larger * mx.sqrt(mx.square(x / larger) + mx.square(y / larger))
    infinite = mx.logical_or(mx.isinf(x), mx.isinf(y))
    return mx.where(infinite, math.inf, mx.where(larger == 0, 0.0, value)).astype(value.dtype)


#: Functions of the table that are neither MLX's nor written in the language.
_OWN = {"hypot": _hypot}


def evaluate(e: Expr, arrays: Mapping[str, mx.array]) -> mx.array:
    """The value of `e`, every name of which `arrays` must hold; shapes broadcast."""
    import mlx.core as mx

    named: dict[str, mx.array] = {}
    for n in e.names():
        try:
            named[n] = mx.array(arrays[n])
        except KeyError:
            raise ValueError(f"[expression] 'arrays' must hold {n!r} but does not.") from None
        if named[n].dtype == mx.complex64:
            raise ValueError(f"[expression] {n!r} must be real but got complex64.")
    floats = [x for x in named.values() if mx.issubdtype(x.dtype, mx.floating)]
    dtype = mx.result_type(*floats) if floats else mx.float32

    done: dict[Expr, mx.array] = {}
    for node in e.nodes():
        if node.head == "condition":
            done[node] = named[node.text]
        elif node.head == "name":
            x = named[node.text]
            done[node] = x.astype(dtype) if x.dtype == mx.bool_ else x
        elif node.text in ("true", "false"):
            done[node] = mx.array(node.text == "true")
        elif node.head == "literal":
            done[node] = mx.array(literal_value(node), dtype=dtype)
        else:
            args = [done[a] for a in node.args]
            if node.head in ("/", "%") and all(mx.issubdtype(a.dtype, mx.integer) for a in args):
                raise ValueError(
                    f"[expression] {node.head!r} must have a floating operand, but in"
                    f" {node.metal()!r} both are integers, which Metal divides with truncation."
                )
            f = FUNCTIONS[node.head]
            if hasattr(mx, f.mlx):
                done[node] = getattr(mx, f.mlx)(*args)
            elif f.mlx in _OWN:
                done[node] = _OWN[f.mlx](*args)
            else:
                values = zip(f.parameters.split(), args, strict=True)
                done[node] = evaluate(rule(f.mlx), dict(values))
    return done[e]
