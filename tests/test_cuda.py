"""The CUDA target without a GPU: every kernel compiles with NVRTC for Ampere and Hopper, cubins are
kept, errors show the user's lines, and MLX gets what the kernel expects.

Nothing in here executes on a GPU: see test_cuda_device.py.
"""

import errno
import re
from functools import partial
from itertools import cycle
from pathlib import Path

import mlx.core as mx
import pytest
from cuda_launches import (
    ARCHITECTURES,
    but_for_sizes,
    compile_all,
    distinct,
    language_kernels,
    language_modules,
    launch_of,
    mlx_lm_launches,
    needs_nvrtc,
    ptx_of,
    spec_of,
    table_of_the_language,
    taken_by_cpu,
    text_of,
)
from ops.sweep import case_with_gradients, turns

import zmlx
from zmlx import cache, metal
from zmlx.arguments import dtype_name
from zmlx.language import REFUSALS
from zmlx.registry import calls, get, ops
from zmlx.strict import catalogue
from zmlx.targets import cuda
from zmlx.testing import draw

pytestmark = needs_nvrtc

OPS = tuple(ops())


# ---- what compiles ------------------------------------------------------------------------------


def recorded(call):
    """The launches that a call prepares for CUDA."""
    with catalogue.recording(target="cuda") as launches:
        call()
    return arguments_of(launches)


def arguments_of(launches):
    return [launch.arguments() for launch in launches if 0 not in launch.grid]


def assert_uniform(launches):
    """Rule of the catalogue: every lane reaches every operation on a simdgroup."""
    for launch in launches:
        assert set(re.findall(r"zk_flow<\d, \d>\(\)", text_of(launch))) <= {"zk_flow<0, 0>()"}


def name_of(x):
    return dtype_name(x) if isinstance(x, mx.Dtype) else x.name


@pytest.mark.parametrize("op", turns([pytest.param(op, id=op.name) for op in OPS], 0, 3))
def test_every_op_compiles(op):
    """Forward and backward in bfloat16."""
    case = next(c for c in reversed(op.cases[:6]) if c.why != "no rows")
    launches = recorded(lambda: case_with_gradients(op, case, mx.bfloat16))
    assert launches
    assert_uniform(launches)
    assert compile_all(launches, ["sm_90a"]) == []


