"""`threadgroup`: properties that hold for every grid."""

from itertools import product

import pytest
from threadgroup import threadgroup

LENGTHS = (1, 2, 31, 32, 33, 1000, 1023, 1024, 1025, 4097, 10**6)  # around simdgroup and group
GRIDS = list(product(LENGTHS, repeat=3))


@pytest.mark.parametrize("most", [32, 100, 448, 1024])
def test_a_group_fits_the_machine_and_the_grid(most):
    for grid in GRIDS:
        group = threadgroup(grid, most)
        assert group[0] * group[1] * group[2] <= most
        assert all(1 <= g <= length for g, length in zip(group, grid, strict=True))


def test_a_row_that_is_cut_is_cut_into_whole_simdgroups():
    for length in range(1025, 5000):
        assert threadgroup((length, 1, 1))[0] % 32 == 0


def test_groups_are_of_one_length_as_far_as_simdgroups_allow():
    for length in range(1025, 5000):
        size = threadgroup((length, 1, 1))[0]
        groups = -(-length // size)
        assert groups == -(-length // 1024)  # no more than must be
        assert size * groups - length < 32 * groups  # less than a simdgroup of each is idle


def test_small_axes_share_a_group():
    assert threadgroup((8, 8, 8)) == (8, 8, 8)
    assert threadgroup((8, 64, 64)) == (8, 64, 2)
    assert threadgroup((1, 1, 4096)) == (1, 1, 1024)
    assert threadgroup((1025, 4, 1)) == (544, 1, 1)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 1), (4, -1, 1)])
def test_a_grid_without_threads_is_refused(grid):
    with pytest.raises(ValueError, match="'grid' must be three positive sizes"):
        threadgroup(grid)


def test_a_group_holds_a_simdgroup():
    with pytest.raises(ValueError, match="'most' must hold 32 threads but got 31"):
        threadgroup((8, 8, 8), 31)
