"""Differentiable kernels from expressions, and a derivative for what has none.

    >>> mish = zmlx.autograd.unary_from_expr("x * tanh(softplus(x))")
    >>> mx.grad(lambda x: mish(x).sum())(mx.array([0.0, 1.0]))
    array([0.6, 1.04904], dtype=float32)

A derivative that is not given is derived from the expression (`zmlx.expr`), with MLX's conventions
at ties of min, max and where. Forward and backward are one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from . import expr, launch, msl
from .arguments import (
    BOOLEAN,
    FLOATING,
    check_array,
    check_identifier,
    check_names,
    check_text,
    is_pair_of_texts,
    number_for,
)
from .codegen import (
    Columnwise,
    Elementwise,
    Let,
    Operand,
    Output,
    Pass,
    Reduce,
    Rowwise,
    free_names,
)
from .expr import Block, Expr
from .expr.parse import METAL_WORDS, is_reserved
from .metal import scalar
from .pattern import DtypeRule, Number, PatternKernel
from .targets import cpu
from .transforms import Arrays, Reference, Rule, custom_function, declared

_COLUMN_SUM = PatternKernel(
    "sum_rows", Columnwise((Operand("x"),), (Output("y", "x"),)), (mx.float32,)
)
_CHUNK_SUM = PatternKernel(
    "sum_chunks", Columnwise((Operand("x"),), (Output("y", "x"),)), (mx.float32,), chunks=1
)
_ROW_SUM = PatternKernel(
    "sum_row",
    Rowwise(
        (Operand("x"),),
        (Output("y", "total", "per_row"),),
        (Pass((Reduce("total", "sum", "x"),)),),
    ),
    (mx.float32,),
)


def sum_chunks(partial: mx.array, like: mx.array) -> mx.array:
    """The second launch of a sum over rows: (chunks, D) partial sums to the shape and dtype of the
    parameter whose gradient they are."""
    return _CHUNK_SUM(partial).reshape(like.shape).astype(like.dtype)  # type: ignore[no-any-return]


def sum_rows(x: mx.array, like: mx.array) -> mx.array:
    """The sum of (*, D) over all leading axes, accumulated in float32 in a fixed order."""
    return sum_chunks(_COLUMN_SUM(x), like)


#: Elements of a row from which on a value per row, or a row that serves several, is read as such: a
#: kernel of shorter rows is not faster than one of elements.
_FEWEST_IN_A_ROW = 8

#: Up to how many rows their numbers are kept from call to call: 16 of those take 16 MB.
_KEPT_ROW_NUMBERS = 1 << 18


class BroadcastFunction:
    """A function of arrays that broadcast, one elementwise kernel per way in which they do.

    A subclass builds the kernel for the kinds of its operands ("full" or, where another one is of
    rows, "row"; "column"; "per_row", without its last axis; "shared", rows of which each belongs to
    several; "scalar") and for which of them decide the dtype of a result: all, or where an array is
    floating, those that are no plain numbers, as in MLX. After its operands the kernel takes, for
    each that is shared, the number of the one that belongs to each row.
    """

    def __init__(self, name: str, inputs: Mapping[str, tuple[mx.Dtype, ...]]) -> None:
        self.__name__ = self.name = name
        self.inputs = tuple(inputs)
        self._dtypes = tuple(inputs.values())
        self._kernels: dict[Any, PatternKernel] = {}

    def __call__(self, *arrays: mx.array | float, **named: mx.array | float) -> Any:
        """The outputs: an array, or a tuple of several. Inputs may be given by name."""
        if named:
            rest = self.inputs[len(arrays) :]
            if set(named) != set(rest):
                raise TypeError(
                    f"[{self.name}] takes ({', '.join(self.inputs)}) but got {len(arrays)} of them "
                    f"by position and {', '.join(named)} by name."
                )
            arrays = (*arrays, *(named[n] for n in rest))
        if len(arrays) != len(self.inputs):
            raise TypeError(
                f"[{self.name}] takes {len(self.inputs)} arrays ({', '.join(self.inputs)}) but got "
                f"{len(arrays)}."
            )
        values = [
            x if isinstance(x, mx.array) else self._number(name, x, dtypes)
            for name, x, dtypes in zip(self.inputs, arrays, self._dtypes, strict=True)
        ]
        for name, x, dtypes in zip(self.inputs, values, self._dtypes, strict=True):
            check_array(self.name, name, x, dtypes)
        shape = self._broadcast_shape(values)
        # The numbers of rows are those of this shape.
        may_share = cpu.maybe_tracing(tuple(values)) != cpu.DYNAMIC
        kinds, operands = [], []
        for x in values:
            kind, operand = _operand(x, shape, may_share)
            kinds.append(kind)
            operands.append(operand)
        if "full" not in kinds:
            operands[0] = mx.broadcast_to(values[0], shape)
            kinds[0] = "full"
        if each_kind(kinds) == "row":
            kinds = ["row" if k == "full" else k for k in kinds]
        operands += [
            _row_numbers(tuple(x.shape[:-1]), shape[:-1])
            for x, kind in zip(values, kinds, strict=True)
            if kind == "shared"
        ]
        decides = tuple(isinstance(x, mx.array) for x in arrays)
        if not any(d and x.dtype in FLOATING for d, x in zip(decides, values, strict=True)):
            decides = (True,) * len(values)
        key = tuple(kinds), decides
        if key not in self._kernels:
            self._kernels[key] = self._build(*key)
        return self._kernels[key](*operands)

    def _number(self, name: str, value: Any, dtypes: tuple[mx.Dtype, ...]) -> Any:
        """A number as the argument, a float where the argument is one; else `value`."""
        number = number_for(self.name, name, value, dtypes)
        return value if number is None else scalar(number)

    def _broadcast_shape(self, values: Sequence[mx.array]) -> tuple[int, ...]:
        shape: list[int] = []
        for name, x in zip(self.inputs, values, strict=True):
            size = max(len(shape), x.ndim)
            old = [1] * (size - len(shape)) + shape
            new = [1] * (size - x.ndim) + list(x.shape)
            if any(a != b and 1 not in (a, b) for a, b in zip(old, new, strict=True)):
                raise ValueError(
                    f"[{self.name}] '{name}' must broadcast with {tuple(shape)} but got "
                    f"{tuple(x.shape)}."
                )
            shape = [b if a == 1 else a for a, b in zip(old, new, strict=True)]
        return tuple(shape)

    def _build(self, kinds: tuple[str, ...], decides: tuple[bool, ...]) -> PatternKernel:
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Any:
        """Itself, since nothing of a function changes: a model that holds one can be copied."""
        return self


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
                taken = METAL_WORDS.union(written, written.values())
                self._cotangents[y] = unused_name(f"d{y}", taken)
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

    def _build(self, kinds: tuple[str, ...], decides: tuple[bool, ...]) -> PatternKernel:
        each = each_kind(kinds)
        lets = (n for block in (self._lets, self._gradient_lets) for n, _ in block.lets)
        taken = {*self._names, *self._outputs, *self._cotangents.values(), *lets}
        operands = operands_of(dict.fromkeys(self._names, "float"), kinds, taken)
        rule = Number(n for n, d in zip(self._names, decides, strict=True) if d)

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
                        Output(f"d_{n}", e.metal(), each)
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
            return scattered(backward(which)(*primals, *some), which, primals, kinds)

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
            if cpu.maybe_tracing(inputs) == cpu.DYNAMIC:
                raise ValueError(
                    f"[{self.name}] a function with given derivatives must not be traced by "
                    "mx.compile(shapeless=True), where MLX has no custom derivatives."
                )
            return given(*inputs)

        return kernel(vjp, reference)


def each_kind(kinds: Sequence[str]) -> str:
    """The kind of an operand that has every element."""
    return "row" if {"column", "per_row", "shared"} & set(kinds) else "full"


def operands_of(
    types: Mapping[str, str], kinds: Sequence[str], taken: Iterable[str]
) -> tuple[Operand, ...]:
    """Operands of these names, types and kinds, and after them the row numbers of those that are
    shared, under names that are not `taken`."""
    taken = set(taken)
    operands, numbers = [], []
    for (name, type_), kind in zip(types.items(), kinds, strict=True):
        number = unused_name(f"{name}_number", taken) if kind == "shared" else ""
        if number:
            numbers.append(Operand(number, "per_row", "uint"))
        operands.append(Operand(name, "row" if number else kind, type_, index=number))
    return (*operands, *numbers)


def elementwise_pattern(
    inputs: tuple[Operand, ...], outputs: tuple[Output, ...], lets: tuple[Let, ...]
) -> Elementwise | Rowwise:
    """The pattern that takes operands of these kinds."""
    if outputs[0].kind == "full":
        return Elementwise(inputs, outputs, lets)
    return Rowwise(inputs, outputs, lets=lets)


def gradient_dtypes(
    inputs: Sequence[str], kinds: Sequence[str], each: str
) -> tuple[DtypeRule, ...]:
    """The dtype of each gradient; one that is summed over rows, because its kind is not that of
    `each` element, stays in float32 until then."""
    return tuple((n,) if k == each else mx.float32 for n, k in zip(inputs, kinds, strict=True))


def _operand(x: mx.array, shape: tuple[int, ...], may_share: bool) -> tuple[str, mx.array]:
    """How an array takes part in an elementwise kernel over `shape`."""
    if tuple(x.shape) == shape and shape:
        return "full", x
    if x.size == 1:
        return "scalar", x.reshape(())
    if prod(x.shape[:-1]) == 1 and x.shape[-1] == shape[-1]:
        return "column", x.flatten()
    if shape[-1] >= _FEWEST_IN_A_ROW:
        if x.shape[-1] == 1:
            values = (*shape[:-1], 1)
            return "per_row", (x if x.shape == values else mx.broadcast_to(x, values)).squeeze(-1)
        if may_share:
            return "shared", x
    return "full", mx.broadcast_to(x, shape)


def _row_numbers(own: tuple[int, ...], lead: tuple[int, ...]) -> mx.array:
    """For each of the rows of `lead` the number of the one of `own` that broadcasts to it."""
    if prod(lead) <= _KEPT_ROW_NUMBERS:
        return _kept_row_numbers(own, lead)
    return mx.broadcast_to(mx.arange(prod(own), dtype=mx.uint32).reshape(own), lead)


@lru_cache(maxsize=16)
def _kept_row_numbers(own: tuple[int, ...], lead: tuple[int, ...]) -> mx.array:
    numbers = np.arange(prod(own), dtype=np.uint32).reshape(own)
    return mx.array(np.ascontiguousarray(np.broadcast_to(numbers, lead)))


def reduced(gradient: mx.array, primal: mx.array, kind: str) -> mx.array:
    """A gradient per element as the gradient of an operand that was broadcast."""
    if kind == "scalar":
        return gradient.sum().astype(primal.dtype)
    if kind == "per_row":
        return _ROW_SUM(gradient).astype(primal.dtype)  # type: ignore[no-any-return]
    if kind == "shared":
        own = (1,) * (gradient.ndim - primal.ndim) + tuple(primal.shape)
        axes = tuple(a for a, n in enumerate(own) if n != gradient.shape[a])
        return gradient.sum(axis=axes).reshape(primal.shape).astype(primal.dtype)
    return sum_rows(gradient, primal) if kind == "column" else gradient


def scattered(
    gradients: Any, wanted: Sequence[int], primals: Arrays, kinds: Sequence[str]
) -> list[mx.array | None]:
    """A kernel's gradients per element of the `wanted` inputs as one entry per input."""
    found: list[mx.array | None] = [None] * len(primals)
    several = (gradients,) if len(wanted) == 1 else gradients
    for i, gradient in zip(wanted, several, strict=True):
        found[i] = reduced(gradient, primals[i], kinds[i])
    return found


