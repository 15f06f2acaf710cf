"""The thread attributes: every one has Metal's value in every thread, edge groups included."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_source import run

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
WIDTH = len(SCALARS) + 3 * len(VECTORS)

STORE = (
    "uint3 p = thread_position_in_grid;\n"
    "uint3 n = threads_per_grid;\n"
    f"device uint* o = out + ((p.z * n.y + p.y) * n.x + p.x) * {WIDTH};\n"
    + "".join(f"*o++ = {name};\n" for name in SCALARS)
    + "".join(f"*o++ = {name}.x; *o++ = {name}.y; *o++ = {name}.z;\n" for name in VECTORS)
)


def model(grid: tuple[int, int, int], group: tuple[int, int, int]) -> np.ndarray:
    """What Metal says: groups at the grid's edge are smaller, and their threads are numbered
    within what is left of them."""
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
        scalars += [
            -(-size // 32),
            -(-size // 4),
            -(-dispatched // 32),
            -(-dispatched // 4),
            32,
            32,
        ]
        vectors = [*p, *i, *b, *groups, *grid, *e, *full, 0, 0, 0, *grid]
        result[z, y, x] = scalars + vectors
    return result


GEOMETRIES = [
    ((1, 1, 1), (1, 1, 1)),
    ((7, 1, 1), (1, 1, 1)),  # one thread per group
    ((3, 4, 2), (1, 1, 1)),
    ((33, 1, 1), (32, 1, 1)),  # a last group of one thread
    ((100, 3, 1), (32, 2, 1)),  # edges in x and y
    ((5, 7, 3), (2, 3, 2)),  # edges everywhere
    ((4, 4, 4), (8, 8, 8)),  # a group larger than the grid
    ((37, 5, 1), (8, 4, 1)),
]


@pytest.mark.parametrize("collective", [False, True], ids=["loop", "fibers"])
@pytest.mark.parametrize(("grid", "group"), GEOMETRIES)
def test_every_attribute_has_its_value_in_every_thread(
    grid: tuple[int, int, int], group: tuple[int, int, int], collective: bool
) -> None:
    source = ("threadgroup_barrier(mem_flags::mem_none);\n" if collective else "") + STORE
    shape = (grid[2], grid[1], grid[0], WIDTH)
    result = run(source, output=(shape, mx.uint32), grid=grid, group=group)
    np.testing.assert_array_equal(result, model(grid, group))


def test_attributes_work_as_whole_vectors_and_swizzles() -> None:
    source = """
        uint2 p = thread_position_in_grid.xy;
        uint3 n = threads_per_grid;
        out[p.y * n.x + p.x] = dot(float2(p), float2(1, 100)) + float(grid_size.zyx.z);
    """
    result = run(source, output=((3, 5), mx.float32), grid=(5, 3, 1), group=(2, 2, 1))
    y, x = np.mgrid[:3, :5]
    np.testing.assert_array_equal(result, x + 100 * y + 5)
