"""The smallest kernels that show what the core does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from zmlx import native

core = native.load()

SQUARE = "uint i = thread_position_in_grid.x; o[i] = x[i] * x[i];"


def kernel(
    name: str,
    source: str,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("o",),
    contiguous: bool = True,
) -> Any:
    return core.kernel(name, inputs, outputs, source, "", contiguous, False, "safe")


def prepare(
    made: Any,
    inputs: tuple[mx.array, ...],
    *,
    shapes: Any = None,
    dtypes: Any = None,
    grid: Any = None,
    group: Any = (1, 1, 1),
    template: Any = (),
    init: float | None = None,
    constants: tuple[mx.array, ...] = (),
    donate: Any = None,
) -> Any:
    return core.prepare(
        made,
        inputs,
        template,
        grid or (inputs[0].size, 1, 1),
        group,
        shapes or (inputs[0].shape,),
        dtypes or (inputs[0].dtype,),
        init,
        constants,
        donate,
    )


class Square:
    """The record of a square: each method as the transform's definition has it."""

    def __call__(self, x: mx.array) -> mx.array:
        return core.launch(prepare(kernel("square", SQUARE), (x,)), (x,), self)

    def vjp(self, primals: Any, cotangents: Any, argnums: Any, outputs: Any) -> Any:
        assert argnums == (0,)
        assert len(outputs) == 1
        return (2 * primals[0] * cotangents[0],)

    def jvp(self, primals: Any, tangents: Any, argnums: Any) -> Any:
        return (2 * primals[0] * tangents[0],)

    def vmap(self, inputs: Any, axes: Any) -> Any:
        return (self(mx.moveaxis(inputs[0], axes[0], 0)),), (0,)


square = Square()
x16 = mx.arange(16, dtype=mx.float32)
mx.eval(x16)  # Another thread could not: the node's stream is this thread's.
