"""Routers in the spellings of models, and the same by zmlx: scores, choice and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from ..nn.expert_rows import gating
from ..targets import cpu

Array = mx.array


@dataclass(frozen=True)
class Routing:
    """How a router chooses and weighs.

    Attributes:
        scores: "softmax" or "sigmoid".
        wide: whether the logits are taken to float32 first, so that the weights are float32.
        narrow: whether the weights are taken to the dtype of the router's array in the end.
        normalize, scale, n_groups, topk_groups, group_score: as in `topk_gating`.
        closed: the score of experts outside the best groups, 0 or -inf.
        divisor: what the weights are divided by where they are normalised, of `DIVISORS`.
        eps: its small number, 0 where it has none.
    """

    scores: str
    wide: bool
    narrow: bool = False
    normalize: bool = False
    scale: float = 1.0
    n_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2"
    closed: float = 0.0
    divisor: str = "sum"
    eps: float = 0.0

    def gate(
        self, logits: Array, bias: Array | None, top_k: int, dtype: mx.Dtype
    ) -> tuple[Array, Array]:
        """(weights, indices); `dtype`: that of the router's array."""
        logits = logits.astype(mx.float32) if self.wide else logits
        whole = self.divisor == "sum"  # the kernel does it all
        weights, indices = gating(
            logits, bias, top_k=top_k, scores=self.scores, normalize=self.normalize and whole,
            scale=self.scale if whole else 1.0, n_groups=self.n_groups,
            topk_groups=self.topk_groups, group_score=self.group_score,
        )  # fmt: skip
        if not whole:
            weights = weights / DIVISORS[self.divisor](weights, self.eps) * self.scale
        return weights.astype(dtype) if self.narrow else weights, indices

    def takes(self, bias: Array | None) -> bool:
        """Whether zmlx chooses as the model does. Models give the experts of closed groups the
        score 0, which is chosen before a negative one of an open group; zmlx never chooses them.
        Scores are positive, so that it takes a negative bias to tell the two apart."""
        if self.n_groups == self.topk_groups or bias is None or self.closed < 0:
            return True
        if not cpu.have_values((bias,)):
            return False
        # In NumPy, since a token would wait for an evaluation of MLX longer than for all the rest.
        values = np.asarray(bias if bias.dtype == mx.float32 else bias.astype(mx.float32))
        return bool((values >= 0).all())

    def chooses_like(self, other: Routing) -> bool:
        """Whether both choose the same experts."""
        a, b = (
            (r.scores, r.n_groups, r.topk_groups, r.group_score, r.closed) for r in (self, other)
        )
        return a == b

    def in_float32(self) -> Routing:
        """What is left of it where everything is float32: casts leave no trace there."""
        return replace(self, wide=False, narrow=False)


# ---- spellings ----------------------------------------------------------------------------------


def _worst_last(s: Array, k: int) -> Array:
    return mx.argpartition(-s, kth=k - 1, axis=-1)[..., :k]


def _best_last(s: Array, k: int) -> Array:
    return mx.argpartition(s, kth=-k, axis=-1)[..., -k:]


PICKS = (_worst_last, _best_last)


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

#: What the chosen scores are divided by.
DIVISORS: dict[str, Callable[[Array, float], Array]] = {
    "sum": lambda w, eps: w.sum(axis=-1, keepdims=True),
    "sum + eps": lambda w, eps: w.sum(axis=-1, keepdims=True) + eps,
    "max(sum, eps)": lambda w, eps: mx.maximum(w.sum(axis=-1, keepdims=True), eps),
}


def _split(s: Array, groups: int) -> Array:
    return mx.unflatten(s, axis=-1, shape=(groups, -1))


def _reshaped(s: Array, groups: int) -> Array:
    return s.reshape(*s.shape[:-1], groups, -1)


#: Scores of groups: (as in `topk_gating`, in MLX).
GROUP_SCORES: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("top2", lambda s: mx.topk(s, 2, axis=-1).sum(axis=-1, keepdims=True)),
    ("max", lambda s: s.max(axis=-1, keepdims=True)),
)


