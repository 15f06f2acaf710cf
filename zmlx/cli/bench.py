"""Measure ops against a copy of memory, MLX and torch; every loss is printed like a win."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")
MODES = ("forward", "backward", "both")
QUICK_ROUNDS = 7

#: What is no op: measured by its name, or with everything.
PARTS = ("model", "overhead")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="FAMILY|OP|model|overhead",
        help="what to measure (default: everything; `model`: a patched model in training; "
        "`overhead`: compiling, importing, calling)",
    )
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="default: float32 and bfloat16"
    )
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all three")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--all-shapes",
        action="store_true",
        help="every shape of the catalogue (default: those that a bar is about, or the first)",
    )
    shapes.add_argument(
        "--shape",
        action="append",
        type=_shape,
        metavar="2048x4096",
        help="this shape of the first argument (repeatable)",
    )
    parser.add_argument(
        "--variant", action="append", metavar="NAME", help="only this way to compute (repeatable)"
    )
    parser.add_argument(
        "--geometry",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: also run the CPU target in GPU geometry and print the factor",
    )
    parser.add_argument("--rounds", type=int, help="timings per variant (default 20)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"one shape, float32, {QUICK_ROUNDS} rounds, no memory: a first look, not for bars",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results, after every row"
    )
    parser.add_argument(
        "--update", action="store_true", help="keep the rows of --json's FILE not measured now"
    )
    parser.add_argument("--compare", type=Path, metavar="OLD", help="a verdict per row against OLD")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also measure a sweep of sizes and draw it (SVG)"
    )
    parser.add_argument(
        "--page", type=Path, metavar="RESULTS", help="print the page of a result file, and end"
    )
    parser.add_argument(
        "--self-test", action="store_true", help="measure ops with a known time, and end"
    )


def _shape(text: str) -> tuple[int, ...]:
    parts = text.replace("×", "x").split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"a shape such as 2048x4096 is wanted but got {text!r}")
    return tuple(int(part) for part in parts)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0, 1 where a row is no measurement, became slower than OLD, or
    something failed, and 2 for wrong usage."""
    try:
        if arguments.page is not None:
            _check_alone(arguments, "page")
            return _page(arguments.page)
        if arguments.self_test:
            _check_alone(arguments, "self_test")
            return _self_test()
        return _measure(arguments)
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        print(error, file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"[bench] the arrays must fit in memory but: {error}", file=sys.stderr)
        return 2


def _check_alone(arguments: argparse.Namespace, option: str) -> None:
    """That nothing else is asked for, which would be ignored."""
    parser = argparse.ArgumentParser()
    configure(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name != option and getattr(arguments, name) != default:
            raise ValueError(f"[bench] '--{option.replace('_', '-')}' must be given alone.")


def _page(path: Path) -> int:
    from zmlx.bench import page
    from zmlx.bench.result import Result

    if not path.is_file():
        raise ValueError(f"[bench] '--page' must name a file of results but got '{path}'.")
    print(page.page(Result.read(path)), end="")
    return 0


def _self_test() -> int:
    from zmlx.bench.anchors import Anchors, threads_here
    from zmlx.bench.selftest import checks

    failed = 0
    for check in checks(Anchors(threads_here())):
        failed += not check.passed
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.claim}: {check.found}", flush=True)
    return 1 if failed else 0


def _measure(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from zmlx.bench import compare, plot, report, update
    from zmlx.bench.model import model_rows
    from zmlx.bench.overhead import overheads
    from zmlx.bench.result import Result
    from zmlx.bench.run import run as run_tasks
    from zmlx.cli import runs_here

    names = [n for n in arguments.names if n not in PARTS]
    if arguments.compare and not arguments.compare.is_file():
        raise ValueError(f"[bench] '--compare' must name a file but got '{arguments.compare}'.")
    old = Result.read(arguments.compare) if arguments.compare else None
    if arguments.plot and arguments.plot.suffix != ".svg":
        raise ValueError(f"[bench] '--plot' must name an .svg file but got '{arguments.plot}'.")
    for option in ("json", "plot"):  # before minutes of measuring
        path = getattr(arguments, option)
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"[bench] '--{option}' must name a file in a folder but got '{path}'.")
    wants_rows = bool(names) or not arguments.names
    if not wants_rows:
        _check_no_options_of_ops(arguments)
    tasks, sweep = _tasks(arguments, names) if wants_rows else ([], [])
    plan = _plan(arguments)
    _check_variants(arguments.variant or (), tasks)
    if not runs_here("bench"):
        return 2
    trains = "model" in arguments.names or (not arguments.names and not arguments.quick)
    older = _older(arguments)
    if older is not None:
        update.check(older, tasks, sweep, plan.variants, model=trains)
    store = _store(arguments, older)
    progress = report.Progress()
    result = run_tasks(tasks, sweep, plan, progress, store)
    failed = False
    if trains:
        print("\na model in training, every way in a process of its own", flush=True)
        try:
            for row in model_rows(*_model_plan(arguments), progress.text):
                progress.model(row)
                result = replace(result, models=(*result.models, row))
                store(result)
        except RuntimeError as error:  # the rows are not lost with it
            print(error, file=sys.stderr)
            failed = True
    if "overhead" in arguments.names or (not arguments.names and not arguments.quick):
        print("\ncompiling, importing, calling: some seconds in processes of their own", flush=True)
        try:
            result = replace(result, overheads=tuple(overheads()))
        except RuntimeError as error:  # the rows are not lost with it
            print(error, file=sys.stderr)
            failed = True
    print("\n".join(["", *report.head_lines(result), "", *report.end_lines(result)]))
    if arguments.json:
        store(result)
        print(f"wrote {arguments.json}")
    if arguments.plot:
        for path in plot.write(result, arguments.plot):
            print(f"wrote {path}")
    if old is not None:
        print("\n" + "\n".join(compare.lines(old, result, whole=_is_whole(arguments))))
        failed = failed or any(c.verdict == compare.SLOWER for c in compare.compare(old, result))
    return 1 if failed or any(row.error for row in (*result.rows, *result.sweep)) else 0


