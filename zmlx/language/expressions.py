"""Expressions and statements: literals, swizzles, conditionals, plain statements."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .row import INDEX, Row, X

LITERALS = {
    "an unsuffixed literal is a float": Row("r = sizeof(1.0) + sizeof(1e3) + sizeof(.5);", 12),
    "arithmetic of literals rounds to float": Row("r = (16777216.0 + 1.0) - 16777216.0;", 0),
    "hexadecimal floats": Row("r = 0x1p-3 + 0x1.8p1f;", 3.125),
    "integers keep their types": Row("r = sizeof(1u) + sizeof(1ul) + 0xEF + 0b11 + 1'000;", 1254),
    "half literals": Row("r = sizeof(1.5h) + 1.5h + 2e1H + 1.h;", 24.5),
    "bfloat literals": Row("r = sizeof(1.5bf) + 1.5bf + float(0x1p1BF);", 5.5),
    "a half literal rounds": Row("r = float(0.1h) == float(half(0.1f));", 1),
    "characters": Row("r = 'A' + int('\\n');", 75),
}

SWIZZLES = {
    "read": Row(
        "float4 v(x[i], 1, 2, 3); float3 w = v.zyx;"
        "r = w.x + w.y * 10 + v.xw.y + v.rgb.b + v.wzyx.w;",
        2 + 10 + 3 + 2 + X,
    ),
    "assigned": Row(
        "float4 v(0); v.xy = float2(x[i], 1); v.wz = v.xy; v.yx += 2.0; v.zw *= float2(2, 3);\n"
        "r = v.x + v.y * 1000 + v.z * 10 + v.w;",
        (X + 2) + 3000 + 20 + 3 * X,
    ),
    "of swizzles, their components and subscripts": Row(
        "float4 v(0); v.xyz.xy = float2(x[i], 1); v.wzy.y += 2.0; v.zw[1] = 3; (v.xw).yx = v.xw;\n"
        "float4 w(0); w.xy = w.zw = v.xy; int4 k(0); k.yz++; --k.yz.x;\n"
        "r = v.x + v.y * 10 + v.z * 100 + v.w * 1000 + w.x * 4 + k.y + k.z;",
        3 + 10 + 200 + 1000 * X + 4 * 3 + 1,
    ),
    "through pointers and of results": Row(
        "float4 v(x[i], 1, 2, 3); thread float4* p = &v; p->yz = p->zy;\n"
        "r = p->xy.y + float4(v).yz.x + make(x[i]).yx.x;",
        2 + 2 + X,
        "float2 make(float a) { return float2(1, a); }",
    ),
    "in a template": Row(
        "r = swapped<float2>(float2(1, x[i])).x;",
        X,
        "template <typename V> V swapped(V v) { return v.yx; }",
    ),
    "fields that look like swizzles": Row(
        "Box b; b.xy = float2(x[i], 2); b.ab = 3; r = b.xy.x + b.xy.y + b.ab;",
        X + 5,
        "struct Box { float2 xy; float ab; };",
    ),
    "beside fields of the same names": Row(
        "Box b = {x[i], {1, 2, x[i]}}; Boxes s = {{b, b}}; float4 v(x[i], 1, 2, 3);\n"
        "v.rgb = s.all[1].rgb.bgr; s.all[0].rgb.xy = v.xy.yx; (&v)->xy.y += 1; (&b)->rgb.r++;\n"
        "thread float3& place = b.rgb; place.z = 0; half4 h(v); half k = i > 3 ? h.xy.y : b.xy;\n"
        "decltype(b.xy) c = b.xy; c *= 2; v.xy.x += c;\n"
        "r = v.x + 10 * first(v) + 100 * first(b) + s.all[0].rgb.x + b.rgb.r + made(x[i]).xy + k;",
        (X + 2 * X) + 10 * (3 * X) + 100 * X + 2 + 2 + X + np.where(INDEX > 3, 3, X),
        "struct Box { float xy; float3 rgb; }; struct Boxes { Box all[2]; };\n"
        "Box made(float a) { return {a, 0}; }\n"
        "float first(Box b) { return b.xy; }\n"
        "float first(float4 v) { return v.xy.x; }",
        on_cuda=False,
    ),
}

CONDITIONALS = {
    "half and float": Row("half h = x[i]; r = (i > 3 ? h : 0.25f) + (i > 3 ? 0.25 : h);", X + 0.25),
    "stored to": Row(
        "half a = 1, b = 2, h[2] = {3, 4}; float f = 5, g = 6;\n"
        "(i > 3 ? a : b) = 7; (i > 3 ? h[0] : h[1]) += 1; (i > 3 ? f : g)++;\n"
        "thread float& k = i > 3 ? f : g; k *= 2;\n"
        "r = float(a) + 10.0 * b + 100.0 * h[0] + 1000.0 * h[1] + f * 10000 + g * 100000;",
        np.where(
            INDEX > 3, 7 + 20 + 400 + 4000 + 120000 + 600000, 1 + 70 + 300 + 5000 + 50000 + 1400000
        ),
    ),
    "a half literal and others": Row(
        "r = (i > 3 ? 2.5h : 1.0f) + (i > 3 ? 1 : 2.5h);", np.where(INDEX > 3, 3.5, 3.5)
    ),
    "half and half stay half": Row(
        "half h = 1.0h, g = 0.0004h; auto a = i > 3 ? h : g; r = sizeof(a) + float(a + g) * 0;", 2
    ),
    "half and int": Row(
        "half h = 0.5h; auto a = i > 3 ? h : 0; r = a + sizeof(a);", (INDEX > 3) / 2 + 2
    ),
    "bfloat and int": Row(
        "bfloat b = 0.5bf; auto a = i > 3 ? b : 0; r = a + sizeof(a);", (INDEX > 3) / 2 + 2
    ),
    "nested": Row(
        "half h = 2.0h; r = i < 2 ? h : i < 4 ? 0.5 : i < 6 ? h + h : 1u;",
        np.select([INDEX < 2, INDEX < 4, INDEX < 6], [2, 0.5, 4], 1),
    ),
    "in arguments, subscripts and initialisers": Row(
        "half h = x[i]; float a[2] = {i > 3 ? h : 1.0f, 5};"
        "r = max(i > 3 ? h : 0.0f, a[i > 3 ? 1 : 0]);",
        np.where(INDEX > 3, np.maximum(X, 5), 1),
    ),
    "vectors, pointers and structs pass": Row(
        "half k = 1; Pair p = {1, 2}, q = {3, 4}; const device float* a = i > 3 ? x : x + 1;\n"
        "float2 v = i > 3 ? float2(1) : float2(2, 3); r = a[0] + v.y + (i > 3 ? p : q).b * k;",
        np.where(INDEX > 3, 1.5 + 1 + 2, -2 + 3 + 4),
        "struct Pair { float a, b; };",
    ),
    "after template lists": Row(
        "half h = 2; r = metal::is_same_v<T, half> ? h : 0.5; r += pick<2, 3>(0) > 2 ? h : 1;"
        "r += sizeof(vec<half, 4>) == 8 && is_integral<int>::value ? 10 : h;",
        2 + 2 + 10,
        "template <int A, int B> int pick(int k) { return k ? A : B; }",
        {"T": mx.float16},
    ),
    "after casts, calls and comparisons": Row(
        "half h = x[i]; bool b = i > 3; r = (int)b ? h : 0.0f; r += float(i) >= 4 && b ? 1.0h : 0;"
        "if (b) r += b ? h : 1; else r -= !b ? h : 1;",
        np.where(INDEX > 3, 2 * X + 1, -X),
    ),
    "as a template argument": Row(
        "half h = 0; float a[N > 3 ? 2 : 1]; Sized<(N > 3 ? 8 : 4)> s;"
        "r = sizeof(a) + sizeof(s) + h;",
        16,
        "template <int B> struct Sized { char c[B]; };",
        {"N": 5},
    ),
}

STATEMENTS = {
    "switch, do, comma": Row(
        "int k = 0; switch (i % 3) { case 0: k = 1; break; case 1: k = 2; default: k += 10; }\n"
        "do ++k, ++k; while (k < 3); r = k;",
        np.select([INDEX % 3 == 0, INDEX % 3 == 1], [3, 14], 12),
    ),
    "loops over lists in braces": Row(
        """
        r = 0;
        for (auto v : {1, 2}) r += v;
        for (float v : {x[i], 1.5f}) { r += v; }
        for (ushort n : {16, 8}) for (half h : {half(n), 0.5h}) r += h;
        for (Pair p : {Pair{1, 2}, Pair{3, 4}}) r += p.a * p.b;
        """,
        3 + X + 1.5 + 25 + 14,
        "struct Pair { int a; float b; };",
        on_cuda=False,
    ),
    "loops over arrays": Row(
        """
        float a[2][2] = {{1, 2}, {3, x[i]}};
        for (thread auto& row : a) for (thread float& v : row) v *= 2;
        r = 0;
        for (const thread auto& row : a) for (auto v : row) r += v;
        for (float v : table) r += v;
        array<float, 2> b = {1, 2};
        for (auto v : b) r += v;
        """,
        12 + 2 * X + 7 + 3,
        "constant float table[2] = {3, 4};",
        on_cuda=False,
    ),
    "new keywords of C++ are names": Row(
        "int concept = 1, requires = 2; r = concept + requires;", 3
    ),
    "designated elements": Row(
        "float a[N] = {[0 ... N - 1] = 2.5}; int b[5] = {[1] = 3, [3 ... 4] = int(i) + 1};\n"
        "r = a[0] + a[N - 1] + b[0] + 10 * b[1] + b[2] + b[3] + b[4];",
        5 + 30 + 2 * (INDEX + 1),
        template={"N": 3},
    ),
    "static assertions and sizes": Row(
        'static_assert(sizeof(float3) == 16, "as Metal");'
        "static_assert(sizeof(packed_float3) == 12);"
        "r = sizeof(float4) + sizeof(x[0]);",
        20,
    ),
    "no contraction where the source says so": Row(
        """
        #pragma METAL fp contract(off)
        float a = 1.0f + 0x1p-12f, b = a * a;
        r = a * a - b;
        """,
        0,
    ),
    "wide integers": Row(
        "long big = 1l << 40; ulong mask = ~0ul; int64_t same = big;"
        "r = float(big >> 38) + (mask >> 60) + (same == big);",
        4 + 15 + 1,
    ),
    "qualified names": Row(
        "r = metal::precise::exp(0.0f) + fast::cos(0.0f) + metal::max(x[i], 0.0f);"
        "r += precise::sqrt(4.0f);\n"
        "Sized s; for (short k = 0; k < decltype(s)::size; ++k) r += ::metal::abs(-1.0f);\n"
        "r += outermost(x[i]);",
        2 + np.maximum(X, 0) + 2 + 3 + np.abs(X),
        "struct Sized { static constexpr constant short size = 3; };\n"
        "inline float outermost(float a) { return ::metal::abs(a); }",
    ),
    "names of the outermost scope": Row(
        """
        ::Pair a = {x[i], ::count};
        thread ::Pair& b = a;
        r = user::half_of(b.first) + alias::half_of(2) + ::twice<::count>(b.second);
        r += user::exp(0.0f);
        """,
        X / 2 + 1 + 18 + 1,
        """
        constant int count = 3;
        struct Pair { float first; mutable ::metal::uint second; };
        template <int n> inline float twice(float a) { return 2 * n * a; }
        namespace other { inline float half_of(float a) { return a / 2; } }
        namespace alias = ::other;
        namespace user { using ::other::half_of; using ::metal::exp; }
        """,
        on_cuda=False,
    ),
    "returning early": Row(
        "out[i] = x[i]; if (i % 2) return; out[i] = i;", np.where(INDEX % 2, X, INDEX), stores=True
    ),
    "other kernels in the header": Row(
        "r = twice(x[i]);",
        2 * X,
        """
        inline float twice(float a) { return 2 * a; }
        struct Arguments { device float* a [[id(0)]]; uint n [[id(1)]]; };
        kernel void first(device float* a [[buffer(0)]], constant uint& n [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
            threadgroup float shared[2];
            if (i < n) { shared[i] = twice(a[i]); a[i] = shared[0]; }
        }
        template <typename T, int N>
        [[kernel, max_total_threads_per_threadgroup(64)]]
        void second(device T* a, uint lane [[thread_index_in_simdgroup]]) {
            threadgroup T shared[N];
            a[lane] = simd_sum(a[lane]) * N + shared[0];
        }
        typedef decltype(second<float, 1>) second_t;
        template [[host_name("second")]] kernel second_t second<float, 1>;
        template [[host_name("third")]] [[kernel]] void second<half, 2>(device half* a, uint lane);
        """,
    ),
    "attributes of functions": Row(
        "r = f(x[i]);",
        X + 1,
        "[[clang::always_inline]] inline float f(float a) { return a + 1; }\n"
        "__attribute__((always_inline)) inline float g(float a) { return a; }",
    ),
}
