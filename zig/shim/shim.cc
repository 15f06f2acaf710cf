// Kernels from Metal source. With Metal they are MLX's own; without, they run through zmlx's C++
// core (ZMLX_CORE), the one that Python uses.
#include "shim.h"

#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "mlx/backend/metal/metal.h"
#include "mlx/fast.h"
#include "values.h"

#ifdef ZMLX_CORE
#include "cache_directory.h"
#include "core.h"
#endif

using namespace zmlx_shim;

namespace {

constexpr size_t launches_kept = 256;

using Extent = std::array<int, 3>;
using TemplateArguments = std::vector<std::pair<std::string, mx::fast::TemplateArg>>;

std::vector<std::string> names_of(const zmlx_text* names, size_t count) {
  std::vector<std::string> result;
  for (size_t i = 0; i < count; ++i) result.push_back(text_of(names[i]));
  return result;
}

mx::MathMode math_mode_of(zmlx_text text) {
  std::string mode = text_of(text);
  if (mode == "safe") return mx::MathMode::Safe;
  if (mode == "relaxed") return mx::MathMode::Relaxed;
  if (mode == "fast") return mx::MathMode::Fast;
  throw std::invalid_argument("[kernel] 'math_mode' must be one of safe, relaxed, fast but got '" +
                              mode + "'.");
}

TemplateArguments template_of(const zmlx_kernel_call& call) {
  TemplateArguments result;
  for (size_t i = 0; i < call.template_count; ++i) {
    auto& [name, kind, value] = call.template_arguments[i];
    auto argument = [&]() -> mx::fast::TemplateArg {
      switch (kind) {
        case ZMLX_TEMPLATE_INT: return int(value);
        case ZMLX_TEMPLATE_BOOL: return value != 0;
        case ZMLX_TEMPLATE_DTYPE: return dtype_of(zmlx_dtype(value));
      }
      throw std::invalid_argument("[zmlx] 'kind' must be a zmlx_template_kind but got " +
                                  std::to_string(int(kind)) + ".");
    };
    result.emplace_back(text_of(name), argument());
  }
  return result;
}

std::vector<mx::array> inputs_of(const zmlx_kernel_call& call) {
  std::vector<mx::array> inputs;
  inputs.reserve(call.input_count);
  for (size_t i = 0; i < call.input_count; ++i) inputs.push_back(call.inputs[i]->value);
  return inputs;
}

std::vector<mx::Shape> output_shapes_of(const zmlx_kernel_call& call) {
  std::vector<mx::Shape> shapes;
  for (size_t i = 0; i < call.output_count; ++i) {
    shapes.push_back(shape_of(call.output_shapes[i], call.output_ndims[i]));
  }
  return shapes;
}

std::vector<mx::Dtype> output_dtypes_of(const zmlx_kernel_call& call) {
  std::vector<mx::Dtype> dtypes;
  for (size_t i = 0; i < call.output_count; ++i) dtypes.push_back(dtype_of(call.output_dtypes[i]));
  return dtypes;
}

std::optional<float> init_value_of(const zmlx_kernel_call& call) {
  return call.init_value ? std::optional<float>(*call.init_value) : std::nullopt;
}

class Runner {
 public:
  virtual ~Runner() = default;
  virtual std::vector<mx::array> call(const zmlx_kernel_call&) = 0;
};

// Kernels on Metal, by MLX.
class MetalRunner final : public Runner {
 public:
  explicit MetalRunner(const zmlx_kernel_spec& spec)
      : kernel_(mx::fast::metal_kernel(
            text_of(spec.name), names_of(spec.input_names, spec.input_count),
            names_of(spec.output_names, spec.output_count), text_of(spec.source),
            text_of(spec.header), spec.ensure_row_contiguous, spec.atomic_outputs,
            mx::CompileOptions(int(math_mode_of(spec.math_mode))))) {}

  std::vector<mx::array> call(const zmlx_kernel_call& call) override {
    auto& g = call.grid;
    auto& t = call.threadgroup;
    mx::StreamOrDevice stream = mx::Device(mx::Device::gpu);
    if (call.stream) stream = stream_of(*call.stream);
    return kernel_(inputs_of(call), output_shapes_of(call), output_dtypes_of(call),
                   {g[0], g[1], g[2]}, {t[0], t[1], t[2]}, template_of(call), init_value_of(call),
                   false, stream);
  }

 private:
  mx::fast::CustomKernelFunction kernel_;
};

#ifdef ZMLX_CORE

// Kernels on the CPU, by zmlx's core: what a launch needs is kept by all that decides it.
class CoreRunner final : public Runner {
 public:
  explicit CoreRunner(const zmlx_kernel_spec& spec) {
    static std::once_flag once;
    std::call_once(once, [] {
      zmlx::set_prelude_directory(ZMLX_PRELUDE);
      zmlx::set_cache_directory(cache_directory());
    });
    kernel_ = zmlx::shared_kernel({text_of(spec.name), names_of(spec.input_names, spec.input_count),
                                   names_of(spec.output_names, spec.output_count),
                                   text_of(spec.source), text_of(spec.header),
                                   spec.ensure_row_contiguous, spec.atomic_outputs,
                                   math_mode_of(spec.math_mode)});
  }

