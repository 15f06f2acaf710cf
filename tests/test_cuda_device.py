"""The CUDA target on an NVIDIA GPU: threads are where Metal puts them, the language computes what
its table says, and kernels compute what they do on the CPU target.

The ops need no file of their own: where MLX's default device is a GPU, all tests run on it.
"""

import mlx.core as mx
import numpy as np
import pytest
from cuda_launches import (
    GEOMETRIES,
    assert_outputs,
    distinct,
    language_kernels,
    language_modules,
    launch_of,
    launch_of_attributes,
    mlx_lm_launches,
    product_of_tiles,
    run_on_device,
    taken_by_cpu,
)

import zmlx
from zmlx.language import SECTIONS
from zmlx.language.attributes import model
from zmlx.targets import cuda

if reason := cuda.unavailable():
    pytest.skip(reason, allow_module_level=True)

ROWS = {
    f"{section}: {name}": row for section, rows in SECTIONS.items() for name, row in rows.items()
}
#: Modules whose kernels need more of the order of lanes than CUDA promises.
PARTING = {"test_branches", "test_divergence", "test_expressions"}


@pytest.mark.parametrize(
    ("kind", "grid", "group"), [*GEOMETRIES, (cuda.LINEAR, (1, 70000, 1), (1, 1, 1))]
)
def test_threads_are_where_metal_puts_them(kind, grid, group):
    assert cuda.geometry("k", grid, group).kind == kind
    (found,) = run_on_device(launch_of_attributes(grid, group))
    np.testing.assert_array_equal(found, model(grid, group).reshape(found.shape))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_table_of_the_language_computes_what_it_says(row):
    with zmlx.target("cuda"):
        row.check()


def defined(launch):
    """Whether the kernel reads no lanes that are not there: only the CPU says what it gets."""
    spec, grid = launch[0], launch[3]
    return not (grid == (1, 1, 1) and "_shuffle_xor(v, 1)" in spec.body)


def differing(launches):
    """What is wrong with launches, each of which must compute what it does on the CPU."""
    errors = []
    for launch in launches:
        try:
            assert_outputs(run_on_device(launch), launch)
        except (AssertionError, RuntimeError, ValueError) as error:
            errors.append(f"{launch[0].name}{launch[3:5]}\n{launch[0].body}\n{error}")
    return errors


@pytest.mark.parametrize("module", [m for m in language_modules(long=True) if m not in PARTING])
def test_the_language_computes_what_it_does_on_the_cpu(module):
    launches = distinct(filter(defined, filter(taken_by_cpu, language_kernels(module))))
    assert launches
    assert differing(launches) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_kernels_of_mlx_lm_compute_what_they_do_on_the_cpu(dtype):
    assert differing(mlx_lm_launches(dtype)) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_tiles_multiply_as_matrices(dtype):
    launch, want = product_of_tiles(dtype)
    (found,) = run_on_device(launch)
    np.testing.assert_array_equal(found, want)


def test_simd_operations_after_an_early_return_leave_out_the_lanes_that_left():
    source = """
        uint i = thread_position_in_grid.x;
        if (i >= 45) { return; }
        y[i] = simd_sum(x[i]) + 1000 * simd_prefix_exclusive_sum(1);
    """
    launch = launch_of(source, 64, 64, arrays=(mx.arange(64).astype(mx.float32),))
    (found,) = run_on_device(launch)
    want = np.zeros(64)
    want[:32] = np.arange(32).sum() + 1000 * np.arange(32)
    want[32:45] = np.arange(32, 45).sum() + 1000 * np.arange(13)
    np.testing.assert_array_equal(found, want)
