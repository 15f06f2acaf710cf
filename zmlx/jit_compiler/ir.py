"""The typed form between Python and Metal: values and statements.

A value is a float, an int or a bool. Floats and bools are read as expressions of `zmlx.expr`, in
which an integer part is an opaque name, because that language has derivatives and no integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..expr import Expr, call, literal, name
from ..expr.nodes import FALSE, TRUE

if TYPE_CHECKING:
    from .compiler import JitFunction

#: Types in order: an operation or a variable takes the largest of those that meet in it.
TYPES = ("bool", "int", "float")


def join(*types: str) -> str:
    """The smallest type that holds all of `types`."""
    return max(types, key=TYPES.index)


class Value(NamedTuple):
    """A typed value; `op` says how it comes about.

    const   `text` is the Python literal
    var     the variable `text`
    cast    `args[0]` converted to `type`
    call    the function `text` of `zmlx.expr` on floats, or on bools where it takes conditions
    int     the integer operation `text` on ints
    compare the comparison `text` of two ints
    choose  `args[0]` ? `args[1]` : `args[2]`, the last two of this type
    """

    op: str
    type: str
    args: tuple[Value, ...] = ()
    text: str = ""


def constant(value: bool | int | float) -> Value:
    """A literal of the type that Python gives it."""
    return Value("const", type(value).__name__, (), repr(value))


def number(value: Value) -> bool | int | float:
    """The Python number of a constant."""
    if value.type == "bool":
        return value.text == "True"
    return int(value.text) if value.type == "int" else float(value.text)


def convert(value: Value, to: str) -> Value:
    """`value` as a `to`, with literals converted at once."""
    if value.type == to:
        return value
    if value.op == "const":
        return constant({"float": float, "int": int, "bool": bool}[to](number(value)))
    return Value("cast", to, (value,))


def ordered(value: Value, inside: Callable[[Value], tuple[Value, ...]]) -> list[Value]:
    """`value` and what is `inside` it, parts first, each object once.

    It does not recurse, because a long sum is a deep tree.
    """
    found: dict[int, Value] = {}
    stack = [(value, False)]
    while stack:
        v, ready = stack.pop()
        if ready:
            found[id(v)] = v
        elif id(v) not in found:
            stack.append((v, True))
            stack.extend((a, False) for a in reversed(inside(v)))
    return list(found.values())


def integer_parts(value: Value) -> tuple[Value, ...]:
    """The ints that an operation on ints takes."""
    return {"int": value.args, "choose": value.args[1:]}.get(value.op, ())


# How an integer operation is written, and how tightly it binds; 9 for a call.
_INT = {
    "*": ("{} * {}", 7),
    "+": ("{} + {}", 6),
    "-": ("{} - {}", 6),
    "neg": ("-{}", 8),
    "~": ("~{}", 8),
    "<<": ("({} << {})", 9),
    ">>": ("({} >> {})", 9),
    "&": ("({} & {})", 9),
    "^": ("({} ^ {})", 9),
    "|": ("({} | {})", 9),
    "//": ("zmlx_int_divide({}, {})", 9),
    "%": ("zmlx_int_remainder({}, {})", 9),
    "**": ("zmlx_int_power({}, {})", 9),
    "abs": ("abs({})", 9),
    "max": ("max({}, {})", 9),
    "min": ("min({}, {})", 9),
}
_TIGHT = ("<<", ">>", "&", "^", "|")


def _int_text(value: Value) -> tuple[str, int]:
    """The Metal text of an int and its precedence."""
    done: dict[int, tuple[str, int]] = {}
    for v in ordered(value, integer_parts):
        done[id(v)] = _int_text_of(v, [done[id(a)] for a in integer_parts(v)])
    return done[id(value)]


def _int_text_of(value: Value, parts: list[tuple[str, int]]) -> tuple[str, int]:
    """The same from the texts of its `integer_parts`."""
    if value.op == "const":
        if value.text == "-2147483648":
            return "(-2147483647 - 1)", 9
        return value.text, 8 if value.text.startswith("-") else 9
    if value.op == "var":
        return value.text, 9
    if value.op == "cast":
        return f"int({metal(value.args[0])})", 9
    if value.op == "choose":
        (x, _), (y, _) = parts
        return f"({metal(value.args[0])} ? {x} : {y})", 9
    form, precedence = _INT[value.text]
    texts = []
    for i, (text, p) in enumerate(parts):
        at_least = 0 if precedence == 9 and value.text not in _TIGHT else 9
        if precedence < 9:
            at_least = precedence + i if precedence < 8 else 9
        texts.append(text if p >= at_least else f"({text})")
    return form.format(*texts), precedence


def metal(value: Value) -> str:
    """The Metal text of a value."""
    if value.type == "int":
        return _int_text(value)[0]
    if value.op == "compare":
        return _compare_text(value)
    return expression(value)[0].metal()


def _compare_text(value: Value) -> str:
    return f" {value.text} ".join(_int_text(a)[0] for a in value.args)


def expression(value: Value) -> tuple[Expr, dict[str, Value]]:
    """A float or bool as an expression, and what its names stand for."""
    leaves: dict[str, Value] = {}
    made: dict[int, Expr] = {}

    def leaf(text: str, v: Value) -> Expr:
        leaves[text] = v
        return name(text, condition=v.type == "bool")

    def of(v: Value, parts: list[Expr]) -> Expr:
        if v.op == "const":
            return _literal(v)
        if v.op == "var":
            return leaf(v.text, v)
        if v.op == "cast":
            inner = v.args[0]
            if inner.type == "int" and v.type == "float":
                return leaf(f"float({metal(inner)})", v)
            if inner.type == "int":
                zero = Value("compare", "bool", (inner, constant(0)), "!=")
                return leaf(f"({_compare_text(zero)})", v)
            # Between float and bool: `call` converts to what its place takes.
            if v.type == "bool":
                return call("!=", *parts, literal("0"))
            return call("?:", *parts, literal("1"), literal("0"))
        if v.op == "compare":
            return leaf(f"({_compare_text(v)})", v)
        return call("?:" if v.op == "choose" else v.text, *parts)

    for v in ordered(value, _expression_parts):
        made[id(v)] = of(v, [made[id(a)] for a in _expression_parts(v)])
    return made[id(value)], leaves


def _expression_parts(value: Value) -> tuple[Value, ...]:
    """The floats and bools that an operation on floats or bools takes; ints are opaque."""
    opaque = value.op == "compare" or (value.op == "cast" and value.args[0].type == "int")
    return () if opaque else value.args


def _literal(value: Value) -> Expr:
    if value.type == "bool":
        return TRUE if value.text == "True" else FALSE
    words = {"inf": "INFINITY", "nan": "NAN"}
    positive = literal(words.get(value.text.lstrip("-"), value.text.lstrip("-")))
    return call("neg", positive) if value.text.startswith("-") else positive


# Statements


@dataclass
class Assign:
    """`variable = value;`"""

    variable: str
    value: Value


@dataclass
class Call:
    """The outputs of another jitted function to variables, one each."""

    variables: tuple[str, ...]
    function: JitFunction
    arguments: tuple[Value, ...]


@dataclass
class If:
    """`if (test) { body } else { orelse }`"""

    test: Value
    body: list[Statement]
    orelse: list[Statement]


@dataclass
class For:
    """`variable` takes start, start + step, … before stop; the bounds are read once."""

    variable: str
    start: Value
    stop: Value
    step: Value
    body: list[Statement]


@dataclass
class While:
    """`while (test) { body }`, at most `bound` times if there is a bound."""

    test: Value
    body: list[Statement]
    bound: int | None


@dataclass
class Break:
    """Leaves the innermost loop."""


@dataclass
class Continue:
    """Starts the next round of the innermost loop."""


@dataclass
class Return:
    """Ends the function with its outputs."""

    values: tuple[Value, ...]


Statement = Assign | Call | If | For | While | Break | Continue | Return


@dataclass
class Program:
    """A function: inputs and outputs with their types, its variables' types, and statements."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    locals: dict[str, str] = field(default_factory=dict)
    body: list[Statement] = field(default_factory=list)


def walk(body: list[Statement]) -> Iterator[Statement]:
    """Every statement, outer before inner."""
    left = body[::-1]
    while left:
        s = left.pop()
        yield s
        if isinstance(s, If):
            left += s.orelse[::-1]
        if isinstance(s, (If, For, While)):
            left += s.body[::-1]
