"""The Metal target: the source goes to `mx.fast.metal_kernel` unchanged."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..launch import gpu_target

if TYPE_CHECKING:
    from ..metal import KernelSpec


def unavailable() -> str | None:
    """Why kernels cannot run on Metal here, with the remedy, or None where they can."""
    if gpu_target() == "metal":
        return None
    return "the Metal target needs MLX's Metal back end, which exists on Apple silicon only"


def _make(spec: KernelSpec) -> Any:
    # MLX's own, also where `zmlx.install` has put another in its place.
    make = getattr(mx.fast.metal_kernel, "__wrapped__", mx.fast.metal_kernel)
    return make(
        name=spec.full_name,
        input_names=list(spec.input_names),
        output_names=list(spec.output_names),
        source=spec.body,
        header=spec.header,
        ensure_row_contiguous=spec.ensure_row_contiguous,
        atomic_outputs=spec.atomic_outputs,
        compile_options={"math_mode": spec.math_mode},
    )


_kernel = cache(_make)


def _arguments(
    template: tuple[tuple[str, Any], ...],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
) -> dict[str, Any]:
    """What MLX's kernel takes beside its inputs."""
    return {
        "template": list(template),
        "grid": grid,
        "threadgroup": threadgroup,
        "output_shapes": list(shapes),
        "output_dtypes": list(dtypes),
    }


def prepare(
    spec: KernelSpec,
    arrays: tuple[mx.array, ...],
    template: tuple[tuple[str, Any], ...],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
    init_value: float | None,
    constants: tuple[mx.array, ...],
) -> Any:
    """The kernel and the arguments of its launch, for `launch`."""
    arguments = _arguments(template, grid, threadgroup, shapes, dtypes)
    if init_value is not None:
        arguments["init_value"] = init_value
    return _kernel(spec), arguments, list(constants)


def text(spec: KernelSpec, arrays: tuple[mx.array, ...], *call: Any) -> str:
    """The complete function that MLX would compile for a launch (the arguments of `prepare` from
    the template to the dtypes), from MLX's own generator, which needs no Metal."""
    kernel, arguments = _make(spec), _arguments(*call)
    found: list[str] = []

    def keep(event: Any) -> None:
        if event.get("type") == "primitive" and event["name"] == "CustomKernel":
            found.append(event["arguments"][1])

    def launched(*inputs: mx.array) -> Any:
        return kernel(inputs=list(inputs), **arguments)

    # Placeholders, since the arrays may be those of a trace.
    mx.export_function(keep, launched, *[mx.zeros(x.shape, x.dtype) for x in arrays])
    return _with_all_outputs(found[0], len(spec.output_names))


def _with_all_outputs(text: str, outputs: int) -> str:
    """MLX (to 0.32.4 at least) closes the parameter list before each of the last outputs if there
    are several, a use of <input>_shape and no thread attribute."""
    head, _, rest = text.rpartition("[[kernel]] void ")
    for _ in range(outputs - 1):
        rest = re.sub(r"(\[\[buffer\(\d+\)\]\])\) \{\n(?=  device )", r"\1,\n", rest, count=1)
    return head + "[[kernel]] void " + rest


def launch(prepared: Any, arrays: tuple[mx.array, ...]) -> Any:
    """One lazy launch; an array, or a tuple of several outputs."""
    kernel, arguments, constants = prepared
    outputs = kernel(inputs=[*arrays, *constants], **arguments)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
