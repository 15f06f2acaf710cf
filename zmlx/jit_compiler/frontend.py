"""From the syntax tree of a Python function to typed statements.

Python's variables have no declared type: here a variable has one, the largest of bool, int and
float among the values that it is assigned, found by repeating the translation until nothing grows.
A variable that Python might find unassigned, a path that returns nothing, and every construct
without a counterpart are errors that show the source line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..codegen import taken_names
from ..expr.parse import is_function, is_reserved
from . import ir
from .expressions import Expressions
from .ir import Value
from .source import Source

#: Names that are, or by their form may be, macros of a compiler or of zmlx, and functions of zmlx.
_MACRO = re.compile(r"__.*|_[A-Z].*|[A-Z0-9_]{2,}|(zmlx|zk)_.*")
#: Words of C++ that Metal, which is older, has as names.
_WORDS = ("char8_t", "char16_t", "char32_t", "co_await", "co_return", "co_yield", "wchar_t")
#: What `_d_` between a variable and an input could be taken for.
_DERIVATIVE = re.compile(r"(?<=_)d(?=_|$)|^d(?=_)")
#: Statements that Python's syntax tree calls other than Python does.
_STATEMENTS = {
    "AsyncFunctionDef": "async def",
    "ClassDef": "class",
    "Delete": "del",
    "FunctionDef": "def",
    "ImportFrom": "import",
}
_PYTHON_TYPES = {"float": "float", "int": "int", "bool": "bool", "array": "float"}


class Frontend(Expressions):
    """The translation of one function."""

    def __init__(
        self, function: Callable[..., Any], types: Mapping[str, str], bound: int | None
    ) -> None:
        self.function = function
        self.source = Source(function)
        self.tree = self.source.tree
        self.bound = bound
        self.inputs = self._inputs(types)
        self.assigned = {
            n.id
            for n in ast.walk(self.tree)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        self.written = self._written_names()
        self.types: dict[str, str] = {}
        self.outputs: list[str] = []
        self.declared: dict[str, str] = {}
        self.result = self._annotated_result()

    def program(self) -> ir.Program:
        """The whole function."""
        while True:
            before = dict(self.types), list(self.outputs)
            self.temporaries = 0
            self.loops = 0
            self.block: list[ir.Statement] = []
            self.live: set[str] | None = set(self.inputs)
            self.statements(self.tree.body)
            if self.live is not None:
                self.source.fail(self.tree, f"{self.source.name!r} may end without a return")
            if (self.types, self.outputs) == before:
                break
        inputs = {self.written[n]: t for n, t in self.inputs.items()}
        stem = "out"
        while any(n.startswith(stem) for n in inputs):
            stem += "_"
        outputs = [f"{stem}{i}" for i in range(len(self.outputs))]
        return ir.Program(
            self.source.name,
            inputs,
            dict(zip(outputs if len(outputs) > 1 else [stem], self.outputs, strict=True)),
            dict(self.types),
            self.block,
        )

    # The signature

    def _inputs(self, types: Mapping[str, str]) -> dict[str, str]:
        a = self.tree.args
        for extra, what in (
            (a.vararg, "*arguments"),
            (a.kwarg, "**keywords"),
            (next((d for d in (*a.defaults, *a.kw_defaults) if d), None), "default values"),
        ):
            if extra is not None:
                self.source.fail(extra, f"{what} are not supported", "every parameter is an input")
        found = {}
        owner = getattr(self.function, "__qualname__", "").rpartition(".")[0]
        for p in (*a.posonlyargs, *a.args, *a.kwonlyargs):
            if p.arg == "self" and owner and not owner.endswith("<locals>"):
                self.source.fail(p, "a method is not supported", "make it a function, or static")
            declared = self.annotation(p.annotation) if p.annotation else "float"
            found[p.arg] = types.get(p.arg, declared)
            if found[p.arg] not in ir.TYPES:
                raise ValueError(
                    f"[jit] the type of {p.arg!r} must be float, int or bool but got"
                    f" {found[p.arg]!r}."
                )
        for n in types:
            if n not in found:
                raise ValueError(f"[jit] 'types' must name inputs but got {n!r}.")
        if not found:
            self.source.fail(self.tree, "a function without parameters is not supported")
        return found

    def annotation(self, node: ast.expr) -> str:
        """The type that an annotation names."""
        text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.rpartition(".")[2]
        if text not in _PYTHON_TYPES:
            self.source.fail(node, "an annotation must be float, int, bool or mx.array")
        return _PYTHON_TYPES[text]

    def _annotated_result(self) -> list[str] | None:
        node = self.tree.returns
        if node is None:
            return None
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in ("tuple", "Tuple"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return [self.annotation(p) for p in parts]
        return [self.annotation(node)]

    def _written_names(self) -> dict[str, str]:
        """The Metal name of every variable: its own, with a "v" before it where a macro may have
        that, or with underscores where Metal, or for an input a kernel's body, has it."""
        written: dict[str, str] = {}
        taken = taken_names(self.inputs)
        for n in (*self.inputs, *sorted(self.assigned - self.inputs.keys())):
            text = n if n.isascii() else "v" + "".join(f"{ord(c):x}" for c in n)
            text = _DERIVATIVE.sub("D", text)
            text = f"v{text}" if _MACRO.fullmatch(text) else text
            while (
                is_reserved(text)
                or is_function(text)
                or text in _WORDS
                or text in written.values()
                or (n in self.inputs and text in taken)
            ):
                text += "_"
            written[n] = text
        return written

    # Variables

    def type_of(self, variable: str) -> str:
        """The type of a variable so far; the smallest one before any assignment was seen."""
        return self.types.get(self.written[variable], self.inputs.get(variable, "bool"))

    def assign(self, variable: str, value: Value, node: ast.AST) -> None:
        """`variable = value`, which may enlarge the variable's type."""
        declared = self.declared.get(variable) or self.inputs.get(variable)
        if declared and ir.join(declared, value.type) != declared:
            self.source.fail(
                node,
                f"{variable!r} is declared {declared} but is assigned a {value.type}",
                "give that another name",
            )
        type_ = ir.join(self.type_of(variable), value.type, declared or "bool")
        self.types[self.written[variable]] = type_
        self.block.append(ir.Assign(self.written[variable], ir.convert(value, type_)))
        if self.live is not None:
            self.live.add(variable)

    def temporary(self, value: Value) -> Value:
        """`value` where no assignment changes it: a new variable, if it is not one already."""
        own = value.op == "var" and value.text not in self.written.values()
        if own or value.op == "const":
            return value
        name = self.fresh_variable(value.type)
        self.block.append(ir.Assign(name, value))
        return Value("var", value.type, (), name)

    def fresh_variable(self, type_: str) -> str:
        """The name of a new variable of `type_`."""
        taken = set(self.written.values())
        while (name := f"value{self.temporaries}") in taken:
            self.temporaries += 1
        self.temporaries += 1
        self.types[name] = type_
        return name

    # Statements

    def statements(self, body: list[ast.stmt]) -> None:
        """Translates a body into the current block."""
        for node in body:
            if self.live is None:
                # Nothing comes here.
                return
            handler = getattr(self, "_on_" + type(node).__name__, None)
            if handler is None:
                kind = type(node).__name__
                word = _STATEMENTS.get(kind, kind.lower())
                self.source.fail(node, f"a {word!r} statement is not supported")
            handler(node)

    def inner(self, body: list[ast.stmt]) -> list[ir.Statement]:
        """Translates a body into a block of its own."""
        outer, self.block = self.block, []
        self.statements(body)
        done, self.block = self.block, outer
        return done

    def _on_Pass(self, node: ast.Pass) -> None:
        pass

    def _on_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring, or `...`
        if isinstance(node.value, (ast.Yield, ast.YieldFrom, ast.Await)):
            self.value(node.value)
        self.source.fail(node, "a value that nothing takes is not supported")

    def _on_Assign(self, node: ast.Assign) -> None:
        self.store(node.targets, node.value, node)

    def _on_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.source.fail(node.target, "only a plain name can be assigned")
        self.declared[node.target.id] = self.annotation(node.annotation)
        if node.value is None:
            return
        self.store([node.target], node.value, node)

    def _on_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.source.fail(node.target, "only a plain name can be assigned")
        left = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        both = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        self.assign(node.target.id, self.value(both), node)

    def store(self, targets: list[ast.expr], value: ast.expr, node: ast.AST) -> None:
        """`target = … = value`, with tuples taken apart."""
        values = self.values(value)
        width = len(values)
        if len(targets) > 1 or width > 1:
            # All of the right side is computed before anything is assigned.
            values = tuple(self.temporary(v) for v in values)
        for target in targets:
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            if isinstance(target, ast.Name) and width > 1:
                what = f"{target.id!r} cannot take {width} values"
                self.source.fail(target, what, "a variable is one number")
            if len(parts) != width:
                self.source.fail(target, f"{len(parts)} targets cannot take {width} values")
            for part, v in zip(parts, values, strict=True):
                if not isinstance(part, ast.Name):
                    self.source.fail(part, "only a plain name can be assigned")
                self.assign(part.id, v, node)

    def _on_Return(self, node: ast.Return) -> None:
        values = () if node.value is None else self.values(node.value)
        if not values:
            self.source.fail(node, "a return without a value is not supported")
        wanted = self.outputs or values if self.result is None else self.result
        if len(wanted) != len(values):
            self.source.fail(node, f"{len(values)} values are returned but elsewhere {len(wanted)}")
        types = [v.type for v in values]
        for i, declared in enumerate(self.result or ()):
            if ir.join(declared, types[i]) != declared:
                self.source.fail(node, f"{declared} is declared but a {types[i]} is returned")
            types[i] = declared
        old = self.outputs or types
        self.outputs = [ir.join(a, b) for a, b in zip(old, types, strict=True)]
        done = tuple(ir.convert(v, t) for v, t in zip(values, self.outputs, strict=True))
        self.block.append(ir.Return(done))
        self.live = None

    def _on_If(self, node: ast.If) -> None:
        # Each `elif` is an `if` in the `else` before it: a long chain is deep, so that this is a
        # loop.
        outer = self.block
        ends: list[set[str] | None] = []
        while True:
            test = self.condition(node.test)
            before = None if self.live is None else set(self.live)
            body, orelse = self.inner(node.body), list[ir.Statement]()
            ends.append(self.live)
            self.live = before
            self.block.append(ir.If(test, body, orelse))
            self.block = orelse
            if not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
                break
            node = node.orelse[0]
        self.statements(node.orelse)
        self.block = outer
        for end in reversed(ends):
            self.live = _meet(end, self.live)

    def loop(self, node: ast.For | ast.While) -> list[ir.Statement]:
        """The body of a loop; `self.live` is then what its normal end leaves."""
        if node.orelse:
            self.source.fail(node.orelse[0], "'else' after a loop is not supported")
        self.loops += 1
        body = self.inner(node.body)
        self.loops -= 1
        return body

    def _on_For(self, node: ast.For) -> None:
        if not isinstance(node.target, ast.Name):
            self.source.fail(node.target, "a loop variable must be a plain name")
        call = node.iter
        if not (
            isinstance(call, ast.Call)
            and self.called(call.func) == ("range", None)
            and 1 <= len(call.args) <= 3
            and not call.keywords
        ):
            what = "range(stop), range(start, stop) or range(start, stop, step)"
            self.source.fail(node.iter, f"a 'for' loop must be over {what}")
        bounds = [self.integer(a, "a bound of range") for a in call.args]
        start, stop = (ir.constant(0), bounds[0]) if len(bounds) == 1 else bounds[:2]
        step = bounds[2] if len(bounds) == 3 else ir.constant(1)
        if step.op == "const" and step.text == "0":
            self.source.fail(call.args[2], "the step of range must not be 0")
        name = node.target.id
        # The counter is a variable of its own, so that assigning the loop variable is harmless.
        self.types[self.written[name]] = ir.join(self.type_of(name), "int")
        if self.type_of(name) != "int":
            self.source.fail(node.target, f"the loop variable {name!r} must stay an int")
        before = None if self.live is None else set(self.live)
        if self.live is not None:
            self.live.add(name)
        body = self.loop(node)
        runs = all(b.op == "const" for b in (start, stop, step)) and bool(
            range(int(start.text), int(stop.text), int(step.text))
        )
        jumps = any(isinstance(s, (ir.Break, ir.Continue)) for s in ir.walk(body))
        if runs and before is not None and not jumps:
            before = None if self.live is None else before | self.live
        elif runs and before is not None:
            before.add(name)
        self.live = before
        self.block.append(ir.For(self.written[name], start, stop, step, body))

    def _on_While(self, node: ast.While) -> None:
        self.calls_allowed = False
        test = self.condition(node.test)
        self.calls_allowed = True
        before = None if self.live is None else set(self.live)
        body = self.loop(node)
        endless = test.op == "const" and bool(ir.number(test)) and not _breaks(body)
        self.live = None if endless else before
        counter = _counter(node)
        counted = counter is not None and self.type_of(counter) != "float"
        if self.bound is None and not counted:
            self.source.fail(
                node,
                "this 'while' might not end",
                "a GPU would hang. Give the decorator a bound, @jit(bound=100), or count: compare"
                " an int with a literal, `while n < 100 and …`, and increase it in the body,"
                " `n += 1` or `n = n + 1`, without `continue`",
            )
        self.block.append(ir.While(test, body, None if counted else self.bound))

    def _on_Break(self, node: ast.Break) -> None:
        self.block.append(ir.Break())
        self.live = None

    def _on_Continue(self, node: ast.Continue) -> None:
        self.block.append(ir.Continue())
        self.live = None


