"""Text to expressions: C and Metal syntax, and what a Python user writes by habit.

    conditional   c ? a : b      a if c else b
    logical       a || b  a or b     a && b  a and b     !a  not a
    comparison    == != < <= > >=    one at a time: C and Python disagree about a < b < c
    arithmetic    + - * / %   -a +a   a ** b
    atoms         1  2.5f  1e-5  0x1p-3   pi inf nan true false   names   calls   ( … )

`%` takes the sign of the divisor, as in Python and MLX, because C has none for floats.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple, NoReturn

from .block import Block
from .functions import ALIASES, CONSTANTS, EXPANSIONS, FUNCTIONS
from .nodes import ONE, ZERO, Expr, call, condition, exact_value, literal, name

_TOKEN = re.compile(
    r"""(?P<number>(?:0[xX](?:[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?
                   |(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[\w.]*)
      | (?P<name>(?:metal::)?(?:precise::)?[A-Za-z_]\w*)
      | (?P<mark>\*\*|&&|\|\||[=!<>]=|[-+*/%<>!?:(),;=])
      | (?P<line>\n)
      | (?P<space>[ \t\r]+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBER = re.compile(
    r"(0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+|0[xX][0-9a-fA-F]+"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)f?"
)
_METAL_WORDS = """
alignas alignof and and_eq asm auto bfloat bitand bitor bool break case catch char char16_t char32_t
class compl const const_cast constant constexpr continue decltype default delete device do double
dynamic_cast else enum explicit export extern false float for fragment friend goto half if inline
int kernel long mutable namespace new noexcept not not_eq nullptr operator or or_eq private
protected public register reinterpret_cast return short signed sizeof static static_assert
static_cast struct switch template this thread thread_local threadgroup throw true try typedef
typeid typename uint union unsigned using vertex virtual void volatile wchar_t while xor xor_eq
"""
_PYTHON_WORDS = """
as del elif except False finally from global import in is lambda None nonlocal pass raise True yield
"""
#: Words that cannot be the name of a value in Metal.
METAL_WORDS = frozenset(_METAL_WORDS.split())
_RESERVED = METAL_WORDS.union(_PYTHON_WORDS.split())
_TRUTHS = frozenset(("true", "false", "True", "False"))
_CONDITIONALS = ("where", "select")
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_HINTS = {
    "//": "write floor(a / b)",
    "&": "write && between conditions",
    "|": "write || between conditions",
    "~": "write ! before a condition",
    "^": "write pow(a, b) or a ** b",
    "[": "a name stands for one element, without an index",
    "=": "definitions go into lets; to compare write ==",
    ".": "write exp(x) for math.exp(x)",
}
_FLOAT_MAX = Fraction(2) ** 128 - Fraction(2) ** 103  # from here on a literal rounds to infinity
_FLOAT_MIN = Fraction(1, 2**150)  # up to here it rounds to zero
_LONGEST_NUMBER = 1000  # characters
_LARGEST_EXPONENT = 9999  # beyond it no number that is so short is in the range, but zero


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    """Precedence climbing over the tokens of one text."""

    def __init__(self, text: str, names: Iterable[str] | None) -> None:
        if not isinstance(text, str):
            raise TypeError(f"[expression] 'text' must be a str but got {text!r}.")
        self.text = text
        self.names = None if names is None else tuple(names)
        self.seen: dict[str, int] = {}
        self.lets: dict[str, Expr] = {}
        self.tokens: list[_Token] = []
        for match in _TOKEN.finditer(text):
            kind = str(match.lastgroup)
            if kind == "other":
                self.fail(f"unexpected {match.group()!r}", match.start(), self.hint(match.start()))
            if kind != "space":
                self.tokens.append(_Token(kind, match.group(), match.start()))
        self.tokens.append(_Token("end", "", len(text.rstrip())))
        #: Whether a new line ends a statement here, and how many parentheses are open.
        self.lines = False
        self.depth = 0
        self.i = 0
        for given in self.names or ():
            if given in _RESERVED or is_function(given) or not _NAME.fullmatch(given):
                raise ValueError(f"[expression] {given!r} must be a name but is {_why(given)}.")

    def hint(self, at: int) -> str:
        return next((h for mark, h in _HINTS.items() if self.text.startswith(mark, at)), "")

    def fail(self, what: str, at: int, hint: str = "") -> NoReturn:
        start = self.text.rfind("\n", 0, at) + 1
        line = self.text[start:].split("\n", 1)[0].rstrip("\r")
        number = self.text.count("\n", 0, at) + 1
        where = f"line {number}, " if "\n" in self.text.strip() else ""
        where += f"column {at - start + 1}"
        blank = re.sub(r"[^\t]", " ", self.text[start:at])
        raise ValueError(
            f"[expression] {what} at {where}{': ' + hint if hint else ''}.\n  {line}\n  {blank}^"
        )

    @property
    def token(self) -> _Token:
        while self.tokens[self.i].kind == "line" and (self.depth or not self.lines):
            self.i += 1
        return self.tokens[self.i]

    def take(self, *texts: str) -> str:
        """The next token's text if it is one of `texts`, consumed; else ""."""
        token = self.token
        if token.kind in ("mark", "name") and token.text in texts:
            self.i += 1
            self.depth += {"(": 1, ")": -1}.get(token.text, 0)
            while token.text != ")" and self.tokens[self.i].kind == "line":
                self.i += 1
            return token.text
        return ""

    def expect(self, text: str, what: str) -> None:
        if not self.take(text):
            self.unexpected(f"expected {text!r} {what}")

    def unexpected(self, what: str) -> NoReturn:
        token = self.token
        found = {"end": "the end", "line": "the end of the line"}.get(token.kind, repr(token.text))
        self.fail(f"{what} but found {found}", token.at, self.hint(token.at))

    def expression(self) -> Expr:
        first = self.either()
        if self.take("?"):
            yes = self.expression()
            self.expect(":", "of the conditional")
            return call("?:", first, yes, self.expression())
        if self.take("if"):
            condition = self.either()
            self.expect("else", "of the conditional")
            return call("?:", condition, first, self.expression())
        return first

    def either(self) -> Expr:
        left = self.both()
        while self.take("||", "or"):
            left = call("||", left, self.both())
        return left

    def both(self) -> Expr:
        left = self.negation()
        while self.take("&&", "and"):
            left = call("&&", left, self.negation())
        return left

    def negation(self) -> Expr:
        return call("!", self.negation()) if self.take("not") else self.comparison()

    def comparison(self) -> Expr:
        left = self.sum()
        operator = self.take(*_COMPARISONS)
        if not operator:
            return left
        left = call(operator, left, self.sum())
        token = self.token
        if token.kind == "mark" and token.text in _COMPARISONS:
            self.fail("a second comparison", token.at, "write a < b && b < c, or parentheses")
        return left

    def sum(self) -> Expr:
        left = self.product()
        while operator := self.take("+", "-"):
            left = call(operator, left, self.product())
        return left

    def product(self) -> Expr:
        left = self.unary()
        while operator := self.take("*", "/", "%"):
            if operator == "/" and self.tokens[self.i][:2] == ("mark", "/"):
                self.fail("unexpected '//'", self.tokens[self.i].at - 1, _HINTS["//"])
            left = call(operator, left, self.unary())
        return left

    def unary(self) -> Expr:
        operator = self.take("-", "+", "!")
        if not operator:
            return self.power()
        operand = self.unary()
        return operand if operator == "+" else call({"-": "neg"}.get(operator, operator), operand)

    def power(self) -> Expr:
        base = self.atom()
        return call("pow", base, self.unary()) if self.take("**") else base

    def atom(self) -> Expr:
        token = self.token
        if self.take("("):
            inner = self.expression()
            self.expect(")", "to close a parenthesis")
            return inner
        if token.kind == "number":
            self.i += 1
            return self.number(token)
        if token.kind == "name" and token.text not in _RESERVED - _TRUTHS:
            self.i += 1
            spelled = token.text.rsplit("::", 1)[-1]
            if self.take("("):
                return self.call(spelled, token)
            if spelled == token.text:
                return self.name(token)
        self.unexpected("expected a value")

    def number(self, token: _Token) -> Expr:
        match = _NUMBER.fullmatch(token.text)
        if not match:
            self.fail(f"{token.text!r} is no float literal", token.at)
        text = match.group(1)
        if len(text) > _LONGEST_NUMBER:
            self.fail(f"a number of more than {_LONGEST_NUMBER} characters", token.at)
        # The value is exact, so that a large exponent would take long.
        digits, exponent = _exponent(text)
        if abs(exponent) > _LARGEST_EXPONENT:
            if digits.strip("0."):
                self.fail(f"{token.text!r} is outside the range of float", token.at)
            text = "0"
        e = literal(text)
        value = exact_value(e) or 0
        if value >= _FLOAT_MAX or 0 < value <= _FLOAT_MIN:
            self.fail(f"{token.text!r} is outside the range of float", token.at)
        return e

    def name(self, token: _Token) -> Expr:
        text = token.text
        if text not in self.lets and (self.names is None or text not in self.names):
            if text in _TRUTHS:
                return literal(text.lower())
            if text in CONSTANTS:
                return literal(CONSTANTS[text])
            if self.names is not None:
                names = (*self.names, *self.lets)
                known = f"the names are {', '.join(names)}" if names else "it names nothing"
                self.fail(f"unknown name {text!r}", token.at, known)
            if is_function(text):
                self.fail(f"{text!r} is a function", token.at, f"write {text}(…)")
        self.seen.setdefault(text, token.at)
        return name(text)

    def call(self, spelled: str, token: _Token) -> Expr:
        args: list[Expr] = []
        if not self.take(")"):
            args.append(self.expression())
            while self.take(","):
                args.append(self.expression())
            self.expect(")", f"after the arguments of {spelled}")
        head = ALIASES.get(spelled, spelled)
        conditional = spelled in _CONDITIONALS
        known = head in FUNCTIONS and (head == "%" or FUNCTIONS[head].precedence == 0)
        if not (known or conditional or spelled in EXPANSIONS):
            every = [f for f in FUNCTIONS if f.isidentifier() and f != "neg"]
            every += [*ALIASES, *EXPANSIONS, *_CONDITIONALS]
            near = difflib.get_close_matches(spelled, every, 1, 0.7)
            hint = f"did you mean {near[0]}" if near else ""
            self.fail(f"unknown function {spelled!r}", token.at, hint)
        if conditional:
            arity = 3
        elif known:
            arity = FUNCTIONS[head].arity
        else:
            arity = len(EXPANSIONS[spelled][0].split())
        if len(args) != arity:
            plural = "" if arity == 1 else "s"
            self.fail(f"{spelled} takes {arity} argument{plural} but got {len(args)}", token.at)
        if conditional:
            c, x, y = args if spelled == "where" else reversed(args)
            return call("?:", c, x, y)
        if known:
            return call(head, *args)
        parameters, meaning = EXPANSIONS[spelled]
        values = dict(zip(parameters.split(), args, strict=True))
        return rule(meaning).substitute(values)

    def of_kind(self, kind: str, value: Expr) -> Expr:
        """The value as what its declaration says: C++ converts."""
        let = self.lets.get(value.text) if value.head == "name" else None
        is_condition = (let or value).is_condition
        if kind == "bool" and not is_condition:
            return condition(value)
        if kind == "float" and is_condition:
            return call("?:", value, ONE, ZERO)
        return value

    def statements(self) -> Block:
        lets = self.lets
        while True:
            self.lines = False
            while self.take(";"):
                pass
            if self.token.kind == "end":
                return Block(tuple(lets.items()))
            self.lines = True
            self.take("const")
            kind = self.take("auto", "float", "bool")
            token = self.token
            if token.kind != "name" or "::" in token.text or token.text in _RESERVED:
                self.unexpected("expected a name to define")
            if is_function(token.text):
                self.fail(f"{token.text!r} is a function", token.at, "choose another name")
            if token.text in lets:
                self.fail(f"{token.text!r} is defined twice", token.at)
            if token.text in self.seen or token.text in (self.names or ()):
                self.fail(f"{token.text!r} is an input already", token.at)
            self.i += 1
            self.expect("=", f"after {token.text}")
            value = self.expression()
            if token.text in self.seen:
                self.fail(f"{token.text!r} is used in its definition", self.seen[token.text])
            lets[token.text] = self.of_kind(kind, value)
            if self.token.kind not in ("line", "end") and self.token.text != ";":
                self.unexpected("expected ';' or a new line")


def _exponent(number: str) -> tuple[str, int]:
    """The digits of a literal, without 0x, and its exponent: of 2 in a hexadecimal one, else of
    10."""
    number = number.lower()
    hexadecimal = number.startswith("0x")
    digits, _, exponent = number.partition("p" if hexadecimal else "e")
    return digits.removeprefix("0x"), int(exponent or "0")


def is_function(text: str) -> bool:
    """Whether `text` is a function of the language, under any spelling."""
    return text in FUNCTIONS or text in ALIASES or text in EXPANSIONS or text in _CONDITIONALS


def is_reserved(text: str) -> bool:
    """Whether `text` is a word of Metal or Python, or the name of a constant."""
    return text in _RESERVED or text in CONSTANTS


def _why(text: str) -> str:
    if is_function(text):
        return "a function"
    return "a word of the language" if text in _RESERVED else "no identifier"


def _run(parser: _Parser) -> Expr:
    if parser.token.kind == "end":
        parser.fail("an empty expression", 0)
    e = parser.expression()
    if parser.token.kind != "end":
        parser.unexpected("expected the end")
    return e


def parse(text: str, names: Sequence[str] | None = None) -> Expr:
    """The expression that `text` writes; with `names`, no other name may be free in it.

    Raises `ValueError` with the column and the text for anything that is not an expression.
    """
    return _read(text, names)[0]


def names_in(text: str) -> tuple[str, ...]:
    """The free names of an expression's text, in order of appearance."""
    e, parser = _read(text, None)
    free = e.names()
    return tuple(n for n in parser.seen if n in free)


def _read(text: str, names: Sequence[str] | None) -> tuple[Expr, _Parser]:
    parser = _Parser(text, names)
    try:
        return _run(parser), parser
    except RecursionError:
        raise ValueError("[expression] the text is nested too deeply.") from None


def parse_block(text: str, names: Sequence[str] | None = None) -> Block:
    """Lets, `name = expression` separated by `;` or new lines, each of which later ones may name.

    A type may stand before the name (`float`, `bool`, `auto`, with `const`): a condition that is
    declared as a float is 1 or 0, a number that is declared as a bool is true unless it is 0.
    """
    parser = _Parser(text, names)
    try:
        block = parser.statements()
    except RecursionError:
        raise ValueError("[expression] the text is nested too deeply.") from None
    if not block.lets:
        parser.fail("an empty block", 0)
    return block


@cache
def rule(text: str) -> Expr:
    """An expression of the function table, parsed once."""
    return parse(text)
