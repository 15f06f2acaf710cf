"""Gated linear units: activation(gate) · up.

A unit has two forms, which both take biases. `swiglu(gate, up)` takes two arrays,
`swiglu_packed(x)` the two halves of the last axis of one, as a product with both weights at once
leaves them: the gate first, but for `glu_packed`, which is `mlx.nn.glu` and has the gate second.
Gates and ups that alternate (gpt-oss) are two arrays, `x[..., ::2]` and `x[..., 1::2]`.

Bytes: the forward reads gate and up and writes y; the backward reads gate, up and dy and writes
both gradients, and sums those of the biases over the rows, in float32, in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..arguments import Argument, check_not_negative
from ..pattern import PatternKernel
from ..registry import BENCHMARK_ROWS, ROWS, Case, Op, register
from .pointwise import Element, Parameter, Parameters, pointwise

Function = Callable[..., mx.array]

# ---- how a row becomes an op --------------------------------------------------------------------

_PAIR = (
    Argument("gate"),
    Argument("up"),
    Argument("gate_bias", "(D,)", optional=True),
    Argument("up_bias", "(D,)", optional=True),
)
_PACKED = (Argument("x", "(*, 2D)"), Argument("bias", "(2D,)", optional=True))

#: With biases and without.
_PLAIN = tuple(replace(case, optional=False) for case in ROWS[1:6])
_CASES = (*ROWS[:6], *_PLAIN, *ROWS[6:])
_BENCHMARKS = (
    *(replace(case, optional=False) for case in BENCHMARK_ROWS),
    Case((4096,), {"D": 2048}, "with biases"),
)

_BIAS = "None for none; its gradient is summed over all leading axes in float32"


@dataclass(frozen=True)
class _Unit:
    """A row of the table.

    Attributes:
        name, summary, formula, paper: for the catalogue.
        expression: in the language of `zmlx.expr`, in gate, up and the parameters.
        reference: the same of the namespace, gate, up and the parameters.
        torch: the same in torch, of {gate} and {up}.
        parameters: options.
        gate: which half of the packed form is the gate.
        mlx: MLX's own packed function.
    """

    name: str
    summary: str
    formula: str
    expression: str
    reference: Callable[..., Any]
    torch: str
    parameters: tuple[Parameter, ...] = ()
    paper: str = "Shazeer 2020, arXiv:2002.05202"
    gate: int = 0
    mlx: Callable[..., Any] | None = None

    def forms(self) -> tuple[Function, Function]:
        """The public functions, registered: of two arrays, and of one."""
        return self._pair(), self._packed()

    def _kernel(
        self, name: str, elements: tuple[Element, ...], arguments: tuple[Argument, ...]
    ) -> PatternKernel:
        return pointwise(name, self.expression, elements, self.parameters, arguments=arguments)

    def _pair(self) -> Function:
        """The form of two arrays, registered."""
        options = Parameters(self.name, self.parameters)

        @cache
        def kernel(gate_bias: bool, up_bias: bool) -> PatternKernel:
            return self._kernel(
                self.name,
                (
                    Element("gate", "gate", bias="gate_bias" if gate_bias else ""),
                    Element("up", "up", bias="up_bias" if up_bias else ""),
                ),
                _PAIR,
            )

        def function(
            gate: mx.array,
            up: mx.array,
            gate_bias: mx.array | None = None,
            up_bias: mx.array | None = None,
            **given: float,
        ) -> mx.array:
            biases = [b for b in (gate_bias, up_bias) if b is not None]
            chosen = kernel(gate_bias is not None, up_bias is not None)
            return chosen(gate, up, *biases, *options.arrays(given))  # type: ignore[no-any-return]

        def reference(
            gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None, *, xp: Any = mx,
            **given: float,
        ) -> Any:  # fmt: skip
            gate = gate if gate_bias is None else gate + gate_bias
            up = up if up_bias is None else up + up_bias
            return self.reference(xp, gate, up, **options.complete(given))

        options.publish(
            function,
            __name__,
            self.summary,
            self.formula,
            {
                "gate, up": "(*, D) in float32, float16 or bfloat16; computed in float32",
                "gate_bias, up_bias": f"(D,) added to gate and up, or {_BIAS}",
            },
            "An array of shape (*, D) and the promoted dtype. Gradients for all arrays.",
            self.paper,
        )
        return self._register(
            self.name, "", function, reference, options, _PAIR,
            self.torch.format(
                gate="(gate if gate_bias is None else gate + gate_bias)",
                up="(up if up_bias is None else up + up_bias)",
            ),
        )  # fmt: skip

    def _packed(self) -> Function:
        """The form of one array, registered."""
        name = f"{self.name}_packed"
        options = Parameters(name, self.parameters)

        @cache
        def kernel(biased: bool) -> PatternKernel:
            bias = "bias" if biased else ""
            return self._kernel(
                name,
                (
                    Element("gate", "x", self.gate, 2, bias),
                    Element("up", "x", 1 - self.gate, 2, bias),
                ),
                _PACKED,
            )

        def function(x: mx.array, bias: mx.array | None = None, **given: float) -> mx.array:
            values = options.arrays(given)
            if bias is None:
                return kernel(False)(x, *values)  # type: ignore[no-any-return]
            return kernel(True)(x, bias, *values)  # type: ignore[no-any-return]

        def reference(x: Any, bias: Any = None, *, xp: Any = mx, **given: float) -> Any:
            x = x if bias is None else x + bias
            width = x.shape[-1] // 2
            halves = x[..., :width], x[..., width:]
            gate, up = halves[self.gate], halves[1 - self.gate]
            return self.reference(xp, gate, up, **options.complete(given))

        order = ("the gate, then up", "up, then the gate")[self.gate]
        options.publish(
            function,
            __name__,
            f"{self.summary}, of the halves of one array",
            self.formula,
            {
                "x": f"(*, 2D), {order}, in float32, float16 or bfloat16; computed in float32",
                "bias": f"(2D,) added to x, or {_BIAS}",
            },
            "An array of shape (*, D) and the promoted dtype. Gradients for x and bias.\n"
            f"    In a shapeless compile MLX splits no axis: give the halves to `{self.name}`.",
            self.paper,
        )
        whole = "(x if bias is None else x + bias)"
        halves = [f"{whole}.chunk(2, -1)[{i}]" for i in (self.gate, 1 - self.gate)]
        return self._register(
            name, ", packed", function, reference, options, _PACKED,
            self.torch.format(gate=halves[0], up=halves[1]), self.mlx,
            {"shapeless compile": f"MLX splits no axis there: give the halves to {self.name}"},
        )  # fmt: skip

    def _register(
        self,
        name: str,
        form: str,
        function: Function,
        reference: Callable[..., Any],
        options: Parameters,
        arguments: tuple[Argument, ...],
        torch: str,
        mlx: Callable[..., Any] | None = None,
        refuses: Mapping[str, str] | None = None,
    ) -> Function:
        register(
            Op(
                name=name,
                family="gated",
                summary=f"{self.summary}{form}",
                formula=self.formula,
                function=function,
                reference=reference,
                arguments=arguments,
                options=options.registered,
                baseline=mlx,
                paper=self.paper,
                reads_backward=tuple(a.name for a in arguments),
                cases=_CASES,
                benchmarks=_BENCHMARKS,
                refuses=refuses or {},
                torch=torch,
            )
        )
        return function


# ---- rows ----------------------------------------------------------------------------------------

# fmt: off
glu, glu_packed = _Unit(
    "glu", "gated linear unit", "sigmoid(gate) · up",
    "sigmoid(gate) * up",
    lambda xp, gate, up: xp.sigmoid(gate) * up,
    "torch.sigmoid({gate}) * {up}",
    paper="Dauphin et al. 2016, arXiv:1612.08083",
    gate=1,
    mlx=nn.glu,
).forms()

swiglu, swiglu_packed = _Unit(
    "swiglu", "SiLU-gated linear unit", "gate · sigmoid(gate) · up",
    "gate * sigmoid(gate) * up",
    lambda xp, gate, up: gate * xp.sigmoid(gate) * up,
    "F.silu({gate}) * {up}",
).forms()

geglu, geglu_packed = _Unit(
    "geglu", "GELU-gated linear unit", "gate · (1 + erf(gate / √2)) / 2 · up",
    "gelu(gate) * up",
    lambda xp, gate, up: gate * ((1 + xp.erf(gate / 2**0.5)) / 2) * up,
    "F.gelu({gate}) * {up}",
).forms()

geglu_tanh, geglu_tanh_packed = _Unit(
    "geglu_tanh", "GELU-gated linear unit by tanh",
    "gate · (1 + tanh(√(2/π) · (gate + 0.044715 · gate³))) / 2 · up",
    "gelu_tanh(gate) * up",
    lambda xp, gate, up: 0.5 * gate
    * (1 + xp.tanh((2 / xp.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up,
    "F.gelu({gate}, approximate='tanh') * {up}",
).forms()

reglu, reglu_packed = _Unit(
    "reglu", "ReLU-gated linear unit", "max(gate, 0) · up",
    "max(gate, 0) * up",
    lambda xp, gate, up: xp.maximum(gate, 0) * up,
    "F.relu({gate}) * {up}",
).forms()

swiglu_clamped, swiglu_clamped_packed = _Unit(
    "swiglu_clamped", "clamped SiLU-gated linear unit of gpt-oss",
    "g · sigmoid(alpha · g) · (clip(up, -limit, limit) + 1) with g = min(gate, limit)",
    "min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clip(up, -limit, limit) + 1)",
    lambda xp, gate, up, alpha, limit: xp.minimum(gate, limit)
    * xp.sigmoid(alpha * xp.minimum(gate, limit))
    * (xp.minimum(xp.maximum(up, -limit), limit) + 1),
    "{gate}.clamp(max=limit) * torch.sigmoid(alpha * {gate}.clamp(max=limit))"
    " * ({up}.clamp(-limit, limit) + 1)",
    parameters=(
        Parameter("alpha", 1.702, "slope of the sigmoid", (1.0,)),
        Parameter("limit", 7.0, "upper bound of gate, and bound of up on both sides, at least 0",
                  (0.75,), check_not_negative),
    ),
    paper="OpenAI 2025, gpt-oss-120b & gpt-oss-20b model card, arXiv:2508.10925",
).forms()
# fmt: on
