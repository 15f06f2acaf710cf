"""`zmlx.install`: kernels written for a Mac, unchanged."""

import subprocess
import sys
import textwrap

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import zmlx
from zmlx import interop, launch

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="does nothing on a Mac")

without_gpu = pytest.mark.skipif(
    launch.gpu_target() is not None, reason="the GPU is real: see test_interop_cuda.py"
)

DOUBLE = "uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];"


@pytest.fixture
def installed():
    with zmlx.install():
        yield


@pytest.fixture
def claimed():
    with zmlx.install(claim_metal=True):
        yield


def double(source=DOUBLE, **options):
    return mx.fast.metal_kernel(
        name="double", input_names=["x"], output_names=["y"], source=source, **options
    )


def call(kernel, x, **arguments):
    defaults = {
        "inputs": [x],
        "grid": (x.size, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [x.shape],
        "output_dtypes": [x.dtype],
    }
    return kernel(**{**defaults, **arguments})


# ---- calling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [1, "no", None])
def test_the_claim_is_true_or_false(given):
    with pytest.raises(TypeError, match=r"\[install\] 'claim_metal' must be True or False"):
        zmlx.install(claim_metal=given)
    assert not interop.patched()


def test_a_kernel_returns_a_list_of_arrays(installed):
    (y,) = call(double(), mx.arange(40.0))
    assert mx.array_equal(y, 2 * mx.arange(40.0))


def test_several_outputs_keep_their_order(installed):
    kernel = mx.fast.metal_kernel(
        name="two", input_names=["x"], output_names=["y", "z"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i]; z[i] = int(i);",
    )  # fmt: skip
    y, z = call(
        kernel, mx.ones((5,)), output_shapes=[(5,), (5,)], output_dtypes=[mx.float32, mx.int32]
    )
    assert y.tolist() == [1] * 5
    assert z.tolist() == [0, 1, 2, 3, 4]


def test_python_scalars_become_constants_of_the_dtypes_that_mlx_gives_them(installed):
    kernel = mx.fast.metal_kernel(
        name="values", input_names=["a", "b", "c", "d"], output_names=["y"],
        source="y[0] = a / 2; y[1] = float(b >> 32); y[2] = c / 2; y[3] = d;",
    )  # fmt: skip
    for a, c, d in ((7, 3.0, True), (8, 5.0, False)):
        (y,) = kernel(
            inputs=[a, 2**33, c, d], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip
        assert y.tolist() == [a // 2, 2, c / 2, d]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint8])
def test_arrays_of_numpy_are_taken_as_mlx_takes_them(installed, dtype):
    x = np.arange(9).astype(dtype)
    kernel = double("uint i = thread_position_in_grid.x; y[i] = x[i] + sizeof(x[0]);")
    (y,) = call(kernel, x, output_dtypes=[mx.float32])
    assert y.tolist() == [k + mx.array(x).itemsize for k in range(9)]


def test_zeros_keep_their_sign(installed):
    kernel = mx.fast.metal_kernel(
        name="sign", input_names=["x"], output_names=["y"], source="y[0] = 1 / x;"
    )
    signs = [
        kernel(
            inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )[0].item()
        for x in (0.0, -0.0, 0.0)
    ]  # fmt: skip
    assert signs == [np.inf, -np.inf, np.inf]


def test_one_and_true_are_different_template_arguments(installed):
    kernel = double("uint i = thread_position_in_grid.x; y[i] = x[i] * sizeof(N);")
    x = mx.ones((4,))
    sizes = [call(kernel, x, template=[("N", n)])[0][0].item() for n in (1, True, 1, True)]
    assert sizes == [4, 1, 4, 1]


def test_template_dtypes_and_integers(installed):
    kernel = double("uint i = thread_position_in_grid.x; y[i] = T(float(x[i]) * N);")
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        (y,) = call(kernel, mx.ones((9,), dtype=dtype), template=[("T", dtype), ("N", 3)])
        assert y.dtype == dtype
        assert y.tolist() == [3] * 9


def test_init_values_keep_their_sign(installed):
    kernel = double("if (x[0] > 5) y[0] = 1;")
    signs = [
        np.signbit(call(kernel, mx.ones((4,)), init_value=v)[0][0].item()).item()
        for v in (0, -0.0, 0.0, -0.0, False)
    ]
    assert signs == [False, True, False, True, False]


def test_a_target_chosen_later_is_not_passed_over(installed):
    kernel = double()
    call(kernel, mx.ones((4,)))
    with zmlx.target("reference"), pytest.raises(RuntimeError, match="without a reference"):
        call(kernel, mx.ones((4,)))


def test_init_value_fills_what_the_kernel_leaves(installed):
    kernel = double("if (thread_position_in_grid.x == 1) y[1] = x[1];")
    (y,) = call(kernel, mx.zeros((4,)), init_value=2.5)
    assert y.tolist() == [2.5, 0, 2.5, 2.5]


def test_atomic_outputs(installed):
    kernel = double(
        "atomic_fetch_add_explicit(&y[0], x[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )
    (y,) = call(kernel, mx.arange(100.0), output_shapes=[(1,)], init_value=0)
    assert y.item() == 4950


@pytest.mark.on_cpu
def test_ensure_row_contiguous_false_passes_strides(installed):
    source = "uint i = thread_position_in_grid.x; y[i] = x[i % 3 * x_strides[0] + i / 3];"
    x = mx.arange(6.0).reshape(3, 2)
    kernel = double(source, ensure_row_contiguous=False)
    assert call(kernel, x)[0].reshape(-1).tolist() == [0, 2, 4, 1, 3, 5]
    # Of a transposed array, the same memory is read with the strides the other way round.
    (y,) = call(kernel, mx.arange(9.0).reshape(3, 3).T)
    assert y.reshape(-1).tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]


@pytest.mark.parametrize("mode", ["safe", "relaxed", "fast"])
def test_compile_options(installed, mode):
    assert call(double(compile_options={"math_mode": mode}), mx.ones((3,)))[0].tolist() == [2] * 3


def test_verbose_prints_what_mlx_prints(installed, capfd):
    x = mx.ones((10,))
    kernel = double()
    for _ in range(2):
        call(kernel, x, verbose=True)
    mx.eval(call(kernel, x))
    out = capfd.readouterr().out
    assert out.count("Generated source code for `double`") == 2
    assert "[[kernel]] void custom_kernel_double_float_float(" in out


def test_a_kernel_outlives_the_installation():
    with zmlx.install():
        kernel = double()
    assert call(kernel, mx.ones((2,)))[0].tolist() == [2, 2]


def test_a_kernel_works_inside_compile_and_under_a_custom_function(installed):
    kernel = double()
    twice = mx.compile(lambda x: call(kernel, x)[0] + 1)
    assert twice(mx.ones((3,))).tolist() == [3] * 3

    @mx.custom_function
    def f(x):
        return call(kernel, x)[0]

    @f.vjp
    def _(x, dy, y):
        return 2 * dy

    assert mx.grad(lambda x: f(x).sum())(mx.ones((3,))).tolist() == [2] * 3


def test_transforms_that_mlx_lacks_raise_as_with_mlx(installed):
    kernel = double()
    with pytest.raises(ValueError, match="Not implemented for"):
        mx.grad(lambda x: call(kernel, x)[0].sum())(mx.ones((3,)))


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": [1.0, 2.0]}, ValueError, "Expected `inputs` to have size 1 but got size 2"),
        ({"inputs": ["one"]}, ValueError, "Invalid type str"),
        ({"output_shapes": [(1,), (1,)]}, ValueError, "Expected `output_shapes` to have size 1"),
        ({"output_dtypes": []}, ValueError, "Expected `output_dtypes` to have size 1"),
        ({"grid": (1, 1)}, TypeError, "incompatible function arguments"),
        ({"output_shapes": [4]}, TypeError, "incompatible function arguments"),
        ({"template": {"T": mx.float32}}, TypeError, "incompatible function arguments"),
        ({"template": [("T", 1.5)]}, ValueError, "Invalid template argument"),
        ({"stream": "gpu"}, TypeError, "incompatible function arguments"),
        ({"stream": mx.cpu}, ValueError, "Only supports the GPU"),
    ],
)
def test_wrong_calls_raise_the_errors_of_mlx(installed, arguments, error, message):
    with pytest.raises(error, match=message):
        call(double(), mx.ones((4,)), **arguments)


def test_an_empty_grid_does_not_leave_outputs_undefined(installed):
    with pytest.raises(ValueError, match=r"\[double\] 'grid' must not be empty"):
        call(double(), mx.ones((4,)), grid=(0, 1, 1))
    assert call(double(), mx.ones((4,)), grid=(0, 1, 1), init_value=3)[0].tolist() == [3] * 4
    assert call(double(), mx.ones((0,)))[0].tolist() == []


def test_calls_are_by_keyword_as_in_mlx(installed):
    with pytest.raises(TypeError):
        double()([mx.ones((4,))])
    with pytest.raises(TypeError, match="bogus"):
        call(double(), mx.ones((4,)), bogus=1)


def test_wrong_kernels_raise_the_errors_of_mlx(installed):
    with pytest.raises(ValueError, match="Must specify at least one output"):
        mx.fast.metal_kernel(name="k", input_names=["x"], output_names=[], source="")
    with pytest.raises(TypeError, match="incompatible function arguments"):
        mx.fast.metal_kernel(name="k", input_names=["x"], output_names=["y"])
    with pytest.raises(ValueError, match="Expected math_mode"):
        double(compile_options={"math_mode": "sloppy"})
    with pytest.raises(ValueError, match="Unknown compile option"):
        double(compile_options={"math": "fast"})


def test_a_wrong_source_names_kernel_and_line(installed):
    with pytest.raises(RuntimeError, match=r"double[\s\S]*line 2"):
        call(double("uint i = 0;\ny[i] = nothing;"), mx.ones((4,)))


# ---- what is patched -----------------------------------------------------------------------------


def everything():
    modules = (mx, mx.distributed, mx.fast, mx.fft, mx.linalg, mx.metal, mx.random)
    functions = {(m.__name__, n): v for m in modules for n, v in vars(m).items()}
    return {**functions, **{("mlx.core.array", n): v for n, v in vars(mx.array).items()}}


def test_everything_is_restored_exactly():
    before = everything()
    with zmlx.install(claim_metal=True):
        changed = {f"{m}.{n}" for (m, n), v in everything().items() if v is not before[m, n]}
        assert changed == set(interop.patched())
        assert "mlx.core.fast.metal_kernel" in changed
    assert everything() == before
    assert interop.patched() == ()


def test_installing_is_idempotent():
    original = mx.fast.metal_kernel
    zmlx.install()
    once = mx.fast.metal_kernel
    zmlx.install()
    assert mx.fast.metal_kernel is once
    assert interop.patched() == ("mlx.core.fast.metal_kernel",)
    zmlx.uninstall()
    assert mx.fast.metal_kernel is original
    zmlx.uninstall()


def test_installations_nest():
    with zmlx.install():
        assert not mx.metal.is_available()
        with zmlx.install(claim_metal=True):
            assert mx.metal.is_available()
            with zmlx.install():
                assert mx.metal.is_available()
        assert not mx.metal.is_available()
        assert isinstance(double(), interop.InstalledKernel)
    assert not isinstance(double(), interop.InstalledKernel)


def test_an_error_inside_the_block_restores_too():
    with pytest.raises(KeyError), zmlx.install(claim_metal=True):
        raise KeyError
    assert interop.patched() == ()


def test_on_a_mac_nothing_changes(monkeypatch):
    monkeypatch.setattr(interop.launch, "gpu_target", lambda: "metal")
    with zmlx.install(claim_metal=True):
        assert interop.patched() == ()


@without_gpu
def test_a_program_that_says_it_is_a_mac_is_not_one(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    launch.gpu_target.cache_clear()
    assert launch.gpu_target() is None
    with zmlx.install():
        (y,) = call(double(), mx.arange(5.0))
    assert mx.array_equal(y, 2 * mx.arange(5.0))


# ---- claims --------------------------------------------------------------------------------------


def test_metal_is_claimed(claimed):
    assert mx.metal.is_available()
    assert mx.default_device() == mx.gpu
    assert mx.default_device() != mx.cpu
    assert mx.is_available(mx.gpu)
    assert mx.device_count(mx.gpu) == 1
    assert mx.device_info()["max_recommended_working_set_size"] > 2**30


@without_gpu
def test_streams_of_the_gpu_are_streams_of_the_cpu(claimed):
    x = mx.ones((4,))
    own = mx.new_stream(mx.default_device())
    assert own.device == mx.Device(mx.cpu)
    assert mx.default_stream(mx.gpu) == mx.default_stream(mx.cpu)
    assert mx.new_thread_unsafe_stream(mx.gpu).device == mx.Device(mx.cpu)
    local = mx.new_thread_local_stream(device=mx.default_device())
    for stream in (mx.gpu, mx.Device(mx.gpu), own, local):
        with mx.stream(stream):
            assert mx.exp(x).shape == (4,)
            assert call(double(), x)[0].tolist() == [2] * 4
        assert mx.add(x, x, stream=stream).tolist() == [2] * 4
        assert mx.multiply(x, x, stream=stream).tolist() == [1] * 4
        assert mx.random.uniform(shape=(2,), stream=stream).shape == (2,)
        assert call(double(), x, stream=stream)[0].tolist() == [2] * 4
        mx.synchronize(stream)
    mx.synchronize(mx.default_stream(mx.gpu))


@without_gpu
def test_methods_of_arrays_take_the_gpu(claimed):
    x = mx.arange(6.0)
    for stream in (mx.gpu, mx.Device(mx.gpu), mx.new_stream(mx.gpu)):
        assert x.reshape(2, 3, stream=stream).sum(0, stream=stream).tolist() == [3, 5, 7]
        assert x.astype(mx.int32, stream).tolist() == list(range(6))
    assert "mlx.core.array.sum" in zmlx.interop.patched()


def test_a_stream_of_ones_own_runs_the_kernel(claimed):
    stream = mx.new_stream(mx.gpu)
    x = mx.ones((4,))
    (y,) = call(double(), x, stream=stream)
    (z,) = call(double(), y, stream=mx.gpu)
    assert z.tolist() == [4] * 4


def test_the_default_device_can_be_set(claimed):
    mx.set_default_device(mx.cpu)
    assert mx.default_device() == mx.cpu
    mx.set_default_device(mx.gpu)
    assert mx.default_device() == mx.gpu


def test_layers_and_training_work_under_a_claim(claimed):
    model = nn.Linear(3, 2)
    loss, gradients = nn.value_and_grad(model, lambda m, x: m(x).sum())(model, mx.ones((4, 3)))
    mx.eval(loss, gradients)
    assert gradients["weight"].shape == (2, 3)


@without_gpu
def test_zmlx_still_knows_that_this_is_the_cpu(claimed):
    assert zmlx.launch.settings().target == "cpu"
    assert zmlx.kernels.softmax(mx.zeros((2, 4))).tolist() == [[0.25] * 4] * 2


# ---- command line --------------------------------------------------------------------------------


SCRIPT = """
import sys
import mlx.core as mx

assert __name__ == "__main__"
assert mx.metal.is_available() and mx.default_device() == mx.gpu
kernel = mx.fast.metal_kernel(
    name="k", input_names=["x"], output_names=["y"], source="y[0] = x[0] + 1;")
(y,) = kernel(inputs=[mx.array([41.0])], grid=(1, 1, 1), threadgroup=(1, 1, 1),
              output_shapes=[(1,)], output_dtypes=[mx.float32], stream=mx.gpu)
print(int(y.item()), sys.argv[1:])
sys.exit(5)
"""


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "zmlx", "run", *arguments], capture_output=True, text=True, **options
    )


