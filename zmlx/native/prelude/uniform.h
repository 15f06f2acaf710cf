// section uniform; needs base; tokens uniform make_uniform
// Values that all threads have alike, which here are values.

namespace metal {

template <class T>
using uniform = T;
template <class T>
constexpr METAL_FUNC T make_uniform(T x) {
  return x;
}

}  // namespace metal
