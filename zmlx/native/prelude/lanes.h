// section lanes; needs base; after numbers; tokens ZMLX_FLOATS ZMLX_LANES ZMLX_SUMS ZMLX_ROLLED ZMLX_SCALAR ZMLX_APART zmlx_floats
// zmlx_floats<N>: N floats side by side, which one thread computes with as a vector register, or as
// several: g++ keeps a vector that is longer than a register in memory, where decoding took two to
// three times as long. Loops over arrays say the same, but compilers do not keep their sums in
// registers, or widen bytes in ten instructions. A kernel that uses these has the loops for targets
// without ZMLX_FLOATS.

#define ZMLX_FLOATS 1

// Lanes of a register, or of the fewest that a kernel is written for, and how many sums of so many
// lanes stay in registers beside what is added to them.
#ifdef __AVX512F__
#define ZMLX_LANES 16
#define ZMLX_SUMS 16
#else
#define ZMLX_LANES 8
#define ZMLX_SUMS 8
#endif

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

#if defined(__AVX512F__)
inline constexpr int zk_register_lanes = 16;
#elif defined(__AVX__)
inline constexpr int zk_register_lanes = 8;
#else
inline constexpr int zk_register_lanes = 4;
#endif

template <int N>
inline constexpr bool zk_is_register = N <= zk_register_lanes;

template <int N, bool One = zk_is_register<N>>
struct zmlx_floats {
  typedef float zk_type __attribute__((vector_size(4 * N)));
  zk_type zk_values;
};
template <int N>
struct zmlx_floats<N, false> {
  zmlx_floats<N / 2> zk_low, zk_high;
};

template <int N>
struct zk_integers {
  typedef int zk_type __attribute__((vector_size(4 * N)));
  zk_type zk_values;
};

// N bytes or unsigned shorts as integers, of which g++ makes some ten instructions unless it is told.
template <int N, class B>
METAL_FUNC zk_integers<N> zk_widened(typename zk_packed_lanes<B, N>::zk_type values) {
  return {__builtin_convertvector(values, typename zk_integers<N>::zk_type)};
}

#if defined(__AVX2__) && !defined(__clang__)
typedef char zk_octets __attribute__((vector_size(16)));
typedef short zk_shorts __attribute__((vector_size(16)));
typedef long long zk_two_longs __attribute__((vector_size(16)));
template <>
METAL_FUNC zk_integers<8> zk_widened<8, unsigned char>(
    zk_packed_lanes<unsigned char, 8>::zk_type values) {
  return {__builtin_ia32_pmovzxbd256((zk_octets)zk_two_longs{(long long)values, 0})};
}
template <>
METAL_FUNC zk_integers<8> zk_widened<8, signed char>(
    zk_packed_lanes<signed char, 8>::zk_type values) {
  return {__builtin_ia32_pmovsxbd256((zk_octets)zk_two_longs{(long long)values, 0})};
}
template <>
METAL_FUNC zk_integers<8> zk_widened<8, unsigned short>(
    zk_packed_lanes<unsigned short, 8>::zk_type values) {
  return {__builtin_ia32_pmovzxwd256((zk_shorts)values)};
}
#ifdef __AVX512F__
template <>
METAL_FUNC zk_integers<16> zk_widened<16, unsigned char>(
    zk_packed_lanes<unsigned char, 16>::zk_type values) {
  return {__builtin_ia32_pmovzxbd512_mask((zk_octets)values, zk_integers<16>::zk_type{}, -1)};
}
template <>
METAL_FUNC zk_integers<16> zk_widened<16, signed char>(
    zk_packed_lanes<signed char, 16>::zk_type values) {
  return {__builtin_ia32_pmovsxbd512_mask((zk_octets)values, zk_integers<16>::zk_type{}, -1)};
}
#endif
#endif

// p[0] ... p[N - 1].
template <int N, class T>
METAL_FUNC zmlx_floats<N> zmlx_read(const T* p) {
  if constexpr (!zk_is_register<N>) {
    return {zmlx_read<N / 2>(p), zmlx_read<N / 2>(p + N / 2)};
  } else if constexpr (__is_same(T, float)) {
    return {*(const typename zk_packed_lanes<float, N>::zk_type*)p};
  } else {
#ifdef ZK_NUMBERS
    if constexpr (__is_same(T, metal::bfloat)) {
      const auto bits = *(const typename zk_packed_lanes<unsigned short, N>::zk_type*)p;
      return {(typename zmlx_floats<N>::zk_type)(zk_widened<N, unsigned short>(bits).zk_values
                                                 << 16)};
    }
#if defined(__F16C__) && !defined(__clang__)
    // g++ makes no instruction of the conversion that a half has.
    if constexpr (__is_same(T, metal::half) && N == 8) {
      return {__builtin_ia32_vcvtph2ps256(*(const zk_packed_lanes<short, 8>::zk_type*)p)};
    }
#ifdef __AVX512F__
    if constexpr (__is_same(T, metal::half) && N == 16) {
      return {__builtin_ia32_vcvtph2ps512_mask(*(const zk_packed_lanes<short, 16>::zk_type*)p,
                                               zmlx_floats<16>::zk_type{}, -1, 4)};
    }
#endif
#endif
#endif
    float x[N];
    for (int u = 0; u < N; ++u) x[u] = float(p[u]);
    zmlx_floats<N> lanes;
    __builtin_memcpy(&lanes, x, sizeof lanes);
    return lanes;
  }
}