  std::vector<mx::array> call(const zmlx_kernel_call& call) override {
    std::optional<mx::Stream> stream;
    if (call.stream) {
      if (call.stream->device != ZMLX_CPU) {
        throw std::invalid_argument("[" + kernel_->spec.name +
                                    "] 'stream' must be a stream of the CPU.");
      }
      stream = stream_of(*call.stream);
    }
    return zmlx::launch(launch_of(call), inputs_of(call), nullptr, stream);
  }

 private:
  static std::string key_of(const zmlx_kernel_call& call) {
    std::string key;
    key.reserve(256);  // what usual launches need
    auto put = [&](const void* data, size_t size) { key.append((const char*)data, size); };
    const size_t counts[] = {call.input_count, call.template_count, call.output_count};
    put(counts, sizeof counts);
    for (size_t i = 0; i < call.input_count; ++i) {
      zmlx::append_signature(key, call.inputs[i]->value);
    }
    put(call.grid, sizeof call.grid);
    put(call.threadgroup, sizeof call.threadgroup);
    for (size_t i = 0; i < call.template_count; ++i) {
      auto& argument = call.template_arguments[i];
      put(&argument.name.size, sizeof argument.name.size);
      put(argument.name.data, argument.name.size);
      put(&argument.kind, sizeof argument.kind);
      put(&argument.value, sizeof argument.value);
    }
    for (size_t i = 0; i < call.output_count; ++i) {
      put(&call.output_dtypes[i], sizeof call.output_dtypes[i]);
      put(&call.output_ndims[i], sizeof call.output_ndims[i]);
      put(call.output_shapes[i], call.output_ndims[i] * sizeof(int32_t));
    }
    if (call.init_value) put(call.init_value, sizeof(float));
    return key;
  }

  std::shared_ptr<const zmlx::Launch> launch_of(const zmlx_kernel_call& call) {
    std::string key = key_of(call);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = launches_.find(key); found != launches_.end()) return found->second;
    }
    auto& g = call.grid;
    auto& t = call.threadgroup;
    zmlx::Call prepared{inputs_of(call),        template_of(call),
                        {g[0], g[1], g[2]},     {t[0], t[1], t[2]},
                        output_shapes_of(call), output_dtypes_of(call),
                        init_value_of(call)};
    auto at_once = [](const std::function<void()>& slow) { slow(); };
    auto launch = zmlx::prepare(kernel_, prepared, 0, {}, false, at_once);
    std::lock_guard<std::mutex> lock(mutex_);
    if (launches_.try_emplace(key, launch).second) {
      order_.push_back(key);
      if (order_.size() > launches_kept) {
        launches_.erase(order_.front());
        order_.pop_front();
      }
    }
    return launch;
  }

  std::shared_ptr<const zmlx::Kernel> kernel_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const zmlx::Launch>> launches_;
  std::deque<std::string> order_;  // of launches_, oldest first
};

#endif

std::unique_ptr<Runner> runner_of(const zmlx_kernel_spec& spec) {
  if (mx::metal::is_available()) return std::make_unique<MetalRunner>(spec);
#ifdef ZMLX_CORE
  return std::make_unique<CoreRunner>(spec);
#else
  throw std::runtime_error("[" + text_of(spec.name) +
                           "] kernels need Metal: the CPU target is for Linux.");
#endif
}

}  // namespace

#ifdef __SANITIZE_ADDRESS__
// The sanitizer is preloaded; the compilers that kernels start must not inherit it.
__attribute__((constructor)) static void keep_preload_to_this_process() {
  unsetenv("LD_PRELOAD");
}
#endif

struct zmlx_metal_kernel {
  std::unique_ptr<Runner> runner;
};

zmlx_status zmlx_metal_kernel_create(const zmlx_kernel_spec* spec, zmlx_metal_kernel** out) {
  return guarded([&] {
    check_mlx();
    *out = new zmlx_metal_kernel{runner_of(*spec)};
  });
}

zmlx_status zmlx_metal_kernel_call(zmlx_metal_kernel* kernel, const zmlx_kernel_call* call,
                                   zmlx_array** outputs) {
  return guarded([&] {
    auto results = kernel->runner->call(*call);
    // All or none: what was made goes if a later one cannot be.
    std::vector<std::unique_ptr<zmlx_array>> made;
    made.reserve(results.size());
    for (auto& result : results) made.emplace_back(given(std::move(result)));
    for (size_t i = 0; i < made.size(); ++i) outputs[i] = made[i].release();
  });
}

void zmlx_metal_kernel_destroy(zmlx_metal_kernel* kernel) { delete kernel; }
