"""Typed statements to Metal functions: the value alone, and the value with its derivatives.

Derivatives are forward mode, statement by statement: beside a float variable v stands v_d_x for
every float input x that v can depend on, and an assignment updates those before v itself. Loops
and branches keep their form, and ints and bools have no derivative.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from .. import msl
from ..expr import Expr, differential, name, shared
from ..expr.nodes import ONE, ZERO
from ..expr.simplify import simplified
from . import ir
from .ir import Value

#: What a function gives when a `while` runs into its bound.
_FAILED = {"float": "NAN", "int": "(-2147483647 - 1)", "bool": "false"}


class Text(NamedTuple):
    """Metal functions, the last of which is `call`, and what it returns.

    `functions` are texts in order of definition; `results` are names and types; the value is a
    scalar if there is one result and the struct `type` with a member each otherwise.
    """

    functions: tuple[str, ...]
    call: str
    type: str
    results: dict[str, str]

    @property
    def header(self) -> str:
        """The functions after those of `zmlx.msl` that they name."""
        own = "\n".join(self.functions)
        shared_functions = msl.header_for(own)
        return f"{shared_functions}\n{own}" if shared_functions else own


def derivative_name(variable: str, of: str) -> str:
    """The name of the derivative of `variable` in the input `of`."""
    return f"{variable}_d_{of}"


def ascii_name(text: str) -> str:
    """A Python name as one of Metal's."""
    return "".join(c if c.isascii() else "_" for c in text)


