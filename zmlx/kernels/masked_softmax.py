"""softmax of scaled and masked scores, without an array of the masked scores.

    y = softmax(scale · x + mask)                          additive mask
    y = softmax(mask ? scale · x : -inf)                   mask of what to keep

Bytes: the forward reads x and the mask and writes y; the backward reads y and dy and writes dx. A
mask is read in the shape that it has: each row of x finds its row of the mask through an index of
4 bytes. The gradient of an additive mask comes with dx: at the mask's own shape or as a sum over
all rows in the same launch, else through a float32 array of x's shape that is then summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import mlx.core as mx

from ..arguments import (
    BOOLEAN,
    FLOATING,
    Argument,
    check_array,
    check_finite,
    check_flag,
    check_integer,
)
from ..broadcasting import sum_chunks
from ..codegen import Let, Operand, Output, Pass, Reduce, Rowwise
from ..interpret import evaluate
from ..launch import LONGEST_KEPT_ROW, settings
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import ROWS, Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays, Reference, Rule


def masked_softmax_reference(
    x: mx.array,
    mask: mx.array | None = None,
    *,
    scale: float | mx.array = 1.0,
    causal: bool = False,
    offset: int | mx.array | None = None,
    xp: Any = mx,
) -> Any:
    """masked_softmax in plain MLX."""
    z, keep = scale * x, None
    if mask is not None and mask.dtype in (mx.bool_, bool):
        keep = mask
    elif mask is not None:
        z = z + mask
    if causal:
        # Positions and lengths from the elements, which a shapeless compile may change.
        ones = xp.ones_like(xp.stop_gradient(x))
        key = xp.cumsum(ones, axis=-1)
        last = xp.sum(ones, axis=-1, keepdims=True) + (0 if offset is None else offset)
        if x.ndim > 1:
            last = last + xp.cumsum(ones, axis=-2) - xp.sum(ones, axis=-2, keepdims=True)
        keep = key <= last if keep is None else xp.logical_and(keep, key <= last)
    if keep is None:
        e = xp.exp(z - xp.max(z, axis=-1, keepdims=True))
        return e / xp.sum(e, axis=-1, keepdims=True)
    # As `_Masking.in_mlx`: NaN comes in where its gradient is not multiplied by 0 any more.
    largest = xp.stop_gradient(xp.max(xp.where(keep, z, -xp.inf), axis=-1, keepdims=True))
    found = xp.isfinite(largest)
    factor = xp.where(xp.logical_or(found, xp.logical_not(keep)), xp.ones_like(z), xp.nan)
    z = xp.where(xp.logical_and(found, keep), z * factor, -xp.inf)
    e = xp.exp(z - xp.where(found, largest, 0.0))
    total = xp.sum(e, axis=-1, keepdims=True)
    return xp.where(found, e / xp.where(found, total, 1.0), xp.nan)


# ---- kernels ------------------------------------------------------------------------------------

#: How the mask lies to x: not there, the same shape, one row for all, one row for some.
_NONE, _SAME, _COLUMN, _SHARED = "none", "same", "column", "shared"

_X = Argument("x")
_MASK = Argument("mask", "(*, D)", FLOATING + BOOLEAN, optional=True)
_SCALE = Operand("scale", "scalar")


@dataclass(frozen=True)
class _Masking:
    """How the mask lies, whether it is of what to keep or added, and whether scores are causal."""

    lies: str
    keeps: bool
    causal: bool

    @property
    def mask(self) -> tuple[Operand, ...]:
        """The mask and the index of its rows."""
        if self.lies == _NONE:
            return ()
        if self.lies == _SHARED:
            rows = Operand("mask_row", "per_row", "int")
            return Operand("mask", "row", index="mask_row"), rows
        return (Operand("mask", "column" if self.lies == _COLUMN else "row"),)

    @property
    def positions(self) -> tuple[Operand, ...]:
        """The query of each row, and the key that query 0 sees last."""
        if not self.causal:
            return ()
        return Operand("query", "per_row", "int"), Operand("shift", "scalar", "int")

    @property
    def before(self) -> tuple[Let, ...]:
        """What is known of a row."""
        return (Let("last", "query + shift", "int"),) if self.causal else ()

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """What the forward reads."""
        return (Operand("x"), _SCALE, *self.mask, *self.positions)

    @property
    def score(self) -> str:
        """A score before any is dropped."""
        added = self.lies != _NONE and not self.keeps
        return "scale * x + mask" if added else "scale * x"

    @property
    def kept(self) -> str:
        """The condition of the scores that are kept; "" where all are."""
        return " && ".join(["key <= last"] * self.causal + ["mask != 0.0f"] * self.keeps)

    def choose(self, name: str, value: str, otherwise: str) -> tuple[Let, ...]:
        """`name` = `value` where the score is kept, else `otherwise`."""
        if not self.kept:
            return (Let(name, value),)
        key = (Let("key", "j", "int"),) * self.causal
        return (*key, Let(name, f"{self.kept} ? {value} : {otherwise}"))

    @property
    def in_mlx(self) -> Rowwise:
        """The forward as plain MLX can differentiate it. Of a row without a score, or with one that
        is infinite, the gradient is NaN where scores are kept and 0 where they are dropped: since
        the gradient of a `where` multiplies by 0, NaN comes in before it."""
        none = Let("none", "!isfinite(largest)", "bool")
        return Rowwise(
            inputs=self.inputs,
            before=self.before,
            lets=(
                *self.choose("z", self.score, "-INFINITY"),
                Let("factor", f"none && {self.kept} ? NAN : 1.0f"),
                Let("score", f"!none && {self.kept} ? ({self.score}) * factor : -INFINITY"),
                Let("e", "exp(score - shift)"),
            ),
            passes=(
                Pass(
                    (Reduce("largest", "max", "z", shift=True),),
                    (none, Let("shift", "none ? 0.0f : largest")),
                ),
                Pass(
                    (Reduce("total", "sum", "e"),),
                    (Let("weight", "1.0f / (none ? 1.0f : total)"),),
                ),
            ),
            outputs=(Output("y", "none ? NAN : e * weight"),),
        )


@cache
def _backward(masking: _Masking, dmask: str) -> PatternKernel:
    """dx, and the gradient of an added mask that lies as `dmask` says. What a condition drops has
    the gradient 0 even in a row that is NaN, so that such a row does not poison a sum over rows."""
    outputs = [Output("dx", "dz * scale")]
    if dmask != _NONE:
        outputs.append(Output("dmask", "dz", "column" if dmask == _COLUMN else "row"))
    return PatternKernel(
        "masked_softmax/dx" if dmask == _NONE else f"masked_softmax/dx_dmask_{dmask}",
        Rowwise(
            inputs=(
                *(Operand("y"), Operand("dy"), _SCALE),
                *(masking.mask if masking.keeps else ()),
                *masking.positions,
            ),
            before=masking.before,
            lets=masking.choose("dz", "y * (dy - dot)", "0.0f"),
            passes=(Pass((Reduce("dot", "sum", "y * dy"),)),),
            outputs=tuple(outputs),
        ),
        (("y",), ("y",) if dmask == _SAME else mx.float32)[: len(outputs)],
    )


def _summed(dz: mx.array, mask: mx.array) -> mx.array:
    """The gradient of a mask that was broadcast."""
    shape = (1,) * (dz.ndim - mask.ndim) + tuple(mask.shape)
    axes = [a for a, n in enumerate(shape) if n == 1]
    return dz.sum(axis=axes).reshape(mask.shape).astype(mask.dtype)


def _rule(masking: _Masking) -> Rule:
    """The vjp: primals are x, scale, what `mask` names, what `positions` names."""
    after = 2 + len(masking.mask)

    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        x, scale = primals[:2]
        inputs = (outputs[0], cotangents[0], scale, *primals[2 if masking.keeps else after :])
        found: list[mx.array | None] = [None] * len(primals)
        if masking.keeps or masking.lies == _NONE or 2 not in wanted:
            found[0] = _backward(masking, _NONE)(*inputs).astype(x.dtype)
            return found
        mask, lies = primals[2], masking.lies
        if lies == _COLUMN and x.shape[-1] > LONGEST_KEPT_ROW:
            lies = _SHARED
        dx, dmask = _backward(masking, lies)(*inputs)
        if lies == _COLUMN:
            dmask = sum_chunks(dmask, mask)
        elif lies == _SHARED:
            dmask = _summed(dmask, mask)
        found[0], found[2] = dx.astype(x.dtype), dmask.astype(mask.dtype)
        return found

    return vjp


def _reference(masking: _Masking) -> Reference | None:
    """The forward in plain MLX; None where that of the kernel's pattern will do."""
    if not masking.kept:
        return None
    pattern = masking.in_mlx
    return lambda *inputs: evaluate(pattern, inputs, (mx.float32,))


