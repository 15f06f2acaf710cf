// section numbers; needs base; tokens half bfloat float16_t bfloat16_t half2 half3 half4 bfloat2 bfloat3 bfloat4 packed_half2 packed_half3 packed_half4 packed_bfloat2 packed_bfloat3 packed_bfloat4 HALF_MAX HALF_MIN HALF_EPSILON MAXHALF HUGE_VALH BFLT_MAX BFLT_MIN BFLT_EPSILON MAXBFLOAT HUGE_VALBF bfloat16_to_uint16 uint16_to_bfloat16 half2x2 half2x3 half2x4 half3x2 half3x3 half3x4 half4x2 half4x3 half4x4 simdgroup_half8x8 simdgroup_bfloat8x8 unpack_unorm4x8_to_half unpack_snorm4x8_to_half unpack_unorm4x8_srgb_to_half unpack_unorm2x16_to_half unpack_snorm2x16_to_half unpack_unorm10a2_to_half unpack_unorm565_to_half pack_half_to_unorm4x8 pack_half_to_snorm4x8 pack_half_to_srgb_unorm4x8 pack_half_to_unorm2x16 pack_half_to_snorm2x16 pack_half_to_unorm10a2 pack_half_to_unorm565
// half and bfloat: 16 bits in memory, every operation done in float and rounded once, which equals
// native arithmetic of the type for + - * / and sqrt (float has more than 2p + 2 bits).

#define ZK_NUMBERS 1

namespace metal {

// The conversions choose with masks: a ?: would keep g++ from vectorising the loops they land in.

// -1 where a < b, else 0, for non-negative bit patterns.
constexpr METAL_FUNC int zk_less(int a, int b) { return -int(a < b); }
constexpr METAL_FUNC int zk_blend(int mask, int yes, int no) { return no ^ ((no ^ yes) & mask); }

constexpr METAL_FUNC float zk_float_of_half(ushort h) {
  int magnitude = h & 0x7fff;
  // Rebiases the exponent by 127 - 15; infinity and NaN go from 31 to 255 in a second step.
  int normal = (magnitude << 13) + (112 << 23) + ((112 << 23) & zk_less(0x7bff, magnitude));
  // A subnormal is its 10 bits in units of 2^-24: put them below the leading one of 2^-14.
  float subnormal = as_type<float>((magnitude << 13) + (113 << 23)) - 0x1p-14f;
  int bits = zk_blend(zk_less(magnitude, 0x0400), as_type<int>(subnormal), normal);
  return as_type<float>(bits | (h & 0x8000) << 16);
}

constexpr METAL_FUNC ushort zk_half_of_float(float x) {
  int bits = as_type<int>(x);
  int magnitude = bits & 0x7fffffff;
  // Rounds to nearest even by adding just under half of the last place, plus one if that is odd.
  int normal = (magnitude - (112 << 23) + 0x0fff + (magnitude >> 13 & 1)) >> 13;
  // The last place of 0.5f is that of a subnormal half, so the addition rounds by itself.
  int subnormal = as_type<int>(as_type<float>(magnitude & zk_less(magnitude, 0x38800000)) + 0.5f) -
                  0x3f000000;
  int payload = (0x0200 | (magnitude >> 13 & 0x03ff)) & zk_less(0x7f800000, magnitude);
  int rounded = zk_blend(zk_less(magnitude, 0x38800000), subnormal, normal);
  int half = zk_blend(zk_less(magnitude, 0x477ff000), rounded, 0x7c00 | payload);
  return ushort(half | (bits >> 16 & 0x8000));
}

constexpr METAL_FUNC float zk_float_of_bfloat(ushort b) { return as_type<float>(uint(b) << 16); }

// The choice is one of floats, which g++ makes with a mask of the addition; one of integers it makes
// after it has packed both sides.
constexpr METAL_FUNC ushort zk_bfloat_of_float(float x) {
  uint bits = as_type<uint>(x);
  float rounded = as_type<float>(bits + 0x7fff + (bits >> 16 & 1));
  // Rounding would carry a NaN into infinity or beyond: keep its upper bits and make it quiet.
  float quiet = as_type<float>(bits | 0x00400000);
  return ushort(as_type<uint>(x == x ? rounded : quiet) >> 16);
}

// A device that has instructions for the conversions uses them at run time.
#ifndef ZK_CONVERT
#define ZK_CONVERT(convert, x) convert(x)
#endif

// Converts implicitly from and to float, as in Metal.
struct half {
  ushort zk_bits;
  half() = default;
  constexpr METAL_FUNC half(float x) : zk_bits(ZK_CONVERT(zk_half_of_float, x)) {}
  constexpr METAL_FUNC operator float() const { return ZK_CONVERT(zk_float_of_half, zk_bits); }
  // A sum with a float is a float and converts back on assignment.
  template <class T> METAL_FUNC half& operator+=(T x) { return *this = *this + x; }
  template <class T> METAL_FUNC half& operator-=(T x) { return *this = *this - x; }
  template <class T> METAL_FUNC half& operator*=(T x) { return *this = *this * x; }
  template <class T> METAL_FUNC half& operator/=(T x) { return *this = *this / x; }
};

// Converts implicitly from integers and to float: Metal rejects `bfloat x = 1.0f`, and so
// `x += 1.0f`, but takes `bfloat x = 0`.
struct bfloat {
  ushort zk_bits;
  bfloat() = default;
  explicit constexpr METAL_FUNC bfloat(float x) : zk_bits(ZK_CONVERT(zk_bfloat_of_float, x)) {}
  template <zk_counts I>
  constexpr METAL_FUNC bfloat(I x) : bfloat(float(x)) {}
  constexpr METAL_FUNC operator float() const { return zk_float_of_bfloat(zk_bits); }
  template <class T> METAL_FUNC bfloat& operator+=(T x) { return *this = *this + x; }
  template <class T> METAL_FUNC bfloat& operator-=(T x) { return *this = *this - x; }
  template <class T> METAL_FUNC bfloat& operator*=(T x) { return *this = *this * x; }
  template <class T> METAL_FUNC bfloat& operator/=(T x) { return *this = *this / x; }
};

template <>
inline constexpr bool zk_is_narrow<half> = true;
template <>
inline constexpr bool zk_is_narrow<bfloat> = true;

// With another of its kind, an integer or an enumerator without a scope the result is narrow; with a
// float the built-in operator applies. Templates, because an exact overload would be ambiguous with
// that one.
template <class A>
concept zk_narrow = zk_is_narrow<A>;
template <class A, class B>
concept zk_narrow_with = zk_is_narrow<A> && (__is_same(A, B) || zk_counts<B>);
template <class A, class B>
concept zk_integer_with = zk_counts<A> && zk_is_narrow<B>;

// An integer beside a half or bfloat converts to it first, which leaves those of 8 bits as they are.
template <zk_narrow T, zk_counts U>
constexpr METAL_FUNC float zk_beside(U x) {
  float wide = float(x);
  bool exact = sizeof(U) == 1 || (__builtin_constant_p(x) && wide >= -256.0f && wide <= 256.0f);
  return exact ? wide : float(T(wide));
}

#define ZK_NARROW_OPERATOR(op)                                          \
  template <zk_narrow A>                                                \
  constexpr METAL_FUNC A operator op(A a, A b) {                        \
    return A(float(a) op float(b));                                     \
  }                                                                     \
  template <zk_narrow A, zk_counts B>                                   \
  constexpr METAL_FUNC A operator op(A a, B b) {                        \
    return A(float(a) op zk_beside<A>(b));                              \
  }                                                                     \
  template <zk_counts A, zk_narrow B>                                   \
  constexpr METAL_FUNC B operator op(A a, B b) {                        \
    return B(zk_beside<B>(a) op float(b));                              \
  }                                                                     \
  template <zk_integer A, zk_narrow B>                                  \
  constexpr METAL_FUNC A& operator op##=(A& a, B b) {                   \
    return a = A(float(a op b));                                        \
  }
