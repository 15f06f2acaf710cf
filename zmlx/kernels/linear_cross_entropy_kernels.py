"""Kernels of linear_cross_entropy: what happens to a chunk of the classes.

A chunk holds the logits of all rows for the classes `start` … `start` + D - 1. The forward carries
four float32 per row from chunk to chunk, from which the last step makes the loss:

    peak   the largest z                 total  Σ exp(z - peak)
    score  z of the target               rest   Σ w_j z_j, for label smoothing

The backward is that of cross entropy, with the log-sum-exp over all chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .. import msl
from ..codegen import Check, Elementwise, Let, Operand, Output, Pass, Reduce, Rowwise
from ..pattern import PatternKernel
from .cross_entropy_kernels import (
    IGNORED,
    TARGETS,
    Terms,
    cap_slope,
    counted,
    gradient_of_logit,
    slope_of_row,
)
from .softmax import lse_low


@dataclass(frozen=True)
class ChunkTerms:
    """Which options are on; `biased`: there is a bias."""

    terms: Terms
    biased: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What a chunk's kernels take, after its logits: what is known of rows, then of columns."""
        found = [
            Operand("target", "per_row", "int64_t", array="targets"),
            Operand("ignore", "scalar", "int64_t", array="ignore_index"),
            Operand("start", "scalar", "int64_t"),
            Operand("classes", "scalar", "int64_t"),
        ]
        if self.biased:
            found.append(Operand("shift", "column", array="bias"))
        if self.terms.weighted and self.terms.smoothed:
            found.append(Operand("class_weight", "column", array="class_weights"))
        if self.terms.capped:
            found.append(Operand("softcap", "scalar"))
        return tuple(found)

    @property
    def numbers(self) -> tuple[Operand, ...]:
        """What the loss of a row and its gradient take further."""
        terms = self.terms
        found = [Operand("row_weight", "per_row")] * terms.weighted
        found += [Operand("weight_sum", "scalar")] * (terms.weighted and terms.smoothed)
        found += [Operand("smoothing", "scalar")] * terms.smoothed
        found += [Operand("z_scale", "scalar")] * terms.z_loss
        return tuple(found)

    @property
    def lets(self) -> tuple[Let, ...]:
        """z, from the chunk's logits x."""
        raw = "x + shift" if self.biased else "x"
        key = Let("key", "j", "int")
        if not self.terms.capped:
            return key, Let("z", raw)
        return key, Let("z", f"softcap * tanh(({raw}) / softcap)"), *cap_slope(raw)

    @property
    def carried(self) -> tuple[str, ...]:
        """What goes from chunk to chunk."""
        return ("peak", "total", "score", "rest")[: 4 if self.terms.smoothed else 3]


_VALID = (
    IGNORED,
    Let("valid", "target >= 0 && target < classes", "bool"),
)
_LOGITS = Operand("x", array="logits")


def _before() -> tuple[Let, ...]:
    """What is known of a row: `index` of its target in the chunk, -1 if it is not there."""
    here = "valid && target >= start && target < start + D"
    return (*_VALID, Let("here", here, "bool"), Let("index", "here ? target - start : -1", "int"))


@cache
def accumulate(chunk: ChunkTerms) -> PatternKernel:
    """Takes a chunk of logits into what is carried."""
    names = chunk.carried
    reductions = [
        Reduce("sum_here", "sum_exp", "z", peak="peak_here"),
        Reduce("score_here", "sum", "key == index ? z : 0.0f"),
    ]
    if chunk.terms.smoothed:
        weight = "class_weight * " if chunk.terms.weighted else ""
        reductions.append(Reduce("rest_here", "sum", f"{weight}z"))
    values = {
        "peak": "highest",
        "total": "before + here_too",
        "score": "score + score_here",
        "rest": "rest + rest_here",
    }
    then = (
        Let("highest", "peak < peak_here ? peak_here : peak"),
        # Equal infinities count as equal.
        Let("before", "peak == highest ? total : total * exp(peak - highest)"),
        Let("here_too", "peak_here == highest ? sum_here : sum_here * exp(peak_here - highest)"),
    )
    return PatternKernel(
        "linear_cross_entropy/accumulate",
        Rowwise(
            (_LOGITS, *chunk.operands, *(Operand(n, "per_row") for n in names)),
            tuple(Output(f"next_{n}", values[n], "per_row") for n in names),
            (Pass(tuple(reductions), then),),
            lets=chunk.lets,
            before=_before(),
            checks=(Check("start == 0 && !valid && !ignored", "targets", "target"),),
        ),
        (mx.float32,) * len(names),
        header=msl.header_for("ZMLX_FAIL"),
        arguments=(TARGETS,),
        paced=True,
    )


@cache
def finish(chunk: ChunkTerms) -> PatternKernel:
    """Loss and log-sum-exp of every row, and by how much that was rounded, from what is carried."""
    terms = chunk.terms
    away = "((peak - score) + log_total)"
    value = f"{terms.hit} * {away}" if terms.hit != "1.0f" else away
    if terms.smoothed:
        total = "weight_sum" if terms.weighted else "classes"
        value += f" + smoothing / classes * ({total} * lse - rest)"
    if terms.z_loss:
        value += " + z_scale * lse * lse"
    per_row = {"row_weight", *chunk.carried}
    operands = [
        Operand("target", "full", "int64_t", array="targets"),
        Operand("ignore", "scalar", "int64_t", array="ignore_index"),
        Operand("classes", "scalar", "int64_t"),
    ]
    operands += [Operand(n, "full") for n in chunk.carried]
    operands += [Operand(x.name, "full" if x.name in per_row else "scalar") for x in chunk.numbers]
    return PatternKernel(
        "linear_cross_entropy/finish",
        Elementwise(
            tuple(operands),
            (
                Output("loss", counted(value), "full"),
                Output("kept_lse", "lse", "full"),
                Output("kept_low", "lse_low", "full"),
            ),
            (
                *(*_VALID, Let("log_total", "log(total)"), Let("lse", "peak + log_total")),
                lse_low("peak", "log_total"),
            ),
        ),
        (mx.float32, mx.float32, mx.float32),
    )


@cache
def gradient(chunk: ChunkTerms) -> PatternKernel:
    """The gradient of a chunk of logits."""
    spread = chunk.terms.spread("classes")
    rows = tuple(Operand(n, "per_row") for n in ("lse", "lse_low", "dloss", "dlse"))
    return PatternKernel(
        "linear_cross_entropy/dlogits",
        Rowwise(
            (_LOGITS, *chunk.operands, *chunk.numbers, *rows),
            (Output("dlogits", gradient_of_logit(chunk.terms, spread=spread, key="key")),),
            lets=chunk.lets,
            before=(*_before(), *slope_of_row(chunk.terms, "classes")),
        ),
        (("logits",),),
        header=msl.header_for("ZMLX_FAIL ZMLX_EXP_BOUNDED"),
        paced=True,
    )
