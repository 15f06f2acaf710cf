"""The kernels of every norm, from what distinguishes one norm from another.

    h = x                       or drop(x) + residual, rounded to its dtype
    normed = (h - mean) · rstd  with the row statistics of the norm
    y = normed · weight + bias  or drop of that

A `Norm` says which of these parts an op has; its statistics and their gradient are one row of
`STATISTICS`. With g = dy · weight the gradient of a row is

    dh = rstd · (g - mean(g) - normed · mean(g · normed))

where mean(g) is there for a norm that subtracts a mean. Under a transform the forward also stores
its row statistics, in float32, and its vjp takes their cotangents too, which second order needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from ..arguments import Argument
from ..broadcasting import sum_chunks
from ..codegen import Columnwise, Let, Operand, Output, Pass, Reduce, Rowwise
from ..launch import LONGEST_KEPT_ROW
from ..pattern import PatternKernel
from ..transforms import Arrays
from .dropout import DROP, DROP_ARGUMENTS, DROP_INPUTS


@dataclass(frozen=True)
class Statistics:
    """How a norm measures a row h.

    Attributes:
        names: what is kept for the backward.
        passes: of the forward.
        normed: the normed element, of h and `names`.
        sums, means: of the backward: reductions of g and normed, and what follows from them and
            from the cotangents of `names`.
        dh: the gradient of h, of `normed`, g and `means`.
        eps_backward: whether the backward reads eps.
    """

    names: tuple[str, ...]
    passes: tuple[Pass, ...]
    normed: str
    sums: tuple[Reduce, ...]
    means: tuple[Let, ...]
    dh: str
    eps_backward: bool = False


_ALONG = Reduce("along", "sum", "g * normed")
_SCALED = Statistics(
    names=("rstd",),
    passes=(
        Pass((Reduce("squares", "sum", "h * h"),), (Let("rstd", "rsqrt(squares / D + eps)"),)),
    ),
    normed="h * rstd",
    sums=(_ALONG,),
    means=(Let("slope", "(along + drstd * rstd) / D"),),
    dh="rstd * (g - normed * slope)",
)

STATISTICS = {
    "rms": _SCALED,
    # Two passes; the second also finds by how much the mean of the first is off (Chan, Golub &
    # LeVeque 1983), so that a mean far larger than the deviation costs no digits. Where its square
    # overflows, the squares do, too, and their difference must be infinite, not NaN; that of equal
    # elements, which rounding makes, must not be below 0.
    "layer": Statistics(
        names=("mean", "rest", "rstd"),
        passes=(
            Pass((Reduce("total", "sum", "h"),), (Let("mean", "total / D"),)),
            Pass(
                (
                    Reduce("off", "sum", "h - mean"),
                    Reduce("squares", "sum", "(h - mean) * (h - mean)"),
                ),
                (
                    Let("rest", "off / D"),
                    Let("variance", "squares / D - min(rest * rest, 3.4028234e38f)"),
                    Let("rstd", "rsqrt((variance < 0.0f ? 0.0f : variance) + eps)"),
                ),
            ),
        ),
        normed="(h - mean - rest) * rstd",
        sums=(Reduce("across", "sum", "g"), _ALONG),
        means=(
            Let("level", "across / D"),
            Let("slope", "(along + drstd * rstd) / D"),
            Let("lift", "dmean / D"),
        ),
        dh="rstd * (g - level - normed * slope) + lift",
    ),
    # rstd is 1 / max(|h|, eps), and constant where eps is the larger.
    "l2": Statistics(
        names=("rstd",),
        passes=(
            Pass(
                (Reduce("squares", "sum", "h * h"),),
                (Let("rstd", "rsqrt(squares < eps * eps ? eps * eps : squares)"),),
            ),
        ),
        normed="h * rstd",
        sums=(_ALONG,),
        means=(Let("slope", "rstd < rsqrt(eps * eps) ? along + drstd * rstd : 0.0f"),),
        dh="rstd * (g - normed * slope)",
        eps_backward=True,
    ),
}


@dataclass(frozen=True)
class Norm:
    """A norm: its op's name, its statistics, and the parts that it has. Dropout is on x where there
    is a residual, else on y."""

    op: str
    statistics: str
    weighted: bool = False
    biased: bool = False
    residual: bool = False
    dropped: bool = False

    @property
    def kind(self) -> Statistics:
        """Its row of `STATISTICS`."""
        return STATISTICS[self.statistics]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operands that are the same for every row."""
        return ("weight",) * self.weighted + ("bias",) * self.biased

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays in the order of the call."""
        return ("x",) + ("residual",) * self.residual + self.parameters

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arrays, declared."""
        return tuple(
            Argument(n, "(D,)", optional=True) if n in self.parameters else Argument(n)
            for n in self.arrays
        )

    @property
    def lets(self) -> tuple[Let, ...]:
        """The elements of the forward."""
        x = "x * drop" if self.dropped and self.residual else "x"
        y = "normed" + " * weight" * self.weighted + " + bias" * self.biased
        return (
            *(DROP,) * self.dropped,
            Let("h", f"{x} + residual", rounded="sum") if self.residual else Let("h", x),
            Let("normed", self.kind.normed),
            Let("scaled", f"({y}) * drop" if self.dropped and not self.residual else y),
        )


