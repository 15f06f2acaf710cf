"""The Metal kernels that mlx-lm ships, as it calls them: recorded, not run.

Nobody here wrote them. Most are made only where Metal is, so the modules are imported afresh with
MLX saying that it has Metal, and with `mx.fast.metal_kernel` in exchange for a recorder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class Call:
    """What `mx.fast.metal_kernel` took, and then the kernel."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    inputs: tuple[mx.array, ...]
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


def _array(value: Any) -> mx.array:
    return value if isinstance(value, mx.array) else mx.array(value)


def _recorder(calls: list[Call]) -> Callable[..., Any]:
    def metal_kernel(
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Callable[..., list[mx.array]]:
        def kernel(
            inputs: list[Any],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: list[Any],
            output_dtypes: list[mx.Dtype],
            template: list[Any] = (),
        ) -> list[mx.array]:
            shapes = tuple(tuple(shape) for shape in output_shapes)
            made = (name, tuple(input_names), tuple(output_names), source, header)
            given = (tuple(_array(x) for x in inputs), tuple(template), grid, threadgroup)
            calls.append(Call(*made, ensure_row_contiguous, *given, shapes, tuple(output_dtypes)))
            return [mx.zeros(s, d) for s, d in zip(shapes, output_dtypes, strict=True)]

        return kernel

    return metal_kernel


@contextmanager
def _recording(calls: list[Call]) -> Iterator[None]:
    known = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "mlx_lm"}
    for name in known:
        del sys.modules[name]
    try:
        with (
            mock.patch.object(mx.fast, "metal_kernel", _recorder(calls)),
            mock.patch.object(mx.metal, "is_available", return_value=True),
            mock.patch.object(mx, "default_device", return_value=mx.gpu),
        ):
            yield
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "mlx_lm"]:
            del sys.modules[name]
        sys.modules.update(known)


def _normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (mx.random.normal(shape) * 0.5).astype(dtype)


def _kernels(dtype: mx.Dtype) -> None:
    kernels = importlib.import_module("mlx_lm.kernels")
    kernels.qk_norm(
        _normal(2, 3, 2 * 6 * 64, dtype=dtype), n_heads=4, n_kv_heads=2, head_dim=64, eps=1e-6,
        query_scale=0.125,
    )  # fmt: skip
    kernels.qk_norm_rope(
        _normal(2, 3, 2 * 6 * 64, dtype=dtype), n_heads=4, n_kv_heads=2, head_dim=64, eps=1e-6,
        query_scale=0.125, rope_base=1e4, offset=3,
    )  # fmt: skip
    kernels.expert_routing(
        _normal(2, 3, 40), _normal(40), top_k=4, multiplier=1.5, score_eps=1e-6, route_scale=2.0
    )
    norm = nn.RMSNorm(512)
    for weight, following in ((None, norm), (_normal(512, dtype=dtype), None)):
        kernels.norm_add_norm(
            _normal(2, 512, dtype=dtype), _normal(2, 512), alpha=_normal(512), beta=_normal(512),
            post_weight=weight, post_eps=1e-6, next_norm=following,
        )  # fmt: skip
    kernels.pre_norm(_normal(2, 512), norm, dtype=dtype)
    kernels.post_expert_norm_combine(
        _normal(2, 4, 512, dtype=dtype), _normal(2, 4), norm_weight=_normal(512), eps=1e-6
    )
    kernels.rms_norm_sigmoid_gate(
        _normal(2, 4, 3, 64, dtype=dtype), _normal(2, 3, 256, dtype=dtype), eps=1e-6
    )


def _gated_delta(dtype: mx.Dtype) -> None:
    gated_delta = importlib.import_module("mlx_lm.models.gated_delta")
    q, k = _normal(2, 5, 2, 128, dtype=dtype), _normal(2, 5, 2, 128, dtype=dtype)
    v, beta, state = _normal(2, 5, 4, 64, dtype=dtype), _normal(2, 5, 4), _normal(2, 4, 64, 128)
    mask = mx.array([[True] * 5, [False] + [True] * 4])
    for g in (_normal(2, 5, 4), _normal(2, 5, 4, 128)):
        for masked in (None, mask):
            gated_delta.gated_delta_kernel_unpacked(q, k, v, g, beta, state, masked)
    gated_delta.gated_delta_kernel(q, k, v, _normal(2, 5, 4), beta, state)
    gated_delta.gated_delta_kernel_xtree(q, k, v, _normal(2, 5, 4), beta, state)


def _models(dtype: mx.Dtype) -> None:
    importlib.import_module("mlx_lm.models.ssm").ssm_update_kernel(
        _normal(2, 1, 4, 64, dtype=dtype), _normal(4), _normal(2, 1, 2, 64, dtype=dtype),
        _normal(2, 1, 2, 64, dtype=dtype), _normal(4), _normal(2, 1, 4, dtype=dtype), _normal(4),
        _normal(2, 4, 64, 64), (0.001, 100.0),
    )  # fmt: skip
    rows = [_normal(2, 5, 4, 64, dtype=dtype) for _ in range(6)]
    state = _normal(2, 4, 64, 64, dtype=dtype)
    importlib.import_module("mlx_lm.models.rwkv7").wkv7_kernel(*rows, state)
    layer = importlib.import_module("mlx_lm.models.bitlinear_layers").BitLinear(256, 128)
    layer.weight_scale = layer.weight_scale.astype(dtype)
    layer.execute_matmul_kernel(_normal(3, 256, dtype=dtype), layer.weight)
    sinkhorn = importlib.import_module("mlx_lm.models.deepseek_v41")._sinkhorn
    sinkhorn(mx.abs(_normal(2, 5, 4, 4)), iters=3, eps=mx.array([1e-6]))
    kimi = importlib.import_module("mlx_lm.models.kimi_k3")
    blocks = mock.Mock(raw=_normal(3, 2, 5, 256, dtype=dtype), inv_rms=_normal(3, 2, 5))
    kimi._attn_res_mix(blocks, _normal(2, 5, 256, dtype=dtype), _normal(256), 1e-6)


def _losses(dtype: mx.Dtype) -> None:
    losses = importlib.import_module("mlx_lm.tuner.losses")
    logits = _normal(3, 5000, dtype=dtype)
    for loss in (losses.kl_div_loss, losses.js_div_loss):
        mx.grad(lambda q, loss=loss: loss(q, logits).sum())(logits)


def calls(dtype: mx.Dtype = mx.float32) -> list[Call]:
    """Every kernel of mlx-lm, called with activations of that dtype."""
    recorded: list[Call] = []
    mx.random.seed(0)
    with _recording(recorded):
        for part in (_kernels, _gated_delta, _models, _losses):
            part(dtype)
    return recorded
