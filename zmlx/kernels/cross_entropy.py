"""Cross entropy of classes or of probabilities.

    cross_entropy    loss = log Σ exp(logits) - logits[target]

Options change it as in `cross_entropy_kernels`: ignore_index, label smoothing (Szegedy et al. 2016,
arXiv:1512.00567), z-loss (Chowdhery et al. 2022, arXiv:2204.02311), softcap (Gemma Team 2024,
arXiv:2408.00118), class weights, and probabilities as targets.

Bytes: the forward reads the logits and writes one loss per row; the backward reads the logits and
writes their gradient. The log-sum-exp, two float32 per row, is kept between them, so that the
backward needs no reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..arguments import (
    Argument,
    check,
    check_array,
    check_axis,
    check_flag,
    check_integer,
    check_not_negative,
    check_number,
)
from ..launch import settings
from ..metal import scalar
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays
from .cross_entropy_kernels import LOGITS, PROBABILITIES, TARGETS, Terms, forward
from .loss_reductions import check_reduction, reduced


def cross_entropy_reference(
    logits: mx.array,
    targets: mx.array,
    class_weights: mx.array | None = None,
    *,
    axis: int = -1,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    xp: Any = mx,
) -> Any:
    """cross_entropy in plain MLX."""
    soft = targets.ndim == logits.ndim
    z = xp.moveaxis(logits, axis, -1)
    if softcap is not None:
        z = softcap * xp.tanh(z / softcap)
    classes = z.shape[-1]
    lse = xp.logsumexp(z, axis=-1)
    keep = xp.ones_like(z[..., 0])
    row_weight = keep
    if soft:
        q = (1 - label_smoothing) * xp.moveaxis(targets, axis, -1) + label_smoothing / classes
        q = q if class_weights is None else q * class_weights
        loss = xp.sum(q * (lse[..., None] - z), axis=-1)
    else:
        if ignore_index is not None:
            keep = xp.where(targets == ignore_index, 0.0 * keep, keep)
            targets = xp.where(targets == ignore_index, 0, targets)
        loss = lse - xp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
        if class_weights is not None:
            row_weight = class_weights[targets]
            loss = loss * row_weight
        if label_smoothing != 0:
            weights = 1.0 if class_weights is None else class_weights
            smooth = xp.sum(weights * (lse[..., None] - z), axis=-1)
            loss = (1 - label_smoothing) * loss + label_smoothing / classes * smooth
    if z_loss != 0:
        loss = loss + z_loss * lse * lse
    loss = loss if ignore_index is None else xp.where(keep == 0, 0.0, loss)
    if reduction != "none":
        loss = xp.sum(loss) / (xp.sum(row_weight * keep) if reduction == "mean" else 1)
    return (loss, lse) if return_lse else loss


# ---- what linear_cross_entropy shares -----------------------------------------------------------

#: Stands for "no index is ignored".
NOTHING = -(2**63)


def numbers(
    op: str, label_smoothing: float, z_loss: float, softcap: float | None
) -> tuple[dict[str, bool], list[mx.array]]:
    """Which of these options are on, and the values of those, as the kernels take them."""
    smoothing = check_number(op, "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"[{op}] 'label_smoothing' must be in [0, 1] but got {label_smoothing}.")
    z_scale = check_not_negative(op, "z_loss", z_loss)
    cap = 0.0 if softcap is None else check_number(op, "softcap", softcap)
    # As a float32 it is divided by, and multiplies.
    if softcap is not None and not 2.0**-126 <= cap < 2.0**127:
        raise ValueError(
            f"[{op}] 'softcap' must be positive, from 2^-126 to 2^127, but got {softcap}."
        )
    on = {"smoothed": smoothing != 0, "z_loss": z_scale != 0, "capped": softcap is not None}
    return on, [scalar(x) for x in (smoothing, z_scale, cap) if x != 0]


def ignored_index(op: str, ignore_index: int | None) -> mx.array:
    """The index that is ignored, as the kernels take it."""
    index = NOTHING if ignore_index is None else check_integer(op, "ignore_index", ignore_index)
    if ignore_index is not None and not -(2**62) < index < 2**62:
        raise ValueError(f"[{op}] 'ignore_index' must be in (-2^62, 2^62) but got {ignore_index}.")
    return scalar(index)


def weights_of_rows(class_weights: mx.array, targets: mx.array, ignore: mx.array) -> mx.array:
    """The weight of each row's target, 0 where it is ignored; any number where it is no class."""
    last: int | mx.array = class_weights.shape[0] - 1
    if cpu.any_shape((class_weights, targets)):
        last = mx.ones_like(class_weights).astype(mx.int32).sum() - 1
    inside = mx.stop_gradient(mx.clip(targets, 0, last))
    return mx.where(targets == ignore, 0.0, class_weights[inside])


