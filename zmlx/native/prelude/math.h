// section math; needs base; after numbers vectors; tokens *
// Metal's common functions: choice, rounding, classification, roots, parts of a float.
// Every function has float, half and bfloat forms; a half or bfloat is computed in float and
// rounded once. Vector forms are made from the same rows when the text uses vectors.

// An integer among halves or bfloats converts to them.
#ifdef ZK_NUMBERS
#define ZK_NARROW_1(f)          \
  template <zk_narrow T>        \
  METAL_FUNC T f(T x) {         \
    return T(f(float(x)));      \
  }
#define ZK_NARROW_2(f)                   \
  template <class T, class U>            \
    requires zk_narrow_with<T, U>        \
  METAL_FUNC T f(T x, U y) {             \
    return T(f(float(x), float(T(y)))); \
  }                                      \
  template <class U, class T>            \
    requires zk_integer_with<U, T>       \
  METAL_FUNC T f(U x, T y) {             \
    return T(f(float(T(x)), float(y))); \
  }
#define ZK_NARROW_3_IF(condition, f)                                        \
  template <class T, class U, class V>                                      \
    requires(zk_narrow_with<T, U> && zk_narrow_with<T, V> && (condition))   \
  METAL_FUNC T f(T x, U y, V z) {                                           \
    return T(f(float(x), float(T(y)), float(T(z))));                        \
  }
#define ZK_NARROW_3(f) ZK_NARROW_3_IF(true, f)
// Of what MLX adds no form for: a bfloat is a float there.
#define ZK_HALF_3(f) ZK_NARROW_3_IF(__is_same(T, half), f)
#define ZK_BFLOAT_3(f) ZK_NARROW_3_IF(__is_same(T, bfloat), f)
#define ZK_NARROW_SPLIT(f)                   \
  template <zk_narrow T>                     \
  METAL_FUNC T f(T x, T& rest) {             \
    float other, first = f(float(x), other); \
    rest = T(other);                         \
    return T(first);                         \
  }
#define ZK_NARROW_TEST(f)       \
  template <zk_narrow T>        \
  METAL_FUNC bool f(T x) {      \
    return f(float(x));         \
  }
#else
#define ZK_NARROW_1(f)
#define ZK_NARROW_2(f)
#define ZK_NARROW_3(f)
#define ZK_HALF_3(f)
#define ZK_BFLOAT_3(f)
#define ZK_NARROW_SPLIT(f)
#define ZK_NARROW_TEST(f)
#endif

#ifndef ZK_VECTORS
#define ZK_VECTOR_1(f)
#define ZK_VECTOR_2(f)
#define ZK_VECTOR_1_BY(f, g)
#define ZK_VECTOR_2_BY(f, g)
#define ZK_VECTOR_3(f)
#define ZK_VECTOR_SPLIT(f)
#define ZK_VECTOR_TEST(f)
#endif

// One row per function, after its float form; the number is that of its arguments. A split gives a
// second result by reference.
#define ZK_MATH_1(f) ZK_NARROW_1(f) ZK_VECTOR_1(f)
#define ZK_MATH_2(f) ZK_NARROW_2(f) ZK_VECTOR_2(f)
#define ZK_MATH_3(f) ZK_NARROW_3(f) ZK_VECTOR_3(f)
#define ZK_MATH_SPLIT(f) ZK_NARROW_SPLIT(f) ZK_VECTOR_SPLIT(f)
#define ZK_MATH_TEST(f) ZK_NARROW_TEST(f) ZK_VECTOR_TEST(f)

