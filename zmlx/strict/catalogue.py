"""Every kernel of the catalogue, as it is launched: forward, training and backward kernels, in the
geometry of a GPU and of the CPU.

Ops run on a target of a GPU that records instead of launching, so that a kernel is found by being
launched, whatever module made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from math import prod
from typing import Any

import mlx.core as mx

from .. import launch, registry, testing
from ..metal import KernelSpec
from ..targets import cuda, metal
from ..transforms import strict
from .check import METAL_VERSION, Problem, check_many, metal_text

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
#: What an op takes beside these: of each type that kernels compute in, and the narrowest.
OTHERS = (mx.bool_, mx.int8, mx.uint8, mx.int32, mx.uint32, mx.int64, mx.uint64)
#: By target. The text of the CPU's geometry is read as Metal, too.
GEOMETRIES = {"metal": ("gpu", "cpu"), "cuda": ("gpu",)}

# Settings of its own keep a recording apart from real launches, which ops remember.
_recordings = count(1)


@dataclass(frozen=True, eq=False)
class Launch:
    """A recorded launch; `op` names the op that made it."""

    op: str
    spec: KernelSpec
    arrays: tuple[mx.array, ...]
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    def arguments(self) -> tuple[Any, ...]:
        """The launch as the targets take it."""
        return (
            self.spec, self.arrays, self.template, self.grid, self.threadgroup, self.shapes,
            self.dtypes,
        )  # fmt: skip

    def text(self) -> str:
        """The Metal function that MLX would compile."""
        return metal_text(*self.arguments())


@contextmanager
def recording(
    op: str = "", *, target: str = "metal", geometry: str = "gpu", **constants: int
) -> Iterator[list[Launch]]:
    """Kernels launched inside are those of a GPU's target, in a geometry (see `launch.geometry`):
    they are recorded, and return zeros."""
    found: list[Launch] = []

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
    ) -> Launch:
        # Placeholders, since an array of a trace does not outlive it.
        like = tuple(mx.zeros(x.shape, x.dtype) for x in (*arrays, *constants))
        found.append(
            Launch(op, spec, like, tuple(template), grid, threadgroup, shapes, tuple(dtypes))
        )
        return found[-1]

    def zeros(prepared: Launch, arrays: tuple[mx.array, ...]) -> Any:
        outputs = tuple(
            mx.zeros(s, d) for s, d in zip(prepared.shapes, prepared.dtypes, strict=True)
        )
        return outputs[0] if len(outputs) == 1 else outputs

    module: Any = {"metal": metal, "cuda": cuda}[target]
    kept = module.prepare, module.launch, module.unavailable
    module.prepare, module.launch, module.unavailable = prepare, zeros, lambda: None
    try:
        # Strict: gradients are by rules alone, since CUDA has no node of MLX's to hold here.
        constants["RECORDING"] = next(_recordings)
        with launch.target(target), launch.geometry(geometry, **constants), strict():
            yield found
    finally:
        module.prepare, module.launch, module.unavailable = kept


def launches(
    names: Iterable[str] = (), *, every_case: bool = False, target: str = "metal"
) -> list[Launch]:
    """The launches of the named ops (default: all) on a GPU's target, without repeats of the same
    text: every dtype, geometry, option and kind of argument; with `every_case` every case in every
    geometry, with its own options and in a dtype each."""
    wanted = set(names)
    found: dict[str, Launch] = {}
    for op in registry.ops():
        if wanted and not {op.name, op.family} & wanted:
            continue
        for case, dtype, geometry in _combinations(op, every_case, GEOMETRIES[target]):
            with recording(op.name, target=target, geometry=geometry) as some:
                _run(op, case, dtype, dict(case.options))
                others = () if every_case or _is_index(op, dtype) else op.options
                for options in ({o.name: v} for o in others for v in o.values):
                    with suppress(ValueError):  # an option that this case does not fit
                        _run(op, case, dtype, {**case.options, **options})
            for item in some:
                found.setdefault(item.text(), item)
    for name, call in registry.calls():
        if wanted and name not in wanted:
            continue
        for dtype, geometry in zip(DTYPES, ("gpu", "gpu", GEOMETRIES[target][-1]), strict=True):
            with recording(name, target=target, geometry=geometry) as some:
                call(dtype)
            for item in some:
                found.setdefault(item.text(), item)
    return list(found.values())


def _combinations(
    op: registry.Op, every_case: bool, geometries: tuple[str, ...]
) -> list[tuple[registry.Case, mx.Dtype, str]]:
    if every_case:
        return [(c, d, g) for c, d in zip(op.cases, cycle(DTYPES)) for g in geometries]

    def elements(case: registry.Case) -> int:
        return prod((*case.lead, *case.sizes.values()))

    some = sorted((case for case in op.cases if elements(case) > 0), key=elements)
    # Arrays of fewer than 8 elements are in constant, larger ones in device.
    small, large = some[0], some[-1]
    taken = {dtype for argument in op.arguments for dtype in argument.dtypes}
    return [
        (small, mx.bfloat16, "gpu"),
        (large, mx.float16, "gpu"),
        (large, mx.float32, geometries[-1]),
        *((large, dtype, "gpu") for dtype in OTHERS if dtype in taken),
    ]


def _is_index(op: registry.Op, dtype: mx.Dtype) -> bool:
    """Whether arguments of this dtype are no numbers, which are read alike whatever the options."""
    return not any({dtype, *DTYPES} <= {*argument.dtypes} for argument in op.arguments)


def _run(op: registry.Op, case: registry.Case, dtype: mx.Dtype, options: dict[str, Any]) -> None:
    """The op without and with a gradient for all, and for each, of its arguments."""
    for optional in (True, False):
        values = testing.draw(op, case, dtype, optional=optional)
        function = partial(_with, op, values, options)
        function([], [])
        wanted = testing.differentiated(op, values)
        for argnums in (wanted, *([i] for i in wanted if len(wanted) > 1)):
            primals = [x for i in argnums if (x := values[i]) is not None]
            cotangents = [mx.ones_like(y) for y in function(argnums, primals)]
            mx.vjp(lambda *some, argnums=argnums, f=function: f(argnums, some), primals, cotangents)


def _with(
    op: registry.Op,
    values: Sequence[mx.array | None],
    options: dict[str, Any],
    argnums: Sequence[int],
    some: Sequence[mx.array],
) -> list[mx.array]:
    """The outputs of the op, the arguments at `argnums` replaced by `some`."""
    full = list(values)
    for i, x in zip(argnums, some, strict=True):
        full[i] = x
    result = op.function(*full, **options)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def check(
    names: Iterable[str] = (), *, every_case: bool = False, version: int = METAL_VERSION
) -> dict[Launch, list[Problem]]:
    """The problems of every kernel of the named ops (default: all); none is an empty list."""
    found = launches(names, every_case=every_case)
    problems = check_many([item.text() for item in found], version=version, catalogue=True)
    return dict(zip(found, problems, strict=True))