def counting_weights(
    targets: mx.array, ignore: mx.array | None, row_weights: mx.array | None
) -> mx.array | None:
    """What the mean divides by the sum of: PyTorch's mean is over the weights of the targets."""
    if row_weights is not None or ignore is None:
        return row_weights
    return (targets != ignore).astype(mx.float32)


def _of_no_classes(
    logits: mx.array, targets: mx.array, soft: bool, ignore_index: int | None, z_loss: bool
) -> Arrays:
    """Losses and log-sum-exps of rows without classes, of which MLX finds no maximum."""
    lse = mx.full(logits.shape[:-1], -mx.inf)
    if soft:
        return mx.full(lse.shape, mx.inf if z_loss else 0.0), lse
    # No target is one of the classes.
    kept = mx.array(True) if ignore_index is None else targets != ignore_index
    return mx.broadcast_to(mx.where(kept, mx.nan, 0.0), lse.shape), lse


# ---- op -----------------------------------------------------------------------------------------


def _cross_entropy(
    logits: mx.array,
    targets: mx.array,
    class_weights: mx.array | None,
    axis: int,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    return_lse: bool,
) -> Way:
    op = "cross_entropy"
    check_reduction(op, reduction)
    check_flag(op, "return_lse", return_lse)
    on, values = numbers(op, label_smoothing, z_loss, softcap)
    ignore = ignored_index(op, ignore_index)
    if type(axis) is not int or axis != -1:
        check_array(op, "logits", logits)
        axis = check_axis(op, logits, axis)
    for name, x in (("logits", logits), ("targets", targets)):
        if not isinstance(x, mx.array):
            check_array(op, name, x)
    soft = mx.issubdtype(targets.dtype, mx.floating) and targets.ndim == logits.ndim
    if soft and ignore_index is not None:
        raise ValueError(
            f"[{op}] 'ignore_index' must be None for targets that are probabilities but got "
            f"{ignore_index}."
        )
    if axis not in (-1, logits.ndim - 1):

        def last(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
            logits = mx.moveaxis(logits, axis, -1)
            return logits, mx.moveaxis(targets, axis, -1) if soft else targets

        way = _cross_entropy(
            *last(logits, targets), class_weights, -1, ignore_index, label_smoothing, z_loss,
            softcap, reduction, return_lse,
        )  # fmt: skip
        return lambda logits, targets, weights: way(*last(logits, targets), weights)
    dtype, weighted = logits.dtype, class_weights is not None
    target = settings().target
    none = logits.shape[-1:] == (0,) and not cpu.any_shape((logits, targets))
    in_mlx = target == "reference" and none
    declared = (LOGITS, PROBABILITIES if soft else TARGETS)
    if class_weights is not None:
        check(op, (*declared, _CLASS_WEIGHTS), (logits, targets, class_weights))
    elif in_mlx:
        check(op, declared, (logits, targets))
    terms = Terms(soft, weighted, twice=target == "cpu", **on)
    losses: Callable[..., Any] = forward(terms, return_lse)
    if in_mlx:

        def losses(logits: mx.array, targets: mx.array, *_: mx.array) -> Arrays:
            return _of_no_classes(logits, targets, soft, ignore_index, on["z_loss"])

    def run(logits: mx.array, targets: mx.array, class_weights: mx.array | None) -> Any:
        inputs = [logits, targets] if soft else [logits, targets, ignore]
        row_weights = None
        if class_weights is not None:
            class_weights = mx.stop_gradient(class_weights.astype(mx.float32))
            if not soft:
                row_weights = weights_of_rows(class_weights, targets, ignore)
                inputs.append(row_weights)
            if soft or on["smoothed"]:
                inputs.append(class_weights)
                if not soft:
                    inputs.append(class_weights.sum())
        result = losses(*inputs, *values)
        loss = result[0] if isinstance(result, tuple) else result
        counts = None
        if reduction == "mean":
            some = None if ignore_index is None else ignore
            counts = counting_weights(targets, some, row_weights)
        loss = reduced(loss, reduction, counts).astype(dtype)
        return (loss, result[1]) if return_lse else loss

    return run


_CROSS_ENTROPY = Remembered(_cross_entropy)


def cross_entropy(
    logits: mx.array,
    targets: mx.array,
    class_weights: mx.array | None = None,
    *,
    axis: int = -1,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
) -> Any:
    """Cross entropy of class indices or probabilities, as `torch.nn.functional.cross_entropy` and
    `mlx.nn.losses.cross_entropy`.

        loss = log Σ exp(logits) - logits[target]

    Args:
        logits: (*, V) in float32, float16 or bfloat16; computed in float32.
        targets: (*) indices below V, in int32, uint32 or int64. A target out of range makes its
            loss and gradient NaN; on the CPU the evaluation raises. Or probabilities of the shape
            of the logits, floating, whose rows sum to one: loss = -Σ targets · log softmax(logits).
        class_weights: (V,), the weight of each class, as PyTorch's `weight`. No gradient.
        axis: the axis of the classes. Another than the last is copied to the end first.
        ignore_index: rows with this target have loss 0, gradient 0 (NaN, as in PyTorch, where
            logits are NaN or inf, or all are -inf) and do not count in the mean.
        label_smoothing: ε in [0, 1]: the target becomes (1 - ε) · target + ε / V. With class
            weights each class's part is weighted by its own.
        z_loss: adds z_loss · logsumexp² to the loss of each row that is not ignored.
        softcap: logits become softcap · tanh(logits / softcap) first.
        reduction: "none" for a loss per row, "mean", or "sum". The mean is over the rows that are
            not ignored; with class weights and class indices it divides by the sum of the weights
            of their targets. Over no rows it is NaN, as in PyTorch.
        return_lse: also return the log-sum-exp of each row (of capped logits), (*) in float32.

    A new value of a number compiles nothing.

    Returns:
        The loss in the dtype of the logits, reduced in float32; with `return_lse` a tuple. Gradient
        for the logits, and for probabilities, through both results.
    """
    return _CROSS_ENTROPY(
        (logits, targets, class_weights),
        (axis, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse),
    )


_CLASS_WEIGHTS = Argument("class_weights", "(V,)", differentiable=False, optional=True)

register(
    Op(
        name="cross_entropy",
        family="losses",
        summary="cross entropy of class indices or probabilities",
        formula="log Σ exp(logits) - logits[target]",
        function=cross_entropy,
        reference=cross_entropy_reference,
        arguments=(LOGITS, TARGETS, _CLASS_WEIGHTS),
        options=(
            Option("axis", -1, passed="text"),
            Option("ignore_index", None, (1, -100)),
            Option("label_smoothing", 0.0, (0.1, 1.0)),
            Option("z_loss", 0.0, (1e-2,)),
            Option("softcap", None, (0.5, 30.0)),
            Option("reduction", "mean", ("none", "sum"), passed="text"),
            Option("return_lse", False, (True,), passed="text"),
        ),
        outputs=("()",),
        reads_backward=("logits", "targets"),
        statistics=2,
        torch="F.cross_entropy(logits.float(), targets.long(), weight=class_weights)",
        cases=(
            Case((3,), {"V": 1}, "one class: the loss is 0"),
            Case((2, 3), {"V": 5}, "shorter than a vector load, two leading axes"),
            Case((7,), {"V": 33}, "one lane past a simdgroup"),
            Case((9,), {"V": 515}, "several simdgroups and a tail of 3"),
            Case((300,), {"V": 10}, "more rows than a group holds"),
            Case((), {"V": 40}, "no leading axis"),
            Case(
                (5, 4),
                {"V": 70},
                "every option at once",
                {
                    "ignore_index": 3,
                    "label_smoothing": 0.2,
                    "z_loss": 1e-3,
                    "softcap": 2.0,
                    "return_lse": True,
                },
            ),
            Case((11,), {"V": 6}, "no class weights", {"reduction": "none"}, optional=False),
        ),
        long_cases=(Case((2,), {"V": 50257}, "a vocabulary, longer than a kept row"),),
        benchmarks=(
            Case((512,), {"V": 32000}, optional=False),
            Case((4096,), {"V": 4096}, optional=False),
        ),
        samples={
            "targets": lambda rng, shape, sizes: rng.integers(0, sizes["V"], shape),
            "class_weights": lambda rng, shape, sizes: rng.uniform(0.5, 2.0, shape),
        },
    )
)
