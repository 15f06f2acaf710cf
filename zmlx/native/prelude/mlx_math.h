// section mlx_math; needs exponential; after numbers; tokens log1p( hypot(
// log1p and hypot, which Metal lacks and MLX adds.

// Goldberg, "What Every Computer Scientist Should Know About Floating-Point Arithmetic", theorem 4:
// the error of log(1 + x) is that of the rounded sum, which the quotient takes out again.
ZK_INLINE float log1p(float x) {
  float sum = 1.0f + x;
  float y = x * (metal::log(sum) / (sum - 1.0f));
  y = sum == 1.0f ? x : y;
  return sum == INFINITY ? INFINITY : y;
}
#ifdef ZK_NUMBERS
ZK_INLINE float log1p(half x) { return log1p(float(x)); }
ZK_INLINE bfloat log1p(bfloat x) { return bfloat(log1p(float(x))); }
#endif

// In double the squares of floats neither overflow nor underflow.
ZK_INLINE float hypot(float x, float y) {
  float h = float(__builtin_sqrt(double(x) * x + double(y) * y));
  return metal::isinf(x) || metal::isinf(y) ? INFINITY : h;
}
