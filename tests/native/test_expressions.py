"""Collectives within one expression, of which some lanes skip one: lanes meet again behind it, in
whatever order the compiler evaluates arguments and operands."""

from __future__ import annotations

import mlx.core as mx
import pytest
from metal_source import Metal, in_every_schedule

HEADER = """
int some(int c) { if (c) return simd_sum(100); return 0; }
template <typename T> T some_of(T c) { if (c) return simd_sum(T(100)); return 0; }
void store(int c, thread int& to) { if (c) to = simd_sum(100); else to = 0; }
int plus(int a, int b) { return a + b; }
template <typename F> int apply(F f, int c) { return f(c); }
int first(int2 a, int2 b) { return a.x + b.x; }
int plus(int a, int b, int c) { return a + b + c; }
struct Some {
    int weight;
    int of(int c) const thread { if (c) return weight * simd_sum(1); return 0; }
    int operator()(int c) const thread { if (c) return weight * simd_sum(1); return 0; }
};
"""

#: Expressions to what they are in odd lanes and in even ones; c is true in the odd ones.
EXPRESSIONS = {
    "max(simd_sum(1), c ? simd_sum(100) : 0)": (1600, 32),
    "max(c ? simd_sum(100) : 0, simd_sum(1))": (1600, 32),
    "max(simd_sum(1), int(c && simd_any(i == 3)))": (32, 32),
    "max(simd_sum(1), int(c and simd_any(i == 3)))": (32, 32),
    "plus(simd_sum(1), c ? simd_sum(100) : 0)": (1632, 32),
    "plus(simd_sum(1), c ? simd_sum(100) : simd_sum(3))": (1632, 80),
    "plus(simd_sum(1), plus(c ? simd_sum(100) : 0, simd_sum(2)))": (1696, 96),
    "plus(c ? simd_sum(1) : 0, simd_sum(2), c ? 0 : simd_sum(3))": (80, 112),
    "simd_sum(1) + (c ? simd_sum(100) : 0)": (1632, 32),
    "(c ? simd_sum(100) : 0) + simd_sum(1)": (1632, 32),
    "simd_sum(1) < (c ? simd_sum(100) : 0)": (1, 0),
    "simd_sum(int(c && simd_all(c))) + simd_sum(1)": (48, 48),
    "(simd_sum(1), c ? simd_sum(2) : 5)": (32, 5),
    "plus(simd_sum(1), some(c))": (1632, 32),
    "plus(some(c), simd_sum(1))": (1632, 32),
    "plus(simd_sum(1), some_of<int>(c))": (1632, 32),
    "plus(simd_sum(1), some_of(int(c)))": (1632, 32),
    "plus(simd_sum(1), weigh.of(c))": (1632, 32),
    "plus(simd_sum(1), weighs[i % 2].of(c))": (1632, 32),
    "plus(simd_sum(1), (&weigh)->of(c))": (1632, 32),
    "plus(simd_sum(1), [&](int c) { if (c) return simd_sum(100); return 0; }(c))": (1632, 32),
    "(int2(simd_sum(1)) + [&] { if (c) return int2(simd_sum(100)); return int2(0); }()).x": (
        1632,
        32,
    ),
    "([&] { if (c) return int2(simd_sum(100)); return int2(0); }() + int2(simd_sum(1))).x": (
        1632,
        32,
    ),
    "plus(simd_sum(1), ([&](int c) { return c ? simd_sum(100) : 0; })(c))": (1632, 32),
    "plus(simd_sum(1), total(c))": (1632, 32),
    "plus(simd_sum(1), weigh(c))": (1632, 32),
    "plus(simd_sum(1), Some{100}(c))": (1632, 32),
    "plus(simd_sum(1), weigh.operator()(c))": (1632, 32),
    "plus(simd_sum(1), pointer(c))": (1632, 32),
    "plus(simd_sum(1), pointers[i / 32](c))": (1632, 32),
    "plus(simd_sum(1), (*pointer)(c))": (1632, 32),
    "plus(simd_sum(1), (i < 99 ? some : pointer)(c))": (1632, 32),
    "plus(simd_sum(1), apply(some, c))": (1632, 32),
    "plus(simd_sum(1), apply([&](int c) { return c ? simd_sum(100) : 0; }, c))": (1632, 32),
    "(int2{simd_sum(1)} + (c ? int2{simd_sum(100)} : int2{0})).x": (1632, 32),
    "int2{simd_sum(1), c ? simd_sum(100) : 0}.y": (1600, 0),
    "first(int2{simd_sum(1), 0}, int2{c ? simd_sum(100) : 0, 0})": (1632, 32),
    "first({simd_sum(1), 0}, {c ? simd_sum(100) : 0, 0})": (1632, 32),
    "some(some(c)) + simd_sum(1)": (1632, 32),
    "int(fma(simd_sum(1.0f), 2.0f, c ? simd_sum(100.0f) : 0.0f))": (1664, 64),
    "int(half(simd_sum(1)) + (c ? half(simd_sum(100)) : 0.0h))": (1632, 32),
    "int(bfloat(simd_sum(1)) * (c ? bfloat(simd_sum(2)) : bfloat(1)))": (1024, 32),
    "(int2(simd_sum(1)) + (c ? int2(simd_sum(100)) : int2(0))).x": (1632, 32),
    "int2(simd_sum(1), c ? simd_sum(100) : 0).y": (1600, 0),
    "int(dot(float2(simd_sum(1)), c ? float2(1, 2) * simd_sum(1.0f) : float2(1)))": (1536, 64),
    "c ? simd_sum(1) : plus(simd_sum(2), i < 16 ? simd_sum(1) - 8 : 0)": (16, 32),
}