template <int N>
METAL_FUNC void zmlx_write(float* p, zmlx_floats<N> x) {
  if constexpr (zk_is_register<N>) {
    *(typename zk_packed_lanes<float, N>::zk_type*)p = x.zk_values;
  } else {
    zmlx_write<N / 2>(p, x.zk_low);
    zmlx_write<N / 2>(p + N / 2, x.zk_high);
  }
}

template <int N>
METAL_FUNC zmlx_floats<N> zmlx_splat(float x) {
  if constexpr (zk_is_register<N>) {
    return {x - typename zmlx_floats<N>::zk_type{}};
  } else {
    return {zmlx_splat<N / 2>(x), zmlx_splat<N / 2>(x)};
  }
}

// a * b + c.
template <int N>
METAL_FUNC zmlx_floats<N> zmlx_fma(zmlx_floats<N> a, zmlx_floats<N> b, zmlx_floats<N> c) {
  if constexpr (zk_is_register<N>) {
    return {a.zk_values * b.zk_values + c.zk_values};
  } else {
    return {zmlx_fma<N / 2>(a.zk_low, b.zk_low, c.zk_low),
            zmlx_fma<N / 2>(a.zk_high, b.zk_high, c.zk_high)};
  }
}

// a[0] + a[1], a[2] + a[3], ..., and then those of b.
template <int N>
METAL_FUNC zmlx_floats<N> zmlx_pair_sums(zmlx_floats<N> a, zmlx_floats<N> b) {
  if constexpr (!zk_is_register<N>) {
    return {zmlx_pair_sums<N / 2>(a.zk_low, a.zk_high), zmlx_pair_sums<N / 2>(b.zk_low, b.zk_high)};
  } else {
#ifndef __clang__
    typedef typename zk_integers<N>::zk_type zk_places;
    if constexpr (N == 16) {
      const zk_places even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
      return {__builtin_shuffle(a.zk_values, b.zk_values, even) +
              __builtin_shuffle(a.zk_values, b.zk_values, even + 1)};
    } else if constexpr (N == 8) {
      const zk_places even = {0, 2, 4, 6, 8, 10, 12, 14};
      return {__builtin_shuffle(a.zk_values, b.zk_values, even) +
              __builtin_shuffle(a.zk_values, b.zk_values, even + 1)};
    } else if constexpr (N == 4) {
      const zk_places even = {0, 2, 4, 6};
      return {__builtin_shuffle(a.zk_values, b.zk_values, even) +
              __builtin_shuffle(a.zk_values, b.zk_values, even + 1)};
    }
#endif
    zmlx_floats<N> sums;
    for (int u = 0; u < N / 2; ++u) {
      sums.zk_values[u] = a.zk_values[2 * u] + a.zk_values[2 * u + 1];
      sums.zk_values[N / 2 + u] = b.zk_values[2 * u] + b.zk_values[2 * u + 1];
    }
    return sums;
  }
}

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
inline constexpr float zk_nibbles = 0;
#endif

// Of each of N bytes from p on: its value `place` of BITS bits, less half of 2^BITS.
template <int BITS, int N>
METAL_FUNC zmlx_floats<N> zmlx_codes(const metal::uchar* p, int place) {
  if constexpr (!zk_is_register<N>) {
    return {zmlx_codes<BITS, N / 2>(p, place), zmlx_codes<BITS, N / 2>(p + N / 2, place)};
  } else if constexpr (BITS == 8) {
    const auto bytes = *(const typename zk_packed_lanes<unsigned char, N>::zk_type*)p;
    typedef typename zk_packed_lanes<signed char, N>::zk_type zk_signed;
    const auto codes = zk_widened<N, signed char>((zk_signed)(bytes ^ 0x80)).zk_values;
    return {__builtin_convertvector(codes, typename zmlx_floats<N>::zk_type)};
  } else if constexpr (ZK_PICKS && BITS == 4 && N == 16) {
    return {__builtin_shuffle(zk_nibbles - 8.0f, zk_placed<BITS, N>(p, place))};
  } else {
    auto codes = zk_placed<BITS, N>(p, place);
    if (BITS * place + BITS < 8) codes &= (1 << BITS) - 1;
    return {__builtin_convertvector(codes - (1 << (BITS - 1)), typename zmlx_floats<N>::zk_type)};
  }
}

// Of each of N bytes from p on: its value `place` of BITS bits, times scale, plus bias.
template <int BITS, int N>
METAL_FUNC zmlx_floats<N> zmlx_dequantized(const metal::uchar* p, int place, float scale,
                                           float bias) {
  if constexpr (!zk_is_register<N>) {
    return {zmlx_dequantized<BITS, N / 2>(p, place, scale, bias),
            zmlx_dequantized<BITS, N / 2>(p + N / 2, place, scale, bias)};
  } else {
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
}
