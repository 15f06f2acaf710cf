"""Python expressions to typed values, with Python's meaning of each operator.

`/` is true division, `//` and `%` round towards minus infinity, ints stay ints (of 32 bits), bools
count as ints in arithmetic, comparisons chain, `and` and `or` give one of their operands.
"""

from __future__ import annotations

import ast
import math
import operator as operator_module
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..arguments import python_number
from ..expr import EXPANSIONS, FUNCTIONS
from . import ir
from .ir import Value
from .names import is_module, known, resolve

if TYPE_CHECKING:
    from .source import Source

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator_module.add,
    "-": operator_module.sub,
    "*": operator_module.mul,
    "//": operator_module.floordiv,
    "%": operator_module.mod,
    "**": operator_module.pow,
    "<<": operator_module.lshift,
    ">>": operator_module.rshift,
    "&": operator_module.and_,
    "|": operator_module.or_,
    "^": operator_module.xor,
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
#: Functions of the table that have an integer form.
_INTEGER = ("abs", "max", "min", "sign", "+", "-", "*", "neg", "square", "cube", "%")


def call(name: str, *args: Value) -> Value:
    """A function of `zmlx.expr`, with its arguments converted to what it takes."""
    f = FUNCTIONS[name]
    converted = tuple(ir.convert(a, "bool" if f.logical else "float") for a in args)
    return Value("call", "bool" if f.condition else "float", converted, name)


def choose(condition: Value, x: Value, y: Value) -> Value:
    """`condition ? x : y` in the larger type of the two."""
    type_ = ir.join(x.type, y.type)
    return Value("choose", type_, (condition, ir.convert(x, type_), ir.convert(y, type_)))


def compare(operator: str, x: Value, y: Value) -> Value:
    """A comparison, of floats if either is one, else of ints."""
    if "float" in (x.type, y.type):
        return call(operator, x, y)
    ints = (ir.convert(x, "int"), ir.convert(y, "int"))
    return Value("compare", "bool", ints, operator)


def _int(operator: str, *args: Value) -> Value:
    return Value("int", "int", tuple(ir.convert(a, "int") for a in args), operator)


def _shown(value: int | float) -> str:
    """A number for an error: Python writes no int of more than some thousand digits."""
    large = isinstance(value, int) and value.bit_length() >= 128
    return f"an int of {int(value).bit_length()} bits" if large else f"{value}"


