"""The CPU target: the Metal text is compiled as C++ and runs as a lazy MLX primitive.

The work is done by the C++ core in `zmlx.native`, which is built and loaded at the first launch.
"""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import native
from ..launch import settings

if TYPE_CHECKING:
    from ..metal import KernelSpec
    from ..transforms import Record

#: `maybe_tracing` inside a trace with dynamic shapes (shapeless compile).
DYNAMIC = 2


def unavailable() -> str | None:
    """Why kernels cannot run on the CPU here, with the remedy, or None where they can."""
    try:
        native.load()
    except (ImportError, RuntimeError, OSError, ValueError) as error:
        return str(error)
    return None


def core() -> Any:
    """The C++ core."""
    return native.load()


def _first_run(launches: dict[bytes, Any], inputs: tuple[Any, ...]) -> Any:
    bind()
    return run(launches, inputs)


#: The fast path: launches what `launches` holds for the signature of `inputs`; None if it holds
#: nothing, or if an input is not an array or is being traced.
run = _first_run


def bind() -> None:
    """Puts the core's functions in the place of `run` and `known`, so that a call goes straight to
    C++."""
    global run, known
    core = native.load()
    run, known = core.run, core.known


@cache
def _core_if_any() -> Any:
    """The core, or None on a machine that it does not run on, such as a Mac."""
    try:
        return native.load()
    except (ImportError, RuntimeError, OSError):
        return None


def signature(inputs: tuple[mx.array, ...]) -> Any:
    """Shapes and dtypes of `inputs` as a key."""
    core = _core_if_any()
    return core.signature(inputs) if core else tuple((x.shape, x.dtype) for x in inputs)


def _first_known(ways: dict[bytes, Any], arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    if _core_if_any() is None:  # what is wrong with the call comes first
        return None
    bind()
    return known(ways, arrays, options)


#: What `ways` holds for the shapes and dtypes of `arrays` (None among them) and for `options`, else
#: its key there, bytes; None if an array is traced or none, or an option is no plain value, and
#: without the core.
known = _first_known


def maybe_tracing(inputs: tuple[mx.array, ...]) -> int:
    """0 if no input is being traced, 1 if one is, `DYNAMIC` in a trace with dynamic shapes.

    Without the core nothing can tell, and the answer is 1: the launch that a transform needs is
    right for every call.
    """
    core = _core_if_any()
    return core.tracing(inputs) if core else 1


def any_shape(arrays: tuple[mx.array, ...]) -> bool:
    """Whether arrays of other shapes than these may come, as in a shapeless compile: then nothing
    may go by a shape, not even by one without elements.

    Without the core only plain MLX, the target "reference", is compiled so.
    """
    core = _core_if_any()
    if core is not None:
        return bool(core.tracing(arrays) == DYNAMIC)
    return settings().target == "reference" and _counts_elements()


def _counts_elements() -> bool:
    """Whether MLX is in a trace with dynamic shapes. It does not say so, but a mean counts there
    what it divides by, and divides by a number elsewhere."""
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.mean(mx.zeros(2)))
    return "NumberOfElements" in graph.getvalue()


def have_values(arrays: tuple[mx.array, ...]) -> bool:
    """Whether the arrays may be looked at: they are not being traced, or no core can tell, and MLX
    evaluates them."""
    core = _core_if_any()
    if core is not None:
        return bool(core.tracing(arrays) == 0)
    try:
        mx.eval(*arrays)
    except (RuntimeError, ValueError):  # inside mx.compile or mx.vmap
        return False
    return True


def is_primal(x: mx.array) -> bool:
    """Whether a gradient is being taken of `x` itself, such as a parameter of a model. Also true of
    a copy in any other trace; False without the core."""
    core = _core_if_any()
    return core is not None and bool(core.is_primal(x))


def after(x: mx.array, others: tuple[mx.array, ...]) -> mx.array:
    """`x`, evaluated when the others are: `mx.depends` with `mx.jvp` and `mx.vmap`."""
    return native.load().after((x,), others)  # type: ignore[no-any-return]


def _kernel(spec: KernelSpec) -> Any:
    return native.load().kernel(
        spec.full_name,
        spec.input_names,
        spec.output_names,
        spec.body,
        spec.header,
        spec.ensure_row_contiguous,
        spec.atomic_outputs,
        spec.math_mode,
    )


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
    donate: tuple[tuple[int, int], ...] = (),
    paced: bool = False,
) -> Any:
    """The compiled launch; a compile error raises here."""
    return native.load().prepare(
        _kernel(spec), arrays, template, grid, threadgroup, shapes, dtypes, init_value, constants,
        donate or None, paced,
    )  # fmt: skip


def launch(prepared: Any, arrays: tuple[mx.array, ...]) -> Any:
    """One lazy launch that refuses every transform, as MLX's own kernels do."""
    return native.load().launch(prepared, arrays)


def launch_traced(prepared: Any, arrays: tuple[mx.array, ...], record: Record | None) -> Any:
    """One lazy launch, whose node answers transforms by the record."""
    return native.load().launch(prepared, arrays, record)


def text(
    spec: KernelSpec,
    target: str,
    arrays: tuple[mx.array, ...],
    template: tuple[tuple[str, Any], ...],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
) -> str:
    """The complete text of a launch: CUDA, or the C++ of the CPU target."""
    arguments = (_kernel(spec), arrays, template, grid, threadgroup, shapes, dtypes)
    return native.load().source(*arguments, target)  # type: ignore[no-any-return]


def statistics() -> dict[str, int]:
    """Compiles, cache hits, launches and contiguous copies in this process."""
    return dict(native.load().statistics())