def _is_whole(arguments: argparse.Namespace) -> bool:
    """Whether all ops are measured as they are by default."""
    chosen = ("names", "dtype", "mode", "shape", "all_shapes", "quick")
    return not any(getattr(arguments, name) for name in chosen)


def _check_no_options_of_ops(arguments: argparse.Namespace) -> None:
    given = {
        "dtype": arguments.dtype,
        "mode": arguments.mode,
        "shape": arguments.shape,
        "all-shapes": arguments.all_shapes,
        "variant": arguments.variant,
        "geometry": arguments.geometry == "gpu",
        "plot": arguments.plot,
        "rounds": arguments.rounds and "model" not in arguments.names,
    }
    for option, value in given.items():
        if value:
            raise ValueError(
                f"[bench] '--{option}' must come with an op or a family but got "
                f"{', '.join(arguments.names)}."
            )


def _older(arguments: argparse.Namespace) -> Any:
    """The results of `--json` that `--update` keeps, or None."""
    from zmlx.bench.result import Result

    path = arguments.json
    if arguments.update and path is None:
        raise ValueError("[bench] '--update' must come with '--json' but got none.")
    return Result.read(path) if arguments.update and path.exists() else None


def _store(arguments: argparse.Namespace, older: Any) -> Callable[[Any], None]:
    """What writes a result to `--json`, with the older ones that there are."""
    path = arguments.json
    if path is None:
        return lambda result: None
    return lambda result: (older.updated(result) if older else result).write(path)


def _plan(arguments: argparse.Namespace) -> Any:
    from zmlx.bench.measure import ROUNDS
    from zmlx.bench.rows import Plan
    from zmlx.bench.variants import GPU_GEOMETRY, NAMES

    names = tuple(arguments.variant or (n for n in NAMES if n != GPU_GEOMETRY))
    for name in names:
        if name not in NAMES:
            known = ", ".join(map(repr, NAMES))
            raise ValueError(f"[bench] '--variant' must be one of {known} but got {name!r}.")
    if arguments.geometry == "gpu":
        names = (*names, GPU_GEOMETRY)
    rounds = arguments.rounds
    if rounds is None:
        rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    if rounds < 1:
        raise ValueError(f"[bench] '--rounds' must be at least 1 but got {rounds}.")
    if arguments.quick:
        return Plan(names, rounds, budget=1.0, extras=False)
    return Plan(names, rounds)


def _check_variants(names: Sequence[str], tasks: Sequence[Any]) -> None:
    """That there is each of the variants of some op, so that none is missed in silence."""
    from zmlx.bench.torch_variants import torch_names
    from zmlx.bench.variants import NAMES, mlx_names

    there = {name for task in tasks for name in (*mlx_names(task.op), *torch_names(task.op))}
    for name in names:
        if name not in there:
            known = ", ".join(repr(n) for n in NAMES if n in there)
            raise ValueError(
                f"[bench] '--variant' must be one of {known} for these ops here but got {name!r}."
            )


def _model_plan(arguments: argparse.Namespace) -> tuple[int, Any]:
    """Rounds and size of the model: with `--quick` two rounds of an eighth of the sequence."""
    from zmlx.bench.model import ROUNDS, Size

    quick = arguments.quick
    rounds = arguments.rounds or (2 if quick else ROUNDS)
    return rounds, Size(tokens=256) if quick else Size()


def _cases(op: Any, arguments: argparse.Namespace) -> list[Any]:
    from zmlx.bench.run import default_cases

    if arguments.all_shapes:
        return list(op.benchmarks)
    return list(op.benchmarks[:1]) if arguments.quick else default_cases(op)


def _tasks(arguments: argparse.Namespace, names: list[str]) -> tuple[list[Any], list[Any]]:
    import mlx.core as mx

    from zmlx import registry
    from zmlx.bench.run import Task, at_shape, sweep

    quick = arguments.quick
    dtypes = arguments.dtype or (["float32"] if quick else ["float32", "bfloat16"])
    tasks, points = [], []
    try:
        ops = registry.select(names)
    except KeyError as error:
        raise ValueError(f"[bench] {error.args[0]}") from None
    for op in ops:
        shapes = [at_shape(op, shape) for shape in arguments.shape or ()]
        cases = shapes or _cases(op, arguments)
        modes = [m for m in arguments.mode or MODES if m in op.timed]
        tasks += [
            Task(op, case, getattr(mx, dtype), mode)
            for case in cases
            for dtype in dtypes
            for mode in modes
        ]
        if arguments.plot:
            points += [
                Task(op, case, getattr(mx, dtypes[0]), mode)
                for mode in modes
                if mode != "backward"
                for case in sweep(op)
            ]
    if not tasks:
        raise ValueError(
            f"[bench] '--mode' must be forward for {', '.join(op.name for op in ops)}, without a "
            f"gradient or with one that moves nothing, but got {', '.join(arguments.mode)}."
        )
    return tasks, points
