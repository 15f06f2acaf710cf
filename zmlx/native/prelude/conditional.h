// section conditional; needs numbers; tokens zk_value
// The arms of `c ? a : b`. half and float convert both ways, which makes a conditional between them
// ambiguous in C++; between a half and an int C++ would choose int. `(zk_arm(), a)` is therefore
// zk_armed, which converts one way only: to the type that Metal's arithmetic would have. Two
// integers do not convert to each other: C++ finds the type that both are promoted to.
// Operators, because where none is for an operand the comma is C++'s own, and the operand stays
// what it is: a place, a bit-field, void.

namespace metal {

template <class T>
inline constexpr int zk_rank = zk_is_integer<T> || __is_enum(T) ? 0
                               : zk_is_narrow<T>                ? 1
                               : __is_same(T, float)            ? 2
                                                                : -1;
template <class T>
concept zk_ranked = zk_rank<T> >= 0;

template <class T>
struct zk_armed {
  T value;
  explicit constexpr zk_armed(T x) : value(x) {}
  template <class U>
    requires(zk_rank<U> < zk_rank<T>)
  constexpr zk_armed(zk_armed<U> x) : value(T(x.value)) {}
  constexpr operator T() const { return value; }
  template <class V>
    requires requires { typename V::zk_vector; }
  constexpr operator V() const { return V(value); }
};

// A literal 0, which may stand for a null pointer.
struct zk_zero : zk_armed<int> {
  constexpr zk_zero() : zk_armed<int>(0) {}
  template <class T>
  constexpr operator T*() const { return nullptr; }
};

template <class T> struct zk_plain { using type = T; };
template <class T> struct zk_plain<T&> { using type = T; };
template <class T> struct zk_plain<const T&> { using type = T; };
template <class T> struct zk_plain<volatile T&> { using type = T; };
template <class T> struct zk_plain<const volatile T&> { using type = T; };

struct zk_arm {};
template <zk_ranked T>
constexpr METAL_FUNC zk_armed<T> operator,(zk_arm, T x) { return zk_armed<T>(x); }

// Beside arms of the same type, as C++ has it: two places stay one.
template <class... Others> struct zk_arm_beside {};
template <class... Others, zk_ranked T>
  requires(!(__is_same(typename zk_plain<Others>::type, T) && ...))
constexpr METAL_FUNC zk_armed<T> operator,(zk_arm_beside<Others...>, T x) { return zk_armed<T>(x); }

struct zk_value {};
template <class T>
constexpr METAL_FUNC T operator,(zk_value, zk_armed<T> x) { return x.value; }

}  // namespace metal
