// section traits; needs base; tokens integral_constant bool_constant true_type false_type is_same is_same_v enable_if enable_if_t conditional conditional_t is_integral is_integral_v is_floating_point is_floating_point_v is_arithmetic is_arithmetic_v is_scalar is_scalar_v is_signed is_signed_v is_unsigned is_unsigned_v is_void is_void_v is_pointer is_pointer_v is_array is_array_v is_reference is_reference_v is_lvalue_reference is_lvalue_reference_v is_const is_const_v is_volatile is_volatile_v is_enum is_enum_v is_class is_class_v is_union is_union_v is_trivially_copyable is_trivially_copyable_v is_base_of is_base_of_v is_convertible is_convertible_v is_constructible is_constructible_v _disjunction remove_const remove_const_t remove_volatile remove_volatile_t remove_cv remove_cv_t remove_reference remove_reference_t remove_pointer remove_pointer_t remove_extent remove_extent_t add_const add_const_t add_pointer add_pointer_t add_lvalue_reference add_lvalue_reference_t add_rvalue_reference add_rvalue_reference_t decay decay_t make_signed make_signed_t make_unsigned make_unsigned_t underlying_type underlying_type_t remove_addrspace remove_addrspace_t declval complex_t complex32_t complex64_t
// Metal's type traits: the part of <type_traits> that <metal_type_traits> has.

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F>
using conditional_t = typename conditional<b, T, F>::type;
template <class T>
T&& declval();

// A type that others map to: NAME<from>::type is `to`, NAME_t its short form.
#define ZK_MAPS(NAME)          \
  template <class T>           \
  struct NAME {                \
    using type = T;            \
  };                           \
  template <class T>           \
  using NAME##_t = typename NAME<T>::type;
#define ZK_MAP(NAME, parameters, from, to) \
  template <parameters>                    \
  struct NAME<from> {                      \
    using type = to;                       \
  };
ZK_MAPS(remove_const)
ZK_MAP(remove_const, class T, const T, T)
ZK_MAPS(remove_addrspace)
ZK_MAPS(remove_volatile)
ZK_MAP(remove_volatile, class T, volatile T, T)
ZK_MAPS(remove_cv)
ZK_MAP(remove_cv, class T, const T, T)
ZK_MAP(remove_cv, class T, volatile T, T)
ZK_MAP(remove_cv, class T, const volatile T, T)
ZK_MAPS(remove_reference)
ZK_MAP(remove_reference, class T, T&, T)
ZK_MAP(remove_reference, class T, T&&, T)
ZK_MAPS(remove_pointer)
ZK_MAP(remove_pointer, class T, T*, T)
ZK_MAP(remove_pointer, class T, T* const, T)
ZK_MAPS(remove_extent)
ZK_MAP(remove_extent, class T, T[], T)
template <class T, size_t N>
struct remove_extent<T[N]> {
  using type = T;
};
ZK_MAPS(make_signed)
ZK_MAP(make_signed, , char, signed char)
ZK_MAP(make_signed, , uchar, signed char)
ZK_MAP(make_signed, , ushort, short)
ZK_MAP(make_signed, , uint, int)
ZK_MAP(make_signed, , ulong, long)
ZK_MAPS(make_unsigned)
ZK_MAP(make_unsigned, , char, uchar)
ZK_MAP(make_unsigned, , signed char, uchar)
ZK_MAP(make_unsigned, , short, ushort)
ZK_MAP(make_unsigned, , int, uint)
ZK_MAP(make_unsigned, , long, ulong)
#undef ZK_MAPS
#undef ZK_MAP

#define ZK_ADDS(NAME, to) \
  template <class T>      \
  struct NAME {           \
    using type = to;      \
  };                      \
  template <class T>      \
  using NAME##_t = typename NAME<T>::type;
ZK_ADDS(add_const, const T)
ZK_ADDS(add_pointer, remove_reference_t<T>*)
ZK_ADDS(add_lvalue_reference, T&)
ZK_ADDS(add_rvalue_reference, T&&)
ZK_ADDS(underlying_type, __underlying_type(T))
#undef ZK_ADDS
template <class T>
auto zk_passed(T) -> T;
template <class T>
struct decay {
  using type = decltype(zk_passed(declval<T>()));
};
template <class T>
using decay_t = typename decay<T>::type;

#define ZK_TRAIT_1(NAME, truth)                 \
  template <class T>                            \
  inline constexpr bool NAME##_v = truth;       \
  template <class T>                            \
  struct NAME : bool_constant<NAME##_v<T>> {};
#define ZK_TRAIT_2(NAME, truth)                 \
  template <class T, class U>                   \
  inline constexpr bool NAME##_v = truth;       \
  template <class T, class U>                   \
  struct NAME : bool_constant<NAME##_v<T, U>> {};
ZK_TRAIT_2(is_same, __is_same(T, U))
ZK_TRAIT_2(is_base_of, __is_base_of(T, U))
ZK_TRAIT_2(is_convertible, (requires(void (*take)(U), T (&make)()) { take(make()); }))
ZK_TRAIT_1(is_integral, zk_is_integer<remove_cv_t<T>>)
ZK_TRAIT_1(is_floating_point, __is_same(remove_cv_t<T>, float) || zk_is_narrow<remove_cv_t<T>>)
ZK_TRAIT_1(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
ZK_TRAIT_1(is_unsigned, is_integral_v<T> && __is_same(T, make_unsigned_t<T>))
ZK_TRAIT_1(is_signed, is_arithmetic_v<T> && !is_unsigned_v<T>)
ZK_TRAIT_1(is_void, __is_same(remove_cv_t<T>, void))
ZK_TRAIT_1(is_pointer, !__is_same(T, remove_pointer_t<T>))
ZK_TRAIT_1(is_array, !__is_same(T, remove_extent_t<T>))
ZK_TRAIT_1(is_reference, !__is_same(T, remove_reference_t<T>))
ZK_TRAIT_1(is_lvalue_reference, is_reference_v<T> && __is_same(T, T&))
ZK_TRAIT_1(is_const, !__is_same(T, remove_const_t<T>))
ZK_TRAIT_1(is_volatile, !__is_same(T, remove_volatile_t<T>))
ZK_TRAIT_1(is_enum, __is_enum(T))
ZK_TRAIT_1(is_class, __is_class(T))
ZK_TRAIT_1(is_union, __is_union(T))
ZK_TRAIT_1(is_trivially_copyable, __is_trivially_copyable(T))
ZK_TRAIT_1(is_scalar, is_arithmetic_v<T> || is_enum_v<T> || is_pointer_v<T>)
#undef ZK_TRAIT_1
#undef ZK_TRAIT_2
template <class T, class... A>
inline constexpr bool is_constructible_v = __is_constructible(T, A...);
template <class T, class... A>
struct is_constructible : bool_constant<is_constructible_v<T, A...>> {};
// Of `#pragma METAL internals`, as MLX uses it.
template <class... T>
struct _disjunction : bool_constant<(T::value || ...)> {};

}  // namespace metal
