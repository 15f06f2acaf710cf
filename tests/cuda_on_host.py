"""CUDA text executed on the host: the same text that NVRTC compiles, between a header that acts out
CUDA's threads (`cuda_on_host.h`) and a loop over the blocks of a launch.

It shows that the text computes what it should in the order CUDA prescribes. It says nothing about
a GPU, its compiler or its arithmetic.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

HEADER = Path(__file__).with_suffix(".h")
PRELUDE = Path(__file__).parents[1] / "zmlx" / "native" / "prelude"

# Two calls of an operation must stay two places.
_COMPILER = [
    "g++", "-std=c++20", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-fno-crossjumping",
]  # fmt: skip

_LAUNCH = """
static void** host_buffers;
static const int* host_numbers;
static void host_kernel() {{ {name}({arguments}); }}
extern "C" int host_launch(void** buffers, const int* numbers, const unsigned* grid,
                           const unsigned* block) {{
  host_buffers = buffers;
  host_numbers = numbers;
  blockDim = {{block[0], block[1], block[2]}};
  gridDim = {{grid[0], grid[1], grid[2]}};
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
  for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
  for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
    if (!host_run_block(host_kernel)) return 1;
  return 0;
}}
"""


def compiled(
    text: str, flags: Sequence[str], buffers: int, numbers: int, folder: Path
) -> ctypes.CDLL:
    """A kernel's text as a loaded library."""
    intrinsics = (PRELUDE / "cuda" / "intrinsics.h").read_text()
    assert intrinsics in text
    found = re.search(r'extern "C" __global__ void \S+ (\w+)\(', text)
    assert found
    arguments = [f"host_buffers[{i}]" for i in range(buffers)]
    arguments += [f"host_numbers[{i}]" for i in range(numbers)]
    whole = (
        f'#include "{HEADER.name}"\n'
        + text.replace(intrinsics, "ZK_INTRINSICS_ON_HOST\n")
        + _LAUNCH.format(name=found.group(1), arguments=", ".join(arguments))
    )
    macros = [flag for flag in flags if flag.startswith("-D")]
    stem = folder / hashlib.sha256("".join([whole, *macros]).encode()).hexdigest()[:16]
    source, library = stem.with_suffix(".cc"), stem.with_suffix(".so")
    if not library.exists():
        source.write_text(whole)
        headers = ["-I", _precompiled(), "-I", str(HEADER.parent)]
        _run([*_COMPILER, *macros, *headers, "-shared", "-o", str(library), str(source)])
    return ctypes.CDLL(str(library))


@cache
def _precompiled() -> str:
    """A folder with the header as g++ has read it, which takes it longer than most kernels."""
    folder = tempfile.mkdtemp(prefix="zmlx-cuda-on-host-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _run([*_COMPILER, "-x", "c++-header", "-o", f"{folder}/{HEADER.name}.gch", str(HEADER)])
    return folder


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def launch(
    text: str,
    flags: Sequence[str],
    arrays: Sequence[np.ndarray],
    numbers: Sequence[int],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    folder: Path,
) -> None:
    """Runs `grid` threads in blocks of `block`; the last of `arrays` are the outputs."""
    library = compiled(text, flags, len(arrays), len(numbers), folder)
    pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    groups = [-(-n // b) for n, b in zip(grid, block, strict=True)]
    stuck = library.host_launch(
        pointers,
        (ctypes.c_int * max(1, len(numbers)))(*numbers),
        (ctypes.c_uint * 3)(*groups),
        (ctypes.c_uint * 3)(*block),
    )
    assert not stuck, "threads wait for each other for ever"
