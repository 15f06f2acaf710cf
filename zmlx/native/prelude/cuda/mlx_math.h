// section mlx_math; needs exponential; tokens log1p( hypot(
// log1p and hypot, which Metal lacks and MLX adds.

METAL_FUNC float log1p(float x) { return ::log1pf(x); }
#ifdef ZK_NUMBERS
METAL_FUNC float log1p(half x) { return ::log1pf(x); }
METAL_FUNC bfloat log1p(bfloat x) { return bfloat(::log1pf(x)); }
#endif
METAL_FUNC float hypot(float x, float y) { return ::hypotf(x, y); }
