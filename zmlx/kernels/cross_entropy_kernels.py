"""Kernels of cross entropy, one set per choice of options.

Of a row of logits x, with z = softcap · tanh(x / softcap) or x, p = softmax(z), target t, class
weights w (1 if none are given) and label smoothing s:

    lse  = log Σ exp(z)
    loss = (1 - s) · w_t · (lse - z_t) + s / V · Σ w_j (lse - z_j) + z_loss · lse²
    dz_j = dloss · (A · p_j - (1 - s) · w_t · [j = t] - s / V · w_j) + dlse · p_j
    A    = (1 - s) · w_t + s / V · Σ w + 2 · z_loss · lse
    dx_j = dz_j · (1 - (z_j / softcap)²)

With probabilities q as targets w_t · [j = t] becomes w_j · q_j. Numbers are inputs; which options
are on is text. The log-sum-exp of a row, and by how much it was rounded, is kept for the backward,
which then needs no reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .. import msl
from ..arguments import FLOATING, INDICES, Argument
from ..codegen import Check, Let, Operand, Output, Pass, Reduce, Rowwise
from ..pattern import PatternKernel
from ..transforms import Arrays
from .softmax import OF_LOW, lse_low

LOGITS = Argument("logits", "(*, V)")
TARGETS = Argument("targets", "(*)", INDICES, differentiable=False, values="0 … V-1, or ignored")
PROBABILITIES = Argument("targets", "(*, V)", FLOATING)

#: The log-sum-exp from one walk over a row. The loss takes its parts: largest - z is exact where it
#: matters, lse - z is not.
LSE_PASS = Pass(
    (Reduce("total", "sum_exp", "z", peak="largest"),),
    (
        *(Let("log_total", "log(total)"), Let("lse", "largest + log_total")),
        lse_low("largest", "log_total"),
    ),
)
AWAY = "((largest - {z}) + log_total)"


def cap_slope(x: str) -> tuple[Let, ...]:
    """`bend`, dz/dx of a capped logit: 1 - tanh² without its cancellation where tanh is near 1."""
    decay = Let("decay", f"exp(-2.0f * abs({x}) / softcap)")
    return decay, Let("bend", "4.0f * decay / ((1.0f + decay) * (1.0f + decay))")


@dataclass(frozen=True)
class Terms:
    """Which options are on.

    Attributes:
        soft: targets are probabilities.
        weighted: there are class weights.
        smoothed, z_loss, capped: label smoothing, z-loss and softcap are on.
        twice: maximum and sum of the exponentials take a walk over the row each, which on the CPU
            is faster, since the second asks for the next row.
    """

    soft: bool = False
    weighted: bool = False
    smoothed: bool = False
    z_loss: bool = False
    capped: bool = False
    twice: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that end with the log-sum-exp."""
        if not self.twice:
            return (LSE_PASS,)
        # An infinite maximum is not taken off: the sum is then 0 or infinite.
        shift = Let("shift", "isinf(largest) ? 0.0f : largest")
        return Pass((Reduce("largest", "max", "z", shift=True),), (shift,)), Pass(
            (Reduce("total", "sum", "ZMLX_EXP_BOUNDED(z - shift)"),), LSE_PASS.then
        )

    @property
    def logits(self) -> Operand:
        """The logits as they are read."""
        return Operand("x" if self.capped else "z", array="logits")

    @property
    def lets(self) -> tuple[Let, ...]:
        """The capped logit, and what of the target falls to an element."""
        lets: list[Let] = []
        if self.capped:
            lets += [Let("z", "softcap * tanh(x / softcap)"), *cap_slope("x")]
        if self.soft:
            lets.append(Let("share", self.share("q")))
        return tuple(lets)

    def share(self, q: str) -> str:
        """What of the target falls to an element: its probability, smoothed and weighted."""
        text = f"(1.0f - smoothing) * {q} + smoothing / D" if self.smoothed else q
        return f"class_weight * ({text})" if self.weighted else text

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What follows logits and targets in a call of the forward."""
        found: list[Operand] = []
        if not self.soft:
            found.append(Operand("ignore", "scalar", "int64_t", array="ignore_index"))
            if self.weighted:
                found.append(Operand("row_weight", "per_row"))
        if self.weighted and (self.soft or self.smoothed):
            found.append(Operand("class_weight", "column", array="class_weights"))
            if not self.soft:
                found.append(Operand("weight_sum", "scalar"))
        if self.smoothed:
            found.append(Operand("smoothing", "scalar"))
        if self.z_loss:
            found.append(Operand("z_scale", "scalar"))
        if self.capped:
            found.append(Operand("softcap", "scalar"))
        return tuple(found)

    @property
    def target(self) -> Operand:
        """The targets."""
        if self.soft:
            return Operand("q", array="targets")
        return Operand("target", "per_row", "int64_t", array="targets")

    @property
    def hit(self) -> str:
        """The weight of the target class in a row's loss."""
        factors = ["(1.0f - smoothing)"] * self.smoothed + ["row_weight"] * self.weighted
        return " * ".join(factors) or "1.0f"

    def slope(self, classes: str) -> str:
        """dloss/dlse of a row, A above; `classes` is their number."""
        text = "mass" if self.soft else self.hit
        if not self.soft and self.smoothed:
            total = "weight_sum" if self.weighted else classes
            text = f"{text} + smoothing / {classes} * {total}" if self.weighted else "1.0f"
        return f"{text} + 2.0f * z_scale * lse" if self.z_loss else text

    def spread(self, classes: str) -> str:
        """What label smoothing takes from every class, in parts of dloss."""
        weight = " * class_weight" if self.weighted else ""
        return f"smoothing / {classes}{weight}"


