// section random; needs base; tokens ZMLX_UNIFORMS
// ZMLX_UNIFORMS(out, count, first, key): the header's zmlx_uniforms for a vector of counters at a
// time. Philox multiplies 32 by 32 bits to 64. x86 has that for vectors, but g++ does not find it:
// it multiplies 64 by 64 bits, in three times as many steps.

namespace metal {

#if defined(__AVX512F__)
using zk_lanes = unsigned long long __attribute__((vector_size(64)));
#else
using zk_lanes = unsigned long long __attribute__((vector_size(32)));
#endif
using zk_lane_words = uint __attribute__((vector_size(sizeof(zk_lanes))));
using zk_lane_ints = int __attribute__((vector_size(sizeof(zk_lanes))));
using zk_lane_floats = float __attribute__((vector_size(sizeof(zk_lanes)), aligned(4)));
inline constexpr uint zk_counters = sizeof(zk_lanes) / 8;

// Vectors go by reference: passing them on would depend on what the processor has.

// product = the low words of a times `factor`, below 2^32.
static inline __attribute__((always_inline)) void zk_multiply_low(const zk_lanes& a,
                                                                  unsigned long long factor,
                                                                  zk_lanes& product) {
  zk_lanes factors = zk_lanes{} + factor;
#if defined(__AVX512F__) && !defined(__clang__)
  using zk_signed = long long __attribute__((vector_size(64)));
  product = (zk_lanes)__builtin_ia32_pmuludq512_mask((zk_lane_ints)a, (zk_lane_ints)factors,
                                                     (zk_signed)a, 0xff);
#elif defined(__AVX2__) && !defined(__clang__)
  product = (zk_lanes)__builtin_ia32_pmuludq256((zk_lane_ints)a, (zk_lane_ints)factors);
#else
  product = (a & 0xffffffffull) * factors;
#endif
}

static inline __attribute__((always_inline)) void zk_store_uniform(float* out,
                                                                   const zk_lanes& words) {
  *(zk_lane_floats*)out =
      __builtin_convertvector((zk_lane_ints)((zk_lane_words)words >> 8), zk_lane_floats) * 0x1p-24f;
}

#if defined(__clang__)
#define ZK_SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define ZK_SHUFFLED(x, y, ...) __builtin_shuffle(x, y, zk_lanes{__VA_ARGS__})
#endif

// Lanes of x and of y in turn, and pairs of them in turn.
static inline __attribute__((always_inline)) void zk_interleave(const zk_lanes& x,
                                                                const zk_lanes& y, zk_lanes& low,
                                                                zk_lanes& high) {
#if defined(__AVX512F__)
  low = ZK_SHUFFLED(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
  high = ZK_SHUFFLED(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  low = ZK_SHUFFLED(x, y, 0, 4, 1, 5);
  high = ZK_SHUFFLED(x, y, 2, 6, 3, 7);
#endif
}
static inline __attribute__((always_inline)) void zk_interleave_pairs(const zk_lanes& x,
                                                                      const zk_lanes& y,
                                                                      zk_lanes& low,
                                                                      zk_lanes& high) {
#if defined(__AVX512F__)
  low = ZK_SHUFFLED(x, y, 0, 1, 8, 9, 2, 3, 10, 11);
  high = ZK_SHUFFLED(x, y, 4, 5, 12, 13, 6, 7, 14, 15);
#else
  low = ZK_SHUFFLED(x, y, 0, 1, 4, 5);
  high = ZK_SHUFFLED(x, y, 2, 3, 6, 7);
#endif
}
#undef ZK_SHUFFLED

// The four words of every counter, which lie in the halves of ab's and cd's lanes, and the four with
// their halves exchanged.
static inline __attribute__((always_inline)) void zk_store_uniforms(float* out, const zk_lanes& ab,
                                                                    const zk_lanes& cd) {
  zk_lanes words[2], low, high;
  zk_interleave(ab, cd, words[0], words[1]);
  for (int half = 0; half < 2; ++half, out += 4 * zk_counters) {
    zk_lane_words plain = (zk_lane_words)words[half];
    zk_interleave_pairs(words[half], (zk_lanes)(plain << 16 | plain >> 16), low, high);
    zk_store_uniform(out, low);
    zk_store_uniform(out + 2 * zk_counters, high);
  }
}

// 8 * VECTORS * zk_counters numbers. Several vectors hide the latency of the products.
template <int VECTORS>
static inline void zk_draw(float* out, ulong first, ulong key) {
  zk_lanes a[VECTORS], b[VECTORS], c[VECTORS] = {}, d[VECTORS] = {};
  for (uint lane = 0; lane < zk_counters; ++lane) a[0][lane] = lane;
  for (int v = VECTORS; v-- > 0;) {
    a[v] = a[0] + (first + v * zk_counters);
    b[v] = a[v] >> 32;
  }
  uint k0 = uint(key), k1 = uint(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      zk_lanes p, q;
      zk_multiply_low(a[v], 0xD2511F53ull, p);
      zk_multiply_low(c[v], 0xCD9E8D57ull, q);
      a[v] = (q >> 32) ^ b[v] ^ (unsigned long long)k0, b[v] = q;
      c[v] = (p >> 32) ^ d[v] ^ (unsigned long long)k1, d[v] = p;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int v = 0; v < VECTORS; ++v) {
    zk_lanes low = zk_lanes{} + 0xffffffffull;
    zk_lanes ab = b[v] << 32 | (a[v] & low), cd = d[v] << 32 | (c[v] & low);
    zk_store_uniforms(out + 8 * zk_counters * v, ab, cd);
  }
}

static inline void zk_uniforms(float* out, uint count, ulong first, ulong key) {
  constexpr uint one = 8 * zk_counters, two = 2 * one, four = 4 * one;
  uint done = 0;
  for (; done + four <= count; done += four) zk_draw<4>(out + done, first + done / 8, key);
  for (; done + two <= count; done += two) zk_draw<2>(out + done, first + done / 8, key);
  for (; done + one <= count; done += one) zk_draw<1>(out + done, first + done / 8, key);
  if (done < count) {
    float rest[one];
    zk_draw<1>(rest, first + done / 8, key);
    for (uint i = done; i < count; ++i) out[i] = rest[i - done];
  }
}

}  // namespace metal

#define ZMLX_UNIFORMS(out, count, first, key) metal::zk_uniforms(out, count, first, key)
