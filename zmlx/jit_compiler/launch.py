"""The launch of a jitted function on arrays: one elementwise kernel, and one for its gradient."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache, reduce
from typing import TYPE_CHECKING

import mlx.core as mx

from ..arguments import BOOLEAN, FLOATING
from ..broadcasting import (
    BroadcastFunction,
    Decides,
    each_kind,
    elementwise_pattern,
    gradient_dtypes,
    gradient_names,
    gradients_of,
    operands_of,
)
from ..codegen import Let, Operand, Output, name_beside
from ..pattern import DtypeRule, PatternKernel
from ..transforms import Arrays, Reference
from . import emit

if TYPE_CHECKING:
    from .compiler import JitFunction

_DTYPES = {"float": FLOATING, "int": (mx.int32,), "bool": BOOLEAN}
_RESULTS = {"int": mx.int32, "bool": mx.bool_}


class Launch(BroadcastFunction):
    """A jitted function as kernels, by the kinds of its operands."""

    def __init__(self, function: JitFunction) -> None:
        # Python's names, because errors show them; Metal's may differ.
        names = inspect.signature(function.function).parameters
        types = function.inputs.values()
        super().__init__(function.name, {n: _DTYPES[t] for n, t in zip(names, types, strict=True)})
        self.function = function

    def _build(self, kinds: tuple[str, ...], decides: Decides) -> PatternKernel:
        function, each = self.function, each_kind(kinds)
        names = list(function.inputs)
        floats = [n for n, t in function.inputs.items() if t == "float"]
        float_outputs = [y for y, t in function.outputs.items() if t == "float"]
        cotangents_of: dict[str, str] = {}
        for y in float_outputs:
            cotangents_of[y] = name_beside(f"d{y}", [*names, *cotangents_of.values()])
        taken = {*names, *function.outputs, *cotangents_of.values()}
        operands = operands_of(function.inputs, kinds, taken)
        named = gradient_names(names, taken.union(x.name for x in operands))
        rule: DtypeRule = mx.float32
        if isinstance(decides, mx.Dtype):
            rule = decides
        elif deciding := tuple(n for n, d in zip(names, decides, strict=True) if d and n in floats):
            rule = deciding

        def vjp(
            primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
        ) -> list[mx.array | None]:
            types = function.outputs.values()
            some = [c for c, t in zip(cotangents, types, strict=True) if t == "float"]
            which = tuple(i for i in sorted(wanted) if names[i] in floats)
            if not which:
                return [None] * len(primals)
            return gradients_of(backward, which, primals, some, kinds)

        @cache
        def backward(wanted: tuple[int, ...]) -> PatternKernel:
            result, fields = _result(function.derivative, function)
            some = [names[i] for i in wanted]
            return PatternKernel(
                f"{emit.ascii_name(function.name)}/gradient",
                elementwise_pattern(
                    operands + tuple(Operand(c, each) for c in cotangents_of.values()),
                    tuple(
                        Output(
                            named[x],
                            _sum_over_outputs(
                                {c: fields[f"{y}_d_{x}"] for y, c in cotangents_of.items()}
                            ),
                            each,
                        )
                        for x in some
                    ),
                    (result,),
                ),
                gradient_dtypes(some, [kinds[i] for i in wanted], each),
                header=function.derivative.header,
                reference=self._gradient_reference(wanted, float_outputs, kinds),
            )

        result, fields = _result(function.value, function)
        return PatternKernel(
            emit.ascii_name(function.name),
            elementwise_pattern(
                operands, tuple(Output(y, fields[y], each) for y in function.outputs), (result,)
            ),
            tuple(_RESULTS.get(t, rule) for t in function.outputs.values()),
            header=function.value.header,
            reference=lambda *arrays: function.trace_reference(*_broadcasting(arrays, kinds)),
            vjp=vjp if floats and float_outputs else None,
        )

    def _gradient_reference(
        self, which: Sequence[int], float_outputs: list[str], kinds: Sequence[str]
    ) -> Reference:
        function = self.function
        count = len(function.inputs) + kinds.count("shared")
        kept = [i for i, y in enumerate(function.outputs) if y in float_outputs]

        def reference(*arrays: mx.array) -> tuple[mx.array, ...]:
            primals, cotangents = _broadcasting(arrays[:count], kinds), arrays[count:]

            def of(*some: mx.array) -> list[mx.array]:
                full = list(primals)
                for i, x in zip(which, some, strict=True):
                    full[i] = x
                outputs = function.trace_reference(*full)
                return [outputs[i] for i in kept]

            # Broadcast first, so that a gradient is one per element, as the kernel's is.
            points = [mx.broadcast_arrays(primals[i], cotangents[0])[0] for i in which]
            if len(cotangents) == 1:
                return tuple(mx.vjp(of, points, list(cotangents))[1])
            parts = []
            for k, c in enumerate(cotangents):
                found = mx.vjp(lambda *some, k=k: [of(*some)[k]], points, [c])[1]
                parts.append([mx.where(mx.logical_and(c == 0, mx.isnan(g)), 0, g) for g in found])
            return tuple(reduce(mx.add, some) for some in zip(*parts, strict=True))

        return reference


def _sum_over_outputs(slopes: dict[str, str]) -> str:
    """Σ cotangent · slope. Of several outputs one that nobody uses has the cotangent 0 and counts
    nothing, where its slope is infinite, too."""
    if len(slopes) == 1:
        ((c, slope),) = slopes.items()
        return f"{c} * {slope}"
    return " + ".join(
        f"({c} == 0.0f && !isfinite({slope}) ? 0.0f : {c} * {slope})" for c, slope in slopes.items()
    )


def _broadcasting(arrays: Arrays, kinds: Sequence[str]) -> list[mx.array]:
    """Operands that broadcast by MLX's rules, without the numbers of rows that follow them."""
    return [
        mx.expand_dims(x, -1) if kind == "per_row" else x
        for x, kind in zip(arrays, kinds, strict=False)
    ]


def _result(text: emit.Text, function: JitFunction) -> tuple[Let, dict[str, str]]:
    """The let that calls the function, and the expression of each of its results."""
    name = name_beside("result", function.inputs)
    let = Let(name, f"{text.call}({', '.join(function.inputs)})", text.type)
    if len(text.results) == 1:
        return let, {next(iter(text.results)): name}
    return let, {field: f"{name}.{field}" for field in text.results}
