"""MLX's optimizers with the step of a whole parameter tree in a few launches.

AdamW Adam Lion SGD    drop-in for those of `mlx.optimizers`, with the same state tree
clip_by_global_norm    gradients scaled so that their joint norm has a bound
global_norm            that norm

Every other name is `mlx.optimizers`' own: schedules, MultiOptimizer, clip_grad_norm, Adafactor …

    >>> optimizer = zmlx.optimizers.AdamW(1e-3, moment_dtype=mx.float32, max_norm=1.0)
    >>> loss, gradients = nn.value_and_grad(model, loss_of)(batch)
    >>> optimizer.update(model, gradients)
"""

from typing import Any

import mlx.optimizers as _mlx

from ..stand_in import public_names, share_submodules
from .clip import clip_by_global_norm, global_norm
from .optimizers import SGD, Adam, AdamW, Lion

__all__ = ["SGD", "Adam", "AdamW", "Lion", "clip_by_global_norm", "global_norm"]
__all__ = sorted({*__all__, *public_names(_mlx)})

share_submodules(__name__, _mlx)


def __getattr__(name: str) -> Any:
    return getattr(_mlx, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_mlx)})
