"""A row of the language's table: a construct, a kernel that uses it, and what that computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch, metal

#: The input of a kernel unless a row has its own, and the index of its threads.
X = np.array([1.5, -2.0, 3.25, 0.0, 7.0, -0.5, 100.0, 8.0], np.float32)
INDEX = np.arange(8)

#: By how much functions of the library may round otherwise on a GPU.
_ROUNDINGS = 1e-6

_MEET = "threadgroup_barrier(mem_flags::mem_none);\n"


@dataclass(frozen=True)
class Row:
    """A kernel whose output is known.

    Attributes:
        body: sets `float r` from the thread's index `i` and the input `x`.
        expected: `r` of every thread, or one value for all.
        header, template: of the kernel.
        x: the input. An array of fewer than 8 elements is called `c`, because MLX passes it as
            `constant`.
        threads: of the grid, if it is a line; `grid` and `group` of any other.
        together: the threads are one group and work together; else each is on its own, and the
            size of a group changes nothing.
        stores: the body stores to `out` by itself, whose shape and dtype are those of `expected`.
        atomic: `out` is an array of atomics, filled with 0.
        within: largest relative error.
        on_cuda: an NVIDIA GPU has run the row as it stands; a row that is new or changed says False
            until one did.
    """

    body: str
    expected: Any
    header: str = ""
    template: dict[str, Any] = field(default_factory=dict)
    x: Any = None
    threads: int = 0
    grid: tuple[int, int, int] | None = None
    group: tuple[int, int, int] | None = None
    together: bool = False
    stores: bool = False
    atomic: bool = False
    within: float = 0.0
    on_cuda: bool = True

    def reference(self) -> np.ndarray:
        """What the kernel computes."""
        if self.stores:
            values = np.asarray(self.expected)
            return values.astype(np.float32) if values.dtype == np.float64 else values
        return np.broadcast_to(np.float32(self.expected), (self._threads(),))

    def _threads(self) -> int:
        return self.threads or (8 if self.x is None else int(np.size(self.x)))

    def arguments(self, group: int | None = None, *, meet: bool = False) -> tuple[Any, ...]:
        """The launch as the targets take it: specification, arrays, template, grid, threadgroup,
        shapes and dtypes.

        Args:
            group: threads of a group; default: all.
            meet: begin with a barrier, so that the threads run as ones that meet.
        """
        values = X if self.x is None else self.x
        name = "x" if np.size(values) >= 8 else "c"
        body = f"uint i = thread_position_in_grid.x;\n{_MEET if meet else ''}"
        body += self.body if self.stores else f"float r = -9;\n{self.body}\nout[i] = r;"
        spec = metal.KernelSpec(
            "row", (name,), ("out",), body, self.header, atomic_outputs=self.atomic
        )
        out = self.reference()
        threads = self._threads()
        return (
            spec, (mx.array(values),), tuple(self.template.items()), self.grid or (threads, 1, 1),
            self.group or (group or threads, 1, 1), (out.shape,), (mx.array(out).dtype,),
        )  # fmt: skip

    def run(self, group: int | None = None, *, meet: bool = False) -> np.ndarray:
        """The kernel's output on the current target."""
        spec, arrays, template, grid, threadgroup, shapes, dtypes = self.arguments(group, meet=meet)
        target, init = launch.settings().target, 0.0 if self.atomic else None
        prepared = metal.prepare(
            spec, target, arrays, template, grid, threadgroup, shapes, dtypes, init
        )
        result = metal.call(spec.name, target, prepared, arrays, None, None)
        mx.eval(result)
        return np.array(result)

    def check(self, group: int | None = None, *, meet: bool = False) -> None:
        """Runs the kernel on the current target; AssertionError if it computes something else."""
        result, expected = self.run(group, meet=meet), self.reference()
        within = self.within
        if launch.settings().target != "cpu" and expected.dtype == np.float32:
            within = max(within, _ROUNDINGS)
        if within:
            np.testing.assert_allclose(result, expected, rtol=within, atol=within / 10)
        else:
            np.testing.assert_array_equal(result, expected)


@dataclass(frozen=True)
class Refusal:
    """A kernel that is refused.

    Attributes:
        text: what stands on `line` of the source, or the whole header.
        message: the error after "[kernel …] line … of the …: ".
        line: of the source, or of the header if `header`.
    """

    text: str
    message: str
    line: int = 2
    header: bool = False

    def arguments(self, group: int = 1) -> tuple[Any, ...]:
        """The launch as the targets take it."""
        body = "out[0] = 1;" if self.header else f"out[0] = 1;\n{self.text}\nout[1] = 1;"
        header = f"{self.text}\n" if self.header else ""
        spec = metal.KernelSpec("wrong", ("x",), ("out",), body, header)
        shape: Sequence[int] = (64,)
        return (
            spec, (mx.ones(shape),), (), (64, 1, 1), (group, 1, 1), (tuple(shape),), (mx.float32,)
        )  # fmt: skip

    def place(self) -> str:
        """The line as the error names it."""
        return f"line {self.line} of the {'header' if self.header else 'source'}"
