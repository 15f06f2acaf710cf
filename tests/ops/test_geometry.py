"""Every op in the geometry of a GPU: 32-lane simdgroups, several rows per group, any group size."""

import mlx.core as mx
import pytest

from zmlx import launch
from zmlx.strict.catalogue import recording
from zmlx.testing import check_forward, check_gradient

from .sweep import DTYPES, OPS, case_with_gradients, over_ops, turns

#: 1 thread, one lane short of a simdgroup, one past it, three simdgroups, the largest group.
THREADS_PER_ROW = (1, 31, 33, 96, 1024)


@over_ops(lambda op: [c for c in op.cases if c.why != "no rows"], [mx.float32], every=3)
def test_gpu_geometry_matches_float64(op, case, dtype):
    with launch.geometry("gpu"):
        check_forward(op, case, dtype)
        check_gradient(op, case, dtype)


@over_ops(lambda op: op.cases[3:6:2], DTYPES[1:], every=4)
def test_gpu_geometry_in_half_precision(op, case, dtype):
    with launch.geometry("gpu"):
        check_forward(op, case, dtype)
        check_gradient(op, case, dtype)


def full_row(op, threads):
    """The shortest row of more than 512 elements of which every thread has some, 4 at a time, or
    else the longest."""

    def length(case):
        return max(case.sizes.values())

    fitting = [case for case in op.cases if length(case) >= max(513, 4 * threads)]
    return min(fitting, key=length) if fitting else max(op.cases, key=length)


def shares_rows(op):
    """Whether a launch of the op has the threads per row that are asked for."""
    with recording(TPR=33, RPG=1) as launches:
        case_with_gradients(op, full_row(op, 33), mx.float32)
    return any(dict(launch.template).get("TPR") == 33 for launch in launches)


SHARE_ROWS = [op for op in OPS if shares_rows(op)]


@pytest.mark.parametrize(
    "op, threads",
    [
        row
        for turn, op in enumerate(SHARE_ROWS)
        for row in turns(
            [pytest.param(op, n, id=f"{op.name}-{n}") for n in THREADS_PER_ROW],
            turn,
            len(THREADS_PER_ROW),
        )
    ],
)
def test_any_group_size_reduces_correctly(op, threads):
    case = full_row(op, threads)
    with launch.geometry("gpu", TPR=threads, RPG=1):
        check_forward(op, case, mx.float32)
        check_gradient(op, case, mx.float32)


@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_rows_share_a_simdgroup(op):
    """4 threads per row, 8 rows per simdgroup, a last group that is not full."""
    with launch.geometry("gpu", TPR=4, RPG=8):
        check_forward(op, op.cases[2], mx.float32)
        check_gradient(op, op.cases[2], mx.float32)
