// Row-major copies of strided arrays: MLX makes them where a kernel asks for contiguous inputs, and
// so do we, inside the launch, so that no node of the graph is needed for it.
#include <cstring>
#include <vector>

#include "host.h"

namespace zmlx {
namespace {

struct Axis {
  int64_t size;
  int64_t stride;  // of the source, in elements
  int64_t step;    // of the copy
};

// Elements are moved as integers of their size: no arithmetic is done on them.
template <typename T>
void copy_axes(const T* from, T* to, const Axis* axes, int count) {
  if (count == 0) {
    *to = *from;
    return;
  }
  const Axis& outer = axes[0];
  if (count == 1 && outer.stride == 1) {
    std::memcpy(to, from, outer.size * sizeof(T));
    return;
  }
  if (count == 1) {
    for (int64_t i = 0; i < outer.size; ++i) to[i] = from[i * outer.stride];
    return;
  }
  const Axis& inner = axes[1];
  if (count == 2 && outer.stride == 1) {
    // A transpose: in tiles, since one side of it always jumps.
    constexpr int64_t tile = 16;
    for (int64_t i0 = 0; i0 < outer.size; i0 += tile) {
      int64_t i1 = i0 + tile < outer.size ? i0 + tile : outer.size;
      for (int64_t j0 = 0; j0 < inner.size; j0 += tile) {
        int64_t j1 = j0 + tile < inner.size ? j0 + tile : inner.size;
        for (int64_t i = i0; i < i1; ++i) {
          for (int64_t j = j0; j < j1; ++j) to[i * outer.step + j] = from[i + j * inner.stride];
        }
      }
    }
    return;
  }
  for (int64_t i = 0; i < outer.size; ++i) {
    copy_axes(from + i * outer.stride, to + i * outer.step, axes + 1, count - 1);
  }
}

template <typename T>
void copy_as(const char* from, char* to, std::vector<Axis> axes) {
  // The axis with unit stride next to the last one: that makes a transpose of any axes a tile copy.
  for (size_t i = 0; i + 2 < axes.size(); ++i) {
    if (axes[i].stride == 1) {
      Axis unit = axes[i];
      axes.erase(axes.begin() + i);
      axes.insert(axes.end() - 1, unit);
      break;
    }
  }
  copy_axes(reinterpret_cast<const T*>(from), reinterpret_cast<T*>(to), axes.data(),
            int(axes.size()));
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
