// What MLX's own header declares before a custom kernel (mlx/backend/metal/kernels/utils.h), by
// name and signature. Functions have a body, an empty one, since nothing can define them again.

typedef bfloat bfloat16_t;
typedef half float16_t;
inline uint16_t bfloat16_to_uint16(bfloat16_t) {}
inline bfloat16_t uint16_to_bfloat16(uint16_t) {}

#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
#define MTL_CONST constant
static MTL_CONST constexpr int MAX_REDUCE_SPECIALIZED_DIMS = 4;
static MTL_CONST constexpr int REDUCE_N_READS = 4;
static MTL_CONST constexpr int REDUCE_N_WRITES = 4;
static MTL_CONST constexpr int SOFTMAX_N_READS = 4;
static MTL_CONST constexpr int RMS_N_READS = 4;
static MTL_CONST constexpr int RMS_LOOPED_LIMIT = 4096;
static MTL_CONST constexpr int CROSS_ENTROPY_N_READS = 4;

template <typename U>
struct WorkPerThread {
  static_assert(sizeof(U) <= 8, "Type too large");
  static constexpr constant int n = 8 / sizeof(U);
};

template <typename T>
struct complex_t;
template <typename T>
static constexpr constant bool is_complex_v = false;
template <typename T>
static constexpr constant bool is_complex_v<complex_t<T>> = true;

template <typename T>
struct complex_t {
  typedef T value_type;
  T real;
  T imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
  constexpr complex_t(vec<T, 2> v) : real(v.x), imag(v.y) {}
  template <typename U, typename = enable_if_t<__is_arithmetic(U)>>
  constexpr complex_t(U x) : real(static_cast<T>(x)), imag(static_cast<T>(0)) {}
  template <typename U, typename = enable_if_t<!__is_same(U, T)>, typename = void>
  constexpr complex_t(complex_t<U> x) : real(static_cast<T>(x.real)), imag(static_cast<T>(x.imag)) {}
  constexpr operator vec<T, 2>() const { return vec<T, 2>{real, imag}; }
  template <typename U, typename = enable_if_t<__is_arithmetic(U)>>
  constexpr operator U() const { return static_cast<U>(real); }
  template <typename U, typename = enable_if_t<__is_arithmetic(U)>>
  constexpr operator U() const constant { return static_cast<U>(real); }
};
// Complete, so that a kernel may take pointers to them.
template struct complex_t<half>;
template struct complex_t<float>;
typedef complex_t<half> complex32_t;
typedef complex_t<float> complex64_t;
template <typename T> constexpr complex_t<T> operator-(complex_t<T> x) { return x; }
#define ZK_COMPLEX(op) \
  template <typename T> complex_t<T> operator op(complex_t<T>, complex_t<T>);
ZK_COMPLEX(+) ZK_COMPLEX(-) ZK_COMPLEX(*) ZK_COMPLEX(/) ZK_COMPLEX(%)
#undef ZK_COMPLEX
#define ZK_WITH_REAL(op, ...)                                                     \
  template <typename T, typename U, typename = enable_if_t<__is_arithmetic(U)>>   \
  complex_t<T> operator op(__VA_ARGS__);
ZK_WITH_REAL(+, complex_t<T>, U) ZK_WITH_REAL(+, U, complex_t<T>)
ZK_WITH_REAL(-, complex_t<T>, U) ZK_WITH_REAL(-, U, complex_t<T>)
ZK_WITH_REAL(/, U, complex_t<T>)
#undef ZK_WITH_REAL
template <typename T> thread complex_t<T>& operator+=(thread complex_t<T>&, complex_t<T>);
template <typename T> threadgroup complex_t<T>& operator+=(threadgroup complex_t<T>&, complex_t<T>);
template <typename T> device complex_t<T>& operator+=(device complex_t<T>&, complex_t<T>);
#define ZK_COMPLEX(op) template <typename T> bool operator op(complex_t<T>, complex_t<T>);
ZK_COMPLEX(==) ZK_COMPLEX(<) ZK_COMPLEX(<=) ZK_COMPLEX(>) ZK_COMPLEX(>=)
#undef ZK_COMPLEX

