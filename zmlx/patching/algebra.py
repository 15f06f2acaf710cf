"""Whether graphs compute the same but for rounding.

`Algebra` brings an expression of `Graphs` into a normal form: products and sums of any order;
squares, small powers, quotients and roots as products; 1 / (1 + exp(-x)) as the sigmoid that it is.
Numbers count to six digits, so that 1/√2 and √½ are one. Nothing is multiplied out or cancels, and
numbers far from 1 stay where they are, where products in another order might overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from .capture import COMMUTATIVE, Graphs

#: A constant, and its factors in order: numbers of atoms.
Product = tuple[float, tuple[int, ...]]

#: More factors or terms are not put in order.
_MOST = 64

#: Constants that may be multiplied in any order: those between, and 0.
_SMALLEST, _LARGEST = 1e-6, 1e6

_DTYPES = {str(d): d for d in (mx.float32, mx.float16, mx.bfloat16)}

#: Primitives of one element of each operand.
_ELEMENTWISE = COMMUTATIVE | frozenset(
    ("Abs", "AsType", "Ceil", "Cos", "Divide", "Equal", "Erf", "Exp", "Expm1", "Floor", "Greater",
     "GreaterEqual", "Less", "LessEqual", "Log", "Log1p", "LogAddExp", "LogicalNot", "Maximum",
     "Minimum", "Negative", "Power", "Round", "Select", "Sigmoid", "Sign", "Sin", "Sqrt", "Square",
     "Subtract", "Tanh")
)  # fmt: skip


class Algebra:
    """Normal forms of the expressions of some graphs; equal ones are equal tuples. What is no
    product is an atom, which is known by its number: a primitive, ("sum", its terms) or
    ("over", an atom)."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._forms: dict[int, Product] = {}
        self._numbers: dict[Any, int] = {}
        self._atoms: list[Any] = []

    def same(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Whether the expressions of two lists are equal one by one."""
        some, others = list(some), list(others)
        if some == others:
            return True
        # Operands have lower numbers than what is made of them.
        for number in sorted(self._graphs.below([*some, *others])):
            if number not in self._forms:
                self._forms[number] = self._made(number)
        one, other = ([self._whole(n) for n in numbers] for numbers in (some, others))
        return one == other

    def _whole(self, number: int) -> Any:
        """A form that holds the shape, too."""
        expression = self._graphs[number]
        if expression[0] == "Broadcast":
            return ("Broadcast", expression[1], _rounded(self._forms[expression[2][0]]))
        return _rounded(self._forms[number])

    def _made(self, number: int) -> Product:
        expression = self._graphs[number]
        if expression[0] == "input":
            return self._atom(expression)
        if expression[0] == "constant":
            value = _number(expression)
            return self._atom(expression) if value is None else (value, ())
        name, arguments, operands, output = expression
        if name not in _ELEMENTWISE or output:
            return self._atom((name, arguments, tuple(map(self._whole, operands)), output))
        forms = self._operands(operands)
        found = self._arithmetic(name, arguments, forms)
        if found is not None:
            return found
        inner = [_rounded(form) for form in forms]
        return self._atom((name, arguments, _ordered(inner, name in COMMUTATIVE), 0))

    def _operands(self, operands: Sequence[int]) -> list[Product]:
        """The forms of operands of one shape. Where one has it that is no broadcast and no number,
        it does not matter that the others were broadcast."""
        given = [(n, self._graphs[n]) for n in operands]
        inner = [self._forms[e[2][0] if e[0] == "Broadcast" else n] for n, e in given]
        numbers = [not form[1] for form in inner]
        whole = any(e[0] != "Broadcast" and not n for (_, e), n in zip(given, numbers, strict=True))
        return [
            form if whole or (number and not all(numbers)) else self._atom(self._whole(n))
            for (n, _), form, number in zip(given, inner, numbers, strict=True)
        ]

    def _atom(self, atom: Any) -> Product:
        number = self._numbers.setdefault(atom, len(self._atoms))
        if number == len(self._atoms):
            self._atoms.append(atom)
        return (1.0, (number,))

    # ---- products and sums ----------------------------------------------------------------------

    def _arithmetic(self, name: str, arguments: str, forms: list[Product]) -> Product | None:
        """A primitive as a product or a sum; None where that does not say the same."""
        minus = (-1.0, ())
        if name == "Negative":
            return self._times(minus, *forms)
        if name == "Multiply":
            return self._times(*forms)
        if name == "Square":
            return self._times(*forms, *forms)
        if name == "Divide":
            over = self._over(forms[1])
            return None if over is None else self._times(forms[0], over)
        if name == "Sqrt":
            root = self._atom(("Sqrt", "[False]", (_rounded(forms[0]),), 0))
            return self._over(root) if arguments == "[True]" else root
        if name == "Power":
            return self._power(*forms)
        if name == "Add":
            return self._plus(*forms)
        if name == "Subtract":
            negative = self._times(minus, forms[1])
            return None if negative is None else self._plus(forms[0], negative)
        return None

    def _times(self, *products: Product) -> Product | None:
        factors = sorted(f for _, some in products for f in some)
        number = math.prod(c for c, _ in products)
        if len(factors) > _MOST or not _may_move(number):
            return None
        return number, tuple(factors)

    def _over(self, product: Product) -> Product | None:
        """One over a product."""
        number, factors = product
        if not number:
            return None
        sigmoid = self._sigmoid(product)
        if sigmoid is not None:
            return sigmoid
        return 1 / number, tuple(sorted(map(self._turned, factors)))

    def _turned(self, factor: int) -> int:
        atom = self._atoms[factor]
        return atom[1] if atom[0] == "over" else self._atom(("over", factor))[1][0]

    def _sigmoid(self, product: Product) -> Product | None:
        """1 / (1 + exp(x)), which is the sigmoid of -x."""
        number, factors = product
        if number != 1 or len(factors) != 1 or self._atoms[factors[0]][0] != "sum":
            return None
        terms = self._atoms[factors[0]][1]
        numbers = [n for n, some in terms if not some]
        others = [(n, some[0]) for n, some in terms if len(some) == 1]
        if len(terms) != 2 or numbers != [1.0] or len(others) != 1:
            return None
        by, factor = others[0]
        if by != 1 or self._atoms[factor][0] != "Exp":
            return None
        argument, factors = self._atoms[factor][2][0]
        return self._atom(("Sigmoid", "[]", ((-argument, factors),), 0))

    def _plus(self, *products: Product) -> Product | None:
        """A sum: what it adds twice is a term, but nothing cancels."""
        terms: dict[Any, float] = {}
        for number, factors in products:
            inner: Any = self._atoms[factors[0]] if len(factors) == 1 else None
            flat = inner is not None and inner[0] == "sum" and abs(number) == 1
            for n, some in inner[1] if flat else ((1.0, factors),):
                key = some, number * n > 0
                terms[key] = terms.get(key, 0.0) + number * n
        kept = [_rounded((n, some)) for (some, _), n in terms.items() if n or some]
        if len(kept) > _MOST:
            return None
        if len(kept) == 1:
            return kept[0]
        return self._atom(("sum", _ordered(kept, True))) if kept else (0.0, ())

    def _power(self, base: Product, exponent: Product) -> Product | None:
        number, factors = exponent
        if factors or number not in (-2, -1, -0.5, 0.5, 1, 2, 3, 4):
            return None
        if abs(number) < 1:
            return self._arithmetic("Sqrt", f"[{number < 0}]", [base])
        product = self._times(*[base] * int(abs(number)))
        return product if number > 0 or product is None else self._over(product)


def _rounded(product: Product) -> Product:
    """With six digits of its constant."""
    return float(f"{product[0]:.6g}"), product[1]


def _ordered(products: list[Product], any_order: bool) -> tuple[Product, ...]:
    return tuple(sorted(products) if any_order else products)


def _number(constant: Any) -> float | None:
    """The value of a floating scalar that may be multiplied in any order."""
    _, dtype, shape, data = constant
    if shape != () or dtype not in _DTYPES:
        return None
    value = float(mx.array(list(data), mx.uint8).view(_DTYPES[dtype]).item())  # type: ignore[arg-type]
    return value if _may_move(value) else None


def _may_move(number: float) -> bool:
    return number == 0 or _SMALLEST <= abs(number) <= _LARGEST
