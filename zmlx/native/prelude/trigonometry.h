// section trigonometry; needs math; tokens sin( cos( tan( sincos( sinpi( cospi( tanpi( asin( acos( atan( atan2(
// Trigonometric functions as branch-free polynomials. Coefficients are minimax fits by Remez
// exchange in 40 digits, rounded to float.

namespace metal {

// An angle as quarter · π/2 + r with |r| <= π/4.
struct zk_angle {
  float r;
  int quarter;
};

// Reduction in double (Cody and Waite with π/2 in 53 + 53 bits), exact for |x| < 2^50. Beyond, where
// neighbouring floats are whole turns apart by the million, the result is NaN: a branch-free
// Payne-Hanek reduction made every sine 2.5 times slower, and a branch keeps loops scalar.
ZK_INLINE zk_angle zk_turn(float x) {
  constexpr double shift = 0x1.8p52;
  double shifted = __builtin_fma(double(x), 0x1.45f306dc9c883p-1, shift);
  double n = shifted - shift;
  double r = __builtin_fma(n, -0x1.921fb54442d18p+0, double(x));
  r = __builtin_fma(n, -0x1.1a62633145c07p-54, r);
  return {fabs(x) < 0x1p50f ? float(r) : NAN, int(as_type<long>(shifted))};
}

// sin and cos for |r| <= π/4.
ZK_INLINE float zk_sin_reduced(float r) {
  float s = r * r;
  float p = -0x1.9951eap-13f;
  p = fma(p, s, 0x1.110774p-7f);
  p = fma(p, s, -0x1.555546p-3f);
  return fma(p, s * r, r);
}
ZK_INLINE float zk_cos_reduced(float r) {
  float s = r * r;
  float p = 0x1.99e80cp-16f;
  p = fma(p, s, -0x1.6c0c28p-10f);
  p = fma(p, s, 0x1.55554ap-5f);
  return fma(p, s * s, fma(s, -0.5f, 1.0f));
}

// The sine `quarter` quarter turns on; the second bit of `quarter` is its sign.
ZK_INLINE float zk_wave(float r, int quarter) {
  float y = quarter & 1 ? zk_cos_reduced(r) : zk_sin_reduced(r);
  return as_type<float>(as_type<int>(y) ^ (quarter & 2) << 30);
}
ZK_INLINE float zk_tangent(float r, int quarter) {
  float s = zk_sin_reduced(r), c = zk_cos_reduced(r);
  return quarter & 1 ? -c / s : s / c;
}
// Odd functions are computed of |x|, so that -0 keeps its sign.
ZK_INLINE float zk_with_sign(float y, float x) {
  return as_type<float>(as_type<int>(y) ^ (as_type<int>(x) & int(0x80000000)));
}

ZK_INLINE float sin(float x) {
  auto [r, quarter] = zk_turn(fabs(x));
  return zk_with_sign(zk_wave(r, quarter), x);
}
ZK_INLINE float cos(float x) {
  auto [r, quarter] = zk_turn(x);
  return zk_wave(r, quarter + 1);
}
ZK_INLINE float tan(float x) {
  auto [r, quarter] = zk_turn(fabs(x));
  return zk_with_sign(zk_tangent(r, quarter), x);
}
ZK_MATH_1(sin)
ZK_MATH_1(cos)
ZK_MATH_1(tan)

ZK_INLINE float sincos(float x, float& cosine) {
  auto [r, quarter] = zk_turn(fabs(x));
  cosine = zk_wave(r, quarter + 1);
  return zk_with_sign(zk_wave(r, quarter), x);
}
ZK_MATH_SPLIT(sincos)

// πx as an angle: exact, since 2x mod 1 is; every float of 2^24 and more is an even integer.
ZK_INLINE zk_angle zk_turn_pi(float x) {
  constexpr double shift = 0x1.8p52;
  double d = fabs(x) < 0x1p24f ? x : x * 0.0f;
  double shifted = d + d + shift;
  double r = d - 0.5 * (shifted - shift);
  return {float(r * 0x1.921fb54442d18p+1), int(as_type<long>(shifted))};
}
// Zeros at whole turns and halves are positive for positive x: -0 + 0 is 0.
ZK_INLINE float sinpi(float x) {
  auto [r, quarter] = zk_turn_pi(fabs(x));
  return zk_with_sign(zk_wave(r, quarter) + 0.0f, x);
}
ZK_INLINE float cospi(float x) {
  auto [r, quarter] = zk_turn_pi(x);
  return zk_wave(r, quarter + 1) + 0.0f;
}
ZK_INLINE float tanpi(float x) {
  auto [r, quarter] = zk_turn_pi(fabs(x));
  return zk_with_sign((zk_wave(r, quarter) + 0.0f) / (zk_wave(r, quarter + 1) + 0.0f), x);
}
ZK_MATH_1(sinpi)
ZK_MATH_1(cospi)
ZK_MATH_1(tanpi)

// atan for 0 <= a <= 1.
ZK_INLINE float zk_atan_unit(float a) {
  float s = a * a;
  float p = 0x1.7ec566p-9f;
  p = fma(p, s, -0x1.0c26b2p-6f);
  p = fma(p, s, 0x1.61f8ep-5f);
  p = fma(p, s, -0x1.3553e4p-4f);
  p = fma(p, s, 0x1.b4df72p-4f);
  p = fma(p, s, -0x1.230a9cp-3f);
  p = fma(p, s, 0x1.9978ecp-3f);
  p = fma(p, s, -0x1.5554dcp-2f);
  return fma(p, s * a, a);
}

ZK_INLINE float atan(float x) {
  float a = fabs(x);
  float y = zk_atan_unit(a > 1.0f ? 1.0f / a : a);
  return copysign(a > 1.0f ? 0x1.921fb6p+0f - y : y, x);
}
ZK_MATH_1(atan)

ZK_INLINE float atan2(float y, float x) {
  float a = fabs(y), b = fabs(x);
  float low = a < b ? a : b, high = a < b ? b : a;
  // Equal infinities and zeros are one eighth of a turn and none, as C has it.
  float ratio = low == high ? (high == 0.0f ? 0.0f : 1.0f) : low / high;
  float angle = zk_atan_unit(ratio);
  angle = a > b ? 0x1.921fb6p+0f - angle : angle;
  angle = signbit(x) ? 0x1.921fb6p+1f - angle : angle;
  return isnan(x) || isnan(y) ? NAN : copysign(angle, y);
}
ZK_MATH_2(atan2)

// asin for 0 <= a <= 1/2.
ZK_INLINE float zk_asin_half(float a) {
  float s = a * a;
  float p = 0x1.595c8cp-5f;
  p = fma(p, s, 0x1.8c3e2ap-6f);
  p = fma(p, s, 0x1.747bbap-5f);
  p = fma(p, s, 0x1.330204p-4f);
  p = fma(p, s, 0x1.5555c8p-3f);
  return fma(p, s * a, a);
}

// Above one half through asin(a) = π/2 - 2·asin(sqrt((1 - a)/2)).
ZK_INLINE float asin(float x) {
  float a = fabs(x);
  bool small = a <= 0.5f;
  float y = zk_asin_half(small ? a : sqrt(fma(a, -0.5f, 0.5f)));
  return copysign(small ? y : fma(y, -2.0f, 0x1.921fb6p+0f), x);
}
ZK_INLINE float acos(float x) {
  float a = fabs(x);
  bool small = a <= 0.5f;
  float y = zk_asin_half(small ? a : sqrt(fma(a, -0.5f, 0.5f)));
  float large = x < 0.0f ? fma(y, -2.0f, 0x1.921fb6p+1f) : 2.0f * y;
  float middle = 0x1.921fb6p+0f - (copysign(y, x) + 0x1.777a5cp-25f);
  return small ? middle : large;
}
ZK_MATH_1(asin)
ZK_MATH_1(acos)

}  // namespace metal
