"""Two arrays of rows, and how near results must be."""

import mlx.core as mx
import numpy as np


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(
        np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), tolerance, tolerance
    )


X = mx.array(np.random.default_rng(0).uniform(0.2, 0.8, (3, 70)).astype(np.float32))
Y = mx.array(np.random.default_rng(1).uniform(0.2, 0.8, (3, 70)).astype(np.float32))
