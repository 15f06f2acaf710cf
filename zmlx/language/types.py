"""Types: scalars, vectors, packed vectors, small matrices, and conversions between them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .row import INDEX, Row, X

_SIZES = {
    "char": 1, "uchar": 1, "short": 2, "ushort": 2, "half": 2, "bfloat": 2, "int": 4, "uint": 4,
    "float": 4, "long": 8, "ulong": 8,
}  # fmt: skip

_VECTOR = """
    {T}4 a({T}(i), {T}2({T}(1), {T}(2)), {T}(3));
    {T}4 b = a.wzyx;
    {T}3 c = {T}3(a.yz, a.x);
    {T}2 d = {T}2({T}(4));
    b.xy += d;
    c.zx = c.xz;
    bool4 less = a < b;
    {T}4 s = select(a, b, less);
    r = float(s.x) + 10 * float(s.y) + 100 * float(s[2]) + 1000 * float(s.a);
    r += float(c.x) + float(any(less)) + float(all(a == a)) + float(all(a != b));
    r += 10000 * (sizeof({T}2) + sizeof({T}3) + sizeof({T}4));
"""


def _vector(name: str, size: int) -> Row:
    i = INDEX
    total = np.where(i < 7, 7, i) + 10 * 6 + 100 * 2 + 1000 * np.maximum(i, 3)
    differs = np.float32((i != 7) & (i != 3))
    return Row(_VECTOR.replace("{T}", name), total + i + 1 + 1 + differs + 100000.0 * size)


VECTORS = {
    **{f"{name}2, {name}3, {name}4": _vector(name, size) for name, size in _SIZES.items()},
    "bool2, bool3, bool4": Row(
        "bool4 v(i > 3, true, false, i % 2); bool2 w(v.x, v.w); bool3 n = !bool3(v.x, v.y, v[2]);\n"
        "r = any(w) + 2 * all(w) + 4 * all(n || bool3(true)) + 8 * n.z + 16 * (v.x && !v.w);",
        [12, 13, 12, 13, 12 + 1 + 16, 12 + 1 + 2, 12 + 1 + 16, 12 + 1 + 2],
    ),
    "vec<T, n>": Row(
        "vec<T, 3> v = vec<T, 3>(T(i)); metal::vec<float, N> w = float2(v.xy); r = w.x + v.z;",
        2 * INDEX,
        template={"T": mx.float16, "N": 2},
    ),
    "one value in braces": Row(
        "float4 v = {x[i]}, w = {0.f}; vec<half, 2> h{3.0h}; float2 p = {v.xy}; int3 k = {};\n"
        "r = v.x + v.y + v.z + w.w + h.x * 10 + h.y * 100 + p.x + p.y + k.z;\n"
        "V a = {x[i]}; r += a.x + a.y + first<V>(1).x + first<float2>(1).y + first<float>(1);",
        3 * X + 30 + 2,
        "typedef float4 V;\ntemplate <typename T> T first(float a) { T v = {a}; return v; }\n",
    ),
    "fewer values in braces than components": Row(
        "float4 v = {x[i], 2}, w{v.zw, 3}; half4 h = half4{1}; r = v.x + v.y + v.z + v.w * 10;\n"
        "r += w.x + w.z * 10 + w.w * 100 + h.x + h.w * 1000 + lead(x[i]).y + dot(float3{2}, 1);\n"
        "Pair p = {{x[i]}, {1, 2}}, q[2] = {{{1}}, made()}; "
        "r += (p.v.y + q[0].v.y + q[1].w.z + second(0, {5})) * 1000;",
        X + 2 + 30 + 1 + 2,
        "struct Pair { float2 v; int3 w; };\n"
        "Pair made() { return {{1}, {1, 2}}; }\n"
        "float second(int n, float2 v) { return v.y; }\n"
        "float2 lead(float a) { return {a}; }\n"
        "auto both(float a) -> metal::float2 { return float2(a); }\n",
        on_cuda=False,
    ),
    "arithmetic, by component and with scalars": Row(
        "float4 v = float4(i, 1, 2, 3) * 2 + float4(1); v -= 0.5f; v = -v / 2; "
        "int3 k = int3(7) % 4;\n"
        "k <<= 1; uint2 u = ~uint2(0) >> 31 | uint2(2); ++k; r = v.x + v.w + k.y + u.x;",
        -(2 * INDEX + 0.5) / 2 - 6.5 / 2 + 7 + 3,
    ),
    "shifts by vectors of another type": Row(
        "uint4 v = uint4(i << 24) >> int4(0, 8, 16, 24) << char4(1); v <<= short4(1); "
        "uchar2 u = uchar2(i); u >>= int2(1);\n"
        "r = v.w + v.z * 0.00390625f + (uint3(1) << i).y + u.x;",
        8 * INDEX + 2.0**INDEX + INDEX // 2,
        on_cuda=False,
    ),
    "names of simd/simd.h": Row(
        "simd_float4 v = simd_float4(x[i], 1, 2, 3); vector_uint2 u = vector_uint2(4);\n"
        "matrix_float2x2 m(2.0f); simd_float4x4 n(1.0f); r = (n * v).x + u.y + m[1][1];",
        X + 4 + 2,
        "#import <metal_stdlib>\n#include <simd/simd.h>\n",
    ),
    "conversions of whole vectors": Row(
        "int4 k = int4(float4(1.7, -1.7, i, 2)); half2 h = half2(k.xy); uchar2 c = uchar2(k.zw);\n"
        "float3 f = float3(float2(c), 9); r = h.x + h.y * 10 + f.x * 100 + f.y + f.z;",
        1 - 10 + 100 * INDEX + 2 + 9,
    ),
    "subscripts and components through pointers": Row(
        "const device float4* p = (const device float4*)x; float4 v = p[i / 4]; float s = 0;\n"
        "for (uint k = 0; k < 4; ++k) { v[k] += k; s += v[k]; } thread float4* t = &v; t->x = 0;\n"
        "r = s + t->x;",
        np.repeat(X.reshape(2, 4).sum(1) + 6, 4),
    ),
    "packed vectors": Row(
        "packed_float3 p = float3(i, 1, 2); p.y += 4; p[2] = 8; float3 v = p; "
        "packed_half2 h = half2(3);\n"
        "packed_uchar4 u = uchar4(1, 2, 3, 4); r = v.x + v.y * 10 + v.z * 100 + h.y;\n"
        "r += sizeof(packed_float3) * 1000 + u.w + sizeof(u);\n"
        "r += dot(float4(p, 1), float4(float2(half2(h)), float2(uchar4(u).xy)));",
        INDEX * 4 + 50 + 800 + 3 + 12000 + 4 + 4 + 15 + 8 + 2,
    ),
    "components of packed vectors by colour": Row(
        "packed_float3 p = float3(i, 1, 2); p.g += 4; thread packed_half4* q; packed_half4 h(3);\n"
        "q = &h; q->a = p.g; r = p.r + p.y * 10 + p.b * 100 + h.a * 1000;",
        INDEX + 50 + 200 + 5000,
        on_cuda=False,
    ),
    "packed vectors as others, and in functions": Row(
        "packed_char4 c(1, 2, -3, 4); packed_half3 h(x[i], 3, 4); packed_float3 f(3, 4, 0), g(1);\n"
        "r = float4(c).z + float3(h).y + half3(f).x + length(f) + length_squared(f);\n"
        "r += int2(packed_short2(1, 2)).y + 5 * normalize(f).y + distance(f, g);\n"
        "r += select(f, g, bool3(true)).x + select(f, g, false).y;\n"
        "r += reflect(f, packed_float3(0, 1, 0)).y + faceforward(g, g, g).x;",
        -3 + 3 + 3 + 5 + 25 + 2 + 4 + np.sqrt(4 + 9 + 1) + 1 + 4 - 4 - 1,
        within=1e-5,
        on_cuda=False,
    ),
    "in device memory": Row(
        "device float2* p = (device float2*)out; if (i < 4) p[i] = float2(x[2 * i], i);",
        np.stack([X[::2], np.arange(4)], 1),
        stores=True,
    ),
}


def _matrix(columns: int, rows: int) -> Row:
    """Product with a vector from either side, an element, the transpose."""
    m = np.array([[c * 10 + r for c in range(columns)] for r in range(rows)])
    vector = np.arange(1, columns + 1)
    text = ", ".join(
        f"float{rows}({', '.join(str(int(m[r, c])) for r in range(rows))})" for c in range(columns)
    )
    body = f"""
        float{columns}x{rows} m({text});
        float{rows} v = m * float{columns}({", ".join(map(str, vector))});
        float{rows}x{columns} t = transpose(m);
        float{rows} w = float{columns}({", ".join(map(str, vector))}) * t;
        m[1][0] += i;
        r = dot(v, float{rows}(1)) + all(v == w) * 1000 + m[1].x + (m * 2.0f + m)[0].y;
    """
    product = m @ vector
    return Row(body, float(product.sum()) + 1000 + m[0, 1] + INDEX + 3 * m[1, 0])


MATRICES = {
    **{f"float{c}x{r}": _matrix(c, r) for c in (2, 3, 4) for r in (2, 3, 4)},
    "half2x2, half3x3, half4x4": Row(
        "half3x3 m(2.0h); m[0][1] = 1.0h; half3 v = m * half3(1, 2, half(i));\n"
        "half4x4 n = half4x4(1.0h) * half4x4(3.0h); half2x2 k(1, 2, 3, 4); half2 c = k[1];\n"
        "r = v.x + v.y * 10 + v.z * 100 + n[3][3] + c.y;",
        2 + 50 + 200 * INDEX + 3 + 4,
    ),
    "columns in braces": Row(
        "float3x3 m({1, 2, 3}, float3(4), {5, 6, float(i)});\n"
        "float3x3 n = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}};\n"
        "float4x2 k[2] = {{{1, 2}, {3, 4}, {5, 6}, {7, 8}}, {float2(1), {2, 3}, {4, 5}, {6, 7}}};\n"
        "r = m[2][2] + n[1].z + K[1].y + k[0][3].y + k[1][2].x + turned(2.0f)[0].y;",
        INDEX + 6 + 40 + 8 + 4 + 2,
        header="constant half2x2 K {{10, 20}, {30, 40}};\n"
        "float2x2 turned(float s) { return {{1, s}, {-s, 1}}; }\n",
    ),
    "by a number, and of another type": Row(
        "float2x2 m(2, 4, 6, 8); m *= 3.0f; m /= 2.0f; half2x2 h = half2x2(m / 3.0f);\n"
        "float2x2 back(h); r = m[1][1] + back[0][1] * 100 + (2.0f * back)[1][0] * 1000 + x[i];",
        12 + 200 + 6000 + X,
        on_cuda=False,
    ),
    "determinant": Row(
        "r = determinant(float2x2(1, 2, 3, i)) + determinant(float3x3(2.0f));", INDEX - 6 + 8
    ),
}

SCALARS = {
    "as_type": Row(
        "uint u = as_type<uint>(x[i]); ushort2 h = as_type<ushort2>(u); "
        "half k = as_type<half>(ushort(0x3e00));\n"
        "bfloat b = as_type<bfloat>(h.y); uchar4 c = as_type<uchar4>(0x04030201u);\n"
        "r = as_type<float>(u) + k + c.w + float(b == bfloat(x[i]));",
        X + 1.5 + 4 + 1,
    ),
    "half: implicit both ways, rounded once per operation": Row(
        "half h = x[i] + 2049.0f; float f = h; h += 1; half g = 0.1h * 3.0h; "
        "r = f + float(h - h) + g;",
        np.float16(X + 2049).astype(np.float32) + np.float32(np.float16(0.1) * np.float16(3)),
    ),
    "bfloat: from float by a cast, to float freely": Row(
        "bfloat b = bfloat(x[i]); b = b * b + bfloat(1.0f); float f = b; int k = b; "
        "r = f + k * 0;\n"
        "bfloat16_t same = b; r += float(same - b);",
        np.array([3.25, 5, 11.5625, 1, 50, 1.25, 9984, 65]),
    ),
    "bfloat from integers": Row(
        "T a = 0; T b[3] = {0, 1}; bfloat4 v = 2; bfloat c = i; a += 3; c = b[1];\n"
        "r = a + b[0] + b[1] + b[2] + v.w + c + bfloat(int(i));",
        3 + 0 + 1 + 0 + 2 + 1 + INDEX,
        template={"T": mx.bfloat16},
    ),
    "integers beside half and bfloat convert to them": Row(
        "half h = 1000; bfloat b = 256; int n = 100000 + i, m = 257, k = 4096; k += 1.0h;\n"
        "r = float(h / n) + (b == m) + 2 * (m <= b) + 4 * (h - n == -INFINITY) + k;",
        1 + 2 + 4 + 4096,
        on_cuda=False,
    ),
    "integers of every width": Row(
        "char a = 127; a += 2; uchar b = 255; b += 2; short c = 32767; c++; ushort d = 65535; "
        "d++;\n"
        "long e = 1l << 40; ulong f = ~0ul; int8_t g = -1; uint16_t k = 7; int64_t m = e; "
        "size_t n = 9;\n"
        "r = a + b + c + d + float(e >> 38) + float(f >> 62) + g + k + float(m >> 40) + n;",
        -127 + 1 - 32768 + 0 + 4 + 3 - 1 + 7 + 1 + 9,
    ),
    "bool": Row(
        "bool b = x[i]; r = b + (b ? 2 : 0) + !b * 10 + sizeof(bool);", np.where(X != 0, 4, 11)
    ),
    "implicit conversions": Row(
        "int k = 2.9f; uint u = -1; float f = i; half h = 3; r = k + (u == 0xffffffff) + f + h;",
        2 + 1 + INDEX + 3,
    ),
    "numeric_limits": Row(
        "r = (numeric_limits<int>::max() == INT_MAX) + (numeric_limits<float>::infinity() == "
        "INFINITY)"
        " + float(numeric_limits<half>::max()) + numeric_limits<uchar>::max();",
        1 + 1 + 65504 + 255,
    ),
    "constants": Row(
        "r = M_PI_F + M_SQRT2_F + FLT_EPSILON * 0 + (FLT_MAX > 3e38) + HALF_MAX * 0 + isnan(NAN);",
        np.float32(np.pi) + np.float32(np.sqrt(2)) + 2,
        within=1e-6,
    ),
    "type traits": Row(
        "r = is_same_v<half, half> + is_integral_v<T> * 2 + is_floating_point<float>::value * 4"
        " + is_signed<int>::value * 8 + sizeof(conditional_t<true, char, int>) * 16;",
        1 + 2 + 4 + 8 + 16,
        header="using T = uint;",
    ),
    "array": Row(
        "array<float, 3> a = {{1, 2, x[i]}}; a[1] += 1; r = a[0] + a[1] + a[2] + a.size();", X + 7
    ),
    "pack and unpack": Row(
        "uint p = pack_float_to_unorm4x8(float4(1, 0, 0.5, 1)); "
        "float4 v = unpack_unorm4x8_to_float(p);\n"
        "r = v.x + v.w + (p & 0xff) + unpack_snorm2x16_to_float(0x7fff8001u).x;",
        1 + 1 + 255 - 1,
    ),
}
