"""Derivatives of expressions.

`derivative` works forward, for one name. `gradient` works backward, for any number of outputs and
inputs, on the graph of distinct nodes: its size is a small multiple of the outputs' size, and what
occurs more than once in it is named once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from .block import Block
from .functions import FUNCTIONS
from .nodes import ONE, ZERO, Expr, call, name, ordered, rebuild
from .parse import rule
from .simplify import simplified


class Gradient(NamedTuple):
    """The lets that the gradients share, and one gradient per input."""

    lets: Block
    gradients: tuple[Expr, ...]


@lru_cache(maxsize=4096)
def _partial(e: Expr, i: int) -> Expr:
    """The derivative of `e` in its argument i."""
    f = FUNCTIONS[e.head]
    values = dict(zip(f.parameters.split(), e.args, strict=True))
    return rebuild(
        rule(f.derivatives[i]), lambda x: values[x.text] if x.head == "name" else x, simplified
    )


def derivative(e: Expr, of: str) -> Expr:
    """The derivative of `e` in the name `of`. A condition has the derivative 0."""
    return differential(e, {of: ONE})


def differential(e: Expr, tangents: Mapping[str, Expr]) -> Expr:
    """The derivative of `e` along `tangents`; a name without one is constant."""
    found: dict[Expr, Expr] = {}
    for node in e.nodes():
        if node.head == "name":
            found[node] = tangents.get(node.text, ZERO)
        elif node.is_condition or not node.args:
            found[node] = ZERO
        elif node.head == "?:":
            c, x, y = node.args
            found[node] = simplified("?:", c, found[x], found[y])
        else:
            total = ZERO
            for i, a in enumerate(node.args):
                if found[a] != ZERO:
                    term = simplified("*", found[a], _partial(node, i))
                    total = simplified("+", total, term)
            found[node] = total
    return found[e]


def gradient(
    outputs: Sequence[Expr],
    inputs: Sequence[str],
    cotangents: Sequence[str],
    lets: Block | None = None,
) -> Gradient:
    """For every input, the sum over the outputs of cotangent times derivative.

    `cotangents` are names, one per output; `outputs` may name `lets`. A let of the result keeps the
    name that `lets` gives to the same expression; others are t0, t1, … past every name in use.
    """
    if len(outputs) != len(cotangents):
        raise ValueError(
            f"[expression] 'cotangents' must name {len(outputs)} outputs but has {len(cotangents)}."
        )
    block = lets or Block()
    roots = [block.inline(y) for y in outputs]
    totals = [ZERO] * len(inputs)
    for y, cotangent in zip(roots, cotangents, strict=True):
        adjoints = _adjoints(y, name(cotangent))
        parts = [adjoints.get(name(x), ZERO) for x in inputs]
        if len(outputs) > 1:
            parts = [_of_used(part, cotangent) for part in parts]
        totals = [simplified("+", a, b) for a, b in zip(totals, parts, strict=True)]
    taken = {*inputs, *cotangents, *(n for n, _ in block.lets)}
    taken.update(n for y in roots for n in y.names())
    names = {block.inline(e): n for n, e in reversed(block.lets)}
    return shared(totals, names, taken)


def _adjoints(root: Expr, cotangent: Expr) -> dict[Expr, Expr]:
    """For every node of `root`, cotangent times the derivative of `root` in it."""
    adjoints = {root: cotangent}

    def add(node: Expr, term: Expr) -> None:
        if term != ZERO:
            adjoints[node] = simplified("+", adjoints[node], term) if node in adjoints else term

    for node in reversed(ordered([root])):
        g = adjoints.get(node)
        if g is None or node.is_condition or not node.args:
            continue
        if node.head == "?:":
            c, x, y = node.args
            add(x, simplified("?:", c, g, ZERO))
            add(y, simplified("?:", c, ZERO, g))
        else:
            for i, a in enumerate(node.args):
                add(a, simplified("*", g, _partial(node, i)))
    return adjoints


def _of_used(part: Expr, cotangent: str) -> Expr:
    """An output's part of a gradient, 0 where that is no number and the cotangent is 0: so it is of
    an output that nobody uses, whose slope may be infinite."""
    if part.names() in ((), (cotangent,)):  # a constant slope
        return part
    unused = call("==", name(cotangent), ZERO)
    return simplified("?:", call("&&", unused, call("isnan", part)), ZERO, part)


def _fresh(taken: set[str]) -> Iterator[str]:
    """Names beside which a body may have what is `taken`: it calls parts of t0 t0_in, t0_next …"""
    stems = {n.partition("_")[0] for n in taken}
    return (f"t{i}" for i in count() if f"t{i}" not in stems)


def shared(roots: Sequence[Expr], names: Mapping[Expr, str], taken: set[str]) -> Gradient:
    """`roots` with every function that occurs more than once as a let, with its name in `names`
    or else a fresh one that is not in `taken`."""
    nodes = ordered(roots)
    uses = Counter(roots)
    for e in nodes:
        uses.update(e.args)
    fresh = _fresh(taken)
    lets: list[tuple[str, Expr]] = []
    made: dict[Expr, Expr] = {}
    for e in nodes:
        if not e.args:
            made[e] = e
            continue
        written = call(e.head, *(made[a] for a in e.args))
        trivial = e.head == "neg" and not e.args[0].args
        if uses[e] > 1 and not trivial:
            chosen = names.get(e) or next(fresh)
            lets.append((chosen, written))
            written = name(chosen, condition=e.is_condition)
        made[e] = written
    return Gradient(Block(tuple(lets)), tuple(made[e] for e in roots))
