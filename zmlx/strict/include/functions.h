// Functions of Metal's library. Each is a set of overloads, not a template, because that is what
// makes `max(int, uint)` and `exp(int)` ambiguous on Metal.

#define INFINITY ZK_FLOAT
#define NAN ZK_FLOAT
#define HUGE_VALF INFINITY
#define HUGE_VALH half(INFINITY)
#define HUGE_VALBF bfloat(INFINITY)
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615ul
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define FLT_RADIX 2
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define FLT_MAX_10_EXP 38
#define FLT_MIN_10_EXP (-37)
#define MAXFLOAT FLT_MAX
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(0x1p-14f)
#define HALF_EPSILON half(0x1p-10f)
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX_10_EXP 4
#define HALF_MIN_10_EXP (-4)
#define MAXHALF HALF_MAX
#define BFLT_MAX bfloat(0x1.fep127f)
#define BFLT_MIN bfloat(0x1p-126f)
#define BFLT_EPSILON bfloat(0x1p-7f)
#define BFLT_DIG 2
#define BFLT_MANT_DIG 8
#define BFLT_MAX_EXP 128
#define BFLT_MIN_EXP (-125)
#define BFLT_MAX_10_EXP 38
#define BFLT_MIN_10_EXP (-37)
#define MAXBFLOAT BFLT_MAX
#define FP_ILOGB0 INT_MIN
#define FP_ILOGBNAN INT_MAX

