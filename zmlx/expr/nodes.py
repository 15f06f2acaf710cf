"""Expressions as immutable nodes, and their Metal text.

Equal nodes are one object, so that a shared subexpression is found by identity and every walk is
linear in the number of distinct nodes. No walk recurses, because a long sum is a deep tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .functions import FUNCTIONS

if TYPE_CHECKING:
    import mlx.core as mx


class Expr:
    """An expression: a name, a literal, or a function of `FUNCTIONS` applied to expressions.

    `head` is "name", "condition" (a name that is true or false), "literal" or the function's name;
    `text` is the name, or the literal without its suffix. Every expression is a float or a
    condition. The parser takes all names for floats.
    """

    __slots__ = ("__weakref__", "_hash", "args", "head", "text")
    head: str
    args: tuple[Expr, ...]
    text: str
    _hash: int

    def __new__(cls, head: str, args: tuple[Expr, ...] = (), text: str = "") -> Expr:
        """The one node of these parts."""
        key = (head, args, text)
        node = _NODES.get(key)
        if node is None:
            node = object.__new__(cls)
            object.__setattr__(node, "head", head)
            object.__setattr__(node, "args", args)
            object.__setattr__(node, "text", text)
            object.__setattr__(node, "_hash", hash(key))
            node = _NODES.setdefault(key, node)
        return node

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError("an Expr is immutable")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Two threads may build equal nodes at once; that is the only way to the second line.
        return self is other or (
            isinstance(other, Expr)
            and self._hash == other._hash
            and (self.head, self.args, self.text) == (other.head, other.args, other.text)
        )

    def __reduce__(self) -> tuple[Callable[..., Expr], tuple[_Flat]]:
        # Not the text, in which a name that hides a constant would be that constant.
        nodes = self.nodes()
        place = {e: i for i, e in enumerate(nodes)}
        return _unflatten, ([(e.head, tuple(place[a] for a in e.args), e.text) for e in nodes],)

    def __repr__(self) -> str:
        return f"parse({self.metal()!r})"

    @property
    def is_condition(self) -> bool:
        """Whether the value is true or false rather than a number."""
        if self.head in FUNCTIONS:
            return FUNCTIONS[self.head].condition
        return self.head == "condition" or self.text in ("true", "false")

    def nodes(self) -> list[Expr]:
        """The distinct nodes, arguments before the functions that take them."""
        return ordered([self])

    def names(self) -> tuple[str, ...]:
        """The free names, in the order of the arguments that have them."""
        return tuple(e.text for e in self.nodes() if e.head in ("name", "condition"))

    def functions(self) -> tuple[str, ...]:
        """The functions that are called, operators left out, sorted."""
        called = {e.head for e in self.nodes()} & FUNCTIONS.keys()
        return tuple(sorted(f for f in called if FUNCTIONS[f].precedence == 0))

    def metal(self) -> str:
        """The Metal text, with the parentheses that it needs and no others."""
        return metal(self)

    def evaluate(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """The value in plain MLX ops, in the dtype of the arrays; see `zmlx.expr.evaluate`."""
        from .evaluate import evaluate

        return evaluate(self, arrays)

    def derivative(self, name: str) -> Expr:
        """The derivative in `name`, with MLX's conventions at ties; see `zmlx.expr.derive`."""
        from .derive import derivative

        return derivative(self, name)

    def substitute(self, values: Mapping[str, Expr]) -> Expr:
        """The expression with names replaced by expressions."""
        return rebuild(self, lambda e: e if e.head == "literal" else values.get(e.text, e), call)

    def rename(self, names: Mapping[str, str]) -> Expr:
        """The expression with other names, of floats and of conditions as before."""

        def leaf(e: Expr) -> Expr:
            return e if e.head == "literal" else Expr(e.head, (), names.get(e.text, e.text))

        return rebuild(self, leaf, call) if names else self


_NODES: WeakValueDictionary[Any, Expr] = WeakValueDictionary()

#: The distinct nodes of an expression, arguments first: head, places of the arguments, text.
_Flat = list[tuple[str, tuple[int, ...], str]]


def _unflatten(flat: _Flat) -> Expr:
    nodes: list[Expr] = []
    for head, args, text in flat:
        nodes.append(Expr(head, tuple(nodes[i] for i in args), text))
    return nodes[-1]


_HEXADECIMAL = re.compile(r"0[xX]")
_WORDS = ("INFINITY", "NAN", "true", "false")


def name(text: str, *, condition: bool = False) -> Expr:
    """A free name, of a float or of a condition."""
    return Expr("condition" if condition else "name", (), text)


