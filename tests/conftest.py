"""How many random cases the tests draw, and on which of MLX's devices they run.

By default a few cases, the same ones every time. `--hypothesis-profile=many` draws more, as CI
does, and `--hypothesis-profile=default` other ones every time.

Tests run on MLX's default device. Where that is a GPU, the kernels do, too, but for tests that are
marked `on_cpu`: what they are about is the CPU target's, which a Mac does not have. Of those,
`on_cpu("alone")` need a machine without a GPU.
"""

import os
import shutil
import sys

import mlx_compiled

# MLX's products on a GPU round float32 to 10 bits unless this is said before the first one.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import pytest
from hypothesis import settings

import zmlx
from zmlx.launch import gpu_target

settings.register_profile("few", max_examples=12, deadline=None, derandomize=True)
settings.register_profile("many", settings.get_profile("few"), max_examples=40)
settings.load_profile("few")


def pytest_configure(config):
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        if config.getoption("numprocesses", None):
            mlx_compiled.precompile()
    else:
        own = mlx_compiled.begin(worker)

        def end():
            mlx_compiled.end(own)
            shutil.rmtree(own, ignore_errors=True)

        config.add_cleanup(end)


@pytest.fixture(autouse=True)
def _on_cpu(request):
    mark = request.node.get_closest_marker("on_cpu")
    if mark is None:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("the CPU target needs Linux")
    if "alone" in mark.args and gpu_target() is not None:
        pytest.skip("beside a GPU the CPU waits for nothing before it gives out memory")
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def kernels_run():
    """Everything that is patched runs its kernel, whatever was measured here."""
    with zmlx.prefer("zmlx"):
        yield
