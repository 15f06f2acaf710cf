"""Differentiable kernels from expressions, and a derivative for what has none.

    >>> mish = zmlx.autograd.unary_from_expr("x * tanh(softplus(x))")
    >>> mx.grad(lambda x: mish(x).sum())(mx.array([0.0, 1.0]))
    array([0.6, 1.04904], dtype=float32)

A derivative that is not given is derived from the expression (`zmlx.expr`), with MLX's conventions
at ties of min, max and where. Forward and backward are one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from . import expr, launch, msl
from .arguments import (
    BOOLEAN,
    FLOATING,
    check_identifier,
    check_names,
    check_text,
    is_pair_of_texts,
)
from .broadcasting import (
    BroadcastFunction,
    Decides,
    each_kind,
    elementwise_pattern,
    gradient_dtypes,
    gradient_names,
    gradients_of,
    operands_of,
)
from .codegen import Let, Operand, Output, free_names, name_beside
from .expr import Block, Expr
from .expr.parse import METAL_WORDS, is_reserved
from .pattern import DtypeRule, Number, PatternKernel
from .targets import cpu
from .transforms import Arrays, Reference, Rule, custom_function, declared


class ExpressionFunction(BroadcastFunction):
    """Expressions of named inputs as a differentiable function of arrays.

    Shapes broadcast; arithmetic is in float32, and so are inputs that are plain numbers. A
    number output has the promoted dtype of the arrays (float32 where all are bool), a condition is
    bool. One array comes back for one output, else a tuple.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Mapping[str, Expr],
        lets: Block,
        gradients: Sequence[Expr] | None,
    ) -> None:
        super().__init__(name, dict.fromkeys(inputs, FLOATING + BOOLEAN))
        self._definition = name, tuple(inputs), dict(outputs), lets, gradients
        lets = Block(tuple((n, lets.typed(e)) for n, e in lets.lets))
        outputs = {y: lets.typed(e) for y, e in outputs.items()}
        self.outputs = dict(outputs)
        lets_names = [n for n, _ in lets.lets]
        written = free_names(dict.fromkeys([*inputs, *lets_names, *outputs]))
        self._cotangents: dict[str, str] = {}
        for y, e in outputs.items():
            if not e.is_condition:
                # Not `del`, a word of Python, which no expression may have as a name.
                taken = METAL_WORDS.union(["del"], written, written.values())
                self._cotangents[y] = name_beside(f"d{y}", taken.union(self._cotangents.values()))
        own = {f"d{y}": c for y, c in self._cotangents.items()} | written
        renamed = {n: w for n, w in own.items() if n != w}

        def body(e: Expr) -> Expr:
            return e.rename(renamed)

        self._names = tuple(written[n] for n in inputs)
        self._outputs = {written[y]: body(e) for y, e in outputs.items()}
        self._lets = Block(tuple((written[n], body(e)) for n, e in lets.lets))
        self._gradients_given = gradients is not None
        if gradients is None:
            self._gradient_lets, self._gradients = self._lets.gradient(
                [self._outputs[written[y]] for y in self._cotangents],
                self._names,
                list(self._cotangents.values()),
            )
        else:
            self._gradient_lets = self._lets
            self._gradients = tuple(body(lets.typed(e)) for e in gradients)

    def __reduce__(self) -> Any:
        return ExpressionFunction, self._definition

    def __repr__(self) -> str:
        body = "; ".join(f"{y} = {e.metal()}" for y, e in self.outputs.items())
        return f"{self.name}({', '.join(self.inputs)}): {body}"

    def _build(self, kinds: tuple[str, ...], decides: Decides) -> PatternKernel:
        each = each_kind(kinds)
        lets = (n for block in (self._lets, self._gradient_lets) for n, _ in block.lets)
        taken = {*self._names, *self._outputs, *self._cotangents.values(), *lets}
        operands = operands_of(dict.fromkeys(self._names, "float"), kinds, taken)
        named = gradient_names(self._names, taken.union(x.name for x in operands))
        rule: DtypeRule = (
            decides
            if isinstance(decides, mx.Dtype)
            else Number(n for n, d in zip(self._names, decides, strict=True) if d)
        )

        @cache
        def backward(wanted: tuple[int, ...]) -> PatternKernel:
            # Only what is asked for: the others cost time, and may be infinite where it is not.
            gradients = [self._gradients[i] for i in wanted]
            names = [self._names[i] for i in wanted]
            return PatternKernel(
                f"{self.name}/gradient",
                elementwise_pattern(
                    operands + tuple(Operand(c, each) for c in self._cotangents.values()),
                    tuple(
                        Output(named[n], e.metal(), each)
                        for n, e in zip(names, gradients, strict=True)
                    ),
                    _lets(self._gradient_lets),
                ),
                gradient_dtypes(names, [kinds[i] for i in wanted], each),
                header=_header(self._gradient_lets, gradients),
            )

        def vjp(
            primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
        ) -> list[mx.array | None]:
            some = [
                c
                for c, e in zip(cotangents, self.outputs.values(), strict=True)
                if not e.is_condition
            ]
            which = tuple(sorted(wanted))
            return gradients_of(backward, which, primals, some, kinds)

        def kernel(vjp: Rule | None, reference: Reference | None = None) -> PatternKernel:
            return PatternKernel(
                self.name,
                elementwise_pattern(
                    operands,
                    tuple(Output(y, e.metal(), each) for y, e in self._outputs.items()),
                    _lets(self._lets),
                ),
                tuple(mx.bool_ if e.is_condition else rule for e in self.outputs.values()),
                header=_header(self._lets, self._outputs.values()),
                vjp=vjp,
                reference=reference,
            )

        if not self._cotangents:
            return kernel(None)
        if not self._gradients_given:
            return kernel(vjp)
        given = declared(self.name, kernel(None).evaluate, vjp)

        def reference(*inputs: mx.array) -> Arrays:
            if cpu.any_shape(inputs):
                raise ValueError(
                    f"[{self.name}] a function with given derivatives must not be traced by "
                    "mx.compile(shapeless=True), where MLX has no custom derivatives."
                )
            return given(*inputs)

        return kernel(vjp, reference)


