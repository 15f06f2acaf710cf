"""Declarations: address spaces, constants, templates, classes, macros."""

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

CLASSES = {
    "structs with methods, constructors and operators": Row(
        "Complex a(x[i], 1), b{2.0}; a += b * 2.0; r = a.norm() + Complex::unit().re + (a == a);",
        (X + 4) ** 2 + 1 + 1 + 1,
        """
        struct Complex {
            float re, im;
            Complex(float re, float im = 0) : re(re), im{im} {}
            float norm() const thread { return re * re + im * im; }
            Complex operator*(float s) const { return Complex(re * s, im * s); }
            thread Complex& operator+=(Complex other) thread {
                re += other.re;
                im += other.im;
                return *this;
            }
            bool operator==(Complex o) const { return re == o.re && im == o.im; }
            static Complex unit() { return Complex(1); }
        };
        """,
    ),
    "operators of equal parameters": Row(
        "Bits a{i}, b{3}; a &= b; a <<= b; r = (a | b).n + 100 * (a ^ b).n + uint(a) + float(b);",
        ((INDEX & 3) << 3 | 3) + 100 * ((INDEX & 3) << 3 ^ 3) + ((INDEX & 3) << 3) + 1.5,
        """
        struct Bits {
            uint n;
            Bits operator|(Bits o) const { return {n | o.n}; }
            Bits operator^(Bits o) const { return {n ^ o.n}; }
            thread Bits& operator&=(Bits o) thread { n &= o.n; return *this; }
            thread Bits& operator<<=(Bits o) thread { n <<= o.n; return *this; }
            explicit operator uint() const { return n; }
            explicit operator float() const { return n / 2.0f; }
        };
        """,
    ),
    "operators specialised in their struct": Row(
        "r = Step()(x[i]) + Step()(int(i)) * 10 + Step()(short(i)) * 1000;",
        -X + (INDEX - 1) * 10 + (INDEX + 1) * 1000,
        """
        struct Step {
            template <typename T> T operator()(T a) { return a + 1; }
            template <> float operator()(float a) { return -a; }
            template <> int operator()(int a) { return a - 1; }
        };
        """,
    ),
    "templates of structs with functors": Row(
        "r = Reducer<Sum>::run(x + i, 1) + Reducer<Max>::run(x, 3);",
        X + 3.25,
        """
        struct Sum {
            static constexpr constant float init = 0;
            float operator()(float a, float b) const { return a + b; }
        };
        struct Max {
            static constexpr constant float init = -INFINITY;
            float operator()(float a, float b) const { return max(a, b); }
        };
        template <typename Op> struct Reducer {
            static float run(const device float* p, int n) {
                float v = Op::init;
                for (int k = 0; k < n; ++k) v = Op()(v, p[k]);
                return v;
            }
        };
        """,
    ),
    "lambdas": Row(
        "float s = 1; auto add = [&](float v) { s += v; return s; };\n"
        "auto twice = [=](auto v) -> float { return v * 2; };"
        "r = add(x[i]) + twice(3) + [] { return 5; }();",
        1 + X + 6 + 5,
    ),
    "constants made of others": Row(
        "r = x[i] * all::quarter + table[1] + whole + all::after;",
        X * 3.140625 / 2 + 6.28125 + 3 + 7.28125,
        """
        constant float pi = 3.140625f;
        constant float tau = 2.0f * pi, table[2] = {pi, pi * 2};
        constant int whole = int(pi);
        constant half narrow = 0.5h;
        namespace all { constant float quarter = pi * narrow; constant float after = tau + 1; }
        """,
        on_cuda=False,
    ),
    "enums, unions, aliases, namespaces": Row(
        "Bits b; b.f = x[i]; Real v = b.f;r = v + int(Mode::second) + deep::down::value() + Third;",
        X + 2 + 9 + 3,
        """
        enum class Mode : uchar { first = 1, second };
        enum { Third = 3 };
        union Bits { float f; uint u; };
        typedef float Real;
        namespace deep { namespace down { inline int value() { return 9; } } }
        """,
    ),
    "overloads of Metal's functions": Row(
        "Dual d = exp(Dual{x[i] / 8, 2}); r = d.v + 100 * abs(Dual{-1, 3}).d;",
        np.exp(X / 8) - 300,
        """
        struct Dual { float v, d; };
        inline Dual exp(Dual a) { float e = exp(a.v); return Dual{e, a.d * e}; }
        inline Dual abs(Dual a) { return Dual{abs(a.v), a.v < 0 ? -a.d : a.d}; }
        """,
        within=1e-6,
    ),
    "namespaces with functions called like Metal's": Row(
        "r = own::odd(x[i]) + float(own::odd(half(x[i]))) + own::odd(float2(x[i])).y;\n"
        "r += own::deep::far(half4(1)).w + own::Three{1}.twice() + ::own::length(2.0f);\n"
        "r += own::early(1.5h);",
        3 * (np.where(X < 0, -1, 1) + 10 + 3) + 11 + 6 + 6 + 2,
        """
        namespace own {
        template <typename T> T early(T v) { return ceil(v); }
        template <typename T> T ceil(T v) { return 100; }
        template <typename V> V fract(V v) { return V(10); }
        template <typename T> T sign(T v) { return v < T(0) ? T(-1) : T(1); }
        inline float2 sign(float2 v) { return float2(sign(v.x), sign(v.y)); }
        template <typename T> T length(T v);
        template <typename T> T odd(T v) { return sign(v) + fract<T>(v) + length(T(1)); }
        template <typename T> T length(T v) { return v * 3; }
        namespace deep { template <typename T> T far(T v) { return fract(v) + abs(v); } }
        struct Three {
            float v;
            float length() { return v * 3; }
            float twice() { return 2 * length(); }
        };
        }
        """,
        on_cuda=False,
    ),
    "local structs and using": Row(
        "using namespace metal; using Real = float;"
        "struct Pair { Real a; Real get() const { return a; } }; Pair p = {x[i]}; r = p.get();",
        X,
    ),
    "constructors by address space": Row(
        "Total<float> t, u(x[i]); threadgroup Total<float> s[8]; s[0] = u; t = s[0]; r = t.sum;\n"
        "const Total<float> v(i + 1); r += v.twice();",
        X + 2 * (INDEX + 1),
        """
        template <typename T> struct Total {
            T sum;
            constexpr Total<T>() = default;
            constexpr Total<T>() threadgroup = default;
            constexpr Total<T>(T sum) : sum(sum) {}
            template <typename U> constexpr Total(U sum) thread : sum(T(sum)) {}
            template <typename U> constexpr Total(U sum) device : sum(T(sum)) {}
            template <typename U> constexpr Total(U sum) constant : sum(T(sum)) {}
            T twice() const thread { return 2 * sum; }
            T twice() const constant { return 2 * sum; }
        };
        """,
    ),
    "halves and vectors in anonymous structs": Row(
        "Block b; b.scale = x[i]; b.least = 2; b.bits[3] = 4; n::Pair p; p.high = float2(3);\n"
        "union { struct { T low, high; }; uint bits; } u; u.high = x[i]; u.low = 0;\n"
        "Halves h; h.low = 1; h.high = 2; p.low = float2(1);"
        "r = b.both.x + b.least + b.bits[3] + p.all.w + as_type<T>(ushort(u.bits >> 16)) + "
        "h.both.y + p.sum();",
        2 * X + 2 + 4 + 3 + 2 + 4,
        """
        typedef half scale_t;
        typedef struct {
            uchar bits[4];
            union { struct { scale_t scale; scale_t least; }; half2 both; };
        } Block;
        static_assert(sizeof(Block) == 8);
        namespace n { union Whole; struct Pair {
            union { struct { float2 low, high; }; float4 all; };
            float sum() const thread { return low.x + high.x; }
        }; }
        union Halves { struct { half low, high; }; half2 both; };
        """,
        {"T": mx.float16},
    ),
    "values in braces behind a type in brackets": Row(
        "Pair p = (Pair){x[i], (half2){2, 3}}; r = p.a + p.b.y + total((float3){1, 2});\n"
        "r += ((const float2){4, 5}).y * (i < 4 ? (float){1} : 2); if (i > 8) { r = 0; }",
        X + 3 + 3 + 5 * np.where(INDEX < 4, 1, 2),
        "struct Pair { float a; half2 b; bool operator==(Pair) { return true; } };\n"
        "float total(float3 v) { return v.x + v.y + v.z; }\n",
    ),
    "brackets in an initialiser list": Row(
        "Tile t; r = t.v[1] + t.n;",
        5,
        "struct Tile { float v[2]; int n; Tile() : v{1, 2}, n{3} {} };",
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
