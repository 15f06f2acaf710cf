"""One row of the benchmark: an op at one shape, dtype and mode, in every way there is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch, testing
from ..arguments import dtype_name
from ..registry import Case, Op
from . import memory
from .anchors import FLOPS, Anchors
from .measure import LONG, ROUNDS, measure
from .result import Row, Timing
from .summary import paired, summary
from .torch_variants import torch_ways
from .variants import EAGER, NAMES, TORCH, ZMLX, Problem, Way, as_tuple, mlx_ways
from .work import Work, work

#: A rate above this multiple of the best anchor is no measurement.
TOO_FAST = 1.1

#: How far a result may be off the reference, as a part of its largest magnitude: enough for any way
#: to round, too little for another computation.
AGREEMENT = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}

#: Elements that are compared at once.
_PART = 1 << 15

#: Timings behind the rate from cache.
_CACHED_CALLS = 30


#: The folders of an absolute path.
_FOLDERS = re.compile(r"(?<![\w./])(?:/[\w.+~-]+)+/(?=[\w.+~-])")


@dataclass(frozen=True)
class Plan:
    """How rows are measured: variants, rounds, seconds that the rounds of a hopelessly slow variant
    may take, and whether memory and the rate from cache are measured too."""

    variants: tuple[str, ...] = NAMES
    rounds: int = ROUNDS
    budget: float = 1.0
    extras: bool = True


def pose(op: Op, case: Case, dtype: mx.Dtype) -> tuple[Problem, tuple[mx.array, ...]]:
    """Arguments, options and cotangents of a row, all evaluated, and the outputs."""
    options = {o.name: o.default for o in op.options} | dict(case.options)
    values = tuple(testing.draw(op, case, dtype))
    mx.eval([v for v in values if v is not None])
    outputs = as_tuple(_outputs(op, values, options))
    rng = np.random.default_rng(1)
    cotangents = tuple(mx.array(rng.standard_normal(o.shape)).astype(o.dtype) for o in outputs)
    mx.eval(outputs, cotangents)
    which = tuple(testing.differentiated(op, values))
    return Problem(op, values, options, which, cotangents), outputs


def _outputs(op: Op, values: Sequence[mx.array | None], options: Mapping[str, Any]) -> Any:
    try:
        return op.function(*values, **options)
    except Exception:  # why is told by the row, when zmlx's turn comes
        return op.reference(*values, **options)


def at_rows(case: Case, rows: int) -> Case:
    """The case with another first leading axis, and with the sizes that follow it."""
    first, *others = case.lead
    sizes = {k: n // first * rows if k in case.follows else n for k, n in case.sizes.items()}
    return replace(case, lead=(rows, *others), sizes=sizes)


def detail(op: Op, case: Case) -> str:
    """What sets a case apart from others of its shape: options, and optional arguments that the
    entry benchmarks with and without."""
    words = [f"{name}={value}" for name, value in case.options.items()]
    if case.optional and not all(c.optional for c in op.benchmarks):
        words += [f"with {a.name}" for a in op.arguments if a.optional]
    return ", ".join(words)


def _is_random(op: Op) -> bool:
    """Whether the result depends on random numbers, of which torch draws its own."""
    return any(option.name == "seed" for option in op.options)


def run_row(op: Op, case: Case, dtype: mx.Dtype, mode: str, plan: Plan, anchors: Anchors) -> Row:
    """Measures a row; what goes wrong is in its `error` and `notes`."""
    problem, outputs = pose(op, case, dtype)
    least = work(op, case, problem.values, outputs, mode)
    ways, notes = _ways(problem, dtype_name(dtype), mode, plan, anchors.threads)
    variants = [way.variant for way in ways.values()]
    base = anchors.variants()
    if least.flops:
        base += anchors.arithmetic(dtype)
    times = measure(
        [*base, *variants],
        rounds=plan.rounds,
        budget=plan.budget,
        between=partial(anchors.fill_caches, least.results / least.bytes),
    )
    moved = {**anchors.bytes, **FLOPS}
    rates = {v.name: moved[v.name] / summary(times[v.name]).median for v in base}
    timings = {}
    for name, way in ways.items():
        taken, seconds = memory.Peak(None, None), summary(times[name])
        if plan.extras:
            taken = memory.peak(
                way.variant.call,
                way.variant.before,
                uses_mlx=not name.startswith(TORCH),
                warm_up=seconds.median < LONG,
            )
        timings[name] = Timing(seconds, taken.mlx, taken.process)
    # MLX may compute a gradient with its outputs, ahead of the clock.
    too_fast = _too_fast(least, timings, rates, dtype_name(dtype))
    error = too_fast.pop(ZMLX, "") or notes.get(ZMLX, "")
    notes |= too_fast
    timings = {name: timing for name, timing in timings.items() if name not in too_fast}
    if not timings:  # then what is said of the ways is the error
        error = error or "; ".join(f"{name} {note}" for name, note in notes.items())
    row = Row(
        op=op.name,
        family=op.family,
        shape="x".join(map(str, testing.resolve(op.arguments[0].shape, case))),
        detail=detail(op, case),
        dtype=dtype_name(dtype),
        mode=mode,
        bytes=least.bytes,
        flops=least.flops,
        results=least.results,
        anchor={v.name: summary(times[v.name]) for v in base},
        anchor_rate=rates,
        timings=timings,
        notes=notes,
        error=error,
    )
    if ZMLX not in ways:
        return row
    cached = None
    if plan.extras and launch.settings().target == "cpu":
        cached = _from_cache(op, case, dtype, mode, least.bytes, anchors.cache, plan.budget)
    return _with_ratios(row, times, least, moved, cached)


def _with_ratios(
    row: Row,
    times: Mapping[str, Sequence[float]],
    least: Work,
    moved: Mapping[str, int],
    from_cache: float | None,
) -> Row:
    ours = times[ZMLX]
    anchor, done = ("matmul", least.flops) if least.flops else ("copy", least.bytes)
    scale = done / moved[anchor]
    return replace(
        row,
        ratios={n: paired(times[n], ours) for n in row.timings if n != ZMLX},
        share=summary([scale * a / o for a, o in zip(times[anchor], ours, strict=True)]),
        from_cache=from_cache,
    )


def _reason(error: Exception) -> str:
    """One line; of a file only its name, since results are read on other machines."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {_FOLDERS.sub('', line)}"


