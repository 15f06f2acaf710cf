// section array; needs base member_alignment; tokens array
// metal::array.

namespace metal {

template <class T, size_t N>
struct array {
  T zk_elements[N];
  constexpr METAL_FUNC T& operator[](size_t i) { return zk_elements[i]; }
  constexpr METAL_FUNC const T& operator[](size_t i) const { return zk_elements[i]; }
  static constexpr size_t size() { return N; }
  static constexpr bool empty() { return N == 0; }
  constexpr T* data() { return zk_elements; }
  constexpr const T* data() const { return zk_elements; }
  constexpr T& front() { return zk_elements[0]; }
  constexpr T& back() { return zk_elements[N - 1]; }
  constexpr T* begin() { return zk_elements; }
  constexpr const T* begin() const { return zk_elements; }
  constexpr T* end() { return zk_elements + N; }
  constexpr const T* end() const { return zk_elements + N; }
  constexpr void fill(const T& value) {
    for (size_t i = 0; i < N; ++i) zk_elements[i] = value;
  }
};
template <class T, size_t N>
inline constexpr unsigned zk_member_alignment<array<T, N>> = zk_member_alignment<T>;

}  // namespace metal
