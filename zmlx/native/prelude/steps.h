// section steps; needs base; after numbers; tokens ZMLX_READ_STEP ZMLX_WRITE_STEP ZMLX_SET
// Steps of elements as the header of a pattern describes them. Halves are converted by the
// instructions that x86 has for it, which g++ does not find in a loop: it makes ten of reading one
// and twenty of writing one. For bfloats the same, with the instruction that some processors have,
// was no faster than the loops.

#define ZMLX_READ_STEP(count, pointer) metal::zk_read_step<count>(pointer)
#define ZMLX_WRITE_STEP(count, pointer, live) metal::zk_write_step<count>(pointer, live)
#define ZMLX_SET(step, index, type, ...) metal::zk_set<type>(step, index, (__VA_ARGS__))

namespace metal {

template <uint N, class P>
METAL_FUNC P zk_read_step(P pointer) {
  return pointer;
}
template <uint N, class P>
METAL_FUNC P zk_write_step(P pointer, bool) {
  return pointer;
}
template <class T, class P, class V>
METAL_FUNC void zk_set(P pointer, uint index, V value) {
  pointer[index] = T(value);
}

#if defined(ZK_NUMBERS) && defined(__F16C__) && !defined(__clang__)

#ifdef __AVX512F__
inline constexpr uint zk_wide = 16;
#else
inline constexpr uint zk_wide = 8;
#endif
typedef float zk_wide_floats __attribute__((vector_size(4 * zk_wide)));
typedef short zk_wide_shorts __attribute__((vector_size(2 * zk_wide)));

template <uint N>
struct zk_read_halves {
  alignas(64) float zk_values[N];
  METAL_FUNC explicit zk_read_halves(const half* pointer) {
    for (uint i = 0; i < N; i += zk_wide) {
      zk_wide_shorts bits;
      __builtin_memcpy(&bits, pointer + i, sizeof bits);
#ifdef __AVX512F__
      const auto values = __builtin_ia32_vcvtph2ps512_mask(bits, zk_wide_floats{}, -1, 4);
#else
      const auto values = __builtin_ia32_vcvtph2ps256(bits);
#endif
      __builtin_memcpy(zk_values + i, &values, sizeof values);
    }
  }
  METAL_FUNC float operator[](uint index) const { return zk_values[index]; }
};

// Halves are written at the end of the step.
template <uint N>
struct zk_write_halves {
  alignas(64) float zk_values[N];
  half* zk_pointer;
  bool zk_live;
  METAL_FUNC zk_write_halves(half* pointer, bool live) : zk_pointer(pointer), zk_live(live) {}
  zk_write_halves(const zk_write_halves&) = delete;
  METAL_FUNC ~zk_write_halves() {
    for (uint i = 0; zk_live && i < N; i += zk_wide) {
      zk_wide_floats values;
      __builtin_memcpy(&values, zk_values + i, sizeof values);
#ifdef __AVX512F__
      const auto bits = __builtin_ia32_vcvtps2ph512_mask(values, 0, zk_wide_shorts{}, -1);
#else
      const auto bits = __builtin_ia32_vcvtps2ph256(values, 0);
#endif
      __builtin_memcpy(zk_pointer + i, &bits, sizeof bits);
    }
  }
};

template <uint N>
  requires(N % zk_wide == 0)
METAL_FUNC zk_read_halves<N> zk_read_step(const half* pointer) {
  return zk_read_halves<N>(pointer);
}
template <uint N>
  requires(N % zk_wide == 0)
METAL_FUNC zk_write_halves<N> zk_write_step(half* pointer, bool live) {
  return zk_write_halves<N>(pointer, live);
}
template <class T, uint N, class V>
METAL_FUNC void zk_set(zk_write_halves<N>& step, uint index, V value) {
  step.zk_values[index] = float(value);
}

#endif

}  // namespace metal
