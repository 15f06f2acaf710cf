// section fast; needs exponential trigonometry power; tokens fast precise
// Metal's variants of other precision. A function that is not named here is the same in both.

// A narrow argument brings the functions of metal in, beside those of the variant.
#define ZK_MATH_1_OF(f, variant) ZK_NARROW_1(f) ZK_VECTOR_1_BY(f, variant::f)
#define ZK_MATH_2_OF(f, variant) ZK_NARROW_2(f) ZK_VECTOR_2_BY(f, variant::f)

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
ZK_MATH_1_OF(exp, fast)
ZK_MATH_1_OF(exp10, fast)
ZK_MATH_1_OF(log, fast)
ZK_MATH_1_OF(log2, fast)
ZK_MATH_1_OF(log10, fast)
ZK_MATH_1_OF(sin, fast)
ZK_MATH_1_OF(cos, fast)
ZK_MATH_1_OF(tan, fast)
ZK_MATH_2_OF(pow, fast)
ZK_MATH_2_OF(divide, fast)
ZK_MATH_1_OF(tanh, fast)
ZK_MATH_1_OF(sqrt, fast)
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
ZK_MATH_1_OF(exp, precise)
ZK_MATH_1_OF(exp10, precise)
ZK_MATH_1_OF(log, precise)
ZK_MATH_1_OF(log2, precise)
ZK_MATH_1_OF(log10, precise)
ZK_MATH_1_OF(sin, precise)
ZK_MATH_1_OF(cos, precise)
ZK_MATH_1_OF(tan, precise)
ZK_MATH_2_OF(pow, precise)
ZK_MATH_2_OF(divide, precise)
ZK_MATH_1_OF(sqrt, precise)
}  // namespace precise
#endif

}  // namespace metal
