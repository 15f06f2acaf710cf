// section mlx_indexing; needs vectors; tokens elem_to_loc elem_to_loc_1 elem_to_loc_2 elem_to_loc_3 elem_to_loc_2_nd elem_to_loc_3_nd LoopedElemToLoc
// MLX's indexing helpers: from an element's number, or its place in a grid (x is the last dimension,
// y the one before it, z all others), to its offset by shape and strides.

template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int d = ndim - 1; d >= 0 && elem > 0; --d) {
    loc += (elem % shape[d]) * IdxT(strides[d]);
    elem /= shape[d];
  }
  return loc;
}

template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(uint3 elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = elem.x * IdxT(strides[ndim - 1]) + elem.y * IdxT(strides[ndim - 2]);
  for (int d = ndim - 3; d >= 0; --d) {
    loc += (elem.z % shape[d]) * IdxT(strides[d]);
    elem.z /= shape[d];
  }
  return loc;
}
template <typename IdxT = int64_t>
METAL_FUNC vec<IdxT, 2> elem_to_loc_2_nd(uint3 elem, const int* shape, const int64_t* a_strides,
                                         const int64_t* b_strides, int ndim) {
  return {elem_to_loc<IdxT>(elem, shape, a_strides, ndim),
          elem_to_loc<IdxT>(elem, shape, b_strides, ndim)};
}
template <typename IdxT = int64_t>
METAL_FUNC vec<IdxT, 3> elem_to_loc_3_nd(uint3 elem, const int* shape, const int64_t* a_strides,
                                         const int64_t* b_strides, const int64_t* c_strides,
                                         int ndim) {
  return {elem_to_loc<IdxT>(elem, shape, a_strides, ndim),
          elem_to_loc<IdxT>(elem, shape, b_strides, ndim),
          elem_to_loc<IdxT>(elem, shape, c_strides, ndim)};
}

template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_1(uint elem, const int64_t& stride) {
  return elem * IdxT(stride);
}
template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_2(uint2 elem, const int64_t strides[2]) {
  return elem.x * IdxT(strides[1]) + elem.y * IdxT(strides[0]);
}
template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_3(uint3 elem, const int64_t strides[3]) {
  return elem.x * IdxT(strides[2]) + elem.y * IdxT(strides[1]) + elem.z * IdxT(strides[0]);
}

// Walks over an array in element order: the innermost dimension is a counter, and its overflow moves
// the looper of the dimensions outside it. `dim` is the number of dimensions, DIM how many of them
// are counters; where dim > DIM the outermost counter divides.
template <int DIM, typename OffsetT = size_t, bool General = true>
struct LoopedElemToLoc {
  int dim;
  LoopedElemToLoc<DIM - 1, OffsetT, General> inner_looper;
  OffsetT offset{0};
  int index{0};

  LoopedElemToLoc(int dim) : dim(dim), inner_looper(dim - 1) {}

  void next(const int* shape, const int64_t* strides) { next(1, shape, strides); }
  void next(int n, const int* shape, const int64_t* strides) {
    if (dim == 0) return;
    int size = shape[dim - 1], sum = index + n;
    index = sum % size;
    if (sum >= size) {
      inner_looper.next(sum / size, shape, strides);
      offset = inner_looper.offset + index * OffsetT(strides[dim - 1]);
    } else {
      offset += n * OffsetT(strides[dim - 1]);
    }
  }
  OffsetT location() { return offset; }
};

template <typename OffsetT>
struct LoopedElemToLoc<1, OffsetT, true> {
  int dim;
  OffsetT offset{0};
  uint index{0};

  LoopedElemToLoc(int dim) : dim(dim) {}

  void next(const int* shape, const int64_t* strides) { next(1, shape, strides); }
  void next(int n, const int* shape, const int64_t* strides) {
    index += n;
    offset = dim > 1 ? elem_to_loc<OffsetT>(index, shape, strides, dim)
                     : index * OffsetT(strides[0]);
  }
  OffsetT location() { return offset; }
};

template <typename OffsetT>
struct LoopedElemToLoc<1, OffsetT, false> {
  OffsetT offset{0};

  LoopedElemToLoc(int) {}

  void next(const int*, const int64_t* strides) { offset += OffsetT(strides[0]); }
  void next(int n, const int*, const int64_t* strides) { offset += n * OffsetT(strides[0]); }
  OffsetT location() { return offset; }
};
