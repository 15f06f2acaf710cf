// Row-major copies of strided arrays: MLX makes them where a kernel asks for contiguous inputs, and
// so do we, inside the launch, so that no node of the graph is needed for it, by all threads.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "host.h"

namespace zmlx {
namespace {

struct Axis {
  int64_t size;
  int64_t stride;  // of the source, in elements
  int64_t step;    // of the copy
};

// A copy is blocks of two axes, for every place on the others. The columns are the last axis of the
// copy. Where the source has nearer neighbours along another axis, that one is the rows, and blocks
// are turned: one side of such a copy always jumps.
struct Copy {
  Axis rows, columns;
  std::vector<Axis> others;
  bool turned;
  int64_t high, wide;  // of a block
};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

constexpr int64_t line = 64;
constexpr int64_t block_bytes = 64 << 10;  // of rows that are copied as they are
constexpr int64_t turned_bytes = 512;      // of a row of a turned block, in the copy
constexpr int64_t turned_lines = 64;       // of a column of it, in the source

template <typename T>
Copy plan(std::vector<Axis> axes) {
  constexpr Axis none = {1, 0, 0};
  Copy copy = {none, none, {}, false, 1, 1};
  if (!axes.empty()) {
    copy.columns = axes.back();
    axes.pop_back();
  }
  auto nearest = axes.end();
  for (auto axis = axes.begin(); axis != axes.end(); ++axis) {
    if (axis->stride == 0 || std::abs(axis->stride) >= std::abs(copy.columns.stride)) continue;
    if (nearest == axes.end() || std::abs(axis->stride) < std::abs(nearest->stride)) nearest = axis;
  }
  copy.turned = nearest != axes.end();
  if (!copy.turned && !axes.empty()) nearest = axes.end() - 1;
  if (nearest != axes.end()) {
    copy.rows = *nearest;
    axes.erase(nearest);
  }
  copy.others = std::move(axes);
  constexpr int64_t size = sizeof(T);
  if (copy.turned) {
    copy.high = std::min(copy.rows.size, turned_lines * line / size);
    copy.wide = std::min(copy.columns.size, turned_bytes / size);
  } else {
    copy.wide = std::min(copy.columns.size, block_bytes / size);
    copy.high = std::clamp(block_bytes / size / copy.wide, int64_t(1), copy.rows.size);
  }
  return copy;
}

// Elements are moved as integers of their size: no arithmetic is done on them.
template <typename T>
void copy_run(const T* from, T* to, int64_t count, int64_t stride) {
  if (stride == 1) {
    std::memcpy(to, from, count * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
  }
}

// a[0], b[0], a[1], b[1], … of two vectors, from element `First` on.
template <int First, typename Vector, size_t... I>
Vector interleaved(Vector a, Vector b, std::index_sequence<I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, (First + I / 2 + I % 2 * sizeof...(I))...);
#else
  return __builtin_shuffle(a, b, Vector{(First + I / 2 + I % 2 * sizeof...(I))...});
#endif
}

// to[i][j] = from[j][i] for a square of as many rows as a vector of 16 bytes has elements. Each
// round shuffles the rows as a pack of cards; after as many as N has bits they are columns.
template <typename T>
inline void turn_square(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int N = 16 / sizeof(T);
  typedef T Vector __attribute__((vector_size(16)));
  constexpr auto all = std::make_index_sequence<N>();
  Vector rows[N], next[N];
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) std::memcpy(&rows[j], from + j * from_stride, 16);
#pragma GCC unroll 4
  for (int round = 1; round < N; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = interleaved<0>(rows[i], rows[i + N / 2], all);
      next[2 * i + 1] = interleaved<N / 2>(rows[i], rows[i + N / 2], all);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) std::memcpy(to + i * to_stride, &rows[i], 16);
}

// As many rows as a cache line of the source has elements, over a buffer: every line is read whole,
// and rows of the copy whose places are a power of two apart do not drive each other out.
template <typename T>
void turn_strip(const T* from, T* to, const Copy& copy, int64_t high, int64_t wide) {
  constexpr int64_t N = 16 / sizeof(T);
  T buffer[line / sizeof(T) * turned_bytes / sizeof(T)];
  int64_t stride = copy.columns.stride, j = 0;
  if (copy.rows.stride == 1) {
    int64_t whole = high / N * N;
    for (; j + N <= wide; j += N) {
      for (int64_t next = 0; next < N; ++next) {
        __builtin_prefetch(from + (j + next) * stride + line / sizeof(T));
      }
      for (int64_t i = 0; i < whole; i += N) {
        turn_square(from + j * stride + i, stride, buffer + i * wide + j, wide);
      }
      for (int64_t i = whole; i < high; ++i) {
        for (int64_t k = j; k < j + N; ++k) buffer[i * wide + k] = from[k * stride + i];
      }
    }
  }
  for (int64_t i = 0; i < high; ++i) {
    for (int64_t k = j; k < wide; ++k) {
      buffer[i * wide + k] = from[k * stride + i * copy.rows.stride];
    }
  }
  if (copy.rows.step == wide) {
    std::memcpy(to, buffer, high * wide * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < high; ++i) {
    std::memcpy(to + i * copy.rows.step, buffer + i * wide, wide * sizeof(T));
  }
}

template <typename T>
void copy_block(const T* from, T* to, const Copy& copy, int64_t high, int64_t wide) {
  if (!copy.turned) {
    for (int64_t i = 0; i < high; ++i) {
      copy_run(from + i * copy.rows.stride, to + i * copy.rows.step, wide, copy.columns.stride);
    }
    return;
  }
  constexpr int64_t strip = line / sizeof(T);
  for (int64_t i = 0; i < high; i += strip) {
    turn_strip(from + i * copy.rows.stride, to + i * copy.rows.step, copy,
               std::min(strip, high - i), wide);
  }
}

template <typename T>
void copy_as(const char* from, char* to, std::vector<Axis> axes) {
  Copy copy = plan<T>(std::move(axes));
  int64_t across = blocks_of(copy.columns.size, copy.wide);
  int64_t down = blocks_of(copy.rows.size, copy.high);
  int64_t count = across * down, elements = copy.rows.size * copy.columns.size;
  for (const Axis& axis : copy.others) {
    count *= axis.size;
    elements *= axis.size;
  }
  parallel(count, 2 * elements * sizeof(T), [&](zk_worker*, uint64_t begin, uint64_t end) {
    for (int64_t block = begin; block < int64_t(end); ++block) {
      int64_t j = block % across * copy.wide, i = block / across % down * copy.high;
      int64_t source = i * copy.rows.stride + j * copy.columns.stride;
      int64_t target = i * copy.rows.step + j * copy.columns.step;
      int64_t rest = block / across / down;
      for (auto axis = copy.others.rbegin(); axis != copy.others.rend(); ++axis) {
        source += rest % axis->size * axis->stride;
        target += rest % axis->size * axis->step;
        rest /= axis->size;
      }
      copy_block(reinterpret_cast<const T*>(from) + source, reinterpret_cast<T*>(to) + target, copy,
                 std::min(copy.high, copy.rows.size - i), std::min(copy.wide, copy.columns.size - j));
    }
  });
}

}  // namespace

void copy_to_contiguous(const char* from, char* to, size_t itemsize, const int32_t* shape,
                        const int64_t* strides, int ndim) {
  std::vector<Axis> axes;  // without axes of size 1, neighbours that are one run merged
  int64_t step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 0) return;
    if (shape[i] == 1) continue;
    if (!axes.empty() && strides[i] == axes.front().size * axes.front().stride) {
      axes.front().size *= shape[i];
    } else {
      axes.insert(axes.begin(), {shape[i], strides[i], step});
    }
    step *= shape[i];
  }
  switch (itemsize) {
    case 1:
      return copy_as<uint8_t>(from, to, axes);
    case 2:
      return copy_as<uint16_t>(from, to, axes);
    case 4:
      return copy_as<uint32_t>(from, to, axes);
    default:
      return copy_as<uint64_t>(from, to, axes);
  }
}

}  // namespace zmlx