def _lets(block: Block) -> tuple[Let, ...]:
    return tuple(Let(n, e.metal(), "bool" if e.is_condition else "float") for n, e in block.lets)


def _header(block: Block, exprs: Any) -> str:
    return msl.header_for("\n".join([block.metal(), *(e.metal() for e in exprs)]))


def unused_name(stem: str, taken: Iterable[str]) -> str:
    """`stem`, with underscores behind it where it is `taken`."""
    while stem in taken:
        stem += "_"
    return stem


def _are_texts(texts: Any) -> bool:
    """Whether these are keys to texts."""
    return isinstance(texts, Mapping) and all(isinstance(text, str) for text in texts.values())


def named_outputs(
    op: str, outputs: str | Mapping[str, str], taken: Sequence[str]
) -> dict[str, str]:
    """Names to expressions; a single expression is named y, or the like where y is `taken`."""
    if isinstance(outputs, str):
        return {unused_name("y", taken): outputs}
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
    named = named_outputs(name, outputs, inputs)
    check_text(name, "lets", lets)
    if set(named) & set(inputs):
        raise ValueError(
            f"[{name}] 'outputs' must not share names with the inputs but got {named}."
        )
    block = expr.parse_block(lets, inputs) if lets else Block()
    known = (*inputs, *(n for n, _ in block.lets))
    parsed = {y: expr.parse(text, known) for y, text in named.items()}
    given = None
    if gradients is not None:
        if not _are_texts(gradients) or set(gradients) != set(inputs):
            raise ValueError(
                f"[{name}] 'gradients' must have one expression for each of {', '.join(inputs)} "
                f"but got {gradients!r}."
            )
        cotangents = {"dy"} if isinstance(outputs, str) else {f"d{y}" for y in named}
        meant = [c for c in sorted(cotangents) if c in known or is_reserved(c)]
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
    output = unused_name("out", names)
    while derivatives is not None and f"d{output}" in names:
        output += "_"
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
        tracing = 0 if plain else cpu.maybe_tracing(arrays)
        if reference is not None and (plain or tracing == cpu.DYNAMIC):
            outputs: Any = reference(*arrays)
            one = isinstance(outputs, (tuple, list)) and len(outputs) == 1
            return outputs[0] if one else outputs
        return wrapped(*arrays) if tracing else forward(*arrays)

    function.__name__ = name
    function.__doc__ = forward.__doc__
    return function
