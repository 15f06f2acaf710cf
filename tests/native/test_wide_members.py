"""Members of wide types lie where Metal has them, though vectors are aligned to 8 bytes here."""

from __future__ import annotations

import pytest

import zmlx
from zmlx.language.row import Row, X

WIDE = Row(
    "const device Arrays* a = (const device Arrays*)out; const device Any<float4>* b = nullptr;"
    "r = sizeof(Arrays) + 100 * sizeof(Any<float4>) + 10000 * sizeof(Any<float>)"
    "+ 100000 * int(alignof(float3) + alignof(half4)) + (a && !b) * x[i];",
    64 + 3200 + 80000 + 2400000 + X,
    """
        struct Arrays { int n; array<float4, 2> a; int b; };
        template <typename T> struct Any { int n; T v; };
        static_assert(alignof(Any<float4>) == 16 && alignof(float4x4) == 16);
        """,
)


@pytest.mark.parametrize("group", [1, 8])
def test_arrays_and_templates_of_wide_types(group: int) -> None:
    with zmlx.target("cpu"):
        WIDE.check(group, meet=group > 1)
