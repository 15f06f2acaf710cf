"""Drop-in layers: `import zmlx.nn as nn` in place of `import mlx.nn as nn`.

What zmlx has a kernel for is here; every other name is `mlx.nn`'s own. Each layer runs zmlx or MLX
by `zmlx.choice`, and its repr says which.

normalization  RMSNorm LayerNorm GroupNorm
dropout        Dropout
activations    functions and layers
mlp            GatedMLP SwiGLU GeGLU
positions      RoPE
attention      MultiHeadAttention, Attention (grouped keys and values, cache)
losses         cross_entropy linear_cross_entropy
convert        a tree of mlx.nn layers to these, in one call
"""

from ..backend import require_mlx

require_mlx()

from typing import Any

import mlx.nn as _mlx

from . import losses
from .activations import FUNCTIONS, LAYERS
from .attention import Attention, MultiHeadAttention
from .convert import convert
from .dropout import Dropout
from .mlp import GatedMLP, GeGLU, SwiGLU
from .normalization import GroupNorm, LayerNorm, RMSNorm
from .positions import RoPE

_CHOSEN: dict[str, Any] = {**FUNCTIONS, **LAYERS}

__all__ = [
    "Attention",
    "Dropout",
    "GatedMLP",
    "GeGLU",
    "GroupNorm",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
    "RoPE",
    "SwiGLU",
    "convert",
    "losses",
]
__all__ += sorted(_CHOSEN)


def __getattr__(name: str) -> Any:
    if name in _CHOSEN:
        return _CHOSEN[name]
    return getattr(_mlx, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_mlx)})
