// section steps; needs base; after numbers; tokens ZMLX_STEP_LOOP ZMLX_ROWS_LOOP ZMLX_READ_STEP ZMLX_WRITE_STEP ZMLX_SET
// Steps of elements as the header of a pattern describes them. Halves are converted by the
// instructions that x86 has for it, which g++ does not find in a loop: it makes ten of reading one
// and twenty of writing one. Of bfloats it makes good vectors, but for steps that do not fill one:
// it then takes floats, too, in vectors of as few as there are bfloats in theirs, half of what fits.
// Longer steps took a fifth longer in gradients if converted like that, and the instruction that
// some processors have for it, which drops subnormal numbers, was no faster.

// g++ unrolls a loop of up to 16 turns before it looks for vectors, and then finds few. Up to 4
// turns of vectors it has to unroll, or their accumulators stay in memory: half the time of a fold.
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
typedef uint zk_8_uints __attribute__((vector_size(32)));
typedef short zk_8_halves __attribute__((vector_size(16)));
typedef ushort zk_8_bfloats __attribute__((vector_size(16)));
typedef float zk_16_floats __attribute__((vector_size(64)));
typedef uint zk_16_uints __attribute__((vector_size(64)));
typedef short zk_16_halves __attribute__((vector_size(32)));
typedef ushort zk_16_bfloats __attribute__((vector_size(32)));

// What N numbers of 16 bits are converted in: the widest registers that they fill.
#ifdef __AVX512F__
inline constexpr uint zk_register_bytes = 64;
#else
inline constexpr uint zk_register_bytes = 32;
#endif
template <uint N>
inline constexpr uint zk_narrow_width = N % (zk_register_bytes / 4) == 0 ? zk_register_bytes / 4 : 8;

// T's in a register, and as many floats.
template <class T, uint Wide>
struct zk_narrow_register;
template <>
struct zk_narrow_register<half, 8> {
  typedef zk_8_floats floats;
  typedef zk_8_halves bits;
  static METAL_FUNC floats read(bits from) { return __builtin_ia32_vcvtph2ps256(from); }
  static METAL_FUNC bits write(floats from) { return __builtin_ia32_vcvtps2ph256(from, 0); }
};
#ifdef __AVX512F__
template <>
struct zk_narrow_register<half, 16> {
  typedef zk_16_floats floats;
  typedef zk_16_halves bits;
  static METAL_FUNC floats read(bits from) {
    return __builtin_ia32_vcvtph2ps512_mask(from, floats{}, -1, 4);
  }
  static METAL_FUNC bits write(floats from) {
    return __builtin_ia32_vcvtps2ph512_mask(from, 0, bits{}, -1);
  }
};
#endif
// As zk_float_of_bfloat and zk_bfloat_of_float.
template <class Floats, class Uints, class Bits>
struct zk_bfloat_register {
  typedef Floats floats;
  typedef Bits bits;
  static METAL_FUNC Floats read(Bits from) {
    return Floats(__builtin_convertvector(from, Uints) << 16);
  }
  static METAL_FUNC Bits write(Floats from) {
    Uints all = Uints(from);
    Uints rounded = all + 0x7fff + (all >> 16 & 1), quiet = all | 0x00400000;
    return __builtin_convertvector((from == from ? rounded : quiet) >> 16, Bits);
  }
};
template <>
struct zk_narrow_register<bfloat, 8> : zk_bfloat_register<zk_8_floats, zk_8_uints, zk_8_bfloats> {};
template <>
struct zk_narrow_register<bfloat, 16>
    : zk_bfloat_register<zk_16_floats, zk_16_uints, zk_16_bfloats> {};

template <class T, uint N>
struct zk_read_narrow {
  using zk_register = zk_narrow_register<T, zk_narrow_width<N>>;
  alignas(64) float zk_values[N];
  METAL_FUNC explicit zk_read_narrow(const T* pointer) {
    for (uint i = 0; i < N; i += zk_narrow_width<N>) {
      typename zk_register::bits bits;
      __builtin_memcpy(&bits, pointer + i, sizeof bits);
      const auto values = zk_register::read(bits);
      __builtin_memcpy(zk_values + i, &values, sizeof values);
    }
  }
  METAL_FUNC float operator[](uint index) const { return zk_values[index]; }
};

// Written at the end of the step.
template <class T, uint N>
struct zk_write_narrow {
  using zk_register = zk_narrow_register<T, zk_narrow_width<N>>;
  alignas(64) float zk_values[N];
  T* zk_pointer;
  bool zk_live;
  METAL_FUNC zk_write_narrow(T* pointer, bool live) : zk_pointer(pointer), zk_live(live) {}
  zk_write_narrow(const zk_write_narrow&) = delete;
  METAL_FUNC ~zk_write_narrow() {
    for (uint i = 0; zk_live && i < N; i += zk_narrow_width<N>) {
      typename zk_register::floats values;
      __builtin_memcpy(&values, zk_values + i, sizeof values);
      const auto bits = zk_register::write(values);
      __builtin_memcpy(zk_pointer + i, &bits, sizeof bits);
    }
  }
};

template <class T, uint N>
concept zk_converts_step =
    N % 8 == 0 && (__is_same(T, half) || (__is_same(T, bfloat) && 2 * N < zk_register_bytes));

template <uint N, class T>
  requires zk_converts_step<T, N>
METAL_FUNC zk_read_narrow<T, N> zk_read_step(const T* pointer) {
  return zk_read_narrow<T, N>(pointer);
}
template <uint N, class T>
  requires zk_converts_step<T, N>
METAL_FUNC zk_write_narrow<T, N> zk_write_step(T* pointer, bool live) {
  return zk_write_narrow<T, N>(pointer, live);
}
template <class T, uint N, class V>
METAL_FUNC void zk_set(zk_write_narrow<T, N>& step, uint index, V value) {
  step.zk_values[index] = float(value);
}

#endif

}  // namespace metal
