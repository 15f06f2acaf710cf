"""Vectors, matrices and the geometry of the CPU prelude."""

from __future__ import annotations

import numpy as np
import pytest
from prelude_text import build, call, compilers, errors, exported, prelude

pytestmark = pytest.mark.skipif(not compilers(), reason="needs g++ or clang++")
every_compiler = pytest.mark.parametrize("compiler", compilers())

VECTOR_TYPES = """
static_assert(sizeof(float2) == 8 && sizeof(float3) == 16 && alignof(float3) == 8);
static_assert(sizeof(half3) == 8 && sizeof(uchar3) == 4 && sizeof(long3) == 32);
static_assert(sizeof(packed_float3) == 12 && alignof(packed_float3) == 4);
static_assert(sizeof(packed_half3) == 6 && sizeof(bool4) == 4);
static_assert(__is_trivial(float4) && __is_trivial(half4) && __is_trivial(packed_float3));
constexpr float4 v(1, 2, 3, 4);
static_assert(v.x == 1 && v.w == 4);
constexpr packed_int3 w(5, int2(6, 7));
static_assert(w.y == 6 && w[2] == 7);
#define IS(T, e) static_assert(__is_same(decltype(e), T));
IS(bool4, v < v) IS(float4, v * 2) IS(half2, half2(1.0f) + half2(2.0f)) IS(float4, max(v, 0.0f))
IS(bool4, isnan(v)) IS(float, dot(v, v)) IS(half2, half2(1.0f) * 2) IS(float4, -v)
"""

VECTORS = exported("""
#define swz(...) [zk_swizzle<__VA_ARGS__>()]
#define ref(...) [zk_swizzle_ref<__VA_ARGS__>()]
export void vectors(const float* x, float* y) {
  float4 a = *(const device float4*)x;
  float4* out = (float4*)y;
  *out++ = a + 1;
  *out++ = 2.0f * a - a / 4;
  *out++ = a swz(3, 2, 1, 0);
  float4 b = a;
  b ref(0, 2) = float2(10, 20);
  b ref(1, 3) *= 3;
  b += a;
  b.g -= 1;
  b[3] = a[0];
  *out++ = b;
  *out++ = float4(a swz(0, 1), float2(7));
  *out++ = float4(5, a swz(1, 2, 3));
  *out++ = float4(1, a swz(1, 0), 9);
  *out++ = select(a, -a, a > 2.0f);
  *out++ = float4(any(a == 3), all(a > 0), any(a > 4), all(!(a < 1)));
  *out++ = clamp(a, 1.5f, float4(2.5f, 3, 3, 3.5f));
  *out++ = mix(a, a * 2, 0.5f);
  *out++ = fma(a, a, 1);
  float3 p(1, 2, 3), q(4, 5, 6);
  *out++ = float4(dot(a, a), length(float3(2, 3, 6)), distance(a, a + 1), dot(p, q));
  *out++ = float4(cross(p, q + float3(0, 0, 1)), normalize(float2(3, 4)).y);
  float2 up(0, 1);
  *out++ = float4(reflect(float2(1, -1), up), faceforward(up, -up, up));
  *out++ = float4(refract(-up, up, 0.5f), refract(float2(1, 0), up, 2.0f));
  packed_float3 packed = a swz(0, 1, 2);
  packed.y = 8;
  packed ref(0, 2) = float2(packed swz(2, 0));
  packed += float3(1);
  *out++ = float4(packed, packed[1]);
  int4 i = int4(a) << 2;
  i |= 1;
  i = ~i;
  i++;
  i %= int4(5, 6, 7, 8);
  *out++ = float4(i);
  half4 h = half4(a);
  h = h * h;
  h += 0.5f;
  *out++ = float4(h);
  bfloat2 bf = bfloat2(a swz(2, 3));
  bf = bf + bf;
  uint bits = as_type<uint>(half2(1, 2));
  *out++ = float4(float2(bf), bits == 0x40003c00, as_type<uint2>(1ul << 32).y);
  uint3 u = {1u, 2u, 3u};
  u = max(u, 2u) * u;
  float2 zero{};
  *out++ = float4(float3(u), zero.y);
  *out++ = exp2(a) + sqrt(a * a) + abs(-a) + floor(a + 0.5f);
  int4 exponent;
  float4 whole, mantissa = frexp(a, exponent), fraction = modf(a + 0.25f, whole);
  *out++ = mantissa + float4(exponent) + fraction + ldexp(a, int4(1));
  *out++ = whole;
  float4 cosine, sine = sincos(a, cosine);
  half half_cosine, half_sine = sincos(half(1), half_cosine);
  *out++ = sine * sine + cosine * cosine;
  *out++ = float4(half_sine, half_cosine, all(isordered(a, a)), any(isunordered(a, a)));
  float4 e = a, before = e++;
  *out++ = before - e;
}
""")