def test_run_runs_a_script_for_the_mac(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = run(str(tmp_path / "script.py"), "--flag", "-m", "word")
    assert done.stdout == "42 ['--flag', '-m', 'word']\n", done.stderr
    assert done.returncode == 5


def test_run_runs_a_module_and_finds_what_lies_beside_a_script(tmp_path):
    (tmp_path / "beside.py").write_text("answer = 42\n")
    (tmp_path / "script.py").write_text("import beside\nprint(beside.answer)\n")
    assert run(str(tmp_path / "script.py")).stdout == "42\n"
    assert run("-m", "script", cwd=tmp_path).stdout == "42\n"


def test_the_packages_of_a_module_run_as_it_does(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("print(42)\n")
    first = package / "__init__.py"
    first.write_text("import mlx.core as mx\nassert mx.metal.is_available()\n")
    done = run("-m", "package.module", cwd=tmp_path)
    assert done.stdout == "42\n", done.stderr
    first.write_text("import nothing_here\n")
    done = run("-m", "package.module", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'nothing_here'\n")


def test_run_without_the_file_says_so(tmp_path):
    done = run(str(tmp_path / "nothing.py"))
    assert done.returncode == 2
    assert "no file is called" in done.stderr


@pytest.mark.parametrize(
    "name",
    ["nothing_here", "nothing_here.inside", "json.nothing", ".json", "mlx.core.fast"],
)
def test_run_without_the_module_says_so(name):
    done = run("-m", name)
    assert done.returncode == 2
    assert done.stderr == f"[run] no module is called {name!r}.\n"


def test_run_serves_threads_and_exit_handlers_after_the_last_line(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import atexit, sys, threading
        import mlx.core as mx

        def compute(*_):
            kernel = mx.fast.metal_kernel(
                name="k", input_names=["x"], output_names=["y"], source="y[0] = x[0] + 1;")
            (y,) = kernel(inputs=[mx.array([41.0])], grid=(1, 1, 1), threadgroup=(1, 1, 1),
                          output_shapes=[(1,)], output_dtypes=[mx.float32])
            print(int(y.item()), sys.argv[1:])

        def late():
            threading.main_thread().join()
            compute()

        atexit.register(compute)
        threading.Thread(target=late).start()
    """)
    )
    done = run(str(tmp_path / "script.py"), "word")
    assert done.stdout == "42 ['word']\n" * 2, done.stderr
