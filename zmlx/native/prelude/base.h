// section base; needs abi; tokens *
// The ground of Metal's library: address spaces, scalar types, constants, bit casts.

#define device
#define constant
#define thread
#define kernel

#define METAL_FUNC inline __attribute__((always_inline))

// Kernels test these to find out what the language offers; 320 is the newest that every supported
// MLX compiles custom kernels with.
#define __METAL__ 1
#define __METAL_MACOS__ 1
#define __METAL_VERSION__ 320
#define __HAVE_BFLOAT__ 1
#define assert(condition) ((void)0)

// Short polynomials are inlined where loops vectorise. A cooperative kernel runs lane by lane and
// has many call sites, so there a call costs nothing and keeps the compilation short.
#ifdef ZK_COOPERATIVE
#define ZK_INLINE inline
#else
#define ZK_INLINE inline __attribute__((always_inline))
#endif

namespace metal {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = uchar;
using uint16_t = ushort;
using uint32_t = uint;
using uint64_t = ulong;
using size_t = unsigned long;
using ptrdiff_t = long;
using uintptr_t = unsigned long;
using intptr_t = long;
static_assert(sizeof(long) == 8, "Metal's long has 64 bits");

// Reads the bits of one type as another of the same size.
template <class To, class From>
constexpr METAL_FUNC To as_type(From x) {
  return __builtin_bit_cast(To, x);
}

enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(int(a) & int(b)); }

template <class T>
inline constexpr bool zk_is_integer = false;
#define ZK_INTEGER(T) \
  template <>         \
  inline constexpr bool zk_is_integer<T> = true;
ZK_INTEGER(bool)
ZK_INTEGER(char)
ZK_INTEGER(signed char)
ZK_INTEGER(uchar)
ZK_INTEGER(short)
ZK_INTEGER(ushort)
ZK_INTEGER(int)
ZK_INTEGER(uint)
ZK_INTEGER(long)
ZK_INTEGER(ulong)
ZK_INTEGER(long long)
ZK_INTEGER(unsigned long long)
#undef ZK_INTEGER

template <class T>
inline constexpr bool zk_is_narrow = false;  // half and bfloat
// What lanes combine their numbers in: narrow ones, and vectors of them, in float, rounded once.
template <class T>
struct zk_combined {
  using type = T;
};
template <class T>
  requires zk_is_narrow<T>
struct zk_combined<T> {
  using type = float;
};
template <class T>
concept zk_integer = zk_is_integer<T>;
// Integers and what converts to them: enumerators without a scope.
template <class T>
concept zk_counts =
    zk_is_integer<T> || (__is_enum(T) && requires(T x, void (*take)(int)) { take(x); });
template <class T>
concept zk_scalar = zk_is_integer<T> || __is_same(T, float) || zk_is_narrow<T> || __is_enum(T);

// A parameter of this type takes no part in template deduction.
template <class T>
struct zk_identity {
  using type = T;
};
template <class T>
using zk_same = typename zk_identity<T>::type;
// The same type, but known only where the flag is: see anonymous_structs.cc.
template <bool, class T>
struct zk_member {
  using type = T;
};

}  // namespace metal
using namespace metal;

// The type that C++ makes of braces, as far as loops and vectors read it; NVRTC has it built in.
#if !defined(__CUDACC_RTC__) && !defined(_INITIALIZER_LIST)
#define _INITIALIZER_LIST
namespace std {
template <class E>
class initializer_list {
  const E* first;
  metal::size_t count;
  constexpr initializer_list(const E* first, metal::size_t count) : first(first), count(count) {}

 public:
  constexpr initializer_list() : first(nullptr), count(0) {}
  constexpr const E* begin() const { return first; }
  constexpr const E* end() const { return first + count; }
};
}  // namespace std
#endif

#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615ul

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF INFINITY
#define MAXFLOAT FLT_MAX
#define FLT_RADIX 2
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define FLT_MAX_10_EXP 38
#define FLT_MIN_10_EXP (-37)
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define FP_ILOGB0 INT_MIN
#define FP_ILOGBNAN INT_MAX

#define HUGE_VALH half(INFINITY)
#define MAXHALF HALF_MAX
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX_10_EXP 4
#define HALF_MIN_10_EXP (-4)
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(0x1p-14f)
#define HALF_EPSILON half(0x1p-10f)

#define HUGE_VALBF bfloat(INFINITY)
#define MAXBFLOAT BFLT_MAX
#define BFLT_DIG 2
#define BFLT_MANT_DIG 8
#define BFLT_MAX_EXP 128
#define BFLT_MIN_EXP (-125)
#define BFLT_MAX_10_EXP 38
#define BFLT_MIN_10_EXP (-37)
#define BFLT_MAX bfloat(0x1.fep127f)
#define BFLT_MIN bfloat(0x1p-126f)
#define BFLT_EPSILON bfloat(0x1p-7f)

#define M_E_F 2.71828182845904523536028747135266250f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LOG10E_F 0.434294481903251827651128918916605082f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LN10_F 2.30258509299404568401799145468436421f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_PI_4_F 0.785398163397448309615660845819875721f
#define M_1_PI_F 0.318309886183790671537767526745028724f
#define M_2_PI_F 0.636619772367581343075535053490057448f
#define M_2_SQRTPI_F 1.12837916709551257389615890312154517f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f

#define M_E_H half(M_E_F)
#define M_LOG2E_H half(M_LOG2E_F)
#define M_LOG10E_H half(M_LOG10E_F)
#define M_LN2_H half(M_LN2_F)
#define M_LN10_H half(M_LN10_F)
#define M_PI_H half(M_PI_F)
#define M_PI_2_H half(M_PI_2_F)
#define M_PI_4_H half(M_PI_4_F)
#define M_1_PI_H half(M_1_PI_F)
#define M_2_PI_H half(M_2_PI_F)
#define M_2_SQRTPI_H half(M_2_SQRTPI_F)
#define M_SQRT2_H half(M_SQRT2_F)
#define M_SQRT1_2_H half(M_SQRT1_2_F)

#define M_E_BF bfloat(M_E_F)
#define M_LOG2E_BF bfloat(M_LOG2E_F)
#define M_LOG10E_BF bfloat(M_LOG10E_F)
#define M_LN2_BF bfloat(M_LN2_F)
#define M_LN10_BF bfloat(M_LN10_F)
#define M_PI_BF bfloat(M_PI_F)
#define M_PI_2_BF bfloat(M_PI_2_F)
#define M_PI_4_BF bfloat(M_PI_4_F)
#define M_1_PI_BF bfloat(M_1_PI_F)
#define M_2_PI_BF bfloat(M_2_PI_F)
#define M_2_SQRTPI_BF bfloat(M_2_SQRTPI_F)
#define M_SQRT2_BF bfloat(M_SQRT2_F)
#define M_SQRT1_2_BF bfloat(M_SQRT1_2_F)