class _Emitter:
    """One function, with derivatives in `inputs` or without any."""

    def __init__(self, program: ir.Program, derivatives: bool) -> None:
        self.program = program
        self.functions: dict[str, None] = {}
        self.lines: list[str] = []
        self.depth = 1
        self.counter = 0
        floats = [n for n, t in program.inputs.items() if t == "float"] if derivatives else []
        self.inputs = floats
        self.active = _active(program, floats)
        self.used = {*program.inputs, *program.locals}

    def add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def fresh(self, stem: str) -> str:
        while True:
            text = f"{stem}{self.counter}"
            self.counter += 1
            if text not in self.used:
                self.used.add(text)
                return text

    def parameter(self, n: str) -> str:
        """The parameter of the input `n`, which is another variable if the body assigns `n`."""
        text = n
        while n in self.program.locals and text in self.used:
            text += "_in"
        return text

    def tangents(self, of: str) -> dict[str, Expr]:
        """The derivatives in `of` of the variables that have one."""
        found = {v: name(derivative_name(v, of)) for v, x in self.active if x == of}
        return found if of in self.program.locals else {**found, of: ONE}

    def text(self) -> Text:
        p = self.program
        results = dict(p.outputs)
        for y, t in p.outputs.items():
            if t == "float":
                results.update((derivative_name(y, x), "float") for x in self.inputs)
        self.results = results
        for v, t in p.locals.items():
            zero = {"float": "0.0f", "int": "0", "bool": "false"}[t]
            if v in p.inputs:
                # The parameter keeps its own type; the variable may have a larger one.
                self.add(f"{t} {v} = {t}({self.parameter(v)});")
            else:
                self.add(f"{t} {v} = {zero};")
            for x in self.inputs:
                if (v, x) in self.active:
                    self.add(f"float {derivative_name(v, x)} = {'1.0f' if v == x else '0.0f'};")
        self.statements(p.body)
        parameters = ", ".join(f"{t} {self.parameter(n)}" for n, t in p.inputs.items())
        body = "\n".join(self.lines)
        stem = f"jit_{ascii_name(p.name)}" + ("_derivatives" if self.inputs else "")
        key = f"{stem} {results} {parameters}\n{body}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        self_name = f"{stem}_{digest}"
        if len(results) == 1:
            type_ = next(iter(results.values()))
            head = ""
        else:
            type_ = f"{self_name}_result"
            members = "".join(f"    {t} {n};\n" for n, t in results.items())
            head = f"struct {type_} {{\n{members}}};\n"
        body = body.replace("return @{", f"return {type_}{{")
        function = f"{head}inline {type_} {self_name}({parameters}) {{\n{body}\n}}\n"
        return Text((*self.functions, function), self_name, type_, results)

    def give(self, values: list[str]) -> None:
        """The return statement."""
        self.add(
            f"return {values[0]};" if len(values) == 1 else f"return @{{{', '.join(values)}}};"
        )

    # Statements

    def statements(self, body: list[ir.Statement]) -> None:
        for s in body:
            getattr(self, "on_" + type(s).__name__.lower())(s)

    def nested(self, head: str, body: list[ir.Statement], first: str = "") -> None:
        self.add(head + " {")
        self.depth += 1
        if first:
            self.add(first)
        self.statements(body)
        self.depth -= 1
        self.add("}")

    def on_assign(self, s: ir.Assign) -> None:
        targets = [x for x in self.inputs if (s.variable, x) in self.active]
        if not targets:
            self.add(f"{s.variable} = {ir.metal(s.value)};")
            return
        e = ir.expression(s.value)[0]
        # Derivatives first: they need the variables as they were.
        derivatives = [differential(e, self.tangents(x)) for x in targets]
        names = [derivative_name(s.variable, x) for x in targets]
        self.with_shared([*names, s.variable], [*derivatives, e])

    def with_shared(self, targets: list[str], roots: list[Expr]) -> None:
        """Assigns expressions, with common parts named once."""
        lets, values = shared(roots, {}, {*self.used, *(n for r in roots for n in r.names())})
        if lets.lets:
            self.add("{")
            self.depth += 1
            for line in lets.metal().splitlines():
                self.add(line)
        for target, value in zip(targets, values, strict=True):
            if target == value.metal():
                continue
            self.add(f"{target} = {value.metal()};")
        if lets.lets:
            self.depth -= 1
            self.add("}")

    def on_return(self, s: ir.Return) -> None:
        roots: list[Expr] = []
        texts: list[str] = []
        for value in s.values:
            texts.append(ir.metal(value))
        floats = [v for v in s.values if v.type == "float"] if self.inputs else []
        for v in floats:
            e = ir.expression(v)[0]
            roots += [e, *(differential(e, self.tangents(x)) for x in self.inputs)]
        lets, exprs = shared(roots, {}, {*self.used, *(n for r in roots for n in r.names())})
        for line in lets.metal().splitlines():
            self.add(line)
        stride = 1 + len(self.inputs)
        derivatives: list[str] = []
        for i, k in enumerate(k for k, v in enumerate(s.values) if v.type == "float" and floats):
            texts[k] = exprs[i * stride].metal()
            derivatives += [e.metal() for e in exprs[i * stride + 1 : (i + 1) * stride]]
        self.give(texts + derivatives)

    def on_call(self, s: ir.Call) -> None:
        arguments = ", ".join(ir.metal(a) for a in s.arguments)
        f = s.function
        with_d = any((v, x) in self.active for v in s.variables for x in self.inputs)
        text = f.derivative if with_d else f.value
        self.functions.update(dict.fromkeys(text.functions))
        if len(text.results) == 1:
            self.add(f"{s.variables[0]} = {text.call}({arguments});")
            return
        result = self.fresh("result")
        self.add(f"const {text.type} {result} = {text.call}({arguments});")
        for v, y in zip(s.variables, f.outputs, strict=True):
            for x in self.inputs:
                if (v, x) in self.active:
                    total = ZERO
                    for a, (n, t) in zip(s.arguments, f.inputs.items(), strict=True):
                        if t == "float":
                            inner = differential(ir.expression(a)[0], self.tangents(x))
                            outer = name(f"{result}.{derivative_name(y, n)}")
                            total = simplified("+", total, simplified("*", inner, outer))
                    self.add(f"{derivative_name(v, x)} = {total.metal()};")
            self.add(f"{v} = {result}.{y};")

    def on_if(self, s: ir.If) -> None:
        self.nested(f"if ({ir.metal(s.test)})", s.body)
        while len(s.orelse) == 1 and isinstance(s.orelse[0], ir.If):
            s = s.orelse[0]
            self.lines.pop()
            self.nested(f"}} else if ({ir.metal(s.test)})", s.body)
        if s.orelse:
            self.lines[-1] += " else {"
            self.depth += 1
            self.statements(s.orelse)
            self.depth -= 1
            self.add("}")

    def on_for(self, s: ir.For) -> None:
        it = self.fresh("round")
        start, stop, step = (self.bound(v) for v in (s.start, s.stop, s.step))
        if not _stays_int(s):
            self.counted(s, it, start, stop, step)
            return
        test = f"{it} {'<' if int(s.step.text) > 0 else '>'} {stop}"
        head = f"for (int {it} = {start}; {test}; {it} += {step})"
        self.nested(head, s.body, first=f"{s.variable} = {it};")

    def counted(self, s: ir.For, it: str, start: str, stop: str, step: str) -> None:
        """A loop whose counter might pass the largest int: it counts rounds, and the distance of
        two ints is a uint."""
        up = _rounds(start, stop, f"uint({step})")
        down = _rounds(stop, start, f"(0u - uint({step}))")
        if s.step.op == "const":
            rounds = up if int(s.step.text) > 0 else down
        else:
            rounds = f"{step} > 0 ? ({up}) : {step} < 0 ? ({down}) : 0u"
        count = self.fresh("count")
        self.add(f"const uint {count} = {rounds};")
        head = f"for (uint {it} = 0u; {it} < {count}; ++{it})"
        value = f"int(uint({start}) + {it} * uint({step}))"
        self.nested(head, s.body, first=f"{s.variable} = {value};")

    def bound(self, value: Value) -> str:
        """A bound of a loop, which must not change while the loop runs."""
        if value.op == "const":
            return ir.metal(value)
        text = self.fresh("bound")
        self.add(f"const int {text} = {ir.metal(value)};")
        return text

    def on_while(self, s: ir.While) -> None:
        if s.bound is None:
            self.nested(f"while ({ir.metal(s.test)})", s.body)
            return
        rounds = self.fresh("rounds")
        self.add(f"int {rounds} = 0;")
        self.add(f"while ({ir.metal(s.test)}) {{")
        self.depth += 1
        self.add(f"if ({rounds}++ == {s.bound}) {{")
        self.depth += 1
        self.give([_FAILED[t] for t in self.results.values()])
        self.depth -= 1
        self.add("}")
        self.statements(s.body)
        self.depth -= 1
        self.add("}")

    def on_break(self, s: ir.Break) -> None:
        self.add("break;")

    def on_continue(self, s: ir.Continue) -> None:
        self.add("continue;")


def _stays_int(s: ir.For) -> bool:
    """Whether start + step, … is known to be an int of 32 bits up to the first that ends the loop:
    a step of 1 meets the stop itself."""
    if s.step.op != "const":
        return False
    step = int(s.step.text)
    if abs(step) == 1:
        return True
    if s.stop.op != "const":
        return False
    past = int(s.stop.text) + step - (1 if step > 0 else -1)
    return -(2**31) <= past < 2**31


def _rounds(low: str, high: str, step: str) -> str:
    """How many steps of a uint it takes from one int to another, or beyond it."""
    return f"{low} < {high} ? (uint({high}) - uint({low}) - 1u) / {step} + 1u : 0u"


def _active(program: ir.Program, inputs: list[str]) -> set[tuple[str, str]]:
    """Pairs (variable, input) with a derivative that can be other than 0."""
    found = {(x, x) for x in inputs if x in program.locals}

    def touches(value: Value, x: str) -> bool:
        # Symbols, so that equal slopes do not cancel as numbers would.
        tangents = {v: name(f"{v}_d") for v, of in {*found, (x, x)} if of == x}
        return value.type == "float" and differential(ir.expression(value)[0], tangents) != ZERO

    while True:
        before = len(found)
        for x in inputs:
            for s in ir.walk(program.body):
                if isinstance(s, ir.Assign) and touches(s.value, x):
                    found.add((s.variable, x))
                elif isinstance(s, ir.Call) and any(touches(a, x) for a in s.arguments):
                    outputs = zip(s.variables, s.function.outputs.values(), strict=True)
                    found.update((v, x) for v, t in outputs if t == "float")
        if len(found) == before:
            return found


def value_text(program: ir.Program) -> Text:
    """The function alone."""
    return _Emitter(program, derivatives=False).text()


def derivative_text(program: ir.Program) -> Text:
    """The function with the derivative of every float output in every float input."""
    return _Emitter(program, derivatives=True).text()
