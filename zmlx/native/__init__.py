"""The native core: Metal kernel text, compiled as C++, as lazy nodes of MLX on the CPU.

`load()` gives its functions. The core is C++ over MLX's own C++ interface, which changes with every
release, so it is built on the user's machine against the installed MLX: once per MLX, compiler and
version of zmlx, in some seconds, and never at `import zmlx`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from zmlx import cache

HERE = Path(__file__).parent
PRELUDE = HERE / "prelude"

#: The MLX releases that the core was run with. An older one is refused; with a newer one the build
#: and the tests at load decide.
OLDEST_MLX = (0, 32, 2)
NEWEST_MLX = (0, 32, 4)

FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]
#: Sources compiled as one text, since most of the time of each would go into the headers that it
#: shares with the others: those that need MLX's. What is named nowhere is a unit too, HOT aside.
AGAINST_MLX = {
    "after", "blas", "device_kernel", "kernel", "metal_text", "pool", "primitive", "python",
    "python_record",
}  # fmt: skip
#: Loops over data. The rest is text and bookkeeping, which compiles a quarter faster at -O1 and
#: launches no slower.
HOT = {"copy", "runtime"}
NO_COMPILER = (
    "[zmlx] The CPU target needs g++ or clang++ with its standard library: apt install g++"
)


class _MLX(NamedTuple):
    version: str
    include: Path
    library: Path


@functools.cache
def load() -> SimpleNamespace:
    """The core's functions (their docstrings have the signatures), built first if need be.

    Raises `RuntimeError`, with the remedy where there is one, on a machine that the core cannot run
    on: no compiler, an MLX that is too old or laid out in an unknown way, a free-threaded Python.
    """
    mlx = _installed_mlx()
    try:
        core = _bind(_built(mlx))
    except RuntimeError as error:
        if _numbers(mlx.version) <= NEWEST_MLX:
            raise
        newest = ".".join(map(str, NEWEST_MLX))
        raise RuntimeError(
            f"{error}\n[zmlx] MLX {mlx.version} is newer than {newest}, the newest that the CPU "
            "target was run with; an older MLX or a newer zmlx may work."
        ) from None
    core.set_cache_directory(str(cache.directory("cpu")) if cache.is_kept("cpu") else None)
    return core


def _bind(path: Path) -> SimpleNamespace:
    """The functions of a built core, after it has read known objects as Python shows them."""
    import mlx.core as mx

    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"[zmlx] The CPU core does not load with MLX {_installed_mlx().version}: {error}"
        ) from None
    table = library.zmlx_python
    table.restype = ctypes.py_object
    table.argtypes = [ctypes.py_object] * 5
    known = mx.array([[1, 2, 3], [4, 5, 6]], dtype=mx.int32)
    stream = mx.default_stream(mx.cpu)
    return SimpleNamespace(**table(known, known.__copy__, mx.bfloat16, stream, str(PRELUDE)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


@functools.cache
def _installed_mlx() -> _MLX:
    import mlx.core as mx

    version: str = mx.__version__  # type: ignore[attr-defined]
    if _numbers(version) < OLDEST_MLX:
        oldest = ".".join(map(str, OLDEST_MLX))
        raise RuntimeError(f"[zmlx] The CPU target needs MLX {oldest} or newer but got {version}.")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("[zmlx] The CPU target does not know free-threaded Python.")
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        raise RuntimeError(f"[zmlx] The CPU target needs 64-bit Linux but got {sys.platform}.")
    root = Path(mx.__file__).parent
    library = root / "lib" / "libmlx.so"
    if not library.exists() or not (root / "include" / "mlx" / "array.h").exists():
        raise RuntimeError(
            f"[zmlx] The CPU target needs MLX's headers and libmlx.so but {root} has none; "
            "install MLX from its wheel."
        )
    return _MLX(version, root / "include", library)


def compiler_path() -> str:
    """As `find_compiler` of compile.cc, which compiles the kernels."""
    chosen = os.environ.get("ZMLX_CXX")
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise RuntimeError(
                f"[zmlx] ZMLX_CXX must name a C++ compiler but got '{chosen}', which is not an "
                "executable."
            )
        return path
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    raise RuntimeError(NO_COMPILER)


def _sources() -> list[Path]:
    return sorted(HERE.glob("*.cc"))


def _key(mlx: _MLX, compiler: str) -> str:
    """A digest of all that the built core depends on."""
    digest = hashlib.sha256()
    recipe = Path(__file__)
    # Of the prelude it includes little, but which headers is said in the sources alone.
    headers = [*sorted(HERE.glob("*.h")), *sorted(PRELUDE.glob("*.h"))]
    for path in [recipe, *_sources(), *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for file in (mlx.library, Path(compiler).resolve()):
        info = file.stat()
        digest.update(f"{file} {info.st_size} {info.st_mtime_ns}\0".encode())
    digest.update(mlx.version.encode())
    return digest.hexdigest()[:16]


def _built(mlx: _MLX) -> Path:
    compiler = compiler_path()
    folder = cache.directory("core")
    path = folder / f"core-{mlx.version}-{_key(mlx, compiler)}.so"
    if cache.read(path) is None:
        with _locked(path.with_suffix(".lock")):
            if cache.read(path) is None:  # nobody built it while we waited
                print(
                    f"zmlx: building its CPU core for MLX {mlx.version} (once, some seconds)",
                    file=sys.stderr,
                    flush=True,
                )
                path = cache.keep(path, _build(mlx, compiler))
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _units() -> list[tuple[str, str, list[Path]]]:
    """Name, level of optimisation and sources of every unit, the longest first, so that none is
    left to run alone."""
    mlx: list[Path] = []
    hot: list[Path] = []
    rest: list[Path] = []
    for source in _sources():
        group = mlx if source.stem in AGAINST_MLX else hot if source.stem in HOT else rest
        group.append(source)
    return [("mlx", "-O1", mlx), ("rest", "-O1", rest), ("hot", "-O2", hot)]


def _build(mlx: _MLX, compiler: str) -> bytes:
    """The core's shared object: its units compiled, as many at once as there are CPUs."""
    with tempfile.TemporaryDirectory(prefix="zmlx-build-") as folder:
        commands = []
        for name, level, sources in _units():
            unit = Path(folder, f"{name}.cc")
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            target = ["-c", str(unit), "-o", f"{folder}/{name}.o"]
            commands.append([compiler, *FLAGS, level, f"-I{mlx.include}", *target])
        _run_all(commands, len(os.sched_getaffinity(0)))
        objects = [command[-1] for command in commands]
        result = f"{folder}/core.so"
        _run_all([[compiler, "-shared", "-o", result, *objects, str(mlx.library), "-ldl"]], 1)
        if not Path(result).exists():
            raise RuntimeError(
                f"[zmlx] The CPU core needs a C++ compiler but {compiler} wrote no object."
            )
        return Path(result).read_bytes()


def _run_all(commands: list[list[str]], at_once: int) -> None:
    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            raise RuntimeError(
                f"[zmlx] The CPU core does not compile. Command: {' '.join(command)}\n{done.stderr}"
            )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, commands))