@every_compiler
def test_vector_types_have_metals_layout(compiler):
    text = prelude("vectors", "numbers", "geometry") + VECTOR_TYPES
    assert errors(text, compiler) == ""


@every_compiler
@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_vectors_compute_by_component(compiler, level):
    text = prelude("vectors", "numbers", "geometry", "exponential", "trigonometry", "parts")
    text += VECTORS
    lib, _ = build(text, level, compiler=compiler)
    x = np.array([1, 2, 3, 4], np.float32)
    i = -((x.astype(int) << 2) | 1)
    expected = [
        x + 1,
        2 * x - x / 4,
        [4, 3, 2, 1],
        [11, 7, 23, 1],
        [1, 2, 7, 7],
        [5, 2, 3, 4],
        [1, 2, 1, 9],
        [1, 2, -3, -4],
        [1, 1, 0, 1],
        [1.5, 2, 3, 3.5],
        1.5 * x,
        x * x + 1,
        [30, 7, 2, 32],
        [-1, 5, -3, 0.8],
        [1, 1, 0, 1],
        [0, -1, 0, 0],
        [4, 9, 2, 9],
        np.fmod(i, [5, 6, 7, 8]),
        x * x + 0.5,
        [6, 8, 1, 1],
        [2, 4, 9, 0],
        2**x + 3 * x,
        x / 2 ** np.floor(np.log2(x) + 1) + np.floor(np.log2(x) + 1) + 0.25 + 2 * x,
        x,
        [1, 1, 1, 1],
        [0.84130859, 0.54052734, 1, 0],
        [-1, -1, -1, -1],
    ]
    y = np.empty((len(expected), 4), np.float32)
    call(lib.vectors, x, y)
    for row, (result, wanted) in enumerate(zip(y, expected, strict=True)):
        np.testing.assert_allclose(result, wanted, rtol=1e-6, err_msg=f"row {row}")


PACKING = exported("""
export void packing(const float* x, float* y) {
  float4 v = *(const float4*)x;
  float4* out = (float4*)y;
  *out++ = unpack_unorm4x8_to_float(pack_float_to_unorm4x8(v));
  *out++ = unpack_snorm4x8_to_float(pack_float_to_snorm4x8(v * 2 - 1));
  *out++ = unpack_unorm4x8_srgb_to_float(pack_float_to_srgb_unorm4x8(v));
  *out++ = unpack_unorm10a2_to_float(pack_float_to_unorm10a2(v));
  float2 two = v[zk_swizzle<0, 1>()];
  float2 signs = unpack_snorm2x16_to_float(pack_float_to_snorm2x16(two * 2 - 1));
  *out++ = float4(unpack_unorm2x16_to_float(pack_float_to_unorm2x16(two)), signs);
  half3 three(v[zk_swizzle<0, 1, 2>()]);
  *out++ = float4(float3(unpack_unorm565_to_half(pack_half_to_unorm565(three))), 0);
  float low = unpack_snorm4x8_to_float(0x80u).x;
  *out++ = float4(pack_float_to_unorm4x8(float4(1, 0, 0, 0)) == 0xff, low,
                  pack_float_to_snorm4x8(-1) == 0x81818181, pack_float_to_unorm565(1) == 0xffff);
}
""")


def test_packed_formats_hold_fractions_of_their_width():
    lib, _ = build(prelude("packing", "numbers") + PACKING, "-O1")
    x, y = np.array([0.1, 0.75, 0.003, 0.6], np.float32), np.empty((7, 4), np.float32)
    call(lib.packing, x, y)
    np.testing.assert_allclose(y[0], np.rint(x * 255) / 255, rtol=1e-6)
    np.testing.assert_allclose(y[1], np.rint((2 * x - 1) * 127) / 127, rtol=1e-6)
    np.testing.assert_allclose(y[2], x, atol=5e-3)
    np.testing.assert_allclose(
        y[3], np.rint(x * [1023, 1023, 1023, 3]) / [1023, 1023, 1023, 3], rtol=1e-6
    )
    np.testing.assert_allclose(y[4][:2], x[:2], atol=1e-5)
    np.testing.assert_allclose(y[4][2:], 2 * x[:2] - 1, atol=2e-5)
    np.testing.assert_allclose(y[5][:3], np.rint(x[:3] * [31, 63, 31]) / [31, 63, 31], rtol=1e-3)
    assert y[6].tolist() == [1, -1, 1, 1]