namespace metal {

#define ZK_CONSTANT(name, value)                                \
  static constexpr constant float name##_F = value;             \
  static constexpr constant half name##_H = half(name##_F);     \
  static constexpr constant bfloat name##_BF = bfloat(name##_F);
ZK_CONSTANT(M_E, 2.71828182845904523536f)
ZK_CONSTANT(M_LOG2E, 1.44269504088896340736f)
ZK_CONSTANT(M_LOG10E, 0.43429448190325182765f)
ZK_CONSTANT(M_LN2, 0.69314718055994530942f)
ZK_CONSTANT(M_LN10, 2.30258509299404568402f)
ZK_CONSTANT(M_PI, 3.14159265358979323846f)
ZK_CONSTANT(M_PI_2, 1.57079632679489661923f)
ZK_CONSTANT(M_PI_4, 0.78539816339744830962f)
ZK_CONSTANT(M_1_PI, 0.31830988618379067154f)
ZK_CONSTANT(M_2_PI, 0.63661977236758134308f)
ZK_CONSTANT(M_2_SQRTPI, 1.12837916709551257390f)
ZK_CONSTANT(M_SQRT2, 1.41421356237309504880f)
ZK_CONSTANT(M_SQRT1_2, 0.70710678118654752440f)
#undef ZK_CONSTANT

#define ZK_EACH_WIDTH(M, f, T) M(f, T) M(f, T##2) M(f, T##3) M(f, T##4)
#define ZK_EACH_INTEGER(M, f)                                                                   \
  ZK_EACH_WIDTH(M, f, char) ZK_EACH_WIDTH(M, f, uchar) ZK_EACH_WIDTH(M, f, short)               \
  ZK_EACH_WIDTH(M, f, ushort) ZK_EACH_WIDTH(M, f, int) ZK_EACH_WIDTH(M, f, uint)                \
  ZK_EACH_WIDTH(M, f, long) ZK_EACH_WIDTH(M, f, ulong)
#define ZK_EACH_FLOAT(M, f) ZK_EACH_WIDTH(M, f, half) ZK_EACH_WIDTH(M, f, float)

#define ZK_TAKES_1(f, T) T f(T);
#define ZK_TAKES_2(f, T) T f(T, T);
#define ZK_TAKES_3(f, T) T f(T, T, T);

// MLX adds forms for bfloat, to which integers convert and no float does. Where there are integer
// forms too, a call with a bfloat and an integer is ambiguous on Metal.
template <typename T>
static constexpr constant bool zk_is_bfloat = __is_same(T, bfloat);
template <typename T>
using zk_if_bfloat = enable_if_t<zk_is_bfloat<T>, T>;
template <typename... T>
using zk_if_beside_bfloat =
    enable_if_t<(zk_is_bfloat<T> || ...) && ((zk_is_bfloat<T> || __is_integral(T)) && ...), bfloat>;
#define ZK_BFLOAT_1(f) template <typename T> zk_if_bfloat<T> f(T);
#define ZK_BFLOAT_2(f) template <typename T, typename U> zk_if_beside_bfloat<T, U> f(T, U);
#define ZK_BFLOAT_3(f) \
  template <typename T, typename U, typename V> zk_if_beside_bfloat<T, U, V> f(T, U, V);
#define ZK_BFLOATS_2(f)                                \
  template <typename T> zk_if_bfloat<T> f(T, T);       \
  template <typename T, typename U> zk_if_beside_bfloat<T, U> f(T, U) = delete;
#define ZK_BFLOATS_3(f)                                \
  template <typename T> zk_if_bfloat<T> f(T, T, T);    \
  template <typename T, typename U, typename V>        \
  zk_if_beside_bfloat<T, U, V> f(T, U, V) = delete;

#define ZK_FLOAT_1(f) ZK_EACH_FLOAT(ZK_TAKES_1, f)
#define ZK_FLOAT_2(f) ZK_EACH_FLOAT(ZK_TAKES_2, f)
#define ZK_FLOAT_3(f) ZK_EACH_FLOAT(ZK_TAKES_3, f)
#define ZK_INTEGER_1(f) ZK_EACH_INTEGER(ZK_TAKES_1, f)
#define ZK_INTEGER_2(f) ZK_EACH_INTEGER(ZK_TAKES_2, f)
#define ZK_INTEGER_3(f) ZK_EACH_INTEGER(ZK_TAKES_3, f)
#define ZK_MATH_1(f) ZK_FLOAT_1(f) ZK_BFLOAT_1(f)
#define ZK_MATH_2(f) ZK_FLOAT_2(f) ZK_BFLOAT_2(f)
#define ZK_MATH_3(f) ZK_FLOAT_3(f) ZK_BFLOAT_3(f)

// ---- math -----------------------------------------------------------------------------------

ZK_MATH_1(acos) ZK_MATH_1(acosh) ZK_MATH_1(asin) ZK_MATH_1(asinh) ZK_MATH_1(atan)
ZK_MATH_1(atanh) ZK_MATH_1(ceil) ZK_MATH_1(cos) ZK_MATH_1(cosh) ZK_MATH_1(cospi)
ZK_MATH_1(exp) ZK_MATH_1(exp2) ZK_MATH_1(exp10) ZK_MATH_1(fabs) ZK_MATH_1(floor)
ZK_MATH_1(fract) ZK_MATH_1(log) ZK_MATH_1(log2) ZK_MATH_1(log10) ZK_MATH_1(rint)
ZK_MATH_1(round) ZK_MATH_1(rsqrt) ZK_MATH_1(sin) ZK_MATH_1(sinh) ZK_MATH_1(sinpi)
ZK_MATH_1(sqrt) ZK_MATH_1(tan) ZK_MATH_1(tanh) ZK_MATH_1(tanpi) ZK_MATH_1(trunc)
ZK_MATH_2(atan2) ZK_MATH_2(divide) ZK_MATH_2(fdim) ZK_MATH_2(fmax) ZK_MATH_2(fmin)
ZK_MATH_2(fmod) ZK_MATH_2(nextafter) ZK_MATH_2(pow) ZK_MATH_2(powr)
ZK_MATH_3(fma) ZK_MATH_3(fmax3) ZK_MATH_3(fmedian3) ZK_MATH_3(fmin3)
ZK_FLOAT_2(copysign)
ZK_MATH_1(abs) ZK_INTEGER_1(abs)
ZK_FLOAT_2(max) ZK_BFLOATS_2(max) ZK_INTEGER_2(max)
ZK_FLOAT_2(min) ZK_BFLOATS_2(min) ZK_INTEGER_2(min)
ZK_FLOAT_3(max3) ZK_BFLOATS_3(max3) ZK_INTEGER_3(max3)
ZK_FLOAT_3(min3) ZK_BFLOATS_3(min3) ZK_INTEGER_3(min3)
ZK_FLOAT_3(median3) ZK_BFLOATS_3(median3) ZK_INTEGER_3(median3)
#define ZK_PARTS(I, T) I ilogb(T); T ldexp(T, I); T frexp(T, thread I&); \
  T modf(T, thread T&); T sincos(T, thread T&);
ZK_PARTS(int, half) ZK_PARTS(int2, half2) ZK_PARTS(int3, half3) ZK_PARTS(int4, half4)
ZK_PARTS(int, float) ZK_PARTS(int2, float2) ZK_PARTS(int3, float3) ZK_PARTS(int4, float4)
#undef ZK_PARTS
template <typename T> zk_if_bfloat<T> ldexp(T, int);
template <typename T> zk_if_bfloat<T> frexp(T, thread int&);

// ---- common and integer ---------------------------------------------------------------------

ZK_FLOAT_3(clamp) ZK_INTEGER_3(clamp)
ZK_FLOAT_3(mix) ZK_FLOAT_3(smoothstep) ZK_FLOAT_2(step) ZK_FLOAT_1(saturate) ZK_FLOAT_1(sign)
ZK_INTEGER_2(addsat) ZK_INTEGER_2(hadd) ZK_INTEGER_2(mulhi)
ZK_INTEGER_2(rhadd) ZK_INTEGER_2(rotate) ZK_INTEGER_2(subsat)
ZK_INTEGER_1(clz) ZK_INTEGER_1(ctz) ZK_INTEGER_1(popcount) ZK_INTEGER_1(reverse_bits)
ZK_INTEGER_3(madhi) ZK_INTEGER_3(madsat)
#define ZK_DIFFERENCE(T, U)                                                       \
  U absdiff(T, T); U##2 absdiff(T##2, T##2); U##3 absdiff(T##3, T##3);            \
  U##4 absdiff(T##4, T##4);
ZK_DIFFERENCE(char, uchar) ZK_DIFFERENCE(short, ushort) ZK_DIFFERENCE(int, uint)
ZK_DIFFERENCE(long, ulong) ZK_DIFFERENCE(uchar, uchar) ZK_DIFFERENCE(ushort, ushort)
ZK_DIFFERENCE(uint, uint) ZK_DIFFERENCE(ulong, ulong)
#undef ZK_DIFFERENCE
#define ZK_BITS(f, T) T extract_bits(T, uint, uint); T insert_bits(T, T, uint, uint);
ZK_EACH_INTEGER(ZK_BITS, )
#undef ZK_BITS
#define ZK_WORDS(M, f) ZK_EACH_WIDTH(M, f, int) ZK_EACH_WIDTH(M, f, uint)
ZK_WORDS(ZK_TAKES_2, mul24)
ZK_WORDS(ZK_TAKES_3, mad24)

// ---- relational -----------------------------------------------------------------------------

#define ZK_TEST_1(f, B, T) B f(T);
#define ZK_TEST_2(f, B, T) B f(T, T);
#define ZK_EACH_TEST(M, f)                                                               \
  M(f, bool, half) M(f, bool2, half2) M(f, bool3, half3) M(f, bool4, half4)              \
  M(f, bool, float) M(f, bool2, float2) M(f, bool3, float3) M(f, bool4, float4)
ZK_EACH_TEST(ZK_TEST_1, isfinite) ZK_EACH_TEST(ZK_TEST_1, isinf) ZK_EACH_TEST(ZK_TEST_1, isnan)
ZK_EACH_TEST(ZK_TEST_1, isnormal) ZK_EACH_TEST(ZK_TEST_1, signbit)
ZK_EACH_TEST(ZK_TEST_2, isordered) ZK_EACH_TEST(ZK_TEST_2, isunordered)
#define ZK_SELECT(T)                                                              \
  T select(T, T, bool); T##2 select(T##2, T##2, bool2); T##3 select(T##3, T##3, bool3); \
  T##4 select(T##4, T##4, bool4);
ZK_SELECT(char) ZK_SELECT(uchar) ZK_SELECT(short) ZK_SELECT(ushort) ZK_SELECT(int) ZK_SELECT(uint)
ZK_SELECT(long) ZK_SELECT(ulong) ZK_SELECT(half) ZK_SELECT(bfloat) ZK_SELECT(float)
bool select(bool, bool, bool);

// ---- geometric ------------------------------------------------------------------------------

#define ZK_GEOMETRY(T, V)                                                         \
  T dot(V, V); T distance(V, V); T distance_squared(V, V); T length(V);           \
  T length_squared(V); V normalize(V); V faceforward(V, V, V); V reflect(V, V);   \
  V refract(V, V, T);
ZK_GEOMETRY(half, half2) ZK_GEOMETRY(half, half3) ZK_GEOMETRY(half, half4)
ZK_GEOMETRY(float, float2) ZK_GEOMETRY(float, float3) ZK_GEOMETRY(float, float4)
half3 cross(half3, half3);
float3 cross(float3, float3);

// ---- packing --------------------------------------------------------------------------------

#define ZK_PACKING(T)                                                                      \
  T##4 unpack_unorm4x8_to_##T(uint); T##4 unpack_snorm4x8_to_##T(uint);                     \
  T##4 unpack_unorm4x8_srgb_to_##T(uint); T##2 unpack_unorm2x16_to_##T(uint);               \
  T##2 unpack_snorm2x16_to_##T(uint); T##4 unpack_unorm10a2_to_##T(uint);                   \
  T##3 unpack_unorm565_to_##T(ushort); uint pack_##T##_to_unorm4x8(T##4);                   \
  uint pack_##T##_to_snorm4x8(T##4); uint pack_##T##_to_srgb_unorm4x8(T##4);                \
  uint pack_##T##_to_unorm2x16(T##2); uint pack_##T##_to_snorm2x16(T##2);                   \
  uint pack_##T##_to_unorm10a2(T##4); ushort pack_##T##_to_unorm565(T##3);
ZK_PACKING(half)
ZK_PACKING(float)
#undef ZK_PACKING

namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

}  // namespace metal

