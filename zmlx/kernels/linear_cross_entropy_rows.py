"""linear_cross_entropy with its gradient, over blocks of rows.

Where the losses are reduced to one number, the gradient of every row's loss is known before the
loss is. A block of rows with all their classes then gives loss and gradients at once, from the same
logits: three matrix products instead of the four of blocks of classes. The idea: Liger-Kernel (Hsu
et al. 2024, arXiv:2410.10989). It wants that a gradient is being taken, since it is computed beside
the loss, and float32, since it is computed for a cotangent of 1 and multiplied later, which rounds
a second time and in half precision could underflow.

Memory: the logits of a block, a 16th of all, in chunks that become their gradient one after the
other; the products of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import launch
from ..metal import scalar
from ..targets import cpu
from ..transforms import mapped
from .linear_cross_entropy_blocks import Blocks, after, plus
from .linear_cross_entropy_kernels import accumulate, finish, gradient
from .loss_reductions import reduced

#: Blocks, the rows that one must have, and classes of a chunk. Every block adds its part to the
#: gradient of the weight: with 128 rows that takes the time of the product that is spared.
_BLOCKS, _FEWEST = 16, 256
WIDTH = 2048


def height(rows: int) -> int:
    """Rows of a block, or 0 where they would be too few."""
    return rows // _BLOCKS if rows // _BLOCKS >= _FEWEST else 0


def suits(hidden: mx.array, weight: mx.array, bias: mx.array | None) -> bool:
    """Whether a gradient is taken of the weight, on the CPU and in float32."""
    arrays = (hidden, weight) if bias is None else (hidden, weight, bias)
    return (
        launch.settings().target == "cpu"
        and all(x.dtype == mx.float32 for x in arrays)
        and height(hidden.size // max(hidden.shape[-1], 1)) > 0
        and cpu.is_primal(weight)
    )


@dataclass(frozen=True)
class Rows(Blocks):
    """What a call computes further: the reduction, and whether its mean is over weights, which then
    are the last input."""

    reduction: str
    counted: bool

    @property
    def positions(self) -> tuple[int, ...]:
        """The inputs that gradients are computed for."""
        return tuple(i for i, wanted in zip((0, 1, 4), self.wanted, strict=True) if wanted)

    def reduce(self, loss: mx.array, inputs: Sequence[mx.array]) -> mx.array:
        """The one number that losses become."""
        return reduced(loss, self.reduction, inputs[-1] if self.counted else None)

    def walk(self, *inputs: mx.array) -> list[mx.array]:
        """The loss, and its gradients."""
        inputs = tuple(mx.stop_gradient(x) for x in inputs)
        some = self.split(inputs[: len(inputs) - self.counted])
        hidden, weight = some["hidden"], some["weight"]
        rows, classes = hidden.shape[0], weight.shape[0]
        zeros = mx.zeros((rows,), dtype=mx.float32)
        lowest = mx.full((rows,), mx.finfo(mx.float32).min, dtype=mx.float32)
        dloss = mx.ones((rows,), dtype=mx.float32)
        if self.reduction == "mean":
            dloss = dloss / (reduced(inputs[-1], "sum") if self.counted else rows)
        starts = range(0, classes, self.width)
        columns = [self.columns(some, start) for start in starts]
        numbers = [some[x.name] for x in self.chunk.numbers]
        take, end, turn = accumulate(self.chunk), finish(self.chunk), gradient(self.chunk)
        losses: list[mx.array] = []
        parts: list[mx.array] = []
        dweight = mx.zeros_like(weight)
        dbias = mx.zeros_like(some["bias"]) if self.wanted[2] else None
        done: list[mx.array] = []
        for top in range(0, rows, self.height):
            here = slice(top, top + self.height)
            target, own = some["targets"][here], numbers
            if self.chunk.terms.weighted:
                own = [numbers[0][here], *numbers[1:]]
            h = after(hidden[here], done)
            carried = [lowest[here], *[zeros[here]] * (len(self.chunk.carried) - 1)]
            logits = []
            for rows_of, more in columns:
                logits.append(h @ rows_of.T)
                carried = take(logits[-1], target, *more, *carried)
            loss, *lse = end(target, some["ignore"], scalar(classes), *carried, *own)
            losses.append(loss)
            dhidden: mx.array | None = None
            for start, (rows_of, more) in zip(starts, columns, strict=True):
                chunk = slice(start, start + self.width)
                # One chunk is done with when the next one turns.
                z = after(logits.pop(0), [dweight])
                dlogits = turn(z, target, *more, *own, *lse, dloss[here], zeros[here])
                if self.wanted[0]:
                    dhidden = plus(dhidden, dlogits @ rows_of)
                dweight = dweight.at[chunk].add(dlogits.T @ h)
                if dbias is not None:
                    ones = mx.ones((1, dlogits.shape[0]), dtype=mx.float32)
                    dbias = dbias.at[chunk].add((ones @ dlogits)[0])
            done = [dweight]
            if dhidden is not None:
                parts.append(dhidden)
                done.append(dhidden)
        found = [mx.concatenate(parts)] if parts else []
        found += [dweight] if dbias is None else [dweight, dbias]
        return [self.reduce(mx.concatenate(losses), inputs), *found]

    # ---- in plain MLX, for the transforms that a walk cannot take ----

    def plain_loss(self, *inputs: mx.array) -> mx.array:
        """The loss."""
        return self.reduce(self.reference(*inputs[: len(inputs) - self.counted])[0], inputs)

    def plain_gradients(self, cotangent: mx.array, *inputs: mx.array) -> list[mx.array]:
        """The gradients."""

        def loss(*some: mx.array) -> list[mx.array]:
            full = list(inputs)
            for i, x in zip(self.positions, some, strict=True):
                full[i] = x
            return [self.plain_loss(*full)]

        return mx.vjp(loss, [inputs[i] for i in self.positions], [cotangent])[1]

    def plain(self, *inputs: mx.array) -> list[mx.array]:
        """What `walk` gives."""
        loss = self.plain_loss(*inputs)
        return [loss, *self.plain_gradients(mx.ones_like(loss), *inputs)]

    # ---- transforms ----

    def loss(self, *inputs: mx.array) -> mx.array:
        """The loss, differentiable."""
        function: Any = mx.custom_function(self.walk)
        function.vjp(self._gradients)
        function.jvp(lambda primals, tangents: _tangents(self.plain, primals, tangents))
        function.vmap(lambda arrays, axes: _mapped(self.plain, arrays, axes))
        return function(*inputs)[0]  # type: ignore[no-any-return]

    def _gradients(self, primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        """What the walk found, times the cotangent of the loss. The other outputs have none: a
        gradient of the gradients goes through the inputs of the product, in plain MLX. What was
        found is none of them, so that the product takes its memory."""
        found = [mx.stop_gradient(x) for x in outputs[1:]]

        def vjp(arrays: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
            some = [0, *(1 + i for i in self.positions)]

            def of(*moved: mx.array) -> list[mx.array]:
                full = list(arrays)
                for i, x in zip(some, moved, strict=True):
                    full[i] = x
                return self.plain_gradients(*full)

            slopes = mx.vjp(of, [arrays[i] for i in some], _listed(cotangents))[1]
            gradients = dict(zip(some, slopes, strict=True))
            return tuple(gradients.get(i, mx.zeros_like(x)) for i, x in enumerate(arrays))

        product: Any = mx.custom_function(lambda cotangent, *_: [cotangent * x for x in found])
        product.vjp(vjp)
        product.jvp(lambda arrays, tangents: _tangents(self.plain_gradients, arrays, tangents))
        product.vmap(lambda arrays, axes: _mapped(self.plain_gradients, arrays, axes))
        gradients = dict(zip(self.positions, product(cotangents[0], *primals), strict=True))
        return tuple(gradients.get(i, mx.zeros_like(x)) for i, x in enumerate(primals))


def _listed(arrays: Any) -> list[mx.array]:
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)


def _tangents(plain: Any, primals: Any, tangents: Any) -> Any:
    some = [i for i, t in enumerate(tangents) if t is not None]

    def of(*moved: mx.array) -> list[mx.array]:
        full = list(primals)
        for i, x in zip(some, moved, strict=True):
            full[i] = x
        return plain(*full)  # type: ignore[no-any-return]

    return mx.jvp(of, [primals[i] for i in some], [tangents[i] for i in some])[1]


def _mapped(plain: Any, arrays: Any, axes: Any) -> Any:
    outputs = mapped(plain, arrays, axes)
    return outputs, [0] * len(outputs)