def _lets(block: Block) -> tuple[Let, ...]:
    return tuple(Let(n, e.metal(), "bool" if e.is_condition else "float") for n, e in block.lets)


def _header(block: Block, exprs: Any) -> str:
    return msl.header_for("\n".join([block.metal(), *(e.metal() for e in exprs)]))


def _are_texts(texts: Any) -> bool:
    """Whether these are keys to texts."""
    return isinstance(texts, Mapping) and all(isinstance(text, str) for text in texts.values())


def _output_name(stem: str, taken: Sequence[str]) -> str:
    """`stem`, with underscores behind it where it or its cotangent is `taken`."""
    while stem in taken or f"d{stem}" in taken:
        stem += "_"
    return stem


def named_outputs(
    op: str, outputs: str | Mapping[str, str], taken: Sequence[str]
) -> dict[str, str]:
    """Names to expressions; a single expression is named y, or the like where y or its cotangent is
    `taken`."""
    if isinstance(outputs, str):
        return {_output_name("y", taken): outputs}
    if not _are_texts(outputs) or not outputs:
        raise ValueError(
            f"[{op}] 'outputs' must be an expression or names to expressions but got {outputs!r}."
        )
    check_names(op, "outputs", outputs)
    return dict(outputs)


def nary_from_expr(
    outputs: str | Mapping[str, str],
    inputs: Sequence[str],
    *,
    lets: str = "",
    gradients: Mapping[str, str] | None = None,
    name: str = "expression",
) -> ExpressionFunction:
    """A function of several arrays, with one or several outputs.

    Args:
        outputs: an expression, or names to expressions.
        inputs: the names of the arguments, in order.
        lets: shared parts, as `t = x * x; u = exp(t)`.
        gradients: input names to the expression of their gradient, in terms of the inputs, the lets
            and the cotangents `d<output>` (`dy` for a single expression). Default: derived. Given
            ones are transposed by `mx.jvp`, and neither `mx.compile(shapeless=True)` nor
            `mx.export_function` takes them, as with every `mx.custom_function`.
        name: prefix of the kernel's name.
    """
    check_identifier("expression", "name", name)
    inputs = check_names(name, "inputs", inputs)
    if not inputs:
        raise ValueError(f"[{name}] 'inputs' must have at least one name but got {inputs}.")
    check_text(name, "lets", lets)
    block = expr.parse_block(lets, inputs) if lets else Block()
    known = (*inputs, *(n for n, _ in block.lets))
    named = named_outputs(name, outputs, known)
    if set(named) & set(inputs):
        raise ValueError(
            f"[{name}] 'outputs' must not share names with the inputs but got {named}."
        )
    parsed = {y: expr.parse(text, known) for y, text in named.items()}
    given = None
    if gradients is not None:
        if not _are_texts(gradients) or set(gradients) != set(inputs):
            raise ValueError(
                f"[{name}] 'gradients' must have one expression for each of {', '.join(inputs)} "
                f"but got {gradients!r}."
            )
        floats = [y for y, e in parsed.items() if not block.typed(e).is_condition]
        cotangents = {"dy" if isinstance(outputs, str) else f"d{y}" for y in floats}
        meant = [c for c in sorted(cotangents) if c in (*known, *parsed) or is_reserved(c)]
        if meant:
            raise ValueError(
                f"[{name}] 'outputs' must have names whose cotangents are no other names but got "
                f"{', '.join(meant)}."
            )
        allowed = (*known, *sorted(cotangents))
        given = [expr.parse(gradients[n], allowed) for n in inputs]
        if isinstance(outputs, str):
            given = [e.substitute({"dy": expr.name(f"d{next(iter(named))}")}) for e in given]
    return ExpressionFunction(name, inputs, parsed, block, given)


