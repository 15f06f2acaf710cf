"""Terms of a derivative, built in their simplest form.

Only what a derivative adds goes through here, never what the user wrote. Constants are folded only
where float arithmetic is exact. Products with the constant 0 vanish, and a factor of an arm
of a conditional whose other arm is 0 goes into that arm: `(c ? g : 0) * p` becomes `c ? g * p : 0`,
so that an infinite `p` where `c` does not hold makes no NaN. For the same reason the slope of a
softplus or a sigmoid that is written with `exp`, `a / (1 + exp(x)) * exp(x)`, becomes
`a * sigmoid(x)`.

Conditionals may lie in one another as deep as an expression is long, so no rule calls `simplified`:
it yields the head and the arguments of a term, and is sent the term in its simplest form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from fractions import Fraction
from itertools import product
from typing import Any

from .nodes import FALSE, ONE, TRUE, ZERO, Expr, call, exact_value, literal

_Term = tuple[Any, ...]
_Rule = Generator[_Term, Expr, Expr | None]

_FOLD: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_COMPARE: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _value(e: Expr) -> Fraction | None:
    """The value of a literal, negated or not, that float holds exactly."""
    sign = 1
    while e.head == "neg":
        sign, e = -sign, e.args[0]
    value = exact_value(e)
    return sign * value if value is not None and _exact(value) else None


def _exact(value: Fraction) -> bool:
    # 24 bits of significand, far from the ends of the exponent's range.
    bits = value.denominator
    return abs(value.numerator) < 2**24 and bits & (bits - 1) == 0 and bits < 2**100


def _literal(value: Fraction) -> Expr:
    text = str(value.numerator) if value.denominator == 1 else repr(float(abs(value)))
    positive = literal(text.lstrip("-"))
    return call("neg", positive) if value < 0 else positive


def _guarded(e: Expr) -> bool:
    return e.head == "?:" and ZERO in e.args[1:]


def _into(e: Expr, term: Callable[[Expr], _Term]) -> _Rule:
    c, x, y = e.args
    x = x if x == ZERO else (yield term(x))
    y = y if y == ZERO else (yield term(y))
    return (yield "?:", c, x, y)


def simplified(head: str, *args: Expr) -> Expr:
    """`call(head, *args)` or something simpler of the same value; see the module."""
    waiting = [_simplify(head, *args)]
    found: Any = None
    while waiting:
        try:
            term = waiting[-1].send(found)
        except StopIteration as end:
            waiting.pop()
            found = end.value
        else:
            waiting.append(_simplify(*term))
            found = None
    return found  # type: ignore[no-any-return]


def _simplify(head: str, *args: Expr) -> _Rule:
    simpler = _folded(head, args)
    if simpler is None and head in _RULES:
        simpler = yield from _RULES[head](*args)
    elif simpler is None and head in _CHOICES:
        simpler = _CHOICES[head](*args)
    return simpler or call(head, *args)


def _folded(head: str, args: tuple[Expr, ...]) -> Expr | None:
    values = [_value(a) for a in args]
    if len(args) == 2 and values[0] is not None and values[1] is not None:
        if head in _COMPARE:
            return TRUE if _COMPARE[head](values[0], values[1]) else FALSE
        if head in _FOLD and not (head == "/" and values[1] == 0):
            folded = _FOLD[head](values[0], values[1])
            if _exact(folded):
                return _literal(folded)
    return None


def _choose(c: Expr, x: Expr, y: Expr) -> Expr | None:
    if c == TRUE or x == y:
        return x
    return y if c == FALSE else None


def _and(x: Expr, y: Expr) -> Expr | None:
    if FALSE in (x, y):
        return FALSE
    return y if x == TRUE else x if y == TRUE else None


def _or(x: Expr, y: Expr) -> Expr | None:
    if TRUE in (x, y):
        return TRUE
    return y if x == FALSE else x if y == FALSE else None


def _not(x: Expr) -> Expr | None:
    return {TRUE: FALSE, FALSE: TRUE}.get(x)


def _pow(x: Expr, y: Expr) -> Expr | None:
    return x if _value(y) == 1 else None


def _negate(x: Expr) -> _Rule:
    if x == ZERO:
        return ZERO
    if x.head == "neg":
        return x.args[0]
    if x.head == "-":
        return (yield "-", x.args[1], x.args[0])
    return (yield from _into(x, lambda v: ("neg", v))) if _guarded(x) else None


def _add(x: Expr, y: Expr) -> _Rule:
    if x == ZERO:
        return y
    if y == ZERO:
        return x
    if y.head == "neg":
        return (yield "-", x, y.args[0])
    if x.head == "neg":
        return (yield "-", y, x.args[0])
    if x.head == y.head == "?:" and x.args[0] == y.args[0] and _guarded(x) and _guarded(y):
        c, a, b = x.args
        return (yield "?:", c, (yield "+", a, y.args[1]), (yield "+", b, y.args[2]))
    return None


def _subtract(x: Expr, y: Expr) -> _Rule:
    if y == ZERO:
        return x
    if x == ZERO:
        return (yield "neg", y)
    return (yield "+", x, y.args[0]) if y.head == "neg" else None


def _multiply(x: Expr, y: Expr) -> _Rule:
    if ZERO in (x, y):
        return ZERO
    if x == ONE:
        return y
    if y == ONE:
        return x
    if x.head == "neg":
        return (yield "neg", (yield "*", x.args[0], y))
    if y.head == "neg":
        return (yield "neg", (yield "*", x, y.args[0]))
    if _guarded(x):
        return (yield from _into(x, lambda v: ("*", v, y)))
    if _guarded(y):
        return (yield from _into(y, lambda v: ("*", x, v)))
    for factors, others in ((_factors(x), _factors(y)), (_factors(y), _factors(x))):
        for f, e in product(factors, others):
            if e.head != "exp" or f.head != "/":
                continue
            if f.args[1] in (call("+", ONE, e), call("+", e, ONE)):
                slope = yield "*", f.args[0], call("sigmoid", e.args[0])
                rest = [*factors, *others]
                rest.remove(f)
                rest.remove(e)
                for factor in rest:
                    slope = yield "*", factor, slope
                return slope
    if y.head == "/" and y.args[0] == ONE:
        return (yield "/", x, y.args[1])
    return None


def _factors(e: Expr) -> tuple[Expr, ...]:
    return e.args if e.head == "*" else (e,)


def _divide(x: Expr, y: Expr) -> _Rule:
    if x == ZERO:
        return ZERO
    if y == ONE:
        return x
    if x.head == "neg":
        return (yield "neg", (yield "/", x.args[0], y))
    return (yield from _into(x, lambda v: ("/", v, y))) if _guarded(x) else None


_CHOICES: dict[str, Callable[..., Expr | None]] = {
    "?:": _choose,
    "&&": _and,
    "||": _or,
    "!": _not,
    "pow": _pow,
}
_RULES: dict[str, Callable[..., _Rule]] = {
    "neg": _negate,
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "/": _divide,
}
