// section limits; needs base; after numbers; tokens numeric_limits
// metal::numeric_limits.

namespace metal {

template <class T>
struct numeric_limits {
  static constexpr bool is_specialized = false;
};

// What integers and floats answer alike.
template <class T>
struct zk_limits {
  static constexpr bool is_specialized = true;
  static constexpr bool is_exact = zk_is_integer<T>;
  static constexpr bool is_integer = zk_is_integer<T>;
  static constexpr bool is_iec559 = !zk_is_integer<T>;
  static constexpr bool has_infinity = !zk_is_integer<T>;
  static constexpr bool has_quiet_NaN = !zk_is_integer<T>;
  static constexpr bool is_bounded = true;
};

template <zk_integer T>
struct numeric_limits<T> : zk_limits<T> {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_modulo = !is_signed && !__is_same(T, bool);
  static constexpr int radix = 2;
  static constexpr int digits = __is_same(T, bool) ? 1 : 8 * int(sizeof(T)) - is_signed;
  static constexpr int digits10 = digits * 30103 / 100000;
  static constexpr T max() { return T(~ulong(0) >> (64 - digits)); }
  static constexpr T min() { return is_signed ? T(-long(max()) - 1) : T(0); }
  static constexpr T lowest() { return min(); }
  static constexpr T epsilon() { return 0; }
  static constexpr T infinity() { return 0; }
  static constexpr T quiet_NaN() { return 0; }
  static constexpr T denorm_min() { return 0; }
  static constexpr T round_error() { return 0; }
};

// PREFIX names the constants of base.h; the last argument is the smallest subnormal.
#define ZK_FLOAT_LIMITS(T, PREFIX, TINIEST)                      \
  template <>                                                    \
  struct numeric_limits<T> : zk_limits<T> {                      \
    static constexpr bool is_signed = true;                      \
    static constexpr bool is_modulo = false;                     \
    static constexpr int radix = 2;                              \
    static constexpr int digits = PREFIX##_MANT_DIG;             \
    static constexpr int digits10 = PREFIX##_DIG;                \
    static constexpr int max_exponent = PREFIX##_MAX_EXP;        \
    static constexpr int min_exponent = PREFIX##_MIN_EXP;        \
    static constexpr int max_exponent10 = PREFIX##_MAX_10_EXP;   \
    static constexpr int min_exponent10 = PREFIX##_MIN_10_EXP;   \
    static constexpr T max() { return PREFIX##_MAX; }            \
    static constexpr T min() { return PREFIX##_MIN; }            \
    static constexpr T lowest() { return -PREFIX##_MAX; }        \
    static constexpr T epsilon() { return PREFIX##_EPSILON; }    \
    static constexpr T infinity() { return T(INFINITY); }        \
    static constexpr T quiet_NaN() { return T(NAN); }            \
    static constexpr T signaling_NaN() { return T(NAN); }        \
    static constexpr T denorm_min() { return T(TINIEST); }       \
    static constexpr T round_error() { return T(0.5f); }         \
  };
ZK_FLOAT_LIMITS(float, FLT, 0x1p-149f)
#ifdef ZK_NUMBERS
ZK_FLOAT_LIMITS(half, HALF, 0x1p-24f)
ZK_FLOAT_LIMITS(bfloat, BFLT, 0x1p-133f)
#endif
#undef ZK_FLOAT_LIMITS

}  // namespace metal
