"""C++ programs against the prelude: sections in order, flags of the CPU target, ctypes."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

PRELUDE = Path(__file__).parents[1] / "zmlx" / "native" / "prelude"
#: Sections of the collectives: what they hold is tested with the runtime that they call.
COLLECTIVE = {"fiber", "simd_fiber", "simd_one", "threadgroup", "handed", "constructors"}
FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fsigned-char",
]
EXPORT = '__attribute__((visibility("default")))'


def compilers() -> dict[str, list[str]]:
    """The compilers of this machine: g++ and clang, the latter also from the ziglang wheel."""
    found = {}
    if path := shutil.which("g++"):
        found["g++"] = [path]
    if path := shutil.which("clang++"):
        found["clang++"] = [path]
    elif importlib.util.find_spec("ziglang"):
        # The prelude needs no C++ library, which Zig would compile for two minutes.
        found["clang++"] = [sys.executable, "-m", "ziglang", "c++", "-nostdlib++"]
    return found


@lru_cache
def sections() -> dict[str, dict[str, list[str]]]:
    """Header lines of the prelude: section name -> its clauses (needs, after, tokens, file)."""
    table = {}
    for file in sorted(PRELUDE.glob("*.h")):
        line = file.read_text().splitlines()[0]
        assert line.startswith("// section "), f"{file.name} has no section line"
        words = [clause.split() for clause in line.removeprefix("// ").split(";")]
        clauses = {key: rest for key, *rest in words}
        clauses["file"] = [file.name]
        table[clauses["section"][0]] = clauses
    return table


def prelude(*wanted: str) -> str:
    """The text of these sections, of all that they need, and of those that are always there."""
    table = sections()
    selected: set[str] = set()

    def select(name: str) -> None:
        if name not in selected:
            selected.add(name)
            for need in table[name].get("needs", []):
                select(need)

    for name in [*wanted, *(n for n, clauses in table.items() if "*" in clauses.get("tokens", []))]:
        select(name)
    done: list[str] = []

    def add(name: str) -> None:
        if name in selected and name not in done:
            for earlier in table[name].get("needs", []) + table[name].get("after", []):
                add(earlier)
            done.append(name)

    for name in sorted(selected):
        add(name)
    return "".join((PRELUDE / table[name]["file"][0]).read_text() for name in done)


def every_section() -> list[str]:
    return [name for name in sections() if name not in COLLECTIVE]


@lru_cache
def _folder() -> Path:
    path = tempfile.mkdtemp(prefix="zmlx-prelude-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def exported(body: str) -> str:
    """`body` with every `export` in front of a function made an entry of the library."""
    return body.replace("export ", f'extern "C" {EXPORT} ')


def run_compiler(
    text: str, *flags: str, compiler: str = "g++", output: str = ".so"
) -> tuple[subprocess.CompletedProcess[str], Path]:
    stem = _folder() / hashlib.sha256(f"{compiler}{flags}{text}".encode()).hexdigest()[:16]
    source = stem.with_suffix(".cc")
    source.write_text(text)
    command = [*compilers()[compiler], *FLAGS, *flags, str(source), "-o"]
    if "ziglang" in command:
        command = [part.replace("=x86-64-", "=x86_64_") for part in command]
    command += [str(stem.with_suffix(output))]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return done, stem.with_suffix(output)


def build(text: str, *flags: str, compiler: str = "g++") -> tuple[ctypes.CDLL, str]:
    """`text` as a loaded library, and what the compiler said."""
    done, library = run_compiler(text, "-w", "-shared", *flags, compiler=compiler)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library)), done.stderr


def errors(text: str, compiler: str = "g++") -> str:
    """What the compiler has against `text`; empty if nothing."""
    done, _ = run_compiler(text, "-w", "-c", "-O0", compiler=compiler, output=".o")
    return done.stderr if done.returncode else ""


def call(function: Any, *arrays: np.ndarray, count: int | None = None) -> None:
    """Calls `function(pointer, …, count)`; the count is the first array's unless given."""
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    function(*pointers, ctypes.c_long(arrays[0].size if count is None else count))
