// section matrices; needs vectors geometry; after numbers; tokens matrix float2x2 float2x3 float2x4 float3x2 float3x3 float3x4 float4x2 float4x3 float4x4 half2x2 half2x3 half2x4 half3x2 half3x3 half3x4 half4x2 half4x3 half4x4 transpose( determinant(
// Metal's small matrices: `columns` columns of `rows` components.

namespace metal {

template <class T, int columns_, int rows>
struct matrix {
  using zk_column = vec<T, rows>;
  zk_column columns[columns_];

  matrix() = default;
  // The diagonal.
  explicit constexpr METAL_FUNC matrix(T s) {
    for (int c = 0; c < columns_; ++c) {
      for (int r = 0; r < rows; ++r) columns[c][r] = c == r ? s : T(0);
    }
  }
  template <class... V>
    requires(sizeof...(V) == columns_ && (zk_vectorial<V> && ...))
  constexpr METAL_FUNC matrix(V... v) : columns{zk_column(v)...} {}
  // Columns in braces, which no template parameter takes; scalars are no columns.
  constexpr METAL_FUNC matrix(zk_column a, zk_column b)
    requires(columns_ == 2)
      : columns{a, b} {}
  constexpr METAL_FUNC matrix(zk_column a, zk_column b, zk_column c)
    requires(columns_ == 3)
      : columns{a, b, c} {}
  constexpr METAL_FUNC matrix(zk_column a, zk_column b, zk_column c, zk_column d)
    requires(columns_ == 4)
      : columns{a, b, c, d} {}
  template <class... S>
    requires(sizeof...(S) == columns_ && (zk_scalar<S> && ...))
  matrix(S...) = delete;
  template <class... S>
    requires(sizeof...(S) == columns_ * rows && (zk_scalar<S> && ...))
  constexpr METAL_FUNC matrix(S... s) {
    T all[] = {T(s)...};
    for (int i = 0; i < columns_ * rows; ++i) columns[i / rows][i % rows] = all[i];
  }
  template <class U>
  explicit constexpr METAL_FUNC matrix(const matrix<U, columns_, rows>& m) {
    for (int c = 0; c < columns_; ++c) columns[c] = zk_column(m[c]);
  }
  constexpr METAL_FUNC zk_column& operator[](int c) { return columns[c]; }
  constexpr METAL_FUNC const zk_column& operator[](int c) const { return columns[c]; }
};
template <class T, int C, int R>
inline constexpr unsigned zk_member_alignment<matrix<T, C, R>> = zk_member_alignment<vec<T, R>>;

template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator+(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; ++c) a[c] += b[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator-(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; ++c) a[c] -= b[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator-(matrix<T, C, R> a) {
  for (int c = 0; c < C; ++c) a[c] = -a[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator*(matrix<T, C, R> a, zk_same<T> s) {
  for (int c = 0; c < C; ++c) a[c] *= s;
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator*(zk_same<T> s, matrix<T, C, R> a) {
  return a * s;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator/(matrix<T, C, R> a, zk_same<T> s) {
  for (int c = 0; c < C; ++c) a[c] /= s;
  return a;
}
// A column vector from the right, a row vector from the left.
template <class T, int C, int R>
METAL_FUNC vec<T, R> operator*(matrix<T, C, R> a, zk_same<vec<T, C>> v) {
  vec<T, R> sum = a[0] * v[0];
  for (int c = 1; c < C; ++c) sum += a[c] * v[c];
  return sum;
}
template <class T, int C, int R>
METAL_FUNC vec<T, C> operator*(zk_same<vec<T, R>> v, matrix<T, C, R> a) {
  vec<T, C> product;
  for (int c = 0; c < C; ++c) product[c] = dot(v, a[c]);
  return product;
}
template <class T, int C, int R, int K>
METAL_FUNC matrix<T, K, R> operator*(matrix<T, C, R> a, matrix<T, K, C> b) {
  matrix<T, K, R> product;
  for (int k = 0; k < K; ++k) product[k] = a * b[k];
  return product;
}
template <class M, class B>
  requires requires { &M::columns; }
METAL_FUNC M& operator+=(M& a, B b) {
  return a = a + b;
}
template <class M, class B>
  requires requires { &M::columns; }
METAL_FUNC M& operator-=(M& a, B b) {
  return a = a - b;
}
template <class M, class B>
  requires requires { &M::columns; }
METAL_FUNC M& operator*=(M& a, B b) {
  return a = a * b;
}
template <class M, class B>
  requires requires { &M::columns; }
METAL_FUNC M& operator/=(M& a, B b) {
  return a = a / b;
}
template <class T, int C, int R>
METAL_FUNC bool operator==(matrix<T, C, R> a, matrix<T, C, R> b) {
  bool same = true;
  for (int c = 0; c < C; ++c) same &= all(a[c] == b[c]);
  return same;
}

template <class T, int C, int R>
METAL_FUNC matrix<T, R, C> transpose(matrix<T, C, R> a) {
  matrix<T, R, C> t;
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < R; ++r) t[r][c] = a[c][r];
  }
  return t;
}
template <class T>
METAL_FUNC T determinant(matrix<T, 2, 2> a) {
  return a[0][0] * a[1][1] - a[1][0] * a[0][1];
}
template <class T>
METAL_FUNC T determinant(matrix<T, 3, 3> a) {
  return dot(a[0], cross(a[1], a[2]));
}
// By 2x2 minors of the first two and the last two columns (Laplace).
template <class T>
METAL_FUNC T determinant(matrix<T, 4, 4> a) {
  auto left = [&](int r, int s) { return a[0][r] * a[1][s] - a[0][s] * a[1][r]; };
  auto right = [&](int r, int s) { return a[2][r] * a[3][s] - a[2][s] * a[3][r]; };
  return left(0, 1) * right(2, 3) - left(0, 2) * right(1, 3) + left(0, 3) * right(1, 2) +
         left(1, 2) * right(0, 3) - left(1, 3) * right(0, 2) + left(2, 3) * right(0, 1);
}

#define ZK_MATRIX_NAMES(T, columns) \
  using T##columns##x2 = matrix<T, columns, 2>; \
  using T##columns##x3 = matrix<T, columns, 3>; \
  using T##columns##x4 = matrix<T, columns, 4>;
ZK_MATRIX_NAMES(float, 2)
ZK_MATRIX_NAMES(float, 3)
ZK_MATRIX_NAMES(float, 4)
#ifdef ZK_NUMBERS
ZK_MATRIX_NAMES(half, 2)
ZK_MATRIX_NAMES(half, 3)
ZK_MATRIX_NAMES(half, 4)
#endif
#undef ZK_MATRIX_NAMES

}  // namespace metal
