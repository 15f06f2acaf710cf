// section fast; needs exponential trigonometry power; tokens fast precise
// Metal's variants of other precision. A function that is not named here is the same in both.

namespace metal {

namespace fast {
METAL_FUNC float exp(float x) { return ::__expf(x); }
METAL_FUNC float exp10(float x) { return ::__exp10f(x); }
METAL_FUNC float log(float x) { return ::__logf(x); }
METAL_FUNC float log2(float x) { return ::__log2f(x); }
METAL_FUNC float log10(float x) { return ::__log10f(x); }
METAL_FUNC float sin(float x) { return ::__sinf(x); }
METAL_FUNC float cos(float x) { return ::__cosf(x); }
METAL_FUNC float tan(float x) { return ::__tanf(x); }
METAL_FUNC float pow(float x, float y) { return ::__powf(x, y); }
METAL_FUNC float divide(float x, float y) { return ::__fdividef(x, y); }
METAL_FUNC float tanh(float x) { return zk_intrinsic_tanh(x); }
METAL_FUNC float sqrt(float x) { return zk_intrinsic_sqrt(x); }
ZK_MATH_1(exp)
ZK_MATH_1(exp10)
ZK_MATH_1(log)
ZK_MATH_1(log2)
ZK_MATH_1(log10)
ZK_MATH_1(sin)
ZK_MATH_1(cos)
ZK_MATH_1(tan)
ZK_MATH_2(pow)
ZK_MATH_2(divide)
ZK_MATH_1(tanh)
ZK_MATH_1(sqrt)
}  // namespace fast

#ifdef ZK_FAST_MATH
namespace precise {
METAL_FUNC float exp(float x) { return ::expf(x); }
METAL_FUNC float exp10(float x) { return ::exp10f(x); }
METAL_FUNC float log(float x) { return ::logf(x); }
METAL_FUNC float log2(float x) { return ::log2f(x); }
METAL_FUNC float log10(float x) { return ::log10f(x); }
METAL_FUNC float sin(float x) { return ::sinf(x); }
METAL_FUNC float cos(float x) { return ::cosf(x); }
METAL_FUNC float tan(float x) { return ::tanf(x); }
METAL_FUNC float pow(float x, float y) { return ::powf(x, y); }
METAL_FUNC float divide(float x, float y) { return ::__fdiv_rn(x, y); }
METAL_FUNC float sqrt(float x) { return ::__fsqrt_rn(x); }
ZK_MATH_1(exp)
ZK_MATH_1(exp10)
ZK_MATH_1(log)
ZK_MATH_1(log2)
ZK_MATH_1(log10)
ZK_MATH_1(sin)
ZK_MATH_1(cos)
ZK_MATH_1(tan)
ZK_MATH_2(pow)
ZK_MATH_2(divide)
ZK_MATH_1(sqrt)
}  // namespace precise
#endif

}  // namespace metal
