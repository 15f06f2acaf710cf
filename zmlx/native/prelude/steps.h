// section steps; needs base; after numbers; tokens ZMLX_READ_STEP ZMLX_WRITE_STEP ZMLX_SET
// Steps of elements as the header of a pattern describes them. Numbers of 16 bits are converted by
// the instructions that x86 has for them, which g++ does not find in a loop: for halves it makes ten
// of reading one and twenty of writing one.

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

// Floats go by reference: how vectors are passed would depend on what the processor has.
template <class T>
inline constexpr bool zk_has_wide = false;

template <>
inline constexpr bool zk_has_wide<half> = true;
METAL_FUNC void zk_widen(const half* from, zk_wide_floats& to) {
  zk_wide_shorts bits;
  __builtin_memcpy(&bits, from, sizeof bits);
#ifdef __AVX512F__
  to = __builtin_ia32_vcvtph2ps512_mask(bits, zk_wide_floats{}, -1, 4);
#else
  to = __builtin_ia32_vcvtph2ps256(bits);
#endif
}
METAL_FUNC void zk_narrow_wide(const zk_wide_floats& from, half* to) {
#ifdef __AVX512F__
  const auto bits = __builtin_ia32_vcvtps2ph512_mask(from, 0, zk_wide_shorts{}, -1);
#else
  const auto bits = __builtin_ia32_vcvtps2ph256(from, 0);
#endif
  __builtin_memcpy(to, &bits, sizeof bits);
}

#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
template <>
inline constexpr bool zk_has_wide<bfloat> = true;
METAL_FUNC void zk_widen(const bfloat* from, zk_wide_floats& to) {
  typedef int zk_wide_ints __attribute__((vector_size(64)));
  zk_wide_shorts bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  to = (zk_wide_floats)(__builtin_ia32_pmovzxwd512_mask(bits, zk_wide_ints{}, -1) << 16);
}
METAL_FUNC void zk_narrow_wide(const zk_wide_floats& from, bfloat* to) {
  // The instruction makes zeros of subnormal numbers, which are rare.
  constexpr int subnormal = 0x20;
  if (__builtin_ia32_fpclassps512_mask(from, subnormal, -1) != 0) {
    for (uint i = 0; i < zk_wide; ++i) to[i] = bfloat(from[i]);
    return;
  }
  const auto bits = __builtin_ia32_cvtneps2bf16_v16sf(from);
  __builtin_memcpy(to, &bits, sizeof bits);
}
#endif

template <uint N, class T>
struct zk_read_wide {
  alignas(64) float zk_values[N];
  METAL_FUNC explicit zk_read_wide(const T* pointer) {
    for (uint i = 0; i < N; i += zk_wide) {
      zk_wide_floats values;
      zk_widen(pointer + i, values);
      __builtin_memcpy(zk_values + i, &values, sizeof values);
    }
  }
  METAL_FUNC float operator[](uint index) const { return zk_values[index]; }
};

// Numbers are written at the end of the step.
template <uint N, class T>
struct zk_write_wide {
  alignas(64) float zk_values[N];
  T* zk_pointer;
  bool zk_live;
  METAL_FUNC zk_write_wide(T* pointer, bool live) : zk_pointer(pointer), zk_live(live) {}
  zk_write_wide(const zk_write_wide&) = delete;
  METAL_FUNC ~zk_write_wide() {
    for (uint i = 0; zk_live && i < N; i += zk_wide) {
      zk_wide_floats values;
      __builtin_memcpy(&values, zk_values + i, sizeof values);
      zk_narrow_wide(values, zk_pointer + i);
    }
  }
};

template <uint N, class T>
  requires(N % zk_wide == 0 && zk_has_wide<T>)
METAL_FUNC zk_read_wide<N, T> zk_read_step(const T* pointer) {
  return zk_read_wide<N, T>(pointer);
}
template <uint N, class T>
  requires(N % zk_wide == 0 && zk_has_wide<T>)
METAL_FUNC zk_write_wide<N, T> zk_write_step(T* pointer, bool live) {
  return zk_write_wide<N, T>(pointer, live);
}
template <class T, uint N, class To, class V>
METAL_FUNC void zk_set(zk_write_wide<N, To>& step, uint index, V value) {
  step.zk_values[index] = float(value);
}

#endif

}  // namespace metal
