"""The ops of the layers as functions, each with its two implementations.

A function has MLX's signature. It asks `zmlx.choice` which of the two runs for the arrays it got;
`IMPLEMENTATIONS` lists both of what `python -m zmlx tune` times: what MLX has as one call of x and
parameters. RoPE, attention and losses are not timed: MLX's run on a GPU, zmlx's on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from .. import kernels
from ..arguments import float32, is_finite
from ..choice import use_kernel
from ..kernels.attention_launch import fits
from ..kernels.rope_arguments import MOST_DIMS
from ..targets import cpu

Function = Callable[..., mx.array]


@dataclass(frozen=True)
class Implementations:
    """Both ways to compute an op, of the same arguments; the first is an array that decides.

    Attributes:
        zmlx, mlx: the functions.
        arrays: shapes of the arguments for timing: "x" for (rows, width), "d" for (width,).
    """

    zmlx: Function
    mlx: Function
    arrays: str = "x"


IMPLEMENTATIONS: dict[str, Implementations] = {
    "rms_norm": Implementations(
        kernels.rms_norm, lambda x, weight, eps=1e-5: mx.fast.rms_norm(x, weight, eps), "xd"
    ),
    "layer_norm": Implementations(
        kernels.layer_norm,
        lambda x, weight, bias, eps=1e-5: mx.fast.layer_norm(x, weight, bias, eps),
        "xdd",
    ),
    "softmax": Implementations(kernels.softmax, mx.softmax),
}

# ---- numbers ------------------------------------------------------------------------------------


def are_numbers(*values: Any) -> bool:
    """Whether values are numbers of Python that are finite as float32, as kernels take them: MLX
    takes others and arrays, too."""
    return all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and is_finite(v) for v in values
    )


def is_eps(value: Any) -> bool:
    """Whether kernels add it to a mean square or a variance."""
    return are_numbers(value) and value >= 0


# ---- norms --------------------------------------------------------------------------------------


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """`mx.fast.rms_norm`."""
    if is_eps(eps) and use_kernel("rms_norm", x, weight):
        return kernels.rms_norm(x, weight, eps)
    return mx.fast.rms_norm(x, weight, eps)


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """`mx.fast.layer_norm`."""
    if is_eps(eps) and use_kernel("layer_norm", x, weight, bias):
        return kernels.layer_norm(x, weight, bias, eps)
    return mx.fast.layer_norm(x, weight, bias, eps)


def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None, eps: float
) -> tuple[mx.array, mx.array]:
    """(rms_norm(x + residual), x + residual)."""
    takes = is_eps(eps) and x.shape == residual.shape
    if takes and use_kernel("add_rms_norm", x, residual, weight):
        return kernels.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return mx.fast.rms_norm(total, weight, eps), total


def add_layer_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
) -> tuple[mx.array, mx.array]:
    """(layer_norm(x + residual), x + residual)."""
    takes = is_eps(eps) and x.shape == residual.shape
    if takes and use_kernel("add_layer_norm", x, residual, weight, bias):
        return kernels.add_layer_norm(x, residual, weight, bias, eps)
    total = x + residual
    return mx.fast.layer_norm(total, weight, bias, eps), total


# ---- rope ---------------------------------------------------------------------------------------


def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
) -> mx.array:
    """`mx.fast.rope`, which also turns more dims than our kernel, and by any base and scale."""
    paced = freqs is not None if base is None else are_numbers(base) and float32(base) > 0
    takes = paced and are_numbers(scale) and isinstance(dims, int) and dims <= MOST_DIMS
    use = kernels.rope if takes and use_kernel("rope", x, freqs) and x.ndim >= 3 else mx.fast.rope
    return use(x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs)


# ---- activations --------------------------------------------------------------------------------


def _activation(op: str, mlx: Function) -> Function:
    """MLX's activation `mlx` of x and numbers, by our kernel `op` where that is chosen."""
    kernel = getattr(kernels, op)
    names = [o.name for o in _options(op)]
    IMPLEMENTATIONS[op] = Implementations(kernel, mlx)

    def function(x: mx.array, *numbers: float, **named: float) -> mx.array:
        given = (*numbers, *named.values())
        takes = len(numbers) <= len(names) and are_numbers(*given)
        takes = takes and not (op == "celu" and 0 in map(float32, given))
        if takes and use_kernel(op, x):
            return kernel(x, **dict(zip(names, numbers, strict=False)), **named)  # type: ignore[no-any-return]
        return mlx(x, *numbers, **named)

    function.__name__ = function.__qualname__ = getattr(mlx, "__name__", op)
    function.__doc__ = mlx.__doc__
    function.__wrapped__ = mlx  # type: ignore[attr-defined]
    return function


def _options(op: str) -> Any:
    from ..registry import get

    return get(op).options


#: mlx.nn's names of activations, and those of our ops.
ACTIVATIONS = {
    "celu": "celu",
    "elu": "elu",
    "gelu": "gelu",
    "gelu_approx": "gelu_tanh",
    "gelu_fast_approx": "gelu_quick",
    "hard_tanh": "hardtanh",
    "hardswish": "hardswish",
    "leaky_relu": "leaky_relu",
    "log_sigmoid": "log_sigmoid",
    "mish": "mish",
    "relu": "relu",
    "relu2": "relu2",
    "selu": "selu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "softplus": "softplus",
    "softsign": "softsign",
    "tanh": "tanh",
}

activations: dict[str, Function] = {
    name: _activation(op, getattr(mnn, name)) for name, op in ACTIVATIONS.items()
}


