"""Gradients by the transforms that leave an op's kernels for plain MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import zmlx
from zmlx.testing import gradients

WAYS = ("grad of vmap", "vmap of grad", "shapeless", "reference")


def plain_gradients(
    way: str,
    function: Callable[..., Any],
    values: Sequence[mx.array],
    which: Sequence[int],
    cotangents: Sequence[mx.array],
) -> list[mx.array]:
    """`zmlx.testing.gradients`, one of the `WAYS`."""

    def outputs(*some: mx.array) -> list[mx.array]:
        result = function(*some)
        return list(result) if isinstance(result, tuple) else [result]

    def of(*some: mx.array) -> list[mx.array]:
        return gradients(outputs, some[: len(values)], which, some[len(values) :])

    if way == "shapeless":
        return mx.compile(of, shapeless=True)(*values, *cotangents)
    if way == "reference":
        with zmlx.target("reference"):
            return of(*values, *cotangents)
    twice, slopes = ([mx.stack([x, x]) for x in xs] for xs in (values, cotangents))
    if way == "vmap of grad":
        found = mx.vmap(of)(*twice, *slopes)
    else:
        found = gradients(mx.vmap(outputs), twice, which, slopes)
    return [x[1] for x in found]


def assert_plain_gradients(
    function: Callable[..., Any],
    values: Sequence[mx.array],
    which: Sequence[int],
    way: str,
    tolerance: float = 1e-5,
) -> list[mx.array]:
    """Raises where a gradient in plain MLX is not the kernel's, NaN in the same places; returns
    the kernel's."""
    result = function(*values)
    shapes = [y.shape for y in (result if isinstance(result, tuple) else (result,))]
    rng = np.random.default_rng(9)
    cotangents = [mx.array(rng.standard_normal(s).astype(np.float32)) for s in shapes]
    wants = gradients(function, values, which, cotangents)
    gots = plain_gradients(way, function, values, which, cotangents)
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return wants
