// section mlx_limits; needs limits; tokens Limits
// MLX's Limits: like numeric_limits, but the extremes of a float type are its infinities.

template <typename U>
struct Limits {
  static constexpr U max = metal::numeric_limits<U>::max();
  static constexpr U min = metal::numeric_limits<U>::min();
  static constexpr U finite_max = max;
  static constexpr U finite_min = min;
};
#define ZK_FLOAT_EXTREMES(T)                                            \
  template <>                                                           \
  struct Limits<T> {                                                    \
    static constexpr T max = metal::numeric_limits<T>::infinity();      \
    static constexpr T min = -metal::numeric_limits<T>::infinity();     \
    static constexpr T finite_max = metal::numeric_limits<T>::max();    \
    static constexpr T finite_min = metal::numeric_limits<T>::lowest(); \
  };
ZK_FLOAT_EXTREMES(float)
#ifdef ZK_NUMBERS
ZK_FLOAT_EXTREMES(half)
ZK_FLOAT_EXTREMES(bfloat)
#endif
#undef ZK_FLOAT_EXTREMES
