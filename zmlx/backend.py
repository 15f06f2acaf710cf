"""MLX's back ends: which one is installed, and what to do where `mlx.core` does not load.

On Linux the wheel `mlx` has no back end of its own. `mlx-cpu`, `mlx-cuda-12` and `mlx-cuda-13` each
bring one, all three as the same file `libmlx.so`, so that exactly one of them must be installed.
"""

from __future__ import annotations

import sys

_BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")


def require_mlx() -> None:
    """Imports `mlx.core`, or raises an `ImportError` that names the remedy."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ImportError(f"[zmlx] MLX does not load: {_explain(error)}") from None


def installed() -> dict[str, str]:
    """Versions of the installed distributions that hold a back end, by name."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _BACKENDS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def mlx_version() -> str | None:
    """The version of the installed distribution `mlx`, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mlx")
    except PackageNotFoundError:
        return None


def conflict() -> str | None:
    """What is wrong with the installed back ends, with the remedy, or None."""
    found, mlx = installed(), mlx_version()
    if len(found) > 1:
        names = " and ".join(found)
        return (
            f"{names} are installed together and overwrite each other's libmlx.so. "
            f"Remedy: pip uninstall {' '.join(found)}; then install one of them again."
        )
    for name, version in found.items():
        if version != mlx:
            return (
                f"mlx {mlx} and {name} {version} must have the same version. "
                f"Remedy: pip install {name}=={mlx}"
            )
    return None


def _explain(error: ImportError) -> str:
    if mlx_version() is None:
        return f"it is not installed ({error}). Remedy: pip install {_example()}"
    if not installed():
        return f"it is installed without a back end ({error}). Remedy: pip install {_example()}"
    return conflict() or f"{error}. Remedy: pip install --force-reinstall {_example()}"


def _example() -> str:
    if sys.platform == "darwin":
        return "mlx"
    return "'mlx[cpu]', or 'mlx[cuda12]' or 'mlx[cuda13]' for an NVIDIA GPU"
