"""NVRTC, NVIDIA's run-time compiler, through ctypes. It needs no header and no CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAJORS = (13, 12)

#: The functions that are called, checked when the library is loaded.
_FUNCTIONS = (
    "nvrtcVersion",
    "nvrtcGetErrorString",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
)

#: What every program is compiled with. Functions need no `__device__`; 128-bit integers carry
#: products of 64-bit ones.
FLAGS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--device-int128",
    "--disable-warnings",
    "--ptxas-options=--verbose",
)


class CompileError(Exception):
    """A program that NVRTC refuses; the text is its log."""


class Program(NamedTuple):
    """A compiled program: the image for the device, and what the compiler says about it."""

    image: bytes
    log: str


def _candidates() -> Iterator[str]:
    """Where the library may be, in the order of preference.

    MLX's CUDA back end links it, so after `import mlx.core` its name alone finds it, or else MLX's
    own library as a handle to all that it depends on. Without that back end it comes from the
    toolkit, or from the wheel `nvidia-cuda-nvrtc`.
    """
    names = [f"libnvrtc.so.{major}" for major in MAJORS]
    yield from names
    for spec in (importlib.util.find_spec("mlx.core"), importlib.util.find_spec("nvidia")):
        for folder in _folders(spec):
            yield from map(str, sorted(folder.glob("lib/libmlx.so")))
            for name in names:
                yield from map(str, sorted(folder.glob(f"*/lib/{name}")))


def _folders(spec: Any) -> list[Path]:
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(p) for p in spec.submodule_search_locations]
    return [Path(spec.origin).parent] if spec.origin else []


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if all(hasattr(library, function) for function in _FUNCTIONS):
            return library
    return None


def unavailable() -> str | None:
    """Why nothing can be compiled, with the remedy, or None."""
    if _library() is not None:
        return None
    return (
        "the CUDA target needs NVRTC, NVIDIA's run-time compiler (libnvrtc.so.13 or .12): "
        "pip install nvidia-cuda-nvrtc"
    )


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"[zmlx] {unavailable()}")
    return library


@functools.cache
def version() -> tuple[int, int]:
    """The compiler's version, such as (13, 0)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_loaded().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(result: int) -> None:
    if result != 0:
        describe = _loaded().nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        raise RuntimeError(f"[zmlx] NVRTC: {describe(result).decode()}")


def compile(
    text: str, arch: str, flags: Sequence[str] = (), *, name: str = "zmlx", kind: str = "CUBIN"
) -> Program:
    """A CUDA program for one architecture, such as "sm_90a".

    Args:
        text: the translation unit.
        arch: "sm_…" for a cubin, "compute_…" for PTX.
        flags: further options.
        name: what messages call the text.
        kind: "CUBIN" or "PTX".

    Raises:
        CompileError: with the compiler's log.
    """
    library = _loaded()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), 0, None, None
        )
    )
    try:
        options = [f"--gpu-architecture={arch}".encode()]
        options += [flag.encode() for flag in (*FLAGS, *flags)]
        if version() >= (12, 4):
            options.append(b"--minimal")  # no textures and surfaces: a tenth of the time
        result = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if result != 0:
            raise CompileError(log)
        return Program(_read(library, program, kind), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw
