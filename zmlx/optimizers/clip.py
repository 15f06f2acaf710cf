"""The joint norm of all gradients, and gradients scaled to a bound of it.

    n = √Σ g²                c = min(1, max_norm / (n + 1e-6))                g' = c g

Bytes: the norm reads every gradient once, up to 29 arrays per launch; scaling reads and writes
them, 14 per launch where the results take their memory, else up to 28. An optimizer with
`max_norm` scales them inside its own step instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from .. import launch
from ..arguments import FLOATING, check_number
from ..kernels.gradient_norm import SQUARES, scaled

#: MLX's `clip_grad_norm` adds it to the norm.
_TINY = 1e-6


def check_max_norm(op: str, max_norm: Any) -> float:
    """A number of at least 0, or an error."""
    value = check_number(op, "max_norm", max_norm)
    if not value >= 0:
        raise ValueError(f"[{op}] 'max_norm' must be at least 0 but got {max_norm}.")
    return value


def _leaves(op: str, gradients: Any) -> list[mx.array]:
    leaves: list[Any] = [item[1] for item in tree_flatten(gradients)]
    for x in leaves:
        if not isinstance(x, mx.array):
            raise TypeError(
                f"[{op}] 'gradients' must be a tree of mx.array but got {type(x).__name__}."
            )
    return leaves


def global_norm(gradients: Any) -> mx.array:
    """√Σ g² over all elements of all arrays of a tree, in ⌈arrays / 29⌉ launches per dtype; arrays
    of fewer than eight elements have launches of their own.

    Args:
        gradients: a tree of arrays; float32, float16 and bfloat16 go through the kernel, squared
            and summed in float32, other dtypes through MLX (complex ones by their magnitude).

    Returns:
        A 0-d float32 array. The order of the sum is fixed: it does not depend on the threads.
    """
    return norm_of(_leaves("global_norm", gradients))


def norm_of(leaves: Sequence[mx.array], fused: bool = True) -> mx.array:
    """√Σ g² over all arrays; by MLX alone where it is not to be fused."""
    dtypes = FLOATING if fused else ()
    total = SQUARES([x for x in leaves if x.dtype in dtypes])
    for x in leaves:
        if x.dtype not in dtypes:
            total = total + mx.square(mx.abs(x).astype(mx.float32)).sum()
    return mx.sqrt(total)


def clip_factor(norm: mx.array, max_norm: float) -> mx.array:
    """What the gradients are multiplied by."""
    return mx.minimum(max_norm / (norm + _TINY), 1.0)


def clip_by_global_norm(gradients: Any, max_norm: float) -> tuple[Any, mx.array]:
    """Scales all gradients alike where their joint norm exceeds `max_norm`, as
    `mlx.optimizers.clip_grad_norm`.

    Together at most ⌈arrays / 14⌉ + 1 launches, with 14 the arrays that can have a result of their
    own in a launch of 31 buffers; each dtype, and arrays of fewer than eight elements, are counted
    apart. On the CPU a result takes the memory of its gradient where nobody else holds that; of
    more than 29 arrays, 28 of the smallest for every 29 do not, but are parts of one array, whose
    memory is free when all of them are. On a GPU all results are such parts.
    The option `max_norm` of the optimizers of this module scales inside the step and needs no
    launch for it.

    Args:
        gradients: a tree of arrays. Other than float32, float16 and bfloat16 they are scaled by
            MLX.
        max_norm: the bound, at least 0.

    Returns:
        The tree with every array in its own dtype (integers become float32), and the norm before
        scaling. A norm that is not finite makes all gradients NaN or 0, as in MLX.
    """
    limit = check_max_norm("clip_by_global_norm", max_norm)
    leaves = _leaves("clip_by_global_norm", gradients)
    norm = norm_of(leaves)
    factor = clip_factor(norm, limit)
    fused = launch.settings().target != "reference"
    some = [i for i, x in enumerate(leaves) if fused and x.dtype in FLOATING]
    kernel = iter(scaled([leaves[i] for i in some], factor.reshape(1)))
    chosen = set(some)
    rest = iter([next(kernel) if i in chosen else clipped(x, factor) for i, x in enumerate(leaves)])
    return tree_map(lambda _: next(rest), gradients), norm


def clipped(x: mx.array, factor: mx.array) -> mx.array:
    """x times the factor by MLX; integers become float32."""
    y = x * factor
    return y.astype(x.dtype) if mx.issubdtype(x.dtype, mx.inexact) else y
