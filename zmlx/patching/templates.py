"""What the patcher looks for, in plain MLX: norms, activations and gated units in the spellings
that models use. A module is replaced only if its graph equals one of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..nn import functional as F
from .shadows import entries, entry

Function = Callable[..., mx.array]


# ---- norms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A norm over the last axis of x.

    Attributes:
        op: "rms_norm" or "layer_norm".
        weight, bias: names of the parameters, or None.
        offset: what is added to the weight: 1 in the Gemma family.
        eps, eps_name: the value, and the name of the attribute that holds it, "" for a number in
            the call; in a plan with a name the value is 0.
        spelling: how the model writes it; see `_SPELLINGS`.
        dtypes: of the parameters, as they were compared besides in the dtype of x.
    """

    op: str
    weight: str | None
    bias: str | None
    offset: float
    eps: float
    eps_name: str
    spelling: str
    dtypes: tuple[mx.Dtype, ...]

    def parameters(self, module: Any) -> tuple[mx.array | None, mx.array | None]:
        """Weight and bias, as the kernels take them."""
        weight = None if self.weight is None else self._with_offset(entry(module, self.weight))
        return weight, None if self.bias is None else entry(module, self.bias)

    def takes(self, module: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> bool:
        """Whether the module's parameters have the shape of the rows of x, of a dtype that was
        compared with that of x: the module itself may broadcast others, or have an error of its
        own."""
        return fit(module, (self.weight, self.bias), shape, (dtype, *self.dtypes))

    def in_mlx(self, x: mx.array, weight: mx.array | None, bias: mx.array | None) -> mx.array:
        """The template, of the module's own parameters."""
        weight = None if weight is None else self._with_offset(weight)
        return _SPELLINGS[self.spelling](self.op, x, weight, bias, self.eps)

    def _with_offset(self, weight: mx.array) -> mx.array:
        if self.spelling == _OFFSET_IN_FLOAT32:
            weight = weight.astype(mx.float32)
        return self.offset + weight if self.offset else weight


def fit(
    module: Any, names: Iterable[str | None], shape: tuple[int, ...], dtypes: tuple[mx.Dtype, ...]
) -> bool:
    """Whether the parameters of these names have this shape, and one of these dtypes."""
    parameters = (entry(module, n) for n in names if n is not None)
    return all(p.shape == shape and p.dtype in dtypes for p in parameters)


def _fast(op: str, x: mx.array, w: Any, b: Any, eps: float) -> mx.array:
    if op == "rms_norm":
        return mx.fast.rms_norm(x, w, eps)
    return mx.fast.layer_norm(x, w, b, eps)


def _fast_float32(op: str, x: mx.array, w: Any, b: Any, eps: float) -> mx.array:
    w = None if w is None else w.astype(mx.float32)
    b = None if b is None else b.astype(mx.float32)
    return _fast(op, x.astype(mx.float32), w, b, eps).astype(x.dtype)


def _weight_after(op: str, x: mx.array, w: Any, b: Any, eps: float) -> mx.array:
    y = _fast(op, x, None, None, eps)
    y = y if w is None else w * y
    return y if b is None else y + b


_NORM_IN_FLOAT32, _ALL_IN_FLOAT32 = "float32 before the weight", "all in float32"
_OFFSET_IN_FLOAT32 = _ALL_IN_FLOAT32 + " before the offset"
#: What of a norm written by hand is in float32.
_CASTS = (_NORM_IN_FLOAT32, _ALL_IN_FLOAT32, _OFFSET_IN_FLOAT32, "no casts")


def _by_hand(casts: str) -> Function:
    def spelled(op: str, x: mx.array, w: Any, b: Any, eps: float) -> mx.array:
        all_in_float32 = casts in (_ALL_IN_FLOAT32, _OFFSET_IN_FLOAT32)
        y = x.astype(mx.float32) if all_in_float32 or casts == _NORM_IN_FLOAT32 else x
        if op == "layer_norm":
            y = y - y.mean(axis=-1, keepdims=True)
        y = y * mx.rsqrt(y.square().mean(axis=-1, keepdims=True) + eps)
        if casts == _NORM_IN_FLOAT32:
            y = y.astype(x.dtype)
        elif all_in_float32:
            w = None if w is None else w.astype(mx.float32)
            b = None if b is None else b.astype(mx.float32)
        y = y if w is None else w * y
        y = y if b is None else y + b
        return y.astype(x.dtype) if all_in_float32 else y

    return spelled


_FAST_IN_FLOAT32 = "mx.fast in float32"

_SPELLINGS: dict[str, Function] = {
    "mx.fast": _fast,
    "mx.fast, weight after": _weight_after,
    _FAST_IN_FLOAT32: _fast_float32,
    **{casts: _by_hand(casts) for casts in _CASTS},
}

#: Spellings that return the dtype of x whatever that of the parameters.
OF_X = {_FAST_IN_FLOAT32, _ALL_IN_FLOAT32, _OFFSET_IN_FLOAT32}


def norms(module: mnn.Module, literals: Iterable[float]) -> Iterator[Norm]:
    """The norms that a module might be with these attributes and numbers in its call: eps is one of
    them."""
    vectors = [k for k, v in entries(module) if isinstance(v, mx.array) and v.ndim == 1]
    attributes = vars(module).items()
    numbers = [(k, v) for k, v in attributes if isinstance(v, float) and 0 <= v < 1]
    numbers += [("", v) for v in literals]
    weights: list[tuple[str | None, str | None]] = [(None, None)]
    dtypes = tuple({entry(module, k).dtype: None for k in vectors})
    if len(vectors) == 1:
        weights = [(vectors[0], None)]
    elif len(vectors) == 2:
        weights = [(vectors[0], vectors[1]), (vectors[1], vectors[0])]
    for weight, bias in weights:
        for eps_name, eps in numbers:
            for op in ("rms_norm", "layer_norm") if bias is None else ("layer_norm",):
                for offset in (0.0, 1.0) if weight else (0.0,):
                    for spelling in _SPELLINGS:
                        if spelling == _OFFSET_IN_FLOAT32 and not offset:
                            continue
                        yield Norm(op, weight, bias, offset, eps, eps_name, spelling, dtypes)


# ---- activations and gated units ----------------------------------------------------------------


def _gelu_by_a_product(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


def _gelu_tanh_by_squares(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


#: Ops of one array and what they are in MLX; several where models differ in more than the order of
#: sums and products: in what is multiplied out, or in numbers that half precision tells apart. The
#: gradient is the kernel's at a tie, too: that of max(0, x) at 0 is 1 and of max(x, 0) it is 0.
ACTIVATIONS: tuple[tuple[str, Function], ...] = (
    *((name, getattr(mnn, name)) for name in F.ACTIVATIONS),
    ("gelu", _gelu_by_a_product),
    ("gelu_approx", _gelu_tanh_by_squares),
    ("relu2", lambda x: mx.square(mx.maximum(0, x))),
    ("leaky_relu", lambda x: mx.where(x >= 0, x, 0.01 * x)),
)


def _precise(unit: Function) -> Function:
    return lambda g, u: unit(g.astype(mx.float32), u.astype(mx.float32)).astype(u.dtype)


#: Gated units of gate and up.
GATED: tuple[tuple[str, Function], ...] = (
    *F.GATED_IN_MLX.items(),
    *((name, _precise(unit)) for name, unit in F.GATED_IN_MLX.items() if name != "swiglu_clamped"),
    ("geglu", lambda g, u: _gelu_by_a_product(g) * u),
    ("geglu_tanh", lambda g, u: _gelu_tanh_by_squares(g) * u),
    ("geglu_tanh", lambda g, u: (mnn.gelu_approx(g) * u).astype(g.dtype)),
)


def _halves(x: mx.array) -> tuple[mx.array, mx.array]:
    a, b = mx.split(x, 2, axis=-1)
    return a, b


def _slices(x: mx.array) -> tuple[mx.array, mx.array]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


#: How models take the two halves of a packed projection.
PACKINGS: tuple[Callable[[mx.array], tuple[mx.array, mx.array]], ...] = (_halves, _slices)


@dataclass(frozen=True)
class Unit:
    """What a feed-forward network does between its projections.

    Attributes:
        kind: "gated" (of two projections), "packed" (of one that has both halves) or "activation".
        op: of zmlx.
        gate_first: whether the gate is the first projection or half.
        function: mlx.nn's name, of an activation.
        in_mlx: the template, of what the projections return.
    """

    kind: str
    op: str
    gate_first: bool
    function: str
    in_mlx: Function


@lru_cache
def units(projections: int) -> tuple[Unit, ...]:
    """Units of what one or two projections return."""
    if projections == 2:
        return tuple(
            Unit("gated", op, first, "", f if first else _turned(f))
            for op, f in GATED
            for first in (True, False)
        )
    activations = (Unit("activation", F.ACTIVATIONS[n], True, n, f) for n, f in ACTIVATIONS)
    return *packed(), *activations


@lru_cache(maxsize=1)
def packed() -> tuple[Unit, ...]:
    """Gated units of one array."""

    def unit(f: Function, take: Any, first: bool) -> Function:
        def packed_unit(x: mx.array) -> mx.array:
            a, b = take(x)
            return f(a, b) if first else f(b, a)

        return packed_unit

    return tuple(
        Unit("packed", op, first, "", unit(f, take, first))
        for op, f in GATED
        for take in PACKINGS
        for first in (True, False)
    )


def _turned(unit: Function) -> Function:
    return lambda a, b: unit(b, a)
