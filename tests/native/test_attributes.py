"""The thread attributes: every one has Metal's value in every thread, edge groups included."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_source import run

from zmlx.language.attributes import SCALARS, VECTORS, WIDTH, model

STORE = (
    "uint3 p = thread_position_in_grid;\n"
    "uint3 n = threads_per_grid;\n"
    f"device uint* o = out + ((p.z * n.y + p.y) * n.x + p.x) * {WIDTH};\n"
    + "".join(f"*o++ = {name};\n" for name in SCALARS)
    + "".join(f"*o++ = {name}.x; *o++ = {name}.y; *o++ = {name}.z;\n" for name in VECTORS)
)


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
