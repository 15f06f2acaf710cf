"""Where a kernel runs, and in which geometry.

The target follows MLX's default device unless `ZMLX_TARGET` or `with zmlx.target(...)` says
otherwise. The geometry follows the target: 32-lane simdgroups on the GPUs, one thread per group on
the CPU, where the same strided loop becomes a contiguous one that vectorises. Tests run the GPU
geometry on the CPU with `with geometry("gpu"):`, and single constants with
`with geometry("gpu", TPR=33):`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import mlx.core as mx

TARGETS = ("metal", "cuda", "cpu", "reference")

#: Launches that a kernel remembers, and ways that an op does, by shapes and dtypes, before it
#: starts anew: some 2 kB and 1 kB each.
SHAPES_KEPT = 4096

#: Rows longer than this do not stay in registers (GPU) or on the stack (CPU).
LONGEST_KEPT_ROW = 32768

_GPU_GROUP = 256
_GPU_VECTOR = 4
_CPU_ELEMENTS = 2048
_CPU_COLUMNS = 4096
_COLUMN_CHUNKS = 64
_MOST_COLUMNS = 4096
_FOLD_PARTS = 1 << 16
#: Rows that a thread folds side by side, from how many rows on, and the longest such row of one
#: state and of several.
_SHORT_ROWS = 64
_LEAST_SHORT_ROWS = 64
_SHORT_ROW = (16, 64)
_SCAN_COLUMNS = 1024
_SCAN_THREADS = 8
_SCAN_PARTS = 2048
_SCAN_BLOCKS = (32, 16)
_LEAST_PART = 16384
_TOPK_TILES = (16384, 262144)
_TOPK_SHORT = 1024
_TOPK_SORTED = 65536
_TOPK_SLOTS = 16
_PARTS = 256
_CPU_PACKED = 8192
_CPU_PACKED_STEP = 64
_PACKED_BLOCK = 16384

_ANY_LENGTH = 1 << 63
#: Elements per step of a row of fewer than so many elements: fewer in a short row, which would be
#: mostly its last, partial step and the folding of accumulators.
_ROW_STEPS = ((48, 8), (256, 16), (_ANY_LENGTH, 32))
_FOLD_STEPS = ((16, 4), (256, 8), (1024, 16), (_ANY_LENGTH, 64))
#: With random numbers, steps of up to 16 counters of eight: two of the widest registers of 64-bit
#: lanes.
_RANDOM_STEPS = ((32, 8), (64, 16), (128, 32), (256, 64), (_ANY_LENGTH, 128))


class Settings:
    """What `target` and `geometry` chose. Equal settings are the same object, so that a kernel can
    key its launches on it."""

    __slots__ = ("target", "geometry", "constants")

    def __init__(
        self, target: str | None, geometry: str | None, constants: tuple[tuple[str, int], ...]
    ) -> None:
        self.target = target
        self.geometry = geometry
        self.constants = constants


_interned = lru_cache(maxsize=None)(Settings)


def _environment_target() -> str | None:
    name = os.environ.get("ZMLX_TARGET") or None
    if name is not None and name not in TARGETS:
        raise ValueError(
            f"[zmlx] 'ZMLX_TARGET' must be one of {', '.join(TARGETS)} but got {name}."
        )
    return name


_default = _interned(_environment_target(), None, ())
_chosen: ContextVar[Settings] = ContextVar("zmlx_settings", default=_default)

_BY_DEVICE = {name: _interned(name, None, ()) for name in TARGETS}


@lru_cache(maxsize=1)
def gpu_target() -> str | None:
    """ "metal" or "cuda" where MLX has that back end and a device, else None.

    Programs are tried elsewhere with `mx.metal.is_available` replaced, so the system counts, too.
    """
    if sys.platform == "darwin" and mx.metal.is_available():
        return "metal"
    if hasattr(mx, "cuda") and mx.cuda.is_available():
        return "cuda"
    return None


def settings() -> Settings:
    """The settings in force, with the target resolved."""
    chosen = _chosen.get()
    if chosen.target is not None:
        return chosen
    gpu = gpu_target()
    name = gpu if gpu is not None and mx.default_device() == mx.gpu else "cpu"
    if chosen is _default:
        return _BY_DEVICE[name]
    return _interned(name, chosen.geometry, chosen.constants)


@contextmanager
def target(name: str) -> Iterator[None]:
    """Runs the kernels launched inside on target `name`: "metal", "cuda", "cpu" or "reference"
    (plain MLX, which every transform can take)."""
    if name not in TARGETS:
        raise ValueError(f"[target] 'name' must be one of {', '.join(TARGETS)} but got {name!r}.")
    now = _chosen.get()
    token = _chosen.set(_interned(name, now.geometry, now.constants))
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def geometry(kind: str, **constants: int) -> Iterator[None]:
    """Launches with the geometry of a "gpu" or a "cpu" on any target, for tests; `constants` fix
    single template constants (N, TPR, RPG, U)."""
    if kind not in ("gpu", "cpu"):
        raise ValueError(f"[geometry] 'kind' must be 'gpu' or 'cpu' but got {kind!r}.")
    now = _chosen.get()
    token = _chosen.set(_interned(now.target, kind, tuple(sorted(constants.items()))))
    try:
        yield
    finally:
        _chosen.reset(token)


@dataclass(frozen=True)
class Geometry:
    """Template constants, grid in threads and threadgroup of one launch."""

    template: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _step(d: int, steps: Sequence[tuple[int, int]]) -> int:
    """Elements that one thread takes at a time from a row of d."""
    most = next(u for end, u in steps if d < end)
    return min(most, _power_of_two((d + 2) // 2))


def is_cpu(chosen: Settings) -> bool:
    """Whether the geometry is that of a CPU: one thread per group."""
    return (chosen.geometry or chosen.target) == "cpu"


def pick(chosen: Settings, **defaults: int) -> dict[str, int]:
    """Template constants: the defaults, or what `geometry` fixes."""
    for name, value in chosen.constants:
        if name in defaults:
            defaults[name] = value
    return defaults


def elementwise(chosen: Settings, size: int, *, least: int = 1) -> Geometry:
    """One thread per N elements, a multiple of `least`."""
    n = _CPU_ELEMENTS if is_cpu(chosen) else _GPU_VECTOR
    while -(-size // n) >= 2**31:
        n *= 2
    c = pick(chosen, N=n)
    c["N"] = -(-c["N"] // least) * least
    threads = -(-size // c["N"])
    group = 1 if is_cpu(chosen) else min(_GPU_GROUP, max(threads, 1))
    return Geometry((("N", c["N"]),), (threads, 1, 1), (group, 1, 1))


def _groups(count: int) -> tuple[int, int]:
    """`count` groups as x·y, where x alone would make the grid overflow 31 bits."""
    x = min(count, 1 << 20)
    return x, -(-count // x) if x else 0


def rowwise(chosen: Settings, rows: int, d: int, *, capped: bool, least: int = 1) -> Geometry:
    """TPR·RPG threads for RPG rows of d elements; U is at least `least`."""
    if is_cpu(chosen):
        c = pick(chosen, TPR=1, RPG=1, U=_step(d, _ROW_STEPS if least == 1 else _RANDOM_STEPS))
    else:
        tpr = min(_power_of_two(-(-d // _GPU_VECTOR)), 32)
        if d > 32 * _GPU_VECTOR:
            tpr = min(1024, -(-d // (32 * _GPU_VECTOR)) * 32)
            if not capped:
                tpr = min(tpr, _GPU_GROUP)
        c = pick(chosen, TPR=tpr, RPG=max(1, _GPU_GROUP // 2 // tpr) if tpr <= 32 else 1, U=4)
        if c["TPR"] > 32 or c["TPR"] & (c["TPR"] - 1):
            c["RPG"] = 1
    c["U"] = max(c["U"], least)
    template = list(c.items())
    if capped:
        template.append(("STEPS", _power_of_two(-(-d // (c["TPR"] * c["U"])))))
    x, y = _groups(-(-rows // c["RPG"]))
    threads = c["TPR"] * c["RPG"]
    return Geometry(tuple(template), (x * threads, y, 1), (threads, 1, 1))


def row_chunks(rows: int) -> tuple[int, int]:
    """(chunks, rows per chunk) of a sum over rows. It depends on nothing but `rows`, so that the
    result is the same on every machine."""
    chunk = max(1, -(-rows // _COLUMN_CHUNKS))
    return max(1, -(-rows // chunk)), chunk


def rowwise_chunks(chosen: Settings, chunks: int, d: int, *, least: int = 1) -> Geometry:
    """A rowwise kernel with column outputs: a group per chunk of rows."""
    one = rowwise(chosen, 1, d, capped=True, least=least)
    template = tuple((k, 1 if k == "RPG" else v) for k, v in one.template)
    threads = dict(template)["TPR"]
    return Geometry(template, (chunks * threads, 1, 1), (threads, 1, 1))


def columnwise(chosen: Settings, chunks: int, d: int) -> Geometry:
    """One thread per N columns and chunk of rows."""
    n = min(_CPU_COLUMNS, _power_of_two(d)) if is_cpu(chosen) else 1
    c = pick(chosen, N=n)
    threads = -(-d // c["N"])
    group = 1 if is_cpu(chosen) else min(_GPU_GROUP, max(threads, 1))
    return Geometry((("N", c["N"]),), (threads, chunks, 1), (group, 1, 1))


def row_parts(rows: int, d: int) -> tuple[int, int]:
    """(parts, elements per part) of a fold of rows: parts only where there are few long rows. It
    depends on nothing but the shape, as `row_chunks`."""
    wanted = max(1, min(_PARTS // max(rows, 1), d // _LEAST_PART))
    chunk = -(-d // wanted)
    chunk = max(1, -(-chunk // 128) * 128)
    return max(1, -(-d // chunk)), chunk


def column_parts(batches: int, rows: int, d: int, least: int) -> tuple[int, int]:
    """(parts, rows per part) of `rows` in columns, so that there are about `least` parts of
    columns."""
    wanted = max(1, min(_COLUMN_CHUNKS, least // max(batches * d, 1), rows // 16))
    chunk = max(1, -(-rows // wanted))
    return max(1, -(-rows // chunk)), chunk


def fold_parts(shape: tuple[int, ...], columns: bool) -> tuple[int, int]:
    """(parts, elements per part) of the axis that a fold goes along."""
    if columns:
        batches, rows, d = shape
        return column_parts(batches, rows, d, _FOLD_PARTS)
    return row_parts(*shape)


def scan_parts(shape: tuple[int, ...], columns: bool) -> tuple[int, int]:
    """As `fold_parts`, of a scan, which reads twice what it cuts."""
    if columns:
        batches, rows, d = shape
        return column_parts(batches, rows, d, _SCAN_PARTS)
    return row_parts(*shape)


def fold_rows(chosen: Settings, items: int, d: int) -> Geometry:
    """TPR·RPG threads for RPG of `items` rows, or parts of rows, of d elements."""
    if is_cpu(chosen):
        c = pick(chosen, TPR=1, RPG=1, U=_step(d, _FOLD_STEPS))
        x, y = _groups(items)
        threads = c["TPR"] * c["RPG"]
        return Geometry(tuple(c.items()), (x * threads, y, 1), (threads, 1, 1))
    return rowwise(chosen, items, d, capped=False)


def rows_are_short(rows: int, d: int, states: int) -> bool:
    """Whether a row of d elements had better be folded by one thread, of which there are enough."""
    return rows >= _LEAST_SHORT_ROWS and d <= _SHORT_ROW[states > 1]


def fold_short_rows(chosen: Settings, rows: int) -> Geometry:
    """G threads per group, each for N of `rows`."""
    c = pick(chosen, N=min(_SHORT_ROWS, _power_of_two(rows)) if is_cpu(chosen) else 1)
    threads = -(-rows // c["N"])
    g = 1 if is_cpu(chosen) else min(_GPU_GROUP, max(threads, 1))
    x, y = _groups(-(-threads // g))
    return Geometry((("N", c["N"]), ("G", g)), (x * g, y, 1), (g, 1, 1))


def scan_rows(
    chosen: Settings, items: int, d: int, *, reverse: bool = False, narrow: bool = False
) -> Geometry:
    """As `fold_rows`; on the CPU the longest block of elements that is not mostly past the end: a
    block of two runs, which g++ keeps in registers. A reversed one is a single run, since g++ keeps
    two in 512 bits only, except where elements are `narrow`, 16 bits: then one run fills none. Rows
    shorter than a run are one block each."""
    if is_cpu(chosen):
        shortest = min(_SCAN_BLOCKS[-1], _power_of_two(d))
        fitting = (u for u in _SCAN_BLOCKS if 8 * (-d % u) <= d)
        u = shortest if reverse and not narrow else next(fitting, shortest)
        c = pick(chosen, TPR=1, RPG=1, U=u)
        x, y = _groups(-(-items // c["RPG"]))
        threads = c["TPR"] * c["RPG"]
        return Geometry(tuple(c.items()), (x * threads, y, 1), (threads, 1, 1))
    return rowwise(chosen, items, d, capped=False)


def fold_columns(
    chosen: Settings, items: int, d: int, *, states: int = 1, scans: bool = False
) -> Geometry:
    """G threads per group, each for N of d columns of one of `items` parts. With several states a
    column, fewer columns, whose states share the nearest cache with the row that is read. A scan
    cuts rows only where threads would be too few: whole ones, which are one stretch of memory, are
    walked faster."""
    most = _MOST_COLUMNS if states == 1 else _MOST_COLUMNS // 2
    n = min(most, _power_of_two(d)) if is_cpu(chosen) else 1
    while scans and n > _SCAN_COLUMNS and items * -(-d // n) < _SCAN_THREADS:
        n //= 2
    c = pick(chosen, N=n)
    threads = -(-d // c["N"])
    g = 1 if is_cpu(chosen) else min(_GPU_GROUP, max(threads, 1))
    x, y = _groups(items * -(-threads // g))
    return Geometry((("N", c["N"]), ("G", g)), (x * g, y, 1), (g, 1, 1))


def topk(chosen: Settings, k: int, rows: int, d: int) -> tuple[int, int, int, int]:
    """(elements per tile, results per thread of a merge, threads per group, threads that sort or 0)
    of a top-k of rows of d elements. A thread of a CPU keeps k of a long tile in order, which it
    moves ever less often, as long as there are some tiles for every thread; where k is large for
    that, a few threads sort, with room for a tile each."""
    if not is_cpu(chosen):
        return 64, 8, _GPU_GROUP, 0
    tile, most = _TOPK_TILES
    while tile < min(d, most) and rows * -(-d // (2 * tile)) >= 8:
        tile *= 2
    if 4 * k * k <= min(d, tile) + _TOPK_SHORT:
        return tile, 4096, 1, 0
    tile = max(1, min(d, _TOPK_SORTED))
    return tile, 4096, 1, min(rows * -(-d // tile), _TOPK_SLOTS)


def packed(chosen: Settings, sizes: Sequence[int]) -> tuple[Geometry, tuple[int, ...]]:
    """One thread per N elements of an array, U at a time, and the first thread of each array."""
    n, u = (_CPU_PACKED, _CPU_PACKED_STEP) if is_cpu(chosen) else (_GPU_VECTOR, _GPU_VECTOR)
    while sum(-(-size // n) for size in sizes) >= 2**31:
        n *= 2
    c = pick(chosen, N=n, U=u)
    starts = tuple(accumulate((-(-size // c["N"]) for size in sizes), initial=0))
    group = 1 if is_cpu(chosen) else min(_GPU_GROUP, starts[-1])
    return Geometry(tuple(c.items()), (starts[-1], 1, 1), (group, 1, 1)), starts[:-1]


def packed_sums(chosen: Settings, sizes: Sequence[int]) -> tuple[Geometry, tuple[int, ...]]:
    """One group per block of an array, and the first group of each array. Blocks are the same in
    every geometry."""
    block = _PACKED_BLOCK
    while sum(-(-size // block) for size in sizes) * _GPU_GROUP >= 2**31:
        block *= 2
    tpr, u = (1, _CPU_PACKED_STEP) if is_cpu(chosen) else (_GPU_GROUP, _GPU_VECTOR)
    c = pick(chosen, TPR=tpr, U=u, BLOCK=block)
    starts = tuple(accumulate((-(-size // block) for size in sizes), initial=0))
    threads = c["TPR"]
    return Geometry(tuple(c.items()), (starts[-1] * threads, 1, 1), (threads, 1, 1)), starts[:-1]
