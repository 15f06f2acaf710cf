"""Declarations in front of a kernel: functions, overloads and types, and what they are named."""

from __future__ import annotations

import mlx.core as mx
import pytest
from metal_source import run


def value(source: str, header: str = "") -> float:
    """What a kernel of one thread stores."""
    return run(source, output=(1, mx.float32), header=header).item()


def test_a_pragma_before_a_function_is_no_part_of_its_name() -> None:
    header = """
        _Pragma("unused") float once(float a) { return a; }
        _Pragma("unused") float twice(float a) { return 2 * a; }
    """
    assert value("out[0] = once(1) + twice(2);", header) == 5


# ---- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "member",
    [
        "Pair(float4 w) : v(w.zw) {}",
        "Pair(float4 w) : v{w.zw} {}",
        "Pair(float4 w) { v = w.zw; } float2 plus(float2 zw) const { return v + zw; }",
        "float4 w; float2 u = w.zw, t = vec<float, 2>(1, 2); Pair(float4 a) : v(a.zw), w(a) {}",
        "Pair(float4 w) { v = w.zw; } float2 zw() const { return v; }",
        "Pair(float4 w) { v = w.zw; } template <int zw> int has() const { return zw; }",
    ],
)
def test_what_is_no_field_of_a_struct_leaves_swizzles(member: str) -> None:
    header = f"struct Pair {{ float2 v; {member} }};\n"
    source = "float4 w(1, 2, 3, 4); Pair p(w); out[0] = p.v.x + 10 * p.v.y + 100 * w.zw.y;"
    assert value(source, header) == 443


@pytest.mark.parametrize(
    "fields",
    [
        "float2 xy; float ab;",
        "float2 a, xy = float2(0); float ab{0};",
        "vec<float, 2> a, xy; uint ab : 4;",
        "union { struct { float2 xy; }; float z[2]; }; float ab [[maybe_unused]];",
        "struct Inner { float a; } inner; float2 xy __attribute__((unused)); float ab;",
        "void f(float4 a) { xy = a.zw; } float ab; float2 xy;",
    ],
)
def test_a_field_may_look_like_a_swizzle(fields: str) -> None:
    source = "Box b; b.xy = float2(1, 2); b.ab = 3; out[0] = b.xy.x + 10 * b.xy.y + 100 * b.ab;"
    assert value(source, f"struct Box {{ {fields} }};\n") == 321
