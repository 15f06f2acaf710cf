// section steps; needs base; after numbers; tokens ZMLX_STEP_LOOP ZMLX_ROWS_LOOP ZMLX_READ_STEP ZMLX_WRITE_STEP ZMLX_SET
// Steps of elements as the header of a pattern describes them. Halves are converted by the
// instructions that x86 has for it, which g++ does not find in a loop: it makes ten of reading one
// and twenty of writing one. For bfloats the same, with the instruction that some processors have,
// was no faster than the loops.

// g++ unrolls a loop of up to 16 turns before it looks for vectors, and then finds few. Up to 4 turns
// of vectors it has to unroll, or their accumulators stay in memory: half the time of a fold.
// Of a loop over columns it makes vectors only once the loop over rows in it is gone, and that of
// long conversions, as of halves, it would leave.
#ifdef __clang__
#define ZMLX_STEP_LOOP
#define ZMLX_ROWS_LOOP
#else
#define ZMLX_STEP_LOOP _Pragma("GCC unroll 4")
#define ZMLX_ROWS_LOOP _Pragma("GCC unroll 8")
#endif
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

typedef float zk_8_floats __attribute__((vector_size(32)));
typedef short zk_8_halves __attribute__((vector_size(16)));
typedef float zk_16_floats __attribute__((vector_size(64)));
typedef short zk_16_halves __attribute__((vector_size(32)));

METAL_FUNC zk_8_floats zk_floats(zk_8_halves bits) { return __builtin_ia32_vcvtph2ps256(bits); }
METAL_FUNC zk_8_halves zk_halves(zk_8_floats values) {
  return __builtin_ia32_vcvtps2ph256(values, 0);
}
#ifdef __AVX512F__
METAL_FUNC zk_16_floats zk_floats(zk_16_halves bits) {
  return __builtin_ia32_vcvtph2ps512_mask(bits, zk_16_floats{}, -1, 4);
}
METAL_FUNC zk_16_halves zk_halves(zk_16_floats values) {
  return __builtin_ia32_vcvtps2ph512_mask(values, 0, zk_16_halves{}, -1);
}
#endif

// What N halves are converted in: the widest registers that they fill.
#ifdef __AVX512F__
template <uint N>
inline constexpr uint zk_half_width = N % 16 == 0 ? 16 : 8;
#else
template <uint N>
inline constexpr uint zk_half_width = 8;
#endif
template <uint Wide>
struct zk_half_register {
  typedef zk_8_floats floats;
  typedef zk_8_halves halves;
};
template <>
struct zk_half_register<16> {
  typedef zk_16_floats floats;
  typedef zk_16_halves halves;
};

template <uint N>
struct zk_read_halves {
  alignas(64) float zk_values[N];
  METAL_FUNC explicit zk_read_halves(const half* pointer) {
    for (uint i = 0; i < N; i += zk_half_width<N>) {
      typename zk_half_register<zk_half_width<N>>::halves bits;
      __builtin_memcpy(&bits, pointer + i, sizeof bits);
      const auto values = zk_floats(bits);
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
    for (uint i = 0; zk_live && i < N; i += zk_half_width<N>) {
      typename zk_half_register<zk_half_width<N>>::floats values;
      __builtin_memcpy(&values, zk_values + i, sizeof values);
      const auto bits = zk_halves(values);
      __builtin_memcpy(zk_pointer + i, &bits, sizeof bits);
    }
  }
};

template <uint N>
  requires(N % 8 == 0)
METAL_FUNC zk_read_halves<N> zk_read_step(const half* pointer) {
  return zk_read_halves<N>(pointer);
}
template <uint N>
  requires(N % 8 == 0)
METAL_FUNC zk_write_halves<N> zk_write_step(half* pointer, bool live) {
  return zk_write_halves<N>(pointer, live);
}
template <class T, uint N, class V>
METAL_FUNC void zk_set(zk_write_halves<N>& step, uint index, V value) {
  step.zk_values[index] = float(value);
}

#endif

}  // namespace metal
