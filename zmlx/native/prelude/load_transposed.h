// section load_transposed; needs base; after numbers; tokens ZMLX_LOAD_TRANSPOSED zmlx_load_transposed
// zmlx_load_transposed<M, N>(to, from, stride): to[m][n] = float(from[n][m]), rows of `from` a stride
// apart, in squares that a register of 16 bytes per row holds. Of loops that do it g++ makes gathers,
// which take ten times as long. A kernel that uses it has the loops for targets that do not.

#define ZMLX_LOAD_TRANSPOSED 1

namespace metal {

#ifdef __clang__
#define ZK_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZK_PICK(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif

// Elements as integers of their size, and those of two vectors one after the other: zk_low begins
// with their first halves, zk_high with their last.
template <int Size>
struct zk_square;
template <>
struct zk_square<4> {
  typedef uint zk_type;
  typedef zk_type zk_row __attribute__((vector_size(16)));
  static METAL_FUNC zk_row zk_low(zk_row a, zk_row b) { return ZK_PICK(a, b, 0, 4, 1, 5); }
  static METAL_FUNC zk_row zk_high(zk_row a, zk_row b) { return ZK_PICK(a, b, 2, 6, 3, 7); }
};
template <>
struct zk_square<2> {
  typedef ushort zk_type;
  typedef zk_type zk_row __attribute__((vector_size(16)));
  static METAL_FUNC zk_row zk_low(zk_row a, zk_row b) {
    return ZK_PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  static METAL_FUNC zk_row zk_high(zk_row a, zk_row b) {
    return ZK_PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};
template <>
struct zk_square<1> {
  typedef uchar zk_type;
  typedef zk_type zk_row __attribute__((vector_size(16)));
  static METAL_FUNC zk_row zk_low(zk_row a, zk_row b) {
    return ZK_PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static METAL_FUNC zk_row zk_high(zk_row a, zk_row b) {
    return ZK_PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};
#undef ZK_PICK

}  // namespace metal

template <int M, int N, class T>
inline void zmlx_load_transposed(float* to, const T* from, metal::size_t stride) {
  typedef metal::zk_square<sizeof(T)> Square;
  typedef typename Square::zk_row Row;
  constexpr int side = 16 / sizeof(T);
  alignas(64) T turned[M * N];
  // What is left of whole squares goes one by one.
  constexpr int whole_m = M / side * side, whole_n = N / side * side;
  for (int n = 0; n < N; ++n) {
    for (int m = n < whole_n ? whole_m : 0; m < M; ++m) turned[m * N + n] = from[n * stride + m];
  }
  for (int n = 0; n < whole_n; n += side) {
    for (int m = 0; m < whole_m; m += side) {
      Row rows[side], next[side];
#pragma GCC unroll 16
      for (int i = 0; i < side; ++i) __builtin_memcpy(&rows[i], from + (n + i) * stride + m, 16);
      // Each round shuffles the rows as a pack of cards; after as many as `side` has bits they are
      // columns.
#pragma GCC unroll 4
      for (int round = 1; round < side; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < side / 2; ++i) {
          next[2 * i] = Square::zk_low(rows[i], rows[i + side / 2]);
          next[2 * i + 1] = Square::zk_high(rows[i], rows[i + side / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < side; ++i) rows[i] = next[i];
      }
#pragma GCC unroll 16
      for (int i = 0; i < side; ++i) __builtin_memcpy(turned + (m + i) * N + n, &rows[i], 16);
    }
  }
  for (int i = 0; i < M * N; ++i) to[i] = float(turned[i]);
}