#: An index that is ignored is above -2^62; -2^63 stands for none, and ignores no target.
IGNORED = Let("ignored", "target == ignore && ignore > -4611686018427387904.0f", "bool")
#: What is known of a row with a class as its target.
ROW = (
    IGNORED,
    Let("valid", "target >= 0 && target < D", "bool"),
    Let("index", "valid ? target : 0", "int64_t"),
)
FACTOR = "valid || ignored ? 1.0f : NAN"
CHECK = (Check("!valid && !ignored", "targets", "target"),)


def counted(value: str) -> str:
    """`value` in a row that counts, 0 in one that is ignored, NaN where the target is no class."""
    return f"ignored ? 0.0f : valid ? {value} : NAN"


def _forward_pattern(terms: Terms, keeps: bool) -> Rowwise:
    inputs = (terms.logits, terms.target, *terms.operands)
    kept = (("kept_lse", "lse"), ("kept_low", "lse_low"))
    outputs = [Output(name, value, "per_row") for name, value in kept] if keeps else []
    if terms.soft:
        sums = (
            Reduce("mass", "sum", "share"),
            Reduce("cross", "sum", f"share * {AWAY.format(z='z')}"),
        )
        z_loss = " + z_scale * lse * lse" if terms.z_loss else ""
        loss = Output("loss", "cross" + z_loss, "per_row")
        if keeps:
            outputs.append(Output("kept_mass", "mass", "per_row"))
        return Rowwise(inputs, (loss, *outputs), (*terms.passes, Pass(sums)), lets=terms.lets)
    inputs += (Operand("picked", "at", array="logits", index="index"),)
    score = "softcap * tanh(picked / softcap)" if terms.capped else "picked"
    away = AWAY.format(z=score)
    value = f"{terms.hit} * {away}" if terms.hit != "1.0f" else away
    passes = [*terms.passes]
    if terms.smoothed:
        weight = "class_weight * " if terms.weighted else ""
        passes.append(Pass((Reduce("rest", "sum", weight + AWAY.format(z="z")),)))
        value += " + smoothing / D * rest"
    if terms.z_loss:
        value += " + z_scale * lse * lse"
    # A factor and no other value, so that plain MLX's gradient is NaN as well.
    loss = Output("loss", f"ignored ? 0.0f : ({value}) * ({FACTOR})", "per_row")
    return Rowwise(
        inputs,
        (loss, *outputs),
        tuple(passes),
        lets=terms.lets,
        before=ROW,
        checks=CHECK,
    )