class Expressions:
    """The part of the frontend that translates expressions."""

    function: Callable[..., Any]
    source: Source
    written: dict[str, str]
    assigned: set[str]
    inputs: dict[str, str]
    live: set[str] | None
    block: list[ir.Statement]
    calls_allowed = True

    if TYPE_CHECKING:

        def type_of(self, variable: str) -> str:
            """See `Frontend`."""

        def fresh_variable(self, type_: str) -> str:
            """See `Frontend`."""

        def temporary(self, value: Value) -> Value:
            """See `Frontend`."""

    def values(self, node: ast.expr) -> tuple[Value, ...]:
        """The values of an expression, several for a tuple or a function with several outputs."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.value(e) for e in node.elts)
        if isinstance(node, ast.Call):
            return self.call(node)
        return (self.value(node),)

    def value(self, node: ast.expr) -> Value:
        """The value of an expression; an int is one of 32 bits."""
        return self.narrow(self.wide(node), node)

    def wide(self, node: ast.expr) -> Value:
        """The same, but a constant may be an int of any size: an operand of what is computed here
        or of a float."""
        handler = getattr(self, "_of_" + type(node).__name__, None)
        if handler is None:
            self.source.fail(node, f"a {type(node).__name__!r} expression is not supported")
        value: Value = handler(node)
        return value

    def integer(self, node: ast.expr, what: str) -> Value:
        """The value of an expression that must be an int."""
        value = self.value(node)
        if value.type == "float":
            self.source.fail(node, f"{what} must be an int but is a float")
        return ir.convert(value, "int")

    def condition(self, node: ast.expr) -> Value:
        """The truth of an expression."""
        if isinstance(node, ast.BoolOp):
            result = self.condition(node.values[0])
            for other in node.values[1:]:
                name = "&&" if isinstance(node.op, ast.And) else "||"
                result = call(name, result, self.condition(other))
            return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return call("!", self.condition(node.operand))
        return ir.convert(self.value(node), "bool")

    # Atoms

    def _of_Constant(self, node: ast.Constant) -> Value:
        if not isinstance(node.value, (bool, int, float)):
            self.source.fail(node, f"the constant {node.value!r} is not supported")
        return self.wide_literal(node.value, node)

    def float_of_text(self, node: Any) -> Value:
        """The constant that `float("inf")` is, or `float` of another text."""
        try:
            return self.literal(float(node.value), node)
        except ValueError:
            self.source.fail(node, f"{node.value!r} is no float")

    def wide_literal(self, value: bool | int | float, node: ast.AST) -> Value:
        """A constant, which may be an int of any reasonable size."""
        wide = type(value) is int and value.bit_length() <= 1024
        return ir.constant(value) if wide else self.literal(value, node)

    def narrow(self, value: Value, node: ast.AST) -> Value:
        """`value`, whose range is checked if it is a constant."""
        return self.literal(ir.number(value), node) if value.op == "const" else value

    def pair(self, x: Value, y: Value, node: ast.AST, floats: bool = False) -> tuple[Value, Value]:
        """Two operands, checked; a constant is a float where the other, or the result, is one."""
        floats = floats or "float" in (x.type, y.type)
        nodes = (node.left, node.right) if isinstance(node, ast.BinOp) else (node, node)

        def checked(v: Value, node: ast.AST) -> Value:
            if v.op == "const" and v.type == "int" and floats:
                if abs(ir.number(v)) >= 2**128:
                    self.source.fail(node, f"{_shown(ir.number(v))} is outside the range of float")
                v = ir.convert(v, "float")
            return self.narrow(v, node)

        return checked(x, nodes[0]), checked(y, nodes[1])

    def literal(self, value: bool | int | float, node: ast.AST) -> Value:
        """A constant within the range of its Metal type."""
        if type(value) is int and not -(2**31) <= value < 2**31:
            self.source.fail(node, f"{_shown(value)} is outside the range of a 32-bit int")
        big = math.isfinite(value) and abs(value) >= 2.0**128 - 2.0**103
        if isinstance(value, float) and (big or 0 < abs(value) <= 2.0**-150):
            self.source.fail(node, f"{value} is outside the range of float")
        return ir.constant(value)

    def whole(self, value: Value, node: ast.AST) -> Value:
        """`value` as an int; a constant must be one of 32 bits."""
        if value.op != "const":
            return ir.convert(value, "int")
        number = ir.number(value)
        if not math.isfinite(number):
            self.source.fail(node, f"{number} is no int")
        return self.literal(int(number), node)

    def _of_Name(self, node: ast.Name) -> Value:
        name = node.id
        if name in self.inputs or name in self.assigned:
            if self.live is not None and name not in self.live:
                self.source.fail(node, f"{name!r} may be read before it is assigned")
            return Value("var", self.type_of(name), (), self.written[name])
        return self.global_constant(self.resolved(node), node)

    def _of_Attribute(self, node: ast.Attribute) -> Value:
        return self.global_constant(self.resolved(node), node)

    def resolved(self, node: ast.expr) -> Any:
        """What a global name, or an attribute of a module, is."""
        if isinstance(node, ast.Name):
            if node.id in self.inputs or node.id in self.assigned:
                self.source.fail(node, f"{node.id!r} is a variable, not a function")
            try:
                return resolve(self.function, node.id)
            except KeyError:
                if node.id == self.source.name:
                    self.source.fail(node, "recursion is not supported")
                self.source.fail(node, f"unknown name {node.id!r}")
        if isinstance(node, ast.Attribute):
            variable = node.value.id if isinstance(node.value, ast.Name) else None
            if variable in self.inputs or variable in self.assigned:
                self.source.fail(node, f"{variable!r} is one number and has no {node.attr!r}")
            base = self.resolved(node.value)
            if is_module(base):
                if not hasattr(base, node.attr):
                    self.source.fail(node, f"{base.__name__} has no {node.attr!r}")
                return getattr(base, node.attr)
        self.source.fail(node, f"{ast.unparse(node)!r} is not supported")

    def global_constant(self, value: Any, node: ast.expr) -> Value:
        """A number from outside the function, of Python or NumPy, as a literal."""
        number = python_number(value)
        if number is None:
            self.source.fail(
                node,
                f"{ast.unparse(node)!r} must be an int, a float or a bool but is of type"
                f" {type(value).__name__}",
                "pass arrays as inputs",
            )
        return self.wide_literal(number, node)

    # Operators

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return self.condition(node)
        value = self.wide(node.operand)  # -2147483648 is an int, what it negates is none
        if isinstance(node.op, ast.UAdd):
            return ir.convert(value, ir.join(value.type, "int"))
        if isinstance(node.op, ast.Invert):
            if value.type == "float":
                self.source.fail(node, "~ needs an int but got a float")
            return _int("~", self.narrow(value, node))
        if value.op == "const" and value.type != "bool":
            return ir.constant(-ir.number(value))
        return call("neg", value) if value.type == "float" else _int("neg", value)

    def _of_BinOp(self, node: ast.BinOp) -> Value:
        # A long sum is deep on the left, so that this is a loop.
        spine = [node]
        while isinstance(node.left, ast.BinOp):
            node = node.left
            spine.append(node)
        result = self.wide(node.left)
        for node in reversed(spine):
            if isinstance(node.op, ast.MatMult):
                self.source.fail(node, "@ is not supported")
            result = self.binary(_BINARY[type(node.op)], result, self.wide(node.right), node)
        return result

    def binary(self, operator: str, x: Value, y: Value, node: ast.AST) -> Value:
        """`x operator y` as Python means it."""
        floats = "float" in (x.type, y.type)
        if x.op == y.op == "const" and not floats and operator != "/":
            return self.folded(operator, ir.number(x), ir.number(y), node)
        x, y = self.pair(x, y, node, floats=operator == "/")
        if operator in ("<<", ">>", "&", "|", "^"):
            if floats:
                parts = (p for v in (x, y) for p in ir.ordered(v, lambda v: v.args))
                powers = any(p.op == "call" and p.text == "pow" for p in parts)
                hint = "an int to the power of a variable is a float; 1 << n is 2 ** n"
                what = f"{operator} needs ints but got a float"
                self.source.fail(node, what, hint if powers else "")
            if x.type == y.type == "bool" and operator in "&|^":
                name = {"&": "&&", "|": "||"}.get(operator)
                return call(name, x, y) if name else compare("!=", x, y)
            # Beyond all bits, Python goes on shifting in the sign.
            return _int(operator, x, self.at_most_31(y) if operator == ">>" else y)
        if operator == "/":
            return call("/", x, y)
        if operator == "**":
            whole = y.op == "const" and y.type == "int" and int(y.text) >= 0
            if floats or not whole:
                return call("pow", x, y)
            return _int("**", x, y)
        if not floats:
            return _int(operator, x, y)
        if operator == "//":
            # Exact: what is left after the remainder is a multiple of y up to rounding. An infinite
            # remainder is y itself, of the other sign than x.
            x, y = self.short(x), self.short(y)
            rest = self.short(call("%", x, y))
            multiple = call("round", call("/", call("-", x, rest), y))
            result = choose(call("isinf", rest), ir.constant(-1.0), multiple)
            if y.op == "const" and ir.number(y):
                return result
            zero = compare("==", y, ir.constant(0.0))
            return choose(zero, call("floor", call("/", x, y)), result)
        return call(operator, x, y)

    def at_most_31(self, value: Value) -> Value:
        """An int, or 31 where that is less."""
        most = ir.constant(31)
        if value.op == "const":
            return min(value, most, key=ir.number)
        return _int("min", value, most)

    def short(self, value: Value) -> Value:
        """`value` as a variable, since what is written twice doubles the text at every step of a
        chain; a `while` condition, which is computed again, can have none."""
        known = value.op in ("const", "var") or not self.calls_allowed
        return value if known else self.temporary(value)

    def folded(self, operator: str, x: Any, y: Any, node: ast.AST) -> Value:
        """An operation on two ints or bools that are known, as Python does it."""
        # Python would compute, for minutes, an int that has no place here.
        bits = {"**": abs(x).bit_length() * y, "<<": y}.get(operator, 0)
        if bits > 1024 and abs(x) > {"**": 1, "<<": 0}[operator]:
            self.source.fail(node, f"{x} {operator} {y} is outside the range of a 32-bit int")
        try:
            value = _FOLD[operator](x, y)
        except (ArithmeticError, ValueError) as error:
            self.source.fail(node, f"{x} {operator} {y} is not possible", str(error))
        return self.wide_literal(value, node)

    def _of_BoolOp(self, node: ast.BoolOp) -> Value:
        values = [self.value(v) for v in node.values]
        if all(v.type == "bool" for v in values):
            return self.condition(node)
        result = values[-1]
        for v in reversed(values[:-1]):
            truth = ir.convert(v, "bool")
            both = (result, v) if isinstance(node.op, ast.And) else (v, result)
            result = choose(truth, *both)
        return result

    def _of_Compare(self, node: ast.Compare) -> Value:
        operands = [self.wide(e) for e in (node.left, *node.comparators)]
        result: Value | None = None
        for i, op in enumerate(node.ops):
            if type(op) not in _COMPARE:
                self.source.fail(node, f"{type(op).__name__!r} is not supported")
            x, y = self.pair(operands[i], operands[i + 1], node)
            one = compare(_COMPARE[type(op)], x, y)
            result = one if result is None else call("&&", result, one)
        assert result is not None
        return result

    def _of_IfExp(self, node: ast.IfExp) -> Value:
        return choose(self.condition(node.test), self.value(node.body), self.value(node.orelse))

    # Calls

    def called(self, node: ast.expr) -> tuple[str, str | None]:
        """Which function a name is: (origin, name), or ("range", None)."""
        target = self.resolved(node)
        if target is range:
            return "range", None
        return known().get(id(target), ("", None))

    def _of_Call(self, node: ast.Call) -> Value:
        values = self.call(node)
        if len(values) != 1:
            self.source.fail(node, f"{len(values)} outputs cannot stand for one value")
        return values[0]

    def call(self, node: ast.Call) -> tuple[Value, ...]:
        """The outputs of a call."""
        from .compiler import JitFunction

        target = self.resolved(node.func)
        if isinstance(node.func, ast.Name) and node.func.id == self.source.name:
            self.source.fail(node, "recursion is not supported")
        for extra in (*node.keywords, *(a for a in node.args if isinstance(a, ast.Starred))):
            self.source.fail(extra, "only positional arguments are supported")
        if isinstance(target, JitFunction):
            return self.jitted(target, node)
        origin, name = known().get(id(target), ("", ""))
        if not origin:
            hint = "decorate it with jit" if hasattr(target, "__code__") else ""
            self.source.fail(node, f"{ast.unparse(node.func)!r} is not supported", hint)
        text = node.args[0] if len(node.args) == 1 else None
        if target is float and isinstance(text, ast.Constant) and isinstance(text.value, str):
            return (self.float_of_text(text),)
        args = [self.value(a) for a in node.args]
        if origin == "python":
            return (self.python(name, args, node),)
        if origin == "math":
            return (self.math(name, args, node),)
        return (self.table(name, args, node),)

    def jitted(self, function: Any, node: ast.Call) -> tuple[Value, ...]:
        """A call of another jitted function, as a statement before this one."""
        if not self.calls_allowed:
            self.source.fail(node, "a jitted function cannot be called in a 'while' condition")
        inputs = function.inputs
        self.arity(len(inputs), node, len(node.args))
        arguments = []
        for a, (name, type_) in zip(node.args, inputs.items(), strict=True):
            value = self.value(a)
            if ir.join(value.type, type_) != type_:
                self.source.fail(a, f"{name!r} of {function.name} is {type_} but got {value.type}")
            arguments.append(ir.convert(value, type_))
        results = tuple(
            Value("var", t, (), self.fresh_variable(t)) for t in function.outputs.values()
        )
        self.block.append(ir.Call(tuple(r.text for r in results), function, tuple(arguments)))
        return results

    def arity(self, wanted: int, node: ast.Call, got: int) -> None:
        """Checks the number of arguments."""
        if got != wanted:
            self.wrong_arity(f"{wanted} argument{'' if wanted == 1 else 's'}", node, got)

    def wrong_arity(self, wanted: str, node: ast.Call, got: int) -> NoReturn:
        """The error for a number of arguments that is none of those `wanted`."""
        self.source.fail(node, f"{ast.unparse(node.func)} takes {wanted} but got {got}")

    def python(self, name: str, args: list[Value], node: ast.Call) -> Value:
        """A built-in function."""
        if name in ("max", "min"):
            if len(args) < 2:
                self.source.fail(node, f"{name} needs two numbers or more")
            result = args[0]
            for other in args[1:]:
                result = self.two(name, result, other)
            return result
        self.arity(2 if name == "pow" else 1, node, len(args))
        if name == "int":
            return self.whole(args[0], node)
        if name in ("float", "bool"):
            return ir.convert(args[0], name)
        if name == "pow":
            return self.binary("**", args[0], args[1], node)
        if name == "round":
            value = ir.convert(args[0], ir.join(args[0].type, "int"))
            return value if value.type == "int" else ir.convert(call("round", value), "int")
        return self.table(name, args, node)

    def math(self, name: str, args: list[Value], node: ast.Call) -> Value:
        """A function of `math` that is not in the table as it is."""
        if name == "log":
            if len(args) == 2:
                return call("/", call("log", args[0]), call("log", args[1]))
            if len(args) != 1:
                self.wrong_arity("1 or 2 arguments", node, len(args))
            return call("log", args[0])
        self.arity(1, node, len(args))
        if name == "fabs":
            return call("abs", args[0])
        if args[0].type != "float":
            return ir.convert(args[0], "int")
        return ir.convert(call(name, args[0]), "int")

    def table(self, name: str, args: list[Value], node: ast.Call) -> Value:
        """A function of `zmlx.expr`; what has an integer form keeps ints."""
        if name == "clip":
            self.arity(3, node, len(args))
            return self.two("min", self.two("max", args[0], args[1]), args[2])
        if name in EXPANSIONS:
            self.arity(1, node, len(args))
            if name == "reciprocal":
                return call("/", ir.constant(1), args[0])
            return self.two("max", args[0], ir.constant(0))
        self.arity(FUNCTIONS[name].arity, node, len(args))
        if name == "?:":
            return choose(ir.convert(args[0], "bool"), args[1], args[2])
        if name in _COMPARE.values():
            return compare(name, *args)
        if name in _INTEGER and all(a.type != "float" for a in args):
            if name == "square":
                return _int("*", args[0], args[0])
            if name in ("sign", "cube"):
                return ir.convert(call(name, *args), "int")
            return _int(name, *args)
        return call(name, *args)

    def two(self, name: str, x: Value, y: Value) -> Value:
        """max or min of two values, of ints if both are."""
        return _int(name, x, y) if "float" not in (x.type, y.type) else call(name, x, y)
