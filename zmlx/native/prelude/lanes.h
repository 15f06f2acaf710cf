// section lanes; needs base; after numbers; tokens ZMLX_FLOATS zmlx_floats
// zmlx_floats<N>: N floats side by side, which one thread computes with as a vector register. Loops
// over arrays say the same, but compilers do not keep their sums in registers, or widen bytes in
// ten instructions. A kernel that uses these has the loops for targets without ZMLX_FLOATS.

#define ZMLX_FLOATS 1

// Before a loop of a fixed, small number of steps over lanes: arrays of lanes that it indexes are
// registers only where it is unrolled.
#define ZMLX_UNROLL _Pragma("GCC unroll 16")

// Vectors of N that lie wherever their elements may.
template <class T, int N>
struct zk_packed_lanes {
  typedef T zk_type __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T))));
};
template <int N>
struct zk_words {
  typedef unsigned zk_type __attribute__((vector_size(4 * N), aligned(1)));
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

// Of each of N words of 32 bits from p on, as they lie in memory: its value `place` of BITS bits.
template <int BITS, int N>
METAL_FUNC zmlx_floats<N> zmlx_codes(const metal::uchar* p, int place) {
  typedef int zk_integers __attribute__((vector_size(4 * N)));
  const auto words = *(const typename zk_words<N>::zk_type*)p;
  const auto codes = words >> BITS * place & (1u << BITS) - 1;
  return {__builtin_convertvector((zk_integers)codes, typename zmlx_floats<N>::zk_type)};
}
