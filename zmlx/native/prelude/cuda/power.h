// section power; needs exponential; tokens pow( powr(
// Powers of CUDA's math library.

namespace metal {

METAL_FUNC float pow(float x, float y) { return ZK_QUICK(::powf, ::__powf)(x, y); }
// x^y for x >= 0 only.
METAL_FUNC float powr(float x, float y) { return x < 0.0f ? NAN : pow(x, y); }
ZK_MATH_2(pow)
ZK_MATH_2(powr)

}  // namespace metal
