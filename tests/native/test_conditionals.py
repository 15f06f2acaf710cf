"""`c ? a : b` of anything but half and bfloat is the same where a kernel names one of them, too."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_source import run

HEADER = """
enum { NONE = 9 };
enum Kind { first, second };
enum class Strong { one, two };
struct Bits { uint a : 3; uint b : 5; };
struct Pair { int a, b; Pair(int x) : a(x), b(x) {} };
inline void bump(thread int& a) { a += 1; }
template <typename T> void raise(thread T& a, T by) { a += by; }
inline int twice(int a) { return a * 2; }
template <typename T> int kind(T) { return sizeof(T) * 2 + (T(-1) < T(0)); }
constant constexpr int table[2] = {4, 5};
"""
REFERENCES = """
struct Box { int v; thread int& of(thread int& a, bool c) { return c ? v : a; } };
inline thread int& pick(thread int& a, thread int& b, bool c) { return c ? a : b; }
inline auto pick_after(thread int& a, thread int& b, bool c) -> thread int& { return c ? a : b; }
"""

#: Every one sets r, from i, the thread, c, which is true in odd ones, and p, q and s.
SOURCES = [
    # integers that are promoted, and those that are not
    "short a = -1; ushort b = 1; r = c ? a : b;",
    "char a = -3; uchar b = 1; r = c ? a : b;",
    "char a = -3; ushort b = 1; float f = c ? a : b; r = f;",
    "uchar a = 1; r = sizeof(c ? true : a) * 10 + sizeof(c ? a : a);",
    "short a = -1; r = kind(c ? a : a) * 100 + kind(c ? a : short(2));",
    "uint a = 1; r = (c ? -1 : a) > 0;",
    "long a = -1; uint b = 1; r = (c ? a : b) < 0;",
    "int a = 3; float b = 2.5f; r = 2 * (c ? a : b);",
    "bool a = c, b = !c; r = kind(c ? a : b);",
    # neither numbers nor classes
    "c ? (void)(r = 3) : (void)(r = 4);",
    "c ? bump(p) : raise(q, 3); r = p * 10 + q;",
    "const device int* a = c ? x : 0; r = a != nullptr;",
    "const device int* a = c ? 0 : x + 1; r = a != nullptr;",
    "thread int* a = c ? &p : nullptr; r = a ? *a : 7;",
    "r = (c ? table : table + 1)[0];",
    # enumerators
    "r = c ? NONE : 3;",
    "Kind k = c ? first : second; Kind l = c ? k : second; r = k * 10 + l;",
    "Kind k = second; r = c ? k : 5; r += 10 * (c ? 2.5f : k);",
    "Strong k = c ? Strong::one : Strong::two; r = int(k);",
    # places
    "Bits b; b.a = 5; b.b = 7; r = c ? b.a : b.b; (c ? b.a : b.b) = 2; r += b.a * 10 + b.b * 100;",
    "bump(c ? p : q);",
    "raise(c ? p : q, twice(c ? q : p));",
    "raise<int>(c ? (p) : q, 5);",
    "pick(p, q, c) = 5;",
    "pick_after(p, q, c) = 5;",
    "Box b{3}; b.of(p, c) = 7; r = b.v; bump(c ? b.v : p); r += b.v * 100;",
    "auto by = [](thread int& a, thread int& b, bool c) -> thread int& { return c ? a : b; };"
    " by(p, q, c) = 5;",
    "thread int& a(c ? p : q); a = 5;",
    "thread int& a{c ? p : q}; a = 5;",
    "thread int& a = c ? p : q; a = 5;",
    "thread int& a = (c ? p : q); a = 5;",
    "((c ? p : q)) = 5; bump((c ? q : s));",
    "(c ? p : i & 2 ? q : s) = 7;",
    "(c ? (i & 2 ? q : s) : (p)) += 7;",
    "bump(c ? p : i & 2 ? q : s);",
    "thread int* a = &(c ? p : i & 2 ? q : s); *a = 4;",
    "int a[2] = {1, 2}; (c ? a[0] : a[i / 8]) = 4; r = a[0] * 10 + a[1];",
    "volatile int a = 3; r = c ? a : p; (c ? a : a) = 4; r += a * 10;",
    "const int a = 3; r = c ? a : p; r += c ? p : a;",
    # whole expressions
    "r = c ? p = 5 : (q = 6);",
    "r = c ? i & 2 ? 1 : 2u : i & 4 ? 3 : short(4);",
    "r = (c ? 1 : 2) & twice(c ? p : q);",
    "constexpr int n = sizeof(int) > 2 ? 3 : 4; int a[n > 2 ? n : 1] = {1, 2}; r = a[c ? 1 : 2];",
    "switch (i) { case NONE > 3 ? 2 : 1: r = 5; }",
    "r = (c ? int2(1) : int2(p, q)).y + (c ? float4(2) : 1.0f).x + (c ? 3 : float4(4)).w;",
    "r = [&](int a = 4 > 3 ? 5 : 6) { return c ? a : p; }();",
]


@pytest.mark.parametrize("source", SOURCES)
def test_half_elsewhere_changes_nothing(source: str) -> None:
    header = HEADER + REFERENCES * ("pick" in source or "Box" in source)

    def result(narrow: str) -> np.ndarray:
        body = f"""
            uint i = thread_position_in_grid.x;
            bool c = i % 2;
            int r = 0, p = 1, q = 2, s = 3;
            {narrow}
            {source}
            out[i] = r + 1000 * p + 10000 * q + 100000 * s;
        """
        return run(body, {"x": mx.ones(8, mx.int32)}, (8, mx.int32), 8, 8, header=header)

    found = result("half narrow = 1;").tolist()
    assert found == result("").tolist() == result("bfloat narrow = 1;").tolist()


def test_a_variable_may_have_the_name_of_a_function_template() -> None:
    header = """
        template <typename T> T twice(T a) { return a + a; }
        struct Two { float a; template <typename T> operator vec<T, 2>() const { return T(a); } };
    """
    source = """
        float b = x[0], limit = twice<float>(b) + (twice<int>(1) > 1 ? 0 : 9);
        half h = 2049.0h / 2;
        vec<half, 2> none = Two{0};
        limit += none.x;
        int twice = 2;
        float r = twice < 3 ? h : b > 2;
        out[0] = r * 2 + limit;
    """
    found = run(source, {"x": mx.ones(8)}, (1, mx.float32), header=header)
    assert found.item() == 2050