def _operands(norm: Norm, names: Sequence[str]) -> tuple[Operand, ...]:
    return tuple(Operand(n, "column" if n in norm.parameters else "row") for n in names)


@cache
def forward(norm: Norm, long: bool = False) -> PatternKernel:
    """Arrays, eps and what drops → y, and the sum of a norm with a residual."""
    kind = norm.kind
    inputs = (
        *_operands(norm, norm.arrays),
        Operand("eps", "scalar"),
        *DROP_INPUTS * norm.dropped,
    )
    outputs = (Output("y", "scaled"),) + (Output("sum", "h"),) * norm.residual
    dtypes = (norm.arrays, *(("x", "residual"),) * norm.residual)
    kept = tuple(Output(n, n, "per_row") for n in kind.names)
    # A row of x is read again from the cache, which measured faster than keeping it as float; a sum
    # would be rounded again as well.
    keep = ("h",) if norm.residual and not long else ()
    return PatternKernel(
        norm.op,
        Rowwise(inputs, outputs, kind.passes, norm.lets, keep),
        dtypes,
        arguments=(*norm.arguments, *DROP_ARGUMENTS * norm.dropped),
        training=PatternKernel(
            f"{norm.op}/training",
            Rowwise(inputs, (*outputs, *kept), kind.passes, norm.lets, keep),
            (*dtypes, *(mx.float32 for _ in kept)),
            vjp=lambda *rule: _vjp(norm, *rule),
        ),
        long=forward(norm, long=True) if keep else None,
    )


# ---- backward -----------------------------------------------------------------------------------


def _of_used(cotangent: str, part: str) -> str:
    """A part of a gradient through y where there is a sum beside it: 0 where that is no number and
    the cotangent is 0, as it is in a row without a norm of which nobody uses y."""
    return f"{cotangent} == 0.0f && isnan({part}) ? 0.0f : {part}"


def _backward_lets(norm: Norm) -> tuple[Let, ...]:
    dropped_y = norm.dropped and not norm.residual
    return (
        *(DROP,) * norm.dropped,
        Let("normed", norm.kind.normed),
        Let("dz", "dy * drop" if dropped_y else "dy"),
        Let("g", "dz * weight" if norm.weighted else "dz"),
        Let("dnormed" if norm.residual else "dh", norm.kind.dh),
        *(Let("dh", f"({_of_used('dy', 'dnormed')}) + dsum"),) * norm.residual,
    )


def _columns(norm: Norm, wanted: Sequence[str], kind: str) -> tuple[Output, ...]:
    """Gradients of the parameters, before their sum over rows."""
    weight = _of_used("dz", "dz * normed") if norm.residual else "dz * normed"
    texts = {"weight": weight, "bias": "dz"}
    return tuple(Output(f"d{n}", texts[n], kind) for n in wanted)