MATRICES = exported("""
export void matrices(const float* x, float* y) {
  float3x3 a(float3(x[0], x[1], x[2]), float3(x[3], x[4], x[5]), float3(x[6], x[7], x[8]));
  float3x2 b(x[0], x[1], x[2], x[3], x[4], x[5]);
  auto put = [&](auto m, int columns, int rows) {
    for (int c = 0; c < columns; ++c) {
      for (int r = 0; r < rows; ++r) *y++ = m[c][r];
    }
  };
  put(a * a, 3, 3);
  put(b * a, 3, 2);
  put(transpose(b), 2, 3);
  put(a + a - 2.0f * a * 0.25f, 3, 3);
  float3 right = a * float3(1, 2, 3), left = float3(1, 2, 3) * a;
  *y++ = right.x; *y++ = right.y; *y++ = right.z; *y++ = left.x; *y++ = left.y; *y++ = left.z;
  *y++ = determinant(a);
  *y++ = determinant(float2x2(x[0], x[1], x[2], x[3]));
  *y++ = determinant(float4x4(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
                              x[8], x[3], x[1], x[7], x[2], x[5], x[0], x[4]));
  a.columns[1] = float3(0); a *= float3x3(2.0f);
  put(a, 3, 3);
}
""")


@every_compiler
def test_matrices_are_columns(compiler):
    lib, _ = build(prelude("matrices", "numbers") + MATRICES, "-O2", compiler=compiler)
    x, y = np.random.default_rng(0).normal(size=9).astype(np.float32), np.empty(60, np.float32)
    call(lib.matrices, x, y)
    a, b, v = x.reshape(3, 3).T, x[:6].reshape(3, 2).T, np.array([1, 2, 3])
    four = x[[0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 1, 7, 2, 5, 0, 4]].reshape(4, 4)
    determinants = [np.linalg.det(a), np.linalg.det(x[:4].reshape(2, 2)), np.linalg.det(four)]
    emptied = 2 * a
    emptied[:, 1] = 0
    parts = [(a @ a).T, (b @ a).T, b, 1.5 * a.T, a @ v, v @ a, determinants, emptied.T]
    expected = np.concatenate([np.ravel(part) for part in parts])
    np.testing.assert_allclose(y[: expected.size], expected, rtol=1e-5, atol=1e-6)


MATRICES_OF_BRACES = exported("""
float2x2 turn(float c, float s) { return {{c, s}, {-s, c}}; }
template <class M, class... A>
constexpr bool zk_made = requires(A... a) { M(a...); };
static_assert(zk_made<float2x2, float, float, float, float> && !zk_made<float2x2, float, float>);
export void braces(const float* x, float* y) {
  float3x3 a({x[0], 1, 2}, {3, x[1], 5}, float3(6)), b = {{1, 2, 3}, {4, 5, x[2]}, {7, 8, 9}};
  float4x2 c = float4x2({1, 2}, {3, x[3]}, {5, 6}, float2(7));
  float2x2 d = turn(x[4], x[5]);
  y[0] = a[0][0] + 2 * a[1][1] + a[2][2]; y[1] = b[1][2]; y[2] = c[1][1] + c[3][0];
  y[3] = d[0][1] - d[1][0]; y[4] = float3x3({a[0], a[1], b[2]})[2].z;
}
""")


@every_compiler
def test_matrices_are_made_of_columns_in_braces(compiler):
    text = prelude("matrices", "numbers") + MATRICES_OF_BRACES
    lib, _ = build(text, "-O2", compiler=compiler)
    x, y = np.arange(2, 8, dtype=np.float32), np.empty(5, np.float32)
    call(lib.braces, x, y)
    assert y.tolist() == [2 + 6 + 6, 4, 5 + 7, 14, 9]


@every_compiler
@pytest.mark.parametrize("use", ["float3 b = a[zk_swizzle<0, 1, 2>()];",
                                 "a[zk_swizzle_ref<2, 0>()] = float2(1);"])  # fmt: skip
def test_swizzles_name_components_that_there_are(compiler, use):
    text = prelude("vectors") + f"\nvoid f() {{ float2 a(1, 2); {use} }}\n"
    assert "the vector has no such component" in errors(text, compiler)


@every_compiler
@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_vector_of_another_size_is_named(compiler, size):
    text = prelude("vectors") + f"\nvoid f() {{ vec<float, {size}> a; }}\n"
    assert "a vector has 2, 3 or 4 components" in errors(text, compiler)
