"""An op as each library computes it, in three modes.

    forward     the outputs, without anything kept for a gradient
    both        outputs and the gradients of all differentiable arguments for given cotangents,
                in one evaluation
    backward    the gradients alone: ahead of the clock the outputs, and all that they need, are
                evaluated with the gradient in sight, so that what a library saves for its backward
                is there

In MLX graph building is part of `forward` and `both`; for `backward` it lies before the clock,
because MLX builds the whole graph at once. A library that computes part of its backward early is
faster in `backward` and not in `both`, so both are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch, registry
from ..registry import Op
from .measure import Variant

#: Numbers of a call that is small, and yet for all threads.
SMALL = 1 << 16

MODES = ("forward", "backward", "both")

#: Names of variants, in the order of the report.
ZMLX = "zmlx"
GPU_GEOMETRY = "zmlx, GPU geometry"
EAGER = "mlx"
COMPILED = "mlx compile"
BUILT_IN = "mlx built-in"
UNFUSED = "zmlx unfused"
TORCH = "torch"
TORCH_COMPILED = "torch compile"
NAMES = (ZMLX, UNFUSED, GPU_GEOMETRY, EAGER, COMPILED, BUILT_IN, TORCH, TORCH_COMPILED)


@dataclass(frozen=True)
class Problem:
    """What is computed: arguments (None for an optional one that is not given), options, which
    arguments get a gradient, and for which cotangents of the outputs."""

    op: Op
    values: tuple[mx.array | None, ...]
    options: Mapping[str, Any]
    which: tuple[int, ...]
    cotangents: tuple[mx.array, ...]


@dataclass(frozen=True)
class Way:
    """A library's way to compute a problem: what is timed, and the same results as float64."""

    variant: Variant
    results: Callable[[], list[np.ndarray[Any, Any]]]


def mlx_names(op: Op) -> tuple[str, ...]:
    """The variants of zmlx and MLX that there are of an op."""
    absent = {TORCH, TORCH_COMPILED}
    if op.baseline is None:
        absent.add(BUILT_IN)
    if op.unfused is None:
        absent.add(UNFUSED)
    return tuple(name for name in NAMES if name not in absent)


def mlx_ways(problem: Problem, mode: str, names: Sequence[str]) -> dict[str, Callable[[], Way]]:
    """zmlx and MLX's ways, each made when called, since making one may compile."""
    op, options = problem.op, problem.options

    def ours(*arrays: mx.array | None) -> Any:
        return op.function(*arrays, **options)

    def reference(*arrays: mx.array | None) -> Any:
        return op.reference(*arrays, **options)

    def built_in(*arrays: mx.array | None) -> Any:
        assert op.baseline is not None
        return op.baseline(*arrays, **options)

    def unfused(*arrays: mx.array | None) -> Any:
        assert op.unfused is not None
        return op.unfused(*arrays, **options)

    ways = {
        ZMLX: lambda: _way(ZMLX, problem, ours, mode),
        GPU_GEOMETRY: lambda: _way(
            GPU_GEOMETRY, problem, ours, mode, context=lambda: launch.geometry("gpu")
        ),
        EAGER: lambda: _way(EAGER, problem, reference, mode),
        COMPILED: lambda: _way(COMPILED, problem, reference, mode, compiled=True),
        BUILT_IN: lambda: _way(BUILT_IN, problem, built_in, mode),
        UNFUSED: lambda: _way(UNFUSED, problem, unfused, mode),
    }
    offered = mlx_names(op)
    return {name: way for name, way in ways.items() if name in names and name in offered}


def as_tuple(result: Any) -> tuple[mx.array, ...]:
    """One output or several as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _way(
    name: str,
    problem: Problem,
    function: Callable[..., Any],
    mode: str,
    *,
    compiled: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Way:
    given = [i for i, v in enumerate(problem.values) if v is not None]
    values = [v for v in problem.values if v is not None]
    wanted = [given.index(i) for i in problem.which]
    cotangents = list(problem.cotangents)

    def forward(*arrays: mx.array) -> tuple[mx.array, ...]:
        # What follows the last array that is given is left out: a built-in may not know of it.
        full: list[mx.array | None] = [None] * (given[-1] + 1)
        for i, value in zip(given, arrays, strict=True):
            full[i] = value
        return as_tuple(function(*full))

    def with_gradients(*arrays: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        def of(*some: mx.array) -> list[mx.array]:
            full = list(arrays)
            for i, value in zip(wanted, some, strict=True):
                full[i] = value
            return list(forward(*full))

        return mx.vjp(of, [arrays[i] for i in wanted], cotangents)

    if mode == "forward":
        run = mx.compile(forward) if compiled else forward

        def call(_: Any) -> Any:
            with context():
                outputs = run(*values)
            mx.eval(outputs)
            return outputs

        return Way(Variant(name, call, ready=_small_call), lambda: _numbers(call(None)))

    steps = mx.compile(with_gradients) if compiled else with_gradients

    def build() -> Any:
        with context():
            return steps(*values)

    def evaluate_both(_: Any) -> Any:
        outputs, gradients = build()
        mx.eval(outputs, gradients)
        return [*outputs, *gradients]

    def evaluated_forward() -> Any:
        outputs, gradients = build()
        mx.eval(outputs)
        return gradients

    def evaluate_backward(gradients: Any) -> Any:
        mx.eval(gradients)
        return gradients

    if mode == "both":
        both = Variant(name, evaluate_both, ready=_small_call)
        return Way(both, lambda: _numbers(evaluate_both(None)))
    return Way(
        Variant(name, evaluate_backward, evaluated_forward, _small_call),
        lambda: _numbers(evaluate_backward(evaluated_forward())),
    )


@cache
def _small_array() -> mx.array:
    x = mx.zeros(SMALL)
    mx.eval(x)
    return x


def _small_call() -> None:
    """An op of zmlx and one of MLX."""
    x = _small_array()
    mx.eval(registry.get("silu").function(x), mx.abs(x))


def _numbers(arrays: Sequence[mx.array]) -> list[np.ndarray[Any, Any]]:
    return [np.array(x.astype(mx.float32)) for x in arrays]
