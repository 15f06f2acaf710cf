"""What stands for the parts of a mixture in a probe: small experts, and logits without ties.

A model may choose either of two equal scores, and half precision makes scores equal that are not;
so logits are a quarter apart, in another order for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .dtypes import FLOATS
from .plans import ExpertsPlan, RouterPlan
from .shadows import child_of, count_of, entries, entry, named, placed, shadow
from .steps import BlockPlan, CallChild, Combine, Mix


def ranks(lead: tuple[int, ...], experts: int) -> mx.array:
    """(*lead, E): multiples of a quarter, in a random order."""
    order = mx.argsort(mx.random.normal((*lead, experts), key=mx.random.key(3)), axis=-1)
    return -0.25 * order.astype(mx.float32)


class Logits(nn.Module):
    """A router's projection whose logits keep apart, and follow the array."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts = experts

    def __call__(self, x: mx.array) -> mx.array:
        """The logits of each row."""
        mean = x.astype(mx.float32).mean(axis=-1, keepdims=True)
        return (ranks(x.shape[:-1], self._experts) * (1 + 0.1 * mx.tanh(mean))).astype(x.dtype)


class Chosen(nn.Module):
    """A router: experts of its own choice, and weights that follow the array."""

    def __init__(self, experts: int, first: bool) -> None:
        super().__init__()
        self._experts, self._first = experts, first

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Indices and weights, in either order."""
        top_k = min(2, self._experts)
        order = mx.argsort(ranks(x.shape[:-1], self._experts), axis=-1)
        weights = mx.softmax(x[..., :top_k].astype(mx.float32), axis=-1).astype(x.dtype)
        pair = order[..., :top_k], weights
        return pair if self._first else pair[::-1]


class Table(nn.Module):
    """Experts that scale the array by a row of their own."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self._table = mx.random.normal((experts, width), key=mx.random.key(4))

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """A row for each choice."""
        return (self._table[indices] * x[..., None, :]).astype(x.dtype)


def stands(module: nn.Module, plan: BlockPlan) -> dict[str, Any]:
    """For the children and the bias of a block with experts."""
    found: dict[str, Any] = {}
    made: list[Any] = [None]  # the step that made a register
    for step in plan.steps:
        made += [step] * (step.results if isinstance(step, CallChild) else 1)
        if isinstance(step, Mix):
            # Rows are as long as there are experts.
            found[step.path] = Table(plan.width, plan.width)
            found[made[step.logits].path] = Logits(plan.width)
            if step.bias is not None:
                found[step.bias] = _bias(plan.width).astype(entry(module, step.bias).dtype)
        elif isinstance(step, Combine):
            found[step.path] = Table(step.experts, plan.width)
            first = step.indices < step.weights
            found[made[step.indices].path] = Chosen(step.experts, first)
    return found


def _bias(experts: int) -> mx.array:
    """Not negative, so that groups are open and closed alike."""
    return 0.1 * mx.random.uniform(shape=(experts,), key=mx.random.key(5))


def few(layer: nn.Module, size: int) -> nn.Module:
    """The projections of stacked experts with rows of `size` of their own weights."""
    parts = {}
    for name, value in entries(layer):
        if not isinstance(value, mx.array):
            parts[name] = few(value, size) if isinstance(value, nn.Module) else value
        elif name == "weight" and "scales" in layer:
            parts[name] = value[:, :size, : size * layer.bits // 32]
        elif name in ("scales", "biases"):
            parts[name] = value[:, :size, : size // count_of(layer, "group_size", 16)]
        elif name == "global_scale":
            parts[name] = value
        else:
            parts[name] = value[:, :size, :size] if value.ndim == 3 else value[:, :size]
    return shadow(layer, parts)  # type: ignore[no-any-return]


def in_float32(module: nn.Module) -> nn.Module:
    """The module with all that it holds in float32."""

    def wide(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return in_float32(value)
        return value.astype(mx.float32) if getattr(value, "dtype", None) in FLOATS else value

    return shadow(module, {k: wide(v) for k, v in entries(module)})  # type: ignore[no-any-return]


Twin = tuple[nn.Module, mx.array, Callable[[Any], mx.array], tuple[Any, ...]]


def twins(module: nn.Module, plan: Any, dtype: mx.Dtype) -> Iterator[Twin]:
    """(small module, array, what to compare of its result, further arguments) for experts and
    routers."""
    if isinstance(plan, ExpertsPlan):
        own = {path: child_of(module, path) for path in (plan.gate, plan.up, plan.down)}
        layers = (layer for p in own.values() for _, layer in named(p) if "scales" in layer)
        width = max((count_of(layer, "group_size", 16) for layer in layers), default=16)
        twin = shadow(module, {path: few(p, width) for path, p in own.items()})
        for tokens in (4, 40):  # in place, and sorted
            x = mx.random.normal((tokens, width), key=mx.random.key(7)).astype(dtype)
            indices = mx.random.randint(0, plan.count, (tokens, 2), key=mx.random.key(8))
            shape = (tokens,) if (dtype, 2) in plan.verified else (1, tokens)
            x, indices = x.reshape(*shape, -1), indices.reshape(*shape, -1).astype(mx.uint32)
            yield twin, x, lambda y: y, (indices,)
    elif isinstance(plan, RouterPlan):
        experts = width = plan.width
        entries: dict[str, Any] = {}
        if plan.logits == "child":
            entries[plan.weight] = Logits(experts)
        else:
            width = max(experts, entry(module, plan.weight).shape[1])
            entries[plan.weight] = mx.eye(experts, width).astype(dtype)
        if plan.bias is not None:
            entries[plan.bias] = _bias(experts).astype(entry(module, plan.bias).dtype)
        lead = (6,) if (dtype, 2) in plan.verified else (2, 3)
        rest = mx.zeros((*lead, width - experts))
        x = mx.concatenate([ranks(lead, experts), rest], axis=-1).astype(dtype)

        def dense(result: Any) -> mx.array:
            indices, weights = result if plan.indices_first else result[::-1]
            own = indices[..., None] == mx.arange(experts)
            return mx.where(own, weights[..., None], 0).sum(axis=-2).astype(weights.dtype)

        yield placed(module, entries), x, dense, ()
