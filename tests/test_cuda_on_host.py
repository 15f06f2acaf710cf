"""The text that NVRTC compiles, acted out on the host (see cuda_on_host.py): threads are where
Metal puts them, and kernels compute what they do on the CPU target."""

from itertools import cycle

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
    launches_with_values,
    mlx_lm_launches,
    product_of_tiles,
    run_on_host,
    taken_by_cpu,
)
from ops.sweep import case_with_gradients

import zmlx
from zmlx.arguments import dtype_name
from zmlx.language import SECTIONS
from zmlx.language.attributes import model
from zmlx.registry import ops
from zmlx.targets import cuda

#: Without those of texts that g++ reads otherwise than NVRTC, which compiles them (test_cuda.py).
MODULES = [name for name in language_modules(long=False) if name != "test_declarations"]


@pytest.mark.parametrize(("kind", "grid", "group"), GEOMETRIES)
def test_threads_are_where_metal_puts_them(kind, grid, group, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()  # one compilation per kind of geometry
    assert cuda.geometry("k", grid, group).kind == kind
    launch = launch_of_attributes(grid, group)
    (found,) = run_on_host(launch, folder)
    np.testing.assert_array_equal(found, model(grid, group).reshape(found.shape))


def test_grids_beyond_cudas_limits_are_numbered_along_x():
    tall = cuda.geometry("k", (1, 70000, 1), (1, 1, 1))
    assert (tall.kind, tall.grid, tall.block) == (cuda.LINEAR, (70000, 1, 1), (1, 1, 1))
    assert tall.numbers == (1, 70000, 1, 1, 1, 1)
    deep = cuda.geometry("k", (1, 1, 256), (1, 1, 128))
    assert (deep.kind, deep.grid, deep.block) == (cuda.LINEAR, (256, 1, 1), (128, 1, 1))
    large = cuda.geometry("k", (2**20, 70000, 1), (1024, 1, 1))
    assert large.grid[0] < 2**31
    assert large.grid[0] // 1024 * large.grid[1] >= 2**10 * 70000
    with pytest.raises(ValueError, match=r"\[k\] 'grid' must have fewer than 2\^32 groups"):
        cuda.geometry("k", (2**30, 2**20, 1), (1, 1, 1))


# ---- what the text computes ---------------------------------------------------------------------


def assert_as_on_cpu(launch, folder, least=0.0):
    assert_outputs(run_on_host(launch, folder), launch, least)


SHARED = [
    "qk_norm",  # a last group that is not full, float32 sums
    "gated_delta_step_mask",  # control flow that depends on a thread's y
    "rms_norm_sigmoid_gate",  # shapes and strides
    "kl_forward",  # 1,024 threads, barriers
]


@pytest.mark.parametrize("name", SHARED)
def test_the_text_computes_what_the_cpu_target_does(name, tmp_path):
    launch = next(x for x in mlx_lm_launches(mx.float16) if x[0].name == name)
    assert_as_on_cpu(launch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_every_kernel_of_mlx_lm_computes_what_it_does_on_the_cpu(dtype, tmp_path):
    for launch in mlx_lm_launches(dtype):
        assert_as_on_cpu(launch, tmp_path)


# GCC takes no type with a constructor there. NVRTC does, and compiles the row in test_cuda.py.
NOT_IN_GCC = {"halves and vectors in anonymous structs"}


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_of_the_language_computes_what_it_says(section, tmp_path):
    for name, row in SECTIONS[section].items():
        if name in NOT_IN_GCC:
            with pytest.raises(AssertionError, match="constructor not allowed in anonymous"):
                run_on_host(row.arguments(), tmp_path)
            continue
        (found,) = run_on_host(row.arguments(), tmp_path)
        want = row.reference()
        bound = max(row.within, 1e-6) if want.dtype == np.float32 else 0
        np.testing.assert_allclose(found, want, rtol=bound, atol=bound, err_msg=name)


@pytest.mark.slow
def test_the_language_computes_what_it_does_on_the_cpu(tmp_path):
    """Not the programs whose lanes part in ways that CUDA leaves open."""
    recorded = language_kernels("test_attributes", *MODULES)
    kernels = distinct(filter(taken_by_cpu, recorded))
    for launch in kernels:
        assert_as_on_cpu(launch, tmp_path)


#: A dtype for each op; some of them by default.
SOME = {"silu", "swiglu_packed", "softmax", "cumsum", "moe_dispatch", "dropout_add_rms_norm"}
OPS_AND_DTYPES = [
    pytest.param(
        op, dtype, id=f"{op.name}-{dtype_name(dtype)}",
        marks=() if op.name in SOME else pytest.mark.slow,
    )
    for op, dtype in zip(ops(), cycle([mx.float32, mx.float16, mx.bfloat16]), strict=False)
    if op.name != "expert_ffn"  # whose products MLX's CPU has in float32 alone
]  # fmt: skip


@pytest.mark.parametrize("op, dtype", OPS_AND_DTYPES)
def test_kernels_of_the_catalogue_compute_what_they_do_on_the_cpu(op, dtype, tmp_path, monkeypatch):
    """Steps that start on a multiple of their size, which are moved as vectors, and others; of a
    third case, rows that several simdgroups share."""
    for case in op.cases[1:6:2]:
        with launches_with_values(monkeypatch) as launches:
            mx.eval(case_with_gradients(op, case, dtype))
        for launch in distinct(launches):
            assert_as_on_cpu(launch, tmp_path, 1e-6)  # some outputs are roundings themselves


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.bool_], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_arrays_may_start_anywhere(first, dtype, tmp_path, monkeypatch):
    x = mx.arange(-30, 70).astype(dtype)
    with launches_with_values(monkeypatch) as launches:
        zmlx.elementwise.map({"y": "x > 0 ? x : 0.5", "small": "x < 3"}, ("x",))(x)
    (launch,) = launches
    assert_outputs(run_on_host(launch, tmp_path, first), launch)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_tiles_multiply_as_matrices(dtype, tmp_path):
    """Apple's layout in registers, CUDA's in the matrix units of the narrow types."""
    launch, want = product_of_tiles(dtype)
    (found,) = run_on_host(launch, tmp_path)
    np.testing.assert_array_equal(found, want)


def test_simd_operations_after_an_early_return_leave_out_the_lanes_that_left(tmp_path):
    source = """
        uint i = thread_position_in_grid.x;
        if (i >= 45) { return; }
        y[i] = simd_sum(x[i]) + 1000 * simd_prefix_exclusive_sum(1);
    """
    launch = launch_of(source, 64, 64, arrays=(mx.arange(64).astype(mx.float32),))
    (found,) = run_on_host(launch, tmp_path)
    want = np.zeros(64)
    want[:32] = np.arange(32).sum() + 1000 * np.arange(32)
    want[32:45] = np.arange(32, 45).sum() + 1000 * np.arange(13)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("kind, rest", [("half", 2060), ("bfloat", 2064)])
def test_vectors_of_narrow_numbers_are_summed_in_float(kind, rest, tmp_path):
    source = f"""
        uint i = thread_position_in_grid.x;
        {kind}2 v = {kind}2(i % 32 ? 1 : 2048, 1);
        y[i] = simd_sum(v).x;
        y[i + 45] = simd_prefix_inclusive_sum(v).x;
    """
    launch = (*launch_of(source, 45, 45)[:-2], ((2, 45),), (mx.float32,))
    (found,) = run_on_host(launch, tmp_path)
    assert found[0].tolist() == [2080] * 32 + [rest] * 13
    assert (found[1, 31], found[1, 44]) == (2080, rest)


@pytest.mark.parametrize("condition", ["true", "i % 64 < 40", "i < 70, exits"])
@pytest.mark.parametrize(
    "grid, group",
    [((45, 1, 1), (45, 1, 1)), ((100, 1, 1), (64, 1, 1)), ((15, 5, 1), (15, 3, 1))],
)
def test_votes_are_of_the_lanes_that_exist(grid, group, condition, tmp_path_factory):
    """Of those that take part, that a branch leaves out, and that have returned."""
    condition, _, exits = condition.partition(", ")
    source = f"""
        uint3 p = thread_position_in_grid, n = threads_per_grid;
        uint i = (p.z * n.y + p.y) * n.x + p.x;
        {f"if (!({condition})) return;" if exits else f"if ({condition})"} {{
            simd_vote v = simd_ballot(true), few = simd_vote(0x1fff), last = simd_vote(1 << 20);
            quad_vote q = quad_ballot(true), one = quad_vote(8);
            y[i] = 1 + 2 * v.all() + 4 * simd_vote(simd_vote::vote_t(v)).all() + 8 * few.all()
                 + 16 * last.any() + 32 * q.all() + 64 * one.any() + 128 * simd_all(true)
                 + 256 * simd_active_threads_mask().all();
        }}
    """
    launch = launch_of(source, int(np.prod(grid)), group, grid=grid)
    assert_as_on_cpu(launch, tmp_path_factory.getbasetemp())
