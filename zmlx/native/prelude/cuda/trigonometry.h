// section trigonometry; needs math exponential; tokens sin( cos( tan( sincos( sinpi( cospi( tanpi( asin( acos( atan( atan2(
// Trigonometric functions of CUDA's math library.

namespace metal {

METAL_FUNC float sin(float x) { return ZK_QUICK(::sinf, ::__sinf)(x); }
METAL_FUNC float cos(float x) { return ZK_QUICK(::cosf, ::__cosf)(x); }
METAL_FUNC float tan(float x) { return ZK_QUICK(::tanf, ::__tanf)(x); }
METAL_FUNC float sinpi(float x) { return ::sinpif(x); }
METAL_FUNC float cospi(float x) { return ::cospif(x); }
// The quotient is exact where it matters: zeros and poles are.
METAL_FUNC float tanpi(float x) { return ::sinpif(x) / ::cospif(x); }
METAL_FUNC float asin(float x) { return ::asinf(x); }
METAL_FUNC float acos(float x) { return ::acosf(x); }
METAL_FUNC float atan(float x) { return ::atanf(x); }
METAL_FUNC float atan2(float y, float x) { return ::atan2f(y, x); }
METAL_FUNC float sincos(float x, float& cosine) {
  float sine;
  ::sincosf(x, &sine, &cosine);
  return sine;
}
ZK_MATH_SPLIT(sincos)
ZK_MATH_1(sin)
ZK_MATH_1(cos)
ZK_MATH_1(tan)
ZK_MATH_1(sinpi)
ZK_MATH_1(cospi)
ZK_MATH_1(tanpi)
ZK_MATH_1(asin)
ZK_MATH_1(acos)
ZK_MATH_1(atan)
ZK_MATH_2(atan2)

}  // namespace metal
