// section parts; needs math; tokens frexp( ldexp( modf( nextafter( ilogb(
// Functions of CUDA's math library that take a float apart.

namespace metal {

METAL_FUNC float ldexp(float x, int k) { return ::ldexpf(x, k); }
METAL_FUNC float frexp(float x, int& exponent) {
  exponent = 0;
  return isfinite(x) ? ::frexpf(x, &exponent) : x;
}
METAL_FUNC int ilogb(float x) {
  return x == 0.0f ? FP_ILOGB0 : isnan(x) ? FP_ILOGBNAN : isinf(x) ? INT_MAX : ::ilogbf(x);
}
METAL_FUNC float modf(float x, float& whole) { return ::modff(x, &whole); }
METAL_FUNC float nextafter(float x, float y) { return ::nextafterf(x, y); }

#ifdef ZK_NUMBERS
// The neighbour of x towards y: values of one sign are ordered as their bits are.
METAL_FUNC half nextafter(half x, half y) {
  float a = x, b = y;
  if (isunordered(a, b)) return half(NAN);
  if (a == b) return y;
  ushort bits = as_type<ushort>(x);
  if (a == 0.0f) return as_type<half>(ushort(b > 0.0f ? 1 : 0x8001));
  return as_type<half>(ushort((a < b) == (a > 0.0f) ? bits + 1 : bits - 1));
}
// As MLX has it: a neighbour among floats, rounded.
METAL_FUNC bfloat nextafter(bfloat x, bfloat y) { return bfloat(nextafter(float(x), float(y))); }
#define ZK_NARROW_PARTS(T)                                                        \
  METAL_FUNC T ldexp(T x, int k) { return T(ldexp(float(x), k)); }                \
  METAL_FUNC T frexp(T x, int& exponent) { return T(frexp(float(x), exponent)); } \
  METAL_FUNC int ilogb(T x) { return ilogb(float(x)); }                           \
  METAL_FUNC T modf(T x, T& whole) {                                              \
    float w, fraction = modf(float(x), w);                                        \
    whole = T(w);                                                                 \
    return T(fraction);                                                           \
  }
ZK_NARROW_PARTS(half)
ZK_NARROW_PARTS(bfloat)
#undef ZK_NARROW_PARTS
#endif
ZK_VECTOR_2(nextafter)

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
template <class T, int N>
METAL_FUNC vec<T, N> modf(vec<T, N> x, vec<T, N>& whole) {
  for (int i = 0; i < N; ++i) x[i] = modf(x[i], whole[i]);
  return x;
}
#endif

}  // namespace metal