def glu(x: mx.array, axis: int = -1) -> mx.array:
    """`mlx.nn.glu`."""
    takes = type(axis) is int and use_kernel("glu", x) and x.ndim
    if takes and axis in (-1, x.ndim - 1) and x.shape[-1] % 2 == 0:
        return kernels.glu_packed(x)
    return mnn.glu(x, axis)


def softmax(x: mx.array, axis: int | Sequence[int] | None = -1) -> mx.array:
    """`mlx.nn.softmax`."""
    if use_kernel("softmax", x) and type(axis) is int:
        return kernels.softmax(x, axis)
    return mnn.softmax(x, axis)  # type: ignore[no-any-return]


# ---- gated units --------------------------------------------------------------------------------


def _gated(op: str, mlx: Function) -> Function:
    """A gated unit of gate and up, as `mx.compile` or our kernel computes it."""
    kernel = getattr(kernels, op)
    compiled = mx.compile(mlx, shapeless=True)
    IMPLEMENTATIONS[op] = Implementations(kernel, compiled, "xx")

    def function(gate: mx.array, up: mx.array, **numbers: float) -> mx.array:
        takes = are_numbers(*numbers.values()) and use_kernel(op, gate, up)
        if takes and isinstance(up, mx.array) and gate.shape == up.shape:
            return kernel(gate, up, **numbers)  # type: ignore[no-any-return]
        return compiled(gate, up, **numbers)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = mlx.__doc__
    return function


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up."""
    return mnn.silu(gate) * up  # type: ignore[no-any-return]


def _geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) · up."""
    return mnn.gelu(gate) * up


def _geglu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    """gelu_approx(gate) · up."""
    return mnn.gelu_approx(gate) * up  # type: ignore[no-any-return]


def _reglu(gate: mx.array, up: mx.array) -> mx.array:
    """relu(gate) · up."""
    return mnn.relu(gate) * up  # type: ignore[no-any-return]


def _glu(gate: mx.array, up: mx.array) -> mx.array:
    """sigmoid(gate) · up."""
    return mx.sigmoid(gate) * up


def _swiglu_clamped(
    gate: mx.array, up: mx.array, alpha: float = 1.702, limit: float = 7.0
) -> mx.array:
    """The clamped unit of gpt-oss."""
    gate = mx.minimum(gate, limit)
    up = mx.clip(up, -limit, limit)
    return (up + 1.0) * (gate * mx.sigmoid(alpha * gate))


gated: dict[str, Function] = {
    "swiglu": _gated("swiglu", _swiglu),
    "geglu": _gated("geglu", _geglu),
    "geglu_tanh": _gated("geglu_tanh", _geglu_tanh),
    "reglu": _gated("reglu", _reglu),
    "glu": _gated("glu", _glu),
    "swiglu_clamped": _gated("swiglu_clamped", _swiglu_clamped),
}


def packed(op: str, x: mx.array, gate_first: bool) -> mx.array:
    """A gated unit of the halves of the last axis. The kernel reads them where they are if they
    are in its order, which is that of `mlx.nn.glu` for that unit and gate, then up for the others.
    """
    in_order = gate_first == (op != "glu")
    if in_order and use_kernel(op, x) and x.ndim and x.shape[-1] % 2 == 0:
        return getattr(kernels, f"{op}_packed")(x)  # type: ignore[no-any-return]
    a, b = mx.split(x, 2, axis=-1)
    return gated[op](a, b) if gate_first else gated[op](b, a)


#: The same units as MLX would write them, for who compares graphs.
GATED_IN_MLX: dict[str, Function] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "geglu_tanh": _geglu_tanh,
    "reglu": _reglu,
    "glu": _glu,
    "swiglu_clamped": _swiglu_clamped,
}

# ---- attention ----------------------------------------------------------------------------------

#: The op of `attention` in the catalogue.
ATTENTION = "scaled_dot_product_attention"


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`, which also takes heads too wide for our tiles, and
    returns 0 where there are no keys."""
    takes = use_kernel(ATTENTION, queries, keys, values, sinks) and are_numbers(scale)
    if takes and keys.shape[-2] and fits(queries.shape[-1], values.shape[-1]):
        kernel = getattr(kernels, ATTENTION)
        causal = isinstance(mask, str)
        if causal and mask != "causal":
            raise ValueError(f"[attention] 'mask' must be 'causal' or an array but got {mask!r}.")
        if isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.integer):
            mask = mask.astype(queries.dtype)  # MLX adds these, too
        return kernel(  # type: ignore[no-any-return]
            queries, keys, values, None if causal else mask, sinks, scale=scale, causal=causal
        )
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


#: More queries are left to MLX's quantised products.
_DECODED = 16


def decodes(queries: mx.array, keys: Any, mask: Any, group_size: int, bits: int) -> bool:
    """Whether `quantized_attention` takes mlx-lm's quantised cache as it lies."""
    return (
        isinstance(keys, (tuple, list))
        and len(keys) == 3
        and keys[0].dtype == mx.uint32
        and bits in (4, 8)
        and group_size % 32 == 0
        and (mask is None or (isinstance(mask, str) and mask == "causal"))
        and queries.shape[2] <= _DECODED
        and not cpu.any_shape((queries,))
        and use_kernel("quantized_attention", queries)
    )


def quantized_attention(
    queries: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, bits: int
) -> mx.array:
    """mlx-lm's `quantized_scaled_dot_product_attention` for what `decodes`."""
    return kernels.quantized_attention(
        queries, *keys, *values, bits=bits, scale=scale, causal=mask is not None
    )
