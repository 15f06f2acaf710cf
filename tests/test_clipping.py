"""Gradients clipped by their global norm, alone and as part of an optimizer's step."""

import mlx.core as mx
import mlx.optimizers as mlx_optimizers
import numpy as np
import pytest
from parameter_trees import leaves, run, tree

import zmlx
from zmlx import launch, optimizers
from zmlx.arguments import FLOATING
from zmlx.kernels import gradient_norm
from zmlx.testing import assert_matches, to_numpy


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "SGD"])
def test_max_norm_is_a_clip_before_the_step(name):
    clipped, _ = optimizers.clip_by_global_norm(tree(1), 0.5)
    want = run(getattr(optimizers, name)(1e-2), tree(0), [clipped])
    for fused in (True, False):
        got = run(getattr(optimizers, name)(1e-2, max_norm=0.5, fused=fused), tree(0), [tree(1)])
        for a, b in zip(leaves(got), leaves(want), strict=True):
            np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("geometry", ["cpu", "gpu"])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
def test_clip_by_global_norm(dtype, geometry, max_norm):
    gradients = tree(1, dtype)
    with launch.geometry(geometry):
        clipped, norm = optimizers.clip_by_global_norm(gradients, max_norm)
    flat = [to_numpy(x) for x in leaves(gradients)]
    want = np.sqrt(sum((x**2).sum() for x in flat))
    np.testing.assert_allclose(norm.item(), want, rtol=1e-6)
    for a, b in zip(leaves(clipped), flat, strict=True):
        assert a.dtype == dtype
        assert_matches(a, b * min(1.0, max_norm / (want + 1e-6)))


def test_the_norm_of_a_large_tree_takes_few_launches():
    shapes = {str(i): (20 + i,) for i in range(75)}
    gradients = tree(1, shapes=shapes)
    before = gradient_norm.SQUARES.statistics["launches"]
    optimizers.global_norm(gradients)
    assert gradient_norm.SQUARES.statistics["launches"] - before == 3
    optimizer = optimizers.AdamW(1e-3, max_norm=1.0)
    optimizer.apply_gradients(gradients, tree(0, shapes=shapes))
    assert gradient_norm.SQUARES.statistics["launches"] - before == 6
    assert optimizer.statistics["launches"] == 19 + 3


def test_an_optimizer_that_is_not_fused_launches_nothing_for_its_norm():
    optimizer = optimizers.AdamW(1e-3, max_norm=1.0, fused=False)
    before = zmlx.metal.statistics()["launches"]
    mx.eval(optimizer.apply_gradients(tree(1), tree(0)))
    assert zmlx.metal.statistics()["launches"] == before
    assert optimizer.statistics == {"fused": 0, "plain": 7, "launches": 0}


@pytest.mark.parametrize("count", [1, 14, 28, 29, 30, 57, 59, 88, 140])
def test_clipping_takes_a_launch_for_14_arrays_and_one_more(count):
    gradients = tree(3, shapes={str(i): (8 + i, 3) for i in range(count)})
    before = zmlx.metal.statistics()["launches"]
    clipped, norm = optimizers.clip_by_global_norm(gradients, 0.5)
    mx.eval(clipped, norm)
    launches = zmlx.metal.statistics()["launches"] - before
    assert launches == -(-count // 14) + 1
    want, _ = mlx_optimizers.clip_grad_norm(gradients, 0.5)
    for key, x in clipped.items():
        np.testing.assert_allclose(to_numpy(x), to_numpy(want[key]), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("count, apart", [(2, 2), (28, 28), (30, 2), (140, 28)])
def test_clipping_takes_the_memory_of_the_largest_gradients(count, apart):
    # Every launch takes more bytes than are worth waiting for the norm.
    shapes = {str(i): (100 + count - i, 700) for i in range(count)}
    gradients = tree(3, shapes=shapes)
    wide = {key: to_numpy(x) for key, x in gradients.items()}
    factor = 0.5 / (np.sqrt(sum((x**2).sum() for x in wide.values())) + 1e-6)
    before = zmlx.metal.statistics()["donations"]
    gradients, _ = optimizers.clip_by_global_norm(gradients, 0.5)
    mx.eval(gradients)
    assert zmlx.metal.statistics()["donations"] - before == apart
    for key, x in gradients.items():
        assert_matches(x, wide[key] * factor, name=key)


def test_clipping_needs_no_memory_for_the_gradients_of_a_small_model():
    gradients = [mx.ones((1 << 18,)) * i for i in range(1, 9)]
    mx.eval(gradients)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    gradients, _ = optimizers.clip_by_global_norm(gradients, 0.5)
    mx.eval(gradients)
    assert mx.get_peak_memory() - before < 1 << 16


def test_gradients_that_somebody_holds_are_not_clipped_in_place():
    gradients = tree(1)
    kept = [to_numpy(x) for x in leaves(gradients)]
    mx.eval(optimizers.clip_by_global_norm(gradients, 0.5)[0])
    for x, before in zip(leaves(gradients), kept, strict=True):
        np.testing.assert_array_equal(to_numpy(x), before)


def test_clipping_fits_the_buffers_of_a_launch():
    for kernel, most in (
        (gradient_norm.SCALE, gradient_norm.SCALE.arrays_per_launch),
        (gradient_norm.SQUARES, gradient_norm.SQUARES.arrays_per_launch),
        (gradient_norm.SCALE_IN_PLACE, gradient_norm.SCALE_IN_PLACE.sets_per_launch),
    ):
        spec = kernel._kernel(most).spec
        assert len(spec.input_names) + len(spec.output_names) <= 31


def test_clipping_of_other_dtypes_and_of_nothing():
    gradients = {
        "c": mx.array([3 + 4j]),
        "i": mx.array([12]),
        "h": mx.full((2,), 300.0, mx.float16),
    }
    clipped, norm = optimizers.clip_by_global_norm(gradients, 1.0)
    np.testing.assert_allclose(norm.item(), np.sqrt(25 + 144 + 180000), rtol=1e-6)
    np.testing.assert_allclose(np.array(clipped["c"]), np.array([3 + 4j]) / norm.item(), rtol=1e-5)
    empty, norm = optimizers.clip_by_global_norm({}, 1.0)
    assert not empty
    assert norm.item() == 0
