"""`zmlx.install` where MLX has a CUDA device: kernels run on the GPU, whose streams stay its own.

Without a device, MLX's functions for devices and streams are replaced by a model of them. The last
section runs on a device.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import mlx.core as mx
import pytest
from test_interop import call, double

import zmlx
from zmlx import claims, interop, launch
from zmlx.targets import cuda

REASON = cuda.unavailable()

INFO = {
    "device_name": "H",
    "architecture": "sm_90",
    "compute_capability_major": 9,
    "compute_capability_minor": 0,
    "total_memory": 1 << 36,
    "free_memory": 1 << 35,
}
MAC_KEYS = {
    "memory_size",
    "max_buffer_length",
    "max_recommended_working_set_size",
    "resource_limit",
}


def kind(device):
    return "gpu" if device == mx.gpu else "cpu"


@pytest.fixture
def machine(monkeypatch):
    """Devices and streams as MLX has them with a GPU, and what is prepared and launched on CUDA.
    Outputs of launches are 7."""
    zmlx.native.load()  # with MLX's own functions
    now = SimpleNamespace(
        device=mx.Device(mx.gpu), streams={"gpu": "own", "cpu": "own"}, prepared=[], launched=[]
    )

    def set_default_stream(stream):
        now.streams["gpu" if stream == "own" else kind(stream.device)] = stream

    @contextmanager
    def stream(s):
        device, before = now.device, now.streams[kind(now.device)]
        if isinstance(s, (mx.Device, mx.DeviceType)):
            now.device = s
        else:
            now.device = s.device
            now.streams[kind(s.device)] = s
        yield
        now.device, now.streams[kind(device)] = device, before

    def prepare(spec, arrays, template, grid, group, shapes, dtypes, init_value, constants):
        now.prepared.append((template, init_value))
        return shapes, dtypes

    def run(prepared, arrays):
        now.launched.append(now.streams["gpu"])
        outputs = [mx.full(s, 7, dtype=d) for s, d in zip(*prepared, strict=True)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    monkeypatch.setattr(launch, "gpu_target", lambda: "cuda")
    monkeypatch.setattr(mx, "default_device", lambda: now.device)
    monkeypatch.setattr(mx, "set_default_device", lambda device: setattr(now, "device", device))
    monkeypatch.setattr(mx, "default_stream", lambda device: now.streams[kind(device)])
    monkeypatch.setattr(mx, "set_default_stream", set_default_stream)
    monkeypatch.setattr(mx, "stream", stream)
    monkeypatch.setattr(
        claims,
        "_mlx_device_info",
        lambda d=None: dict(INFO) if kind(d or now.device) == "gpu" else {"device_name": "C"},
    )
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "prepare", prepare)
    monkeypatch.setattr(cuda, "launch", run)
    return now


# ---- claims --------------------------------------------------------------------------------------


def test_a_claim_answers_questions_about_metal_alone(machine):
    names = ("device_count", "is_available", "default_device", "new_stream", "stream", "exp")
    before = [getattr(mx, name) for name in names]
    with zmlx.install(claim_metal=True):
        assert interop.patched() == (
            "mlx.core.fast.metal_kernel",
            "mlx.core.device_info",
            "mlx.core.metal.is_available",
            "mlx.core.metal.device_info",
        )
        assert mx.metal.is_available()
        assert [getattr(mx, name) for name in names] == before
    assert interop.patched() == ()


def test_information_has_the_keys_of_cuda_and_of_metal(machine):
    with zmlx.install(claim_metal=True):
        for info in (mx.device_info(), mx.device_info(mx.gpu), mx.metal.device_info()):
            assert info.items() >= INFO.items()
            assert info.keys() == INFO.keys() | MAC_KEYS
            assert info["memory_size"] == info["max_buffer_length"] == INFO["total_memory"]
        assert mx.device_info(mx.cpu) == {"device_name": "C"}
        mx.set_default_device(mx.cpu)
        assert mx.device_info() == {"device_name": "C"}
        assert mx.metal.device_info()["memory_size"] == INFO["total_memory"]


def test_the_architecture_is_mlx_s_own_whatever_is_claimed(monkeypatch):
    monkeypatch.setattr(cuda, "_device_info", lambda device: INFO)
    cuda.architecture.cache_clear()
    try:
        with zmlx.install(claim_metal=True):
            assert cuda.architecture() == "sm_90a"
    finally:
        cuda.architecture.cache_clear()


# ---- targets and streams -------------------------------------------------------------------------


@pytest.mark.parametrize("claim_metal", [False, True])
def test_kernels_run_where_the_default_device_is(machine, claim_metal):
    x = mx.ones((4,))
    with zmlx.install(claim_metal=claim_metal):
        kernel = double()
        for _ in range(2):
            # A launch of one target is not taken for that of another.
            for device, found, target in ((mx.cpu, 2, "cpu"), (mx.gpu, 7, "cuda")):
                mx.set_default_device(device)
                assert launch.settings().target == target
                for _ in range(2):
                    assert call(kernel, x)[0].tolist() == [found] * 4
                    assert zmlx.metal.kernel(
                        name="double", input_names=["x"], output_names=["y"],
                        source="y[thread_position_in_grid.x] = 2;",
                    )(x).tolist() == [found] * 4  # fmt: skip


@pytest.mark.parametrize("claim_metal", [False, True])
@pytest.mark.parametrize("default", [mx.gpu, mx.cpu], ids=str)
def test_a_stream_of_the_gpu_runs_the_kernel_and_is_not_the_default_after(
    machine, claim_metal, default
):
    x = mx.ones((4,))
    mx.set_default_device(default)
    own = mx.new_thread_local_stream(mx.gpu)
    with zmlx.install(claim_metal=claim_metal):
        for stream in (own, mx.gpu, mx.Device(mx.gpu)):
            assert call(double(), x, stream=stream)[0].tolist() == [7] * 4
            assert (machine.device, machine.streams["gpu"]) == (default, "own")
        with mx.stream(own):
            call(double(), x)
            call(double(), x, stream=mx.gpu)
    assert machine.launched == [own, "own", "own", own, own]


@pytest.mark.parametrize("claim_metal", [False, True])
def test_streams_of_the_cpu_are_refused_as_on_a_mac(machine, claim_metal):
    with zmlx.install(claim_metal=claim_metal):
        for stream in (mx.cpu, mx.new_stream(mx.cpu), mx.new_thread_local_stream(mx.cpu)):
            with pytest.raises(ValueError, match="Only supports the GPU"):
                call(double(), mx.ones((4,)), stream=stream)
    assert machine.launched == []


# ---- launches ------------------------------------------------------------------------------------


def test_mlx_looks_at_the_arguments_of_a_configuration_once(machine, monkeypatch):
    x, looked = mx.ones((4,)), []

    def original(self, inputs, stream, arguments):
        looked.append(tuple(inputs))
        return validate(self, inputs, stream, arguments)

    validate = interop.InstalledKernel._validate
    monkeypatch.setattr(interop.InstalledKernel, "_validate", original)
    with zmlx.install():
        kernel = double()
        for _ in range(3):
            assert call(kernel, x)[0].tolist() == [7] * 4
        assert len(looked) == 1
        for _ in range(2):
            call(kernel, x, inputs=[2.0])
        assert len(looked) == 2
        # Whatever is unlike a launch before is looked at, and refused as MLX does.
        for wrong in ([x, x], [], ["no"]):
            with pytest.raises((ValueError, TypeError)):
                call(kernel, x, inputs=wrong)
        with pytest.raises(ValueError, match="Only supports the GPU"):
            call(kernel, x, stream=mx.cpu)
    assert len(looked) == 6
    assert len(machine.launched) == 5


def test_a_configuration_is_prepared_once(machine):
    x = mx.ones((4,))
    with zmlx.install():
        kernel = double()
        for n in (1, True, 1, True):
            call(kernel, x, template=[("N", n)])
        for value in (0.0, -0.0, 0.0, -0.0):
            call(kernel, x, init_value=value)
        call(kernel, mx.ones((8,)), init_value=0.0)
    prepared = [(repr(template), repr(value)) for template, value in machine.prepared]
    assert prepared == [
        ("(('N', 1),)", "None"),
        ("(('N', True),)", "None"),
        ("()", "0.0"),
        ("()", "-0.0"),
        ("()", "0.0"),
    ]


def test_several_outputs_come_as_a_list_and_an_empty_grid_is_refused(machine):
    x = mx.ones((4,))
    with zmlx.install():
        kernel = mx.fast.metal_kernel(
            name="two", input_names=["x"], output_names=["y", "z"], source="y[0] = z[0] = x[0];"
        )
        two = {"output_shapes": [(4,), (2,)], "output_dtypes": [mx.float32, mx.int32]}
        y, z = call(kernel, x, **two)
        assert (y.shape, z.dtype) == ((4,), mx.int32)
        with pytest.raises(ValueError, match=r"\[two\] 'grid' must not be empty"):
            call(kernel, x, grid=(0, 1, 1), **two)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": [1.0, 2.0]}, ValueError, "Expected `inputs` to have size 1"),
        ({"grid": (1, 1)}, TypeError, "incompatible function arguments"),
        ({"template": [("T", 1.5)]}, ValueError, "Invalid template argument"),
    ],
)
def test_wrong_calls_raise_the_errors_of_mlx(machine, arguments, error, message):
    with zmlx.install(), pytest.raises(error, match=message):
        call(double(), mx.ones((4,)), **arguments)


def test_verbose_prints_what_mlx_prints(machine, capfd):
    with zmlx.install():
        call(double(), mx.ones((10,)), verbose=True)
    assert "[[kernel]] void custom_kernel_double_float_float(" in capfd.readouterr().out


# ---- on a device ---------------------------------------------------------------------------------

on_device = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def device_restored():
    device = mx.default_device()
    yield
    mx.set_default_device(device)


@pytest.fixture
def streams_of_launches(monkeypatch):
    """The streams that MLX puts launches on."""
    found, precompiled = [], mx.fast.precompiled_cuda_kernel

    def recording(**arguments):
        assert arguments["stream"] == mx.gpu
        found.append(mx.default_stream(mx.gpu))
        return precompiled(**arguments)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", recording)
    return found


@on_device
def test_a_claim_leaves_the_device_its_own():
    info = mx.device_info(mx.gpu)
    with zmlx.install(claim_metal=True):
        assert mx.metal.is_available()
        assert mx.default_device() == mx.gpu
        assert launch.settings().target == "cuda"
        assert mx.new_stream(mx.gpu).device == mx.gpu
        assert mx.device_info().keys() == info.keys() | MAC_KEYS
        cuda.architecture.cache_clear()
        architecture = cuda.architecture()
    cuda.architecture.cache_clear()
    assert cuda.architecture() == architecture


@on_device
@pytest.mark.parametrize("claim_metal", [False, True])
@pytest.mark.parametrize("default", [mx.gpu, mx.cpu], ids=str)
def test_streams_of_the_device_run_kernels(
    device_restored, streams_of_launches, claim_metal, default
):
    mx.set_default_device(default)
    usual, own = mx.default_stream(mx.gpu), mx.new_stream(mx.gpu)
    local = mx.new_thread_local_stream(mx.gpu)
    x = mx.arange(40.0)
    with zmlx.install(claim_metal=claim_metal):
        kernel = double()
        for stream in (mx.gpu, mx.Device(mx.gpu), own, local):
            (y,) = call(kernel, x, stream=stream)
            assert mx.array_equal(y, 2 * x)
            assert mx.default_device() == default
            assert mx.default_stream(mx.gpu) == usual
        (y,) = call(kernel, x)
        assert mx.array_equal(y, 2 * x)
    assert streams_of_launches[:3] == [usual, usual, own]
    assert streams_of_launches[3] not in (usual, own)
    assert streams_of_launches[4:] == ([usual] if default == mx.gpu else [])


@on_device
def test_arguments_that_are_equal_are_not_the_same_on_the_device():
    x = mx.ones((4,))
    with zmlx.install():
        kernel = double("uint i = thread_position_in_grid.x; y[i] = x[i] * sizeof(N);")
        sizes = [call(kernel, x, template=[("N", n)])[0][0].item() for n in (1, True, 1, True)]
        assert sizes == [4, 1, 4, 1]
        kernel = double("if (x[0] > 5) { y[0] = 1; }")
        signs = [(1 / call(kernel, x, init_value=v)[0][0]).item() for v in (0, -0.0, 0.0)]
        assert signs == [float("inf"), -float("inf"), float("inf")]
