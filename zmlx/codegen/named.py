"""The five patterns that most kernels are, as one-line forms of the general ones."""

from __future__ import annotations

from .elementwise import Elementwise
from .parts import Operand, Output, Pass, Reduce
from .rowwise import Rowwise


def elementwise_unary(expr: str) -> Elementwise:
    """y = expr(x)."""
    return Elementwise((Operand("x", "full"),), (Output("y", expr, "full"),))


def elementwise_binary(expr: str) -> Elementwise:
    """y = expr(a, b)."""
    return Elementwise((Operand("a", "full"), Operand("b", "full")), (Output("y", expr, "full"),))


def rowwise_reduction(op: str, expr: str = "x", finalize: str = "total") -> Rowwise:
    """A value per row: y = finalize(total, D), total the reduction `op` of expr(x)."""
    return Rowwise(
        (Operand("x"),),
        (Output("y", finalize, "per_row"),),
        (Pass((Reduce("total", op, expr),)),),
    )


def rowwise_parallel_reduction(reductions: tuple[Reduce, ...], finalize: str) -> Rowwise:
    """A value per row from several reductions of one walk: y = finalize(their names, D)."""
    return Rowwise((Operand("x"),), (Output("y", finalize, "per_row"),), (Pass(reductions),))


def rowwise_map_reduce(first: Reduce, second: Reduce, write: str) -> Rowwise:
    """Two walks that reduce, the second in terms of the first, and one that writes y = write(x,
    both names)."""
    return Rowwise((Operand("x"),), (Output("y", write),), (Pass((first,)), Pass((second,))))
