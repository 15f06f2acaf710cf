"""Elementwise kernels from an expression: differentiable, broadcasting, one launch.

>>> import zmlx, mlx.core as mx
>>> swish = zmlx.expression("x * sigmoid(beta * x)", inputs=("x", "beta"))
>>> swish(mx.array([1.0, 2.0]), 1.5)
array([0.817574, 1.90515], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import expr
from .arguments import check_text
from .autograd import ExpressionFunction, binary_from_expr, nary_from_expr
from .broadcasting import unused_name
from .requests import names_in_order

__all__ = ["binary", "expression", "map", "unary"]


def unary(text: str, *, name: str = "unary") -> ExpressionFunction:
    """A function of one array from an expression in `x`."""
    check_text(name, "text", text)
    return nary_from_expr(text, ("x",), name=name)


def binary(
    text: str, *, inputs: tuple[str, str] = ("x", "y"), name: str = "binary"
) -> ExpressionFunction:
    """A function of two arrays that broadcast, from an expression in `inputs`."""
    check_text(name, "text", text)
    names_in_order(name, "inputs", inputs)
    return binary_from_expr(text, inputs=inputs, name=name)


def map(
    outputs: str | Mapping[str, str],
    inputs: Sequence[str],
    *,
    lets: str = "",
    name: str = "map",
) -> ExpressionFunction:
    """A function of several arrays that broadcast, with one or several outputs.

    Args:
        outputs: an expression, or names to expressions.
        inputs: the names of the arguments, in order.
        lets: shared parts, as `t = x * x; u = exp(t)`.
        name: prefix of the kernel's name.
    """
    names = names_in_order(name, "inputs", inputs)
    return nary_from_expr(outputs, names, lets=lets, name=name)


def expression(
    text: str, *, inputs: Sequence[str] | None = None, name: str = "expression"
) -> ExpressionFunction:
    """A differentiable function from one expression.

    Args:
        text: an expression in the language of `zmlx.expr`, such as `x * tanh(log1p(exp(x)))`.
        inputs: the order of the arguments; default: the names in order of appearance.
        name: prefix of the kernel's name.
    """
    check_text(name, "text", text)
    if inputs is not None:
        names = names_in_order(name, "inputs", inputs)
    elif not (names := expr.names_in(text)):
        raise ValueError(f"[{name}] 'text' must name at least one input but got {text!r}.")
    return nary_from_expr({unused_name("out", names): text}, names, name=name)
