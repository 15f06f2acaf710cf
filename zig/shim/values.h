// What the files of the shim share: values of MLX behind the C interface, and the fence that no
// exception passes.
#pragma once

#include <signal.h>

#include <cctype>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "mlx/utils.h"
#include "mlx/version.h"
#include "shim.h"

namespace mx = mlx::core;

struct zmlx_array {
  mx::array value;
};

namespace zmlx_shim {

inline thread_local std::string message;

#ifdef __SANITIZE_ADDRESS__
// Zig gives each thread a stack for signals, at an address that the sanitizer does not expect when
// an exception is thrown.
inline void drop_signal_stack() {
  stack_t none = {};
  none.ss_flags = SS_DISABLE;
  sigaltstack(&none, nullptr);
}
#else
inline void drop_signal_stack() {}
#endif

// Every function that can fail runs inside this.
template <typename Body>
zmlx_status guarded(Body body) noexcept {
  auto failed = [](zmlx_status status, const char* text) {
    try {
      message = text;
    } catch (...) {
      message.clear();
    }
    return status;
  };
  drop_signal_stack();
  try {
    body();
    return ZMLX_OK;
  } catch (const std::bad_alloc&) {
    return failed(ZMLX_OUT_OF_MEMORY, "[zmlx] out of memory");
  } catch (const std::invalid_argument& error) {
    return failed(ZMLX_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return failed(ZMLX_FAILURE, error.what());
  } catch (...) {
    return failed(ZMLX_FAILURE, "[zmlx] an unknown C++ exception");
  }
}

// Throws unless MLX is the version that this was compiled for: what another one calls or lays out
// otherwise ends the process. Everything that is made is made behind it.
inline void check_mlx() {
  static const std::string ours = std::to_string(MLX_VERSION_MAJOR) + "." +
                                  std::to_string(MLX_VERSION_MINOR) + "." +
                                  std::to_string(MLX_VERSION_PATCH);
  static const std::string found = mx::version();
  static const bool same =
      found.compare(0, ours.size(), ours) == 0 && !std::isdigit(found.c_str()[ours.size()]);
  if (same) return;
  throw std::runtime_error("[zmlx] 'mlx' must be the version " + ours +
                           " that this library was built for but got " + found +
                           ". Build it again.");
}

inline std::string text_of(zmlx_text text) { return {text.data, text.size}; }

inline mx::Shape shape_of(const int32_t* shape, size_t ndim) {
  mx::Shape result;
  for (size_t i = 0; i < ndim; ++i) {
    if (shape[i] < 0) {
      throw std::invalid_argument("[zmlx] 'shape' must not be negative but got " +
                                  std::to_string(shape[i]) + ".");
    }
    result.push_back(shape[i]);
  }
  return result;
}

inline mx::Dtype dtype_of(zmlx_dtype dtype) {
  switch (dtype) {
    case ZMLX_BOOL: return mx::bool_;
    case ZMLX_UINT8: return mx::uint8;
    case ZMLX_UINT16: return mx::uint16;
    case ZMLX_UINT32: return mx::uint32;
    case ZMLX_UINT64: return mx::uint64;
    case ZMLX_INT8: return mx::int8;
    case ZMLX_INT16: return mx::int16;
    case ZMLX_INT32: return mx::int32;
    case ZMLX_INT64: return mx::int64;
    case ZMLX_FLOAT16: return mx::float16;
    case ZMLX_BFLOAT16: return mx::bfloat16;
    case ZMLX_FLOAT32: return mx::float32;
    case ZMLX_FLOAT64: return mx::float64;
    case ZMLX_COMPLEX64: return mx::complex64;
  }
  throw std::invalid_argument("[zmlx] 'dtype' must be a zmlx_dtype but got " +
                              std::to_string(int(dtype)) + ".");
}

inline mx::Device::DeviceType device_of(int device) {
  if (device == ZMLX_GPU) return mx::Device::gpu;
  if (device == ZMLX_CPU) return mx::Device::cpu;
  throw std::invalid_argument("[zmlx] 'device' must be a zmlx_device but got " +
                              std::to_string(device) + ".");
}

inline mx::Stream stream_of(const zmlx_stream& stream) {
  return mx::Stream(stream.index, mx::Device(device_of(stream.device), stream.device_index));
}

inline mx::StreamOrDevice where(const zmlx_stream* stream) {
  if (stream) return stream_of(*stream);
  return {};
}

inline zmlx_array* given(mx::array value) { return new zmlx_array{std::move(value)}; }

}  // namespace zmlx_shim