@dataclass(frozen=True)
class Choice:
    """A spelling of the choice: what a routing knows after it, and how it comes to be.

    Attributes:
        score: the scores of logits.
        pick: the indices of the largest.
        by_logits: whether the largest logits are picked, and only their scores computed.
        cast: what is taken to another dtype for their sum: the bias to that of the scores, or the
            scores to float32.
        split: how experts become groups; None without groups.
        masked: whether the weights are taken from the scores after groups were closed.
    """

    routing: Routing
    score: Callable[[Array], Array]
    pick: Callable[[Array, int], Array]
    by_logits: bool = False
    cast: Literal["", "bias", "scores"] = ""
    split: Callable[[Array, int], Array] | None = None
    masked: bool = False

    def indices(self, g: Array, bias: Array | None, k: int) -> Array:
        """The experts that are chosen."""
        return self.pick(g if self.by_logits else self._scores(g, bias)[1], k)

    def weights(self, g: Array, bias: Array | None, k: int) -> Array:
        """Their scores."""
        indices = self.indices(g, bias, k)
        if self.by_logits:
            return self.score(mx.take_along_axis(g, indices, axis=-1))
        return mx.take_along_axis(self._scores(g, bias)[self.masked], indices, axis=-1)

    def _scores(self, g: Array, bias: Array | None) -> tuple[Array, Array]:
        """The scores, and those by which is chosen."""
        own = choice = self.score(g)
        if bias is not None:
            wide = choice.astype(mx.float32) if self.cast == "scores" else choice
            choice = wide + (bias.astype(own.dtype) if self.cast == "bias" else bias)
        return own, choice if self.split is None else self._open(choice)

    def _open(self, s: Array) -> Array:
        """The scores, with `closed` for those outside the best groups."""
        routing, split = self.routing, self.split
        assert split is not None
        grouped = split(s, routing.n_groups)
        of_group = dict(GROUP_SCORES)[routing.group_score](grouped)
        closed = routing.n_groups - routing.topk_groups
        worst = mx.argpartition(of_group, kth=closed - 1, axis=-2)[..., :closed, :]
        value = mx.array(routing.closed, s.dtype)
        grouped = mx.put_along_axis(grouped, mx.stop_gradient(worst), value, axis=-2)
        return (
            grouped.reshape(*s.shape[:-1], -1)
            if split is _reshaped
            else mx.flatten(grouped, -2, -1)
        )


_CASTS: tuple[Literal["", "bias", "scores"], ...] = ("", "bias", "scores")


@lru_cache(maxsize=256)
def choices(groups: tuple[tuple[int, int], ...], biased: bool) -> tuple[Choice, ...]:
    """The spellings of a choice, with these (number, kept) groups beside none."""
    found = []
    for name, wide, score in SCORES:
        routing = Routing(name, wide)
        for pick in PICKS:
            if name == "softmax" and not biased:
                found.append(Choice(replace(routing, normalize=True), score, pick, by_logits=True))
            for cast in _CASTS if biased else _CASTS[:1]:
                plain = Choice(routing, score, pick, cast=cast)
                found.append(plain)
                found += [
                    replace(plain, split=split, masked=masked, routing=replace(
                        routing, n_groups=n, topk_groups=kept, group_score=by, closed=closed))
                    for n, kept in groups
                    for by, _ in GROUP_SCORES
                    for split in (_split, _reshaped)
                    for closed in (0.0, -mx.inf)
                    for masked in ((False,) if biased else (False, True))
                ]  # fmt: skip
    return tuple(found)


#: Weights of the chosen scores: (routing, (scores, dtype of the router's array) → weights).
Weighing = tuple[Routing, Callable[[Array, mx.Dtype], Array]]


def weighings(choice: Choice, scales: Sequence[float], tiny: Sequence[float]) -> Iterator[Weighing]:
    """The ways to weigh what was chosen, with these factors and small numbers beside none."""
    divided = [("sum", 0.0), *((d, eps) for d in DIVISORS if d != "sum" for eps in tiny)]
    normals: list[tuple[Routing, Any]] = [(choice.routing, None)]
    if not choice.by_logits:  # else they sum to 1
        normals += [
            (replace(choice.routing, normalize=True, divisor=divisor, eps=eps), DIVISORS[divisor])
            for divisor, eps in divided
        ]  # fmt: skip
    for routing, divisor in normals:
        for scale in (None, 1.0, *scales):
            for narrow in (False, True):

                def weigh(
                    w: Array,
                    dtype: mx.Dtype,
                    divisor: Any = divisor,
                    eps: float = routing.eps,
                    scale: float | None = scale,
                    narrow: bool = narrow,
                ) -> Array:
                    w = w if divisor is None else w / divisor(w, eps)
                    w = w if scale is None else w * scale
                    return w.astype(dtype) if narrow else w

                yield replace(routing, scale=scale or 1.0, narrow=narrow), weigh


def _sum(y: Array, weights: Array) -> Array:
    return (y * weights[..., None]).sum(axis=-2)


def _sum_in_dtype(y: Array, weights: Array) -> Array:
    return _sum(y, weights).astype(y.dtype)


#: How models add up what the experts return.
SUMS: tuple[Callable[[Array, Array], Array], ...] = (_sum, _sum_in_dtype)
