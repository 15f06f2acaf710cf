// section packing; needs vectors math exponential power; after numbers; tokens unpack_unorm4x8_to_float( unpack_snorm4x8_to_float( unpack_unorm4x8_to_half( unpack_snorm4x8_to_half( unpack_unorm4x8_srgb_to_float( unpack_unorm4x8_srgb_to_half( unpack_unorm2x16_to_float( unpack_snorm2x16_to_float( unpack_unorm2x16_to_half( unpack_snorm2x16_to_half( unpack_unorm10a2_to_float( unpack_unorm10a2_to_half( unpack_unorm565_to_float( unpack_unorm565_to_half( pack_float_to_unorm4x8( pack_float_to_snorm4x8( pack_half_to_unorm4x8( pack_half_to_snorm4x8( pack_float_to_srgb_unorm4x8( pack_half_to_srgb_unorm4x8( pack_float_to_unorm2x16( pack_float_to_snorm2x16( pack_half_to_unorm2x16( pack_half_to_snorm2x16( pack_float_to_unorm10a2( pack_half_to_unorm10a2( pack_float_to_unorm565( pack_half_to_unorm565(
// Metal's packed formats: components as fractions of the largest integer of their width, from the
// lowest bit on.

namespace metal {

template <int N>
METAL_FUNC vec<float, N> zk_unpack_unorm(uint bits, vec<uint, N> widths) {
  vec<float, N> v;
  for (int i = 0; i < N; ++i) {
    uint largest = (1u << widths[i]) - 1;
    v[i] = float(bits & largest) / float(largest);
    bits >>= widths[i];
  }
  return v;
}
template <int N>
METAL_FUNC uint zk_pack_unorm(vec<float, N> v, vec<uint, N> widths) {
  uint bits = 0, at = 0;
  for (int i = 0; i < N; ++i) {
    float largest = float((1u << widths[i]) - 1);
    bits |= uint(rint(saturate(v[i]) * largest)) << at;
    at += widths[i];
  }
  return bits;
}
// Two's complement; the lowest integer counts as -1, like its successor.
template <int N>
METAL_FUNC vec<float, N> zk_unpack_snorm(uint bits) {
  constexpr int width = 32 / N, largest = (1 << (width - 1)) - 1;
  vec<float, N> v;
  for (int i = 0; i < N; ++i) {
    int part = int(bits << (32 - width * (i + 1))) >> (32 - width);
    v[i] = max(float(part) / float(largest), -1.0f);
  }
  return v;
}
template <int N>
METAL_FUNC uint zk_pack_snorm(vec<float, N> v) {
  constexpr int width = 32 / N, largest = (1 << (width - 1)) - 1;
  uint bits = 0;
  for (int i = 0; i < N; ++i) {
    int part = int(rint(clamp(v[i], -1.0f, 1.0f) * float(largest)));
    bits |= (uint(part) & (~0u >> (32 - width))) << (width * i);
  }
  return bits;
}

// The transfer function of IEC 61966-2-1; alpha is linear.
METAL_FUNC vec<float, 4> zk_from_srgb(vec<float, 4> v) {
  for (int i = 0; i < 3; ++i) {
    v[i] = v[i] <= 0.04045f ? v[i] / 12.92f : powr((v[i] + 0.055f) / 1.055f, 2.4f);
  }
  return v;
}
METAL_FUNC vec<float, 4> zk_to_srgb(vec<float, 4> v) {
  for (int i = 0; i < 3; ++i) {
    float c = saturate(v[i]);
    v[i] = c <= 0.0031308f ? 12.92f * c : 1.055f * powr(c, 1.0f / 2.4f) - 0.055f;
  }
  return v;
}

inline constexpr vec<uint, 4> zk_4x8{8, 8, 8, 8}, zk_10a2{10, 10, 10, 2};
inline constexpr vec<uint, 2> zk_2x16{16, 16};
inline constexpr vec<uint, 3> zk_565{5, 6, 5};

#define ZK_UNPACK(T, bits, name, N, e) \
  METAL_FUNC vec<T, N> unpack_##name##_to_##T(bits x) { return vec<T, N>(e); }
#define ZK_PACK(T, bits, name, N, e) \
  METAL_FUNC bits pack_##T##_to_##name(vec<T, N> x) { return bits(e); }
#define ZK_FORMATS(T)                                                            \
  ZK_UNPACK(T, uint, unorm4x8, 4, zk_unpack_unorm<4>(x, zk_4x8))                 \
  ZK_UNPACK(T, uint, snorm4x8, 4, zk_unpack_snorm<4>(x))                         \
  ZK_UNPACK(T, uint, unorm4x8_srgb, 4, zk_from_srgb(zk_unpack_unorm<4>(x, zk_4x8))) \
  ZK_UNPACK(T, uint, unorm2x16, 2, zk_unpack_unorm<2>(x, zk_2x16))               \
  ZK_UNPACK(T, uint, snorm2x16, 2, zk_unpack_snorm<2>(x))                        \
  ZK_UNPACK(T, uint, unorm10a2, 4, zk_unpack_unorm<4>(x, zk_10a2))               \
  ZK_UNPACK(T, ushort, unorm565, 3, zk_unpack_unorm<3>(x, zk_565))               \
  ZK_PACK(T, uint, unorm4x8, 4, zk_pack_unorm<4>(vec<float, 4>(x), zk_4x8))      \
  ZK_PACK(T, uint, snorm4x8, 4, zk_pack_snorm<4>(vec<float, 4>(x)))              \
  ZK_PACK(T, uint, srgb_unorm4x8, 4, zk_pack_unorm<4>(zk_to_srgb(vec<float, 4>(x)), zk_4x8)) \
  ZK_PACK(T, uint, unorm2x16, 2, zk_pack_unorm<2>(vec<float, 2>(x), zk_2x16))    \
  ZK_PACK(T, uint, snorm2x16, 2, zk_pack_snorm<2>(vec<float, 2>(x)))             \
  ZK_PACK(T, uint, unorm10a2, 4, zk_pack_unorm<4>(vec<float, 4>(x), zk_10a2))    \
  ZK_PACK(T, ushort, unorm565, 3, zk_pack_unorm<3>(vec<float, 3>(x), zk_565))
ZK_FORMATS(float)
#ifdef ZK_NUMBERS
ZK_FORMATS(half)
#endif
#undef ZK_FORMATS
#undef ZK_UNPACK
#undef ZK_PACK

}  // namespace metal
