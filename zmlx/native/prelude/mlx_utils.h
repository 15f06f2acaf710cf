// section mlx_utils; needs base; after numbers; tokens float16_t bfloat16_t bfloat16_to_uint16 uint16_to_bfloat16 ceildiv ConditionalType cast_to WorkPerThread MLX_MTL_PRAGMA_UNROLL MAX_REDUCE_SPECIALIZED_DIMS REDUCE_N_READS REDUCE_N_WRITES SOFTMAX_N_READS RMS_N_READS RMS_LOOPED_LIMIT CROSS_ENTROPY_N_READS os_log os_log_default
// The small names that MLX puts in front of every custom kernel, outside namespace metal.

#ifdef ZK_NUMBERS
using float16_t = half;
using bfloat16_t = bfloat;

inline uint16_t bfloat16_to_uint16(const bfloat16_t x) { return x.zk_bits; }
inline bfloat16_t uint16_to_bfloat16(const uint16_t x) { return as_type<bfloat16_t>(x); }
#endif

// The compiler decides: unrolling by force costs compile time here and gains nothing.
#define MLX_MTL_PRAGMA_UNROLL

inline constexpr int MAX_REDUCE_SPECIALIZED_DIMS = 4;
inline constexpr int REDUCE_N_READS = 4;
inline constexpr int REDUCE_N_WRITES = 4;
inline constexpr int SOFTMAX_N_READS = 4;
inline constexpr int RMS_N_READS = 4;
inline constexpr int RMS_LOOPED_LIMIT = 4096;
inline constexpr int CROSS_ENTROPY_N_READS = 4;

template <typename U>
struct WorkPerThread {
  static_assert(sizeof(U) <= 8, "Type too large");
  static constexpr int n = 8 / sizeof(U);
};

template <typename T, typename U>
METAL_FUNC T ceildiv(T N, U M) {
  return (N + M - 1) / M;
}

template <bool condition, typename T, typename U>
struct ConditionalType {
  using type = T;
};
template <typename T, typename U>
struct ConditionalType<false, T, U> {
  using type = U;
};

template <typename U, typename T>
METAL_FUNC U cast_to(T val) {
  return static_cast<U>(val);
}
// Subnormals count as nonzero even where arithmetic flushes them.
template <>
METAL_FUNC bool cast_to<bool, float>(float val) {
  return (as_type<uint>(val) & 0x7fffffff) != 0;
}
#ifdef ZK_NUMBERS
template <>
METAL_FUNC bool cast_to<bool, bfloat16_t>(bfloat16_t val) {
  return (val.zk_bits & 0x7fff) != 0;
}
#endif

// Logging does nothing, as on devices without it.
namespace metal {
struct os_log {
  constexpr os_log(const char*, const char*) {}
#define ZK_LOG(name) template <typename... A> METAL_FUNC void name(const char*, A...) const {}
  ZK_LOG(log) ZK_LOG(log_debug) ZK_LOG(log_info) ZK_LOG(log_error) ZK_LOG(log_fault)
#undef ZK_LOG
};
inline constexpr os_log os_log_default("", "");
}  // namespace metal
namespace mlx {
using metal::os_log;
}  // namespace mlx
