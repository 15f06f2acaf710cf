// section complex; needs numbers traits mlx_limits mlx_math mlx_utils trigonometry vectors; tokens complex_t complex64_t complex32_t is_complex_v is_lane_convertible_v
// MLX's complex numbers.

template <typename T>
struct complex_t;

template <typename T>
inline constexpr bool is_complex_v = false;
template <typename T>
inline constexpr bool is_complex_v<complex_t<T>> = true;

// bfloat needs a cast that a conversion to or from complex may imply.
template <typename From, typename To>
inline constexpr bool is_lane_convertible_v =
    is_convertible_v<From, To> || (is_same_v<To, bfloat16_t> && is_convertible_v<From, float>) ||
    (is_same_v<From, bfloat16_t> && is_convertible_v<float, To>);
template <typename U, typename T>
concept zk_real_for = !is_complex_v<U> && !zk_vectorial<U> && is_lane_convertible_v<U, T>;

template <typename T>
struct complex_t {
  using value_type = T;

  T real;
  T imag;

  constexpr complex_t() : real(T(0.0f)), imag(T(0.0f)) {}
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
  template <typename U>
    requires zk_real_for<U, T>
  constexpr complex_t(U x) : real(static_cast<T>(x)), imag(T(0.0f)) {}
  template <typename U>
    requires(!is_same_v<U, T> && is_lane_convertible_v<U, T>)
  constexpr complex_t(complex_t<U> x)
      : real(static_cast<T>(x.real)), imag(static_cast<T>(x.imag)) {}
  constexpr complex_t(vec<T, 2> v) : real(v.x), imag(v.y) {}

  constexpr operator vec<T, 2>() const { return vec<T, 2>(real, imag); }
  template <typename U>
    requires(zk_real_for<U, T> && is_lane_convertible_v<T, U>)
  constexpr operator U() const {
    return static_cast<U>(real);
  }
};

using complex32_t = complex_t<half>;
using complex64_t = complex_t<float>;

template <typename T>
struct Limits<complex_t<T>> {
  static constexpr complex_t<T> max = {Limits<T>::max, Limits<T>::max};
  static constexpr complex_t<T> min = {Limits<T>::min, Limits<T>::min};
};

template <typename T>
constexpr complex_t<T> operator-(complex_t<T> x) {
  return {-x.real, -x.imag};
}
template <typename T>
constexpr complex_t<T> operator+(complex_t<T> a, complex_t<T> b) {
  return {a.real + b.real, a.imag + b.imag};
}
template <typename T>
constexpr complex_t<T> operator-(complex_t<T> a, complex_t<T> b) {
  return {a.real - b.real, a.imag - b.imag};
}
template <typename T>
constexpr complex_t<T> operator*(complex_t<T> a, complex_t<T> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
// Smith, "Algorithm 116: Complex division": dividing by the larger part of b avoids overflow.
template <typename T>
constexpr complex_t<T> operator/(complex_t<T> a, complex_t<T> b) {
  float ar = a.real, ai = a.imag, br = b.real, bi = b.imag;
  if (metal::abs(br) >= metal::abs(bi)) {
    float ratio = bi / br, scale = br + bi * ratio;
    return {T((ar + ai * ratio) / scale), T((ai - ar * ratio) / scale)};
  }
  float ratio = br / bi, scale = bi + br * ratio;
  return {T((ar * ratio + ai) / scale), T((ai * ratio - ar) / scale)};
}
// Python's remainder of each part: the sign is that of the divisor.
template <typename T>
constexpr T zk_python_remainder(T a, T b) {
  T r = a - b * T(float(static_cast<int64_t>(a / b)));
  return r != 0 && (r < 0) != (b < 0) ? T(r + b) : r;
}
template <typename T>
constexpr complex_t<T> operator%(complex_t<T> a, complex_t<T> b) {
  return {zk_python_remainder(a.real, b.real), zk_python_remainder(a.imag, b.imag)};
}

// A real operand has no imaginary part, not one of 0: the other's keeps its sign.
#define ZK_COMPLEX_WITH_REAL(op, A, B, real, imag)             \
  template <typename T, typename U>                            \
    requires zk_real_for<U, T>                                 \
  constexpr complex_t<T> operator op(A a, B b) {               \
    return {real, imag};                                       \
  }
ZK_COMPLEX_WITH_REAL(+, U, complex_t<T>, static_cast<T>(a) + b.real, b.imag)
ZK_COMPLEX_WITH_REAL(+, complex_t<T>, U, a.real + static_cast<T>(b), a.imag)
ZK_COMPLEX_WITH_REAL(-, U, complex_t<T>, static_cast<T>(a) - b.real, -b.imag)
ZK_COMPLEX_WITH_REAL(-, complex_t<T>, U, a.real - static_cast<T>(b), a.imag)
#undef ZK_COMPLEX_WITH_REAL
template <typename T, typename U>
  requires zk_real_for<U, T>
constexpr complex_t<T> operator/(U a, complex_t<T> b) {
  return complex_t<T>(a) / b;
}
template <typename T>
constexpr complex_t<T>& operator+=(complex_t<T>& a, zk_same<complex_t<T>> b) {
  return a = a + b;
}

// In the order of the real parts, then of the imaginary ones.
template <typename T>
constexpr bool operator==(complex_t<T> a, complex_t<T> b) {
  return a.real == b.real && a.imag == b.imag;
}
template <typename T>
constexpr bool operator>(complex_t<T> a, complex_t<T> b) {
  return a.real > b.real || (a.real == b.real && a.imag > b.imag);
}
template <typename T>
constexpr bool operator>=(complex_t<T> a, complex_t<T> b) {
  return a > b || a == b;
}
template <typename T>
constexpr bool operator<(complex_t<T> a, complex_t<T> b) {
  return b > a;
}
template <typename T>
constexpr bool operator<=(complex_t<T> a, complex_t<T> b) {
  return b >= a;
}

template <>
METAL_FUNC bool cast_to<bool, complex64_t>(complex64_t val) {
  return cast_to<bool, float>(val.real) || cast_to<bool, float>(val.imag);
}

// log(1 + z): below one half through |1 + z|^2 - 1, which cancels nothing.
inline complex64_t log1p(complex64_t z) {
  float x = z.real, y = z.imag, angle = metal::atan2(y, x + 1.0f);
  if (metal::sqrt(x * x + y * y) < 0.5f) {
    float r = x * (2.0f + x) + y * y;
    return {r == 0.0f ? x : 0.5f * log1p(r), angle};
  }
  return {metal::log(metal::sqrt((x + 1.0f) * (x + 1.0f) + y * y)), angle};
}
