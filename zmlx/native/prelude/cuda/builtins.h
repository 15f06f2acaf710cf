// section builtins; tokens *
// What NVRTC lacks of the compilers that the shared sections are written for.

#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000)
#define __builtin_fabsf ::fabsf
#define __builtin_copysignf ::copysignf
#define __builtin_floorf ::floorf
#define __builtin_ceilf ::ceilf
#define __builtin_truncf ::truncf
#define __builtin_rintf ::rintf
#define __builtin_fmaf ::fmaf
#define __builtin_sqrtf ::sqrtf
#define __builtin_fmodf ::fmodf
#define __builtin_popcountll ::__popcll
#define __builtin_clzll ::__clzll
#define __builtin_ctzll(x) (::__ffsll((long long)(x)) - 1)
#define __builtin_bswap64 zk_bswap64

// A concept, because a variable template would become a variable in the cubin.
template <class A, class B>
struct zk_same_type {
  enum { value = 0 };
};
template <class A>
struct zk_same_type<A, A> {
  enum { value = 1 };
};
template <class A, class B>
concept zk_is_same = bool(zk_same_type<A, B>::value);
#define __is_same(...) zk_is_same<__VA_ARGS__>

__forceinline__ unsigned long zk_bswap64(unsigned long x) {
  unsigned long low = __byte_perm(unsigned(x >> 32), 0, 0x0123);
  return (unsigned long)__byte_perm(unsigned(x), 0, 0x0123) << 32 | low;
}