@cache
def _forward(masking: _Masking) -> PatternKernel:
    """y; a row that fits keeps its scores."""
    inputs, lets = masking.inputs, masking.choose("z", masking.score, "-INFINITY")
    added = masking.lies != _NONE and not masking.keeps
    dtypes = (("x", "mask") if added else ("x",),)
    rule, reference = _rule(masking), _reference(masking)
    # An infinite maximum makes the whole row NaN, as in MLX.
    weight = Let("weight", "isinf(largest) ? NAN : 1.0f / total")
    long = Rowwise(
        inputs=inputs,
        before=masking.before,
        lets=lets,
        passes=(Pass((Reduce("total", "sum_exp", "z", peak="largest"),), (weight,)),),
        outputs=(Output("y", "ZMLX_EXP_BOUNDED(z - largest) * weight"),),
    )
    kept = Rowwise(
        inputs=inputs,
        before=masking.before,
        lets=(*lets, Let("e", "ZMLX_EXP_BOUNDED(z - largest)")),
        passes=(
            Pass((Reduce("largest", "max", "z", shift=True),)),
            Pass((Reduce("total", "sum", "e"),), (Let("weight", "1.0f / total"),)),
        ),
        outputs=(Output("y", "e * weight"),),
        keep=("z", "e"),
    )
    return PatternKernel(
        "masked_softmax",
        kept,
        dtypes,
        arguments=(_X,),
        vjp=rule,
        long=PatternKernel("masked_softmax/long", long, dtypes, vjp=rule, reference=reference),
        reference=reference,
    )


