"""Runs clang's front end, from the `ziglang` wheel, on translated Metal."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import util
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"
#: Names that only stand for others are those of the CPU target.
_ALIASES = INCLUDE.parents[1] / "native" / "prelude" / "simd_names.h"
_HEADERS = (
    *(INCLUDE / name for name in ("types.h", "vectors.h", "functions.h", "threads.h")),
    *(_ALIASES, INCLUDE / "utilities.h"),
)

# Every extension off but half: no double, no variables at program scope outside `constant`.
# x86-64 is the target because it has a bfloat; nothing is generated.
_FLAGS = (
    "-cc1", "-x", "clcpp", "-cl-std=clc++2021", "-triple", "x86_64-unknown-linux-gnu",
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,+__cl_clang_function_pointers",
    "-cl-single-precision-constant", "-ferror-limit", "0", "-fno-caret-diagnostics",
    "-fno-elide-type", "-Wimplicit-float-conversion", "-Wdouble-promotion",
)  # fmt: skip

_LINE = re.compile(r"^(.*?):(\d+):\d+: (?:fatal )?(error|warning|note): (.*)$")


@dataclass
class Diagnostic:
    """A message of clang, with its notes. Line 1 is the first of the translated text; for an error
    in one of the library's templates, the line is that of the use."""

    line: int
    severity: str
    message: str
    notes: list[str] = field(default_factory=list)


@lru_cache(maxsize=1)
def _zig() -> str:
    spec = util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "the strict check needs clang from the ziglang wheel, which is in the extra: dev"
        )
    name = "zig.exe" if os.name == "nt" else "zig"
    return str(Path(spec.submodule_search_locations[0]) / name)


@lru_cache(maxsize=1)
def _directory() -> Path:
    path = tempfile.mkdtemp(prefix="zmlx-strict-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_zig(), "clang", *_FLAGS, *arguments],
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        cwd=_directory(),
        check=False,
    )


@cache
def _library(version: int) -> str:
    """The library's declarations for a version of Metal, parsed once per process."""
    source = _directory() / f"metal{version}.h"
    source.write_text("".join(f'#include "{path}"\n' for path in _HEADERS))
    parsed = str(source.with_suffix(".pch"))
    done = _run(f"-DZK_METAL_VERSION={version}", "-emit-pch", "-o", parsed, str(source))
    if done.returncode != 0:
        raise RuntimeError(f"clang does not read the declarations of Metal:\n{done.stderr}")
    return parsed


def preprocessed(text: str, version: int) -> str:
    """The text as the preprocessor leaves it."""
    library = _library(version)
    flags = (f"-DZK_METAL_VERSION={version}", "-include-pch", library, "-E", "-P", "-")
    return _run(*flags, text=text).stdout


def _read(version: int, text: str, pointers: bool) -> list[Diagnostic]:
    enabled = "#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n" * pointers
    done = _run(
        f"-DZK_METAL_VERSION={version}", "-include-pch", _library(version), "-fsyntax-only", "-",
        text=f'{enabled}# 1 "kernel.metal"\n{text}\n',
    )  # fmt: skip
    found: list[Diagnostic] = []
    for line in done.stderr.split("\n"):
        match = _LINE.match(line)
        if match is None:
            continue
        place = int(match[2]) if match[1] == "kernel.metal" else 0
        if match[3] != "note":
            found.append(Diagnostic(place, match[3], match[4]))
        elif found:
            found[-1].notes.append(match[4])
            if "requested here" in match[4]:
                found[-1].line = found[-1].line or place
    if done.returncode != 0 and not any(d.severity == "error" for d in found):
        found.append(Diagnostic(1, "error", f"clang stopped: {done.stderr.strip()[-300:]}"))
    return found


def read(
    texts: list[str], version: int, *, function_pointers: bool = True
) -> list[list[Diagnostic]]:
    """What clang says of each text."""
    _library(version)
    if len(texts) == 1:
        return [_read(version, texts[0], function_pointers)]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda text: _read(version, text, function_pointers), texts))
