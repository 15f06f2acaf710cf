"""What a module needs to be imported in the place of one of MLX's."""

from __future__ import annotations

import sys
from types import ModuleType


def public_names(module: ModuleType) -> list[str]:
    """The names that `from module import *` binds."""
    return getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])


def share_submodules(name: str, module: ModuleType) -> None:
    """Lets `import name.x` find a submodule x of `module`, itself and no copy, where the package
    `name` has not imported an x of its own."""
    for path, submodule in list(sys.modules.items()):
        if path.startswith(f"{module.__name__}."):
            sys.modules.setdefault(name + path.removeprefix(module.__name__), submodule)
