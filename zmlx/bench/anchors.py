"""What a result is held against, measured in the rounds of the result: the machine's memory
bandwidth, and for an op that counts operations a matrix product and the machine's arithmetic.

    copy            y[i] = x[i] with ordinary stores, over two arrays of 4 times the last-level
                    cache each, by as many threads as zmlx uses; bytes read and bytes written
    non-temporal    the same with stores that go past the caches (x86)
    read            a sum of one of the arrays
    matmul          a square product in MLX, with the BLAS that every variant uses; on a CPU in
                    float32, which half precision is computed in, too
    fma             float32 multiplied and added in vector registers, by as many threads

The loops are C and not kernels of zmlx: a slow thread pool would otherwise lower the copy that it
is measured against. On a GPU the copy is a kernel, since nothing else reaches the device, and the
others do not exist but for the product. The arrays come from MLX's allocator, so that their pages
are of the same kind as those of the results.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch, metal
from .measure import Variant

SOURCE = Path(__file__).with_name("anchors.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")

#: Cache sizes that no system call tells: the largest of Apple silicon, and a guess elsewhere.
_UNKNOWN_CACHE = 32 << 20

_LINE = 64
_KINDS = ("copy", "non-temporal", "read")
_COPY, _READ, _FMA = 0, 2, 3
#: Of what is put into the caches: what is read alternates with what is written.
_PIECES = 8
#: Those that only tell what is too fast take part in every fourth round.
_GUARD = 4
_MATMUL = 2048
_STEPS = 1 << 22


def last_level_cache() -> int:
    """Bytes of the last-level cache of the first CPU."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text())
        if match is not None:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=_UNKNOWN_CACHE)


@lru_cache(maxsize=1)
def _library() -> Any:
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise FileNotFoundError("[bench] a C compiler must be installed: apt install gcc")
    with tempfile.TemporaryDirectory(prefix="zmlx-bench-") as folder:
        path = f"{folder}/anchors.so"
        subprocess.run([compiler, *FLAGS, "-o", path, str(SOURCE)], check=True)
        library = ctypes.CDLL(path)
    library.zmlx_anchor.restype = ctypes.c_double
    library.zmlx_anchor.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    ]  # fmt: skip
    return library


class Anchors:
    """The anchors of one run.

    Args:
        threads: threads of the copy.
        cache: bytes of the last-level cache; default: this machine's.
    """

    def __init__(self, threads: int, cache: int | None = None) -> None:
        self.threads = threads
        self.cache = cache or last_level_cache()
        self._bytes = 4 * self.cache
        elements = (self._bytes + _LINE) // 4
        self._arrays = [mx.array(np.ones(elements, np.float32)) for _ in range(2)]
        mx.eval(self._arrays)
        self.views = [np.asarray(x) for x in self._arrays]
        self._on_gpu = launch.settings().target in ("metal", "cuda")

    @property
    def array(self) -> mx.array:
        """What the copy reads."""
        return self._arrays[1]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that one call of each bandwidth anchor moves."""
        kinds = _KINDS[:1] if self._on_gpu else _KINDS
        return {kind: self._bytes * (1 if kind == "read" else 2) for kind in kinds}

    def variants(self) -> list[Variant]:
        """The bandwidth anchors, to be measured with the others."""
        if self._on_gpu:
            return [Variant("copy", lambda _: self._copy_on_gpu(), anchor=True)]
        return [
            Variant(
                kind,
                self._walker(number, self._bytes),
                self_timed=True,
                anchor=True,
                every=1 if kind == "copy" else _GUARD,
            )
            for number, kind in enumerate(_KINDS)
        ]

    def arithmetic(self, dtype: mx.Dtype) -> list[Variant]:
        """The anchors of an op that counts operations in this dtype."""
        if self._on_gpu:
            return [matmul_variant(dtype)]
        fma = Variant(
            "fma",
            self._walker(_FMA, _STEPS * _LINE),
            self_timed=True,
            anchor=True,
            every=_GUARD,
        )
        return [matmul_variant(mx.float32), fma]

    def fill_caches(self, written: float = 0.5) -> None:
        """Puts other data into the caches, twice their size, of which the share `written`, half at
        most, waits to be written back. What runs next pays for that, as what follows it pays for
        its own results."""
        if self._on_gpu:
            self._copy_on_gpu()
            return
        copied = min(written, 0.5)  # a copy reads what it does not write
        each = 2 * self.cache / _PIECES
        for i in range(_PIECES):
            at, read = int(i * each), int((1 - 2 * copied) * each)
            self._walk(_READ, read, at)
            self._walk(_COPY, int(copied * each), at + read)

    def _walker(self, kind: int, size: int) -> Callable[[Any], float]:
        return lambda _: self._walk(kind, size)

    def _walk(self, kind: int, size: int, at: int = 0) -> float:
        to, source = (_aligned(x) + at // _LINE * _LINE for x in self.views)
        seconds = _library().zmlx_anchor(kind, to, source, size // _LINE, self.threads)
        if seconds < 0:
            raise RuntimeError(f"[bench] {self.threads} threads do not start.")
        return float(seconds)

    def _copy_on_gpu(self) -> None:
        mx.eval(_COPY_KERNEL(self.array))


_COPY_KERNEL = metal.kernel(
    name="bench_copy",
    input_names=["x"],
    output_names=["y"],
    source="uint i = thread_position_in_grid.x;\ny[i] = x[i];",
)


def _aligned(x: np.ndarray[Any, Any]) -> int:
    """The first cache line that lies wholly in x."""
    return -(-x.ctypes.data // _LINE) * _LINE


#: Operations of one call; of the 12 sums of 16 floats of a step, each is multiplied and added to.
FLOPS = {"matmul": 2 * _MATMUL**3, "fma": _STEPS * 12 * 16 * 2}


def matmul_variant(dtype: mx.Dtype) -> Variant:
    """The product that an op with a count of operations is held against."""
    a, b = (mx.random.normal((_MATMUL, _MATMUL)).astype(dtype) for _ in range(2))
    mx.eval(a, b)
    return Variant("matmul", lambda _: mx.eval(a @ b), anchor=True)


def threads_here() -> int:
    """Threads that zmlx spreads a launch over: its own figure, else the CPUs of this process."""
    from ..targets import cpu

    if cpu.unavailable() is None:
        return int(cpu.core().threads())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
