// section exponential; needs math; tokens exp( exp2( exp10( log( log2( log10( sinh( cosh( tanh( asinh( acosh( atanh( log1p( hypot( ZMLX_EXP_BOUNDED
// Exponentials, logarithms, powers and hyperbolic functions as branch-free polynomials, which
// vectorise inside user loops. The coefficients are minimax fits by Remez exchange in 40 digits,
// rounded to float one by one with the rest refitted. Bounds over all floats are in the tests.

namespace metal {

// Adding this to |x| < 2^22 leaves round(x) + 254 in the low bits of the sum.
inline constexpr float zk_shift = 0x1.8p23f + 254.0f;

// p · 2^n for n in -150 ... 128, where `shifted` is n + zk_shift: two factors, so that neither
// overflows and a subnormal result is rounded once.
ZK_INLINE float zk_scale(float p, float shifted) {
  int biased = as_type<int>(shifted);
  int first = biased >> 1;
  return p * as_type<float>(first << 23) * as_type<float>((biased - first) << 23);
}

// exp(r) - 1 for |r| <= ln(2)/2.
ZK_INLINE float zk_expm1_reduced(float r) {
  // Two halves of the polynomial at once: a shorter chain keeps more of a loop in flight.
  float s = r * r;
  float high = fma(0x1.6ab89cp-10f, r, 0x1.123d7p-7f);
  float q = fma(high, s, fma(0x1.55585ap-5f, r, 0x1.55548cp-3f));
  q = fma(q, r, 0x1.fffffcp-2f);
  return fma(q, s, r);
}
ZK_INLINE float zk_exp_reduced(float r) { return 1.0f + zk_expm1_reduced(r); }

// exp(x) · 2^bias, for x within -104 ... 89 + bias·ln(2); ln(2) in two parts (Cody and Waite).
ZK_INLINE float zk_exp(float x, float bias) {
  float shifted = fma(x, 0x1.715476p+0f, zk_shift);
  float n = shifted - zk_shift;
  float r = fma(n, -0x1.62e43p-1f, x);
  r = fma(n, 0x1.05c61p-29f, r);
  return zk_scale(zk_exp_reduced(r), shifted + bias);
}

// As on Apple GPUs, a result below 2^-126 is 0: one integer addition then scales by 2^n, which is
// half the time of a loop over exp. n stays in the low bits of `shifted`.
ZK_INLINE float exp(float x) {
  constexpr float shift = 0x1.8p23f;
  float shifted = fma(x, 0x1.715476p+0f, shift);
  float n = shifted - shift;
  float r = fma(n, -0x1.62e43p-1f, x);
  r = fma(n, 0x1.05c61p-29f, r);
  float y = as_type<float>(as_type<uint>(zk_exp_reduced(r)) + (as_type<uint>(shifted) << 23));
  y = x < -0x1.5d589ep6f ? 0.0f : y;
  // The sum is infinity above the range, and NaN for NaN, whose bits the shift above breaks.
  return x <= 0x1.62e42ep6f ? y : x + INFINITY;
}
ZK_MATH_1(exp)

// exp(x) of an x that is at most 88, infinite or NaN, in five sixths of the time: of the exponents
// of 2, 127 is the largest, and whatever is far above it overflows by itself. The smaller of the
// bits is one instruction, that of the floats two in g++'s vectors; it is the same while `most` is
// positive, and a NaN comes back from r.
ZK_INLINE float zk_exp_bounded(float x) {
  constexpr float shift = 0x1.8p23f + 127.0f;
  int bits = as_type<int>(fma(x, 0x1.715476p+0f, shift)), most = as_type<int>(shift + 127.0f);
  float shifted = as_type<float>(bits < most ? bits : most);
  float n = shifted - shift;
  float r = fma(n, -0x1.62e43p-1f, x);
  r = fma(n, 0x1.05c61p-29f, r);
  float scale = as_type<float>(as_type<uint>(shifted) << 23);
  float y = fma(scale, zk_expm1_reduced(r), scale);
  return x < -0x1.5d589ep6f ? 0.0f : y;
}
#define ZMLX_EXP_BOUNDED(x) zk_exp_bounded(x)

// exp2(r) for |r| <= 1/2, with ln(2) in two parts.
ZK_INLINE float zk_exp2_reduced(float r) {
  float q = 0x1.41ae54p-13f;
  q = fma(q, r, 0x1.5f070ep-10f);
  q = fma(q, r, 0x1.3b2daep-7f);
  q = fma(q, r, 0x1.c6af84p-5f);
  q = fma(q, r, 0x1.ebfbdcp-3f);
  q = fma(q, r, -0x1.05c61p-29f);
  return 1.0f + fma(r, 0x1.62e43p-1f, q * r);
}

ZK_INLINE float exp2(float x) {
  x = x < -151.0f ? -151.0f : x;
  x = x > 128.0f ? 128.0f : x;
  float shifted = x + zk_shift;
  return zk_scale(zk_exp2_reduced(x - (shifted - zk_shift)), shifted);
}
ZK_MATH_1(exp2)

ZK_INLINE float exp10(float x) {
  x = x < -46.0f ? -46.0f : x;
  x = x > 39.0f ? 39.0f : x;
  float shifted = fma(x, 0x1.a934fp+1f, zk_shift);
  float n = shifted - zk_shift;
  float r = fma(n, -0x1.344136p-2f, x);
  r = fma(n, 0x1.ec10cp-27f, r);
  float q = 0x1.a6f7e2p-3f;
  q = fma(q, r, 0x1.155d9ep-1f);
  q = fma(q, r, 0x1.2bd99ep+0f);
  q = fma(q, r, 0x1.046fbcp+1f);
  q = fma(q, r, 0x1.53524ap+1f);
  q = fma(q, r, -0x1.12aabap-25f);
  return zk_scale(1.0f + fma(r, 0x1.26bb1cp+1f, q * r), shifted);
}
ZK_MATH_1(exp10)

// x = m · 2^e with m in [2/3, 4/3), which centres m - 1 on zero; subnormals are scaled up first.
struct zk_parts {
  float m, e;
};
ZK_INLINE zk_parts zk_split(float x) {
  bool tiny = x < 0x1p-126f;
  int bits = as_type<int>(tiny ? x * 0x1p23f : x);
  int exponent = (bits - 0x3f2aaaab) & -0x00800000;
  float e = float(exponent) * 0x1p-23f;
  return {as_type<float>(bits - exponent), tiny ? e - 23.0f : e};
}

// log(1 + f) - f for |f| <= 1/3.
ZK_INLINE float zk_log_tail(float f) {
  float p = -0x1.079982p-3f;
  p = fma(p, f, 0x1.1e7e86p-3f);
  p = fma(p, f, -0x1.f33deep-4f);
  p = fma(p, f, 0x1.1ed27ap-3f);
  p = fma(p, f, -0x1.559c5ep-3f);
  p = fma(p, f, 0x1.99d06ep-3f);
  p = fma(p, f, -0x1.fffef8p-3f);
  p = fma(p, f, 0x1.555506p-2f);
  p = fma(p, f, -0.5f);
  return p * (f * f);
}

// A logarithm's value where x is not a positive finite number.
ZK_INLINE float zk_log_edges(float x, float y) {
  y = x < INFINITY ? y : x;
  return x > 0.0f ? y : x == 0.0f ? -INFINITY : NAN;
}

ZK_INLINE float log(float x) {
  auto [m, e] = zk_split(x);
  float f = m - 1.0f;
  float y = fma(e, 0x1.62e43p-1f, fma(e, -0x1.05c61p-29f, zk_log_tail(f)) + f);
  return zk_log_edges(x, y);
}
ZK_MATH_1(log)

ZK_INLINE float log2(float x) {
  auto [m, e] = zk_split(x);
  float f = m - 1.0f, tail = zk_log_tail(f);
  float low = fma(f, 0x1.4ae0cp-26f, tail * 0x1.715476p+0f);
  return zk_log_edges(x, e + fma(f, 0x1.715476p+0f, low));
}
ZK_MATH_1(log2)

ZK_INLINE float log10(float x) {
  auto [m, e] = zk_split(x);
  float f = m - 1.0f, tail = zk_log_tail(f);
  float low = fma(e, -0x1.ec10cp-27f, fma(f, -0x1.5b235ep-27f, tail * 0x1.bcb7b2p-2f));
  return zk_log_edges(x, fma(e, 0x1.344136p-2f, fma(f, 0x1.bcb7b2p-2f, low)));
}
ZK_MATH_1(log10)

ZK_INLINE float tanh(float x) {
  float a = fabs(x), s = x * x;
  float p = -0x1.750ce4p-8f;
  p = fma(p, s, 0x1.51f8cep-6f);
  p = fma(p, s, -0x1.b835a4p-5f);
  p = fma(p, s, 0x1.1106f6p-3f);
  p = fma(p, s, -0x1.555532p-2f);
  float small = fma(p, s * a, a);
  float large = 1.0f - 2.0f / (zk_exp_bounded(2.0f * a) + 1.0f);
  return copysign(a < 0.625f ? small : large, x);
}
ZK_MATH_1(tanh)

// sinh(x) and cosh(x) from exp(|x|)/2, which is finite wherever they are.
ZK_INLINE float zk_half_exp(float x) {
  float a = fabs(x);
  return zk_exp(a > 90.0f ? 90.0f : a, -1.0f);
}
ZK_INLINE float sinh(float x) {
  float a = fabs(x), s = x * x, h = zk_half_exp(x);
  float p = 0x1.756c1ep-19f;
  p = fma(p, s, 0x1.a022bcp-13f);
  p = fma(p, s, 0x1.1110ep-7f);
  p = fma(p, s, 0x1.555556p-3f);
  return copysign(a < 1.0f ? fma(p, s * a, a) : h - 0.25f / h, x);
}
ZK_INLINE float cosh(float x) {
  float h = zk_half_exp(x);
  return h + 0.25f / h;
}
ZK_MATH_1(sinh)
ZK_MATH_1(cosh)

// log(1 + x) for x > -1, with the rounding of 1 + x put back.
ZK_INLINE float zk_log1p(float x) {
  float u = 1.0f + x;
  float lost = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
  return log(u) + (u < INFINITY ? lost / u : 0.0f);
}

// Beyond 2^20 the square under the root swamps the 1 and asinh(x) = acosh(x) = log(x) + ln(2).
ZK_INLINE float asinh(float x) {
  float a = fabs(x), s = a * a;
  bool large = a > 0x1p20f;
  float y = zk_log1p(large ? a : a + s / (1.0f + sqrt(1.0f + s)));
  return copysign(large ? y + 0x1.62e43p-1f : y, x);
}
ZK_INLINE float acosh(float x) {
  float t = x - 1.0f;
  bool large = x > 0x1p20f;
  float y = zk_log1p(large ? x : t + sqrt(t * (t + 2.0f)));
  y = large ? y + 0x1.62e43p-1f : y;
  return x < 1.0f ? NAN : y;
}
ZK_INLINE float atanh(float x) {
  float a = fabs(x);
  return copysign(0.5f * zk_log1p(2.0f * a / (1.0f - a)), x);
}
ZK_MATH_1(asinh)
ZK_MATH_1(acosh)
ZK_MATH_1(atanh)

}  // namespace metal
