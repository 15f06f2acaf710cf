"""Declarations: address spaces, constants, templates, macros."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .row import INDEX, Row, X

ADDRESS_SPACES = {
    "pointers of every space": Row(
        """
        device float* d = out; const device float* p = x; device const float* q = x + 1;
        thread float local[2] = {p[i], q[0]}; thread float* t = local;
        thread float& reference = t[1]; reference += 1;
        r = *t + local[1] + (d == out);
        """,
        X + -1.0 + 1,
    ),
    "casts": Row(
        """
        const device uint* bits = (const device uint*)x;
        r = as_type<float>(reinterpret_cast<const device uint*>(x)[i]) + (bits[3] == 0);
        """,
        X + 1,
    ),
    "a helper with pointers and references": Row(
        "float a[4] = {1, 2, 3, 4}; float s = 0; add(x + i, a, s); r = s;",
        X + 10,
        """
        inline void add(const device float* x, const thread float (&a)[4], thread float& s) {
            s = *x;
            for (int k = 0; k < 4; ++k) s += a[k];
        }
        """,
    ),
    "a template on the pointer type": Row(
        "constant float* c = table; r = first(x + i) + first(c);",
        X + 5,
        "constant float table[1] = {5};\ntemplate <typename P> float first(P p) { return p[0]; }",
    ),
    "small inputs are constant, large ones device": Row(
        "r = get(c + i) + get_constant(c + i);",
        2 * X[:7],
        """
        float get(const constant float* p) { return *p; }
        float get_constant(constant const float* p) { return *p; }
        """,
        x=X[:7],
    ),
    "overloads by address space with one body are one": Row(
        "thread float v = 2; r = twice(x + i) + twice(&v);",
        2 * X + 4,
        """
        inline float twice(const device float* p) { return *p * 2; }
        inline float twice(const thread float* p) { return *p * 2; }
        """,
    ),
    "overloads of templates and methods by address space": Row(
        "Pair p = {x[i], 1}; r = p.sum() + load<float>(x, i);",
        2 * X + 1,
        """
        struct Pair {
            float a, b;
            float sum() const thread { return a + b; }
            float sum() const device { return a + b; }
            float sum() const constant { return a + b; }
        };
        template <typename T> T load(const device T* p, uint at) { return p[at]; }
        template <typename T> T load(constant T* p, uint at) { return p[at]; }
        template <typename T> T load(const threadgroup T* p, uint at) { return p[at]; }
        """,
    ),
    "overloads by address space in which threads meet": Row(
        "threadgroup float s[8]; thread float v = 1; s[i] = x[i];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); r = All<2>::sum(s + i) + "
        "All<2>::sum(&v) + total(&v);",
        2 * X.sum() + 2 * 8 + 8,
        """
        template <int turns> struct All {
            template <typename T> static T sum(thread T* p) {
                T all = 0;
                for (int k = 0; k < turns; ++k) { all += simd_sum(*p); }
                if (turns > 1) { threadgroup_barrier(mem_flags::mem_none); }
                return all;
            }
            template <typename T> static T sum(threadgroup T* q) {
                T all = 0;
                for (int k = 0; k < turns; ++k) { all += simd_sum(*q); }
                if (turns > 1) { threadgroup_barrier(mem_flags::mem_none); }
                return all;
            }
        };
        inline float total(thread float* p) {
            half h = 1;
            for (int k = 0; k < 1; ++k) { h = k > 0 ? h : simd_sum(*p); }
            return h;
        }
        inline float total(threadgroup float* p) {
            half h = 1;
            for (int k = 0; k < 1; ++k) { h = k > 0 ? h : simd_sum(*p); }
            return h;
        }
        """,
        together=True,
    ),
    "specialisations by address space with one body are one": Row(
        "r = is_same_v<element<device float*>::type, float> +"
        " is_same_v<element<thread uint*>::type, uint> * 2 +"
        " is_same_v<remove_addrspace_t<thread int>, int> * 4;",
        7,
        """
        template <typename T> struct element {};
        template <typename T> struct element<thread T*> { using type = T; };
        template <typename U> struct element<device U*> { using type = U; };
        template <typename T> struct element<constant T*> { using type = T; };
        template <typename T> struct element<threadgroup T*> { using type = T; };
        """,
    ),
}

CONSTANTS = {
    "tables at file scope": Row(
        "r = table[i % 4] + grid[i % 2][1] + points[1].y + N + codes[0];",
        np.array([1, 2, 3, 4])[INDEX % 4] + np.array([20, 40])[INDEX % 2] + 4 + 3 + 7,
        """
        constant float table[4] = {1, 2, 3, 4};
        constant constexpr float grid[2][2] = {{10, 20}, {30, 40}};
        struct Point { float x, y; };
        static constant Point points[2] = {{1, 2}, {3, 4}};
        constexpr constant int N = 3;
        constant const uchar codes[] = {7};
        """,
    ),
    "tables in functions": Row(
        "const float plain[2] = {100, 200}; constexpr float more[2] = {10, 20};\n"
        "r = plain[i % 2] + more[i % 2];",
        np.array([110, 220])[INDEX % 2],
    ),
    "a constant bounds an array": Row(
        "float a[N * 2] = {}; a[N] = x[i]; r = a[3] + sizeof(a);", X + 24, "constant int N = 3;"
    ),
    "constant members of a struct": Row(
        "r = Options::scale + Options::count * x[i];",
        0.5 + 3 * X,
        "struct Options { static constant constexpr float scale = 0.5;\n"
        "static constant constexpr int count = 3; };",
    ),
    "constant pointers to constants": Row(
        "constexpr constant float* p = table; constant float* const q = table + 1;\n"
        "r = p[i % 2] + q[0];",
        np.array([1, 2])[INDEX % 2] + 2,
        "constant float table[2] = {1, 2};",
    ),
    "uniform values": Row(
        "constexpr const uniform<int> n = make_uniform(2); uniform<float> a = make_uniform(0.5f);\n"
        "r = 0; for (int k = 0; k < n; ++k) r += a * x[i];",
        X,
    ),
    "a constant template": Row(
        "r = two<float> * x[i];", 2 * X, "template <typename T> constant T two = T(2);"
    ),
    "constants made of others": Row(
        """
        constant float own = pi; constant float twice[2] = {own, own * 2};
        r = x[i] * all::quarter + table[1] + whole + all::after + half_axis.y + axis[2];
        r += twice[1] + last.b + first;
        """,
        X * 3.140625 / 2 + 6.28125 + 3 + 7.28125 + 3 + 5 + 6.28125 + 3 + 2,
        """
        constant float pi = 3.140625f;
        constant float tau = 2.0f * pi, table[2] = {pi, pi * 2};
        constant int whole = int(pi);
        constant half narrow = 0.5h;
        constant float4 axis(pi, 6, 5, 0);
        constant float4 half_axis(axis.xy * 0.5f, axis[3], 1);
        namespace all { constant float quarter = pi * narrow; constant float after = tau + 1; }
        namespace all { struct Ends { float a, b; }; }
        constant all::Ends ends = {2, 3}, last = {0, ends.b};
        constant struct { float a; } unnamed = {ends.a};
        constant float first = unnamed.a;
        """,
        on_cuda=False,
    ),
}

TEMPLATES = {
    "type, integer and flag arguments": Row(
        "T v = T(x[i]); float a[N]; for (int k = 0; k < N; ++k) a[k] = k;"
        "r = FLAG ? v + a[N - 1] : 0;",
        np.float16(X) + 4,
        template={"T": mx.float16, "N": 5, "FLAG": True},
    ),
    "functions, defaults, specialisations, if constexpr": Row(
        "r = apply<float, 3>(x[i]) + apply<int>(2) + name<half>() + name<float>();",
        3 * X + 4 + 1 + 2,
        """
        template <typename T, int N = 2> T apply(T v) {
            if constexpr (N > 2) return v * T(N); else { return v + v; }
        }
        template <typename T> int name() { return 0; }
        template <> int name<half>() { return 1; }
        template <> int name<float>() { return 2; }
        """,
    ),
    "functions as arguments": Row(
        "r = map<twice>(x[i]) + map(twice, 1.0f);",
        2 * X + 2,
        """
        inline float twice(float a) { return 2 * a; }
        template <float (*f)(float)> float map(float a) { return f(a); }
        template <typename F> float map(F f, float a) { return f(a); }
        """,
    ),
    "functions that combine lanes as arguments": Row(
        "float (*f)(float) = total;\n"
        "r = map<total>(float(i)) + map(total, 1.0f) + map<&total>(2.0f) + f(3.0f);",
        496.0 + 32 + 64 + 96,
        """
        inline float total(float a) { return simd_sum(a); }
        typedef decltype(total) function;
        template <function f> float map(float a) { return f(a); }
        template <typename F> float map(F f, float a) { return f(a); }
        """,
        threads=32,
        together=True,
    ),
    "overloads that take functions of different types": Row(
        "r = call<one<2>>(3, 4) + 100 * call<both<2>>(3, 4) + 10000 * call<both<1, int>>(1, 1);",
        6 + 100 * 2 * 7 * 32 + 10000 * 2 * 32,
        """
        typedef void (of_one)(int a, thread float& r);
        typedef void (of_both)(int a, int b, thread float& r);
        template <of_one f> float call(int a, int b) { float r; f(a, r); return r; }
        template <of_both f> float call(int a, int b) { float r; f(a, b, r); return r; }
        template <int k> void one(int a, thread float& r) { r = a * k; }
        template <int k, typename A> void both(A a, A b, thread float& r) {
            r = simd_sum(a + b) * k;
        }
        """,
        threads=32,
        together=True,
        on_cuda=False,
    ),
    "lists that close with >>": Row(
        "Box<Box<float>> b; b.v.v = x[i]; r = b.v.v + Count<(3 > 2), 1>::n;",
        X + 1,
        "template <typename T> struct Box { T v; };\n"
        "template <bool b, int k> struct Count { static constant constexpr int n = b ? k : 0; };",
    ),
    "recursion by template": Row(
        "r = Power<3>::of(x[i]) + count<4>();",
        X**3 + 4,
        """
        template <int N> struct Power {
            static float of(float v) { return v * Power<N - 1>::of(v); }
        };
        template <> struct Power<0> { static float of(float v) { return 1; } };
        template <int N> int count() {
            if constexpr (N == 0) return 0; else return 1 + count<N - 1>();
        }
        """,
    ),
    "variadic templates": Row(
        "r = total(x[i], 1, 2u);",
        X + 3,
        "template <typename T> float total(T v) { return v; }\n"
        "template <typename T, typename... R> float total(T v, R... rest) {"
        " return v + total(rest...); }",
    ),
    "comparisons are no template lists": Row(
        "int N = 3, M = int(i); r = (M < N && N > 1) + (M < N) * 2 + (N >> 1) + (1 << M >> 1);",
        (INDEX < 3) * 3 + 1 + ((1 << INDEX) >> 1),
    ),
}

PREPROCESSOR = {
    "constants and functions": Row(
        "r = SCALE * SQUARE(x[i]) + CLAMP(x[i], 0, 1);",
        2 * X * X + np.clip(X, 0, 1),
        "#define SCALE 2.0\n#define SQUARE(a) ((a) * (a))\n"
        "#define CLAMP(v, lo, hi) \\\n    min(max(v, float(lo)), \\\n        float(hi))\n",
    ),
    "conditions": Row(
        "r = x[i] + WHICH;",
        X + 7,
        """
        #if 0
        What is left out isn't read.
        #endif
        #if defined(__METAL_VERSION__) && __METAL_VERSION__ >= 310 // a comment
        #  if !defined(UNKNOWN) && (3 * 2 - 5 == 1 ? 1 : 0)
        #    define WHICH 7
        #  elif 1
        #    error not here
        #  endif
        #else
        #  define WHICH 1
        #endif
        #ifndef WHICH
        #error nor here
        #endif
        """,
    ),
    "questions about the compiler": Row(
        "r = WHICH;",
        5,
        """
        #if defined(__has_include) && __has_include(<metal_simdgroup_matrix>)
        #define FIRST 1
        #endif
        #if __has_include(<metal_tensor>) || __has_include("mine.h")
        #error neither
        #elif !__has_builtin(__builtin_nothing) && !__has_attribute(nothing)
        #define WHICH (FIRST + 4)
        #endif
        """,
    ),
    "pasting, quoting, rest arguments": Row(
        "float value1 = x[i]; r = NAME(value, 1) + SUM(1, 2, 3) + sizeof(TEXT(a + b)) + NONE();",
        X + 6 + 6,
        "#define NAME(a, n) a##n\n#define SUM(first, ...) add(first, __VA_ARGS__)\n"
        "#define TEXT(t) #t\n#define NONE() 0\n"
        "float add(float a, float b, float c) { return a + b + c; }",
    ),
    "expansion stops at its own name": Row(
        "r = f(x[i]) + a;",
        X + 3 + 5,
        "constant float a = 5;\n#define a b\n#define b a\n"
        "inline float f(float v) { return v + 1; }\n#define f(v) (f(v) + 2)\n",
    ),
    "assert, which does nothing": Row(
        'assert(i < 8); assert(false && "never"); r = x[i];', X, on_cuda=False
    ),
    "a macro holds qualifiers, loops and literals": Row(
        "LOCAL float s = 0; EACH(k, 4) { s += HALF; } r = s + *POINTER(x + i);",
        2 + X,
        "#define LOCAL thread\n#define EACH(k, n) for (uint k = 0; k < n; ++k)\n#define HALF 0.5\n"
        "#define POINTER(p) ((const device float*)(p))\n",
    ),
    "comments that go on in the next line": Row(
        "r = x[i]; // ends in \\\nr = 0;\n/* and\n * another */ r += 1; // \\\n\n", X + 1
    ),
    "the language's version": Row(
        "r = WHICH;",
        3,
        """
        #if defined(__cplusplus) && __cplusplus >= 201402L && defined(__METAL__)
        #define WHICH (1 + HOW)
        #endif
        #ifdef __clang__
        #define HOW 2
        #endif
        """,
    ),
    "definitions inside the body": Row(
        "#define TWICE(a) (a + a)\nr = TWICE(x[i]);\n#undef TWICE\n", 2 * X
    ),
    "hints": Row(
        """
        r = 0;
        #pragma unroll
        for (int k = 0; k < 2; ++k) r += 1;
        #pragma clang loop unroll(full)
        for (int k = 0; k < 2; ++k) r += 1;
        _Pragma("unroll") for (int k = 0; k < 2; ++k) r += 1;
        MLX_MTL_PRAGMA_UNROLL
        for (int k = 0; k < 2; ++k) r += x[i];
        """,
        6 + 2 * X,
    ),
    "Metal's own headers": Row(
        "r = metal::abs(x[i]);",
        np.abs(X),
        "#include <metal_stdlib>\n#include <metal_simdgroup>\nusing namespace metal;",
    ),
}
