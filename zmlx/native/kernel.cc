// From a kernel and a call to a compiled program, kept by what its text depends on, and a launch.
#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "core.h"
#include "mlx/ops.h"

namespace zmlx {
namespace {

std::string& prelude_directory() {
  static std::string path;
  return path;
}

int lines(const std::string& text) {
  int count = !text.empty() && text.back() != '\n';
  for (char c : text) count += c == '\n';
  return count;
}

std::string plural(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

template <class Sizes>
std::string sizes_text(const Sizes& sizes) {
  std::string text;
  for (int size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

// All of a call that reaches the text: dtypes, whether an input is a scalar or small (MLX passes
// those in the constant address space), template arguments.
std::string program_key(const Call& call, bool one_thread) {
  std::string key(1, one_thread ? '1' : 'n');
  for (auto& input : call.inputs) {
    key += char('a' + int(input.dtype().val()));
    key += input.ndim() == 0 ? 's' : input.size() < 8 ? 'c' : 'd';
  }
  key += '>';
  for (auto& dtype : call.output_dtypes) key += char('a' + int(dtype.val()));
  for (auto& [name, value] : call.template_arguments) {
    key += ' ' + name + '=' + char('0' + value.index());
    if (auto number = std::get_if<int>(&value)) {
      key += std::to_string(*number);
    } else if (auto flag = std::get_if<bool>(&value)) {
      key += *flag ? 't' : 'f';
    } else {
      key += char('a' + int(std::get<mx::Dtype>(value).val()));
    }
  }
  return key;
}

}  // namespace

void set_prelude_directory(const std::string& path) { prelude_directory() = path; }

Kernel::Kernel(KernelSpec given)
    : spec(std::move(given)),
      metal_kernel_(mx::fast::metal_kernel(spec.name, spec.input_names, spec.output_names,
                                           spec.source, spec.header, spec.ensure_row_contiguous,
                                           spec.atomic_outputs,
                                           mx::CompileOptions(int(spec.math_mode)))) {}

void Kernel::check(const Call& call) const {
  auto fail = [&](const std::string& what) {
    throw std::invalid_argument("[" + spec.name + "] " + what);
  };
  if (call.inputs.size() != spec.input_names.size()) {
    fail("'inputs' must hold " + plural(spec.input_names.size(), "array") + " (" +
         joined(spec.input_names) + ") but got " + std::to_string(call.inputs.size()) + ".");
  }
  size_t outputs = spec.output_names.size();
  if (call.output_shapes.size() != outputs) {
    fail("'output_shapes' must hold " + plural(outputs, "shape") + " (" +
         joined(spec.output_names) + ") but got " + std::to_string(call.output_shapes.size()) +
         ".");
  }
  if (call.output_dtypes.size() != outputs) {
    fail("'output_dtypes' must hold " + plural(outputs, "dtype") + " (" +
         joined(spec.output_names) + ") but got " + std::to_string(call.output_dtypes.size()) +
         ".");
  }
  for (size_t i = 0; i < outputs; ++i) {
    int64_t bytes = call.output_dtypes[i].size();
    bool fits = true, empty = false;
    for (int size : call.output_shapes[i]) {
      if (size < 0) fail("'output_shapes' must not be negative but got " + std::to_string(size));
      empty |= size == 0;
      fits &= !__builtin_mul_overflow(bytes, int64_t(size), &bytes);
    }
    if (!fits && !empty) {
      fail("'output_shapes' must take less than 2^63 bytes but got " +
           sizes_text(call.output_shapes[i]) + ".");
    }
  }
  int64_t threads = 1, all = 1;
  bool countable = true;
  for (int axis = 0; axis < 3; ++axis) {
    if (call.grid[axis] < 0) {
      fail("'grid' must not be negative but got " + sizes_text(call.grid) + ".");
    }
    if (call.threadgroup[axis] < 1) {
      fail("'threadgroup' must be positive but got " + sizes_text(call.threadgroup) + ".");
    }
    threads *= std::min(call.threadgroup[axis], 1025);
    countable &= !__builtin_mul_overflow(all, int64_t(call.grid[axis]), &all);
  }
  if (!countable) {
    fail("'grid' must hold less than 2^63 threads but got " + sizes_text(call.grid) + ".");
  }
  // Metal's own limit for any pipeline; a kernel with many registers may have a lower one there.
  if (threads > 1024) {
    fail("'threadgroup' must hold at most 1024 threads but got " + sizes_text(call.threadgroup) +
         ".");
  }
}

bool one_thread(const Call& call) {
  for (int axis = 0; axis < 3; ++axis) {
    if (std::min(call.threadgroup[axis], call.grid[axis]) > 1) return false;
  }
  return true;
}

std::string rewrite_text(const std::string& metal_text, Dialect dialect, bool single) {
  RewriteOptions options;
  options.dialect = dialect;
  options.one_thread = single;
  options.prelude_dir = prelude_directory();
  return rewrite(metal_text, options).text;
}

Rewritten Kernel::rewritten(const MetalFunction& metal, bool one_thread, Dialect dialect) const {
  check_header_end(spec.header, spec.name);
  RewriteOptions options;
  options.dialect = dialect;
  options.one_thread = one_thread;
  options.prelude_dir = prelude_directory();
  options.name = metal.name;
  options.source_lines = lines(spec.source);
  options.header_lines = lines(spec.header);
  return rewrite(metal.text, options);
}

std::shared_ptr<const Kernel> shared_kernel(KernelSpec spec) {
  std::string key = spec.name + '\0' + spec.source + '\0' + spec.header + '\0';
  for (auto* names : {&spec.input_names, &spec.output_names}) {
    for (auto& name : *names) key += name + ',';
    key += ';';
  }
  key += char('0' + spec.ensure_row_contiguous + 2 * spec.atomic_outputs);
  key += char('0' + int(spec.math_mode));
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const Kernel>> kernels;
  std::lock_guard<std::mutex> lock(mutex);
  auto& kernel = kernels[key];
  if (!kernel) kernel = std::make_shared<const Kernel>(std::move(spec));
  return kernel;
}

std::shared_ptr<const Program> Kernel::program(
    const Call& call,
    const std::function<void(const std::function<void()>&)>& unlocked) const {
  bool single = one_thread(call);
  std::string key = program_key(call, single);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = programs_.find(key); found != programs_.end()) return found->second;
  }
  auto program = std::make_shared<Program>();
  program->metal = metal(call);
  unlocked([&] {
    Rewritten cpp = rewritten(program->metal, single, Dialect::cpu);
    program->cooperative = cpp.collective && !single;
    program->aligned = cpp.aligned;
    std::string prefix;
    for (char c : spec.name.substr(0, 40)) prefix += std::isalnum((unsigned char)c) ? c : '_';
    try {
      program->run = compile_kernel({cpp.text, program->cooperative, prefix});
    } catch (const CompileError& error) {
      throw std::runtime_error(explain(cpp, program->metal.text, error.output));
    }
  });
  std::lock_guard<std::mutex> lock(mutex_);
  return programs_.try_emplace(key, program).first->second;
}

void append_signature(std::string& to, const mx::array& input) {
  to += char(input.dtype().val());
  uint32_t axes = uint32_t(input.ndim());
  to.append(reinterpret_cast<const char*>(&axes), sizeof axes);
  to.append(reinterpret_cast<const char*>(input.shape().data()),
            input.ndim() * sizeof(mx::ShapeElem));
}

std::shared_ptr<const Launch> prepare(
    std::shared_ptr<const Kernel> kernel, const Call& call, size_t constants,
    std::vector<std::pair<int, int>> donate, bool paced,
    const std::function<void(const std::function<void()>&)>& unlocked) {
  kernel->check(call);
  auto fail = [&](const std::string& what) {
    throw std::invalid_argument("[" + kernel->spec.name + "] " + what);
  };
  size_t inputs = call.inputs.size() - constants;
  for (auto [from, to] : donate) {
    if (from < 0 || size_t(from) >= inputs || to < 0 || size_t(to) >= call.output_shapes.size()) {
      fail("'donate' must pair an input's index with an output's but got (" +
           std::to_string(from) + ", " + std::to_string(to) + ").");
    }
    if (call.init_value) {
      fail("'donate' must be empty with 'init_value', which overwrites outputs.");
    }
  }
  auto launch = std::make_shared<Launch>();
  launch->program = kernel->program(call, unlocked);
  launch->grid = call.grid;
  launch->threadgroup = call.threadgroup;
  launch->output_shapes = call.output_shapes;
  launch->output_dtypes = call.output_dtypes;
  launch->init_value = call.init_value;
  launch->donate = std::move(donate);
  launch->paced = paced;
  for (size_t i = 0; i < inputs; ++i) append_signature(launch->signature, call.inputs[i]);
  for (size_t i = inputs; i < call.inputs.size(); ++i) {
    mx::array constant = call.inputs[i];
    if (constant.is_tracer() && constant.has_primitive()) {
      fail("'constants' must not be traced arrays.");
    }
    constant.eval();
    if (!constant.flags().row_contiguous) {
      constant = mx::contiguous(constant, false, mx::Device::cpu);
      constant.eval();
    }
    launch->constants.push_back(std::move(constant));
  }
  launch->kernel = std::move(kernel);
  return launch;
}

}  // namespace zmlx
