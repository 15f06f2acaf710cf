"""The router of a mixture of experts: which experts a token goes to, and with which weights.

    score    s = softmax(logits) or sigmoid(logits)
    choice   the top_k experts of the largest s + bias, those outside of the best groups left out
    weight   w = scale · s / Σ s over the chosen experts, or scale · s

The bias only chooses: it balances the load without a loss term (Wang et al. 2024, arXiv:2408.15664)
and has no gradient. Groups: DeepSeek-V3, arXiv:2412.19437. A bias that is part of the router's
linear layer belongs into the logits, and gets its gradient with them.

Bytes: the forward reads the logits and writes an index and a weight per choice; the backward reads
the logits, the indices and the weights' gradients and writes the logits' gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial, update_wrapper
from math import prod
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check, check_choice, check_finite, check_flag, check_integer
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec, scalar
from ..registry import Case, Op, Option, register
from ..transforms import Arrays, Rule
from . import moe_gating_network as network
from . import moe_gating_text as text
from .moe_gating_backward_text import BACKWARD

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")

#: A thread that has a row keeps up to 24 bytes of each expert on its stack, often of 8 MiB.
_MOST_ON_A_STACK = 1 << 16
#: Of more, a CPU's cache would not hold a row's columns.
_MOST_EXPERTS = 4096
#: As many as a vector of keys has places.
_FEWEST_ROWS = 16


def topk_gating_reference(
    logits: mx.array,
    bias: mx.array | None = None,
    *,
    top_k: int = 2,
    scores: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    n_groups: int = 1,
    topk_groups: int | None = None,
    group_score: str = "top2",
    xp: Any = mx,
) -> Any:
    """topk_gating in plain MLX."""
    score = xp.sigmoid(logits)
    if scores == "softmax":
        top = xp.max(logits, axis=-1, keepdims=True)
        e = xp.exp(logits - xp.stop_gradient(top))
        score = e / xp.sum(e, axis=-1, keepdims=True)
    choice = xp.stop_gradient(logits if bias is None and n_groups == 1 else score)
    if bias is not None:
        choice = choice + xp.stop_gradient(bias)
    if n_groups > 1:
        # The width is not left to MLX, which finds none where there are no rows.
        width = choice.shape[-1] // n_groups
        grouped = choice.reshape(*choice.shape[:-1], n_groups, width)
        best = xp.sort(grouped, axis=-1)[..., -(2 if group_score == "top2" else 1) :]
        order = xp.argsort(-xp.sum(best, axis=-1), axis=-1)[..., : topk_groups or n_groups]
        # Whether a group is among the chosen: (…, chosen, groups) → (…, groups, 1).
        kept = xp.any(order[..., None] == xp.arange(n_groups), axis=-2)[..., None]
        choice = xp.where(kept, grouped, -xp.inf).reshape(choice.shape)
    indices = xp.argsort(-choice, axis=-1)[..., :top_k]
    number = xp.cumsum(xp.ones_like(xp.stop_gradient(logits)), axis=-1) - 1
    chosen = indices[..., None] == number[..., None, :]
    zeros = xp.zeros(chosen.shape)
    if normalize:
        picked = xp.sum(xp.where(chosen, logits[..., None, :] + zeros, 0.0), axis=-1)
        log_score = picked if scores == "softmax" else -xp.logaddexp(0.0, -picked)
        e = xp.exp(log_score - xp.stop_gradient(xp.max(log_score, axis=-1, keepdims=True)))
        weights = e / xp.sum(e, axis=-1, keepdims=True)
        if scores == "softmax":
            # A NaN anywhere in the row is not left out.
            weights = weights + xp.stop_gradient(xp.sum(0.0 * score, axis=-1, keepdims=True))
        return scale * weights, indices
    weights = xp.sum(xp.where(chosen, score[..., None, :] + zeros, 0.0), axis=-1)
    return scale * weights, indices


# ---- kernels ------------------------------------------------------------------------------------

_ARGUMENTS = (
    Argument("logits", "(*, E)"),
    Argument("bias", "(E,)", differentiable=False, optional=True),
)


@dataclass(frozen=True)
class _Gating:
    """What is chosen, and how: all that is known when a model is made."""

    top_k: int
    softmax: bool
    normalize: bool
    n_groups: int
    topk_groups: int
    top2: bool
    biased: bool

    def options(self, scale: float = 1.0) -> dict[str, Any]:
        """The options of the reference."""
        return {
            "top_k": self.top_k,
            "scores": SCORES[not self.softmax],
            "normalize": self.normalize,
            "scale": scale,
            "n_groups": self.n_groups,
            "topk_groups": self.topk_groups,
            "group_score": GROUP_SCORES[not self.top2],
        }

    @property
    def by_logit(self) -> bool:
        """Whether scores are in the order of their logits, and nothing else counts."""
        return not self.biased and self.n_groups == 1

    def template(self, experts: int, lanes: int, backward: bool) -> tuple[tuple[str, Any], ...]:
        """The template arguments that both directions share, then the forward's."""
        both = (
            ("E", experts),
            ("K", self.top_k),
            ("LANES", lanes),
            ("PER", -(-experts // lanes)),
            ("PARTS", 16 if experts // lanes >= 16 else 1),
            ("SOFTMAX", self.softmax),
            ("NORMALIZE", self.normalize),
        )
        if backward:
            return both
        return (
            *both,
            ("BY_LOGIT", self.by_logit),
            ("GROUPS", self.n_groups),
            ("TOP_GROUPS", self.topk_groups),
            ("TOP2", self.top2),
        )


def _geometry(
    settings: launch.Settings, rows: int, experts: int, each: int = 1
) -> tuple[int, launch.Geometry]:
    """Lanes per row, and the launch of threads for `each` rows."""
    lanes = 1
    if not launch.is_cpu(settings):
        lanes = min(32, 1 << max(0, -(-experts // 4) - 1).bit_length())
    per_group = 1 if lanes == 1 and launch.is_cpu(settings) else 128 // lanes
    groups = -(-rows // (per_group * each))
    x = min(groups, 1 << 20)
    y = -(-groups // x) if x else 0
    threads = lanes * per_group
    geometry = launch.Geometry((("RPG", per_group),), (x * threads, y, 1), (threads, 1, 1))
    return lanes, geometry


def _columns(
    gating: _Gating, settings: launch.Settings, rows: int, experts: int, half: bool
) -> dict[str, int]:
    """How a thread of a CPU takes several rows through the network, if it does. Few rows are not
    worth the time that the network takes to compile."""
    several = gating.top_k <= network.MOST and experts <= _MOST_EXPERTS and rows >= _FEWEST_ROWS
    if not launch.is_cpu(settings) or not several:
        names = ("SLOTS", "NETWORK", "SHORT", "PLACES")
        return dict.fromkeys(names, 0) | dict.fromkeys(("ROWS", "SPAN", "DEPTH", "TURNS"), 1)
    depth = network.depth_for(gating.top_k)
    span = next(s for s in (16, 4, 1) if s * depth <= experts or s == 1)
    turns = -(-experts // (span * depth))
    slots = turns * span * depth
    places = (1 << (slots - 1).bit_length()) - 1
    c = launch.pick(settings, ROWS=min(_FEWEST_ROWS, _MOST_EXPERTS // experts))
    # A number of 16 bits has no more in its rank.
    short = half and gating.by_logit and places < 1 << 13
    return {**c, "SLOTS": slots, "NETWORK": 1, "SHORT": int(short), "SPAN": span, "DEPTH": depth,
            "TURNS": turns, "PLACES": places}  # fmt: skip


@cache
def _forward(gating: _Gating) -> BodyKernel:
    names = ("logits", "bias", "scale") if gating.biased else ("logits", "scale")

    def plan(settings: launch.Settings, inputs: Arrays) -> Plan:
        *lead, experts = inputs[0].shape
        half = inputs[0].dtype != mx.float32
        columns = _columns(gating, settings, prod(lead), experts, half)
        lanes, geometry = _geometry(settings, prod(lead), experts, columns["ROWS"])
        columns["SLOTS"] = columns["SLOTS"] or -(-experts // lanes)
        template = (
            ("T", inputs[0].dtype),
            *gating.template(experts, lanes, False),
            *columns.items(),
        )
        shape = (*lead, gating.top_k)
        return Plan(
            template=(*template, *geometry.template),
            geometry=geometry,
            shapes=(shape, shape),
            dtypes=(inputs[0].dtype, mx.uint32),
            constants=(constant((prod(lead),), mx.uint32),),
        )

    def reference(*inputs: mx.array) -> Arrays:
        logits, scale = inputs[0], inputs[-1]
        wide = [x.astype(mx.float32) for x in inputs[:-1]]
        weights, indices = topk_gating_reference(*wide, **gating.options(1.0))
        return (weights * scale).astype(logits.dtype), indices.astype(mx.uint32)

    few = gating.top_k <= network.MOST
    body = text.expanded(
        text.FORWARD,
        LOAD=text.LOAD,
        SOFTMAX=text.SOFTMAX,
        BIAS=text.BIAS if gating.biased else "",
        CHOOSE=text.CHOOSE,
        CHOOSE_ALONE=text.CHOOSE.replace("    @AGREE@\n", ""),
        AGREE=text.AGREE,
        NETWORK=f"if (NETWORK) {{\n{network.BODY}}}" if few else "",
    )
    header = text.HEADER + (network.header(network.depth_for(gating.top_k)) if few else "")
    spec = KernelSpec("topk_gating", (*names, "rows"), ("weights", "indices"), body, header)
    return BodyKernel(spec, plan, reference, vjp=_rule(gating), arguments=_ARGUMENTS)


def _rule(gating: _Gating) -> Rule:
    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        found: list[mx.array | None] = [None] * len(primals)
        if 0 in wanted:
            found[0] = _backward(gating)(primals[0], outputs[1], cotangents[0], primals[-1])
        return found

    return vjp


@cache
def _backward(gating: _Gating) -> BodyKernel:
    def plan(settings: launch.Settings, inputs: Arrays) -> Plan:
        *lead, experts = inputs[0].shape
        lanes, geometry = _geometry(settings, prod(lead), experts)
        template = (("T", inputs[0].dtype), *gating.template(experts, lanes, True))
        return Plan(
            template=(*template, *geometry.template),
            geometry=geometry,
            shapes=(tuple(inputs[0].shape),),
            dtypes=(inputs[0].dtype,),
            constants=(constant((prod(lead),), mx.uint32),),
        )

    def reference(
        logits: mx.array, indices: mx.array, dweights: mx.array, scale: mx.array
    ) -> Arrays:
        x, dw = logits.astype(mx.float32), scale * dweights.astype(mx.float32)
        number = mx.cumsum(mx.ones_like(mx.stop_gradient(x)), axis=-1) - 1
        chosen = indices[..., None] == number[..., None, :]
        if not gating.softmax:  # the others do not count, not even NaN
            x = mx.where(mx.any(chosen, axis=-2), x, 0.0)
        score = mx.softmax(x, axis=-1) if gating.softmax else mx.sigmoid(x)
        if gating.normalize:
            log_score = x if gating.softmax else -mx.logaddexp(0.0, -x)
            score = mx.softmax(mx.where(mx.any(chosen, axis=-2), log_score, -mx.inf), axis=-1)
        spread = mx.where(chosen, dw[..., None], 0.0).sum(axis=-2)
        if gating.softmax or gating.normalize:
            spread = spread - (spread * score).sum(axis=-1, keepdims=True)
        slope = score if gating.softmax else score * mx.sigmoid(-x)
        return ((slope * spread).astype(logits.dtype),)

    spec = KernelSpec(
        "topk_gating__dlogits",
        ("logits", "indices", "dweights", "scale", "rows"),
        ("dlogits",),
        text.expanded(BACKWARD, SOFTMAX=text.SOFTMAX, LOAD=text.LOAD),
        text.HEADER,
    )
    return BodyKernel(spec, plan, reference)


# ---- ops ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _gating(
    experts: int,
    top_k: int,
    softmax: bool,
    normalize: bool,
    n_groups: int,
    topk_groups: int | None,
    top2: bool,
    biased: bool,
) -> _Gating:
    """The options of a call, checked."""

    def bad(argument: str, must: str, got: Any) -> ValueError:
        return ValueError(f"[topk_gating] '{argument}' must {must} but got {got}.")

    if experts > _MOST_ON_A_STACK:
        raise bad("logits", f"have at most {_MOST_ON_A_STACK} experts", experts)
    if n_groups < 1 or experts % n_groups:
        raise bad("n_groups", f"divide the {experts} experts", n_groups)
    kept = n_groups if topk_groups is None else topk_groups
    if not 1 <= kept <= n_groups:
        raise bad("topk_groups", f"be in [1, {n_groups}]", kept)
    most = experts // n_groups * kept
    if not 1 <= top_k <= most:
        raise bad("top_k", f"be in [1, {most}], the experts to choose from,", top_k)
    return _Gating(top_k, softmax, normalize, n_groups, kept, top2, biased)


def topk_gating(
    logits: mx.array,
    bias: mx.array | None = None,
    *,
    top_k: int,
    scores: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    n_groups: int = 1,
    topk_groups: int | None = None,
    group_score: str = "top2",
) -> tuple[mx.array, mx.array]:
    """The experts of each token and their weights.

        s = softmax(logits) or sigmoid(logits)
        indices = the top_k largest of s + bias         weights = scale · s[indices] / Σ s[indices]

    Args:
        logits: (*, E) in float32, float16 or bfloat16, of at most 65536 experts; computed in
            float32.
        bias: (E,), added to the scores for the choice only (DeepSeek-V3's correction). It has no
            gradient: a bias of the router's linear layer belongs into the logits.
        top_k: experts per token, at most those to choose from. There is no limit to it.
        scores: "softmax" or "sigmoid".
        normalize: divide the weights by their sum, which is taken relative to the largest score:
            the weights sum to `scale` however small the scores are, with no small number in the
            divisor. Where all chosen logits are -inf they are NaN.
        scale: factor of the weights.
        n_groups, topk_groups, group_score: experts in n_groups equal groups, of which the
            topk_groups best are chosen from (default: all). A group counts by the sum of its two
            largest scores ("top2", DeepSeek-V3) or by its largest ("max", DeepSeek-V2).

    Returns:
        weights (*, top_k) in the dtype of the logits and indices (*, top_k) in uint32, from the
        best to the worst. Of equal choices the lower index is chosen, -0 is equal to 0, NaN is
        chosen last. With softmax a NaN makes all weights of its row NaN. Gradient for the logits.
    """
    op = "topk_gating"
    check_choice(op, "scores", scores, SCORES)
    check_choice(op, "group_score", group_score, GROUP_SCORES)
    if not isinstance(logits, mx.array) or logits.ndim == 0:
        check(op, _ARGUMENTS, [logits, bias])
    groups = None if topk_groups is None else check_integer(op, "topk_groups", topk_groups)
    gating = _gating(
        logits.shape[-1], check_integer(op, "top_k", top_k), scores == "softmax",
        check_flag(op, "normalize", normalize), check_integer(op, "n_groups", n_groups), groups,
        group_score == "top2", bias is not None,
    )  # fmt: skip
    factor = scalar(check_finite(op, "scale", scale))
    inputs = (logits, factor) if bias is None else (logits, bias, factor)
    weights, indices = _forward(gating)(*inputs)
    return weights, mx.stop_gradient(indices)


register(
    Op(
        name="topk_gating",
        family="moe",
        summary="experts of each token and their weights",
        formula="top_k of s + bias; scale · s / Σ s",
        function=update_wrapper(partial(topk_gating, top_k=2), topk_gating),
        reference=topk_gating_reference,
        arguments=_ARGUMENTS,
        options=(
            Option("top_k", 2, (1, 3, 5), passed="text"),
            Option("scores", "softmax", ("sigmoid",), passed="text"),
            Option("normalize", True, (False,), passed="text"),
            Option("scale", 1.0, (2.5,)),
        ),
        outputs=("(*, K)", "(*, K)"),
        reads_backward=("logits",),
        refuses={"shapeless compile": "compile with shapes: top_k is a part of them"},
        paper="Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437",
        cases=(
            Case((3,), {"E": 1}, "one expert", {"top_k": 1}),
            Case((2, 3), {"E": 5}, "fewer experts than lanes"),
            Case((7,), {"E": 31}, "a lane without a last expert", {"top_k": 31}),
            Case((9,), {"E": 64}, "no bias", {"top_k": 8, "normalize": False}, optional=False),
            Case((300,), {"E": 8}, "more rows than a group holds", optional=False),
            Case((5,), {"E": 129}, "a lane with one more expert than the others", {"top_k": 40}),
            Case((40,), {"E": 64}, "groups", {"top_k": 6, "n_groups": 8, "topk_groups": 3,
                                              "scores": "sigmoid", "scale": 2.5}),
            Case((40,), {"E": 60}, "groups by their best", {
                "n_groups": 6, "topk_groups": 1, "group_score": "max", "normalize": False}),
            Case((), {"E": 40}, "no leading axis"),
            Case((0,), {"E": 16}, "no rows"),
        ),
        long_cases=(Case((3,), {"E": 1024}, "many experts, many chosen", {"top_k": 600}),),
        benchmarks=(
            Case((16384,), {"E": 128}, options={"top_k": 8}, optional=False),
            Case((65536,), {"E": 8}, options={"top_k": 2}, optional=False),
            Case((8192,), {"E": 256}, options={"top_k": 8, "n_groups": 8, "topk_groups": 4,
                                               "scores": "sigmoid", "scale": 2.5}),
        ),
    )
)  # fmt: skip
