// section lanes; needs base; after numbers; tokens ZMLX_FLOATS ZMLX_ROLLED ZMLX_SCALAR ZMLX_APART zmlx_floats
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
// First in a loop of few turns, which g++ would compile with vectors, their tails and their checks.
#define ZMLX_SCALAR __asm__ volatile("");
// Before a function that is called in several places, which g++ would compile in each.
#define ZMLX_APART __attribute__((noinline))

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

// a[0] + a[1], a[2] + a[3], ..., and then those of b.
template <int N>
METAL_FUNC zmlx_floats<N> zmlx_pair_sums(zmlx_floats<N> a, zmlx_floats<N> b) {
  zmlx_floats<N> sums;
  for (int u = 0; u < N / 2; ++u) {
    sums.zk_values[u] = a.zk_values[2 * u] + a.zk_values[2 * u + 1];
    sums.zk_values[N / 2 + u] = b.zk_values[2 * u] + b.zk_values[2 * u + 1];
  }
  return sums;
}
#ifndef __clang__
template <>
METAL_FUNC zmlx_floats<16> zmlx_pair_sums<16>(zmlx_floats<16> a, zmlx_floats<16> b) {
  typedef int zk_places __attribute__((vector_size(64)));
  const zk_places even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {__builtin_shuffle(a.zk_values, b.zk_values, even) +
          __builtin_shuffle(a.zk_values, b.zk_values, even + 1)};
}
#endif

template <int N>
struct zk_integers {
  typedef int zk_type __attribute__((vector_size(4 * N)));
  zk_type zk_values;
};

// N bytes from p on, signed or not, which g++ widens in some ten instructions unless it is told.
template <int N, class B>
METAL_FUNC zk_integers<N> zk_widened(typename zk_packed_lanes<B, N>::zk_type bytes) {
  return {__builtin_convertvector(bytes, typename zk_integers<N>::zk_type)};
}

#if defined(__AVX2__) && !defined(__clang__)
typedef char zk_octets __attribute__((vector_size(16)));
#ifdef __AVX512F__
#define ZK_WIDENED(B, sign)                                                                     \
  template <>                                                                                   \
  METAL_FUNC zk_integers<16> zk_widened<16, B>(zk_packed_lanes<B, 16>::zk_type bytes) {         \
    return {__builtin_ia32_pmov##sign##xbd512_mask((zk_octets)bytes, zk_integers<16>::zk_type{}, \
                                                   -1)};                                        \
  }
#else
#define ZK_WIDENED(B, sign)                                                             \
  template <>                                                                           \
  METAL_FUNC zk_integers<16> zk_widened<16, B>(zk_packed_lanes<B, 16>::zk_type bytes) { \
    const zk_octets lower = (zk_octets)bytes;                                             \
    const zk_octets upper =                                                              \
        __builtin_shuffle(lower, zk_octets{8, 9, 10, 11, 12, 13, 14, 15});               \
    const auto low = __builtin_ia32_pmov##sign##xbd256(lower);                          \
    const auto high = __builtin_ia32_pmov##sign##xbd256(upper);                         \
    zk_integers<16> both;                                                               \
    __builtin_memcpy(&both, &low, 32);                                                  \
    __builtin_memcpy((char*)&both + 32, &high, 32);                                     \
    return both;                                                                        \
  }
#endif
ZK_WIDENED(unsigned char, z)
ZK_WIDENED(signed char, s)
#undef ZK_WIDENED
#endif

// Of each of N bytes from p on: its value `place` of BITS bits in the lowest, and what is above.
template <int BITS, int N>
METAL_FUNC typename zk_integers<N>::zk_type zk_placed(const metal::uchar* p, int place) {
  const auto bytes = *(const typename zk_packed_lanes<unsigned char, N>::zk_type*)p;
  return zk_widened<N, unsigned char>(bytes).zk_values >> BITS * place;
}

#if defined(__AVX512F__) && !defined(__clang__)
#define ZK_PICKS 1
// All that 4 bits can be, of which one instruction picks by the lowest bits of its lanes.
inline constexpr zmlx_floats<16>::zk_type zk_nibbles = {0, 1, 2,  3,  4,  5,  6,  7,
                                                        8, 9, 10, 11, 12, 13, 14, 15};
#else
#define ZK_PICKS 0
inline constexpr zmlx_floats<16>::zk_type zk_nibbles = {};
#endif

// Of each of N bytes from p on: its value `place` of BITS bits, less half of 2^BITS.
template <int BITS, int N>
METAL_FUNC zmlx_floats<N> zmlx_codes(const metal::uchar* p, int place) {
  typedef typename zmlx_floats<N>::zk_type zk_lanes;
  if constexpr (BITS == 8) {
    const auto bytes = *(const typename zk_packed_lanes<unsigned char, N>::zk_type*)p;
    typedef typename zk_packed_lanes<signed char, N>::zk_type zk_signed;
    const auto codes = zk_widened<N, signed char>((zk_signed)(bytes ^ 0x80)).zk_values;
    return {__builtin_convertvector(codes, zk_lanes)};
  } else if constexpr (ZK_PICKS && BITS == 4 && N == 16) {
    return {__builtin_shuffle(zk_nibbles - 8.0f, zk_placed<BITS, N>(p, place))};
  } else {
    const auto codes = zk_placed<BITS, N>(p, place) & ((1 << BITS) - 1);
    return {__builtin_convertvector(codes - (1 << (BITS - 1)), zk_lanes)};
  }
}

// Of each of N bytes from p on: its value `place` of BITS bits, times scale, plus bias.
template <int BITS, int N>
METAL_FUNC zmlx_floats<N> zmlx_dequantized(const metal::uchar* p, int place, float scale,
                                           float bias) {
  const auto scales = zmlx_splat<N>(scale), biases = zmlx_splat<N>(bias);
  auto values = zk_placed<BITS, N>(p, place);
  if constexpr (ZK_PICKS && BITS == 4 && N == 16) {
    return {__builtin_shuffle(zmlx_fma<16>({zk_nibbles}, scales, biases).zk_values, values)};
  } else {
    if (BITS * place + BITS < 8) values &= (1 << BITS) - 1;
    const zmlx_floats<N> numbers = {
        __builtin_convertvector(values, typename zmlx_floats<N>::zk_type)};
    return zmlx_fma<N>(numbers, scales, biases);
  }
}
