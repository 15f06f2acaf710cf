"""Cross entropy of a linear layer, which never holds the logits.

    linear_cross_entropy    loss = cross_entropy(hidden @ weight.T + bias, targets)

The logits are computed in blocks, one after the other: of some rows and some classes each, forward
and again backward; or, where a gradient is taken of a reduced loss in float32 on the CPU, of some
rows, which give the gradient beside the loss. The idea of chunks: Liger-Kernel (Hsu et al. 2024,
arXiv:2410.10989); of computing the logits twice: Cut Cross-Entropy (Wijmans et al. 2024,
arXiv:2411.09009).
"""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check, check_flag, check_size
from ..registry import Case, Op, Option, register
from ..targets import cpu
from . import linear_cross_entropy_rows as by_rows
from .cross_entropy import (
    counting_weights,
    cross_entropy,
    cross_entropy_reference,
    ignored_index,
    numbers,
    weights_of_rows,
)
from .cross_entropy_kernels import TARGETS, Terms
from .linear_cross_entropy_blocks import Blocks, block
from .linear_cross_entropy_kernels import ChunkTerms
from .loss_reductions import check_reduction, reduced


def linear_cross_entropy_reference(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    bias: mx.array | None = None,
    class_weights: mx.array | None = None,
    *,
    chunk: int | None = None,
    xp: Any = mx,
    **options: Any,
) -> Any:
    """linear_cross_entropy in plain MLX, with all logits at once."""
    logits = xp.matmul(hidden, weight.T)
    logits = logits if bias is None else logits + bias
    return cross_entropy_reference(logits, targets, class_weights, xp=xp, **options)


def _unfused(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    bias: mx.array | None = None,
    class_weights: mx.array | None = None,
    *,
    chunk: int | None = None,
    **options: Any,
) -> Any:
    """All logits, and their cross entropy."""
    logits = hidden @ weight.T
    return cross_entropy(
        logits if bias is None else logits + bias, targets, class_weights, **options
    )


# ---- op -----------------------------------------------------------------------------------------

_ARGUMENTS = (
    Argument("hidden"),
    Argument("weight", "(V, D)"),
    TARGETS,
    Argument("bias", "(V,)", optional=True),
    Argument("class_weights", "(V,)", differentiable=False, optional=True),
)


def linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    bias: mx.array | None = None,
    class_weights: mx.array | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    chunk: int | None = None,
) -> Any:
    """`cross_entropy(hidden @ weight.T + bias, targets)` without an array of the logits.

    Forward and backward hold a part of the logits at a time, which is multiplied by MLX's matmul:
    on Linux call `zmlx.use_openblas()` first.

    Args:
        hidden: (*, D) in float32, float16 or bfloat16.
        weight: (V, D), as of `mlx.nn.Linear`. On the CPU, half precision is multiplied in float32;
            a GPU's products round each logit to their dtype.
        targets: (*) indices below V, in int32, uint32 or int64; as in `cross_entropy`.
        bias: (V,), or None for none.
        class_weights, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse: as in
            `cross_entropy`.
        chunk: classes per block, of which rows are taken as fit. Default: 1024 on the CPU, else
            512; more for few rows. With None, a gradient of 4096 rows or more of a reduced loss in
            float32 on the CPU is computed beside the loss, over blocks of a 16th of the rows, in
            three matrix products instead of four; unless the log-sum-exp is returned.

    Returns:
        The loss in the promoted dtype of hidden, weight and bias, reduced in float32; with
        `return_lse` a tuple of it and the log-sum-exp of each row, (*) in float32. Gradients for
        hidden (accumulated in float32), weight and bias. Under `mx.vmap`, `mx.jvp` and a shapeless
        compile it is plain MLX with all logits. A gradient inside `mx.compile` computes those of
        all three that are inputs of the compiled function, and one beside the loss those of all
        that are arguments of the differentiated function.
    """
    op = "linear_cross_entropy"
    check_reduction(op, reduction)
    check_flag(op, "return_lse", return_lse)
    on, values = numbers(op, label_smoothing, z_loss, softcap)
    ignore = ignored_index(op, ignore_index)
    check(op, _ARGUMENTS, (hidden, weight, targets, bias, class_weights))
    classes = weight.shape[0]
    chunk = None if chunk is None else check_size(op, "chunk", chunk)
    dtype = mx.result_type(hidden.dtype, weight.dtype)
    dtype = dtype if bias is None else mx.result_type(dtype, bias.dtype)
    lead = tuple(hidden.shape[:-1])
    flat = not cpu.any_shape((hidden, weight))
    rows = [hidden, weight, targets, ignore]
    if flat:
        rows[0], rows[2] = hidden.reshape(prod(lead), hidden.shape[-1]), targets.flatten()
    if bias is not None:
        rows.append(bias)
    row_weights = None
    if class_weights is not None:
        class_weights = mx.stop_gradient(class_weights.astype(mx.float32))
        row_weights = weights_of_rows(class_weights, rows[2], ignore)
        if on["smoothed"]:
            rows.append(class_weights)
    if softcap is not None:
        rows.append(values.pop())
    if row_weights is not None:
        rows.append(row_weights)
        if class_weights is not None and on["smoothed"]:
            rows.append(class_weights.sum())
    inputs = [*rows, *values]
    chunk_terms = ChunkTerms(Terms(weighted=class_weights is not None, **on), bias is not None)
    products = mx.float32 if launch.settings().target == "cpu" else dtype
    traced = [x is not None and cpu.maybe_tracing((x,)) != 0 for x in (hidden, weight, bias)]
    counts = None
    if reduction == "mean":
        some = None if ignore_index is None else ignore
        counts = counting_weights(rows[2], some, row_weights)
    wanted = (traced[0], traced[1], traced[2])
    one = reduction != "none" and not return_lse and chunk is None and flat and classes > 0
    if one and by_rows.suits(hidden, weight, bias):
        last = [] if counts is None else [counts]
        height = by_rows.height(rows[0].shape[0])
        walk = by_rows.Rows(
            chunk_terms, height, by_rows.WIDTH, products, wanted, reduction, counts is not None
        )
        return walk.loss(*inputs, *last)
    height, width = block(rows[0].shape[0] if rows[0].ndim == 2 else 1, classes, chunk)
    loss, lse, _ = Blocks(chunk_terms, height, width, products, wanted)(*inputs)
    loss = reduced(loss, reduction, counts).astype(dtype)
    if flat:
        loss = loss.reshape(lead) if reduction == "none" else loss
        lse = lse.reshape(lead)
    return (loss, lse) if return_lse else loss