@lru_cache(maxsize=64)
def _rows_of(lead: tuple[int, ...], own: tuple[int, ...]) -> mx.array:
    """For every row of an array with the leading axes `lead`, the row of an array with the leading
    axes `own`, which broadcast to them."""
    rows = mx.arange(prod(own), dtype=mx.int32).reshape(own)
    rows = mx.contiguous(mx.broadcast_to(rows, lead))
    mx.eval(rows)
    return rows


@lru_cache(maxsize=1024)
def _shift(number: int) -> mx.array:
    """The key that query 0 sees last."""
    return scalar(number)


# ---- op -----------------------------------------------------------------------------------------

#: An offset further from 0 is taken as this one: no axis is as long, and sums stay in 32 bits.
_FAR = 2**30


def _check(x: mx.array, mask: mx.array | None, causal: bool, offset: Any) -> Any:
    """Raises for what does not fit; an offset that is a number as it is used."""
    op = "masked_softmax"
    check_array(op, "x", x)
    if x.ndim < 1:
        raise ValueError(f"[{op}] 'x' must have shape (*, D) but got {tuple(x.shape)}.")
    if mask is not None:
        check_array(op, "mask", mask, FLOATING + BOOLEAN)
        shape, whole = tuple(mask.shape), tuple(x.shape)
        own = (1,) * (len(whole) - len(shape)) + shape
        if own != whole and (
            len(own) > len(whole) or any(n not in (1, m) for n, m in zip(own, whole, strict=True))
        ):
            raise ValueError(f"[{op}] 'mask' must broadcast to {whole} but got {shape}.")
    check_flag(op, "causal", causal)
    if offset is None:
        return None
    if not causal:
        raise ValueError(f"[{op}] 'offset' must be None unless causal=True but got {offset}.")
    if isinstance(offset, mx.array):
        check_array(op, "offset", offset, (mx.int32,))
        if offset.ndim:
            raise ValueError(f"[{op}] 'offset' must have shape () but got {tuple(offset.shape)}.")
        return offset
    number = check_integer(op, "offset", offset, "an int or an mx.array")
    return max(-_FAR, min(number, _FAR))


