"""Pointwise activations: a row each of formula, expression and reference.

Bytes: the forward reads x and writes y, the backward reads x and dy and writes dx. Arithmetic is in
float32. A gradient at a tie is that of MLX's maximum and minimum: 0 for relu at 0, 1 for leaky_relu
at 0, 0 for hardtanh at its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..arguments import Argument, check_finite, check_number, float32
from ..registry import Op, register
from .pointwise import Element, Parameter, Parameters, pointwise


def _wide(rng: np.random.Generator, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Any:
    """Numbers on both sides of ±3, the corners of hardswish and hardsigmoid."""
    return 3.0 * rng.standard_normal(shape)


def _positive(rng: np.random.Generator, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Any:
    return np.exp(rng.standard_normal(shape))


def _check_divisor(op: str, name: str, value: Any) -> float:
    """`value` as a finite float that is not 0 as a float32, or an error."""
    number = check_finite(op, name, value)
    if float32(number) == 0:
        raise ValueError(f"[{op}] '{name}' must not be 0 but got {value}.")
    return number


def _check_bound(op: str, name: str, value: Any) -> float:
    """`value` as a float, which may be infinite, or an error."""
    number = check_number(op, name, value)
    if number != number:
        raise ValueError(f"[{op}] '{name}' must be a number but got {value}.")
    return number


# ---- how a row becomes an op --------------------------------------------------------------------

_X = Argument("x", "(...)")


def _activation(
    name: str,
    summary: str,
    formula: str,
    expression: str,
    reference: Callable[..., Any],
    mlx: Callable[..., Any] | None,
    torch: str,
    *,
    derivative: str = "",
    parameters: tuple[Parameter, ...] = (),
    gradient: str = "",
    paper: str = "",
    sample: Callable[..., Any] | None = None,
) -> Callable[..., mx.array]:
    """The public function of a row, registered.

    Args:
        name, summary, formula, gradient, paper: for the catalogue and the docstring.
        expression: in the language of `zmlx.expr`, in x and the parameters.
        reference: MLX's formula, of the namespace, x and the parameters.
        mlx: MLX's own function.
        torch: the same in torch.
        derivative: dy/dx where the derived one cancels, overflows or costs more.
        parameters: options.
        sample: draws x in tests.
    """
    options = Parameters(name, parameters)
    kernel = pointwise(
        name,
        expression,
        (Element("x", "x"),),
        parameters,
        derivative=derivative,
        arguments=(_X,),
    )

    def plain(x: mx.array) -> mx.array:
        return kernel(x)  # type: ignore[no-any-return]

    def with_options(x: mx.array, **given: float) -> mx.array:
        return kernel(x, *options.arrays(given))  # type: ignore[no-any-return]

    function = options.publish(
        with_options if parameters else plain,
        __name__,
        summary,
        formula,
        {"x": "any shape, in float32, float16 or bfloat16; computed in float32"},
        f"An array of x's shape and dtype. {gradient or 'Gradient for x.'}",
        paper,
    )
    register(
        Op(
            name=name,
            family="activations",
            summary=summary,
            formula=formula,
            function=function,
            reference=lambda x, *, xp=mx, **given: reference(xp, x, **options.complete(given)),
            arguments=(_X,),
            options=options.registered,
            outputs=("(...)",),
            baseline=mlx,
            paper=paper,
            reads_backward=("x",),
            torch=torch,
            samples={"x": sample} if sample else {},
        )
    )
    return function


# ---- rows ----------------------------------------------------------------------------------------

_ALPHA = Parameter("alpha", 1.0, "minus the limit at -∞", (0.5,))
_GELU = "Hendrycks & Gimpel 2016, arXiv:1606.08415"

# fmt: off
relu = _activation(
    "relu", "rectified linear unit", "max(x, 0)",
    "max(x, 0)",
    lambda xp, x: xp.maximum(x, 0),
    nn.relu, "F.relu(x)",
)

relu2 = _activation(
    "relu2", "squared rectified linear unit", "max(x, 0)²",
    "square(max(x, 0))",
    lambda xp, x: xp.square(xp.maximum(x, 0)),
    nn.relu2, "F.relu(x).square()",
    paper="So et al. 2021, arXiv:2109.08668",
)

leaky_relu = _activation(
    "leaky_relu", "leaky rectified linear unit", "max(negative_slope · x, x)",
    "max(negative_slope * x, x)",
    lambda xp, x, negative_slope: xp.maximum(negative_slope * x, x),
    nn.leaky_relu, "F.leaky_relu(x, negative_slope)",
    derivative="negative_slope * x > x ? negative_slope : 1",
    parameters=(Parameter("negative_slope", 0.01, "slope below 0", (0.2, 1.5)),),
)

elu = _activation(
    "elu", "exponential linear unit", "x for x > 0, else alpha · (exp(x) - 1)",
    "x > 0 ? x : alpha * expm1(x > 0 ? 0 : x)",
    lambda xp, x, alpha: xp.where(x > 0, x, alpha * (xp.exp(x) - 1)),
    nn.elu, "F.elu(x, alpha)",
    derivative="x > 0 ? 1 : alpha * exp(x)",
    parameters=(_ALPHA,),
    gradient="Gradient for x, finite for large x where MLX's is NaN.",
    paper="Clevert et al. 2015, arXiv:1511.07289",
)

selu = _activation(
    "selu", "scaled exponential linear unit", "1.0507 · elu(x, alpha=1.67326)",
    "1.0507 * (x > 0 ? x : 1.67326 * expm1(x > 0 ? 0 : x))",
    lambda xp, x: 1.0507 * xp.where(x > 0, x, 1.67326 * (xp.exp(x) - 1)),
    nn.selu, "1.0507 * F.elu(x, 1.67326)",
    derivative="1.0507 * (x > 0 ? 1 : 1.67326 * exp(x))",
    gradient="Gradient for x, finite for large x where MLX's is NaN.",
    paper="Klambauer et al. 2017, arXiv:1706.02515",
)

celu = _activation(
    "celu", "continuously differentiable exponential linear unit",
    "max(x, 0) + alpha · (exp(min(x, 0) / alpha) - 1)",
    "max(x, 0) + alpha * expm1((x > 0 ? 0 : x) / alpha)",
    lambda xp, x, alpha: xp.maximum(x, 0) + alpha * (xp.exp(xp.minimum(x, 0) / alpha) - 1),
    nn.celu, "F.celu(x, alpha)",
    derivative="exp((x > 0 ? 0 : x) / alpha)",
    parameters=(replace(_ALPHA, meaning="minus the limit at -∞, not 0", check=_check_divisor),),
    gradient="Gradient for x, at 0 the derivative 1 where MLX's is 0.",
    paper="Barron 2017, arXiv:1704.07483",
)

silu = _activation(
    "silu", "sigmoid linear unit, also called swish", "x · sigmoid(x)",
    "silu(x)",
    lambda xp, x: x * xp.sigmoid(x),
    nn.silu, "F.silu(x)",
    paper="Elfwing et al. 2017, arXiv:1702.03118",
)

gelu = _activation(
    "gelu", "Gaussian error linear unit", "x · (1 + erf(x / √2)) / 2",
    "gelu(x)",
    lambda xp, x: x * ((1 + xp.erf(x / 2**0.5)) / 2),
    nn.gelu, "F.gelu(x)",
    paper=_GELU,
)

gelu_tanh = _activation(
    "gelu_tanh", "Gaussian error linear unit by tanh, mlx.nn's gelu_approx",
    "x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2",
    "gelu_tanh(x)",
    lambda xp, x: 0.5 * x * (1 + xp.tanh((2 / xp.pi) ** 0.5 * (x + 0.044715 * x**3))),
    nn.gelu_approx, "F.gelu(x, approximate='tanh')",
    paper=_GELU,
)

gelu_quick = _activation(
    "gelu_quick", "Gaussian error linear unit by sigmoid, mlx.nn's gelu_fast_approx",
    "x · sigmoid(1.702 · x)",
    "x * sigmoid(1.702 * x)",
    lambda xp, x: x * xp.sigmoid(1.702 * x),
    nn.gelu_fast_approx, "x * torch.sigmoid(1.702 * x)",
    paper=_GELU,
)

mish = _activation(
    "mish", "mish", "x · tanh(log(1 + exp(x)))",
    "mish(x)",
    lambda xp, x: x * xp.tanh(xp.logaddexp(x, 0.0)),
    nn.mish, "F.mish(x)",
    paper="Misra 2019, arXiv:1908.08681",
)

softplus = _activation(
    "softplus", "smooth rectifier", "log(1 + exp(x))",
    "softplus(x)",
    lambda xp, x: xp.logaddexp(x, 0.0),
    nn.softplus, "F.softplus(x)",
)

softsign = _activation(
    "softsign", "softsign", "x / (1 + |x|)",
    "x / (1 + abs(x))",
    lambda xp, x: x / (1 + xp.abs(x)),
    nn.softsign, "F.softsign(x)",
    derivative="1 / square(1 + abs(x))",
)

sigmoid = _activation(
    "sigmoid", "logistic function", "1 / (1 + exp(-x))",
    "sigmoid(x)",
    lambda xp, x: xp.sigmoid(x),
    mx.sigmoid, "torch.sigmoid(x)",
    derivative="exp(-abs(x)) / square(1 + exp(-abs(x)))",
)

log_sigmoid = _activation(
    "log_sigmoid", "logarithm of the logistic function", "-log(1 + exp(-x))",
    "log_sigmoid(x)",
    lambda xp, x: -xp.logaddexp(-x, 0.0),
    nn.log_sigmoid, "F.logsigmoid(x)",
)

tanh = _activation(
    "tanh", "hyperbolic tangent", "tanh(x)",
    "tanh(x)",
    lambda xp, x: xp.tanh(x),
    mx.tanh, "torch.tanh(x)",
    derivative="4 * exp(-2 * abs(x)) / square(1 + exp(-2 * abs(x)))",
)

hardswish = _activation(
    "hardswish", "piecewise silu", "x · min(max(x + 3, 0), 6) / 6",
    "x * (min(max(x + 3, 0), 6) / 6)",
    lambda xp, x: x * (xp.minimum(xp.maximum(x + 3, 0), 6) / 6),
    nn.hardswish, "F.hardswish(x)",
    derivative="min(max(x + 3, 0), 6) / 6 + (abs(x) < 3 ? x / 6 : 0)",
    paper="Howard et al. 2019, arXiv:1905.02244",
    sample=_wide,
)

hardsigmoid = _activation(
    "hardsigmoid", "piecewise logistic function", "min(max(x + 3, 0), 6) / 6",
    "min(max(x + 3, 0), 6) / 6",
    lambda xp, x: xp.minimum(xp.maximum(x + 3, 0), 6) / 6,
    None, "F.hardsigmoid(x)",
    derivative="abs(x) < 3 ? 0.16666667 : 0",
    sample=_wide,
)

hardtanh = _activation(
    "hardtanh", "clipped identity", "min(max(x, min_val), max_val)",
    "min(max(x, min_val), max_val)",
    lambda xp, x, min_val, max_val: xp.minimum(xp.maximum(x, min_val), max_val),
    nn.hard_tanh, "F.hardtanh(x, min_val, max_val)",
    derivative="(x > min_val ? 1 : 0) * (x < max_val ? 1 : 0)",
    parameters=(
        Parameter("min_val", -1.0, "lower bound, -∞ for none", (-0.25,), _check_bound),
        Parameter("max_val", 1.0, "upper bound, ∞ for none; one below min_val is y everywhere, as"
                  " in MLX", (0.75,), _check_bound),
    ),
)

exp = _activation(
    "exp", "exponential", "exp(x)",
    "exp(x)",
    lambda xp, x: xp.exp(x),
    mx.exp, "torch.exp(x)",
)

log = _activation(
    "log", "natural logarithm", "log(x)",
    "log(x)",
    lambda xp, x: xp.log(x),
    mx.log, "torch.log(x)",
    gradient="Gradient for x. The value at 0 is -∞, below 0 NaN.",
    sample=_positive,
)
# fmt: on
