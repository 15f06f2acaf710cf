"""Terms of a derivative, built in their simplest form.

Only what a derivative adds goes through here, never what the user wrote. Constants are folded only
where float arithmetic is exact. Products with the constant 0 vanish, and a factor of an arm
of a conditional whose other arm is 0 goes into that arm: `(c ? g : 0) * p` becomes `c ? g * p : 0`,
so that an infinite `p` where `c` does not hold makes no NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction

from .nodes import FALSE, ONE, TRUE, ZERO, Expr, call, exact_value, literal

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
    if e.head == "neg":
        inner = _value(e.args[0])
        return None if inner is None else -inner
    value = exact_value(e)
    return value if value is not None and _exact(value) else None


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


def _into(e: Expr, apply: Callable[[Expr], Expr]) -> Expr:
    c, x, y = e.args
    return simplified("?:", c, x if x == ZERO else apply(x), y if y == ZERO else apply(y))


def simplified(head: str, *args: Expr) -> Expr:
    """`call(head, *args)` or something simpler of the same value; see the module."""
    values = [_value(a) for a in args]
    if len(args) == 2 and values[0] is not None and values[1] is not None:
        if head in _COMPARE:
            return TRUE if _COMPARE[head](values[0], values[1]) else FALSE
        if head in _FOLD and not (head == "/" and values[1] == 0):
            folded = _FOLD[head](values[0], values[1])
            if _exact(folded):
                return _literal(folded)
    rules = _RULES.get(head)
    return (rules(*args) if rules else None) or call(head, *args)


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


def _negate(x: Expr) -> Expr | None:
    if x == ZERO:
        return ZERO
    if x.head == "neg":
        return x.args[0]
    if x.head == "-":
        return simplified("-", x.args[1], x.args[0])
    return _into(x, lambda v: simplified("neg", v)) if _guarded(x) else None


def _add(x: Expr, y: Expr) -> Expr | None:
    if x == ZERO:
        return y
    if y == ZERO:
        return x
    if y.head == "neg":
        return simplified("-", x, y.args[0])
    if x.head == "neg":
        return simplified("-", y, x.args[0])
    if x.head == y.head == "?:" and x.args[0] == y.args[0] and _guarded(x) and _guarded(y):
        c, a, b = x.args
        return simplified("?:", c, simplified("+", a, y.args[1]), simplified("+", b, y.args[2]))
    return None


def _subtract(x: Expr, y: Expr) -> Expr | None:
    if y == ZERO:
        return x
    if x == ZERO:
        return simplified("neg", y)
    return simplified("+", x, y.args[0]) if y.head == "neg" else None


def _multiply(x: Expr, y: Expr) -> Expr | None:
    if ZERO in (x, y):
        return ZERO
    if x == ONE:
        return y
    if y == ONE:
        return x
    if x.head == "neg":
        return simplified("neg", simplified("*", x.args[0], y))
    if y.head == "neg":
        return simplified("neg", simplified("*", x, y.args[0]))
    if _guarded(x):
        return _into(x, lambda v: simplified("*", v, y))
    if _guarded(y):
        return _into(y, lambda v: simplified("*", x, v))
    if y.head == "/" and y.args[0] == ONE:
        return simplified("/", x, y.args[1])
    return None


def _divide(x: Expr, y: Expr) -> Expr | None:
    if x == ZERO:
        return ZERO
    if y == ONE:
        return x
    if x.head == "neg":
        return simplified("neg", simplified("/", x.args[0], y))
    return _into(x, lambda v: simplified("/", v, y)) if _guarded(x) else None


def _pow(x: Expr, y: Expr) -> Expr | None:
    return x if _value(y) == 1 else None


_RULES: dict[str, Callable[..., Expr | None]] = {
    "?:": _choose,
    "&&": _and,
    "||": _or,
    "!": _not,
    "neg": _negate,
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "/": _divide,
    "pow": _pow,
}
