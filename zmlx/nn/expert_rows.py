"""Runs the experts that a router chose, few of them in place and many over tokens sorted by expert.

A projection is a module with stacked weights that is called as mlx-lm's `SwitchLinear`: rows
(R, 1, D), the expert of each, and whether these ascend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx

from .. import kernels, launch
from ..choice import use_kernel
from ..kernels.moe_experts import matrices
from ..targets import cpu
from ..transforms import refuses_any_shape

#: Choices from which on tokens are sorted, as in mlx-lm: below it few of them share an expert.
SORTED = 64


@dataclass(frozen=True)
class Experts:
    """The gated networks of a mixture.

    Attributes:
        gate, up, down: the projections.
        unit: the gated unit, of up and gate as mlx-lm's activations take them.
        count: how many experts there are.
        fused: whether the networks are those of `expert_ffn`: float weights without a bias, and
            SwiGLU between them.
    """

    gate: Any
    up: Any
    down: Any
    unit: Callable[[mx.array, mx.array], mx.array]
    count: int
    fused: bool

    def op(self) -> str:
        """The catalogue's op that decides what runs."""
        return "expert_ffn" if self.fused else "moe_dispatch"


def each(experts: Experts, x: mx.array, indices: mx.array) -> mx.array:
    """(*, D) tokens and (*, k) experts of each → (*, k, D), what they return, or of another width
    that their last projection has."""
    x, indices = _promoted(experts, x), mx.stop_gradient(indices)
    if indices.size == 0:
        return _nothing(experts, x, indices)
    if not _sorts(experts, x, indices):
        return _plain(experts, x, indices)
    y, routing = _by_expert(experts, x, indices)
    # The way back is a permutation too, and its gradient a gather.
    y = kernels.moe_dispatch(y, routing.order[:, None], routing.positions.reshape(-1))
    return y.reshape(*indices.shape, y.shape[-1])


def combined(experts: Experts, x: mx.array, weights: mx.array, indices: mx.array) -> mx.array:
    """(*, D) tokens, (*, k) weights and experts → (*, D), the weighted sum of what they return."""
    x, indices = _promoted(experts, x), mx.stop_gradient(indices)
    if indices.size == 0:
        return _nothing(experts, x, indices).sum(axis=-2)
    if _sorts(experts, x, indices):
        y, routing = _by_expert(experts, x, indices)
        return kernels.moe_combine(y, weights, routing.positions, routing.order)
    y = _plain(experts, x, indices)
    return (y * weights[..., None]).sum(axis=-2).astype(y.dtype)


def _promoted(experts: Experts, x: mx.array) -> mx.array:
    """Tokens in the dtype of MLX's products with the weights, as `expert_ffn` returns that of its
    rows."""
    if not experts.fused:
        return x
    weights = (p["weight"] for p in (experts.gate, experts.up, experts.down))
    dtype = reduce(mx.result_type, weights, x.dtype)
    return x if dtype == x.dtype else x.astype(dtype)


def _nothing(experts: Experts, x: mx.array, indices: mx.array) -> mx.array:
    """What experts return for no choice, like what they return for one, which is not computed: the
    gradients of MLX's `gather_mm` need one."""
    if cpu.any_shape((x, indices)):
        refuses_any_shape(experts.op())()
    row, owner = mx.zeros((1, x.shape[-1]), x.dtype), mx.zeros((1,), mx.uint32)
    y = _ascending(experts, row, owner)
    return mx.zeros((*indices.shape, y.shape[-1]), y.dtype)


def _sorts(experts: Experts, x: mx.array, indices: mx.array) -> bool:
    """Whether tokens are sorted and moved by zmlx's kernels."""
    # MLX multiplies gathered matrices on the CPU in float32 alone.
    half = experts.fused and x.dtype != mx.float32 and launch.settings().target == "cpu"
    return (indices.size >= SORTED or half) and use_kernel(experts.op(), x)


def _by_expert(experts: Experts, x: mx.array, indices: mx.array) -> tuple[mx.array, Any]:
    """What the experts return, (N·k, D) in rows sorted by expert, and where each row belongs."""
    routing = kernels.moe_sort(indices, num_experts=experts.count)
    rows = kernels.moe_dispatch(x, routing.positions, routing.order)
    if experts.fused:
        gate, up, down = (p["weight"] for p in (experts.gate, experts.up, experts.down))
        return kernels.expert_ffn(rows, gate, up, down, routing.offsets), routing
    owners = indices.reshape(-1)[routing.order]
    return _ascending(experts, rows, owners), routing


def _plain(experts: Experts, x: mx.array, indices: mx.array) -> mx.array:
    """By MLX's operations: few choices in their own order, many sorted."""
    if indices.size < SORTED:
        return _network(experts, mx.expand_dims(x, (-2, -3)), indices, False).squeeze(-2)
    flat = indices.reshape(-1)
    order = mx.argsort(flat)
    rows = x.reshape(-1, x.shape[-1])[order // indices.shape[-1]]
    y = _ascending(experts, rows, flat[order])
    return y[mx.argsort(order)].reshape(*indices.shape, y.shape[-1])


def _ascending(experts: Experts, rows: mx.array, owners: mx.array) -> mx.array:
    """(R, D) rows sorted by their experts → (R, D)."""
    y = _network(experts, matrices(rows), owners, True)
    return mx.flatten(y, 0, 1)


def _network(experts: Experts, x: mx.array, owners: mx.array, ascend: bool) -> mx.array:
    def project(layer: Any, x: mx.array) -> mx.array:
        y: mx.array = layer(x, owners, sorted_indices=ascend)
        # A bias may give its strides to the sum, and these to the cotangent.
        return matrices(mx.flatten(y, 0, 1)) if ascend else y

    return project(experts.down, experts.unit(project(experts.up, x), project(experts.gate, x)))


def gating(logits: mx.array, bias: mx.array | None = None, **options: Any) -> Any:
    """`kernels.topk_gating`: (weights, indices), by zmlx or in plain MLX."""
    if use_kernel("topk_gating", logits):
        return kernels.topk_gating(logits, bias, **options)
    with launch.target("reference"):
        return kernels.topk_gating(logits, bias, **options)
