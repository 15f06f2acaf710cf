"""Rowwise kernels from expressions: reductions over the last axis, and maps that use them.

    >>> l2 = zmlx.rowwise.reduce("sum", "x * x", finalize="sqrt(total)")
    >>> l2(mx.array([[3.0, 4.0]]))
    array([5], dtype=float32)
    >>> softmax = zmlx.rowwise.map_reduce(
    ...     {"m": ("max", "x"), "s": ("sum", "exp(x - m)")}, "exp(x - m) / s")

Any number of inputs, reductions and outputs, in one launch. The gradient is MLX's, of the same
expressions in plain MLX; a kernel with its own backward is a few lines in `zmlx.kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from . import expr, msl
from .codegen import REDUCTIONS, Let, Operand, Output, Pass, Reduce, Rowwise
from .pattern import PatternKernel

KINDS = ("row", "column", "per_row", "scalar")


def reduce(
    op: str,
    expression: str = "x",
    *,
    finalize: str = "total",
    inputs: Sequence[str] | Mapping[str, str] = ("x",),
    name: str = "reduce",
) -> PatternKernel:
    """A reduction over the last axis: (*, D) to (*).

    Args:
        op: "sum", "prod", "max" or "min".
        expression: what is reduced, in terms of the inputs.
        finalize: the result in terms of `total` (the reduction) and `D` (the row length).
        inputs: names, all of shape (*, D), or names to kinds; see `map_reduce`.
        name: prefix of the kernel's name.
    """
    return map_reduce({"total": (op, expression)}, finalize, inputs=inputs, name=name)


def map_reduce(
    reductions: Mapping[str, tuple[str, str]],
    outputs: str | Mapping[str, str],
    *,
    inputs: Sequence[str] | Mapping[str, str] = ("x",),
    lets: str = "",
    keep: Sequence[str] = (),
    name: str = "map_reduce",
) -> PatternKernel:
    """Reductions over the last axis, then outputs in terms of the elements and the reductions.

    Args:
        reductions: a name to (op, expression); an expression may name the reductions before it,
            which costs another walk over the row.
        outputs: an expression, or names to expressions. One that names an element has the shape
            (*, D), one that names only reductions the shape (*).
        inputs: names, all of shape (*, D), or names to kinds: "row" (*, D), "column" (D,),
            "per_row" (*), "scalar" (). The kernel takes arrays in this order.
        lets: shared parts, as `t = x * w; rstd = rsqrt(total / D)`.
        keep: inputs or lets to hold in registers between walks (rows of up to 32768 elements).
        name: prefix of the kernel's name.
    """
    kinds = dict(inputs) if isinstance(inputs, Mapping) else dict.fromkeys(inputs, "row")
    for n, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(
                f"[{name}] 'inputs' must have kinds {', '.join(KINDS)} but got {n}={kind!r}."
            )
    if "row" not in kinds.values():
        raise ValueError(f"[{name}] 'inputs' must have an input of kind row but got {kinds}.")
    for n, (op, _) in reductions.items():
        if op not in REDUCTIONS:
            raise ValueError(
                f"[{name}] 'reductions' must use {', '.join(REDUCTIONS)} but got {n}={op!r}."
            )
    named = {"y": outputs} if isinstance(outputs, str) else dict(outputs)
    block = _parse_lets(lets, {*kinds, *reductions, "D", "j"})
    known = {*kinds, *reductions, *block, "D", "j"}
    reduced = {n: expr.parse(text, tuple(known)) for n, (_, text) in reductions.items()}
    results = {n: expr.parse(text, tuple(known)) for n, text in named.items()}
    for n in keep:
        if n not in block and kinds.get(n) not in ("row", "column"):
            raise ValueError(f"[{name}] 'keep' must name elements but got {n!r}.")

    of_element = {n for n, kind in kinds.items() if kind in ("row", "column")} | {"j"}
    for n, e in block.items():
        if of_element & set(e.names()):
            of_element.add(n)
    passes = _passes(reductions, reduced, block, of_element)
    element_lets = tuple(_let(n, e) for n, e in block.items() if n in of_element)
    every = [*reduced.values(), *results.values(), *block.values()]
    return PatternKernel(
        name,
        Rowwise(
            tuple(Operand(n, kind) for n, kind in kinds.items()),
            tuple(
                Output(n, e.metal(), "row" if of_element & set(e.names()) else "per_row")
                for n, e in results.items()
            ),
            passes,
            element_lets,
            tuple(keep),
        ),
        tuple(
            mx.bool_ if e.is_condition else tuple(n for n, k in kinds.items() if k != "scalar")
            for e in results.values()
        ),
        header=msl.header_for("\n".join(e.metal() for e in every)),
    )


def _parse_lets(text: str, known: set[str]) -> dict[str, expr.Expr]:
    return dict(expr.parse_block(text, tuple(known)).lets) if text else {}


def _let(name: str, e: expr.Expr) -> Let:
    return Let(name, e.metal(), "bool" if e.is_condition else "float")


def _passes(
    reductions: Mapping[str, tuple[str, str]],
    reduced: Mapping[str, expr.Expr],
    lets: Mapping[str, expr.Expr],
    of_element: set[str],
) -> tuple[Pass, ...]:
    """Reductions that do not need one another share a walk; lets of the whole row follow the walk
    after which they can be computed."""
    level: dict[str, int] = {}

    def depth(e: expr.Expr) -> int:
        """The number of walks that come before `e` can be computed."""
        found = 0
        for n in e.names():
            if n in level:
                found = max(found, level[n])
            elif n in lets:
                found = max(found, depth(lets[n]))
        return found

    for n, e in reduced.items():
        level[n] = depth(e) + 1
    count = max(level.values(), default=0)
    rows = [(n, e) for n, e in lets.items() if n not in of_element]
    return tuple(
        Pass(
            tuple(
                Reduce(n, reductions[n][0], e.metal()) for n, e in reduced.items() if level[n] == i
            ),
            tuple(_let(n, e) for n, e in rows if max(depth(e), 1) == i),
        )
        for i in range(1, count + 1)
    )
