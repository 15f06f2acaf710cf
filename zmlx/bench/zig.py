"""The Zig front end against Python: launches, texts, and a large kernel.

Only in a source tree with `ziglang` installed: the package has no Zig in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from .. import cache, kernels, metal
from ..kernels.norm_kernels import Norm, forward
from . import memory
from .result import Overhead

ZIG = Path(__file__).resolve().parents[2] / "zig"

#: Zig's word for how much the compiler does.
_MODE = "ReleaseFast"
_ROUNDS = 41
_CALLS = 500
#: Turns of Zig and Python, which alternate: the machine's speed changes within seconds.
_TURNS = 3


def available() -> bool:
    """Whether the programs can be built here."""
    return (ZIG / "build.zig").exists() and find_spec("ziglang") is not None


def overheads() -> Iterator[Overhead]:
    """What is measured, each with Python's figure."""
    # A folder for each tree: Zig takes what it built of another one for what this one would be.
    folder = cache.directory("zig") / hashlib.sha256(str(ZIG).encode()).hexdigest()[:12]
    command = [sys.executable, "-m", "ziglang", "build", "zmlx-speed", f"-Doptimize={_MODE}"]
    command += [f"-Dpython={sys.executable}", "--cache-dir", str(folder)]
    command += ["--prefix", str(folder / "fast")]
    done = subprocess.run(command, cwd=ZIG, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"[bench] the Zig program does not build:\n{done.stderr}")
    program = folder / "fast" / "bin" / "zmlx-speed"
    # Freed memory stays with both, or page faults are most of what a large kernel takes.
    with memory.pages(kept=True):
        turns = [(_zig(program), _python()) for _ in range(_TURNS)]

    def row(name: str, ours: list[float], theirs: list[float]) -> Overhead:
        a, b = median(ours) * 1e6, median(theirs) * 1e6
        return Overhead(name, a, "µs", None, f"{1e6 / a:.0f} a second; Python {b:.2f} µs")

    for key, name in (
        ("launch", "launch of a small kernel from Zig"),
        ("launch_evaluated", "launch and evaluation of a small kernel from Zig"),
        ("source", "source of rms_norm from Zig"),
    ):
        yield row(name, [zig[key] for zig, _ in turns], [python[key] for _, python in turns])
    yield Overhead(
        "rms_norm on (2048, 4096) from Zig, relative to Python",
        median(zig["rms_norm"] / python["rms_norm"] for zig, python in turns),
        "×",
        1.1,
        f"{median(zig['rms_norm'] for zig, _ in turns) * 1e3:.2f} ms and "
        f"{median(python['rms_norm'] for _, python in turns) * 1e3:.2f} ms",
    )


def _zig(program: Path) -> dict[str, float]:
    env = {**os.environ, **memory.KEPT_PAGES}
    done = subprocess.run([program], capture_output=True, text=True, check=True, env=env)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _python() -> dict[str, float]:
    """What zmlx-speed measures, from Python."""
    double = metal.kernel(
        name="double",
        input_names=["x"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];",
    )
    x = mx.zeros((64,))

    def launch() -> Any:
        return double(
            x, grid=(64, 1, 1), threadgroup=(1, 1, 1),
            output_shapes=[(64,)], output_dtypes=[mx.float32],
        )  # fmt: skip

    rows, weight = mx.random.normal((2048, 4096)), mx.random.normal((4096,))
    mx.eval(x, rows, weight)
    return {
        "launch": _seconds(launch, _CALLS),
        "launch_evaluated": _seconds(lambda: mx.eval(launch()), _CALLS),
        "rms_norm": _seconds(lambda: mx.eval(kernels.rms_norm(rows, weight, 1e-5)), 1),
        "source": _seconds(forward(Norm("rms_norm", "rms", weighted=True)).pattern.source, _CALLS),
    }


def _seconds(run: Callable[[], Any], calls: int) -> float:
    """The median over rounds of the time of a call."""
    run()
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls)
    return median(found)
