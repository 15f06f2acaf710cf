"""Whether graphs compute the same but for rounding.

`Algebra` brings an expression of `Graphs` into a normal form: products and sums of any order, with
one constant each; squares, small powers, quotients and roots as products; 1 / (1 + exp(-x)) as the
sigmoid that it is. Numbers count to six digits, so that 1/√2 and √½ are one. Nothing is multiplied
out, and no rule changes what a NaN, an infinity or a number far from 1 becomes, other than by an
overflow in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from .capture import COMMUTATIVE, Graphs

#: A constant and its factors, in order.
Product = tuple[float, tuple[Any, ...]]

_DTYPES = {str(d): d for d in (mx.float32, mx.float16, mx.bfloat16)}

#: Primitives of one element of each operand.
_ELEMENTWISE = COMMUTATIVE | frozenset(
    ("Abs", "AsType", "Ceil", "Cos", "Divide", "Equal", "Erf", "Exp", "Expm1", "Floor", "Greater",
     "GreaterEqual", "Less", "LessEqual", "Log", "Log1p", "LogAddExp", "LogicalNot", "Negative",
     "Power", "Round", "Select", "Sigmoid", "Sign", "Sin", "Sqrt", "Square", "Subtract", "Tanh")
)  # fmt: skip


class Algebra:
    """Normal forms of the expressions of some graphs; equal ones are equal tuples."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._forms: dict[int, Product] = {}

    def same(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Whether the expressions of two lists are equal one by one."""
        some, others = list(some), list(others)
        if some == others:
            return True
        one, other = ([_rounded(self._whole(n)) for n in numbers] for numbers in (some, others))
        return one == other

    def _whole(self, number: int) -> Any:
        """A form that holds the shape, too."""
        expression = self._graphs[number]
        if expression[0] == "Broadcast":
            return ("Broadcast", expression[1], self._form(expression[2][0]))
        return self._form(number)

    def _form(self, number: int) -> Product:
        found = self._forms.get(number)
        if found is None:
            found = self._forms[number] = self._made(number)
        return found

    def _made(self, number: int) -> Product:
        expression = self._graphs[number]
        if expression[0] == "input":
            return _atom(expression)
        if expression[0] == "constant":
            value = _number(expression)
            return _atom(expression) if value is None else (value, ())
        name, arguments, operands, output = expression
        if name not in _ELEMENTWISE or output:
            return _atom((name, arguments, tuple(self._whole(n) for n in operands), output))
        forms = self._operands(operands)
        made = _ARITHMETIC.get(name)
        found = made(arguments, *forms) if made else None
        if found is not None:
            return found
        if name in COMMUTATIVE:
            forms = _in_order(forms)
        return _atom((name, arguments, tuple(forms), 0))

    def _operands(self, operands: Iterable[int]) -> list[Product]:
        """The forms of operands of one shape. Where one has it that is no broadcast and no number,
        it does not matter that the others were broadcast."""
        given = [(n, self._graphs[n]) for n in operands]
        inner = [self._form(e[2][0]) if e[0] == "Broadcast" else self._form(n) for n, e in given]
        numbers = [not form[1] for form in inner]
        whole = any(e[0] != "Broadcast" and not n for (_, e), n in zip(given, numbers, strict=True))
        return [
            form if whole or (number and not all(numbers)) else _atom(self._whole(n))
            for (n, _), form, number in zip(given, inner, numbers, strict=True)
        ]


# ---- products -----------------------------------------------------------------------------------


def _atom(atom: Any) -> Product:
    return (1.0, (atom,))


def _rounded(form: Any) -> Any:
    """A form with numbers of six digits."""
    if isinstance(form, tuple):
        return tuple(_rounded(part) for part in form)
    return float(f"{form:.6g}") if isinstance(form, float) else form


def _in_order(forms: Iterable[Any]) -> list[Any]:
    return sorted(forms, key=lambda form: repr(_rounded(form)))


def _number(constant: Any) -> float | None:
    """The value of a finite floating scalar."""
    _, dtype, shape, data = constant
    if shape != () or dtype not in _DTYPES:
        return None
    value = float(mx.array(list(data), mx.uint8).view(_DTYPES[dtype]).item())  # type: ignore[arg-type]
    return value if math.isfinite(value) else None


def _times(*products: Product) -> Product:
    factors = [f for _, some in products for f in some]
    return math.prod(c for c, _ in products), tuple(_in_order(factors))


def _over(product: Product) -> Product | None:
    """One over a product."""
    number, factors = product
    if not number:
        return None
    sigmoid = _sigmoid(product)
    if sigmoid is not None:
        return sigmoid
    turned = (f[1] if f[0] == "over" else ("over", f) for f in factors)
    return 1 / number, tuple(_in_order(turned))


def _sigmoid(product: Product) -> Product | None:
    """1 / (1 + exp(x)), which is the sigmoid of -x."""
    number, factors = product
    if number != 1 or len(factors) != 1 or factors[0][0] != "sum":
        return None
    terms = factors[0][1]
    numbers = [n for n, some in terms if not some]
    others = [(n, some[0]) for n, some in terms if len(some) == 1]
    if len(terms) != 2 or numbers != [1.0] or len(others) != 1:
        return None
    by, factor = others[0]
    if by != 1 or factor[0] != "Exp":
        return None
    return _atom(("Sigmoid", "[]", (_times((-1.0, ()), factor[2][0]),), 0))


def _plus(*products: Product) -> Product:
    """A sum: of terms that differ, with one number."""
    terms: dict[Any, float] = {}
    for number, factors in products:
        inner = len(factors) == 1 and factors[0][0] == "sum"
        for n, some in factors[0][1] if inner and abs(number) == 1 else (((1.0, factors)),):
            terms[some] = terms.get(some, 0.0) + number * n
    kept = [(n, some) for some, n in terms.items() if n or some]
    if len(kept) == 1:
        return kept[0]
    return _atom(("sum", tuple(_in_order(kept)))) if kept else (0.0, ())


def _power(_: str, base: Product, exponent: Product) -> Product | None:
    number, factors = exponent
    if factors or number not in (-2, -1, -0.5, 0.5, 1, 2, 3, 4):
        return None
    if abs(number) < 1:
        return _root(base) if number > 0 else _over(_root(base))
    product = _times(*[base] * int(abs(number)))
    return product if number > 0 else _over(product)


def _root(of: Product) -> Product:
    return _atom(("Sqrt", "[False]", (of,), 0))


def _divided(_: str, a: Product, b: Product) -> Product | None:
    over = _over(b)
    return None if over is None else _times(a, over)


#: Primitives as products and sums; None where that does not say the same.
_ARITHMETIC: dict[str, Callable[..., Product | None]] = {
    "Add": lambda _, a, b: _plus(a, b),
    "Subtract": lambda _, a, b: _plus(a, _times((-1.0, ()), b)),
    "Negative": lambda _, a: _times((-1.0, ()), a),
    "Multiply": lambda _, a, b: _times(a, b),
    "Divide": _divided,
    "Square": lambda _, a: _times(a, a),
    "Power": _power,
    "Sqrt": lambda arguments, a: _over(_root(a)) if arguments == "[True]" else _root(a),
}