def _meet(a: set[str] | None, b: set[str] | None) -> set[str] | None:
    """The variables assigned on both of two paths; None is a path that does not come here."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _breaks(body: list[ir.Statement]) -> bool:
    """Whether a loop of this body may be left by a `break` of its own."""
    return any(
        isinstance(s, ir.Break) or (isinstance(s, ir.If) and (_breaks(s.body) or _breaks(s.orelse)))
        for s in body
    )


def _counter(node: ast.While) -> str | None:
    """The variable that the condition compares with a literal, towards which the body counts."""
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    if isinstance(node.test, ast.BoolOp) and not isinstance(node.test.op, ast.And):
        return None
    if any(isinstance(s, ast.Continue) for s in ast.walk(node)):
        return None
    stores = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    for test in tests:
        if not (
            isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name)
        ):
            continue
        limit, variable = _integer(test.comparators[0]), test.left.id
        own = [n for n in stores if n.id == variable]
        for s in node.body:
            target, step = _counted(s)
            if limit is None or step is None or own != [target]:
                continue
            ahead = step > 0 and isinstance(test.ops[0], (ast.Lt, ast.LtE))
            behind = step < 0 and isinstance(test.ops[0], (ast.Gt, ast.GtE))
            # Past the limit it must not wrap around.
            if (ahead or behind) and abs(limit + step) < 2**31:
                return variable
    return None


def _counted(node: ast.stmt) -> tuple[ast.expr | None, int | None]:
    """The target of `n += 1`, `n = n + 1` and their like, and by how much it changes."""
    if isinstance(node, ast.AugAssign):
        target, op, by = node.target, node.op, node.value
    elif (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.BinOp)
    ):
        target, op, by = node.targets[0], node.value.op, node.value.right
        first = node.value.left
        if isinstance(op, ast.Add) and _integer(first) is not None:
            first, by = by, first
        if not (isinstance(first, ast.Name) and first.id == target.id):
            return None, None
    else:
        return None, None
    step = _integer(by)
    if step is None or not isinstance(op, (ast.Add, ast.Sub)):
        return None, None
    return target, step if isinstance(op, ast.Add) else -step


def _integer(node: ast.expr) -> int | None:
    """The value of an int literal, negated or not."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _integer(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