def _ways(
    problem: Problem, dtype: str, mode: str, plan: Plan, threads: int
) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that run here, and what is to be said about the others or their results."""
    made = {
        **mlx_ways(problem, mode, plan.variants),
        **torch_ways(problem, mode, plan.variants, threads),
    }
    limit = AGREEMENT[dtype]
    expected = _expected(problem, mode, mx.float32)
    ways: dict[str, Way] = {}
    off: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, make in made.items():
        try:
            way = make()
            same = name == EAGER and dtype == "float32"  # it would only be computed once more
            distance = _distance(expected if same else way.results(), expected)
        except Exception as error:  # a way that fails is a finding and not the end of the run
            notes[name] = f"did not run: {_reason(error)}"
            continue
        ways[name] = way
        if not (name.startswith(TORCH) and _is_random(problem.op)):  # it draws its own numbers
            off[name] = distance
    if not all(distance <= limit for distance in off.values()):
        # Plain MLX adds up in one float, so that it may be the reference that is off.
        exact = _expected(problem, mode, mx.float64)
        off = {name: _distance(ways[name].results(), exact) for name in off}
    for name, distance in off.items():
        if not distance <= limit:
            notes[name] = f"its result is off by {distance:.1%} of the largest value"
    return ways, notes


def _expected(problem: Problem, mode: str, dtype: mx.Dtype) -> list[np.ndarray[Any, Any]]:
    """The results of the reference in float32, or in float64, which only MLX's CPU has."""

    def widened(a: mx.array) -> mx.array:
        return a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a

    with mx.stream(mx.cpu) if dtype == mx.float64 else nullcontext():
        wide = Problem(
            problem.op,
            tuple(None if v is None else widened(v) for v in problem.values),
            problem.options,
            problem.which,
            tuple(widened(c) for c in problem.cotangents),
        )
        return mlx_ways(wide, mode, (EAGER,))[EAGER]().results()


def _distance(
    results: Sequence[np.ndarray[Any, Any]], expected: Sequence[np.ndarray[Any, Any]]
) -> float:
    """The largest difference as a part of the largest magnitude of its array."""
    worst = 0.0
    for got, want in zip(results, expected, strict=True):
        if got.shape != want.shape:
            return math.inf
        limit = _largest(want) or 1.0
        # A NaN anywhere makes the distance NaN, which agrees with nothing.
        worst = float(np.maximum(worst, _largest(got, want) / limit))
    return worst


def _largest(a: np.ndarray[Any, Any], less: np.ndarray[Any, Any] | None = None) -> float:
    """The largest magnitude of `a`, or of `a - less`, by parts that stay in cache."""
    a = a.ravel()
    b = None if less is None else less.ravel()
    found = [0.0]
    for i in range(0, a.size, _PART):
        part = a[i : i + _PART]
        found.append(np.max(np.abs(part if b is None else part - b[i : i + _PART])))
    return float(np.max(found))


def _too_fast(
    least: Work, timings: Mapping[str, Timing], rates: Mapping[str, float], dtype: str
) -> dict[str, str]:
    """What is to be said of ways that are faster than the machine. torch may multiply half
    precision in matrix units, which the anchors of arithmetic say nothing about."""
    bandwidth = {name: rate for name, rate in rates.items() if name not in FLOPS}
    arithmetic = {name: rate for name, rate in rates.items() if name in FLOPS}
    found = {}
    for name, timing in timings.items():
        seconds = timing.seconds.median
        for done, unit, limits in (
            (least.bytes, "GB/s", bandwidth),
            (least.flops, "GFLOP/s", arithmetic),
        ):
            if limits is arithmetic and name.startswith(TORCH) and dtype != "float32":
                continue
            best = max(limits.values(), default=math.inf)
            if done / seconds > TOO_FAST * best:
                found[name] = (
                    f"reaches {done / seconds / 1e9:,.0f} {unit}, "
                    f"{done / seconds / best:.1f} times the best of {', '.join(limits)}: either "
                    "the work is counted wrong or it is not done"
                )
    return found


def _from_cache(
    op: Op, case: Case, dtype: mx.Dtype, mode: str, size: int, cache: int, budget: float
) -> float | None:
    """Bytes per second on so few rows that everything stays in cache: what arithmetic allows. Calls
    that take more than `budget` seconds together are fewer."""
    if not case.lead or size == 0:
        return None
    small = at_rows(case, max(1, case.lead[0] * (cache // 4) // size))
    problem, outputs = pose(op, small, dtype)
    moved = work(op, small, problem.values, outputs, mode).bytes
    if moved > cache:  # one row is too much
        return None
    run = mlx_ways(problem, mode, (ZMLX,))[ZMLX]().variant
    try:
        seconds = [run.seconds(lambda: None)]
        for _ in range(_CACHED_CALLS - 1):
            if sum(seconds) < budget:
                seconds.append(run.seconds(lambda: None))
    except ValueError:  # the case does not take other rows
        return None
    return moved / summary(seconds).median
