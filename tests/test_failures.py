"""Values that only the kernel sees."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from zmlx.kernels import cross_entropy

LOGITS = mx.array(np.random.default_rng(0).standard_normal((4, 70)).astype(np.float32))


@pytest.mark.parametrize("bad", [70, -1, -100, 2**31 - 1])
def test_a_target_out_of_range_raises_at_eval(bad):
    targets = mx.array([1, bad, 3, 4])
    loss = cross_entropy(LOGITS, targets)
    with pytest.raises(RuntimeError, match=rf"\[cross_entropy\] 'targets' must .* but got {bad}\."):
        mx.eval(loss)


def test_the_process_is_healthy_after_a_failure():
    with pytest.raises(RuntimeError):
        mx.eval(cross_entropy(LOGITS, mx.array([99, 0, 0, 0])))
    good = cross_entropy(LOGITS, mx.array([1, 2, 3, 4]))
    assert np.isfinite(good.item())


def test_a_gradient_with_a_target_out_of_range_raises_too():
    gradient = mx.grad(lambda x: cross_entropy(x, mx.array([0, 0, 0, 70])))(LOGITS)
    with pytest.raises(RuntimeError, match=r"\[cross_entropy\] 'targets'"):
        mx.eval(gradient)


def test_the_ignored_index_may_be_out_of_range():
    losses = cross_entropy(LOGITS, mx.array([0, -100, 2, 3]), ignore_index=-100, reduction="none")
    assert losses[1].item() == 0


def test_zmlx_check_raises_at_the_call():
    code = (
        "import mlx.core as mx; from zmlx.kernels import cross_entropy\n"
        "x = mx.zeros((3, 5)); cross_entropy(x, mx.array([0, 1, 2]))\n"
        "cross_entropy(x, mx.array([0, 7, 2]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ZMLX_CHECK": "1"},
    )
    assert "ValueError: [cross_entropy] 'targets' must be in range but got 7." in out.stderr
