// section matrix; needs vectors numbers; after simd_fiber simd_one; tokens simdgroup_matrix simdgroup_float8x8 simdgroup_half8x8 simdgroup_bfloat8x8 make_filled_simdgroup_matrix make_diagonal_simdgroup_matrix simdgroup_load simdgroup_store simdgroup_multiply simdgroup_multiply_accumulate
// simdgroup_matrix: 8x8 tiles spread over the 32 lanes of a simdgroup, two elements each. Loads and
// stores are each lane's own business; only a product needs the lanes to meet.

namespace metal {

#ifndef ZK_COOPERATIVE
template <class T, int C, int R>
struct simdgroup_matrix {
  static_assert(sizeof(T) == 0,
                "simdgroup_matrix needs threadgroups of at least 32 threads: it lies spread over "
                "the lanes of a simdgroup");
};
template <class T, int C, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <class T, int C, int R = C>
simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T);
template <class M, class... A>
void simdgroup_load(M&, A...);
template <class M, class... A>
void simdgroup_store(M, A...);
template <class M, class... A>
void simdgroup_multiply(M&, A...);
template <class M, class... A>
void simdgroup_multiply_accumulate(M&, A...);
#else

// Where lane `lane` has its elements: `column` and the next one of `row` (Apple's layout).
struct zk_place {
  int row, column;
};
inline zk_place zk_place_of(unsigned lane) {
  return {int((lane >> 2 & 4) + (lane >> 1 & 3)), int((lane >> 2 & 2) * 2 + (lane & 1) * 2)};
}

template <class T, int C, int R>
struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "simdgroup_matrix exists for 8x8");
  static_assert(__is_same(T, float) || zk_is_narrow<T>,
                "simdgroup_matrix holds float, half or bfloat");
  using storage_type = vec<T, 2>;
  storage_type zk_elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    auto [row, column] = zk_place_of(zk_lane());
    zk_elements = storage_type(row == column ? diagonal : T(0.0f),
                               row == column + 1 ? diagonal : T(0.0f));
  }
  storage_type& thread_elements() { return zk_elements; }
  const storage_type& thread_elements() const { return zk_elements; }
};

template <class T, int C, int R = C>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> filled;
  filled.zk_elements = vec<T, 2>(value, value);
  return filled;
}
template <class T, int C, int R = C>
inline simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, C, R>(value);
}

// Offsets of a lane's two elements in memory; `origin` is (column, row) and `transposed` swaps the
// roles of rows and columns within the tile.
struct zk_pair {
  ulong first, second;
};
inline zk_pair zk_tile_offsets(ulong elements_per_row, vec<ulong, 2> origin, bool transposed) {
  auto [row, column] = zk_place_of(zk_lane());
  ulong across = transposed ? row : column, down = transposed ? column : row;
  ulong first = (origin.y + down) * elements_per_row + origin.x + across;
  return {first, first + (transposed ? elements_per_row : 1)};
}

template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& tile, const zk_same<T>* source,
                           ulong elements_per_row = 8, vec<ulong, 2> origin = vec<ulong, 2>(0ul),
                           bool transpose_matrix = false) {
  auto [first, second] = zk_tile_offsets(elements_per_row, origin, transpose_matrix);
  tile.zk_elements = vec<T, 2>(source[first], source[second]);
}
template <class T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> tile, zk_same<T>* destination,
                            ulong elements_per_row = 8,
                            vec<ulong, 2> origin = vec<ulong, 2>(0ul),
                            bool transpose_matrix = false) {
  auto [first, second] = zk_tile_offsets(elements_per_row, origin, transpose_matrix);
  destination[first] = tile.zk_elements.x;
  destination[second] = tile.zk_elements.y;
}

// One lane's share of d = a·b + c; `c` holds d once the lanes have met, in float.
template <class A, class B>
struct zk_shares {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<float, 2> c;
};
// Sums run over k = 0 … 7 in float with one rounding to the result's type at the end; lanes that do
// not take part count as zeros.
template <class A, class B>
void zk_multiply_shares(char* cells, unsigned active) {
  using Shares = zk_shares<A, B>;
  float a[8][8] = {}, b[8][8] = {};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(active >> lane & 1)) continue;
    auto& own = zk_cell<Shares>(cells, lane);
    auto [row, column] = zk_place_of(lane);
    for (int i = 0; i < 2; ++i) {
      a[row][column + i] = float(own.a[i]);
      b[row][column + i] = float(own.b[i]);
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(active >> lane & 1)) continue;
    auto& own = zk_cell<Shares>(cells, lane);
    auto [row, column] = zk_place_of(lane);
    for (int k = 0; k < 8; ++k) {
      for (int i = 0; i < 2; ++i) {
        own.c[i] = __builtin_fmaf(a[row][k], b[k][column + i], own.c[i]);
      }
    }
  }
}

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b,
                                          simdgroup_matrix<C, 8, 8> c,
                                          zk_site site = zk_site(__builtin_LINE())) {
  zk_shares<A, B> own = {a.zk_elements, b.zk_elements, vec<float, 2>(c.zk_elements)};
  own = zk_meet(own, &zk_multiply_shares<A, B>, site);
  d.zk_elements = vec<D, 2>(own.c);
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                               simdgroup_matrix<B, 8, 8> b,
                               zk_site site = zk_site(__builtin_LINE())) {
  auto zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero, site);
}
#endif

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

}  // namespace metal