def _masked_softmax(
    x: mx.array, mask: mx.array | None, offset: Any, scale: mx.array, causal: bool
) -> Way:
    number = _check(x, mask, causal, offset)
    moves = isinstance(offset, mx.array)
    some = (x,) if mask is None else (x, mask)
    keeps = mask is not None and mask.dtype == mx.bool_
    added = mask is not None and not keeps
    if settings().target == "reference" or cpu.any_shape(some):
        dtype = mx.result_type(*some) if added else x.dtype
        if not x.shape[-1] and not cpu.any_shape(some):
            return lambda x, *_: x.astype(dtype)  # MLX finds no maximum of nothing

        def in_mlx(x: mx.array, mask: Any, offset: Any, scale: mx.array) -> Any:
            y = masked_softmax_reference(
                x.astype(mx.float32), mask.astype(mx.float32) if added else mask, scale=scale,
                causal=causal, offset=mx.clip(offset, -_FAR, _FAR) if moves else number,
            )  # fmt: skip
            return y.astype(dtype)

        return in_mlx
    *axes, d = x.shape
    lead = tuple(axes)
    lies, narrow, own = _NONE, False, lead
    shape: tuple[int, ...] | None = None
    if mask is not None:
        there = tuple(mask.shape)
        narrow = there[-1:] != (d,)
        own = (1,) * (len(lead) + 1 - max(len(there), 1)) + there[:-1]
        if own == lead:
            lies, shape = _SAME, (*lead, d)
        elif prod(own) == 1:
            lies, shape = _COLUMN, (d,)
        else:
            lies = _SHARED
        if shape == there:
            shape = None
    queries = (1,) * (len(lead) - 1) + lead[-1:]
    start = d - (lead[-1] if lead else 1)
    shift = _shift(start + (number or 0)) if causal and not moves else None
    kernel = _forward(_Masking(lies, keeps, causal))
    # MLX has no gradient of a view, which a `mx.checkpoint` asks for even where there is none.
    traced = mask is not None and cpu.maybe_tracing((mask,))

    def run(x: mx.array, mask: Any, offset: Any, scale: mx.array) -> Any:
        inputs = [x, scale]
        if lies != _NONE:
            if narrow:
                mask = mx.broadcast_to(mask, (*mask.shape[:-1], d))
            if shape is not None:
                mask = mask.reshape(shape)
            if keeps:  # a loop over bool does not vectorise
                mask = (mx.stop_gradient(mask) if traced else mask).view(mx.uint8)
            inputs.append(mask)
        # Tables of rows are as long as x has rows, and not kept for every shape that there was.
        if lies == _SHARED:
            inputs.append(_rows_of(lead, own))
        if causal:
            inputs.append(_rows_of(lead, queries))
            inputs.append(mx.clip(offset, -_FAR, _FAR) + start if shift is None else shift)
        return kernel(*inputs)

    return run


_MASKED_SOFTMAX = Remembered(_masked_softmax)


def masked_softmax(
    x: mx.array,
    mask: mx.array | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    offset: int | mx.array | None = None,
) -> mx.array:
    """The softmax over the last axis of scaled and masked scores.

        y = softmax(scale · x + mask), or softmax(mask ? scale · x : -inf) for a bool mask

    Args:
        x: (*, L, S) or (S,) in float32, float16 or bfloat16; computed in float32.
        mask: broadcasts to x: bool (True keeps the score) or floating (added). It is read where it
            lies; only a mask of one column, (*, L, 1), is first copied to whole rows.
        scale: a number; a new value compiles nothing.
        causal: query i keeps key j only if j ≤ i + S - L + offset, as in
            `mx.fast.scaled_dot_product_attention` for offset 0; for x of one axis, L = 1.
        offset: an int or a 0-d int32 array. Default: 0.

    Returns:
        An array of x's shape, in the dtype of `scale * x + mask`. A row without any score left is
        NaN, as `mx.softmax(mx.where(mask, scale * x, -mx.inf))` is, but the scores dropped there
        have the gradient 0, where MLX's is NaN. An added mask of a large finite number and not -inf
        keeps such a row finite. Gradients for x and for an added mask, summed over the axes that it
        was broadcast over.
    """
    factor = scalar(check_finite("masked_softmax", "scale", scale))
    arrays: tuple[Any, ...] = (x, mask, offset, factor)
    if isinstance(offset, int):  # which may be another one in each call
        return _masked_softmax(x, mask, offset, factor, causal)(*arrays)  # type: ignore[no-any-return]
    return _MASKED_SOFTMAX(arrays, (causal,))  # type: ignore[no-any-return]


register(
    Op(
        name="masked_softmax",
        family="softmax",
        summary="softmax of scaled and masked scores",
        formula="softmax(scale · x + mask), with -inf for scores that a bool mask or causal drops",
        function=masked_softmax,
        reference=masked_softmax_reference,
        arguments=(_X, _MASK),
        options=(
            Option("scale", 1.0, (0.125, -2)),
            Option("causal", False, (True,), passed="text"),
            Option("offset", None),
        ),
        cases=(
            *ROWS,
            Case((2, 3, 4), {"D": 9}, "causal, more keys than queries", {"causal": True}),
            Case((2, 7), {"D": 4}, "causal, queries without a key: NaN", {"causal": True}),
            Case((7,), {"D": 4}, "causal, offset", {"causal": True, "offset": 4, "scale": 0.5}),
        ),
        reads_backward=("output",),
        torch="F.softmax(x * scale + mask, -1)",
    )
)