@pytest.mark.parametrize("name, launches", list(calls()))
def test_every_registered_call_compiles(name, launches):
    found = recorded(lambda: launches(mx.bfloat16))
    assert found
    assert compile_all(found, ["sm_90a"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, dtype", list(zip(OPS, cycle([mx.float32, mx.float16]), strict=False)), ids=name_of
)
def test_every_kernel_of_every_op_compiles(op, dtype):
    """All cases in a dtype, bfloat16 being above, and in all of them with every option, and with
    the gradient of each argument alone; for Ampere, whose compiler knows least: no text is another
    one from it on. Of launches that differ in sizes alone, the first."""

    def every_case():
        for case in (case for case in op.cases if case.why != "no rows"):
            case_with_gradients(op, case, dtype)

    with_options = catalogue.launches([op.name], target="cuda")
    launches = recorded(every_case) + arguments_of(x for x in with_options if x.op == op.name)
    launches = but_for_sizes(launches)
    assert_uniform(launches)
    assert compile_all(launches, ["sm_80"]) == []


def test_no_text_goes_by_an_architecture_after_ampere():
    package = Path(zmlx.__file__).parent
    texts = [path.read_text() for kind in ("py", "h", "cc") for path in package.rglob(f"*.{kind}")]
    found = {line for text in texts for line in text.splitlines() if "__CUDA_ARCH__" in line}
    assert found
    assert {n for line in found for n in re.findall(r"__\s*[<>=!]+\s*(\d+)", line)} == {"800"}


def test_kernels_of_one_gradient_alone_are_found():
    names = {launch.spec.name for launch in catalogue.launches(["rms_norm"], target="cuda")}
    assert {"rms_norm__dx", "rms_norm__dx_dweight"} <= names


@pytest.mark.parametrize(
    "dtype, read, written",
    [
        (mx.float32, "ld.global.nc.v4.f32", "st.global.v4.f32"),
        (mx.bfloat16, "ld.global.nc.v2.u32", "st.global.v4.u16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["silu", "softmax", "rms_norm"])
def test_steps_are_moved_as_vectors_in_registers(name, dtype, read, written):
    values = draw(get(name), get(name).cases[3], dtype)
    ptx = ptx_of(recorded(lambda: get(name).function(*values))[0])
    assert read in ptx
    assert written in ptx
    assert ".local" not in ptx


def test_kernels_compile_for_every_generation():
    launches = distinct(language_kernels("test_simdgroup_matrix"))[-3:]
    for op in map(get, ("rms_norm", "swiglu")):
        launches += recorded(partial(case_with_gradients, op, op.cases[3], mx.float16))
    assert compile_all(launches, ["sm_75", "sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"]) == []


def test_a_third_of_the_rows_of_the_table_of_the_language_compiles():
    assert compile_all(list(table_of_the_language().values())[::3], ["sm_90a"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", [ARCHITECTURES[0], "sm_90a"])
def test_every_row_of_the_table_of_the_language_compiles(arch):
    assert compile_all(table_of_the_language().values(), [arch]) == []


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_language_has_not_is_refused_as_on_the_cpu(name):
    refusal = REFUSALS[name]
    with pytest.raises(RuntimeError) as caught:
        cuda.compiled(*refusal.arguments(32), "sm_80")
    assert f"] {refusal.place()}: {refusal.message}" in str(caught.value)


def test_the_language_compiles():
    kernels = distinct(filter(taken_by_cpu, language_kernels(*language_modules(long=False))))
    assert len(kernels) > 25
    assert compile_all(kernels, ["sm_90a"]) == []


@pytest.mark.slow
def test_every_kernel_of_the_language_compiles():
    kernels = distinct(filter(taken_by_cpu, language_kernels(*language_modules(long=True))))
    assert len(kernels) > 150
    assert compile_all(kernels, ["sm_80"]) == []


def test_the_kernels_of_mlx_lm_compile():
    launches = list(mlx_lm_launches(mx.bfloat16))
    assert len({launch[0].name for launch in launches}) == 23
    assert compile_all(launches, ["sm_80"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_kernels_of_mlx_lm_compile_for_every_architecture(dtype):
    assert compile_all(list(mlx_lm_launches(dtype))) == []


# ---- cache, errors, launches --------------------------------------------------------------------


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    zmlx.native.load()  # its own place in the cache stays
    monkeypatch.setenv("ZMLX_CACHE_DIR", str(tmp_path / "cache"))
    cuda._cubin.cache_clear()
    yield tmp_path / "cache" / "cuda"
    cuda._cubin.cache_clear()


def test_a_second_process_compiles_nothing(empty_cache):
    launch = launch_of("y[thread_position_in_grid.x] = x[0];")
    before = cuda.statistics()
    first = cuda.compiled(*launch, "sm_80")
    cuda._cubin.cache_clear()  # as in a new process
    second = cuda.compiled(*launch, "sm_80")
    after = cuda.statistics()
    assert first == second
    assert after["compiles"] == before["compiles"] + 1
    assert after["cache_hits"] == before["cache_hits"] + 1


def test_a_full_disk_costs_no_more_than_the_entry(empty_cache, monkeypatch):
    write = cache.write

    def full(path, data):
        if empty_cache in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    launch = launch_of("y[thread_position_in_grid.x] = x[0] + 5;")
    monkeypatch.setattr(cache, "write", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert cuda.compiled(*launch, "sm_80")


def test_text_architecture_and_flags_have_entries_of_their_own(empty_cache):
    source = "y[thread_position_in_grid.x] = exp(x[0]);"
    for arch, options in (("sm_80", {}), ("sm_90a", {}), ("sm_80", {"math_mode": "fast"})):
        cuda.compiled(*launch_of(source, **options), arch)
    cuda.compiled(*launch_of(source, 65), "sm_80")  # a last group that is not full
    assert len(list(empty_cache.glob("*.cubin"))) == 4


def test_group_sizes_share_a_cubin_where_nothing_depends_on_them(empty_cache):
    source = "y[thread_position_in_grid.x] = x[0];"
    for group in (130, 200, 256):
        cuda.compiled(*launch_of(source, 2 * group, group), "sm_80")
    assert len(list(empty_cache.glob("*.cubin"))) == 1


def test_a_damaged_entry_is_compiled_again(empty_cache):
    launch = launch_of("y[thread_position_in_grid.x] = x[0];")
    first = cuda.compiled(*launch, "sm_80")
    (entry,) = empty_cache.glob("*.cubin")
    entry.write_bytes(entry.read_bytes()[:-100])
    cuda._cubin.cache_clear()
    assert cuda.compiled(*launch, "sm_80") == first


@pytest.mark.parametrize(
    ("source", "header", "message"),
    [
        ("uint i = 0;\n\ny[i] = missing(x[i]);", "",
         "line 3 of the source: `y[i] = missing(x[i]);`: identifier \"missing\" is undefined"),
        ("y[0] = x[0] +;", "", "line 1 of the source: `y[0] = x[0] +;`: expected an expression"),
        ("y[0] = half(1.0f);\nbfloat b = 1.0f;", "",
         "line 2 of the source: `bfloat b = 1.0f;`: no suitable constructor exists to convert "
         "from \"float\" to \"bfloat\""),
        ("y[0] = f(x[0]);", "// twice\ninline float f(float a) { return 2 * b; }\n",
         "line 2 of the header: `inline float f(float a) { return 2 * b; }`: identifier \"b\" is "
         "undefined"),
        ("y[0] = max(1, 2u);", "", "line 1 of the source: `y[0] = max(1, 2u);`"),
        ("// é µ 中文\n/* 中\u2028文 */ float µ = 1;\ny[0] = µ + mesuré; // é", "",
         "line 3 of the source: `y[0] = µ + mesuré; // é`: identifier \"mesuré\" is undefined"),
        ("struct 型 { float a; }; 型 é = {1};\ny[0] = é.b;", "",
         "line 2 of the source: `y[0] = é.b;`: class \"型\" has no member \"b\""),
        ("static_assert(sizeof(float) == 3, \"é\"); y[0] = 0;", "",
         "\"é\"); y[0] = 0;`: static assertion failed"),
        ("y[0] = f(x[0]);", "// a\x85b\x0cc\ninline float f(float a) { return b; } // é\n",
         "line 2 of the header: `inline float f(float a) { return b; } // é`"),
        ("float v = x[0];\ny[0] = v[0];", "", "comes as a value, without an index"),
        ("threadgroup float a[5000], b[5000]; a[0] = b[0] = x[0]; y[0] = a[1] + b[1];", "",
         "at most 32768 bytes"),
        ("threadgroup float a[5000]; threadgroup float b[5000]; a[0] = b[0] = x[0];"
         "y[0] = a[1] + b[1];", "", "line 1 of the source"),
        ("{ threadgroup float a[5000]; a[0] = x[0]; y[0] = a[1]; }"
         "{ threadgroup float b[5000]; b[0] = x[0]; y[1] = b[1]; }", "",
         "threadgroup variables hold at most 32768 bytes but got 40000"),
    ],
)  # fmt: skip
def test_errors_show_the_users_own_line(source, header, message):
    with pytest.raises(RuntimeError) as error:
        cuda.compiled(*launch_of(source, header=header), "sm_90a")
    assert str(error.value).startswith("[kernel k")
    assert message in str(error.value)


def test_a_shape_of_more_dimensions_than_mlx_hands_over_is_refused():
    launch = launch_of("y[0] = x_shape[0];", arrays=(mx.zeros((1,) * 11),))
    with pytest.raises(ValueError, match=r"\[k\] 'x' must have at most 10 dimensions but got 11"):
        cuda.compiled(*launch, "sm_80")


def test_unavailable_names_the_remedy():
    if cuda.unavailable() is not None:
        assert "pip install" in cuda.unavailable()


def test_a_launch_hands_mlx_arrays_then_sizes_then_geometry(monkeypatch):
    seen = {}

    def precompiled(**given):
        seen.update(given)
        return [
            mx.zeros(s, d)
            for s, d in zip(given["output_shapes"], given["output_dtypes"], strict=True)
        ]

    monkeypatch.setattr(cuda, "architecture", lambda: "sm_80")
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", precompiled)
    spec = metal.KernelSpec(
        "k", ("x", "n"), ("y",), "y[thread_position_in_grid.x] = x[x_strides[0]] + n + x_ndim;",
        ensure_row_contiguous=False,
    )  # fmt: skip
    x, n = mx.zeros((4, 5, 5)), mx.array(2.0)
    prepared = cuda.prepare(
        spec, (x,), (), (100, 1, 1), (32, 1, 1), ((100,),), (mx.float32,), 1.0, (n,)
    )
    cuda.launch(prepared, (x,))
    assert [a.shape for a in seen["inputs"]] == [(4, 5, 5), ()]
    assert seen["scalars"] == [4, 5, 5, 100]
    assert (seen["grid"], seen["threadgroup"]) == ((100, 1, 1), (32, 1, 1))
    assert seen["ensure_row_contiguous"]  # the strides that the kernel sees are contiguous ones
    assert seen["name"].encode() in seen["compiled_source"]
    assert seen["init_value"] == 1.0


def test_a_grid_without_threads_launches_nothing():
    spec = spec_of("y[0] = x[0];")
    x = mx.zeros((0,))
    prepared = cuda.prepare(spec, (x,), (), (0, 1, 1), (32, 1, 1), ((3,),), (mx.float32,), 2.0, ())
    assert cuda.launch(prepared, (x,)).tolist() == [2.0, 2.0, 2.0]
