"""MLX's matrix products on OpenBLAS, each claim in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("scipy_openblas32")

SETUP = """
import sys
import mlx.core as mx
import numpy as np
from zmlx import blas
mx.random.seed(0)
a, b = mx.random.normal((640, 768)), mx.random.normal((768, 512))
mx.eval(a, b)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_products_after_earlier_products_are_routed() -> None:
    # 768 terms added in another order have other roundings.
    code = """
before = a @ b
mx.eval(before)
assert not blas.is_openblas_used() and mx.array_equal(a @ b, before)
blas.use_openblas()
print(blas.is_openblas_used(), mx.array_equal(a @ b, before).item())
"""
    assert run(code) == "True False"


def test_results_agree_for_every_routed_type() -> None:
    code = """
def products():
    with mx.stream(mx.cpu):
        c = (a + 1j * a) @ (b - 2j * b)
        d = a.astype(mx.float64) @ b.astype(mx.float64)
        h = (a.astype(mx.float16) @ b.astype(mx.float16)).astype(mx.float32)
        mx.eval(c, d, h)
        return [np.array(a @ b), np.array(c), np.array(d), np.array(h)]
before = products()
blas.use_openblas()
for x, y, eps in zip(before, products(), (1e-5, 1e-5, 1e-13, 1e-2)):
    assert np.abs(x - y).max() <= eps * np.abs(x).max(), eps
print("agree")
"""
    assert run(code) == "agree"


def test_a_second_call_changes_only_the_threads() -> None:
    code = """
blas.use_openblas()
blas.use_openblas(threads=1)
print(blas.is_openblas_used(), abs(a @ b - a @ b).max().item())
"""
    assert run(code) == "True 0.0"


def test_a_missing_package_is_named_with_its_remedy() -> None:
    code = """
sys.modules["scipy_openblas32"] = None
try:
    blas.use_openblas()
except ImportError as error:
    print(error, blas.is_openblas_used())
"""
    assert run(code) == (
        "[use_openblas] OpenBLAS is not installed: pip install scipy-openblas32 False"
    )


def test_other_platforms_and_bad_arguments_raise() -> None:
    code = """
for threads in (0, "2"):
    try:
        blas.use_openblas(threads=threads)
    except (TypeError, ValueError) as error:
        print(error)
from zmlx import native
core = native.load()
for library, prefix in (("/no/such.so", "scipy_"), ("libc.so.6", "scipy_")):
    try:
        core.use_blas(library, prefix, 1)
    except RuntimeError as error:
        print(error)
print(blas.is_openblas_used())
sys.platform = "darwin"
try:
    blas.use_openblas()
except RuntimeError as error:
    print(error)
"""
    lines = run(code).splitlines()
    assert lines[0] == "[use_openblas] 'threads' must be positive but got 0."
    assert lines[1] == "[use_openblas] 'threads' must be an int but got str."
    assert "OpenBLAS does not load: /no/such.so" in lines[2]
    assert lines[3] == "[use_openblas] libc.so.6 has no scipy_cblas_sgemm."
    assert lines[4] == "False"
    assert "Only MLX on Linux" in lines[5]
