// section exponential; needs math; tokens exp( exp2( exp10( log( log2( log10( sinh( cosh( tanh( asinh( acosh( atanh(
// Exponentials, logarithms and hyperbolic functions of CUDA's math library; where the kernel asks
// for fast math, the special function unit's approximations.

#ifdef ZK_FAST_MATH
#define ZK_QUICK(accurate, quick) quick
#else
#define ZK_QUICK(accurate, quick) accurate
#endif

namespace metal {

METAL_FUNC float exp(float x) { return ZK_QUICK(::expf, ::__expf)(x); }
METAL_FUNC float exp2(float x) { return ::exp2f(x); }
METAL_FUNC float exp10(float x) { return ZK_QUICK(::exp10f, ::__exp10f)(x); }
METAL_FUNC float log(float x) { return ZK_QUICK(::logf, ::__logf)(x); }
METAL_FUNC float log2(float x) { return ZK_QUICK(::log2f, ::__log2f)(x); }
METAL_FUNC float log10(float x) { return ZK_QUICK(::log10f, ::__log10f)(x); }
METAL_FUNC float sinh(float x) { return ::sinhf(x); }
METAL_FUNC float cosh(float x) { return ::coshf(x); }
METAL_FUNC float tanh(float x) { return ::tanhf(x); }
METAL_FUNC float asinh(float x) { return ::asinhf(x); }
METAL_FUNC float acosh(float x) { return ::acoshf(x); }
METAL_FUNC float atanh(float x) { return ::atanhf(x); }
ZK_MATH_1(exp)
ZK_MATH_1(exp2)
ZK_MATH_1(exp10)
ZK_MATH_1(log)
ZK_MATH_1(log2)
ZK_MATH_1(log10)
ZK_MATH_1(sinh)
ZK_MATH_1(cosh)
ZK_MATH_1(tanh)
ZK_MATH_1(asinh)
ZK_MATH_1(acosh)
ZK_MATH_1(atanh)

}  // namespace metal
