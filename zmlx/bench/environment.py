"""The machine and the versions behind a result."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import launch, native
from ..version import __version__
from .memory import CACHE_LIMIT

_DISTRIBUTIONS = ("mlx", "mlx-cpu", "mlx-lm", "numpy", "torch", "scipy-openblas32")


def environment(threads: int, cache: int, blas: str) -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "last_level_cache": cache,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "huge_pages": _huge_pages(),
        "compiler": _compiler(),
        "python": platform.python_version(),
        "versions": {"zmlx": __version__, **_versions()},
        "target": launch.settings().target,
        "blas": blas,
        "mlx_cache_limit": CACHE_LIMIT,
        "load_before": _load(),
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(re.findall(r"\b(?:avx512f|avx2|asimd|sve)\b", text))
    name = match[1] if match else platform.machine()
    return f"{name} ({', '.join(sorted(flags))})" if flags else name


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else "unknown"


def _compiler() -> str:
    try:
        path = native.compiler_path()
    except RuntimeError:
        return "none"
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return (output.stdout.splitlines() or ["unknown"])[0]


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _load() -> float | None:
    """Processes that ran or waited, averaged over a minute; none on a quiet machine."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