def _chain(cotangent: str, derivative: str, names: Sequence[str]) -> str:
    """The text of the gradient with this derivative, which must be an expression by itself."""
    expr.parse(derivative, names)
    return f"{cotangent} * ({derivative})"


def unary_from_expr(
    expression: str, *, derivative: str | None = None, name: str = "unary"
) -> ExpressionFunction:
    """A function of one array, from an expression in `x`; `derivative` is dy/dx in `x`."""
    check_text(name, "expression", expression)
    gradients = None
    if derivative is not None:
        check_text(name, "derivative", derivative)
        gradients = {"x": _chain("dy", derivative, ("x",))}
    return nary_from_expr(expression, ("x",), gradients=gradients, name=name)


def binary_from_expr(
    expression: str,
    *,
    derivatives: tuple[str, str] | None = None,
    inputs: tuple[str, str] = ("x", "y"),
    name: str = "binary",
) -> ExpressionFunction:
    """A function of two arrays that broadcast, from an expression in `inputs`; `derivatives` are
    those in the first and in the second."""
    check_text(name, "expression", expression)
    names = check_names(name, "inputs", inputs)
    if len(names) != 2:
        raise ValueError(f"[{name}] 'inputs' must be two names but got {list(names)}.")
    output = _output_name("out", names)
    gradients = None
    if derivatives is not None:
        if not is_pair_of_texts(derivatives):
            raise ValueError(
                f"[{name}] 'derivatives' must be two expressions but got {derivatives!r}."
            )
        gradients = {
            n: _chain(f"d{output}", d, names) for n, d in zip(names, derivatives, strict=True)
        }
    return nary_from_expr({output: expression}, names, gradients=gradients, name=name)


def differentiable(
    forward: Callable[..., Any],
    vjp: Rule,
    *,
    reference: Reference | None = None,
    name: str = "differentiable",
) -> Callable[..., Any]:
    """`forward`, a function of arrays that may launch several kernels, with the gradient `vjp`.

    Args:
        forward: arrays to an array or a tuple of arrays.
        vjp: see `zmlx.transforms`.
        reference: the same function in plain MLX, used inside a shapeless compile and with the
            target "reference"; it returns the output, or a tuple of several. There its own
            derivative counts, not `vjp`: they must be the same.
        name: names the function in errors.
    """
    for argument, given in (("forward", forward), ("vjp", vjp), ("reference", reference)):
        if not callable(given) and (given is not None or argument != "reference"):
            raise TypeError(
                f"[{name}] '{argument}' must be a function but got {type(given).__name__}."
            )
    wrapped = custom_function(name, forward, vjp)

    def function(*arrays: mx.array) -> Any:
        plain = launch.settings().target == "reference"
        if reference is not None and (plain or cpu.any_shape(arrays)):
            outputs: Any = reference(*arrays)
            one = isinstance(outputs, (tuple, list)) and len(outputs) == 1
            return outputs[0] if one else outputs
        return wrapped(*arrays) if cpu.maybe_tracing(arrays) else forward(*arrays)

    function.__name__ = name
    function.__doc__ = forward.__doc__
    return function
