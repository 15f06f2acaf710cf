"""What the tests of the softmax family call with, and how near results must come."""

import mlx.core as mx
import numpy as np

from zmlx.testing import to_numpy

INF = float("inf")
GEOMETRIES = ("cpu", "gpu")


def normal(*shape, seed=0, scale=1.0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape) * scale, dtype=mx.float32)


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=tolerance, atol=tolerance)