def gradient_of_logit(terms: Terms, *, spread: str, key: str) -> str:
    """The gradient of an element from the lets `slope` and `hit` of its row."""
    text = "slope * ZMLX_EXP_BOUNDED(z - lse)"
    if terms.soft:
        text += " - dloss * share"
    else:
        text += f" - ({key} == index ? hit : 0.0f)"
        if terms.smoothed:
            text += f" - g * ({spread})"
    return f"({text}) * bend" if terms.capped else text


def slope_of_row(terms: Terms, classes: str) -> tuple[Let, ...]:
    """The lets that `gradient_of_logit` needs."""
    if terms.soft:
        return (Let("slope", f"(dlse + dloss * ({terms.slope(classes)})) * {OF_LOW}"),)
    hit = f"g * ({terms.hit})" if terms.hit != "1.0f" else "g"
    slope = terms.slope(classes)
    value = "dloss" if slope == "1.0f" else f"dloss * ({slope})"
    return (
        Let("g", counted("dloss")),
        Let("hit", hit),
        Let("slope", f"(dlse + ({counted(value)})) * {OF_LOW}"),
    )


@cache
def _backward(terms: Terms, wants_targets: bool) -> PatternKernel:
    """dlogits, and the gradient of probabilities if that is wanted."""
    kept: tuple[Operand, ...] = (Operand("lse", "per_row"), Operand("lse_low", "per_row"))
    if terms.soft:
        kept += (Operand("mass", "per_row"),)
    outputs = [Output("dlogits", gradient_of_logit(terms, spread=terms.spread("D"), key="j"))]
    dtypes = [("logits",)]
    slopes = tuple(Operand(n, "per_row") for n in ("dloss", "dlse"))
    if wants_targets:
        # The mass has a cotangent where the gradient of the logits, which takes it, has.
        slopes += (Operand("dmass", "per_row"),)
        factors = ["(dloss * ((lse - z) + lse_low) + dmass)"]
        factors += ["(1.0f - smoothing)"] * terms.smoothed + ["class_weight"] * terms.weighted
        outputs.append(Output("dtargets", " * ".join(factors)))
        dtypes.append(("targets",))
    return PatternKernel(
        "cross_entropy/dlogits_dtargets" if wants_targets else "cross_entropy/dlogits",
        Rowwise(
            inputs=(terms.logits, terms.target, *terms.operands, *kept, *slopes),
            before=(*(() if terms.soft else ROW), *slope_of_row(terms, "D")),
            lets=terms.lets,
            outputs=tuple(outputs),
        ),
        tuple(dtypes),
        header=msl.header_for("ZMLX_FAIL ZMLX_EXP_BOUNDED"),
    )


@cache
def forward(terms: Terms, with_lse: bool = False) -> PatternKernel:
    """The loss of every row in float32, and with `with_lse` also its log-sum-exp."""

    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        wants_targets = terms.soft and 1 in wanted
        slopes = (*cotangents[:2], *cotangents[3:] * wants_targets)
        result = _backward(terms, wants_targets)(*primals, *outputs[1:], *slopes)
        found: list[mx.array | None] = [None] * len(primals)
        if wants_targets:
            found[0], found[1] = result
        else:
            found[0] = result
        return found

    header = msl.header_for("ZMLX_FAIL")
    arguments = (LOGITS, PROBABILITIES if terms.soft else TARGETS)
    stored = 4 if terms.soft else 3
    training = PatternKernel(
        "cross_entropy/training",
        _forward_pattern(terms, keeps=True),
        (mx.float32,) * stored,
        header=header,
        arguments=arguments,
        vjp=vjp,
    )
    if with_lse:
        return training
    return PatternKernel(
        "cross_entropy",
        _forward_pattern(terms, keeps=False),
        (mx.float32,),
        header=header,
        arguments=arguments,
        training=training,
    )
