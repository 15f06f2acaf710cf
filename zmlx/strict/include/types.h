// What Metal's library declares, as declarations only: scalar types, traits, limits. Read by clang in
// OpenCL C++ mode, whose address spaces, scope rules and vector types are the ones that Apple's
// compiler grew out of. Nothing here runs.

#define __METAL__ 1
#define __METAL_MACOS__ 1
#define __METAL_VERSION__ ZK_METAL_VERSION
#define __HAVE_BFLOAT__ 1
#define assert(condition) ((void)0)

#define thread __private
#define device __global
#define threadgroup __local

// OpenCL's own keywords and types are ordinary names in Metal.
#define global zk_global
#define local zk_local
#define generic zk_generic
#define pipe zk_pipe
#define read_only zk_read_only
#define write_only zk_write_only
#define read_write zk_read_write
#define atomic_int zk_atomic_int
#define atomic_uint zk_atomic_uint
#define atomic_bool zk_atomic_bool
#define atomic_ulong zk_atomic_ulong
#define atomic_float zk_atomic_float

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define METAL_FUNC inline __attribute__((always_inline))

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;
typedef __bf16 bfloat;

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define ZK_VECTORS(T)   \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
ZK_VECTORS(char)
ZK_VECTORS(uchar)
ZK_VECTORS(short)
ZK_VECTORS(ushort)
ZK_VECTORS(int)
ZK_VECTORS(uint)
ZK_VECTORS(long)
ZK_VECTORS(ulong)
ZK_VECTORS(half)
ZK_VECTORS(bfloat)
ZK_VECTORS(float)
#undef ZK_VECTORS

// ---- traits ---------------------------------------------------------------------------------

template <typename T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool c, typename T = void>
using enable_if_t = typename enable_if<c, T>::type;

