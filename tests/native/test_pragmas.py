"""Pragmas that change what a kernel computes are kept, or named."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_source import run


@pytest.mark.parametrize("pragma", [
    "#pragma METAL fp contract(off)", "# pragma clang fp contract( off )",
    "#pragma STDC FP_CONTRACT OFF", '_Pragma("METAL fp contract(off)")',
    '_Pragma("clang fp contract(off)")',
])  # fmt: skip
def test_products_are_rounded_where_the_source_says_so(pragma: str) -> None:
    source = "uint i = thread_position_in_grid.x; out[i] = rest(x[i]);"
    header = f"float rest(float a) {{\n{pragma}\nreturn a * a - (1.0f + 0x1p-11f); }}\n"
    x = np.full(64, 1 + 2**-12, np.float32)
    result = run(source, {"x": x}, (64, mx.float32), 64, 1, header=header)
    np.testing.assert_array_equal(result, np.zeros(64))


def test_a_pragma_that_packs_is_named() -> None:
    header = "#pragma pack(push, 1)\nstruct S { uchar c; half h; };\n#pragma pack(pop)\n"
    with pytest.raises(RuntimeError, match=r"line 1 of the header: #pragma pack is not supported"):
        run("out[0] = sizeof(S);", {}, ((1,), mx.float32), 1, 1, header=header)
