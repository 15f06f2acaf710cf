// section lanes; needs base; after numbers; tokens ZMLX_FLOATS ZMLX_ROLLED zmlx_floats
// zmlx_floats<N>: N floats side by side, which one thread computes with as a vector register. Loops
// over arrays say the same, but compilers do not keep their sums in registers, or widen bytes in
// ten instructions. A kernel that uses these has the loops for targets without ZMLX_FLOATS.

#define ZMLX_FLOATS 1

// Before a loop of a fixed, small number of steps over lanes: arrays of lanes that it indexes are
// registers only where it is unrolled.
#define ZMLX_UNROLL _Pragma("GCC unroll 16")
// Before a loop of many statements that gains nothing by being written out, as g++ would: that took
// two thirds of the time to compile a kernel.
#define ZMLX_ROLLED _Pragma("GCC unroll 1")

// Vectors of N that lie wherever their elements may.
template <class T, int N>
struct zk_packed_lanes {
  typedef T zk_type __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T))));
};

template <int N>
struct zmlx_floats {
  typedef float zk_type __attribute__((vector_size(4 * N)));
  zk_type zk_values;
};

// p[0] ... p[N - 1].
template <int N>
METAL_FUNC zmlx_floats<N> zmlx_read(const float* p) {
  return {*(const typename zk_packed_lanes<float, N>::zk_type*)p};
}
template <int N, class T>
METAL_FUNC zmlx_floats<N> zmlx_read(const T* p) {
  float x[N];
  for (int u = 0; u < N; ++u) x[u] = float(p[u]);
  zmlx_floats<N> lanes;
  __builtin_memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

#if defined(ZK_NUMBERS) && defined(__AVX512F__)
// g++ makes no instruction of the conversion that a half has.
template <>
METAL_FUNC zmlx_floats<16> zmlx_read<16>(const metal::half* p) {
  typedef short zk_halves __attribute__((vector_size(32), aligned(2)));
  const zmlx_floats<16>::zk_type none = {};
  return {__builtin_ia32_vcvtph2ps512_mask(*(const zk_halves*)p, none, -1, 4)};
}
#endif

template <int N>
METAL_FUNC void zmlx_write(float* p, zmlx_floats<N> x) {
  *(typename zk_packed_lanes<float, N>::zk_type*)p = x.zk_values;
}

template <int N>
METAL_FUNC zmlx_floats<N> zmlx_splat(float x) {
  return {x - typename zmlx_floats<N>::zk_type{}};
}

// a * b + c.
template <int N>
METAL_FUNC zmlx_floats<N> zmlx_fma(zmlx_floats<N> a, zmlx_floats<N> b, zmlx_floats<N> c) {
  return {a.zk_values * b.zk_values + c.zk_values};
}

template <int N>
struct zk_integers {
  typedef int zk_type __attribute__((vector_size(4 * N)));
  zk_type zk_values;
};

// N bytes from p on, which g++ widens in some ten instructions unless it is told.
template <int N>
METAL_FUNC zk_integers<N> zk_widened(const metal::uchar* p) {
  const auto bytes = *(const typename zk_packed_lanes<unsigned char, N>::zk_type*)p;
  return {__builtin_convertvector(bytes, typename zk_integers<N>::zk_type)};
}

#if defined(__AVX2__) && !defined(__clang__)
template <>
METAL_FUNC zk_integers<16> zk_widened<16>(const metal::uchar* p) {
  typedef char zk_bytes __attribute__((vector_size(16)));
  zk_bytes bytes;
  __builtin_memcpy(&bytes, p, 16);
#ifdef __AVX512F__
  return {__builtin_ia32_pmovzxbd512_mask(bytes, zk_integers<16>::zk_type{}, -1)};
#else
  const zk_bytes upper = __builtin_shuffle(bytes, zk_bytes{8, 9, 10, 11, 12, 13, 14, 15});
  const auto low = __builtin_ia32_pmovzxbd256(bytes), high = __builtin_ia32_pmovzxbd256(upper);
  zk_integers<16> both;
  __builtin_memcpy(&both, &low, 32);
  __builtin_memcpy((char*)&both + 32, &high, 32);
  return both;
#endif
}
#endif

// Of each of N bytes from p on: its value `place` of BITS bits, times scale, plus bias.
template <int BITS, int N>
METAL_FUNC zmlx_floats<N> zmlx_dequantized(const metal::uchar* p, int place, float scale,
                                           float bias) {
  auto codes = zk_widened<N>(p).zk_values >> BITS * place;
  const auto scales = zmlx_splat<N>(scale), biases = zmlx_splat<N>(bias);
#if defined(__AVX512F__) && !defined(__clang__)
  // All 16 values that 4 bits have, of which one instruction picks by the low bits of its lanes.
  if constexpr (BITS == 4 && N == 16) {
    const zmlx_floats<16> all = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    return {__builtin_shuffle(zmlx_fma<16>(all, scales, biases).zk_values, codes)};
  }
#endif
  if (BITS * place + BITS < 8) codes &= (1 << BITS) - 1;
  const zmlx_floats<N> values = {
      __builtin_convertvector(codes, typename zmlx_floats<N>::zk_type)};
  return zmlx_fma<N>(values, scales, biases);
}
