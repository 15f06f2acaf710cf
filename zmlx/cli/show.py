"""Print the final source and the geometry of the kernels that an op launches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from zmlx.metal import KernelSpec
    from zmlx.registry import Op

TARGETS = ("metal", "cuda", "cpu")
DTYPES = ("float32", "float16", "bfloat16")

# Settings of its own keep a run apart from launches that ops remember.
_runs = count(1)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("op", help="a name from `python -m zmlx list`")
    parser.add_argument("--target", choices=TARGETS, default="metal", help="default: metal")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument(
        "--gradient", action="store_true", help="the kernels of a training step as well"
    )


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel and everything that its text and its grid depend on."""

    spec: KernelSpec
    inputs: tuple[mx.array, ...]  # the op's arrays, then the constants of the launch
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]


def run(arguments: argparse.Namespace) -> int:
    """Prints the kernels and returns the exit status."""
    import mlx.core as mx

    from zmlx import launch, native, registry
    from zmlx.targets import cpu

    try:
        op = registry.get(arguments.op)
    except KeyError as error:
        print(f"[show] {error.args[0]}", file=sys.stderr)
        return 2
    try:
        native.load()  # which writes the text of every target
    except (ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    kind = "cpu" if arguments.target == "cpu" else "gpu"
    fresh = launch.geometry(kind, SHOW=next(_runs))
    with launch.target("cpu"), fresh, _recorded() as launches:
        _call(op, getattr(mx, arguments.dtype), arguments.gradient)
    for one in launches:
        print(_heading(one))
        print(
            cpu.text(
                one.spec,
                arguments.target,
                one.inputs,
                one.template,
                one.grid,
                one.threadgroup,
                one.shapes,
                one.dtypes,
            )
        )
    return 0


def _call(op: Op, dtype: mx.Dtype, gradient: bool) -> None:
    """Builds the op's graph at its first benchmark shape, without evaluating it."""
    import mlx.core as mx

    from zmlx.testing import dtype_of, gradients, resolve

    case = op.benchmarks[0]
    values = [mx.zeros(resolve(a.shape, case), dtype_of(a, dtype)) for a in op.arguments]
    outputs = op.function(*values, **case.options)
    if gradient and op.differentiable:
        cotangents = list(outputs) if isinstance(outputs, tuple) else [outputs]
        gradients(op.function, values, op.differentiable, cotangents)


@contextmanager
def _recorded() -> Iterator[list[Launch]]:
    """Collects every launch that is prepared inside."""
    from zmlx import metal

    launches: list[Launch] = []
    prepare = metal.prepare

    def record(spec: KernelSpec, target: str | None, *configuration: Any, **more: Any) -> Any:
        arrays, *middle, _, constants = configuration
        launches.append(Launch(spec, (*arrays, *constants), *middle))
        return prepare(spec, target, *configuration, **more)

    metal.prepare = record
    try:
        yield launches
    finally:
        metal.prepare = prepare


def _heading(one: Launch) -> str:
    from zmlx.arguments import dtype_name

    inputs = ", ".join(
        f"{name} {dtype_name(x.dtype)} {x.shape}"
        for name, x in zip(one.spec.input_names, one.inputs, strict=True)
    )
    template = ", ".join(
        f"{name}={value if isinstance(value, int) else dtype_name(value)}"
        for name, value in one.template
    )
    return (
        f"// {one.spec.full_name}\n// inputs: {inputs}\n// template: {template or 'none'}\n"
        f"// grid {one.grid}, threadgroup {one.threadgroup}"
    )
