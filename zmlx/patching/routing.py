"""Routers in the spellings of models, and the same by zmlx: scores, choice and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..nn.expert_rows import gating
from ..targets import cpu

Array = mx.array


@dataclass(frozen=True)
class Routing:
    """How a router chooses and weighs.

    Attributes:
        scores: "softmax" or "sigmoid".
        wide: whether the logits are taken to float32 first, so that the weights are float32.
        normalize, scale: as in `topk_gating`.
        n_groups, topk_groups: groups of experts.
    """

    scores: str
    wide: bool
    normalize: bool = False
    scale: float = 1.0
    n_groups: int = 1
    topk_groups: int = 1

    def gate(self, logits: Array, bias: Array | None, top_k: int) -> tuple[Array, Array]:
        """(weights, indices)."""
        logits = logits.astype(mx.float32) if self.wide else logits
        weights, indices = gating(
            logits, bias, top_k=top_k, scores=self.scores, normalize=self.normalize,
            scale=self.scale, n_groups=self.n_groups, topk_groups=self.topk_groups,
        )  # fmt: skip
        return weights, indices

    def takes(self, bias: Array | None) -> bool:
        """Whether zmlx chooses as the model does. Models give the experts of closed groups the
        score 0, which is chosen before a negative one of an open group; zmlx never chooses them.
        Scores are positive, so that it takes a negative bias to tell the two apart."""
        if self.n_groups == self.topk_groups or bias is None:
            return True
        return not cpu.maybe_tracing((bias,)) and bool((bias >= 0).all().item())


# ---- spellings ----------------------------------------------------------------------------------


def _worst_last(s: Array, k: int) -> Array:
    return mx.argpartition(-s, kth=k - 1, axis=-1)[..., :k]


def _best_last(s: Array, k: int) -> Array:
    return mx.argpartition(s, kth=-k, axis=-1)[..., -k:]


CHOICES = (_worst_last, _best_last)


def _wide(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda g: function(g.astype(mx.float32))


def _softmax(g: Array) -> Array:
    return mx.softmax(g, axis=-1)


def _precise(g: Array) -> Array:
    return mx.softmax(g, axis=-1, precise=True)


#: (scores, whether in float32, in MLX).
SCORES: tuple[tuple[str, bool, Callable[[Array], Array]], ...] = tuple(
    (name, wide, _wide(f) if wide else f)
    for name, f in (("softmax", _softmax), ("softmax", _precise), ("sigmoid", mx.sigmoid))
    for wide in (False, True)
)


def _open_groups(s: Array, groups: int, kept: int) -> Array:
    """The scores, with 0 for those outside the best groups."""
    s = mx.unflatten(s, axis=-1, shape=(groups, -1))
    of_group = mx.topk(s, 2, axis=-1).sum(axis=-1, keepdims=True)
    closed = groups - kept
    worst = mx.argpartition(of_group, kth=closed - 1, axis=-2)[..., :closed, :]
    s = mx.put_along_axis(s, mx.stop_gradient(worst), mx.array(0.0), axis=-2)
    return mx.flatten(s, -2, -1)


#: The indices, and every way to weigh them: (routing, (logits, bias, k) → (indices, weights)).
Template = tuple[Routing, Callable[[Array, Any, int], tuple[Array, Array]]]


def templates(scales: Sequence[float], groups: Sequence[tuple[int, int]]) -> Iterator[Template]:
    """Routers with these factors and (number, kept) groups, beside none."""
    for scale in (1.0, *scales):
        for grouped in ((1, 1), *groups):
            yield from _templates(scale, grouped)


@lru_cache(maxsize=256)
def _templates(scale: float, grouped: tuple[int, int]) -> tuple[Template, ...]:
    def scored(score: Any, choose: Any, normalize: bool, scaled: bool) -> Any:
        def router(g: Array, bias: Any, k: int) -> tuple[Array, Array]:
            own = choice = score(g)
            if bias is not None:
                choice = choice + bias
            if grouped[0] > 1:
                choice = _open_groups(choice, *grouped)
            indices = choose(choice, k)
            weights = mx.take_along_axis(own, indices, axis=-1)
            if normalize:
                weights = weights / weights.sum(axis=-1, keepdims=True)
            return indices, weights * scale if scaled else weights

        return router

    def chosen(score: Any, choose: Any, scaled: bool) -> Any:
        def router(g: Array, bias: Any, k: int) -> tuple[Array, Array]:
            indices = choose(g, k)
            weights = score(mx.take_along_axis(g, indices, axis=-1))
            return indices, weights * scale if scaled else weights

        return router

    found: list[Template] = []
    for scaled in (False, True) if scale == 1.0 else (True,):
        for name, wide, score in SCORES:
            routing = Routing(name, wide, False, scale, *grouped)
            for choose in CHOICES:
                for normalize in (False, True):
                    router = scored(score, choose, normalize, scaled)
                    found.append((replace(routing, normalize=normalize), router))
                if name == "softmax" and grouped[0] == 1:
                    router = chosen(score, choose, scaled)
                    found.append((replace(routing, normalize=True), router))
    return tuple(found)


def _sum(y: Array, weights: Array) -> Array:
    return (y * weights[..., None]).sum(axis=-2)


def _sum_in_dtype(y: Array, weights: Array) -> Array:
    return _sum(y, weights).astype(y.dtype)


#: How models add up what the experts return.
SUMS: tuple[Callable[[Array, Array], Array], ...] = (_sum, _sum_in_dtype)
