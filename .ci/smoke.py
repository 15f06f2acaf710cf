"""The installed wheel works away from the source tree: its files, a kernel, its gradients."""

import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import zmlx
from zmlx.kernels import rms_norm

root = Path(zmlx.__file__).parent
assert root.is_relative_to(sys.prefix), f"zmlx must come from the wheel but is in {root}"
assert version("zmlx-kernels") == zmlx.__version__
for pattern in ("py.typed", "native/*.cc", "native/*.h", "native/prelude/*.h"):
    assert list(root.glob(pattern)), f"the wheel has no {pattern}"

x, weight = mx.random.normal((64, 512)), mx.random.normal((512,))


def gradients(norm):
    def loss(x, weight):
        return norm(x, weight, 1e-5).square().sum()

    return mx.grad(loss, argnums=(0, 1))(x, weight)


assert mx.allclose(rms_norm(x, weight), mx.fast.rms_norm(x, weight, 1e-5), atol=1e-5)
for ours, theirs in zip(gradients(rms_norm), gradients(mx.fast.rms_norm), strict=True):
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
print(f"zmlx {zmlx.__version__} from the wheel: rms_norm and its gradients agree with MLX")
