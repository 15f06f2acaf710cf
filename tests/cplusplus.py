"""Kernel text run as C++: a shim of the few Metal names that <cmath> lacks, and the compiler."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import numpy as np

SHIM = """\
#include <cmath>
#include <cstdint>
#include <cstring>
using namespace std;
typedef unsigned int uint;
template <typename T, typename U> static inline T as_type(U u) {
    T t;
    memcpy(&t, &u, sizeof t);
    return t;
}
static inline float rsqrt(float x) { return 1.0f / sqrt(x); }
static inline float sign(float x) { return float(x > 0.0f) - float(x < 0.0f); }
"""


def compiled(text: str, folder: Path) -> ctypes.CDLL:
    """`text` after the shim as a loaded library; warnings that Metal's compiler has are errors."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "needs g++ or clang++"
    stem = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
    source, library = stem.with_suffix(".cc"), stem.with_suffix(".so")
    source.write_text(SHIM + text)
    flags = "-std=c++20 -O2 -fno-math-errno -fno-trapping-math -shared -fPIC -Wall -Wextra -Werror"
    flags += " -Wno-unused-variable -Wno-unused-function -Wno-unused-but-set-variable"
    flags += " -Wno-parentheses"
    done = subprocess.run(
        [compiler, *flags.split(), "-o", library, source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + "\n" + text
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