template <typename U>
struct Limits {
  static constexpr constant U max = metal::numeric_limits<U>::max();
  static constexpr constant U min = metal::numeric_limits<U>::min();
  static constexpr constant U finite_max = metal::numeric_limits<U>::max();
  static constexpr constant U finite_min = metal::numeric_limits<U>::min();
};
#define ZK_LIMITS(T)                                                             \
  template <>                                                                    \
  struct Limits<T> {                                                             \
    static constexpr constant T max = metal::numeric_limits<T>::infinity();      \
    static constexpr constant T min = -metal::numeric_limits<T>::infinity();     \
    static constexpr constant T finite_max = metal::numeric_limits<T>::max();    \
    static constexpr constant T finite_min = -metal::numeric_limits<T>::max();   \
  };
ZK_LIMITS(half)
ZK_LIMITS(float)
ZK_LIMITS(bfloat)
#undef ZK_LIMITS
template <>
struct Limits<bool> {
  static constexpr constant bool max = true;
  static constexpr constant bool min = false;
};
template <typename T>
struct Limits<complex_t<T>> {
  static constexpr constant complex_t<T> max = {T(0), T(0)};
  static constexpr constant complex_t<T> min = {T(0), T(0)};
};

template <typename I = int64_t>
inline I elem_to_loc(I, constant const int*, constant const int64_t*, int) {}
template <typename I = int64_t>
inline I elem_to_loc(uint3, constant const int*, constant const int64_t*, int) {}
template <typename I = int64_t>
inline I elem_to_loc_1(uint, constant const int64_t&) {}
template <typename I = int64_t>
inline I elem_to_loc_2(uint2, constant const int64_t[2]) {}
template <typename I = int64_t>
inline I elem_to_loc_3(uint3, constant const int64_t[3]) {}
template <typename I = int64_t>
inline vec<I, 2> elem_to_loc_2_nd(uint3, constant const int*, constant const int64_t*,
                                  constant const int64_t*, int) {}
template <typename I = int64_t>
inline vec<I, 3> elem_to_loc_3_nd(uint3, constant const int*, constant const int64_t*,
                                  constant const int64_t*, constant const int64_t*, int) {}
template <int DIM, typename OffsetT = size_t, bool General = true>
struct LoopedElemToLoc {
  LoopedElemToLoc(int dim);
  void next(const constant int*, const constant int64_t*) thread;
  void next(int, const constant int*, const constant int64_t*) thread;
  OffsetT location() thread;
};

template <typename T, typename U>
inline T ceildiv(T, U) {}
inline float log1p(float) {}
inline bfloat16_t log1p(bfloat16_t) {}
inline complex64_t log1p(complex64_t) {}
inline float hypot(float, float) {}

#define ZK_SHUFFLES(T)                                      \
  inline T simd_shuffle_down(T, uint16_t) {}                \
  inline T simd_shuffle_up(T, uint16_t) {}                  \
  inline T simd_shuffle_and_fill_up(T, T, uint16_t) {}      \
  inline T simd_shuffle(T, uint16_t) {}
ZK_SHUFFLES(uint64_t)
ZK_SHUFFLES(int64_t)
ZK_SHUFFLES(bool)
ZK_SHUFFLES(complex64_t)
#undef ZK_SHUFFLES

template <bool condition, typename T, typename U>
struct ConditionalType {
  typedef U type;
};
template <typename T, typename U>
struct ConditionalType<true, T, U> {
  typedef T type;
};
template <typename U, typename T>
inline U cast_to(T) {}
template <int BM>
inline bool schedule_row_tile(const device int32_t*, int, int, int, uint, thread int&, thread int&,
                              thread short&) {}

#if ZK_METAL_VERSION >= 320
namespace metal {
struct os_log {
  constexpr os_log(constant const char*, constant const char*) constant {}
  constexpr os_log(constant const char*, constant const char*) {}
#define ZK_LOG(name)                                            \
  template <typename... A> void name(const constant char*, A...) const constant; \
  template <typename... A> void name(const constant char*, A...) const;
  ZK_LOG(log) ZK_LOG(log_debug) ZK_LOG(log_info) ZK_LOG(log_error) ZK_LOG(log_fault)
#undef ZK_LOG
};
extern const constant os_log os_log_default;
}  // namespace metal
#endif
namespace mlx {
struct os_log {
  constexpr os_log(constant const char*, constant const char*) constant {}
  constexpr os_log(constant const char*, constant const char*) {}
  template <typename... A> void log_debug(const constant char*, A...) const constant;
  template <typename... A> void log_debug(const constant char*, A...) const;
};
}  // namespace mlx

// What lies there cannot change: `constant float*` and `const constant float*` are one type. The
// declarations above keep the keyword, which unlike `const` may follow a constructor.
#define constant const __constant
