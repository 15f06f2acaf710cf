"""Train a small language model on real text with MLX and with zmlx's kernels, and compare."""

import argparse
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

STEPS, QUICK_STEPS = 200, 60
BASELINE_STEPS = 7
"""Steps of the plain row where a faster baseline exists: enough to time it, one to warm up."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"optimizer steps (default {STEPS})")
    length.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, about 20 seconds"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("zmlx-demo"),
        metavar="DIR",
        help="folder for losses.svg and results.json (default zmlx-demo)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs every row, prints the comparison and returns the exit status."""
    from zmlx.blas import openblas_path
    from zmlx.cli import runs_here
    from zmlx.demo import report
    from zmlx.demo.progress import Progress
    from zmlx.demo.rows import RowFailedError, rows_here, run_row
    from zmlx.demo.train import CACHE_LIMIT, Settings

    steps = arguments.steps
    if steps is None:
        steps = QUICK_STEPS if arguments.quick else STEPS
    if steps < 1:
        print(f"[demo] '--steps' must be at least 1 but got {steps}.", file=sys.stderr)
        return 2
    rows = rows_here()
    try:
        if any(row.openblas for row in rows):
            openblas_path()
    except ImportError as error:
        print(f"[demo] {error}", file=sys.stderr)
        return 2
    if not runs_here("demo"):
        return 2
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)  # before minutes of training
    except OSError as error:
        print(
            f"[demo] '--out' must name a folder to write into but got '{arguments.out}': "
            f"{error.strerror}.",
            file=sys.stderr,
        )
        return 2
    common = Settings(openblas=False, kernels=False, steps=steps, stop=steps)
    tokens = common.batch * common.context
    print(
        f"A byte-level decoder ({common.size.layers} layers, {common.size.width} wide), "
        f"{steps} steps of {tokens:,} bytes, on {platform.machine()} with "
        f"{os.cpu_count()} CPUs.\n"
        f"Same seed and data in every row, each in its own process; MLX's cache limit is "
        f"{CACHE_LIMIT >> 20:,} MB in all of them.\n"
    )
    results = []
    try:
        for row in rows:
            stop = min(steps, BASELINE_STEPS) if row is not rows[-2] and row is rows[0] else steps
            settings = replace(
                common,
                openblas=row.openblas,
                kernels=row.kernels,
                stop=stop,
                sample=400 if row is rows[-1] else 0,
            )
            results.append(run_row(row, settings, Progress(row, stop, tokens)))
    except RowFailedError as error:
        print(f"\n[demo] {error}", file=sys.stderr)
        return 1
    print(f"\n{report.table(results, common)}\n\n{report.summary(results)}\n")
    print("A sample of what the model writes now:\n")
    print("    " + results[-1].text.replace("\n", "\n    ") + "\n")
    for path in report.write(results, common, arguments.out):
        print(f"wrote {path}")
    return 0