ZK_NARROW_OPERATOR(+)
ZK_NARROW_OPERATOR(-)
ZK_NARROW_OPERATOR(*)
ZK_NARROW_OPERATOR(/)
#undef ZK_NARROW_OPERATOR

#define ZK_NARROW_COMPARISON(op)                                        \
  template <zk_narrow A, zk_counts B>                                   \
  constexpr METAL_FUNC bool operator op(A a, B b) {                     \
    return float(a) op zk_beside<A>(b);                                 \
  }                                                                     \
  template <zk_counts A, zk_narrow B>                                   \
  constexpr METAL_FUNC bool operator op(A a, B b) {                     \
    return zk_beside<B>(a) op float(b);                                 \
  }
ZK_NARROW_COMPARISON(==)
ZK_NARROW_COMPARISON(!=)
ZK_NARROW_COMPARISON(<)
ZK_NARROW_COMPARISON(>)
ZK_NARROW_COMPARISON(<=)
ZK_NARROW_COMPARISON(>=)
#undef ZK_NARROW_COMPARISON

#define ZK_NARROW_UNARY(T)                                                           \
  constexpr METAL_FUNC T operator-(T x) { return as_type<T>(ushort(x.zk_bits ^ 0x8000)); } \
  constexpr METAL_FUNC T operator+(T x) { return x; }                                \
  METAL_FUNC T& operator++(T& x) { return x = T(float(x) + 1.0f); }                  \
  METAL_FUNC T& operator--(T& x) { return x = T(float(x) - 1.0f); }                  \
  METAL_FUNC T operator++(T& x, int) {                                               \
    T before = x;                                                                    \
    ++x;                                                                             \
    return before;                                                                   \
  }                                                                                  \
  METAL_FUNC T operator--(T& x, int) {                                               \
    T before = x;                                                                    \
    --x;                                                                             \
    return before;                                                                   \
  }
ZK_NARROW_UNARY(half)
ZK_NARROW_UNARY(bfloat)
#undef ZK_NARROW_UNARY

}  // namespace metal
