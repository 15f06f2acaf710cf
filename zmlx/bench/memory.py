"""What happens to memory between calls, and how much of it a call takes.

While timing, freed memory stays with the process, for every variant alike: MLX's cache limit is
raised (its 32 MB on Linux make it return large arrays to the system at once), and glibc is told not
to map large blocks one by one (as torch's arrays would be). Otherwise each call pays for thousands
of page faults, up to ten times the kernel's own time. While memory is measured both are undone, so
that the process holds what is in use and nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

#: Bytes that MLX may keep for reuse while timing.
CACHE_LIMIT = 8 << 30

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MMAP_MAX_DEFAULT, _TRIM_DEFAULT, _TRIM_NEVER = 65536, 128 << 10, -1

#: The same for a program of its own, by its environment.
KEPT_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True)
class Peak:
    """Bytes beyond what was held before a call, at its worst moment: by MLX's counter and by the
    process's resident size. None where there is no such figure."""

    mlx: int | None
    process: int | None


def _libc() -> Any | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


_kept = False


@contextmanager
def pages(*, kept: bool) -> Iterator[None]:
    """Whether freed memory stays with the process inside."""
    global _kept
    outer = _kept, mx.set_cache_limit(CACHE_LIMIT if kept else 0)
    _set_malloc(kept)
    try:
        yield
    finally:
        mx.set_cache_limit(outer[1])
        _set_malloc(outer[0])


def _set_malloc(kept: bool) -> None:
    global _kept
    _kept = kept
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_MAX, 0 if kept else _MMAP_MAX_DEFAULT)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_NEVER if kept else _TRIM_DEFAULT)
    if not kept:
        _give_back()


def _give_back() -> None:
    mx.clear_cache()
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def page_faults() -> int:
    """Pages that the system has handed to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, Python collects no garbage, which costs time and gives memory back at any moment."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def peak(
    call: Callable[[Any], Any], before: Callable[[], Any], *, uses_mlx: bool, warm_up: bool = True
) -> Peak:
    """What one call takes at its worst moment; `before` runs ahead and is not counted, nor is a
    call to warm up."""
    with pages(kept=False), collector_paused():
        if warm_up:
            call(before())
        given = before()
        _give_back()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        resident = reset_peak_resident()
        result = call(given)
        process = None if resident is None else max(0, peak_resident() - resident)
        taken = max(0, mx.get_peak_memory() - held)
        del result, given
    return Peak(taken if uses_mlx else None, process)


def reset_peak_resident() -> int | None:
    """Sets the kernel's high-water mark of the resident size to its present value; None where the
    system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def peak_resident() -> int:
    """The kernel's high-water mark of the resident size."""
    return _status("VmHWM")


def _status(key: str) -> int:
    """Bytes behind a line of /proc/self/status."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, key
    return int(match[1]) << 10
