"""A jitted function in plain MLX ops, on whole arrays.

Both arms of an `if` are computed and `where` picks; a loop runs while any element is in it, with
the others masked. Loops over constant ranges are unrolled, so that code without other loops works
under every MLX transform. A loop whose rounds depend on the data asks the arrays whether to go on,
which `mx.compile` and `mx.vmap` cannot; there a bounded `while` runs all of its rounds, and a `for`
raises. Arithmetic is in float32 (float64 if an input is), ints are int32. Under autograd an arm not
taken that is infinite makes NaN, as `mx.where` does; the kernel's own derivative does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..interpret import cast
from . import ir
from .ir import Value

Mask = mx.array | None


def _bitwise(of: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """MLX's do not broadcast what `mx.vmap` does not map to what it maps, and read past the end of
    it: zeros that depend on the other operand are added to each."""
    return lambda x, y: of(x + mx.zeros((), y.dtype) * y, y + mx.zeros((), x.dtype) * x)


def _divisor(y: mx.array) -> mx.array:
    """`y`, or 1 where it is -1, by which the processor cannot divide -2^31, or 0, by which it
    cannot divide at all and MLX 0.32.2 does, in the arm that is not taken too."""
    return mx.where(mx.logical_or(y < -1, y > 0), y, mx.ones_like(y))


def _divide(x: mx.array, y: mx.array) -> mx.array:
    """`x // y`. What MLX 0.32.2 gives is rounded towards 0: then the rest has the sign of `x`."""
    divisor = _divisor(y)
    quotient = mx.floor_divide(x, divisor)
    rest = x - quotient * divisor
    above = mx.where(divisor > 0, rest < 0, rest > 0)
    return mx.where(y == -1, -x, quotient - above.astype(x.dtype))


_INT: dict[str, Callable[..., mx.array]] = {
    "*": mx.multiply,
    "+": mx.add,
    "-": mx.subtract,
    "neg": mx.negative,
    "~": lambda x: -x - 1,
    "<<": _bitwise(mx.left_shift),
    ">>": _bitwise(mx.right_shift),
    "&": _bitwise(mx.bitwise_and),
    "^": _bitwise(mx.bitwise_xor),
    "|": _bitwise(mx.bitwise_or),
    "//": _divide,
    "%": lambda x, y: mx.where(y == -1, mx.zeros_like(x), mx.remainder(x, _divisor(y))),
    "**": mx.power,
    "abs": mx.abs,
    "max": mx.maximum,
    "min": mx.minimum,
}
_COMPARE: dict[str, Callable[..., mx.array]] = {
    "==": mx.equal,
    # MLX's, mapped over its second operand alone, has the mapped axis in another place.
    "!=": lambda x, y: mx.logical_not(mx.equal(x, y)),
    "<": mx.less,
    "<=": mx.less_equal,
    ">": mx.greater,
    ">=": mx.greater_equal,
}


def trace(
    program: ir.Program, arrays: Sequence[mx.array], live: Mask = None
) -> tuple[mx.array, ...]:
    """The outputs of `program` on `arrays`, which broadcast, where `live` is true."""
    if len(arrays) != len(program.inputs):
        raise ValueError(
            f"[{program.name}] takes {len(program.inputs)} inputs but got {len(arrays)}."
        )
    return _Trace(program, arrays, live).outputs()


class _Trace:
    """Values of the variables, and masks of the elements that are still running.

    A mask is None while it is true everywhere.
    """

    def __init__(self, program: ir.Program, arrays: Sequence[mx.array], live: Mask) -> None:
        self.program = program
        given = [mx.array(a) for a in arrays]
        double = any(a.dtype == mx.float64 for a in given)
        self.float = mx.float64 if double else mx.float32
        self.types = {"float": self.float, "int": mx.int32, "bool": mx.bool_}
        self.given = given
        self.values: dict[str, mx.array] = {}
        for (n, t), a in zip(program.inputs.items(), given, strict=True):
            self.values[n] = cast(cast(a, self.types[t]), self.types[program.locals.get(n, t)])
        self.results: list[mx.array | None] = [None] * len(program.outputs)
        self.live = live
        #: Who left the innermost loop, or ended its round early.
        self.broken: Mask = mx.array(False)
        self.continued: Mask = mx.array(False)

    def outputs(self) -> tuple[mx.array, ...]:
        self.run(self.program.body)
        # To the arrays and not to their shape, which a shapeless compile may change. What is live
        # may be larger: elements of a caller, to which it gave one value.
        return tuple(mx.broadcast_arrays(r, *self.given)[0] for r in self.results if r is not None)

    def value(self, v: Value) -> mx.array:
        """The value of `v` in its type."""
        dtype = self.types[v.type]
        if v.op == "const":
            return mx.array(ir.number(v), dtype)
        if v.op == "var":
            return self.values[v.text]
        if v.op == "cast" and "int" in (v.type, v.args[0].type):
            return cast(self.value(v.args[0]), dtype)
        if v.op == "compare":
            return _COMPARE[v.text](*map(self.value, v.args))
        if v.type == "int":
            return self.integer(v)
        e, leaves = ir.expression(v)
        return cast(e.evaluate({text: self.value(leaf) for text, leaf in leaves.items()}), dtype)

    def integer(self, value: Value) -> mx.array:
        """The value of an operation on ints."""
        done: dict[int, mx.array] = {}
        for v in ir.ordered(value, ir.integer_parts):
            parts = [done[id(a)] for a in ir.integer_parts(v)]
            if v.op == "int":
                done[id(v)] = _INT[v.text](*parts).astype(mx.int32)
            elif v.op == "choose":
                done[id(v)] = mx.where(self.value(v.args[0]), *parts)
            else:
                done[id(v)] = self.value(v)
        return done[id(value)]

    def merge(self, old: mx.array | None, new: mx.array, mask: Mask) -> mx.array:
        return new if mask is None or old is None else mx.where(mask, new, old)

    def run(self, body: list[ir.Statement]) -> None:
        for s in body:
            getattr(self, "on_" + type(s).__name__.lower())(s)

    def on_assign(self, s: ir.Assign) -> None:
        old = self.values.get(s.variable)
        self.values[s.variable] = self.merge(old, self.value(s.value), self.live)

    def on_call(self, s: ir.Call) -> None:
        arrays = [self.value(a) for a in s.arguments]
        outputs = trace(s.function.program, arrays, self.live)
        for v, y in zip(s.variables, outputs, strict=True):
            self.values[v] = self.merge(self.values.get(v), y, self.live)

    def give(self, values: Sequence[mx.array], mask: Mask) -> None:
        for i, v in enumerate(values):
            self.results[i] = self.merge(self.results[i], v, mask)

    def on_return(self, s: ir.Return) -> None:
        self.give([self.value(v) for v in s.values], self.live)
        self.live = mx.array(False)

    def on_if(self, s: ir.If) -> None:
        ends: list[Mask] = []
        while True:
            test, before = self.value(s.test), self.live
            self.live = _and(before, test)
            self.run(s.body)
            ends.append(self.live)
            self.live = _and(before, mx.logical_not(test))
            # A chain of `elif` is deep in its last statements.
            if not (s.orelse and isinstance(s.orelse[-1], ir.If)):
                break
            self.run(s.orelse[:-1])
            s = s.orelse[-1]
        self.run(s.orelse)
        for end in reversed(ends):
            self.live = _or(end, self.live)

    def on_break(self, s: ir.Break) -> None:
        self.broken = _or(self.broken, self.lives())
        self.live = mx.array(False)

    def on_continue(self, s: ir.Continue) -> None:
        self.continued = _or(self.continued, self.lives())
        self.live = mx.array(False)

    def lives(self) -> mx.array:
        return mx.array(True) if self.live is None else self.live

    def round(self, body: list[ir.Statement]) -> None:
        """One round of a loop; then `live` is who comes to its end or continues."""
        outer, self.continued = self.continued, mx.array(False)
        self.run(body)
        self.live = _or(self.live, self.continued)
        self.continued = outer

    def on_for(self, s: ir.For) -> None:
        outer, self.broken = self.broken, mx.array(False)
        if all(v.op == "const" for v in (s.start, s.stop, s.step)):
            for i in range(int(s.start.text), int(s.stop.text), int(s.step.text)):
                old = self.values.get(s.variable)
                self.values[s.variable] = self.merge(old, mx.array(i, mx.int32), self.live)
                self.round(s.body)
        else:
            # In 64 bits, because the last step may leave those of an int.
            bounds = (self.value(v).astype(mx.int64) for v in (s.start, s.stop, s.step))
            start, stop, step = bounds
            ended: Mask = mx.array(False)
            while True:
                inside = mx.where(step > 0, start < stop, mx.logical_and(step < 0, start > stop))
                ended = _or(ended, _and(self.live, mx.logical_not(inside)))
                self.live = _and(self.live, inside)
                if not self.any("a 'for' over a range that depends on the data"):
                    break
                old = self.values.get(s.variable)
                self.values[s.variable] = self.merge(old, start.astype(mx.int32), self.live)
                self.round(s.body)
                start = start + step
            self.live = ended
        self.live = _or(self.live, self.broken)
        self.broken = outer

    def any(self, what: str) -> bool:
        """Whether an element is still running."""
        try:
            return bool(mx.any(self.lives()).item())
        except ValueError as error:
            raise ValueError(
                f"[{self.program.name}] {what} must run outside mx.compile and mx.vmap."
            ) from error

    def on_while(self, s: ir.While) -> None:
        outer, self.broken = self.broken, mx.array(False)
        ended: Mask = mx.array(False)
        rounds = 0
        while True:
            test = self.value(s.test)
            ended = _or(ended, _and(self.live, mx.logical_not(test)))
            self.live = _and(self.live, test)
            if rounds == s.bound:
                failed = {"float": float("nan"), "int": -(2**31), "bool": False}
                self.give(
                    [mx.array(failed[t], self.types[t]) for t in self.program.outputs.values()],
                    self.live,
                )
                break
            try:
                if not self.any("a 'while' without a bound"):
                    break
            except ValueError:
                if s.bound is None:
                    raise
            self.round(s.body)
            rounds += 1
        self.live = _or(ended, self.broken)
        self.broken = outer


def _and(mask: Mask, test: mx.array) -> mx.array:
    return test if mask is None else mx.logical_and(mask, test)


def _or(a: Mask, b: Mask) -> Mask:
    return None if a is None or b is None else mx.logical_or(a, b)
