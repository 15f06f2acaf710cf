"""Rotations in float64, and what is rotated."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from zmlx.testing import to_numpy


def normal(*shape, dtype=mx.float32, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rotated(x, theta, traditional=False):
    """x turned by theta (…, pairs), which broadcasts, in float64."""
    x, h = to_numpy(x), theta.shape[-1]
    pairs = (slice(0, 2 * h, 2), slice(1, 2 * h, 2)) if traditional else (slice(h), slice(h, 2 * h))
    a, b = (x[..., p] for p in pairs)
    y = x.copy()
    y[..., pairs[0]] = a * np.cos(theta) - b * np.sin(theta)
    y[..., pairs[1]] = a * np.sin(theta) + b * np.cos(theta)
    return y


def waves(dims, base=10000.0):
    return base ** (-np.arange(0, dims, 2) / dims)
