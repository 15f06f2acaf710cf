"""Losses over a last axis of classes.

    cross_entropy    loss = log Σ exp(logits) - logits[target]

Bytes: the forward reads the logits (twice if a row leaves the cache) and writes one loss per row;
the backward reads the logits and writes their gradient. The log-sum-exp, one float32 per row, is
kept between them, so that the backward needs no reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import msl
from ..arguments import INDICES, Argument
from ..codegen import Check, Let, Operand, Output, Pass, Reduce, Rowwise
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import Case, Op, Option, register
from ..transforms import Arrays

REDUCTIONS = ("none", "mean", "sum")


def cross_entropy_reference(
    logits: mx.array,
    targets: mx.array,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    xp: Any = mx,
) -> Any:
    """cross_entropy in plain MLX."""
    keep = xp.ones_like(logits[..., 0])
    if ignore_index is not None:
        keep = xp.where(targets == ignore_index, 0.0 * keep, keep)
        targets = xp.where(targets == ignore_index, 0, targets)
    picked = xp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = (xp.logsumexp(logits, axis=-1) - picked) * keep
    if reduction == "none":
        return loss
    return xp.sum(loss) / (xp.sum(keep) if reduction == "mean" else 1)


# ---- kernels ------------------------------------------------------------------------------------

#: Stands for "no index is ignored": no target has this value.
_NOTHING = -(2**63)

_ARGUMENTS = (
    Argument("logits", "(*, V)"),
    Argument("targets", "(*)", INDICES, differentiable=False, values="0 … V-1, or ignore_index"),
)
_TARGET = (
    Operand("target", "per_row", "int64_t", array="targets"),
    Operand("ignore", "scalar", "int64_t", array="ignore_index"),
)
_BEFORE = (
    Let("ignored", "target == ignore", "bool"),
    Let("valid", "target >= 0 && target < D", "bool"),
    Let("index", "valid ? target : 0", "int64_t"),
)

_LOSS = "ignored ? 0.0f : valid ? lse - picked : NAN"
_FORWARD = Rowwise(
    inputs=(
        Operand("x", array="logits"),
        *_TARGET,
        Operand("picked", "at", array="logits", index="index"),
    ),
    before=_BEFORE,
    checks=(Check("!valid && !ignored", "targets", "target"),),
    passes=(
        Pass((Reduce("largest", "max", "x"),)),
        Pass(
            (Reduce("total", "sum", "exp(x - largest)"),),
            (Let("lse", "isinf(largest) ? largest : largest + log(total)"),),
        ),
    ),
    outputs=(Output("loss", _LOSS, "per_row"),),
)

_DLOGITS = PatternKernel(
    "cross_entropy/dlogits",
    Rowwise(
        inputs=(
            Operand("x", array="logits"),
            *_TARGET,
            Operand("lse", "per_row"),
            Operand("dloss", "per_row"),
            Operand("dlse", "per_row"),
        ),
        before=(*_BEFORE, Let("g", "ignored ? 0.0f : valid ? dloss : NAN")),
        outputs=(Output("dlogits", "(g + dlse) * exp(x - lse) - (j == index ? g : 0.0f)"),),
    ),
    (("logits",),),
    header=msl.header_for("ZMLX_FAIL"),
)


def _vjp(
    primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array | None, ...]:
    logits, targets, ignore = primals
    return _DLOGITS(logits, targets, ignore, outputs[1], *cotangents), None, None


_CROSS_ENTROPY = PatternKernel(
    "cross_entropy",
    _FORWARD,
    (mx.float32,),
    header=msl.header_for("ZMLX_FAIL"),
    arguments=_ARGUMENTS,
    training=PatternKernel(
        "cross_entropy/training",
        Rowwise(
            _FORWARD.inputs,
            (*_FORWARD.outputs, Output("lse", "lse", "per_row")),
            _FORWARD.passes,
            before=_FORWARD.before,
            checks=_FORWARD.checks,
        ),
        (mx.float32, mx.float32),
        header=msl.header_for("ZMLX_FAIL"),
        vjp=_vjp,
    ),
)


# ---- ops ----------------------------------------------------------------------------------------


def cross_entropy(
    logits: mx.array,
    targets: mx.array,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> mx.array:
    """Cross entropy of class indices, as `mlx.nn.losses.cross_entropy`.

        loss = log Σ exp(logits) - logits[target]

    Args:
        logits: (*, V) in float32, float16 or bfloat16; computed in float32.
        targets: (*) indices below V, in int32, uint32 or int64. A target out of range makes its
            loss and gradient NaN; on the CPU the evaluation raises.
        ignore_index: rows with this target have loss and gradient 0 and do not count in the mean.
        reduction: "none" for a loss per row, "mean" over the rows that count, or "sum".

    Returns:
        The loss in the dtype of the logits, reduced in float32. Gradient for the logits.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"[cross_entropy] 'reduction' must be one of {', '.join(REDUCTIONS)} but got "
            f"{reduction!r}."
        )
    ignore = scalar(_NOTHING if ignore_index is None else ignore_index)
    loss = _CROSS_ENTROPY(logits, targets, ignore)
    if reduction == "mean" and ignore_index is None:
        loss = loss.mean()
    elif reduction != "none":
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / (targets != ignore).sum()
    return loss.astype(logits.dtype)  # type: ignore[no-any-return]


register(
    Op(
        name="cross_entropy",
        family="losses",
        summary="cross entropy of class indices",
        formula="log Σ exp(logits) - logits[target]",
        function=cross_entropy,
        reference=cross_entropy_reference,
        arguments=_ARGUMENTS,
        options=(
            Option("ignore_index", None, (1, -100)),
            Option("reduction", "mean", ("none", "sum"), passed="text"),
        ),
        outputs=("()",),
        reads_backward=("logits", "targets"),
        statistics=1,
        torch="F.cross_entropy(logits.float(), targets.long())",
        cases=(
            Case((3,), {"V": 1}, "one class: the loss is 0"),
            Case((2, 3), {"V": 5}, "shorter than a vector load, two leading axes"),
            Case((7,), {"V": 33}, "one lane past a simdgroup"),
            Case((9,), {"V": 515}, "several simdgroups and a tail of 3"),
            Case((300,), {"V": 10}, "more rows than a group holds"),
            Case((), {"V": 40}, "no leading axis"),
        ),
        long_cases=(Case((2,), {"V": 50257}, "a vocabulary, longer than a kept row"),),
        benchmarks=(Case((512,), {"V": 32000}), Case((4096,), {"V": 4096})),
        samples={"targets": lambda rng, shape, sizes: rng.integers(0, sizes["V"], shape)},
    )
)