namespace metal {

// Integers. Operands of different types are an error, as in Metal, and must not reach the float
// forms by conversion. There are no forms for bools and enumerators, which are promoted.
template <zk_counts T>
struct zk_promotion {
  using type = T;
};
template <zk_counts T>
  requires(__is_same(T, bool) || __is_enum(T))
struct zk_promotion<T> {
  using type = decltype(+T());
};
template <class T>
using zk_promoted = typename zk_promotion<T>::type;
template <class T, class... U>
inline constexpr bool zk_agree = (__is_same(zk_promoted<T>, zk_promoted<U>) && ...);

#define ZK_INTEGER_2(f, value)                              \
  template <zk_counts T, zk_counts U>                       \
  void f(T, U) = delete;                                    \
  template <zk_counts T, zk_counts U>                       \
    requires zk_agree<T, U>                                 \
  constexpr METAL_FUNC zk_promoted<T> f(T x, U y) {         \
    return value;                                           \
  }
#define ZK_INTEGER_3(f, value)                              \
  template <zk_counts T, zk_counts U, zk_counts V>          \
  void f(T, U, V) = delete;                                 \
  template <zk_counts T, zk_counts U, zk_counts V>          \
    requires zk_agree<T, U, V>                              \
  constexpr METAL_FUNC zk_promoted<T> f(T x, U y, V z) {    \
    return value;                                           \
  }
ZK_INTEGER_2(max, x < y ? y : x)
ZK_INTEGER_2(min, y < x ? y : x)
ZK_INTEGER_3(max3, max(x, max(y, z)))
ZK_INTEGER_3(min3, min(x, min(y, z)))
ZK_INTEGER_3(median3, max(min(x, y), min(max(x, y), z)))
ZK_INTEGER_3(clamp, min(max(x, y), z))
#undef ZK_INTEGER_2
#undef ZK_INTEGER_3
template <zk_counts T>
constexpr METAL_FUNC zk_promoted<T> abs(T x) {
  return x < T(0) ? zk_promoted<T>(-x) : x;
}
template <zk_scalar T>
constexpr METAL_FUNC T select(T no, T yes, bool choice) {
  return choice ? yes : no;
}

METAL_FUNC bool any(bool x) { return x; }
METAL_FUNC bool all(bool x) { return x; }

// The other operand where one is NaN, as on a GPU, if the compiler knows one of them: that takes one
// instruction. Else g++ turns a<b?b:a into one, in reductions too, only where NaN and -0 need no
// order, and a NaN may win or lose. The attribute reaches no further than the function: the caller's
// x != x stays.
#ifdef ZK_MAXIMUM
METAL_FUNC float max(float x, float y) { return ZK_MAXIMUM(x, y); }
METAL_FUNC float min(float x, float y) { return ZK_MINIMUM(x, y); }
#elif defined(__clang__)
METAL_FUNC float max(float x, float y) { return __builtin_elementwise_max(x, y); }
METAL_FUNC float min(float x, float y) { return __builtin_elementwise_min(x, y); }
#else
#define ZK_UNORDERED __attribute__((always_inline, optimize("finite-math-only", "no-signed-zeros")))
#define ZK_KNOWN(x) (__builtin_constant_p(x) && (x) == (x))
ZK_UNORDERED inline float zk_larger(float x, float y) { return x < y ? y : x; }
ZK_UNORDERED inline float zk_smaller(float x, float y) { return y < x ? y : x; }
METAL_FUNC float max(float x, float y) {
  return ZK_KNOWN(y) ? (x > y ? x : y) : ZK_KNOWN(x) ? (y > x ? y : x) : zk_larger(x, y);
}
METAL_FUNC float min(float x, float y) {
  return ZK_KNOWN(y) ? (x < y ? x : y) : ZK_KNOWN(x) ? (y < x ? y : x) : zk_smaller(x, y);
}
#endif
ZK_MATH_2(max)
ZK_MATH_2(min)

METAL_FUNC bool isnan(float x) { return (as_type<int>(x) & 0x7fffffff) > 0x7f800000; }
METAL_FUNC bool isinf(float x) { return (as_type<int>(x) & 0x7fffffff) == 0x7f800000; }
METAL_FUNC bool isfinite(float x) { return (as_type<int>(x) & 0x7fffffff) < 0x7f800000; }
METAL_FUNC bool isnormal(float x) {
  return uint((as_type<int>(x) & 0x7fffffff) - 0x00800000) < 0x7f000000u;
}
METAL_FUNC bool signbit(float x) { return as_type<int>(x) < 0; }
ZK_MATH_TEST(isnan)
ZK_MATH_TEST(isinf)
ZK_MATH_TEST(isfinite)
#ifdef ZK_NUMBERS
// A half that is not may be normal as a float.
template <zk_narrow T>
METAL_FUNC bool isnormal(T x) {
  return __is_same(T, half) ? uint((x.zk_bits & 0x7fff) - 0x0400) < 0x7800u : isnormal(float(x));
}
#endif
ZK_VECTOR_TEST(isnormal)
ZK_MATH_TEST(signbit)
METAL_FUNC bool isunordered(float x, float y) { return isnan(x) || isnan(y); }
METAL_FUNC bool isordered(float x, float y) { return !isunordered(x, y); }
#ifdef ZK_VECTORS
template <class T, int N>
METAL_FUNC vec<bool, N> isunordered(vec<T, N> x, zk_same<vec<T, N>> y) {
  return isnan(x) || isnan(y);
}
template <class T, int N>
METAL_FUNC vec<bool, N> isordered(vec<T, N> x, zk_same<vec<T, N>> y) {
  return !isunordered(x, y);
}
#endif

// The other operand where one is NaN.
METAL_FUNC float fmax(float x, float y) {
  float larger = x < y ? y : x;
  return x != x ? y : larger;
}
METAL_FUNC float fmin(float x, float y) {
  float smaller = y < x ? y : x;
  return x != x ? y : smaller;
}
ZK_MATH_2(fmax)
ZK_MATH_2(fmin)
METAL_FUNC float max3(float x, float y, float z) { return max(x, max(y, z)); }
METAL_FUNC float min3(float x, float y, float z) { return min(x, min(y, z)); }
METAL_FUNC float median3(float x, float y, float z) {
  return max(min(x, y), min(max(x, y), z));
}
METAL_FUNC float fmax3(float x, float y, float z) { return fmax(x, fmax(y, z)); }
METAL_FUNC float fmin3(float x, float y, float z) { return fmin(x, fmin(y, z)); }
METAL_FUNC float fmedian3(float x, float y, float z) {
  return fmax(fmin(x, y), fmin(fmax(x, y), z));
}
ZK_MATH_3(max3)
ZK_MATH_3(min3)
ZK_MATH_3(median3)
ZK_MATH_3(fmax3)
ZK_MATH_3(fmin3)
ZK_MATH_3(fmedian3)

METAL_FUNC float fabs(float x) { return __builtin_fabsf(x); }
METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC float copysign(float x, float y) { return __builtin_copysignf(x, y); }
METAL_FUNC float sign(float x) { return isnan(x) ? 0.0f : x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
ZK_MATH_1(fabs)
ZK_MATH_1(abs)
ZK_MATH_2(copysign)
ZK_MATH_1(sign)

// `low` where x is NaN, as on a GPU: written so that g++ needs no more for it than for max and min.
METAL_FUNC float clamp(float x, float low, float high) {
  float y = x > low ? x : low;
  return y < high ? y : high;
}
METAL_FUNC float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
METAL_FUNC float mix(float x, float y, float a) { return x + (y - x) * a; }
METAL_FUNC float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
METAL_FUNC float smoothstep(float low, float high, float x) {
  float t = saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
ZK_MATH_3(clamp)
ZK_MATH_1(saturate)
ZK_HALF_3(mix) ZK_VECTOR_3(mix)
ZK_MATH_2(step)
ZK_HALF_3(smoothstep) ZK_VECTOR_3(smoothstep)

METAL_FUNC float floor(float x) { return __builtin_floorf(x); }
METAL_FUNC float ceil(float x) { return __builtin_ceilf(x); }
METAL_FUNC float trunc(float x) { return __builtin_truncf(x); }
METAL_FUNC float rint(float x) { return __builtin_rintf(x); }
// Half away from zero. The largest float below 1/2 keeps 0.49999997 from rounding up to 1.
METAL_FUNC float round(float x) { return trunc(x + copysign(0x1.fffffep-2f, x)); }
METAL_FUNC float fract(float x) {
  float part = x - floor(x);
  return part > 0x1.fffffep-1f ? 0x1.fffffep-1f : part;
}
#ifdef ZK_NUMBERS
// A half is below 1 when it is rounded, too; MLX's form for a bfloat only rounds.
template <zk_narrow T>
METAL_FUNC T fract(T x) {
  float part = fract(float(x)), most = __is_same(T, half) ? 0x1.ffcp-1f : 1.0f;
  return T(part > most ? most : part);
}
#endif
ZK_MATH_1(floor)
ZK_MATH_1(ceil)
ZK_MATH_1(trunc)
ZK_MATH_1(rint)
ZK_MATH_1(round)
ZK_VECTOR_1(fract)

METAL_FUNC float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
#ifdef ZK_NUMBERS
// Rounded once; MLX's form for a bfloat rounds a float. The product of halves is a float, and a sum
// whose last bit is odd where it lost something is rounded to a half as what it stands for would be.
METAL_FUNC half zk_fma(half x, half y, half z) {
#ifdef ZK_FMA_HALF
  return as_type<half>(ZK_FMA_HALF(x.zk_bits, y.zk_bits, z.zk_bits));
#else
  float product = float(x) * float(y), added = float(z), sum = product + added;
  float part = sum - product, lost = (product - (sum - part)) + (added - part);
  int bits = as_type<int>(sum), outwards = (as_type<int>(lost) ^ bits) >> 31 | 1;
  bits += outwards & -(~bits & 1) & -int(__builtin_fabsf(lost) > 0.0f);
  return half(as_type<float>(bits));
#endif
}
template <class T, class U, class V>
  requires(zk_narrow_with<T, U> && zk_narrow_with<T, V> && __is_same(T, half))
METAL_FUNC T fma(T x, U y, V z) {
  return zk_fma(x, T(y), T(z));
}
#endif
METAL_FUNC float divide(float x, float y) { return x / y; }
METAL_FUNC float fdim(float x, float y) { return x <= y ? 0.0f : x - y; }
METAL_FUNC float sqrt(float x) { return __builtin_sqrtf(x); }
#ifdef ZK_RSQRT
METAL_FUNC float rsqrt(float x) { return ZK_RSQRT(x); }
#else
METAL_FUNC float rsqrt(float x) { return 1.0f / sqrt(x); }
#endif
// Exact for any quotient, by the long division of the C library.
METAL_FUNC float fmod(float x, float y) { return __builtin_fmodf(x, y); }
ZK_BFLOAT_3(fma) ZK_VECTOR_3(fma)
ZK_MATH_2(divide)
ZK_MATH_2(fdim)
ZK_MATH_1(sqrt)
ZK_MATH_1(rsqrt)
ZK_MATH_2(fmod)

// Metal's variants of other precision: here every function is as precise as it gets.
namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

}  // namespace metal