STATEMENTS = {
    "int a[64] = {}; a[simd_sum(1)] = c ? simd_sum(100) : 7; r = a[32];": (1600, 7),
    "int a[64] = {}; a[simd_sum(1)] += c ? simd_sum(100) : 7; r = a[32];": (1600, 7),
    "int a[2] = {simd_sum(1), c ? simd_sum(100) : 0}; r = a[0] + a[1];": (1632, 32),
    "int a = simd_sum(1), b = c ? simd_sum(100) : 0; r = a + b;": (1632, 32),
    "store(c, r), r += simd_sum(1);": (1632, 32),
    "if (plus(simd_sum(1), c ? simd_sum(100) : 0) > 99) r = simd_sum(2); else r = 7;": (32, 7),
    "r = 0; while (r < (c ? simd_sum(3) : 5)) r += simd_sum(1);": (48, 32),
    "for (int k = 0; k < 3; k += simd_any(true) ? simd_sum(1) / 32 : 9) {"
    " if (c) continue; r += simd_sum(1); }": (0, 48),
    "for (int k = 0; k < 3; k += c ? 1 : simd_max(1)) { if (c) continue; r += simd_sum(1); }": (
        0,
        48,
    ),
    "int k = 0; do { ++k; if (c) continue; r += simd_sum(1); }"
    " while (plus(simd_sum(1), c ? simd_sum(1) : 0) > 31 && k < 3);": (0, 48),
    "switch (plus(simd_sum(1), c ? simd_sum(1) : 0)) { case 48: r = simd_sum(1); break;"
    " default: r = simd_sum(2); }": (16, 32),
}

CASES = {f"r = {e};": values for e, values in EXPRESSIONS.items()} | STATEMENTS


@pytest.mark.parametrize(("text", "values"), CASES.items(), ids=CASES)
def test_each_collective_combines_the_lanes_that_reach_it(
    text: str, values: tuple[int, int]
) -> None:
    source = f"""
        uint i = thread_position_in_grid.x;
        bool c = i % 2;
        int r = 0;
        Some weigh{{100}}, weighs[2] = {{weigh, weigh}};
        auto total = [&](int c) {{ if (c) return simd_sum(100); return 0; }};
        int (*pointer)(int) = some, (*pointers[1])(int) = {{some}};
        {text}
        out[i] = r;
    """
    odd, even = values
    kernel = Metal(source, output=(32, mx.int32), grid=32, group=32, header=HEADER)
    assert in_every_schedule(kernel).tolist() == [even, odd] * 16
