"""Differentiable kernels of one expression per element: what activations and gated units share.

An expression names elements, such as `gate` and `up`, and parameters, such as `alpha`. Where the
elements lie is another matter: in an array each, in parts of one array, or plus a bias that is the
same for every row. The gradient is derived by `zmlx.expr` unless a derivative is given. It is one
launch, which sums the gradients of biases over its rows where a row fits in registers, and computes
nothing but the gradients that are asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from .. import msl
from ..arguments import Argument, check_finite
from ..broadcasting import sum_chunks
from ..codegen import Columnwise, Elementwise, Let, Operand, Output, Rowwise
from ..codegen.text import unique
from ..expr import Block, Expr, parse, shared
from ..launch import LONGEST_KEPT_ROW
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import Option
from ..transforms import Arrays


@dataclass(frozen=True)
class Element:
    """A name in an expression, and where its values lie: slice `part` of the rows of `array`, plus
    the same slice of `bias` if there is one."""

    name: str
    array: str
    part: int = 0
    parts: int = 1
    bias: str = ""


@dataclass(frozen=True)
class Parameter:
    """A number in an expression, an option of the op: its default, what it means, the other values
    that tests try, and what raises for those that it must not have."""

    name: str
    default: float
    meaning: str
    values: tuple[float, ...] = ()
    check: Callable[[str, str, Any], float] = check_finite


class Parameters:
    """The options of an op: documented, completed, and as 0-d arrays in the order of the table."""

    def __init__(self, op: str, table: Sequence[Parameter]) -> None:
        self._op = op
        self._table = tuple(table)
        self._defaults = {p.name: p.default for p in table}
        self._default_arrays = tuple(scalar(value) for value in self._defaults.values())

    @property
    def registered(self) -> tuple[Option, ...]:
        """The options as the registry has them."""
        return tuple(Option(p.name, p.default, p.values) for p in self._table)

    def complete(self, options: Mapping[str, float]) -> dict[str, float]:
        """`options` with the defaults of the others."""
        for name in options:
            if name not in self._defaults:
                raise TypeError(f"{self._op}() got an unexpected keyword argument {name!r}")
        return {**self._defaults, **options}

    def arrays(self, options: Mapping[str, float]) -> Arrays:
        """What a kernel takes; a new value compiles nothing."""
        if not options:
            return self._default_arrays
        values = self.complete(options)
        return tuple(scalar(p.check(self._op, p.name, values[p.name])) for p in self._table)

    def publish(
        self,
        function: Callable[..., mx.array],
        module: str,
        summary: str,
        formula: str,
        arrays: Mapping[str, str],
        returns: str,
        paper: str,
    ) -> Callable[..., mx.array]:
        """`function`, whose last parameter is `**options` if there are any, with the name, the
        signature and the docstring of a public one."""
        plain = inspect.signature(function, eval_str=True)
        kept = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=float)
            for n, value in self._defaults.items()
        ]
        function.__name__ = function.__qualname__ = self._op
        function.__module__ = module
        function.__signature__ = plain.replace(parameters=[*kept, *named])  # type: ignore[attr-defined]
        described = [
            *arrays.items(), *((p.name, f"a number, {p.meaning}") for p in self._table)
        ]  # fmt: skip
        function.__doc__ = "\n".join(
            [
                f"{summary[0].upper()}{summary[1:]}.",
                f"\n    y = {formula}",
                "\nArgs:",
                *(f"    {name}: {text}." for name, text in described),
                f"\nReturns:\n    {returns}",
                *([f"\nSource: {paper}."] if paper else []),
                "",
            ]
        )
        return function


def pointwise(
    name: str,
    expression: str,
    elements: Sequence[Element],
    parameters: Sequence[Parameter] = (),
    *,
    derivative: str = "",
    arguments: Sequence[Argument] = (),
) -> PatternKernel:
    """The kernel of an expression; it takes arrays, biases and parameters, in this order.

    Args:
        name: names the op in errors and prefixes its kernels.
        expression: in the names of the elements and the parameters.
        elements: where the values lie.
        parameters: 0-d inputs.
        derivative: of an expression in one element, where the derived one is slower or less
            accurate.
        arguments: what is checked.
    """
    value = parse(expression, (*(e.name for e in elements), *(p.name for p in parameters)))
    layout = _Layout(tuple(elements), tuple(p.name for p in parameters))
    return PatternKernel(
        name,
        layout.pattern((), (Output("y", value.metal(), layout.kind),)),
        (layout.arrays + layout.biases,),
        header=msl.header_for(value.metal()),
        arguments=arguments,
        vjp=_Gradients(name, layout, value, derivative).rule,
    )


class _Layout:
    """The operands of an expression whose elements lie as given."""

    def __init__(self, elements: tuple[Element, ...], parameters: tuple[str, ...]) -> None:
        self.elements = elements
        self.parameters = parameters
        self.arrays = unique(e.array for e in elements)
        self.biases = unique(e.bias for e in elements if e.bias)
        self.inputs = (*self.arrays, *self.biases, *parameters)
        plain = not self.biases and len(self.arrays) == len(elements)
        self.kind = "full" if plain else "row"
        data = tuple(
            Operand(f"{e.name}_data" if e.bias else e.name, self.kind,
                    array=e.array, part=e.part, parts=e.parts)
            for e in elements
        )  # fmt: skip
        columns = tuple(
            Operand(f"{e.name}_bias", "column", array=e.bias, part=e.part, parts=e.parts)
            for e in elements
            if e.bias
        )
        self.operands = (*data, *columns, *(Operand(p, "scalar") for p in parameters))
        self.lets = tuple(Let(e.name, f"{e.name}_data + {e.name}_bias") for e in elements if e.bias)

    def biased(self, biases: Sequence[str]) -> list[Element]:
        """The elements to which one of `biases` is added, in the order of its parts."""
        return sorted((e for e in self.elements if e.bias in biases), key=lambda e: e.part)

    def pattern(
        self, more: tuple[Operand, ...], outputs: tuple[Output, ...], lets: tuple[Let, ...] = ()
    ) -> Elementwise | Rowwise:
        """Outputs in terms of the elements, the parameters and further operands."""
        kind = Elementwise if self.kind == "full" else Rowwise
        return kind((*self.operands, *more), outputs, lets=(*self.lets, *lets))


class _Gradients:
    """The rule of an expression: kernels for whichever gradients are asked for, made when they
    first are."""

    def __init__(self, name: str, layout: _Layout, value: Expr, derivative: str) -> None:
        self._name = name
        self._layout = layout
        names = tuple(e.name for e in layout.elements)
        if derivative:
            given = (parse(f"dy * ({derivative})"),)
            block, gradients = shared(given, {}, {"dy", *names, *layout.parameters})
        else:
            block, gradients = Block().gradient([value], names, ["dy"])
        lets = [Let(n, e.metal(), "bool" if e.is_condition else "float") for n, e in block.lets]
        lets += [Let(f"d_{n}", g.metal()) for n, g in zip(names, gradients, strict=True)]
        self._lets = tuple(lets)
        self._header = msl.header_for("\n".join(let.expr for let in lets))
        self._kernel = cache(self._make)

    def rule(
        self, primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        """The vjp rule."""
        layout = self._layout
        names = {layout.inputs[i] for i in wanted}
        arrays = tuple(n for n in layout.arrays if n in names)
        biases = tuple(n for n in layout.biases if n in names)
        width = primals[0].shape[-1] // layout.elements[0].parts if biases else 0
        # What does not fit together is two launches.
        apart = bool(arrays and biases) and width > LONGEST_KEPT_ROW
        found: dict[str, list[mx.array]] = {}
        for some in ((arrays, ()), ((), biases)) if apart else ((arrays, biases),):
            if not any(some):
                continue
            kernel = self._kernel(*some, width > LONGEST_KEPT_ROW)
            results = kernel(*primals, cotangents[0])
            results = results if isinstance(results, tuple) else (results,)
            targets = (*some[0], *(e.bias for e in layout.biased(some[1])))
            for target, result in zip(targets, results, strict=True):
                found.setdefault(target, []).append(result)
        gradients: list[mx.array | None] = []
        for n, primal in zip(layout.inputs, primals, strict=True):
            parts = found.get(n)
            if parts is None:
                gradients.append(None)
            elif n in layout.arrays:
                gradients.append(parts[0])
            else:
                gradients.append(sum_chunks(mx.concatenate(parts, axis=-1), primal))
        return gradients

    def _make(self, arrays: tuple[str, ...], biases: tuple[str, ...], long: bool) -> PatternKernel:
        """The kernel of the gradients of `arrays`, and of the sums over chunks of rows that are
        those of `biases`."""
        layout = self._layout
        each = tuple(
            Output(f"d{e.name}", f"d_{e.name}", layout.kind, f"d{e.array}", e.part, e.parts)
            for e in layout.elements
            if e.array in arrays
        )
        kind = "row" if long else "column"
        sums = tuple(Output(f"d{e.name}_bias", f"d_{e.name}", kind) for e in layout.biased(biases))
        dy = Operand("dy", layout.kind)
        pattern: Elementwise | Rowwise | Columnwise
        if sums and long:
            lets = (*layout.lets, *self._lets)
            pattern = Columnwise((*layout.operands, dy), sums, lets)
        else:
            pattern = layout.pattern((dy,), (*each, *sums), self._lets)
        return PatternKernel(
            f"{self._name}/{'_'.join(unique(y.array or y.name for y in (*each, *sums)))}",
            pattern,
            (*((n,) for n in arrays), *(mx.float32 for _ in sums)),
            header=self._header,
        )
