// section power; needs exponential; tokens pow( powr(
// pow in double precision inside: y·log2(x) needs some 9 bits more than a float holds.

namespace metal {

// log2(x) for finite x > 0, to 2^-35: 2/ln(2)·atanh(f/(2+f)) as an odd polynomial.
ZK_INLINE double zk_log2_double(float x) {
  auto [m, e] = zk_split(x);
  double f = double(m) - 1.0, s = f / (f + 2.0), u = s * s;
  double p = 0x1.64cf37de090f1p-2;
  p = __builtin_fma(p, u, 0x1.a512525bb067cp-2);
  p = __builtin_fma(p, u, 0x1.2778a84bdf1e4p-1);
  p = __builtin_fma(p, u, 0x1.ec709b53bfad6p-1);
  p = __builtin_fma(p, u, 0x1.71547652d859fp+1);
  return __builtin_fma(p, s, double(e));
}

ZK_INLINE float pow(float x, float y) {
  float a = fabs(x), b = fabs(y);
  double exponent = zk_log2_double(a);
  exponent = a == 0.0f ? -double(INFINITY) : exponent;
  exponent = a < INFINITY ? exponent : double(a);
  double t = double(y) * exponent;
  t = t < -160.0 ? -160.0 : t;
  t = t > 130.0 ? 130.0 : t;
  constexpr double shift = 0x1.8p52;
  double n = t + shift - shift;
  float z = zk_scale(zk_exp2_reduced(float(t - n)), float(n) + zk_shift);
  // Every float of 2^24 and more is an even integer. Conditions are joined by & and |, because
  // && would keep the loop from vectorising.
  float whole = b < 0x1p24f ? b : 0.0f;
  bool fraction = trunc(whole) != whole;
  bool odd = int(whole) & 1 & int(!fraction);
  z = as_type<float>(as_type<int>(z) ^ (as_type<int>(x) & -int(odd) & int(0x80000000)));
  z = ((x < 0.0f) & (a < INFINITY) & fraction) ? NAN : z;
  z = ((x == -1.0f) & (b == INFINITY)) ? 1.0f : z;
  return ((x == 1.0f) | (y == 0.0f)) ? 1.0f : z;
}
ZK_MATH_2(pow)

// x^y for x >= 0 only.
ZK_INLINE float powr(float x, float y) { return x < 0.0f ? NAN : pow(x, y); }
ZK_MATH_2(powr)

}  // namespace metal
