// Arrays, streams, and the operations that surround kernels.
#include <algorithm>
#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/metal/metal.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/version.h"
#include "values.h"

using namespace zmlx_shim;

namespace {

zmlx_dtype dtype_code(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_: return ZMLX_BOOL;
    case mx::Dtype::Val::uint8: return ZMLX_UINT8;
    case mx::Dtype::Val::uint16: return ZMLX_UINT16;
    case mx::Dtype::Val::uint32: return ZMLX_UINT32;
    case mx::Dtype::Val::uint64: return ZMLX_UINT64;
    case mx::Dtype::Val::int8: return ZMLX_INT8;
    case mx::Dtype::Val::int16: return ZMLX_INT16;
    case mx::Dtype::Val::int32: return ZMLX_INT32;
    case mx::Dtype::Val::int64: return ZMLX_INT64;
    case mx::Dtype::Val::float16: return ZMLX_FLOAT16;
    case mx::Dtype::Val::bfloat16: return ZMLX_BFLOAT16;
    case mx::Dtype::Val::float32: return ZMLX_FLOAT32;
    case mx::Dtype::Val::float64: return ZMLX_FLOAT64;
    case mx::Dtype::Val::complex64: return ZMLX_COMPLEX64;
  }
  return ZMLX_FLOAT32;
}

zmlx_stream stream_code(mx::Stream stream) {
  bool gpu = stream.device.type == mx::Device::gpu;
  return {stream.index, gpu ? ZMLX_GPU : ZMLX_CPU, stream.device.index};
}

// The bytes of an array, or an error where they cannot be counted.
size_t bytes_of(const mx::Shape& sizes, size_t element) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  size_t bytes = element;
  for (int size : sizes) {
    if (__builtin_mul_overflow(bytes, size_t(size), &bytes)) {
      throw std::invalid_argument("[zmlx] 'shape' must not overflow but got a size of " +
                                  std::to_string(size) + ".");
    }
  }
  return bytes;
}

// A shape whose bytes can be counted, which MLX does not look at; those of a view are another
// array's, so that its elements count as one.
mx::Shape countable(const int32_t* shape, size_t ndim, size_t element = 1) {
  mx::Shape sizes = shape_of(shape, ndim);
  bytes_of(sizes, element);
  return sizes;
}

// The result of an operation on one or two arrays.
template <typename Operation>
zmlx_status made(zmlx_array** out, Operation operation) {
  return guarded([&] {
    check_mlx();
    *out = given(operation());
  });
}

}  // namespace

const char* zmlx_error_message() { return message.c_str(); }

void zmlx_set_error_message(zmlx_text text) {
  guarded([&] { message = text_of(text); });
}

const char* zmlx_mlx_version() { return mx::version(); }

zmlx_device zmlx_target() {
  static const bool metal = mx::metal::is_available();
  return metal ? ZMLX_GPU : ZMLX_CPU;
}

zmlx_status zmlx_default_stream(zmlx_device device, zmlx_stream* out) {
  return guarded([&] {
    check_mlx();
    *out = stream_code(mx::default_stream(mx::Device(device_of(device))));
  });
}

zmlx_status zmlx_new_stream(zmlx_device device, zmlx_stream* out) {
  return guarded([&] {
    check_mlx();
    *out = stream_code(mx::new_stream(mx::Device(device_of(device))));
  });
}

zmlx_status zmlx_synchronize(const zmlx_stream* stream) {
  return guarded([&] { mx::synchronize(stream_of(*stream)); });
}

zmlx_status zmlx_array_from_float32(const float* data, const int32_t* shape, size_t ndim,
                                    zmlx_array** out) {
  return zmlx_array_from_data(data, ZMLX_FLOAT32, shape, ndim, out);
}

zmlx_status zmlx_array_from_data(const void* data, zmlx_dtype dtype, const int32_t* shape,
                                 size_t ndim, zmlx_array** out) {
  return made(out, [&] {
    mx::Shape sizes = shape_of(shape, ndim);
    mx::Dtype type = dtype_of(dtype);
    size_t bytes = bytes_of(sizes, type.size());
    auto memory = mx::allocator::malloc(bytes);
    auto buffer = memory.buffer();
    if (bytes > 0) {
      if (!buffer.raw_ptr()) throw std::bad_alloc();
      std::memcpy(buffer.raw_ptr(), data, bytes);
    }
    return mx::array(std::move(memory), std::move(sizes), type);
  });
}

