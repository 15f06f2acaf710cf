"""Drop-in layers: `import zmlx.nn as nn` in place of `import mlx.nn as nn`.

What zmlx has a kernel for is here; every other name is `mlx.nn`'s own. Each layer runs zmlx or MLX
by `zmlx.choice`, and its repr says which. The modules `init`, `utils` and `layers` are `mlx.nn`'s.

normalization  RMSNorm LayerNorm GroupNorm
dropout        Dropout
activations    functions and layers
mlp            GatedMLP SwiGLU GeGLU
positions      RoPE
experts        SwitchLinear QuantizedSwitchLinear SwitchGLU, stacked as mlx-lm's
moe            MoE (router and experts)
attention      MultiHeadAttention, Attention (grouped keys and values, cache)
paged          PagedAttention slot_mapping reshape_and_cache
losses         cross_entropy linear_cross_entropy
convert        a tree of mlx.nn layers to these, in one call
"""

from typing import Any

import mlx.nn as _mlx

from ..stand_in import public_names, share_submodules
from . import losses
from .activations import FUNCTIONS, LAYERS
from .attention import Attention, MultiHeadAttention
from .convert import convert
from .dropout import Dropout
from .experts import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
from .mlp import GatedMLP, GeGLU, SwiGLU
from .moe import MoE
from .normalization import GroupNorm, LayerNorm, RMSNorm
from .paged import PagedAttention, reshape_and_cache, slot_mapping
from .positions import RoPE

_CHOSEN: dict[str, Any] = {**FUNCTIONS, **LAYERS}

__all__ = [
    "Attention",
    "Dropout",
    "GatedMLP",
    "GeGLU",
    "GroupNorm",
    "LayerNorm",
    "MoE",
    "MultiHeadAttention",
    "PagedAttention",
    "QuantizedSwitchLinear",
    "RMSNorm",
    "RoPE",
    "SwiGLU",
    "SwitchGLU",
    "SwitchLinear",
    "convert",
    "losses",
    "reshape_and_cache",
    "slot_mapping",
]
__all__ = sorted({*__all__, *_CHOSEN, *public_names(_mlx)})

share_submodules(__name__, _mlx)


def __getattr__(name: str) -> Any:
    if name in _CHOSEN:
        return _CHOSEN[name]
    return getattr(_mlx, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_mlx)})
