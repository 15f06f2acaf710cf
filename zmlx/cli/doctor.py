"""Say what runs on this machine and what does not, why, and what to do about it."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


@dataclass(frozen=True)
class TargetState:
    """Whether a target runs kernels here; `reason` has the remedy where there is one."""

    runs: bool
    reason: str


@dataclass
class Diagnosis:
    """What the doctor found; `problems` each name their remedy."""

    versions: dict[str, str]
    platform: str
    target: str
    targets: dict[str, TargetState]
    compiler: str
    threads: int | None
    sgemm_gflops: dict[str, float]
    fresh_pages: dict[str, float]
    cache: dict[str, str | int | bool]
    problems: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis; returns 0 if the current target runs kernels here, else 1."""
    found = diagnose()
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print(_text(found))
    return 0 if found.targets[found.target].runs else 1


def diagnose() -> Diagnosis:
    """Examines this machine; takes a second or two, more where the CPU core is built first."""
    import mlx.core as mx

    from zmlx import backend, launch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        targets = {name: target_state(name) for name in launch.TARGETS}
        cache = _cache()
    problems = [str(warning.message) for warning in caught]
    target = launch.settings().target or "cpu"
    if not targets[target].runs:
        problems.append(f"{target}, the target in force, does not run: {targets[target].reason}")
    if conflict := backend.conflict():
        problems.append(conflict)
    gflops, blas_problem = _sgemm()
    if blas_problem:
        problems.append(blas_problem)
    if mx.default_device() == mx.Device(mx.cpu) and shutil.which("g++") is None:
        problems.append("mx.compile does nothing on the CPU without g++. Remedy: install g++")
    return Diagnosis(
        versions=versions(),
        platform=f"{platform.system()} {platform.machine()}",
        target=target,
        targets=targets,
        compiler=_compiler(),
        threads=_threads(targets["cpu"].runs),
        sgemm_gflops=gflops,
        fresh_pages=_fresh_pages() if targets["cpu"].runs else {},
        cache=cache,
        problems=problems,
    )


def versions() -> dict[str, str]:
    """Of zmlx and of what it stands on."""
    import numpy as np

    from zmlx import backend
    from zmlx.version import __version__

    return {
        "zmlx": __version__,
        "python": platform.python_version(),
        "mlx": backend.mlx_version() or "not a wheel",
        **backend.installed(),
        "numpy": np.__version__,
    }


def target_state(name: str) -> TargetState:
    """Runs a kernel on the target, since only execution shows that it works."""
    import mlx.core as mx

    from zmlx import kernels, launch
    from zmlx.targets import cpu, cuda, metal

    modules = {"metal": metal, "cuda": cuda, "cpu": cpu}
    try:
        if name in modules and (reason := modules[name].unavailable()):
            return TargetState(False, reason)
        x = mx.array([-1.0, 0.0, 2.0])
        with launch.target(name):
            out = kernels.silu(x)
            correct = mx.allclose(out, x * mx.sigmoid(x)).item()
    except Exception as error:  # whatever stops a target is what the doctor is asked for
        return TargetState(False, f"{type(error).__name__}: {error}")
    if not correct:
        return TargetState(False, f"silu({x.tolist()}) is wrong: {out.tolist()}")
    return TargetState(True, "ran silu")


def _compiler() -> str:
    from zmlx import native

    try:
        path = native.compiler_path()
    except (ImportError, RuntimeError) as error:
        return str(error)
    output = subprocess.run(
        [path, "--version"], capture_output=True, text=True, errors="replace", check=False
    ).stdout
    return f"{path}: {(output.splitlines() or ['no version'])[0]}"


def _threads(cpu_runs: bool) -> int | None:
    from zmlx import native

    return int(native.load().threads()) if cpu_runs else None


def _sgemm(size: int = 1024) -> tuple[dict[str, float], str | None]:
    """GFLOP/s of a square float32 product on the CPU, before and after `zmlx.use_openblas()`."""
    from zmlx.blas import use_openblas

    gflops = {"MLX": _gflops(size)}
    if platform.system() != "Linux":
        return gflops, None
    try:
        use_openblas()
    except (ImportError, RuntimeError, ValueError) as error:
        return gflops, f"matrix products are slow on MLX's own BLAS: {error}"
    gflops["OpenBLAS"] = _gflops(size)
    return gflops, None


def _gflops(size: int) -> float:
    import mlx.core as mx

    a = mx.ones((size, size))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(mx.matmul(a, a, stream=mx.cpu))
        seconds.append(time.perf_counter() - start)
    return round(2 * size**3 / min(seconds) / 1e9, 1)


def _fresh_pages(megabytes: int = 64) -> dict[str, float]:
    """Milliseconds that a large result of a kernel takes on the CPU with the memory that MLX keeps
    of freed arrays, and where it keeps enough."""
    import mlx.core as mx

    from zmlx import kernels, launch

    x = mx.zeros((megabytes << 18,))
    limit = mx.set_cache_limit(0)
    seconds = {}
    try:
        with launch.target("cpu"), mx.stream(mx.cpu):
            for name, kept in (("as it is", limit), ("kept", 4 * megabytes << 20)):
                mx.set_cache_limit(kept)
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    mx.eval(kernels.relu(x))
                    times.append(time.perf_counter() - start)
                seconds[name] = round(1e3 * min(times[1:]), 1)
    finally:
        mx.set_cache_limit(limit)
    return seconds


def _cache() -> dict[str, str | int | bool]:
    from zmlx import cache

    root = cache.directory("cpu").parent
    files = [path for path in root.rglob("*") if path.is_file()]
    return {
        "directory": str(root),
        "kept": cache.is_kept("cpu"),
        "files": len(files),
        "bytes": sum(_size(path) for path in files),
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # replaced by another process since it was listed
        return 0


def _text(found: Diagnosis) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [versions, found.platform, "", "targets"]
    for name, state in found.targets.items():
        mark = "*" if name == found.target else " "
        lines.append(f" {mark} {name:<10} {'yes' if state.runs else 'no':<4} {state.reason}")
    lines.append("   * runs what is launched now; ZMLX_TARGET or zmlx.target(...) chooses another")
    speeds = ", ".join(f"{value:g} with {name}" for name, value in found.sgemm_gflops.items())
    kept = "" if found.cache["kept"] else ", removed when the process ends"
    lines += [
        "",
        f"compiler   {found.compiler}",
        f"threads    {found.threads or 'no CPU target'}",
        f"sgemm      {speeds} (GFLOP/s, float32, 1024 × 1024, CPU)",
        *_pages_text(found.fresh_pages),
        f"cache      {found.cache['directory']}: {found.cache['files']} files, "
        f"{int(found.cache['bytes']) / 1e6:.1f} MB{kept}",
        "",
    ]
    lines += [f"problem: {problem}" for problem in found.problems] or ["no problems"]
    return "\n".join(lines)


def _pages_text(found: dict[str, float]) -> list[str]:
    if not found:
        return []
    now, kept = found.values()
    advice = "; to have that: mx.set_cache_limit(2 << 30)" if now > 1.2 * kept else ""
    return [
        f"memory     a result of 64 MB takes {now:g} ms, and {kept:g} ms where MLX keeps freed"
        f" arrays{advice}"
    ]
