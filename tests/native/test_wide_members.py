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


@pytest.mark.parametrize(
    ("declaration", "size"),
    [
        ("typedef vec<float, 4> V;", 32),
        ("typedef const float4 V;", 32),
        ("typedef metal::float4 W, V;", 32),
        ("typedef float4 V[2];", 48),
        ("using V = metal::float4;", 32),
        ("using W = float4; using V = const W;", 32),
        ("using V = matrix_float2x4;", 48),
        ("using V = matrix<float, 2, 4>;", 48),
        ("struct Types { using Wide = float4; }; typedef Types::Wide V;", 32),
    ],
)
def test_members_of_types_by_any_name(declaration: str, size: int) -> None:
    row = Row("r = sizeof(S) + x[i];", size + X, declaration + "struct S { float a; V v; };")
    with zmlx.target("cpu"):
        row.check(1)


DEDUCED = """
template <typename V> struct Pair { float a; V v; };
template <typename V> int size(V) { return sizeof(Pair<V>); }
template <typename V> int own_size(V) { struct Own { float a; V v; }; return sizeof(Own); }
"""


def test_members_of_types_that_a_call_deduces() -> None:
    body = "r = size(float4(1)) + 100 * own_size(float3(1)) + 10000 * own_size(1.0f) + x[i];"
    with zmlx.target("cpu"):
        Row(body, 32 + 3200 + 80000 + X, DEDUCED).check(1)


PACKED = Row(
    "packed_t packed = {uchar(1), half(2), float3(3, 4, 5), 6};"
    "packed.h += half(1); thread half& h = packed.h; h *= half(2); packed.v.y += x[i];"
    "const device Behind* b = (const device Behind*)((const device uchar*)out + 1);"
    "r = sizeof(packed_t) + 100 * sizeof(Behind) + 10000 * sizeof(One<half>) + float(packed.h)"
    "+ packed.v.y + packed.i + (b == nullptr);",
    23 + 1500 + 30000 + 6 + 4 + X + 6,
    """
        typedef struct __attribute__((packed)) { uchar c; half h; float3 v; int i; } packed_t;
        struct Behind { uchar c; packed_float3 v; half h; } __attribute__((packed));
        template <typename T> struct [[gnu::packed]] One { uchar c; T t; };
        struct Between { uchar c; half packed; };
        static_assert(sizeof(Between) == 4 && sizeof(Behind[2]) == 30);
        """,
)


@pytest.mark.parametrize("group", [1, 8])
def test_packed_members_have_no_gaps(group: int) -> None:
    with zmlx.target("cpu"):
        PACKED.check(group, meet=group > 1)
