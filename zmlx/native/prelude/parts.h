// section parts; needs math; tokens frexp( ldexp( modf( nextafter( ilogb(
// Functions that take a float apart.

namespace metal {

// x · 2^k, rounded once: in double neither the factor nor a subnormal product loses bits.
METAL_FUNC float ldexp(float x, int k) {
  int bounded = clamp(k, -300, 300);
  return float(double(x) * as_type<double>(long(bounded + 1023) << 52));
}

// x = m · 2^exponent with 1/2 <= |m| < 1; zeros, infinities and NaN are their own m.
METAL_FUNC float frexp(float x, int& exponent) {
  // Subnormals have the exponent of their value as a normal number.
  bool subnormal = fabs(x) < FLT_MIN;
  int bits = as_type<int>(subnormal ? x * 0x1p24f : x);
  bool special = x == 0.0f || !isfinite(x);
  exponent = special ? 0 : (bits >> 23 & 255) - 126 - (subnormal ? 24 : 0);
  return special ? x : as_type<float>((bits & int(0x807fffff)) | 0x3f000000);
}

METAL_FUNC int ilogb(float x) {
  int exponent;
  frexp(x, exponent);
  return x == 0.0f ? FP_ILOGB0 : isnan(x) ? FP_ILOGBNAN : isinf(x) ? INT_MAX : exponent - 1;
}

// The fraction, with the sign of x, and the whole part.
METAL_FUNC float modf(float x, float& whole) {
  whole = trunc(x);
  return copysign(isinf(x) ? 0.0f : x - whole, x);
}

// The neighbour of x towards y: floats of one sign are ordered as their bits are.
template <class T, class Bits>
METAL_FUNC T zk_nextafter(T x, T y) {
  Bits bits = as_type<Bits>(x), sign = Bits(1) << (8 * sizeof(T) - 1);
  bool up = float(x) < float(y), positive = float(x) > 0.0f;
  Bits away = up == positive ? bits + 1 : bits - 1;
  T next = as_type<T>(float(x) == 0.0f ? Bits(up ? 1 : sign | 1) : away);
  return isunordered(x, y) ? T(NAN) : float(x) == float(y) ? y : next;
}
METAL_FUNC float nextafter(float x, float y) { return zk_nextafter<float, uint>(x, y); }
#ifdef ZK_NUMBERS
METAL_FUNC half nextafter(half x, half y) { return zk_nextafter<half, ushort>(x, y); }
// As MLX has it: a neighbour among floats, rounded.
METAL_FUNC bfloat nextafter(bfloat x, bfloat y) { return bfloat(nextafter(float(x), float(y))); }
#define ZK_NARROW_PARTS(T)                                                       \
  METAL_FUNC T ldexp(T x, int k) { return T(ldexp(float(x), k)); }               \
  METAL_FUNC T frexp(T x, int& exponent) { return T(frexp(float(x), exponent)); } \
  METAL_FUNC int ilogb(T x) { return ilogb(float(x)); }
ZK_NARROW_PARTS(half)
ZK_NARROW_PARTS(bfloat)
#undef ZK_NARROW_PARTS
#endif
ZK_VECTOR_2(nextafter)
ZK_MATH_SPLIT(modf)

#ifdef ZK_VECTORS
template <class T, int N>
METAL_FUNC vec<T, N> ldexp(vec<T, N> x, zk_same<vec<int, N>> k) {
  for (int i = 0; i < N; ++i) x[i] = ldexp(x[i], k[i]);
  return x;
}
template <class T, int N>
METAL_FUNC vec<T, N> frexp(vec<T, N> x, vec<int, N>& exponent) {
  for (int i = 0; i < N; ++i) x[i] = frexp(x[i], exponent[i]);
  return x;
}
template <class T, int N>
METAL_FUNC vec<int, N> ilogb(vec<T, N> x) {
  vec<int, N> y;
  for (int i = 0; i < N; ++i) y[i] = ilogb(x[i]);
  return y;
}
#endif

}  // namespace metal
