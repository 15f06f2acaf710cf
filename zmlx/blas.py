"""MLX's matrix products on OpenBLAS.

MLX's Linux wheel runs them on the reference BLAS, many times slower. `use_openblas()` sends them,
in this process, to the OpenBLAS of the wheel `scipy-openblas32`, which the extra `cpu` installs:
float32, float64 and complex64, and the half-precision products that MLX computes in float32. It may
be called at any time, also after earlier products.
"""

from __future__ import annotations

import sys
from pathlib import Path


def use_openblas(threads: int | None = None) -> None:
    """Route MLX's CPU matrix products to OpenBLAS. A second call only sets the threads.

    Args:
        threads: threads that a product uses, from 1 on; None: as many as zmlx's own launches.

    Raises:
        ImportError: `scipy-openblas32` is not installed, or the native core cannot be built.
        RuntimeError: not Linux, or this MLX does not import its BLAS.
        TypeError, ValueError: `threads` is no int, or not positive.
    """
    library = openblas_path()
    from zmlx.arguments import check_integer

    if threads is not None and check_integer("use_openblas", "threads", threads) < 1:
        raise ValueError(f"[use_openblas] 'threads' must be positive but got {threads}.")
    from zmlx import native

    core = native.load()
    core.use_blas(str(library), "scipy_", threads or core.threads())


def openblas_path() -> Path:
    """The library that `use_openblas` takes; raises as it does where there is none."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            "[use_openblas] Only MLX on Linux runs on the reference BLAS: nothing is to be routed."
        )
    try:
        import scipy_openblas32  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(
            "[use_openblas] OpenBLAS is not installed: pip install scipy-openblas32"
        ) from None
    return Path(scipy_openblas32.get_lib_dir(), scipy_openblas32.get_library(fullname=True))


def is_openblas_used() -> bool:
    """Whether `use_openblas()` has taken effect in this process."""
    from zmlx import native

    return native.load.cache_info().currsize > 0 and bool(native.load().blas_in_use())
