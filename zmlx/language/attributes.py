"""The thread attributes: each has its value in every thread, in groups cut off at the grid's edge
too."""

from __future__ import annotations

import numpy as np

from .row import Row

Triple = tuple[int, int, int]

SCALARS = (
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "simdgroup_index_in_threadgroup",
    "quadgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "quadgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
)
VECTORS = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "grid_origin",
    "grid_size",
)
#: Numbers that a thread stores: the scalars, then three for each vector.
WIDTH = len(SCALARS) + 3 * len(VECTORS)

GRID, GROUP = (37, 5, 2), (8, 4, 1)


def model(grid: Triple, group: Triple) -> np.ndarray:
    """What Metal says, of shape (z, y, x, WIDTH): groups at the grid's edge are smaller, and their
    threads are numbered within what is left of them."""
    full = [min(g, n) for g, n in zip(group, grid, strict=True)]
    groups = [-(-n // t) for n, t in zip(grid, full, strict=True)]
    result = np.zeros((grid[2], grid[1], grid[0], WIDTH), np.uint32)
    for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
        p = (x, y, z)
        b = [p[a] // full[a] for a in range(3)]
        i = [p[a] % full[a] for a in range(3)]
        e = [min(full[a], grid[a] - b[a] * full[a]) for a in range(3)]
        linear = (i[2] * e[1] + i[1]) * e[0] + i[0]
        size, dispatched = int(np.prod(e)), int(np.prod(full))
        scalars = [linear, linear % 32, linear % 4, linear // 32, linear // 4]
        scalars += [-(-n // width) for n in (size, dispatched) for width in (32, 4)]
        vectors = [*p, *i, *b, *groups, *grid, *e, *full, 0, 0, 0, *grid]
        result[z, y, x] = [*scalars, 32, 32, *vectors]
    return result


def _row(name: str) -> Row:
    count = 1 if name in SCALARS else 3
    at = SCALARS.index(name) if count == 1 else len(SCALARS) + 3 * VECTORS.index(name)
    value = name if count == 1 else f"{name}[k]"
    body = f"""
        uint3 p = thread_position_in_grid;
        uint at = (p.z * {GRID[1]} + p.y) * {GRID[0]} + p.x;
        for (uint k = 0; k < {count}; ++k) out[at * {count} + k] = {value};
    """
    expected = model(GRID, GROUP)[..., at : at + count]
    return Row(body, np.ascontiguousarray(expected), grid=GRID, group=GROUP, stores=True)


ATTRIBUTES = {name: _row(name) for name in (*SCALARS, *VECTORS)}
