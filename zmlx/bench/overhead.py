"""What a user waits for besides the kernels: compiling, building the core, importing, calling.

Each figure comes from processes of its own with a cache directory of their own, so that nothing
was compiled before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from . import zig
from .result import Overhead

#: Fresh processes behind a median.
_REPEATS = 3
_IMPORTS = 11

_IMPORT = """
import json, time
import mlx.core
start = time.perf_counter()
import zmlx
package = time.perf_counter() - start
import zmlx.kernels
print(json.dumps({"package": package, "catalogue": time.perf_counter() - start}))
"""


def overheads() -> Iterator[Overhead]:
    """All of them, each as soon as it is measured."""
    with tempfile.TemporaryDirectory(prefix="zmlx-bench-") as folder:
        environment = {**os.environ, "ZMLX_CACHE_DIR": folder}
        build = _worker("load", environment)["seconds"]
        yield Overhead("building the core", build, "s", 15)
        runs = []
        for _ in range(_REPEATS):
            shutil.rmtree(Path(folder) / "cpu", ignore_errors=True)
            runs.append(_worker("compile", environment))
        again = _worker("compile", environment)
        yield from _compiles(runs)
        yield Overhead("kernels that a second process compiles", again["compiled"], "", 0)
        yield from _imports(environment)
        yield _call(_worker("call", environment))
        yield _install(_worker("install", environment))
        yield _geometry(_worker("geometry", environment))
    if zig.available():
        yield from zig.overheads()


def _worker(step: str, environment: dict[str, str]) -> dict[str, Any]:
    return _run(["-m", "zmlx.bench.overhead_worker", step], environment)


def _run(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"[bench] {' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _compiles(runs: list[dict[str, Any]]) -> Iterator[Overhead]:
    for geometry, words, bar in (("cpu", "one-thread", 100), ("gpu", "GPU", 250)):
        seconds = {
            name: median(run["kernels"][geometry][name] for run in runs)
            for name in runs[0]["kernels"][geometry]
        }
        slowest = max(seconds, key=lambda name: seconds[name])
        yield Overhead(
            f"cold compile in {words} geometry, the slowest kernel",
            seconds[slowest] * 1e3,
            "ms",
            bar,
            f"{slowest}; median of {len(seconds)} kernels {median(seconds.values()) * 1e3:.0f} ms",
        )


def _imports(environment: dict[str, str]) -> Iterator[Overhead]:
    found = [_run(["-c", _IMPORT], environment) for _ in range(_IMPORTS)]
    for key, words, bar in (
        ("package", "import zmlx", 50),
        ("catalogue", "import zmlx.kernels", None),
    ):
        value = median(f[key] for f in found) * 1e3
        yield Overhead(f"{words}, beyond mlx.core", value, "ms", bar)


def _call(found: dict[str, float]) -> Overhead:
    micro = {name: f"{seconds * 1e6:.2f}" for name, seconds in found.items()}
    return Overhead(
        "Python of a rms_norm call on (1, 4096), beyond mx.fast.rms_norm",
        found["beyond"] * 1e6,
        "µs",
        3,
        f"{micro['zmlx']} µs and {micro['mlx']} µs; with evaluation "
        f"{micro['zmlx_evaluated']} µs and {micro['mlx_evaluated']} µs",
    )


def _install(found: dict[str, float]) -> Overhead:
    return Overhead(
        "a call of a Metal kernel through install(), beyond MLX's node of x * scale",
        found["beyond"] * 1e6,
        "µs",
        5,
        f"{found['zmlx'] * 1e6:.2f} µs and {found['mlx'] * 1e6:.2f} µs, neither evaluated",
    )


def _geometry(factors: dict[str, float]) -> Overhead:
    slowest = max(factors, key=lambda name: factors[name])
    others = ", ".join(f"{name} {factor:.1f}" for name, factor in factors.items())
    return Overhead(
        "a row reduction on the CPU in simdgroups of 32, over one thread per row",
        factors[slowest],
        "times",
        30,
        f"(256, 4096) float32: {others}",
    )
