"""Metal source run by the native core alone: what the tests of the language stand on."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from zmlx import native

core = native.load()

#: Whether the compiler says both values of a comparison that does not hold; g++ does from 12 on.
SAYS_VALUES = not re.search(
    r"^(?:g\+\+|c\+\+)\S* .* 11\.",
    subprocess.run([native.compiler_path(), "--version"], capture_output=True, text=True).stdout,
)
_serial = itertools.count()

BREADTH_FIRST, DEPTH_FIRST = 0, 1
SCHEDULES = (BREADTH_FIRST, DEPTH_FIRST, 2, 3, 4)

Triple = tuple[int, int, int]


def triple(extent: int | Sequence[int]) -> Triple:
    """A grid or group that is given by fewer than three numbers."""
    numbers = (extent,) if isinstance(extent, int) else tuple(extent)
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def arguments(
    source: str,
    inputs: dict[str, Any],
    output: tuple[Any, mx.Dtype],
    grid: int | Sequence[int],
    group: int | Sequence[int],
    template: dict[str, Any],
    header: str,
    atomic: bool,
    name: str | None,
) -> tuple[Any, ...]:
    shape, dtype = output
    arrays = tuple(v if isinstance(v, mx.array) else mx.array(v) for v in inputs.values())
    kernel = core.kernel(
        name or f"test{next(_serial)}",
        tuple(inputs),
        ("out",),
        source,
        header,
        True,
        atomic,
        "safe",
    )
    shapes = ((shape,) if isinstance(shape, int) else tuple(shape),)
    return kernel, arrays, tuple(template.items()), triple(grid), triple(group), shapes, (dtype,)


class Metal:
    """A kernel body compiled for one geometry; calling it runs it on its inputs."""

    def __init__(
        self,
        source: str,
        inputs: dict[str, Any] | None = None,
        output: tuple[Any, mx.Dtype] = (1, mx.float32),
        grid: int | Sequence[int] = 1,
        group: int | Sequence[int] = 1,
        template: dict[str, Any] | None = None,
        header: str = "",
        atomic: bool = False,
        init: float | None = None,
        name: str | None = None,
    ) -> None:
        call = arguments(
            source, inputs or {}, output, grid, group, template or {}, header, atomic, name
        )
        self.arrays = call[1]
        self.launch = core.prepare(*call, init, ())

    def __call__(self) -> np.ndarray:
        result = core.launch(self.launch, self.arrays)
        mx.eval(result)
        if result.dtype == mx.bfloat16:
            return np.array(result.astype(mx.float32))
        return np.array(result)


def run(source: str, *args: Any, **kwargs: Any) -> np.ndarray:
    """The output of one launch; takes what `Metal` takes."""
    return Metal(source, *args, **kwargs)()


def cpp(
    source: str,
    inputs: dict[str, Any] | None = None,
    output: tuple[Any, mx.Dtype] = (1, mx.float32),
    grid: int | Sequence[int] = 1,
    group: int | Sequence[int] = 1,
    template: dict[str, Any] | None = None,
    header: str = "",
    name: str | None = None,
) -> str:
    """The C++ text of a kernel, not compiled."""
    call = arguments(source, inputs or {}, output, grid, group, template or {}, header, False, name)
    return core.source(*call, "cpu")


@contextmanager
def schedule(order: int) -> Iterator[None]:
    """Runs cooperative groups in that order: see `set_schedule`."""
    core.set_schedule(order)
    try:
        yield
    finally:
        core.set_schedule(BREADTH_FIRST)


@contextmanager
def checking() -> Iterator[None]:
    """NaN in fresh threadgroup memory, guarded stacks, early returns reported."""
    core.set_checking(True)
    try:
        yield
    finally:
        core.set_checking(False)


def in_every_schedule(kernel: Metal) -> np.ndarray:
    """The kernel's output, which must be the same bits in every order."""
    results = []
    for order in SCHEDULES:
        with schedule(order):
            results.append(kernel())
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint8), results[0].view(np.uint8))
    return results[0]
