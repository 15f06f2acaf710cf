"""`mlx.nn`'s activations as functions and layers, by zmlx's kernels: a row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as mnn
from mlx.nn.layers import activations as _mlx

from . import functional as F
from .choosing import Choosing

#: Functions under mlx.nn's names.
FUNCTIONS: dict[str, Callable[..., mx.array]] = {
    **F.activations,
    "glu": F.glu,
    "softmax": F.softmax,
}

#: mlx.nn's layers, their functions, and the attributes that these take besides x.
_ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("CELU", "celu", ("_alpha",)),
    ("ELU", "elu", ("_alpha",)),
    ("GLU", "glu", ("axis",)),
    ("HardTanh", "hard_tanh", ()),
    ("Hardswish", "hardswish", ()),
    ("LeakyReLU", "leaky_relu", ("_negative_slope",)),
    ("LogSigmoid", "log_sigmoid", ()),
    ("Mish", "mish", ()),
    ("ReLU", "relu", ()),
    ("ReLU2", "relu2", ()),
    ("SELU", "selu", ()),
    ("SiLU", "silu", ()),
    ("Sigmoid", "sigmoid", ()),
    ("Softmax", "softmax", ()),
    ("Softplus", "softplus", ()),
    ("Softsign", "softsign", ()),
    ("Tanh", "tanh", ()),
)


def _layer(name: str, function: str, attributes: tuple[str, ...]) -> type[mnn.Module]:
    base = getattr(mnn, name)
    run = FUNCTIONS[function]

    def call(self: Any, x: mx.array) -> mx.array:
        return run(x, *[getattr(self, a) for a in attributes])

    fields = {
        "__call__": call,
        "__doc__": base.__doc__,
        "__module__": __name__,
        "op": F.ACTIVATIONS.get(function, function),
    }
    return type(name, (Choosing, base), fields)


LAYERS: dict[str, type[mnn.Module]] = {row[0]: _layer(*row) for row in _ROWS}


class GELU(Choosing, mnn.GELU):
    __doc__ = mnn.GELU.__doc__

    @property
    def op(self) -> str:  # type: ignore[override]
        """The op of the approximation."""
        return {"none": "gelu", "fast": "gelu_quick"}.get(self._approx, "gelu_tanh")

    def __call__(self, x: mx.array) -> mx.array:
        name = {"none": "gelu", "fast": "gelu_fast_approx"}.get(self._approx, "gelu_approx")
        return FUNCTIONS[name](x)


LAYERS["GELU"] = GELU
globals().update(FUNCTIONS | LAYERS)
__all__ = [*FUNCTIONS, *LAYERS]


def __getattr__(name: str) -> Any:
    return getattr(_mlx, name)
