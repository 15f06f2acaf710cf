// section conditional; needs numbers; tokens zk_arm zk_arm_beside
// The arms of `c ? a : b`. half and float convert both ways, which makes a conditional between them
// ambiguous in C++; between a half and an int C++ would choose int. Both arms of a conditional are
// wrapped in zk_armed, which converts one way only: to the type that Metal's arithmetic would have.

namespace metal {

template <class T> inline constexpr int zk_rank = -1;
#define ZK_RANK(T, rank) template <> inline constexpr int zk_rank<T> = rank;
ZK_RANK(bool, 0)
ZK_RANK(char, 1)
ZK_RANK(signed char, 1)
ZK_RANK(uchar, 2)
ZK_RANK(short, 3)
ZK_RANK(ushort, 4)
ZK_RANK(int, 5)
ZK_RANK(uint, 6)
ZK_RANK(long, 7)
ZK_RANK(ulong, 8)
ZK_RANK(bfloat, 9)
ZK_RANK(half, 9)
ZK_RANK(float, 10)
#undef ZK_RANK

template <class T>
struct zk_armed {
  T value;
  explicit constexpr zk_armed(T x) : value(x) {}
  template <class U>
    requires(zk_rank<U> < zk_rank<T>)
  constexpr zk_armed(zk_armed<U> x) : value(T(x.value)) {}
  template <class V>
    requires requires { typename V::zk_vector; }
  constexpr operator V() const { return V(value); }
};

template <class T> struct zk_plain { using type = T; };
template <class T> struct zk_plain<T&> { using type = T; };
template <class T> struct zk_plain<const T> { using type = T; };
template <class T> struct zk_plain<const T&> { using type = T; };

template <class T>
constexpr METAL_FUNC auto zk_arm(T&& x) -> zk_armed<typename zk_plain<T>::type>
  requires(zk_rank<typename zk_plain<T>::type> >= 0)
{
  return zk_armed<typename zk_plain<T>::type>(x);
}
// A vector, a pointer, a struct: as it is, and an lvalue stays one.
template <class T>
constexpr METAL_FUNC T zk_arm(T&& x)
  requires(zk_rank<typename zk_plain<T>::type> < 0)
{
  return static_cast<T&&>(x);
}

// Beside another lvalue of the same type, as C++ has it.
template <class Other, class T>
constexpr METAL_FUNC decltype(auto) zk_arm_beside(T&& x) {
  if constexpr (__is_same(Other, T&&)) {
    return static_cast<T&&>(x);
  } else {
    return zk_arm(static_cast<T&&>(x));
  }
}

template <class T>
constexpr METAL_FUNC T zk_value(zk_armed<T> x) { return x.value; }
template <class T>
constexpr METAL_FUNC T zk_value(T&& x) { return static_cast<T&&>(x); }

}  // namespace metal
