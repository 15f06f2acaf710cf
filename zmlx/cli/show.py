"""Print the final source and the geometry of the kernels that an op launches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from zmlx.metal import KernelSpec
    from zmlx.registry import Op
    from zmlx.strict.catalogue import Launch

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


def run(arguments: argparse.Namespace) -> int:
    """Prints the kernels and returns the exit status."""
    import mlx.core as mx

    from zmlx import native, registry
    from zmlx.targets import cpu, metal

    try:
        op = registry.get(arguments.op)
    except KeyError as error:
        print(f"[show] {error.args[0]}", file=sys.stderr)
        return 2
    if arguments.target != "metal":
        try:
            native.load()  # which writes the text of CUDA and of the CPU
        except (ImportError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2
    with _recorded(arguments.target) as launches:
        _call(op, getattr(mx, arguments.dtype), arguments.gradient)
    for one in launches:
        print(_heading(one))
        print(
            metal.text(*one.arguments())
            if arguments.target == "metal"
            else cpu.text(one.spec, arguments.target, *one.arguments()[1:])
        )
    return 0


def _call(op: Op, dtype: mx.Dtype, gradient: bool) -> None:
    """Builds the op's graph at its first benchmark shape, without evaluating it."""
    import mlx.core as mx

    from zmlx.testing import differentiated, dtype_of, gradients, resolve

    case = op.benchmarks[0]
    values = [
        None
        if argument.optional and not case.optional
        else mx.zeros(resolve(argument.shape, case), dtype_of(argument, dtype))
        for argument in op.arguments
    ]
    function = partial(op.function, **case.options)
    outputs = function(*values)
    if gradient and (which := differentiated(op, values)):
        cotangents = list(outputs) if isinstance(outputs, tuple) else [outputs]
        gradients(function, values, which, cotangents)


@contextmanager
def _recorded(target: str) -> Iterator[list[Launch]]:
    """Collects every launch that is prepared inside."""
    from zmlx import launch
    from zmlx.strict import catalogue
    from zmlx.targets import cpu

    if target != "cpu":
        with catalogue.recording(target=target) as launches:
            yield launches
        return
    launches = []
    prepare = cpu.prepare

    def record(spec: KernelSpec, arrays: tuple[mx.array, ...], *call: Any, **more: Any) -> Any:
        *middle, _, constants = call
        launches.append(catalogue.Launch("", spec, (*arrays, *constants), *middle))
        return prepare(spec, arrays, *call, **more)

    cpu.prepare = record
    try:
        with launch.target("cpu"), launch.geometry("cpu", SHOW=next(_runs)):
            yield launches
    finally:
        cpu.prepare = prepare


def _heading(one: Launch) -> str:
    from zmlx.arguments import dtype_name

    inputs = ", ".join(
        f"{name} {dtype_name(x.dtype)} {x.shape}"
        for name, x in zip(one.spec.input_names, one.arrays, strict=True)
    )
    template = ", ".join(
        f"{name}={value if isinstance(value, int) else dtype_name(value)}"
        for name, value in one.template
    )
    return (
        f"// {one.spec.full_name}\n// inputs: {inputs}\n// template: {template or 'none'}\n"
        f"// grid {one.grid}, threadgroup {one.threadgroup}"
    )
