"""Classes: structs, their members and operators, unions, enums, namespaces, lambdas."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .row import INDEX, Row, X

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
    "members lie where their types say, or packed": Row(
        "Front f = {1, half(2), half3(3), 0, packed_half3(4), packed_half4(5), long4(6)};\n"
        "One<half> o = {uchar(7), half(x[i])}; threadgroup Wide w[8]; w[i].u = ulong4(i);\n"
        "f.h += half(1); f.q.y *= half(2); r = f.h + f.v.z + f.p.x + f.q.y + float(f.l.w);\n"
        "r += o.t + float(w[i].u.w) + sizeof(Wide);",
        2 + 1 + 3 + 4 + 10 + 6 + X + INDEX + 192,
        """
        struct Wide { int n; long4 l; uchar c; long3 m[2]; ulong4 u; };
        static_assert(sizeof(Wide) == 192 && alignof(Wide) == 32);
        struct Narrow { uchar c; packed_half3 p; half h; packed_half4 q; half4 v; };
        static_assert(sizeof(Narrow) == 32 && alignof(Narrow) == 8);
        struct __attribute__((packed)) Front {
            uchar c; half h; half3 v; uchar d; packed_half3 p; packed_half4 q; long4 l;
        };
        static_assert(sizeof(Front) == 58);
        typedef struct { uchar c; half h; float3 v; } __attribute__((packed)) Behind;
        static_assert(sizeof(Behind) == 19 && sizeof(Behind[2]) == 38);
        template <typename T> struct __attribute__((packed)) One { uchar c; T t; };
        static_assert(sizeof(One<half>) == 3 && sizeof(One<long3>) == 33);
        """,
        on_cuda=False,
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
