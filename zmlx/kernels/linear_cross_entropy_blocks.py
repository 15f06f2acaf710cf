"""linear_cross_entropy over blocks of some rows and some classes, one after the other.

The forward multiplies and takes a block into four numbers per row; the backward multiplies again,
turns the block into its gradient with the log-sum-exp that the forward kept, and multiplies that
into the gradients: four matrix products, where all logits at once take three. In return no gradient
is computed in the forward, and every reduction and cotangent is right without rescaling. Classes
are the outer loop: a chunk of the weight's gradient is finished before the next begins, and is
rounded once.

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
from typing import Any

import mlx.core as mx

from .. import launch
from ..metal import scalar
from ..targets import cpu
from ..transforms import Arrays, complete, mapped
from .cross_entropy import NOTHING
from .linear_cross_entropy_kernels import ChunkTerms, accumulate, finish, gradient
from .softmax import logsumexp_in_mlx

#: Logits in a block: a part of all of them, and at least so many that a product is worth a launch.
_BLOCKS, _BLOCKS_ON_CPU = 512, 64
_SMALLEST = 2**16
#: Classes of a block. More of them are fewer sums of the gradient of hidden, and more of the
#: weight's.
_WIDEST, _WIDEST_ON_CPU = 512, 1024


def block(rows: int, classes: int, chunk: int | None) -> tuple[int, int]:
    """Rows and classes of a block."""
    on_cpu = launch.settings().target == "cpu"
    blocks, widest = (_BLOCKS_ON_CPU, _WIDEST_ON_CPU) if on_cpu else (_BLOCKS, _WIDEST)
    area = max(_SMALLEST, rows * classes // blocks)
    width = chunk or max(1, min(classes, max(widest, area // max(rows, 1))))
    return max(1, min(rows, area // width)), width


def after(x: mx.array, done: Sequence[mx.array]) -> mx.array:
    """`x`, computed when `done` is."""
    if not done:
        return x
    if launch.settings().target in ("cpu", "cuda"):
        return cpu.after(x, tuple(done))
    return mx.depends([x], list(done))[0]  # type: ignore[no-any-return]


def plus(total: mx.array | None, part: mx.array) -> mx.array:
    """A sum in float32."""
    part = part.astype(mx.float32)
    return part if total is None else total + part


@dataclass(frozen=True)
class Blocks:
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

    def forward(self, *inputs: mx.array) -> Arrays:
        """Loss and log-sum-exp of every row, and by how much that was rounded."""
        some = self.split([mx.stop_gradient(x) for x in inputs])
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
                hidden = after(block[0], done)
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
        blocks = self.parts(some, *per_row, *outputs[1:], *cotangents[:2])
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
                h = after(block[0], done)
                dlogits = kernel(
                    h @ rows.T, block[1], *more, *block[2:split], *further, *block[split:]
                )
                done = []
                # Not addmm: a sum over all classes in one accumulator loses more digits.
                if wants_hidden:
                    dhidden[i] = plus(dhidden[i], dlogits @ rows)
                    done.append(dhidden[i])  # type: ignore[arg-type]
                if wants_weight:
                    of_weight = plus(of_weight, dlogits.T @ h)
                    done.append(of_weight)
                if dbias is not None:
                    ones = mx.ones((1, dlogits.shape[0]), dtype=self.dtype)
                    of_bias = plus(of_bias, ones @ dlogits)
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
        lse = logsumexp_in_mlx(z, (-1,))
        targets = some["targets"]
        # From the elements and not from the shape, which a shapeless compile may change.
        classes = mx.ones_like(z).astype(mx.int32).sum(axis=-1)
        valid = mx.logical_and(targets >= 0, targets < classes)
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
        ignore = some["ignore"]
        ignored = mx.logical_and(targets == ignore, ignore.astype(mx.int64) != NOTHING)
        # A factor and no other value, so that the gradient is NaN as well.
        loss = mx.where(ignored, 0.0, loss * mx.where(mx.logical_or(valid, ignored), 1.0, mx.nan))
        return [loss, lse, mx.zeros_like(lse)]

    def __call__(self, *inputs: mx.array) -> Sequence[mx.array]:
        """What `forward` gives, differentiable."""
        if launch.settings().target == "reference":
            return self.reference(*inputs)
        if cpu.any_shape(inputs):
            return self.reference(*inputs)
        if not cpu.maybe_tracing(inputs):
            return self.forward(*inputs)
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
        outputs = mapped(self.reference, arrays, axes)
        return outputs, [0] * len(outputs)