// ---- matrices -------------------------------------------------------------------------------

namespace metal {

// What braces in place of a column make.
template <typename T, int Rows>
struct zk_braced {
  template <typename A, typename... B, typename = enable_if_t<sizeof...(B) + 1 == Rows>>
  zk_braced(A, B...);
  zk_braced(vec<T, Rows>);
};

template <typename T, int Columns, int Rows>
struct matrix {
  typedef vec<T, Rows> column;
  typedef zk_braced<T, Rows> zk_column;
  column columns[Columns];
  matrix() = default;
  explicit matrix(T);
  template <typename U>
  explicit matrix(matrix<U, Columns, Rows>);
  template <typename A, typename B, typename... C>
  matrix(A, B, C...);
  template <int N = Columns, typename = enable_if_t<N == 2>>
  matrix(zk_column, zk_column);
  template <int N = Columns, typename = enable_if_t<N == 3>>
  matrix(zk_column, zk_column, zk_column);
  template <int N = Columns, typename = enable_if_t<N == 4>>
  matrix(zk_column, zk_column, zk_column, zk_column);
  ZK_ELEMENTS(column, int)
};
template <typename T, int C, int R> matrix<T, C, R> operator+(matrix<T, C, R>, matrix<T, C, R>);
template <typename T, int C, int R> matrix<T, C, R> operator-(matrix<T, C, R>, matrix<T, C, R>);
template <typename T, int C, int R>
thread matrix<T, C, R>& operator+=(thread matrix<T, C, R>&, matrix<T, C, R>);
template <typename T, int C, int R>
thread matrix<T, C, R>& operator-=(thread matrix<T, C, R>&, matrix<T, C, R>);
template <typename T, int C, int R, int N>
matrix<T, N, R> operator*(matrix<T, C, R>, matrix<T, N, C>);
template <typename T, int C, int R> vec<T, R> operator*(matrix<T, C, R>, vec<T, C>);
template <typename T, int C, int R> vec<T, C> operator*(vec<T, R>, matrix<T, C, R>);
template <typename T, int C, int R> matrix<T, C, R> operator*(matrix<T, C, R>, T);
template <typename T, int C, int R> matrix<T, C, R> operator*(T, matrix<T, C, R>);
template <typename T, int C, int R> matrix<T, C, R> operator/(matrix<T, C, R>, T);
template <typename T, int C, int R>
thread matrix<T, C, R>& operator*=(thread matrix<T, C, R>&, T);
template <typename T, int C, int R>
thread matrix<T, C, R>& operator/=(thread matrix<T, C, R>&, T);
template <typename T, int C, int R> matrix<T, R, C> transpose(matrix<T, C, R>);
template <typename T, int N> T determinant(matrix<T, N, N>);
#define ZK_MATRICES(T)                                                                     \
  typedef matrix<T, 2, 2> T##2x2; typedef matrix<T, 2, 3> T##2x3; typedef matrix<T, 2, 4> T##2x4; \
  typedef matrix<T, 3, 2> T##3x2; typedef matrix<T, 3, 3> T##3x3; typedef matrix<T, 3, 4> T##3x4; \
  typedef matrix<T, 4, 2> T##4x2; typedef matrix<T, 4, 3> T##4x3; typedef matrix<T, 4, 4> T##4x4;
ZK_MATRICES(half)
ZK_MATRICES(float)

}  // namespace metal
