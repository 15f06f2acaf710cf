"""Measure on this machine where zmlx's kernels are faster than MLX's ops, for layers to choose.

The ops are measured alone, and with the gradients of all their arrays, as in training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmlx.choice import Measurement

DTYPES = ("float32", "float16", "bfloat16")

#: Rows and widths: one token, a short prompt and a long one of a small and of a large model.
SHAPES = ((1, 1024), (1, 8192), (128, 1024), (1024, 4096))
ROUNDS = 9
SECONDS = 0.4
"""Beyond three rounds, what one op may take at one shape."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: all that can be timed so")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all three")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the measurements and write nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, writes the table and returns the exit status."""
    from zmlx import cache, choice, launch
    from zmlx.choice import MODES
    from zmlx.cli import runs_here
    from zmlx.nn.functional import IMPLEMENTATIONS

    unknown = sorted(set(arguments.ops) - set(IMPLEMENTATIONS))
    if unknown:
        print(
            f"[tune] 'OP' must be one of {', '.join(sorted(IMPLEMENTATIONS))} "
            f"but got {unknown[0]}.",
            file=sys.stderr,
        )
        return 2
    if not runs_here("tune"):
        return 2
    if not arguments.dry_run and not cache.is_kept("tune"):  # before minutes of measuring
        print(
            "[tune] the table must be kept for other processes but the cache is not: leave out "
            "ZMLX_CACHE=0, or set ZMLX_CACHE_DIR to a directory of your own; --dry-run only prints "
            "the measurements.",
            file=sys.stderr,
        )
        return 2
    target = launch.settings().target or "cpu"
    measurements = []
    print(
        f"{'op':<16} {'dtype':<9} {'shape':>10} {'mode':<7} {'MLX µs':>10} {'zmlx µs':>10}   faster"
    )
    for op in arguments.ops or sorted(IMPLEMENTATIONS):
        for dtype in arguments.dtype or DTYPES:
            for rows, width in SHAPES:
                for mode in MODES:
                    m = measure(op, target, dtype, rows, width, mode)
                    measurements.append(m)
                    print(_line(m), flush=True)
    if not arguments.dry_run:
        print(f"wrote {choice.write(measurements)}")
    return 0


def measure(
    op: str, target: str, dtype: str, rows: int, width: int, mode: str = "forward"
) -> Measurement:
    """Median seconds of both implementations of op, called in turns; in mode "both" of outputs and
    gradients in one evaluation."""
    import mlx.core as mx

    from zmlx.choice import Measurement
    from zmlx.nn.functional import IMPLEMENTATIONS

    both = IMPLEMENTATIONS[op]
    shapes = {"x": (rows, width), "d": (width,)}
    arrays = [mx.random.normal(shapes[kind]).astype(getattr(mx, dtype)) for kind in both.arrays]
    mx.eval(arrays)
    functions = (both.zmlx, both.mlx)
    if mode == "both":
        cotangent = mx.random.normal(both.mlx(*arrays).shape).astype(getattr(mx, dtype))
        mx.eval(cotangent)
        functions = (_with_gradients(both.zmlx, cotangent), _with_gradients(both.mlx, cotangent))
    for function in functions:  # compiles
        mx.eval(function(*arrays))
    # Small calls repeat within a round, so that the clock's step does not matter.
    repeat = max(1, int(1e-3 / max(_seconds(functions[1], arrays, 1), 1e-6)))
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    for i in range(ROUNDS):
        for k in (0, 1) if i % 2 else (1, 0):
            times[k].append(_seconds(functions[k], arrays, repeat))
        if i >= 2 and time.perf_counter() - start > SECONDS:
            break
    ours, mlx = (float(f"{statistics.median(t):.4g}") for t in times)
    return Measurement(op, target, dtype, rows, width, zmlx=ours, mlx=mlx, mode=mode)


def _with_gradients(function: Callable[..., Any], cotangent: Any) -> Callable[..., Any]:
    """The function with the gradients of all its arrays."""
    import mlx.core as mx

    return lambda *arrays: mx.vjp(function, list(arrays), [cotangent])


def _seconds(function: Callable[..., Any], arrays: list[Any], repeat: int) -> float:
    """Of one call, with its evaluation."""
    import mlx.core as mx

    start = time.perf_counter()
    for _ in range(repeat):
        mx.eval(function(*arrays))
    return (time.perf_counter() - start) / repeat


def _line(m: Measurement) -> str:
    faster = "zmlx" if m.zmlx <= m.mlx else "MLX"
    ratio = max(m.mlx / m.zmlx, m.zmlx / m.mlx)
    return (
        f"{m.op:<16} {m.dtype:<9} {m.rows:>5}x{m.width:<5}{m.mode:<7}{m.mlx * 1e6:>10.1f}"
        f"{m.zmlx * 1e6:>11.1f}   {faster} {ratio:.2f}x"
    )
