"""Kernels that others wrote: those of mlx-lm, unchanged and in the geometry of a GPU, against plain
MLX. Nothing in them knows of this core."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from metal_source import DEPTH_FIRST, core, schedule, triple

pytest.importorskip("mlx_lm")

_serial = itertools.count()


def stand_in(
    name: str,
    input_names: list[str],
    output_names: list[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
) -> Callable[..., Any]:
    """`mx.fast.metal_kernel` on the CPU."""
    kernel = core.kernel(
        name,
        tuple(input_names),
        tuple(output_names),
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        "safe",
    )

    def call(
        inputs: Any, output_shapes: Any, output_dtypes: Any, grid: Any, threadgroup: Any,
        template: Any = (), init_value: Any = None,
    ) -> list[mx.array]:  # fmt: skip
        arrays = tuple(v if isinstance(v, mx.array) else mx.array(v) for v in inputs)
        launch = core.prepare(
            kernel, arrays, tuple(template), triple(grid), triple(threadgroup),
            tuple(tuple(s) for s in output_shapes), tuple(output_dtypes), init_value, (),
        )  # fmt: skip
        result = core.launch(launch, arrays)
        return list(result) if isinstance(result, tuple) else [result]

    return call


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """Imports a module of mlx-lm that believes in a Metal device."""
    patch = pytest.MonkeyPatch()
    before = set(sys.modules)
    patch.setattr(mx.fast, "metal_kernel", stand_in)
    patch.setattr(mx.metal, "is_available", lambda: True)
    utilities = importlib.import_module("mlx_lm.utils")
    patch.setattr(utilities, "can_run_metal", lambda: True)
    yield lambda name: importlib.import_module(f"mlx_lm.{name}")
    patch.undo()
    for name in set(sys.modules) - before:
        if name.startswith("mlx_lm"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(5)


def close(got: mx.array, expected: mx.array, bits: int) -> None:
    """Equal up to a unit in the last of `bits` bits of the largest magnitude, times a few."""
    got_, expected_ = (np.array(v.astype(mx.float32)) for v in (got, expected))
    assert got_.shape == expected_.shape
    assert np.abs(got_ - expected_).max() <= 4 * 2.0**-bits * np.abs(expected_).max()


BITS = {mx.float32: 20, mx.float16: 11, mx.bfloat16: 8}


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_qk_norm_and_rope(load: Any, dtype: mx.Dtype) -> None:
    heads, kv, width = 4, 2, 96
    x = mx.random.normal((2, 5, 2 * (heads + kv) * width)).astype(dtype)
    options = {"n_heads": heads, "n_kv_heads": kv, "head_dim": width, "eps": 1e-5}
    q, k = load("kernels.qk_norm").qk_norm(x, **options, query_scale=0.125)
    parts = x[..., : (heads + kv) * width].reshape(2, 5, heads + kv, width)
    normed = mx.fast.rms_norm(parts.astype(mx.float32), None, 1e-5)
    close(q, normed[..., :heads, :] * 0.125, BITS[dtype])
    close(k, normed[..., heads:, :], BITS[dtype])

    rotated = load("kernels.qk_norm_rope").qk_norm_rope(
        x, **options, query_scale=0.125, rope_base=10000.0, offset=7
    )
    scale = mx.array([0.125] * heads + [1.0] * kv)[:, None]
    expected = mx.fast.rope(
        (normed * scale).swapaxes(1, 2), width, traditional=True, base=10000.0, scale=1.0, offset=7
    ).swapaxes(1, 2)
    # Where the source asks for fast::sin of angles up to 12.
    close(rotated[0], expected[..., :heads, :], min(BITS[dtype], 16))
    close(rotated[1], expected[..., heads:, :], min(BITS[dtype], 16))


def test_expert_routing(load: Any) -> None:
    logits, bias = mx.random.normal((6, 64)), mx.random.normal((64,)) * 0.1
    module = load("kernels.expert_routing")
    ids, weights = module.expert_routing(
        logits, bias, top_k=8, multiplier=1.0, score_eps=1e-9, route_scale=2.5
    )
    scores = mx.sigmoid(logits)
    order = mx.argsort(-(scores + bias), axis=-1)[..., :8]
    got, wanted = np.sort(np.array(ids), -1), np.sort(np.array(order), -1)
    np.testing.assert_array_equal(got, wanted)
    chosen = mx.take_along_axis(scores, ids.astype(mx.int32), axis=-1)
    close(weights, chosen / (chosen.sum(-1, keepdims=True) + 1e-9) * 2.5, 18)


def test_rms_norm_with_a_sigmoid_gate(load: Any) -> None:
    x = mx.random.normal((2, 3, 5, 64)).astype(mx.bfloat16)
    gate = mx.random.normal((2, 5, 3 * 64)).astype(mx.bfloat16)
    got = load("kernels.rms_norm_sigmoid_gate").rms_norm_sigmoid_gate(x, gate, eps=1e-6)
    normed = mx.fast.rms_norm(x.astype(mx.float32), None, 1e-6).swapaxes(1, 2).reshape(2, 5, -1)
    close(got, normed * mx.sigmoid(gate.astype(mx.float32)), 8)


def test_post_expert_norm_and_combination(load: Any) -> None:
    experts, weights = mx.random.normal((3, 4, 256)), mx.random.uniform(shape=(3, 4))
    norm = mx.random.normal((256,))
    got = load("kernels.post_expert_norm_combine").post_expert_norm_combine(
        experts, weights, norm_weight=norm, eps=1e-5
    )
    close(got, (mx.fast.rms_norm(experts * norm, None, 1e-5) * weights[..., None]).sum(-2), 18)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vector_gate", [False, True])
def test_gated_delta(load: Any, vector_gate: bool, masked: bool) -> None:
    module = load("models.gated_delta")
    b, t, hk, hv, d = 1, 4, 1, 2, 128
    q, k = (mx.random.normal((b, t, hk, d)) * 0.1 for _ in range(2))
    v, beta = mx.random.normal((b, t, hv, d)), mx.random.uniform(shape=(b, t, hv))
    g = mx.random.uniform(0.8, 1.0, (b, t, hv, d) if vector_gate else (b, t, hv))
    state = mx.random.normal((b, hv, d, d))
    mask = mx.array([[True, True, False, True]]) if masked else None
    y, after = module.gated_delta_kernel(q, k, v, g, beta, state, mask)
    expected_y, expected_after = module.gated_delta_ops(q, k, v, g, beta, state, mask)
    close(after, expected_after, 20)
    rows = mx.array([0, 1, 3]) if masked else mx.arange(t)
    close(y[:, rows], expected_y[:, rows], 20)


def test_packed_gated_delta_has_the_bits_of_its_explicit_tree(load: Any) -> None:
    """mlx-lm promises it; contraction or reassociation by the compiler would break it."""
    module = load("models.gated_delta")
    q, k = (mx.random.normal((1, 3, 2, 128)) * 0.1 for _ in range(2))
    v, beta = mx.random.normal((1, 3, 2, 16)), mx.random.uniform(shape=(1, 3, 2))
    g, state = mx.random.uniform(0.8, 1.0, (1, 3, 2)), mx.random.normal((1, 2, 16, 128))
    packed = module.gated_delta_kernel(q, k, v, g, beta, state)
    tree = module.gated_delta_kernel_xtree(q, k, v, g, beta, state)
    assert mx.array_equal(packed[1], tree[1])
    assert mx.array_equal(packed[0], tree[0])


def test_state_space_step(load: Any) -> None:
    module = load("models.ssm")
    x = mx.random.normal((2, 1, 4, 16))
    a, d, bias = (mx.random.normal((4,)) for _ in range(3))
    b, c = (mx.random.normal((2, 1, 2, 32)) for _ in range(2))
    dt, state = mx.random.normal((2, 1, 4)), mx.random.normal((2, 4, 16, 32))
    y, after = module.ssm_update_kernel(x, a, b, c, d, dt, bias, state, (0.0, 100.0))
    step = module.compute_dt(dt, bias, (0.0, 100.0))
    decay = mx.exp(-mx.exp(a) * step)[:, 0, :, None, None]
    b_, c_ = (mx.repeat(v[:, 0], 2, axis=1)[:, :, None, :] for v in (b, c))
    expected = state * decay + (x[:, 0] * step[:, 0, :, None])[..., None] * b_
    close(after, expected, 18)
    close(y[:, 0], (expected * c_).sum(-1) + x[:, 0] * d[:, None], 18)


def test_wkv7(load: Any) -> None:
    module = load("models.rwkv7")
    r, w, k, v, a, b = (mx.random.normal((1, 3, 2, 64)) * 0.3 for _ in range(6))
    state = mx.random.normal((1, 2, 64, 64))
    y, after = module.wkv7_kernel(r, w, k, v, a, b, state)
    expected = []
    for t in range(3):
        row, state = module._wkv7_step_ops(*(u[:, t] for u in (r, w, k, v, a, b)), state)
        expected.append(row[..., 0])
    close(after, state, 18)
    close(y, mx.stack(expected, 1).reshape(y.shape), 18)


def test_sinkhorn(load: Any) -> None:
    module = load("models.deepseek_v41")
    x, eps = mx.random.uniform(shape=(70, 4, 4)), mx.array([1e-6])
    expected = module._sinkhorn(x, iters=5, eps=eps)
    (got,) = module._sinkhorn_kernel(
        inputs=[x, eps],
        template=[("HC", 4), ("ITERS", 5)],
        grid=(70, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.float32],
    )
    close(got, expected, 20)


def test_mixing_of_residual_blocks(load: Any) -> None:
    module = load("models.kimi_k3")
    blocks = module.ResidualBlocks(1e-5)
    for _ in range(3):
        blocks.append(mx.random.normal((2, 256)))
    x, w = mx.random.normal((2, 256)), mx.random.normal((256,)) * 0.1
    (got,) = module._attn_res_kernel(
        inputs=[blocks.raw, blocks.inv_rms, x, w, mx.array([1e-5]), 2],
        template=[("InT", mx.float32), ("K", 3), ("D", 256), ("THREADS", 512)],
        grid=(512, 2, 1),
        threadgroup=(512, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.float32],
    )
    close(got, module._attn_res_combine(blocks.raw, blocks.inv_rms, x, w, 1e-5), 18)


def test_bitlinear(load: Any) -> None:
    module = load("models.bitlinear_layers")
    layer = module.BitLinear(64, 32, bias=False)
    codes = np.random.default_rng(1).integers(0, 3, (4, 8, 64))
    layer.weight = mx.array((codes << np.array([0, 2, 4, 6])[:, None, None]).sum(0), mx.uint8)
    layer.weight_scale = mx.array([0.5])
    x = mx.random.normal((3, 64))
    close(layer(x), x @ mx.array((codes.reshape(32, 64) - 1).astype(np.float32)).T * 0.5, 19)


@pytest.mark.parametrize("loss", ["kl_div_loss", "js_div_loss"])
def test_divergence_losses_and_their_race(load: Any, loss: str) -> None:
    """Right when simdgroups run side by side; all four kernels lack a barrier before lane 0
    overwrites what the others still read, which shows when they run one after the other."""
    module = load("tuner.losses")
    q, p = mx.random.normal((2, 5000)) * 3, mx.random.normal((2, 5000)) * 3
    log_q, log_p = nn.log_softmax(q), nn.log_softmax(p)
    if loss == "kl_div_loss":
        expected = (mx.exp(log_p) * (log_p - log_q)).sum(-1)
    else:
        log_m = mx.logaddexp(log_p, log_q) - np.log(2)
        expected = 0.5 * sum((mx.exp(v) * (v - log_m)).sum(-1) for v in (log_p, log_q))
    close(getattr(module, loss)(q, p), expected, 15)
    with schedule(DEPTH_FIRST):
        alone = getattr(module, loss)(q, p)
        mx.eval(alone)
    assert np.abs(np.array(alone) - np.array(expected)).max() > 0.01
