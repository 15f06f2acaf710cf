// section step_vectors; needs steps; tokens ZMLX_READ_STEP ZMLX_WRITE_STEP
// Steps of elements in place of those of the section `steps`: one that starts on a multiple of its
// size is moved as a vector, so that each load and store of a warp fills whole lines; the elements
// of others, in slices and in rows of odd lengths, go one by one.

namespace metal {

template <uint Bytes>
struct alignas(Bytes) zk_vector {
  uint zk_words[Bytes / 4];
};

// Of `step` bytes, those that are moved at once.
constexpr uint zk_vector_bytes(uint step) { return step < 16 ? step : 16; }
constexpr bool zk_is_vector(uint step) {
  return step == 4 || step == 8 || (step % 16 == 0 && step <= 64);
}

template <class T, uint N>
struct zk_step {
  static constexpr uint bytes = zk_vector_bytes(N * sizeof(T)), size = bytes / sizeof(T);
  typedef zk_vector<bytes> vector;
  struct elements {
    T zk_of[size];
  };

  T zk_values[N];

  METAL_FUNC static bool aligned(const T* pointer) { return size_t(pointer) % bytes == 0; }
};

template <class T, uint N>
struct zk_read_vectors : zk_step<T, N> {
  METAL_FUNC explicit zk_read_vectors(const T* pointer) {
    typedef zk_step<T, N> step;
    if (step::aligned(pointer)) {
      for (uint i = 0; i < N / step::size; ++i) {
        const auto vectors = (const typename step::vector*)pointer;
        const auto some = as_type<typename step::elements>(vectors[i]);
        for (uint k = 0; k < step::size; ++k) this->zk_values[i * step::size + k] = some.zk_of[k];
      }
    } else {
      for (uint i = 0; i < N; ++i) this->zk_values[i] = pointer[i];
    }
  }
  METAL_FUNC T operator[](uint index) const { return this->zk_values[index]; }
};

// Elements are written at the end of the step.
template <class T, uint N>
struct zk_write_vectors : zk_step<T, N> {
  T* zk_pointer;
  bool zk_live;
  METAL_FUNC zk_write_vectors(T* pointer, bool live) : zk_pointer(pointer), zk_live(live) {}
  zk_write_vectors(const zk_write_vectors&) = delete;
  METAL_FUNC ~zk_write_vectors() {
    typedef zk_step<T, N> step;
    if (!zk_live) return;
    if (step::aligned(zk_pointer)) {
      for (uint i = 0; i < N / step::size; ++i) {
        typename step::elements some;
        for (uint k = 0; k < step::size; ++k) some.zk_of[k] = this->zk_values[i * step::size + k];
        ((typename step::vector*)zk_pointer)[i] = as_type<typename step::vector>(some);
      }
    } else {
      for (uint i = 0; i < N; ++i) zk_pointer[i] = this->zk_values[i];
    }
  }
};

template <uint N, class T>
  requires(zk_is_vector(N * sizeof(T)))
METAL_FUNC zk_read_vectors<T, N> zk_read_step(const T* pointer) {
  return zk_read_vectors<T, N>(pointer);
}
template <uint N, class T>
  requires(zk_is_vector(N * sizeof(T)))
METAL_FUNC zk_write_vectors<T, N> zk_write_step(T* pointer, bool live) {
  return zk_write_vectors<T, N>(pointer, live);
}

template <class T, class E, uint N, class V>
METAL_FUNC void zk_set(zk_write_vectors<E, N>& step, uint index, V value) {
  step.zk_values[index] = T(value);
}

}  // namespace metal
