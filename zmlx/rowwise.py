"""Rowwise kernels from expressions: reductions over the last axis, and maps that use them.

    >>> l2 = zmlx.rowwise.reduce("sum", "x * x", finalize="sqrt(total)")
    >>> l2(mx.array([[3.0, 4.0]]))
    array([5], dtype=float32)
    >>> softmax = zmlx.rowwise.map_reduce(
    ...     {"m": ("max", "x"), "s": ("sum", "exp(x - m)")}, "exp(x - m) / s")

Inputs, reductions and outputs in one launch, as many as Metal's 31 buffers hold. Inputs are
float32, float16, bfloat16 or bool; arithmetic is in float32, that of the row length and of indices
too; a number has the promoted dtype of the inputs, scalars aside (float32 where all are bool), a
condition is bool. The gradient is MLX's, of the same expressions in plain MLX; a kernel with its
own backward is a few lines in `zmlx.kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from . import expr, msl
from .arguments import (
    BOOLEAN,
    FLOATING,
    Argument,
    check_identifier,
    check_names,
    check_text,
    is_pair_of_texts,
)
from .autograd import named_outputs
from .codegen import Let, Operand, Output, Pass, Reduce, Rowwise, free_names
from .pattern import Number, PatternKernel
from .requests import names_in_order

_SHAPES = {"row": "(*, D)", "column": "(D,)", "per_row": "(*)", "scalar": "()"}
KINDS = tuple(_SHAPES)

#: What an expression may name besides: the row length, and the index in the row. A kernel's body
#: has them as unsigned integers, which neither go below zero nor divide as numbers do, so that
#: expressions get a float of each under another name.
_OWN = ("D", "j")

#: The ops, and what `codegen` calls them: extremes are NaN where an element is, as in MLX.
_OPS = {"sum": "sum", "prod": "prod", "max": "maximum", "min": "minimum"}


class RowwiseFunction(PatternKernel):
    """A kernel that a pickle makes anew from the arguments of `map_reduce`."""

    definition: Mapping[str, Any]

    def __reduce__(self) -> Any:
        return _of_definition, (self.definition,)


def _of_definition(definition: Mapping[str, Any]) -> RowwiseFunction:
    return map_reduce(**definition)


def reduce(
    op: str,
    expression: str = "x",
    *,
    finalize: str = "total",
    inputs: Sequence[str] | Mapping[str, str] = ("x",),
    name: str = "reduce",
) -> RowwiseFunction:
    """A reduction over the last axis: (*, D) to (*).

    Args:
        op: "sum", "prod", "max" or "min"; of a row with NaN all are NaN, of an empty one 0, 1, -inf
            and inf.
        expression: what is reduced, in terms of the inputs.
        finalize: the result in terms of `total` (the reduction) and `D` (the row length).
        inputs: names, all of shape (*, D), or names to kinds; see `map_reduce`.
        name: prefix of the kernel's name.
    """
    if not isinstance(op, str) or op not in _OPS:
        raise ValueError(f"[{name}] 'op' must be one of {', '.join(_OPS)} but got {op!r}.")
    check_text(name, "expression", expression)
    check_text(name, "finalize", finalize)
    return map_reduce({"total": (op, expression)}, finalize, inputs=inputs, name=name)


def map_reduce(
    reductions: Mapping[str, tuple[str, str]],
    outputs: str | Mapping[str, str],
    *,
    inputs: Sequence[str] | Mapping[str, str] = ("x",),
    lets: str = "",
    keep: Sequence[str] = (),
    name: str = "map_reduce",
) -> RowwiseFunction:
    """Reductions over the last axis, then outputs in terms of the elements and the reductions.

    Args:
        reductions: a name to (op, expression); an expression may name the reductions before it,
            which costs another walk over the row. Expressions may also name D, the row length, and
            j, the index in the row, both of them floats.
        outputs: an expression, or names to expressions. One that names an element has the shape
            (*, D), one that names only reductions the shape (*).
        inputs: names, all of shape (*, D), or names to kinds: "row" (*, D), "column" (D,),
            "per_row" (*), "scalar" (). The kernel takes arrays in this order.
        lets: shared parts, as `t = x * w; rstd = rsqrt(total / D)`.
        keep: inputs or lets to hold in registers between walks; those of rows of more than 32768
            elements are computed again.
        name: prefix of the kernel's name.
    """
    check_identifier("rowwise", "name", name)
    if isinstance(inputs, Mapping):
        check_names(name, "inputs", inputs)
        kinds = dict(inputs)
    else:
        kinds = dict.fromkeys(names_in_order(name, "inputs", inputs), "row")
    for n, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(
                f"[{name}] 'inputs' must have kinds {', '.join(KINDS)} but got {n}={kind!r}."
            )
    if "row" not in kinds.values():
        raise ValueError(f"[{name}] 'inputs' must have an input of kind row but got {kinds}.")
    _check_reductions(name, reductions, kinds)
    named = named_outputs(name, outputs, ())
    check_text(name, "lets", lets)
    keep = check_names(name, "keep", keep)
    definition = {
        "reductions": dict(reductions),
        "outputs": outputs if isinstance(outputs, str) else named,
        "inputs": dict(kinds),
        "lets": lets,
        "keep": keep,
        "name": name,
    }
    block = _parse_lets(lets, (*kinds, *reductions, *_OWN))
    known = (*kinds, *reductions, *block, *_OWN)
    typed = expr.Block(tuple(block.items())).typed
    block = {n: typed(e) for n, e in block.items()}
    reduced = {n: typed(expr.parse(text, known)) for n, (_, text) in reductions.items()}
    results = {n: typed(expr.parse(text, known)) for n, text in named.items()}
    _check_order(name, reduced, block)
    for n in keep:
        if n not in block and kinds.get(n) not in ("row", "column"):
            raise ValueError(f"[{name}] 'keep' must name elements but got {n!r}.")

    written = free_names(dict.fromkeys([*kinds, *reductions, *block, *named, *_OWN]))
    renamed = {n: w for n, w in written.items() if n != w}

    def body(e: expr.Expr) -> expr.Expr:
        return e.rename(renamed)

    arguments = {
        written[n]: Argument(n, _SHAPES[kind], FLOATING + BOOLEAN) for n, kind in kinds.items()
    }
    kinds = {written[n]: kind for n, kind in kinds.items()}
    ops = {written[n]: op for n, (op, _) in reductions.items()}
    reduced = {written[n]: body(e) for n, e in reduced.items()}
    block = {written[n]: body(e) for n, e in block.items()}
    results = {written[n]: body(e) for n, e in results.items()}

    length, index = written["D"], written["j"]
    of_element = {n for n, kind in kinds.items() if kind in ("row", "column")} | {index}
    for n, e in block.items():
        if of_element & set(e.names()):
            of_element.add(n)
    for n in keep:
        if written[n] not in of_element:
            raise ValueError(
                f"[{name}] 'keep' must name elements but got {n!r}, which is one number per row."
            )
    before, passes = _passes(ops, reduced, block, of_element)
    element_lets = tuple(_let(n, e) for n, e in block.items() if n in of_element)
    every = [*reduced.values(), *results.values(), *block.values()]
    used = {n for e in every for n in e.names()}
    if length in used:
        before = (Let(length, "D"), *before)
    if index in used:
        element_lets = (Let(index, "j"), *element_lets)
    called = [e.metal() for e in every] + [f"zmlx_{_OPS[op]}" for op in ops.values()]
    pattern = Rowwise(
        tuple(Operand(n, kind) for n, kind in kinds.items()),
        tuple(
            Output(n, e.metal(), "row" if of_element & set(e.names()) else "per_row")
            for n, e in results.items()
        ),
        passes,
        element_lets,
        tuple(written[n] for n in keep),
        before,
    )
    make = partial(
        RowwiseFunction,
        dtypes=tuple(
            mx.bool_ if e.is_condition else Number(n for n, k in kinds.items() if k != "scalar")
            for e in results.values()
        ),
        arguments=arguments,
        header=msl.header_for("\n".join(called)),
    )
    long = make(f"{name}/long", replace(pattern, keep=())) if keep else None
    function = make(name, pattern, long=long)
    function.definition = definition
    return function


def _parse_lets(text: str, known: tuple[str, ...]) -> dict[str, expr.Expr]:
    return dict(expr.parse_block(text, known).lets) if text else {}


def _check_reductions(
    op: str, reductions: Mapping[str, tuple[str, str]], kinds: Mapping[str, str]
) -> None:
    """Raises unless `reductions` are new names to pairs of a known op and an expression."""
    if not isinstance(reductions, Mapping):
        raise TypeError(
            f"[{op}] 'reductions' must be names to (op, expression) but got {reductions!r}."
        )
    for n in check_names(op, "reductions", reductions):
        if n in kinds or n in _OWN:
            raise ValueError(f"[{op}] 'reductions' must have names of their own but got {n!r}.")
        pair = reductions[n]
        if not is_pair_of_texts(pair):
            raise ValueError(
                f"[{op}] 'reductions' must be pairs of op and expression but got {n}={pair!r}."
            )
        if pair[0] not in _OPS:
            raise ValueError(
                f"[{op}] 'reductions' must use {', '.join(_OPS)} but got {n}={pair[0]!r}."
            )
    for n in kinds:
        if n in _OWN:
            raise ValueError(
                f"[{op}] 'inputs' must not be D (the row length) or j (the index in the row) but "
                f"got {n!r}."
            )


def _check_order(op: str, reduced: Mapping[str, expr.Expr], lets: Mapping[str, expr.Expr]) -> None:
    """Raises if a reduction needs itself or one behind it, directly or through a let."""
    order = list(reduced)
    for i, (n, e) in enumerate(reduced.items()):
        reached = _reached(e, lets)
        for needed in order[i:]:
            if needed in reached:
                raise ValueError(
                    f"[{op}] 'reductions' must need only those before them but got {n!r}, which "
                    f"needs {needed!r}."
                )


def _let(name: str, e: expr.Expr) -> Let:
    return Let(name, e.metal(), "bool" if e.is_condition else "float")


def _passes(
    ops: Mapping[str, str],
    reduced: Mapping[str, expr.Expr],
    lets: Mapping[str, expr.Expr],
    of_element: set[str],
) -> tuple[tuple[Let, ...], tuple[Pass, ...]]:
    """The lets of the whole row that come before any walk, and the walks. Reductions that do not
    need one another share one; other lets of the whole row follow the one after which they can be
    computed."""
    level: dict[str, int] = {}

    def depth(e: expr.Expr) -> int:
        """The number of walks that come before `e` can be computed."""
        return max((level[n] for n in _reached(e, lets) if n in level), default=0)

    for n, e in reduced.items():
        level[n] = depth(e) + 1
    after = {n: depth(e) for n, e in lets.items() if n not in of_element}

    def lets_after(walk: int) -> tuple[Let, ...]:
        return tuple(_let(n, lets[n]) for n, i in after.items() if i == walk)

    return lets_after(0), tuple(
        Pass(
            tuple(Reduce(n, _OPS[ops[n]], e.metal()) for n, e in reduced.items() if level[n] == i),
            lets_after(i),
        )
        for i in range(1, max(level.values(), default=0) + 1)
    )


def _reached(e: expr.Expr, lets: Mapping[str, expr.Expr]) -> set[str]:
    """The names that `e` needs, directly or through lets."""
    work, found = list(e.names()), set[str]()
    while work:
        n = work.pop()
        if n not in found:
            found.add(n)
            work.extend(lets[n].names() if n in lets else ())
    return found