@cache
def _rows_backward(norm: Norm, wanted: tuple[str, ...]) -> PatternKernel:
    """The gradient of h (two of them where x was dropped before the sum), and in the same walk the
    partial sums of the gradients of the parameters `wanted`."""
    kind = norm.kind
    inputs = (
        Operand("h"),
        *_operands(norm, ("weight",) * norm.weighted),
        *(Operand(n, "per_row") for n in kind.names),
        Operand("dy"),
        *(Operand("dsum"),) * norm.residual,
        *(Operand(f"d{n}", "per_row") for n in kind.names),
        *(Operand("eps", "scalar"),) * kind.eps_backward,
        *DROP_INPUTS * norm.dropped,
    )
    outputs: tuple[Output, ...] = (
        Output("dx", "dh * drop" if norm.residual and norm.dropped else "dh"),
    )
    if norm.residual and norm.dropped:
        outputs = (*outputs, Output("dresidual", "dh"))
    return PatternKernel(
        "_".join((f"{norm.op}/dx", *(f"d{n}" for n in wanted))),
        Rowwise(
            inputs,
            (*outputs, *_columns(norm, wanted, "column")),
            (Pass(kind.sums, kind.means),),
            _backward_lets(norm),
        ),
        (*(("h",) for _ in outputs), *(mx.float32 for _ in wanted)),
    )


@cache
def _columns_backward(norm: Norm, wanted: tuple[str, ...]) -> PatternKernel:
    """The partial sums of the gradients of the parameters alone."""
    kind = norm.kind
    return PatternKernel(
        "_".join((f"{norm.op}/sums", *(f"d{n}" for n in wanted))),
        Columnwise(
            (
                Operand("h"),
                *(Operand(n, "per_row") for n in kind.names),
                Operand("dy"),
                *DROP_INPUTS * (norm.dropped and not norm.residual),
            ),
            _columns(norm, wanted, "row"),
            _backward_lets(norm),
        ),
        tuple(mx.float32 for _ in wanted),
    )


def _tuple(outputs: mx.array | Arrays) -> Arrays:
    return (outputs,) if isinstance(outputs, mx.array) else tuple(outputs)


def _vjp(
    norm: Norm, primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
) -> tuple[mx.array | None, ...]:
    kind, arrays = norm.kind, dict(zip(norm.arrays, primals, strict=False))
    h = outputs[1] if norm.residual else arrays["x"]
    weight = (arrays["weight"],) if norm.weighted else ()
    statistics = outputs[1 + norm.residual :]
    drop = primals[len(norm.arrays) + 1 :]
    eps = (primals[len(norm.arrays)],) * kind.eps_backward
    names = tuple(n for i, n in enumerate(norm.arrays) if i in wanted and n in norm.parameters)
    dropped_y = drop if not norm.residual else ()

    found: dict[str, mx.array] = {}
    partial: Arrays = ()
    rows_wanted = any(i in wanted for i, n in enumerate(norm.arrays) if n not in norm.parameters)
    together = rows_wanted and h.shape[-1] <= LONGEST_KEPT_ROW
    if rows_wanted:
        results = _tuple(
            _rows_backward(norm, names if together else ())(
                h, *weight, *statistics, *cotangents, *eps, *drop
            )
        )
        rows = results[: len(results) - len(names)] if together else results
        partial = results[len(rows) :]
        found["x"] = rows[0].astype(arrays["x"].dtype)
        if norm.residual:
            found["residual"] = rows[-1].astype(arrays["residual"].dtype)
    if names and not together:
        partial = _tuple(_columns_backward(norm, names)(h, *statistics, cotangents[0], *dropped_y))
    for n, sums in zip(names, partial, strict=True):
        found[n] = sum_chunks(sums, arrays[n])
    return (*(found.get(n) for n in norm.arrays), *(None for _ in primals[len(norm.arrays) :]))
