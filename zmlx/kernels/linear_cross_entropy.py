"""Cross entropy of a linear layer, which never holds the logits.

    linear_cross_entropy    loss = cross_entropy(hidden @ weight.T + bias, targets)

The classes are taken in chunks, one after the other: the forward multiplies hidden by a chunk of
the weight and takes the logits into four numbers per row; the backward multiplies again, turns the
chunk into its gradient with the log-sum-exp that the forward kept, and multiplies that into the
gradients. So a gradient costs four matrix products instead of three. In return no gradient is
computed in the forward, which a loss without a gradient would pay for; every reduction and
cotangent is right without rescaling; and the gradient of the weight is written once, where chunks
of rows would read and write all of it for every chunk. The idea of chunks: Liger-Kernel (Hsu et al.
2024, arXiv:2410.10989); of computing the logits twice: Cut Cross-Entropy (Wijmans et al. 2024,
arXiv:2411.09009).

MLX evaluates a graph breadth first, so that independent chunks would all be held at once: each
chunk is made to depend on the results of the one before.

Memory: some chunks of logits (at most a 64th of them each, unless that is less than 64 classes),
and in half precision float32 accumulators of the gradient of hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check
from ..metal import scalar
from ..registry import Case, Op, Option, register
from ..targets import cpu
from ..transforms import Arrays, complete
from .cross_entropy import (
    counting_weights,
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


# ---- chunks -------------------------------------------------------------------------------------

#: Chunks that the classes are cut into, unless they would get narrower than `_NARROWEST`.
_CHUNKS = 64
_NARROWEST = 64


@dataclass(frozen=True)
class _Plan:
    """What a call computes: options, classes per chunk, dtype of the products, and the inputs
    hidden, weight, bias whose gradients may be asked for."""

    chunk: ChunkTerms
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

    def logits(
        self, some: dict[str, mx.array], start: int, after: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array, mx.array, list[mx.array]]:
        """hidden and a chunk of the weight as they are multiplied, their product, and what the
        kernels take after it; not before `after` is there."""
        stop = min(start + self.width, some["weight"].shape[0])
        hidden = some["hidden"]
        if after:
            hidden = mx.depends([hidden], list(after))[0]
        rows = some["weight"][start:stop].astype(self.dtype)
        inputs = [some["targets"], some["ignore"], scalar(start), scalar(some["weight"].shape[0])]
        inputs += [some[n][start:stop] for n in ("bias", "class_weights") if n in some]
        inputs += [some["softcap"]] if "softcap" in some else []
        return hidden, rows, hidden @ rows.T, inputs

    def forward(self, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        """Loss and log-sum-exp of every row."""
        some = self.split(inputs)
        some["hidden"] = some["hidden"].astype(self.dtype)
        rows = (some["hidden"].shape[0],)
        lowest = mx.full(rows, mx.finfo(mx.float32).min, dtype=mx.float32)
        zeros = mx.zeros(rows, dtype=mx.float32)
        carried = [lowest, *[zeros] * (len(self.chunk.carried) - 1)]
        kernel = accumulate(self.chunk)
        for start in range(0, some["weight"].shape[0], self.width):
            _, _, logits, more = self.logits(some, start, carried[:1] if start else ())
            carried = list(kernel(logits, *more, *carried))
        further = [some[x.name] for x in self.chunk.numbers]
        classes = scalar(some["weight"].shape[0])
        return finish(self.chunk)(some["targets"], some["ignore"], classes, *carried, *further)  # type: ignore[no-any-return]

    def backward(
        self, primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        """The gradients that are wanted, in step, so that a chunk is done with when the next one
        begins."""
        some = self.split(primals)
        hidden, weight = some["hidden"], some["weight"]
        some["hidden"] = hidden.astype(self.dtype)
        further = [some[x.name] for x in self.chunk.numbers]
        kernel = gradient(self.chunk)
        wants_hidden, wants_weight, wants_bias = self.wanted
        dhidden = dweight = dbias = None
        if wants_weight:
            dweight = mx.zeros(weight.shape, dtype=weight.dtype)
        if wants_bias:
            dbias = mx.zeros(some["bias"].shape, dtype=some["bias"].dtype)
        after: list[mx.array] = []
        for start in range(0, weight.shape[0], self.width):
            h, rows, logits, more = self.logits(some, start, after)
            dlogits = kernel(logits, *more, *further, outputs[1], *cotangents)
            stop, after = start + rows.shape[0], []
            if wants_hidden:
                # Not addmm: a sum over all classes in one accumulator loses more digits.
                part = (dlogits @ rows).astype(mx.float32)
                dhidden = part if dhidden is None else dhidden + part
                after.append(dhidden)
            if dweight is not None:
                part = (dlogits.T @ h).astype(weight.dtype)
                dweight[start:stop] = part
                after.append(part)
            if dbias is not None:
                ones = mx.ones((1, dlogits.shape[0]), dtype=self.dtype)
                part = (ones @ dlogits)[0].astype(dbias.dtype)
                dbias[start:stop] = part
                after.append(part)
        found: list[mx.array | None] = [None] * len(primals)
        found[0] = None if dhidden is None else dhidden.astype(hidden.dtype)
        found[1] = dweight
        if self.chunk.biased:
            found[4] = dbias
        return found

    def reference(self, *inputs: mx.array) -> list[mx.array]:
        """`forward` in plain MLX, for the transforms that it cannot take."""
        some = {k: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
                for k, x in self.split(inputs).items()}  # fmt: skip
        z = some["hidden"] @ some["weight"].T
        z = z + some["bias"] if "bias" in some else z
        z = some["softcap"] * mx.tanh(z / some["softcap"]) if "softcap" in some else z
        lse = mx.logsumexp(z, axis=-1)
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
        loss = mx.where(targets == some["ignore"], 0.0, mx.where(valid, loss, mx.nan))
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
        function = mx.custom_function(self.forward)

        @function.vjp
        def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
            wanted = range(len(primals))
            found = self.backward(tuple(primals), tuple(cotangents), tuple(outputs), wanted)
            return tuple(complete("linear_cross_entropy", found, tuple(primals), wanted))

        @function.jvp
        def _(primals: Any, tangents: Any) -> Any:
            some = [i for i, t in enumerate(tangents) if t is not None]

            def of(*moved: mx.array) -> list[mx.array]:
                full = list(primals)
                for i, x in zip(some, moved, strict=True):
                    full[i] = x
                return self.reference(*full)

            return mx.jvp(of, [primals[i] for i in some], [tangents[i] for i in some])[1]

        @function.vmap
        def _(arrays: Any, axes: Any) -> Any:
            outputs = mx.vmap(self.reference, in_axes=tuple(axes))(*arrays)
            return outputs, [0] * len(outputs)

        return function(*inputs)  # type: ignore[no-any-return]


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
        chunk: classes per chunk; more are faster and take more memory. Default: a 64th of them, and
            at least 64. A new number compiles nothing on the CPU beyond its own shape.

    Returns:
        The loss in the promoted dtype of hidden, weight and bias, reduced in float32; with
        `return_lse` a tuple of it and the log-sum-exp of each row, (*) in float32. Gradients for
        hidden (accumulated in float32), weight and bias. Under `mx.vmap`, `mx.jvp` and a shapeless
        compile it is plain MLX with all logits. A gradient inside `mx.compile` computes those of
        all three that are inputs of the compiled function.
    """
    op = "linear_cross_entropy"
    check_reduction(op, reduction)
    on, values = numbers(op, label_smoothing, z_loss, softcap)
    ignore = ignored_index(op, ignore_index)
    check(op, _ARGUMENTS, (hidden, weight, targets, bias, class_weights))
    classes = weight.shape[0]
    if chunk is None:
        chunk = max(_NARROWEST, -(-classes // _CHUNKS))
    elif not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"[{op}] 'chunk' must be a positive int but got {chunk!r}.")
    dtype = mx.result_type(hidden.dtype, weight.dtype)
    dtype = dtype if bias is None else mx.result_type(dtype, bias.dtype)
    lead = tuple(hidden.shape[:-1])
    flat = cpu.maybe_tracing((hidden, weight)) != cpu.DYNAMIC
    rows = [hidden, weight, targets, ignore]
    if flat:
        rows[0], rows[2] = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
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
    plan = _Plan(chunk_terms, chunk, products, (traced[0], traced[1], traced[2]))
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
        reads_backward=("hidden", "weight", "targets"),
        statistics=1,
        torch="F.cross_entropy(F.linear(hidden, weight, bias).float(), targets.long(), "
        "weight=class_weights)",
        cases=(
            Case((3,), {"D": 4, "V": 1}, "one class: the loss is 0"),
            Case((2, 3), {"D": 8, "V": 7}, "two leading axes"),
            Case((7,), {"D": 5, "V": 70}, "a narrow last chunk", {"chunk": 32}),
            Case((9,), {"D": 33, "V": 515}, "several chunks"),
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
        long_cases=(Case((3,), {"D": 8, "V": 5001}, "chunks wider than the narrowest"),),
        benchmarks=(Case((4096,), {"D": 512, "V": 32768}, optional=False),),
        samples={
            "weight": lambda rng, shape, sizes: rng.standard_normal(shape) * sizes["D"] ** -0.5,
            "targets": lambda rng, shape, sizes: rng.integers(0, sizes["V"], shape),
            "class_weights": lambda rng, shape, sizes: rng.uniform(0.5, 2.0, shape),
        },
    )
)
