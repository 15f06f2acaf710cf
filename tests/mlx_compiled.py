"""Folders of their own for what `mx.compile` compiles in each process of a run of tests.

On a CPU, MLX keeps the libraries that it compiles in one folder of all processes. One that finds a
library there which another is just writing ends, since MLX raises where C++ may not. So each worker
has its folder, which begins with links to all that earlier runs finished.

Nearly all of g++'s time there goes into one header, in each of hundreds of tests. What is compiled
of it beforehand and lies beside a source under its name, g++ takes instead, in a tenth of the time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

_ALL = Path(tempfile.gettempdir(), f"zmlx-tests-{os.getuid()}")
_INCLUDE = Path(mx.__file__).parent / "include"
_HEADER = "mlx/backend/cpu/compiled_preamble.h"
#: Those of MLX's command, without which g++ does not take what was precompiled.
_FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")


def _link(source, target):
    """Links the files below `source` that `target` does not have."""
    for path in source.glob("mlx/*/*/*.*"):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            with suppress(FileExistsError):  # by another worker
                os.link(path, to)


def _precompiled():
    """Where the header is kept for this MLX and this compiler, or None without one of them."""
    compiler, header = shutil.which("g++"), _INCLUDE / _HEADER
    if compiler is None or not sys.platform.startswith("linux") or not header.exists():
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(f"{header} {header.stat().st_mtime_ns} {compiler}".encode() + version)
    return _ALL / "headers" / f"{key.hexdigest()[:16]}.gch"


def precompile():
    """Compiles the header of MLX's kernels, before there are workers."""
    path = _precompiled()
    if path is None or path.exists():
        return
    _folder()
    path.parent.mkdir(exist_ok=True)
    for other in path.parent.glob("*.gch"):  # 50 MB for each MLX and compiler
        other.unlink(missing_ok=True)
    header = ["-I", str(_INCLUDE), "-x", "c++-header", str(_INCLUDE / _HEADER)]
    part = path.with_suffix(f".{os.getpid()}")
    done = subprocess.run(["g++", *_FLAGS, *header, "-o", str(part)], capture_output=True)
    if done.returncode == 0:
        part.rename(path)


def begin(worker):
    """Puts the folder for temporary files of this process, which MLX's is in, below one's own."""
    own = Path(tempfile.mkdtemp(prefix=f"{worker}-", dir=_folder()))
    _link(_ALL / "finished", own)
    path = _precompiled()
    if path is not None:
        beside = own / "mlx" / mx.__version__ / "cpu" / f"{_HEADER}.gch"
        beside.parent.mkdir(parents=True)
        with suppress(FileNotFoundError):  # another run, of another MLX, has put its own there
            os.link(path, beside)
    os.environ["TMPDIR"] = str(own)
    tempfile.tempdir = None
    return own


def end(own):
    """Hands on what the worker compiled."""
    _link(own, _ALL / "finished")


def _folder():
    _ALL.mkdir(mode=0o700, exist_ok=True)
    return _ALL
