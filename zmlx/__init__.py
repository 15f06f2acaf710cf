"""zmlx: differentiable custom kernels for MLX, from one Metal source, on Metal, CUDA and the CPU.

zmlx.kernels      the catalogue: softmax, rms_norm, swiglu, cross_entropy, …
zmlx.expression   a differentiable kernel from one expression
zmlx.jit          a differentiable kernel from a scalar Python function
zmlx.metal        kernels from Metal source
zmlx.optimizers   AdamW, Adam, Lion and SGD with a step in few launches; clipping
zmlx.install      runs the Metal kernels of other code here too
zmlx.nn           drop-in layers, which choose between these kernels and MLX's ops
zmlx.patch        puts the kernels into a model of mlx.nn layers; zmlx.unpatch takes them out
zmlx.lm_loss      mlx-lm's training loss, without logits on a model patched for training
zmlx.prefer       what layers and patched models run
zmlx.target       runs the launches inside on another target
zmlx.use_openblas routes MLX's matrix products on the CPU to OpenBLAS
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .backend import require_mlx
from .version import __version__

if sys.argv[:1] != ["-m"]:  # `python -m zmlx` says it in a line, without a traceback
    require_mlx()

if TYPE_CHECKING:
    from . import autograd as autograd
    from . import codegen as codegen
    from . import elementwise as elementwise
    from . import kernels as kernels
    from . import launch as launch
    from . import metal as metal
    from . import nn as nn
    from . import optimizers as optimizers
    from . import patching as patching
    from . import registry as registry
    from . import rowwise as rowwise
    from . import testing as testing
    from .blas import use_openblas as use_openblas
    from .choice import prefer as prefer
    from .elementwise import expression as expression
    from .interop import install as install
    from .interop import uninstall as uninstall
    from .jit_compiler import jit as jit
    from .launch import target as target
    from .patching import lm_loss as lm_loss
    from .patching import patch as patch
    from .patching import smart_patch as smart_patch
    from .patching import unpatch as unpatch

_MODULES = (
    "autograd",
    "bench",
    "blas",
    "choice",
    "codegen",
    "elementwise",
    "expr",
    "interop",
    "kernels",
    "launch",
    "metal",
    "msl",
    "native",
    "nn",
    "optimizers",
    "patching",
    "registry",
    "rowwise",
    "testing",
)
_NAMES = {
    "expression": "elementwise",
    "install": "interop",
    "jit": "jit_compiler",
    "lm_loss": "patching",
    "patch": "patching",
    "prefer": "choice",
    "smart_patch": "patching",
    "target": "launch",
    "uninstall": "interop",
    "unpatch": "patching",
    "use_openblas": "blas",
}

__all__ = ["__version__", *_MODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'zmlx' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
