"""A run: which rows, in which order, against which anchors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .. import metal, testing
from ..arguments import dtype_name
from ..registry import Case, Op
from . import memory
from .anchors import FLOPS, Anchors, last_level_cache, threads_here
from .bars import BARS
from .environment import environment
from .measure import Variant, measure
from .result import Result, Row
from .rows import Plan, at_rows, detail, run_row
from .summary import Summary, summary

#: Rounds of a point of the sweep: it is for the eye, no bar rests on it.
_SWEEP_ROUNDS = 7


@dataclass(frozen=True)
class Task:
    """One row to be measured."""

    op: Op
    case: Case
    dtype: mx.Dtype
    mode: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """That of its row."""
        shape, dtype = shape_of(self.op, self.case), dtype_name(self.dtype)
        return self.op.name, shape, dtype, self.mode, detail(self.op, self.case)


def shape_of(op: Op, case: Case) -> str:
    """The shape of the first argument, as rows and bars name it."""
    return "x".join(map(str, testing.resolve(op.arguments[0].shape, case)))


def default_cases(op: Op) -> list[Case]:
    """The benchmarks that a bar is about, or the first where there is no such."""
    wanted = {bar.shape for bar in BARS if {op.name, op.family} & set(bar.who)}
    return [c for c in op.benchmarks if shape_of(op, c) in wanted] or [op.benchmarks[0]]


def at_shape(op: Op, shape: Sequence[int]) -> Case:
    """The op's first benchmark at a shape: the last axis is its size, the others lead."""
    symbols = list(op.benchmarks[0].sizes)
    if len(symbols) != 1:
        raise ValueError(
            f"[bench] '--shape' must be left out for {op.name}, which has sizes "
            f"{', '.join(symbols)}."
        )
    lead, sizes = tuple(shape[:-1]), {symbols[0]: shape[-1]}
    return replace(op.benchmarks[0], lead=lead, sizes=sizes)


def sweep(op: Op) -> Iterator[Case]:
    """The op's first benchmark at growing numbers of rows, by factors of four; at its own shape
    alone where the leading axes are not rows."""
    case = op.benchmarks[0]
    if len(case.lead) != 1:
        yield case
        return
    rows = 1
    while rows < case.lead[0]:
        yield at_rows(case, rows)
        rows *= 4
    yield case


def use_openblas() -> str:
    """Routes every variant's matrix products to OpenBLAS; says what they run on."""
    from ..blas import use_openblas as route

    try:
        route()
    except (ImportError, RuntimeError) as error:
        return f"MLX's own ({error})"
    return "OpenBLAS"


def here() -> dict[str, Any]:
    """What a run in this process would say of the machine and of the versions."""
    return environment(threads_here(), last_level_cache(), use_openblas())


def run(
    tasks: Sequence[Task],
    sweep_tasks: Sequence[Task],
    plan: Plan,
    told: Callable[[Row, int, int], None],
    keep: Callable[[Result], None] = lambda _: None,
) -> Result:
    """Measures the tasks, tells each row with its number and the number of all, and gives what is
    there so far to `keep`.

    Every variant runs in this process, with MLX's products on the same BLAS.
    """
    threads, cache = threads_here(), last_level_cache()
    about = here()
    total = len(tasks) + len(sweep_tasks)
    short = replace(plan, rounds=min(plan.rounds, _SWEEP_ROUNDS), extras=False)
    rows: list[Row] = []
    with memory.pages(kept=True):
        anchors = Anchors(threads, cache)
        machine = anchor_rates(anchors, plan.rounds)
        for task in (*tasks, *sweep_tasks):
            task_plan = plan if len(rows) < len(tasks) else short
            rows.append(run_row(task.op, task.case, task.dtype, task.mode, task_plan, anchors))
            told(rows[-1], len(rows), total)
            keep(_result(about, machine, rows, len(tasks)))
            mx.clear_cache()
    return _result(about, machine, rows, len(tasks))


def _result(
    about: dict[str, Any], machine: dict[str, Summary], rows: Sequence[Row], tasks: int
) -> Result:
    """The first `tasks` rows, and those of the sweep after them."""
    return Result(about, machine, tuple(rows[:tasks]), sweep=tuple(rows[tasks:]))


def anchor_rates(anchors: Anchors, rounds: int) -> dict[str, Summary]:
    """Bytes (operations for "matmul" and "fma") per second of every anchor, and of a copy by a
    kernel of zmlx, which shows what launches cost."""
    variants = [*anchors.variants(), *anchors.arithmetic(mx.float32)]
    done = {**anchors.bytes, **FLOPS}
    kernel = copy_kernel(anchors.array)
    try:
        kernel.call(None)
    except RuntimeError:  # no target runs here: every row will say so
        pass
    else:
        variants.append(kernel)
        done[kernel.name] = anchors.bytes["copy"]
    times = measure(variants, rounds=rounds, between=anchors.fill_caches)
    return {name: summary([done[name] / s for s in seconds]) for name, seconds in times.items()}


def copy_kernel(x: mx.array, elements: int = 2048) -> Variant:
    """A copy of a one-dimensional array, written in Metal, with a thread per `elements`."""
    copy = metal.kernel(
        name="bench_copy",
        input_names=["x", "size"],
        output_names=["y"],
        source="""
            uint begin = thread_position_in_grid.x * N, end = min(begin + N, size);
            for (uint i = begin; i < end; ++i) y[i] = x[i];
        """,
    )
    size, threads = mx.array(x.size, mx.uint32), -(-x.size // elements)

    def call(given: object) -> None:
        mx.eval(
            copy(
                x,
                size,
                template=[("N", elements)],
                grid=(threads, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[x.shape],
                output_dtypes=[x.dtype],
            )
        )

    return Variant("copy by a zmlx kernel", call)
