"""Turns a tree of `mlx.nn` layers into zmlx's, in one call."""

from __future__ import annotations

import mlx.nn as mnn

from .activations import LAYERS
from .attention import MultiHeadAttention
from .dropout import Dropout
from .normalization import GroupNorm, LayerNorm, RMSNorm
from .positions import RoPE

#: MLX's classes, and those that take their place.
CLASSES: dict[type[mnn.Module], type[mnn.Module]] = {
    **{getattr(mnn, name): layer for name, layer in LAYERS.items()},
    mnn.RMSNorm: RMSNorm,
    mnn.LayerNorm: LayerNorm,
    mnn.GroupNorm: GroupNorm,
    mnn.Dropout: Dropout,
    mnn.RoPE: RoPE,
    mnn.MultiHeadAttention: MultiHeadAttention,
}


def convert(module: mnn.Module) -> mnn.Module:
    """Makes every `mlx.nn` layer in `module` that zmlx has the layer of `zmlx.nn`, in place.

    Layers keep their identity, parameters, frozen state and mode; only their class changes, so
    that optimizers and checkpoints go on as before. Classes derived from those of `mlx.nn` are
    left alone: `zmlx.patch` looks into them.

    Returns:
        `module`.

    Raises:
        ValueError: where such a layer is patched, which `zmlx.unpatch` undoes.
    """
    if not isinstance(module, mnn.Module):
        raise TypeError(
            f"[convert] 'module' must be an mlx.nn.Module but got {type(module).__name__}."
        )
    layers = module.modules()
    patched = sum(getattr(type(layer), "_zmlx_class", None) in CLASSES for layer in layers)
    if patched:
        raise ValueError(
            f"[convert] 'module' must not be patched (zmlx.unpatch undoes it) but got {patched} "
            f"patched layer{'s' * (patched > 1)}."
        )
    for layer in layers:
        ours = CLASSES.get(type(layer))
        if ours is not None:
            layer.__class__ = ours
    return module
