"""Divergences between distributions.

    kl_div    t · (log t - x)                                              (Kullback & Leibler 1951)
    js_div    β · p · (log p - log m) + (1 - β) · q · (log q - log m)      (Lin 1991)
              with m = β · p + (1 - β) · q

Here x = log q is the input and t = p (or, with log_target, log p) the target, as in PyTorch. A term
whose probability is 0 is 0.

Bytes: the forward reads both arrays and writes the loss; the backward reads both and writes the
gradients that are asked for. Nothing is kept between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import log
from typing import Any

import mlx.core as mx

from ..arguments import Argument, check, check_flag, check_number, float32
from ..codegen import Elementwise, Let, Operand, Output, Pass, Reduce, Rowwise
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays
from .loss_reductions import REDUCTIONS, check_reduction, reduced

_REDUCTIONS = (*REDUCTIONS, "batchmean")


def _reduced_reference(loss: Any, reduction: str, xp: Any) -> Any:
    if reduction == "none":
        return loss
    count = {"sum": 1, "mean": loss.size, "batchmean": loss.shape[0] if loss.ndim else 1}
    return xp.sum(loss) / count[reduction]


def _probability(x: Any, is_log: bool, xp: Any) -> tuple[Any, Any, Any]:
    """Probabilities, their logarithms (0 for that of 0, so that nothing is infinite), and which
    are 0. Those have no gradient."""
    none = (xp.exp(x) if is_log else x) == 0
    if is_log:
        log_p = xp.where(none, 0.0, x)
        return xp.where(none, 0.0, xp.exp(log_p)), log_p, none
    return xp.where(none, 0.0, x), xp.log(xp.where(none, 1.0, x)), none


def kl_div_reference(
    input: mx.array,
    target: mx.array,
    *,
    reduction: str = "mean",
    log_target: bool = False,
    xp: Any = mx,
) -> Any:
    """kl_div in plain MLX."""
    p, log_p, none = _probability(target, log_target, xp)
    return _reduced_reference(p * xp.where(none, 0.0, log_p - input), reduction, xp)


def js_div_reference(
    input: mx.array,
    target: mx.array,
    *,
    beta: float = 0.5,
    reduction: str = "mean",
    log_target: bool = False,
    xp: Any = mx,
) -> Any:
    """js_div in plain MLX."""
    p, log_p, _ = _probability(target, log_target, xp)
    q, log_q, _ = _probability(input, True, xp)
    m = beta * p + (1 - beta) * q
    log_m = xp.where(m == 0, log_p + log(beta), xp.log(xp.where(m == 0, 1.0, m)))
    loss = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    return _reduced_reference(loss, reduction, xp)


# ---- kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Divergence:
    """A divergence of elements x and t: its lets, its value, and its derivatives."""

    name: str
    lets: tuple[Let, ...]
    value: str
    dx: str
    dt: str
    scalars: tuple[Operand, ...] = ()


def _divergence(name: str, log_target: bool) -> _Divergence:
    # A logarithm of 0 is replaced before it is multiplied, so that no derivative is infinite.
    known = (Let("p", "exp(t)"), Let("log_p", "p == 0.0f ? 0.0f : t"))
    if not log_target:
        zero = Let("p", "t == 0.0f ? 0.0f : t")  # without a derivative
        known = (zero, Let("log_p", "log(t == 0.0f ? 1.0f : t)"))
    if name == "kl_div":
        gap = Let("gap", "p == 0.0f ? 0.0f : log_p - x")
        dt = "p * (gap + 1.0f)" if log_target else "p == 0.0f ? 0.0f : gap + 1.0f"
        return _Divergence(name, (*known, gap), "p * gap", "0.0f - p", dt)
    lets = (
        *known,
        Let("q", "exp(x)"),
        Let("m", "beta * p + (1.0f - beta) * q"),
        Let("log_q", "q == 0.0f ? 0.0f : x"),
        # 0 where β p rounds to it, though p does not.
        Let("log_m", "m == 0.0f ? log_p + log(beta) : log(m == 0.0f ? 1.0f : m)"),
        Let("of_p", "beta * p * (log_p - log_m)"),
        Let("of_q", "(1.0f - beta) * q * (log_q - log_m)"),
    )
    dt = "of_p" if log_target else "p == 0.0f ? 0.0f : beta * (log_p - log_m)"
    return _Divergence(name, lets, "of_p + of_q", "of_q", dt, (Operand("beta", "scalar"),))


def _elements(divergence: _Divergence, kind: str) -> tuple[Operand, ...]:
    return Operand("x", kind, array="input"), Operand("t", kind, array="target")


@cache
def _gradient(name: str, log_target: bool, rows: bool, wanted: tuple[int, ...]) -> PatternKernel:
    """The gradients of the wanted of input and target, from a cotangent per row or per element."""
    divergence = _divergence(name, log_target)
    kind = "row" if rows else "full"
    g = Operand("dloss", "per_row" if rows else "full")
    named = (("dinput", divergence.dx, "input"), ("dtarget", divergence.dt, "target"))
    lets = (*divergence.lets, Let("at_input", divergence.dx), Let("at_target", divergence.dt))
    inputs = (*_elements(divergence, kind), *divergence.scalars, g)
    outputs = tuple(
        Output(named[i][0], f"dloss * at_{named[i][2]}", "row" if rows else "full") for i in wanted
    )
    dtypes = tuple((named[i][2],) for i in wanted)
    pattern = Rowwise(inputs, outputs, lets=lets) if rows else Elementwise(inputs, outputs, lets)
    return PatternKernel(f"{name}/gradient", pattern, dtypes)


@cache
def _forward(name: str, log_target: bool, rows: bool) -> PatternKernel:
    """The sum of every row, or every element, in float32."""
    divergence = _divergence(name, log_target)

    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        some = tuple(i for i in wanted if i < 2)
        found: list[mx.array | None] = [None] * len(primals)
        if some:
            result = _gradient(name, log_target, rows, some)(*primals, cotangents[0])
            for i, x in zip(some, result if len(some) > 1 else (result,), strict=True):
                found[i] = x
        return found

    inputs = (*_elements(divergence, "row" if rows else "full"), *divergence.scalars)
    if rows:
        element = Let("element", divergence.value)
        pattern: Rowwise | Elementwise = Rowwise(
            inputs,
            (Output("loss", "total", "per_row"),),
            (Pass((Reduce("total", "sum", "element"),)),),
            lets=(*divergence.lets, element),
        )
    else:
        pattern = Elementwise(inputs, (Output("loss", divergence.value, "full"),), divergence.lets)
    return PatternKernel(name, pattern, (mx.float32,), arguments=_ARGUMENTS, vjp=vjp)


# ---- ops ----------------------------------------------------------------------------------------

_ARGUMENTS = (Argument("input", "(...)"), Argument("target", "(...)"))


def _count(x: mx.array, reduction: str) -> int | mx.array:
    """What a mean divides by; counted from the elements, not in float32, where a shapeless compile
    may change the shape."""
    if not cpu.any_shape((x,)):
        return x.size if reduction == "mean" else x.shape[0]
    ones = mx.stop_gradient(mx.ones_like(x).astype(mx.int32))
    # Of all elements: where an axis of 1 is reduced, MLX's Reduce of another trace reads beyond it.
    return ones.sum() if reduction == "mean" else mx.cumsum(ones, axis=0).max()


def _check_beta(beta: float) -> mx.array:
    """The weight of the target, as the kernels take it."""
    value = check_number("js_div", "beta", beta)
    if not 0 < float32(value) < 1:
        raise ValueError(
            f"[js_div] 'beta' must be between 0 and 1 (kl_div is its limit at both) but got {beta}."
        )
    return scalar(value)


def _looked_at(
    name: str, input: mx.array, target: mx.array, reduction: str, log_target: bool, *beta: float
) -> Way:
    scalars = tuple(_check_beta(b) for b in beta)
    check_reduction(name, reduction, _REDUCTIONS)
    check(name, _ARGUMENTS, (input, target))
    rows = reduction != "none" and input.ndim > 0
    losses = _forward(name, check_flag(name, "log_target", log_target), rows)
    dtype = mx.result_type(input.dtype, target.dtype)

    def run(input: mx.array, target: mx.array) -> mx.array:
        loss = losses(input, target, *scalars)
        if rows:
            # A row is summed in its kernel; the mean is over elements, and so divides once more.
            loss = reduced(loss, "sum")
            if reduction != "sum":
                loss = loss / _count(input, reduction)
        return loss.astype(dtype)  # type: ignore[no-any-return]

    return run


_KL_DIV = Remembered(partial(_looked_at, "kl_div"))
_JS_DIV = Remembered(partial(_looked_at, "js_div"))


def kl_div(
    input: mx.array,
    target: mx.array,
    *,
    reduction: str = "mean",
    log_target: bool = False,
) -> mx.array:
    """The Kullback-Leibler divergence KL(target ‖ input), as `torch.nn.functional.kl_div`.

        loss = target · (log target - input), or exp(target) · (target - input) with log_target

    Args:
        input: log-probabilities, any shape, in float32, float16 or bfloat16; computed in float32.
        target: probabilities of the same shape, or log-probabilities with `log_target`. An element
            whose probability is 0 has loss 0, and gradient 0 in both arrays.
        reduction: "none" for a loss per element, "mean" over all elements, "sum", or "batchmean":
            the sum divided by the length of the first axis, which is the divergence as defined.
        log_target: whether target holds log-probabilities.

    `mlx.nn.losses.kl_div_loss(inputs, targets, axis)` is this with `log_target=True`, summed over
    `axis`; its "mean" divides by the number of distributions and not of elements, and for arrays of
    two axes so is "batchmean" here.

    Returns:
        The loss in the promoted dtype of both, reduced in float32. Gradients for both.
    """
    return _KL_DIV((input, target), (reduction, log_target))  # type: ignore[no-any-return]


def js_div(
    input: mx.array,
    target: mx.array,
    *,
    beta: float = 0.5,
    reduction: str = "mean",
    log_target: bool = False,
) -> mx.array:
    """The generalised Jensen-Shannon divergence between input and target.

        loss = β · p · (log p - log m) + (1 - β) · q · (log q - log m),  m = β · p + (1 - β) · q

    with q = exp(input) and p = target, or exp(target) with log_target: β · KL(p ‖ m) +
    (1 - β) · KL(q ‖ m). β = 0.5 is symmetric, and at most log 2 for a pair of distributions; near
    its ends the divergence divided by β (or 1 - β) approaches KL(p ‖ q) (or KL(q ‖ p)), for which
    there is `kl_div`.

    Args:
        input: log-probabilities, any shape, in float32, float16 or bfloat16; computed in float32.
        target: probabilities of the same shape, or log-probabilities with `log_target`.
        beta: the weight of the target in the mixture, between 0 and 1; a new one compiles nothing.
        reduction, log_target: as in `kl_div`.

    Returns:
        The loss in the promoted dtype of both, reduced in float32. Gradients for both; that of a
        target probability of 0 is 0.
    """
    return _JS_DIV((input, target), (reduction, log_target, beta))  # type: ignore[no-any-return]


_SHARED: dict[str, Any] = {
    "family": "losses",
    "arguments": _ARGUMENTS,
    "outputs": ("()",),
    "reads_backward": ("input", "target"),
    "cases": (
        Case((3,), {"D": 1}, "one element a row"),
        Case((2, 3), {"D": 5}, "shorter than a vector load, two leading axes"),
        Case((7,), {"D": 31}, "one lane short of a simdgroup"),
        Case((9,), {"D": 515}, "several simdgroups and a tail of 3"),
        Case((300,), {"D": 10}, "more rows than a group holds"),
        Case((4,), {"D": 70}, "log-probabilities as targets", {"log_target": True}),
        Case((), {"D": 40}, "no leading axis"),
    ),
    # A mean over so many would leave gradients below the normal range of float16.
    "long_cases": (Case((2,), {"D": 40001}, "longer than a kept row", {"reduction": "sum"}),),
    "benchmarks": (Case((512,), {"D": 32000}),),
    "samples": {
        "input": lambda rng, shape, sizes: rng.standard_normal(shape) - 1.5,
        "target": lambda rng, shape, sizes: rng.uniform(0.0, 1.0, shape),
    },
}
_OPTIONS = (
    Option("reduction", "mean", ("none", "sum", "batchmean"), passed="text"),
    Option("log_target", False, (True,), passed="text"),
)
_TORCH = "F.kl_div(input.float(), target.float(), reduction=reduction, log_target=log_target)"

register(
    Op(
        name="kl_div",
        summary="Kullback-Leibler divergence of log-probabilities from a target",
        formula="target · (log target - input)",
        function=kl_div,
        reference=kl_div_reference,
        options=_OPTIONS,
        paper="Kullback & Leibler 1951, doi:10.1214/aoms/1177729694",
        torch=_TORCH,
        **_SHARED,
    )
)
register(
    Op(
        name="js_div",
        summary="generalised Jensen-Shannon divergence",
        formula="β · KL(p ‖ m) + (1 - β) · KL(q ‖ m), m = β · p + (1 - β) · q",
        function=js_div,
        reference=js_div_reference,
        options=(Option("beta", 0.5, (0.1, 0.75)), *_OPTIONS),
        paper="Lin 1991, doi:10.1109/18.61115",
        **_SHARED,
    )
)
