"""Cross entropy of a linear layer, which never holds the logits.

    linear_cross_entropy    loss = cross_entropy(hidden @ weight.T + bias, targets)

The logits are computed in blocks of some rows and some classes, one after the other: the forward
multiplies and takes a block into four numbers per row; the backward multiplies again, turns the
block into its gradient with the log-sum-exp that the forward kept, and multiplies that into the
gradients. So a gradient costs four matrix products instead of three. In return no gradient is
computed in the forward, which a loss without a gradient would pay for, and every reduction and
cotangent is right without rescaling. Classes are the outer loop: a chunk of the weight's gradient
is finished before the next begins, and is rounded once. The idea of chunks: Liger-Kernel (Hsu et
al. 2024, arXiv:2410.10989); of computing the logits twice: Cut Cross-Entropy (Wijmans et al. 2024,
arXiv:2411.09009).

MLX evaluates a graph breadth first, so that independent blocks would all be held at once: each is
made to depend on the results of the one before. It also asks for the memory of some hundred
operations ahead, which is that of 16 blocks: on the CPU the kernels wait for the block before
theirs, so that blocks can be eight times as large, and their products as fast as those of all
logits.

Memory on the CPU: two blocks of logits and of their gradient (a block is a 64th of the logits, and
not below 2^16 of them), the products of a block, and the gradient of hidden in float32. On a GPU
some 16 blocks of a 512th.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check, check_flag, check_size
from ..metal import scalar
from ..registry import Case, Op, Option, register
from ..targets import cpu
from ..transforms import Arrays, complete
from .cross_entropy import (
    NOTHING,
    counting_weights,
    cross_entropy,
    cross_entropy_reference,
    ignored_index,
    numbers,
    weights_of_rows,
)
from .cross_entropy_kernels import TARGETS, Terms
from .linear_cross_entropy_kernels import ChunkTerms, accumulate, finish, gradient
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


# ---- blocks -------------------------------------------------------------------------------------

#: Logits in a block: a part of all of them, and at least so many that a product is worth a launch.
_BLOCKS, _BLOCKS_ON_CPU = 512, 64
_SMALLEST = 2**16
#: Classes of a block. More of them are fewer sums of the gradient of hidden, and more of the
#: weight's.
_WIDEST, _WIDEST_ON_CPU = 512, 1024


def _block(rows: int, classes: int, chunk: int | None) -> tuple[int, int]:
    """Rows and classes of a block."""
    on_cpu = launch.settings().target == "cpu"
    blocks, widest = (_BLOCKS_ON_CPU, _WIDEST_ON_CPU) if on_cpu else (_BLOCKS, _WIDEST)
    area = max(_SMALLEST, rows * classes // blocks)
    width = chunk or max(1, min(classes, max(widest, area // max(rows, 1))))
    return max(1, min(rows, area // width)), width


def _plus(total: mx.array | None, part: mx.array) -> mx.array:
    """A sum in float32."""
    part = part.astype(mx.float32)
    return part if total is None else total + part


@dataclass(frozen=True)
class _Plan:
    """What a call computes: options, rows and classes of a block, dtype of the products, and which
    of hidden, weight and bias may be asked for their gradient."""

    chunk: ChunkTerms
    height: int
    width: int
    dtype: mx.Dtype
    wanted: tuple[bool, bool, bool]

    def split(self, inputs: Sequence[mx.array]) -> dict[str, mx.array]:
        """The inputs by name."""
        terms = self.chunk.terms
        names = ["hidden", "weight", "targets", "ignore"]
        names += ["bias"] * self.chunk.biased
        names += ["class_weights"] * (terms.weighted and terms.smoothed)
        names += ["softcap"] * terms.capped
        names += [x.name for x in self.chunk.numbers]
        return dict(zip(names, inputs, strict=True))

    def parts(self, some: dict[str, mx.array], *per_row: mx.array) -> list[list[mx.array]]:
        """For every block of rows: hidden as it is multiplied, its targets, and `per_row`."""
        arrays = (some["hidden"], some["targets"], *per_row)
        return [
            [x[i : i + self.height] for x in arrays]
            for i in range(0, some["hidden"].shape[0], self.height)
        ]

    def columns(self, some: dict[str, mx.array], start: int) -> tuple[mx.array, list[mx.array]]:
        """A chunk of the weight as it is multiplied, and what kernels take after the targets."""
        classes = some["weight"].shape[0]
        stop = min(start + self.width, classes)
        inputs = [some["ignore"], scalar(start), scalar(classes)]
        inputs += [some[n][start:stop] for n in ("bias", "class_weights") if n in some]
        inputs += [some["softcap"]] if "softcap" in some else []
        return some["weight"][start:stop].astype(self.dtype), inputs

    def forward(self, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        """Loss and log-sum-exp of every row."""
        some = self.split(inputs)
        rows, classes = some["hidden"].shape[0], some["weight"].shape[0]
        lowest = mx.full((rows,), mx.finfo(mx.float32).min, dtype=mx.float32)
        zeros = mx.zeros((rows,), dtype=mx.float32)
        some["hidden"] = some["hidden"].astype(self.dtype)
        blocks = self.parts(some, lowest, *[zeros] * (len(self.chunk.carried) - 1))
        kernel = accumulate(self.chunk)
        done: list[mx.array] = []
        # Without classes there is a chunk of none, which refuses the targets.
        for start in range(0, max(classes, 1), self.width):
            weight, more = self.columns(some, start)
            for block in blocks:
                hidden = mx.depends(block[:1], done)[0] if done else block[0]
                block[2:] = kernel(hidden @ weight.T, block[1], *more, *block[2:])
                done = [block[2]]
        carried = [mx.concatenate(list(parts)) for parts in list(zip(*blocks, strict=True))[2:]]
        if not carried:
            carried = [lowest, *[zeros] * (len(self.chunk.carried) - 1)]
        further = [some[x.name] for x in self.chunk.numbers]
        return finish(self.chunk)(  # type: ignore[no-any-return]
            some["targets"], some["ignore"], scalar(classes), *carried, *further
        )

    def backward(
        self, primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        """The gradients that are wanted, in step, so that a block is done with when the next one
        begins."""
        some = self.split(primals)
        hidden, weight, bias = some["hidden"], some["weight"], some.get("bias")
        some["hidden"] = hidden.astype(self.dtype)
        kernel = gradient(self.chunk)
        wants_hidden, wants_weight, wants_bias = self.wanted
        per_row = [some["row_weight"]] if "row_weight" in some else []
        further = [some[x.name] for x in self.chunk.numbers[len(per_row) :]]
        blocks = self.parts(some, *per_row, outputs[1], *cotangents)
        split = 2 + len(per_row)
        dhidden: list[mx.array | None] = [None] * len(blocks)
        dweight = mx.zeros(weight.shape, dtype=weight.dtype) if wants_weight else None
        dbias = None if bias is None or not wants_bias else mx.zeros(bias.shape, dtype=bias.dtype)
        done: list[mx.array] = []
        for start in range(0, weight.shape[0], self.width):
            rows, more = self.columns(some, start)
            here = slice(start, start + rows.shape[0])
            of_weight = of_bias = None
            for i, block in enumerate(blocks):
                h = mx.depends(block[:1], done)[0] if done else block[0]
                dlogits = kernel(
                    h @ rows.T, block[1], *more, *block[2:split], *further, *block[split:]
                )
                done = []
                # Not addmm: a sum over all classes in one accumulator loses more digits.
                if wants_hidden:
                    dhidden[i] = _plus(dhidden[i], dlogits @ rows)
                    done.append(dhidden[i])  # type: ignore[arg-type]
                if wants_weight:
                    of_weight = _plus(of_weight, dlogits.T @ h)
                    done.append(of_weight)
                if dbias is not None:
                    ones = mx.ones((1, dlogits.shape[0]), dtype=self.dtype)
                    of_bias = _plus(of_bias, ones @ dlogits)
                    done.append(of_bias)
            if dweight is not None and of_weight is not None:
                dweight[here] = of_weight.astype(weight.dtype)
            if dbias is not None and of_bias is not None:
                dbias[here] = of_bias[0].astype(dbias.dtype)
        found: list[mx.array | None] = [None] * len(primals)
        if wants_hidden and blocks and weight.shape[0] > 0:
            found[0] = mx.concatenate([x.astype(hidden.dtype) for x in dhidden if x is not None])
        found[1] = dweight
        if bias is not None:
            found[4] = dbias
        return found

    def reference(self, *inputs: mx.array) -> list[mx.array]:
        """`forward` in plain MLX, for the transforms that it cannot take."""
        some = {k: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
                for k, x in self.split(inputs).items()}  # fmt: skip
        z = some["hidden"] @ some["weight"].T
        z = z + some["bias"] if "bias" in some else z
        z = some["softcap"] * mx.tanh(z / some["softcap"]) if "softcap" in some else z
        # MLX's refuses an array without rows.
        lse = mx.logsumexp(z, axis=-1) if some["targets"].size else z.sum(axis=-1)
        targets = some["targets"]
        # From the elements and not from the shape, which a shapeless compile may change.
        classes = mx.ones_like(z).astype(mx.int32).sum(axis=-1)
        valid = (targets >= 0) & (targets < classes)
        index = mx.where(valid, targets, 0)
        loss = lse - mx.take_along_axis(z, index[..., None], axis=-1)[..., 0]
        if "row_weight" in some:
            loss = loss * some["row_weight"]
        if "smoothing" in some:
            away = lse[..., None] - z
            away = away * some["class_weights"] if "class_weights" in some else away
            loss = loss + some["smoothing"] * (away.mean(axis=-1) - loss)
        if "z_scale" in some:
            loss = loss + some["z_scale"] * lse * lse
        ignored = (targets == some["ignore"]) & (some["ignore"].astype(mx.int64) != NOTHING)
        loss = mx.where(ignored, 0.0, mx.where(valid, loss, mx.nan))
        return [loss, lse]

    def __call__(self, *inputs: mx.array) -> Sequence[mx.array]:
        """Loss and log-sum-exp of every row, differentiable."""
        if launch.settings().target == "reference":
            return self.reference(*inputs)
        tracing = cpu.maybe_tracing(inputs)
        if not tracing:
            return self.forward(*inputs)
        if tracing == cpu.DYNAMIC:
            return self.reference(*inputs)
        function: Any = mx.custom_function(self.forward)
        function.vjp(self._vjp)
        function.jvp(self._jvp)
        function.vmap(self._vmap)
        outputs: Sequence[mx.array] = function(*inputs)
        return outputs

    def _vjp(self, primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        wanted = range(len(primals))
        found = self.backward(tuple(primals), tuple(cotangents), tuple(outputs), wanted)
        return tuple(complete("linear_cross_entropy", found, tuple(primals), wanted))

    def _jvp(self, primals: Any, tangents: Any) -> Any:
        some = [i for i, t in enumerate(tangents) if t is not None]

        def of(*moved: mx.array) -> list[mx.array]:
            full = list(primals)
            for i, x in zip(some, moved, strict=True):
                full[i] = x
            return self.reference(*full)

        return mx.jvp(of, [primals[i] for i in some], [tangents[i] for i in some])[1]

    def _vmap(self, arrays: Any, axes: Any) -> Any:
        outputs = mx.vmap(self.reference, in_axes=tuple(axes))(*arrays)
        return outputs, [0] * len(outputs)


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

    Forward and backward hold the logits of a chunk of the classes at a time. The chunk is
    multiplied by MLX's matmul: on Linux call `zmlx.use_openblas()` first.

    Args:
        hidden: (*, D) in float32, float16 or bfloat16.
        weight: (V, D), as of `mlx.nn.Linear`. On the CPU, half precision is multiplied in float32.
        targets: (*) indices below V, in int32, uint32 or int64; as in `cross_entropy`.
        bias: (V,), or None for none.
        class_weights, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse: as in
            `cross_entropy`.
        chunk: classes per block, of which rows are taken as fit. Default: 1024 on the CPU, else
            512; more for few rows.

    Returns:
        The loss in the promoted dtype of hidden, weight and bias, reduced in float32; with
        `return_lse` a tuple of it and the log-sum-exp of each row, (*) in float32. Gradients for
        hidden (accumulated in float32), weight and bias. Under `mx.vmap`, `mx.jvp` and a shapeless
        compile it is plain MLX with all logits. A gradient inside `mx.compile` computes those of
        all three that are inputs of the compiled function.
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
    flat = cpu.maybe_tracing((hidden, weight)) != cpu.DYNAMIC
    rows = [hidden, weight, targets, ignore]
    if flat:
        rows[0], rows[2] = hidden.reshape(prod(lead), hidden.shape[-1]), targets.reshape(-1)
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
    height, width = _block(rows[0].shape[0] if rows[0].ndim == 2 else 1, classes, chunk)
    plan = _Plan(chunk_terms, height, width, products, (traced[0], traced[1], traced[2]))
    loss, lse = plan(*inputs)
    counts = None
    if reduction == "mean":
        some = None if ignore_index is None else ignore
        counts = counting_weights(rows[2], some, row_weights)
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
        statistics=1,
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