register(
    Op(
        name="linear_cross_entropy",
        family="losses",
        summary="cross entropy of a linear layer, without an array of the logits",
        formula="cross_entropy(hidden @ weight.T + bias, targets)",
        function=linear_cross_entropy,
        reference=linear_cross_entropy_reference,
        arguments=_ARGUMENTS,
        options=(
            Option("ignore_index", None, (1, -100)),
            Option("label_smoothing", 0.0, (0.1, 1.0)),
            Option("z_loss", 0.0, (1e-2,)),
            Option("softcap", None, (0.5, 30.0)),
            Option("reduction", "mean", ("none", "sum"), passed="text"),
            Option("return_lse", False, (True,), passed="text"),
            Option("chunk", None, (2, 5), passed="text"),
        ),
        outputs=("()",),
        paper="Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009",
        unfused=_unfused,
        reads_backward=("hidden", "weight", "targets"),
        statistics=2,
        flops="2 * rows * D * V",
        torch="F.cross_entropy(F.linear(hidden, weight, bias).float().reshape(-1, len(weight)), "
        "targets.long().reshape(-1), weight=class_weights)",
        cases=(
            Case((3,), {"D": 4, "V": 1}, "one class: the loss is 0"),
            Case((2, 3), {"D": 8, "V": 7}, "two leading axes"),
            Case((7,), {"D": 5, "V": 70}, "a narrow last chunk", {"chunk": 32}),
            Case((9,), {"D": 33, "V": 515}, "several chunks", {"chunk": 64}),
            Case((130,), {"D": 16, "V": 10}, "more rows than a group holds"),
            Case((), {"D": 6, "V": 40}, "no leading axis"),
            Case(
                (5, 4),
                {"D": 12, "V": 70},
                "every option at once",
                {
                    "ignore_index": 3,
                    "label_smoothing": 0.2,
                    "z_loss": 1e-3,
                    "softcap": 2.0,
                    "return_lse": True,
                    "chunk": 16,
                },
            ),
            Case((11,), {"D": 3, "V": 6}, "no bias", {"reduction": "none"}, optional=False),
        ),
        long_cases=(Case((3,), {"D": 8, "V": 5001}, "many chunks", {"chunk": 100}),),
        benchmarks=(Case((2, 2048), {"D": 512, "V": 32768}, optional=False),),
        samples={
            "weight": lambda rng, shape, sizes: rng.standard_normal(shape) * sizes["D"] ** -0.5,
            "targets": lambda rng, shape, sizes: rng.integers(0, sizes["V"], shape),
            "class_weights": lambda rng, shape, sizes: rng.uniform(0.5, 2.0, shape),
        },
    )
)