template <bool, typename T, typename U>
struct conditional {
  typedef T type;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool c, typename T, typename U>
using conditional_t = typename conditional<c, T, U>::type;

#define ZK_TRAIT(name, ...)                                  \
  template <typename T>                                      \
  struct name : bool_constant<__VA_ARGS__> {};               \
  template <typename T>                                      \
  static constexpr constant bool name##_v = __VA_ARGS__;
#define ZK_TRAIT_2(name, ...)                                \
  template <typename T, typename U>                          \
  struct name : bool_constant<__VA_ARGS__> {};               \
  template <typename T, typename U>                          \
  static constexpr constant bool name##_v = __VA_ARGS__;
ZK_TRAIT_2(is_same, __is_same(T, U))
ZK_TRAIT_2(is_convertible, __is_convertible(T, U))
ZK_TRAIT_2(is_constructible, __is_constructible(T, U))
ZK_TRAIT_2(is_base_of, __is_base_of(T, U))
ZK_TRAIT(is_integral, __is_integral(T))
ZK_TRAIT(is_floating_point, __is_floating_point(T))
ZK_TRAIT(is_arithmetic, __is_arithmetic(T))
ZK_TRAIT(is_signed, __is_signed(T))
ZK_TRAIT(is_unsigned, __is_unsigned(T))
ZK_TRAIT(is_pointer, __is_pointer(T))
ZK_TRAIT(is_array, __is_array(T))
ZK_TRAIT(is_enum, __is_enum(T))
ZK_TRAIT(is_class, __is_class(T))
ZK_TRAIT(is_const, __is_const(T))
ZK_TRAIT(is_volatile, __is_volatile(T))
ZK_TRAIT(is_union, __is_union(T))
ZK_TRAIT(is_void, __is_void(T))
ZK_TRAIT(is_reference, __is_reference(T))
ZK_TRAIT(is_lvalue_reference, __is_lvalue_reference(T))
ZK_TRAIT(is_scalar, __is_scalar(T))
ZK_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
// Of `#pragma METAL internals`, as MLX uses it.
template <typename... T>
struct _disjunction : bool_constant<(T::value || ...)> {};

#define ZK_TRANSFORM(name, builtin)            \
  template <typename T>                        \
  struct name {                                \
    typedef builtin(T) type;                   \
  };                                           \
  template <typename T>                        \
  using name##_t = builtin(T);
ZK_TRANSFORM(remove_cv, __remove_cv)
ZK_TRANSFORM(remove_const, __remove_const)
ZK_TRANSFORM(remove_volatile, __remove_volatile)
ZK_TRANSFORM(remove_reference, __remove_reference_t)
ZK_TRANSFORM(remove_pointer, __remove_pointer)
ZK_TRANSFORM(remove_extent, __remove_extent)
ZK_TRANSFORM(make_signed, __make_signed)
ZK_TRANSFORM(make_unsigned, __make_unsigned)
ZK_TRANSFORM(underlying_type, __underlying_type)
ZK_TRANSFORM(decay, __decay)
ZK_TRANSFORM(add_pointer, __add_pointer)
ZK_TRANSFORM(add_lvalue_reference, __add_lvalue_reference)
ZK_TRANSFORM(add_rvalue_reference, __add_rvalue_reference)

template <typename T>
using add_const_t = const T;
template <typename T>
struct add_const {
  typedef const T type;
};

// What a pointer to a function is to; other types as they are. As a member, `R(A...)` would have the
// space of a method.
template <typename R, typename... A>
using zk_signature = R(A...);
template <typename P>
struct zk_pointee {
  typedef P type;
};
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
template <typename R, typename... A>
struct zk_pointee<R (*)(A...)> {
  typedef zk_signature<R, A...> type;
};
#pragma OPENCL EXTENSION __cl_clang_function_pointers : disable
template <typename P>
using zk_function = typename zk_pointee<P>::type;

template <typename T>
struct remove_addrspace {
  typedef T type;
};
#define ZK_SPACE(space)             \
  template <typename T>             \
  struct remove_addrspace<space T> { \
    typedef T type;                 \
  };
ZK_SPACE(thread)
ZK_SPACE(device)
ZK_SPACE(threadgroup)
ZK_SPACE(constant)
#undef ZK_SPACE
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <typename T>
thread T& declval();

struct zk_limits {
  static constexpr constant bool is_specialized = false, is_integer = false, is_exact = false,
                                 is_signed = false, is_bounded = false, is_modulo = false,
                                 is_iec559 = false, has_infinity = false, has_quiet_NaN = false,
                                 has_signaling_NaN = false, has_denorm_loss = false, traps = false,
                                 tinyness_before = false;
  static constexpr constant int digits = 0, digits10 = 0, max_digits10 = 0, radix = 0,
                                min_exponent = 0, min_exponent10 = 0, max_exponent = 0,
                                max_exponent10 = 0;
};
template <typename T>
struct numeric_limits : zk_limits {};
#define ZK_INTEGER_LIMITS(T, low, high)                        \
  template <>                                                  \
  struct numeric_limits<T> : zk_limits {                       \
    static constexpr constant bool is_specialized = true;      \
    static constexpr constant bool is_integer = true;          \
    static constexpr constant bool is_exact = true;            \
    static constexpr constant bool is_bounded = true;          \
    static constexpr constant bool is_signed = T(-1) < T(0);   \
    static constexpr constant bool is_modulo = !is_signed;     \
    static constexpr constant int radix = 2;                   \
    static constexpr constant int digits = sizeof(T) * 8 - (T(-1) < T(0)); \
    static constexpr constant int digits10 = digits * 3 / 10;  \
    static constexpr T min() { return low; }                   \
    static constexpr T lowest() { return low; }                \
    static constexpr T max() { return high; }                  \
  };
ZK_INTEGER_LIMITS(bool, false, true)
ZK_INTEGER_LIMITS(char, -128, 127)
ZK_INTEGER_LIMITS(int8_t, -128, 127)
ZK_INTEGER_LIMITS(uchar, 0, 255)
ZK_INTEGER_LIMITS(short, -32768, 32767)
ZK_INTEGER_LIMITS(ushort, 0, 65535)
ZK_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
ZK_INTEGER_LIMITS(uint, 0, 4294967295u)
ZK_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
ZK_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef ZK_INTEGER_LIMITS
// A float that no half and no bfloat is, so that clang warns of its conversions to these.
#define ZK_FLOAT 0x1.000002p0f
#define ZK_FLOAT_LIMITS(T, mantissa, exponent, low, high, eps)           \
  template <>                                                            \
  struct numeric_limits<T> : zk_limits {                                 \
    static constexpr constant bool is_specialized = true;                \
    static constexpr constant bool is_signed = true;                     \
    static constexpr constant bool is_bounded = true;                    \
    static constexpr constant bool is_iec559 = true;                     \
    static constexpr constant bool has_infinity = true;                  \
    static constexpr constant bool has_quiet_NaN = true;                 \
    static constexpr constant bool has_signaling_NaN = true;             \
    static constexpr constant int radix = 2;                             \
    static constexpr constant int digits = mantissa;                     \
    static constexpr constant int digits10 = (mantissa - 1) * 3 / 10;    \
    static constexpr constant int max_digits10 = 2 + mantissa * 3 / 10;  \
    static constexpr constant int min_exponent = 3 - exponent;           \
    static constexpr constant int min_exponent10 = (2 - exponent) * 3 / 10; \
    static constexpr constant int max_exponent = exponent;               \
    static constexpr constant int max_exponent10 = exponent * 3 / 10;    \
    static constexpr T min() { return T(low); }                          \
    static constexpr T max() { return T(high); }                         \
    static constexpr T lowest() { return T(-high); }                     \
    static constexpr T epsilon() { return T(eps); }                      \
    static constexpr T round_error() { return T(0.5f); }                 \
    static constexpr T infinity() { return T(ZK_FLOAT); }                \
    static constexpr T quiet_NaN() { return T(ZK_FLOAT); }               \
    static constexpr T signaling_NaN() { return T(ZK_FLOAT); }           \
    static constexpr T denorm_min() { return T(low); }                   \
  };
ZK_FLOAT_LIMITS(half, 11, 16, 0x1p-14f, 65504.0f, 0x1p-10f)
ZK_FLOAT_LIMITS(bfloat, 8, 128, 0x1p-126f, 0x1.fep127f, 0x1p-7f)
ZK_FLOAT_LIMITS(float, 24, 128, 0x1p-126f, 0x1.fffffep127f, 0x1p-23f)
#undef ZK_FLOAT_LIMITS

}  // namespace metal
