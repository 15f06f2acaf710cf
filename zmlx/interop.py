"""Kernels written by others for a Mac, unchanged: `mx.fast.metal_kernel` where there is no Metal.

    >>> with zmlx.install():
    ...     import a_module_with_metal_kernels

`install()` puts `metal_kernel` of this module in the place of MLX's, so that kernels made from then
on run on zmlx's targets. Much code makes its kernels only if Metal is available and the GPU is the
default device: `install(claim_metal=True)` answers those questions as a Mac does. Where there is no
GPU, whoever then asks for a stream of one gets the stream of the CPU; a GPU on CUDA keeps its
streams. On a Mac nothing is changed.

A name that a module imported from MLX before `install()` stays MLX's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import mlx.core as mx

from . import claims, launch, metal
from .arguments import check_flag
from .requests import check_grid, key_of
from .targets import cpu, cuda

_NO_METAL = "No Metal back-end"
_CONFIGURATIONS_KEPT = 256
_ARRAY = mx.array
_INPUTS = (mx.array, bool, int, float)

_mlx_metal_kernel: Callable[..., Any] = mx.fast.metal_kernel


class InstalledKernel:
    """What `mx.fast.metal_kernel` returns while installed: called as MLX's kernels are."""

    def __init__(self, spec: metal.KernelSpec, original: Callable[..., Any]) -> None:
        self.name = spec.name
        self._spec = spec
        self._original = original
        self._scalars = False
        # Those of the CPU under signatures alone, as `cpu.run` takes them.
        self._plans: dict[Any, dict[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"<metal_kernel {self.name} on zmlx>"

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """One lazy launch, as documented for `mx.fast.metal_kernel`; a list of outputs."""
        key = None
        try:
            key = (
                tuple(map(tuple, output_shapes)),
                tuple(output_dtypes),
                grid if grid.__class__ is tuple else tuple(grid),
                threadgroup if threadgroup.__class__ is tuple else tuple(threadgroup),
                key_of(tuple([(n, v) for n, v in template]) if template else (), init_value),
            )
            plans = self._plans.get(key)
        except (TypeError, ValueError):
            plans = None  # MLX says what is wrong, below
        plain = stream is None and not verbose
        if plans is not None and plain:
            result = self._again(plans, inputs)
            if result is not None:
                return [result] if result.__class__ is _ARRAY else list(result)
        arguments = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
            "template": template,
            "init_value": init_value,
            "verbose": verbose,
            "stream": stream,
        }
        self._validate(inputs, stream, arguments)
        assert key is not None
        arrays = _arrays(inputs)
        if verbose:
            self._print(arrays, arguments)
        with claims.on_stream(stream):
            return self._launch(arrays, key, init_value)

    def _again(self, plans: dict[Any, Any], inputs: Sequence[Any]) -> Any:
        """The outputs of a launch that was prepared before, when MLX looked at its arguments; None
        if none was."""
        target = launch.settings().target
        if target == "cpu":
            return cpu.run(plans, _arrays(inputs) if self._scalars else tuple(inputs))
        if target != "cuda" or not all(isinstance(x, _INPUTS) for x in inputs):
            return None
        arrays = _arrays(inputs)
        prepared = plans.get((target, cpu.signature(arrays)))
        return None if prepared is None else cuda.launch(prepared, arrays)

    def _validate(self, inputs: Sequence[Any], stream: Any, arguments: dict[str, Any]) -> None:
        """Raises MLX's own error for wrong arguments: MLX looks at them before it finds that it has
        no Metal, with CUDA as without."""
        try:
            self._original(inputs=inputs, **{**arguments, "verbose": False})
        except RuntimeError as error:
            if _NO_METAL not in str(error):
                raise
        if stream is not None and not claims.is_gpu(stream):
            raise ValueError("[metal_kernel] Only supports the GPU.")
        self._scalars = any(not isinstance(x, mx.array) for x in inputs)

    def _print(self, arrays: tuple[mx.array, ...], arguments: dict[str, Any]) -> None:
        """The generated source, by MLX itself, which generates it while exporting."""
        arguments = {**arguments, "stream": None}
        mx.export_function(
            lambda event: None,
            lambda *some: self._original(inputs=list(some), **arguments),
            *[mx.zeros(x.shape, x.dtype) for x in arrays],
        )

    def _launch(
        self, arrays: tuple[mx.array, ...], key: Any, init_value: float | None
    ) -> list[mx.array]:
        shapes, dtypes, grid, threadgroup, (template, *_) = key
        target = launch.settings().target
        if len(self._plans) >= _CONFIGURATIONS_KEPT:
            self._plans.clear()
        plans = self._plans.setdefault(key, {})
        signature = cpu.signature(arrays)
        if target != "cpu":
            signature = (target, signature)
        prepared = plans.get(signature)
        if prepared is None:
            if len(plans) >= launch.SHAPES_KEPT:
                plans.clear()
            check_grid(self.name, grid, shapes, init_value)
            prepared = plans[signature] = metal.prepare(
                self._spec, target, arrays, template, grid, threadgroup, shapes, dtypes, init_value
            )
        result = (cuda if target == "cuda" else cpu).launch(prepared, arrays)
        return [result] if isinstance(result, mx.array) else list(result)


def _arrays(inputs: Sequence[Any]) -> tuple[mx.array, ...]:
    return tuple([x if x.__class__ is _ARRAY else _array(x) for x in inputs])


def _array(value: Any) -> mx.array:
    # A zero is not remembered, since 0.0 and -0.0 are equal.
    if value.__class__ in (bool, int, float) and value:
        return metal.scalar(value)
    return mx.array(value)


@functools.wraps(_mlx_metal_kernel)
def metal_kernel(*args: Any, **kwargs: Any) -> InstalledKernel:
    """`mx.fast.metal_kernel` on zmlx's targets; the same arguments, errors and result."""
    # MLX checks the arguments, and goes on checking those of every new kind of call.
    original = _mlx_metal_kernel(*args, **kwargs)
    return InstalledKernel(_spec(*args, **kwargs), original)


def _spec(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
) -> metal.KernelSpec:
    return metal.KernelSpec(
        name, tuple(input_names), tuple(output_names), source, header, ensure_row_contiguous,
        atomic_outputs, dict(compile_options or {}).get("math_mode", "safe"),
    )  # fmt: skip


# ---- installing ----------------------------------------------------------------------------------


class Installation:
    """What `install` returns: as a context manager, its end restores what was before."""

    def __init__(self, before: tuple[bool, bool]) -> None:
        self._before = before

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _become(*self._before)


_kernel_patch = claims.Patches()
_claim_patch = claims.Patches()


def _state() -> tuple[bool, bool]:
    return bool(_kernel_patch), bool(_claim_patch)


def _become(installed: bool, claimed: bool) -> None:
    if installed and not _kernel_patch:
        _kernel_patch.put(mx.fast, "metal_kernel", metal_kernel)
    if claimed and not _claim_patch:
        claims.claim(_claim_patch)
    if not claimed:
        _claim_patch.restore()
    if not installed:
        _kernel_patch.restore()


def install(*, claim_metal: bool = False) -> Installation:
    """Kernels of `mx.fast.metal_kernel` run on zmlx's targets from now on.

    Doing it again changes nothing, or adds the claims. As a context manager it is undone at the
    end of the block, back to what was before it; otherwise by `uninstall()`. On a machine with
    Metal it does nothing.

    Args:
        claim_metal: answer `mx.metal.is_available()` and `mx.device_info()` as a Mac does. Where
            MLX has no GPU, answer the questions about devices so too, and give the CPU's stream to
            whoever asks for one of the GPU. `patched()` lists every name.
    """
    check_flag("install", "claim_metal", claim_metal)
    before = _state()
    # Found out before the claim, and remembered.
    if launch.gpu_target() != "metal":
        _become(True, before[1] or claim_metal)
    return Installation(before)


def uninstall() -> None:
    """Restores everything that `install` changed."""
    _become(False, False)


def patched() -> tuple[str, ...]:
    """The names that are replaced at the moment."""
    return (*_kernel_patch.names(), *_claim_patch.names())