zmlx_status zmlx_array_zeros(zmlx_dtype dtype, const int32_t* shape, size_t ndim,
                             zmlx_array** out) {
  return made(out, [&] {
    mx::Dtype type = dtype_of(dtype);
    return mx::zeros(countable(shape, ndim, type.size()), type);
  });
}

zmlx_status zmlx_array_copy(const zmlx_array* a, zmlx_array** out) {
  return made(out, [&] { return a->value; });
}

void zmlx_array_destroy(zmlx_array* a) { delete a; }

size_t zmlx_array_ndim(const zmlx_array* a) { return a->value.ndim(); }
const int32_t* zmlx_array_shape(const zmlx_array* a) { return a->value.shape().data(); }
size_t zmlx_array_size(const zmlx_array* a) { return a->value.size(); }
zmlx_dtype zmlx_array_dtype(const zmlx_array* a) { return dtype_code(a->value.dtype()); }

size_t zmlx_dtype_size(zmlx_dtype dtype) {
  size_t size = 0;
  guarded([&] { size = dtype_of(dtype).size(); });
  return size;
}

zmlx_status zmlx_promote(zmlx_dtype a, zmlx_dtype b, zmlx_dtype* out) {
  return guarded([&] { *out = dtype_code(mx::promote_types(dtype_of(a), dtype_of(b))); });
}

zmlx_status zmlx_array_eval(zmlx_array* const* arrays, size_t count) {
  return guarded([&] {
    std::vector<mx::array> values;
    for (size_t i = 0; i < count; ++i) values.push_back(arrays[i]->value);
    mx::eval(std::move(values));
  });
}

zmlx_status zmlx_array_to_data(zmlx_array* a, void* to, size_t size) {
  return guarded([&] {
    if (size != a->value.nbytes()) {
      throw std::invalid_argument("[zmlx] 'to' must hold " + std::to_string(a->value.nbytes()) +
                                  " bytes but got " + std::to_string(size) + ".");
    }
    mx::array plain = mx::contiguous(a->value);
    plain.eval();
    if (size > 0) std::memcpy(to, plain.data<char>(), size);
  });
}

zmlx_status zmlx_array_astype(const zmlx_array* a, zmlx_dtype dtype, const zmlx_stream* stream,
                              zmlx_array** out) {
  return made(out, [&] { return mx::astype(a->value, dtype_of(dtype), where(stream)); });
}

zmlx_status zmlx_array_reshape(const zmlx_array* a, const int32_t* shape, size_t ndim,
                               const zmlx_stream* stream, zmlx_array** out) {
  return made(out, [&] { return mx::reshape(a->value, countable(shape, ndim), where(stream)); });
}

zmlx_status zmlx_array_broadcast_to(const zmlx_array* a, const int32_t* shape, size_t ndim,
                                    const zmlx_stream* stream, zmlx_array** out) {
  return made(out,
              [&] { return mx::broadcast_to(a->value, countable(shape, ndim), where(stream)); });
}

zmlx_status zmlx_array_transpose(const zmlx_array* a, const zmlx_stream* stream,
                                 zmlx_array** out) {
  return made(out, [&] { return mx::transpose(a->value, where(stream)); });
}

zmlx_status zmlx_array_sum(const zmlx_array* a, const zmlx_stream* stream, zmlx_array** out) {
  return made(out, [&] { return mx::sum(a->value, false, where(stream)); });
}

zmlx_status zmlx_array_mean(const zmlx_array* a, const zmlx_stream* stream, zmlx_array** out) {
  return made(out, [&] { return mx::mean(a->value, false, where(stream)); });
}

zmlx_status zmlx_array_multiply(const zmlx_array* a, const zmlx_array* b,
                                const zmlx_stream* stream, zmlx_array** out) {
  return made(out, [&] { return mx::multiply(a->value, b->value, where(stream)); });
}

zmlx_status zmlx_array_divide(const zmlx_array* a, const zmlx_array* b, const zmlx_stream* stream,
                              zmlx_array** out) {
  return made(out, [&] { return mx::divide(a->value, b->value, where(stream)); });
}

zmlx_status zmlx_array_not_equal(const zmlx_array* a, const zmlx_array* b,
                                 const zmlx_stream* stream, zmlx_array** out) {
  return made(out, [&] { return mx::not_equal(a->value, b->value, where(stream)); });
}

zmlx_status zmlx_array_matmul(const zmlx_array* a, const zmlx_array* b, const zmlx_stream* stream,
                              zmlx_array** out) {
  return made(out, [&] { return mx::matmul(a->value, b->value, where(stream)); });
}
