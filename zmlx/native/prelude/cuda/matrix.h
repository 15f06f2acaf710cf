// section matrix; needs vectors numbers math; tokens simdgroup_matrix simdgroup_float8x8 simdgroup_half8x8 simdgroup_bfloat8x8 make_filled_simdgroup_matrix make_diagonal_simdgroup_matrix simdgroup_load simdgroup_store simdgroup_multiply simdgroup_multiply_accumulate
// simdgroup_matrix: 8x8 tiles spread over the 32 lanes of a simdgroup, two elements each, in
// Apple's layout, on which kernels that read thread_elements() rest. All lanes of the simdgroup
// must take part in a product.

namespace metal {

// Where lane `lane` has its elements: `column` and the next one of `row`.
struct zk_tile_place {
  unsigned row, column;
};
METAL_FUNC zk_tile_place zk_tile_place_of(unsigned lane) {
  return {(lane >> 2 & 4) + (lane >> 1 & 3), (lane >> 2 & 2) * 2 + (lane & 1) * 2};
}
// The lane that has the element at `row` and `column`, the first of its two if `column` is even.
METAL_FUNC unsigned zk_tile_lane(unsigned row, unsigned column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;
}

template <class T, int C, int R>
struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "simdgroup_matrix exists for 8x8");
  static_assert(__is_same(T, float) || zk_is_narrow<T>,
                "simdgroup_matrix holds float, half or bfloat");
  using storage_type = vec<T, 2>;
  storage_type zk_elements;

  simdgroup_matrix() = default;
  explicit METAL_FUNC simdgroup_matrix(T diagonal) {
    auto [row, column] = zk_tile_place_of(zk_lane());
    zk_elements = storage_type(row == column ? diagonal : T(0.0f),
                               row == column + 1 ? diagonal : T(0.0f));
  }
  METAL_FUNC storage_type& thread_elements() { return zk_elements; }
  METAL_FUNC const storage_type& thread_elements() const { return zk_elements; }
};

template <class T, int C, int R = C>
METAL_FUNC simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> filled;
  filled.zk_elements = vec<T, 2>(value, value);
  return filled;
}
template <class T, int C, int R = C>
METAL_FUNC simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, C, R>(value);
}

// Offsets of a lane's two elements in memory; `origin` is (column, row) and `transposed` swaps the
// roles of rows and columns within the tile.
struct zk_pair {
  ulong first, second;
};
METAL_FUNC zk_pair zk_tile_offsets(ulong elements_per_row, vec<ulong, 2> origin, bool transposed) {
  auto [row, column] = zk_tile_place_of(zk_lane());
  ulong across = transposed ? row : column, down = transposed ? column : row;
  ulong first = (origin.y + down) * elements_per_row + origin.x + across;
  return {first, first + (transposed ? elements_per_row : 1)};
}

template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& tile, const zk_same<T>* source,
                               ulong elements_per_row = 8,
                               vec<ulong, 2> origin = vec<ulong, 2>(0ul),
                               bool transpose_matrix = false) {
  auto [first, second] = zk_tile_offsets(elements_per_row, origin, transpose_matrix);
  tile.zk_elements = vec<T, 2>(source[first], source[second]);
}
template <class T>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> tile, zk_same<T>* destination,
                                ulong elements_per_row = 8,
                                vec<ulong, 2> origin = vec<ulong, 2>(0ul),
                                bool transpose_matrix = false) {
  auto [first, second] = zk_tile_offsets(elements_per_row, origin, transpose_matrix);
  destination[first] = tile.zk_elements.x;
  destination[second] = tile.zk_elements.y;
}

METAL_FUNC float zk_tile_element(float x, unsigned lane) {
  return as_type<float>(zk_intrinsic_shuffle(0xffffffffu, as_type<unsigned>(x), lane));
}

METAL_FUNC unsigned zk_tile_pair(unsigned pair, unsigned lane) {
  return zk_intrinsic_shuffle(0xffffffffu, pair, lane);
}

// The product through the matrix units, which have another layout: a shuffle each way.
template <class T>
METAL_FUNC vec<float, 2> zk_tile_multiply(vec<T, 2> a, vec<T, 2> b, vec<float, 2> c) {
#ifdef ZK_MATRIX_UNITS
  unsigned lane = zk_lane(), from = zk_tile_lane(lane / 4, lane % 4 * 2);
  unsigned left = zk_tile_pair(as_type<unsigned>(a), from);
  unsigned right = zk_intrinsic_transpose(zk_tile_pair(as_type<unsigned>(b), from));
  float x = zk_tile_element(c.x, from), y = zk_tile_element(c.y, from);
  if constexpr (__is_same(T, half)) {
    zk_intrinsic_multiply_half(left, right, x, y);
  } else {
    zk_intrinsic_multiply_bfloat(left, right, x, y);
  }
  auto [row, column] = zk_tile_place_of(lane);
  unsigned back = row * 4 + column / 2;
  return vec<float, 2>(zk_tile_element(x, back), zk_tile_element(y, back));
#else
  return zk_tile_multiply(vec<float, 2>(a), vec<float, 2>(b), c);
#endif
}
template <>
METAL_FUNC vec<float, 2> zk_tile_multiply(vec<float, 2> a, vec<float, 2> b, vec<float, 2> c) {
  auto [row, column] = zk_tile_place_of(zk_lane());
#pragma unroll
  for (unsigned k = 0; k < 8; ++k) {
    unsigned from = zk_tile_lane(k, column);
    float factor = zk_tile_element(k % 2 ? a.y : a.x, zk_tile_lane(row, k));
    c.x = fma(factor, zk_tile_element(b.x, from), c.x);
    c.y = fma(factor, zk_tile_element(b.y, from), c.y);
  }
  return c;
}

// d = a·b + c in float, rounded once to d's type.
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b,
                                              simdgroup_matrix<C, 8, 8> c) {
  vec<float, 2> sum(c.zk_elements);
  if constexpr (zk_is_narrow<A> && __is_same(A, B)) {
    d.zk_elements = vec<D, 2>(zk_tile_multiply<A>(a.zk_elements, b.zk_elements, sum));
  } else {
    d.zk_elements = vec<D, 2>(zk_tile_multiply<float>(vec<float, 2>(a.zk_elements),
                                                      vec<float, 2>(b.zk_elements), sum));
  }
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

}  // namespace metal