def literal(text: str) -> Expr:
    """A number without suffix, or INFINITY, NAN, true, false.

    It is kept as written, but a number without point or exponent gets a point, so that `2` is the
    float 2.0 and no arithmetic is integer.
    """
    if _HEXADECIMAL.match(text):
        text = text if "p" in text.lower() else f"{int(text, 16)}.0"
    elif text.isdigit():
        text = f"{text}.0"
    return Expr("literal", (), text)


TRUE, FALSE = literal("true"), literal("false")
ZERO, ONE = literal("0"), literal("1")


def number(e: Expr) -> Expr:
    """`e` as a number: a condition becomes 1 or 0."""
    return Expr("?:", (e, ONE, ZERO)) if e.is_condition else e


def condition(e: Expr) -> Expr:
    """`e` as a condition: a number becomes whether it differs from 0."""
    return e if e.is_condition else Expr("!=", (e, ZERO))


def call(head: str, *args: Expr) -> Expr:
    """`head` of `FUNCTIONS` applied to `args`, with conditions and numbers where they belong.

    Squares and cubes are products instead of powers: faster, and right to an ulp on every target.
    """
    if head == "?:":
        c, x, y = args
        if not (x.is_condition and y.is_condition):
            return Expr(head, (condition(c), number(x), number(y)))
        # A choice between conditions is a condition, which no reader expects of `c ? a : b`.
        either = Expr("&&", (condition(c), x)), Expr("&&", (Expr("!", (condition(c),)), y))
        return Expr("||", either)
    if head == "pow" and exact_value(args[1]) in (2, 3):
        head, args = ("square" if exact_value(args[1]) == 2 else "cube"), args[:1]
    convert = condition if FUNCTIONS[head].logical else number
    return Expr(head, tuple(convert(a) for a in args))


def ordered(roots: Iterable[Expr]) -> list[Expr]:
    """The distinct nodes below `roots`, arguments first, left to right."""
    found: dict[Expr, None] = {}
    for root in roots:
        stack = [(root, False)]
        while stack:
            e, ready = stack.pop()
            if ready:
                found[e] = None
            elif e not in found:
                stack.append((e, True))
                stack.extend((a, False) for a in reversed(e.args))
    return list(found)


def rebuild(root: Expr, leaf: Callable[[Expr], Expr], build: Callable[..., Expr]) -> Expr:
    """`root` with `leaf` applied to names and literals and every function built by `build`."""
    made: dict[Expr, Expr] = {}
    for e in ordered([root]):
        made[e] = build(e.head, *(made[a] for a in e.args)) if e.args else leaf(e)
    return made[root]


def literal_value(e: Expr) -> float:
    """The value of a number literal, in double precision."""
    if e.text in ("INFINITY", "NAN"):
        return math.inf if e.text == "INFINITY" else math.nan
    return float.fromhex(e.text) if _HEXADECIMAL.match(e.text) else float(e.text)


def exact_value(e: Expr) -> Fraction | None:
    """The value of a finite number literal; None for anything else."""
    if e.head != "literal" or e.text in _WORDS:
        return None
    if not _HEXADECIMAL.match(e.text):
        return Fraction(e.text)
    digits, _, exponent = e.text[2:].lower().partition("p")
    whole, _, part = digits.partition(".")
    return int(whole + part, 16) * Fraction(2) ** (int(exponent) - 4 * len(part))


def metal(root: Expr) -> str:
    """The Metal text of `root`."""
    done: dict[Expr, tuple[str, int]] = {}
    for e in ordered([root]):
        if not e.args:
            done[e] = e.text + "f" * (e.head == "literal" and e.text not in _WORDS), 9
            continue
        f = FUNCTIONS[e.head]

        def operand(i: int, at_least: int, e: Expr = e) -> str:
            text, precedence = done[e.args[i]]
            return text if precedence >= at_least else f"({text})"

        p = f.precedence
        if p == 0:
            text = f"{f.metal}({', '.join(done[a][0] for a in e.args)})"
        elif e.head == "?:":
            text = f"{operand(0, 2)} ? {operand(1, 2)} : {operand(2, 1)}"
        elif len(e.args) == 1:
            text = f.metal + operand(0, 9)
        elif f.condition and not f.logical:
            text = f"{operand(0, 6)} {f.metal} {operand(1, 6)}"
        else:
            text = f"{operand(0, p)} {f.metal} {operand(1, p + 1)}"
        done[e] = text, p or 9
    return done[root][0]
