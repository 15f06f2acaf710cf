// The core's C++ interface: a kernel, a launch of it, and the lazy MLX arrays that result. The
// Python binding and the Zig shim both sit on this; nothing here knows of either.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host.h"
#include "mlx/array.h"
#include "mlx/fast.h"
#include "rewrite.h"

namespace zmlx {

namespace mx = mlx::core;

using TemplateArguments = std::vector<std::pair<std::string, mx::fast::TemplateArg>>;
using Extent = std::array<int, 3>;

// What `mx.fast.metal_kernel` takes when a kernel is made.
struct KernelSpec {
  std::string name;
  std::vector<std::string> input_names;
  std::vector<std::string> output_names;
  std::string source;
  std::string header;
  bool ensure_row_contiguous = true;
  bool atomic_outputs = false;
  mx::MathMode math_mode = mx::MathMode::Safe;
};

// What it takes at a call. Of the inputs only shapes and dtypes matter here.
struct Call {
  std::vector<mx::array> inputs;
  TemplateArguments template_arguments;
  Extent grid;
  Extent threadgroup;
  std::vector<mx::Shape> output_shapes;
  std::vector<mx::Dtype> output_dtypes;
  std::optional<float> init_value;
};

// Whether each of its groups has one thread. A group is never larger than the grid.
bool one_thread(const Call&);

// Which of shape, strides and ndim of an input the kernel's source names.
using InputInfo = std::tuple<bool, bool, bool>;

struct MetalFunction {
  std::string name;
  std::string text;  // header, signature, body, instantiation: all that MLX compiles
  std::vector<InputInfo> input_infos;
};

// A kernel compiled for one combination of dtypes, template arguments and kind of group.
struct Program {
  KernelFunction run;
  bool cooperative;
  bool aligned;  // its buffers must start on a line of the cache
  MetalFunction metal;
};

class Kernel {
 public:
  explicit Kernel(KernelSpec spec);

  const KernelSpec spec;

  // The function that MLX would hand to Metal's compiler, from MLX's own generator.
  MetalFunction metal(const Call&) const;
  // That function as C++ or CUDA.
  Rewritten rewritten(const MetalFunction&, bool one_thread, Dialect) const;
  // Compiled, or found. `unlocked` runs the slow part (Python lets go of its lock there).
  std::shared_ptr<const Program> program(
      const Call&, const std::function<void(const std::function<void()>&)>& unlocked) const;
  void check(const Call&) const;

 private:
  mx::fast::CustomKernelFunction metal_kernel_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::string, std::shared_ptr<const Program>> programs_;
};

// The one kernel of this specification: whoever asks twice shares what is compiled.
std::shared_ptr<const Kernel> shared_kernel(KernelSpec);

// How a node answers MLX's transforms. Without one it answers as MLX's own custom kernels do.
class Record {
 public:
  virtual ~Record() = default;
  // One gradient per entry of `argnums`.
  virtual std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& cotangents,
                                     const std::vector<int>& argnums,
                                     const std::vector<mx::array>& outputs) = 0;
  // One tangent per output.
  virtual std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& tangents,
                                     const std::vector<int>& argnums) = 0;
  // Outputs and the axis of each that runs over the batch; axis -1: not batched.
  virtual std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) = 0;
};

// A kernel bound to shapes and geometry: everything about a call that does not change from one
// call to the next.
struct Launch {
  std::shared_ptr<const Kernel> kernel;
  std::shared_ptr<const Program> program;
  Extent grid;
  Extent threadgroup;
  std::vector<mx::Shape> output_shapes;
  std::vector<mx::Dtype> output_dtypes;
  std::optional<float> init_value;
  std::vector<mx::array> constants;           // follow the inputs, always the same
  std::vector<std::pair<int, int>> donate;    // (input, output) that may share memory
  bool paced;                                 // its memory waits for all before it to be done
  std::string signature;                      // of the inputs it was prepared for
};

// Dtypes and shapes of arrays as bytes: two lists with the same bytes can share a Launch.
void append_signature(std::string& to, const mx::array&);

// Checks, compiles, binds. `call.inputs` holds the inputs and then the constants.
std::shared_ptr<const Launch> prepare(
    std::shared_ptr<const Kernel>, const Call&, size_t constants,
    std::vector<std::pair<int, int>> donate, bool paced,
    const std::function<void(const std::function<void()>&)>& unlocked);

// Lazy outputs. The inputs must have the shapes and dtypes that the launch was prepared for.
std::vector<mx::array> launch(const std::shared_ptr<const Launch>&, std::vector<mx::array> inputs,
                              std::shared_ptr<Record> record,
                              std::optional<mx::Stream> stream = std::nullopt);

// The outputs of a launch of MLX's own, unevaluated, with a record: its node is held by one that
// answers transforms. The first `inputs` of its inputs are those of the kernel.
std::vector<mx::array> with_record(std::string kernel, const std::vector<mx::array>& outputs,
                                   size_t inputs, std::shared_ptr<Record> record);

// The arrays themselves, as mx::depends gives them: evaluated when the others are.
std::vector<mx::array> after(std::vector<mx::array> arrays, const std::vector<mx::array>& others);

// Inside a shapeless trace, where shapes of inputs are not those of later calls.
bool in_shapeless_trace(const mx::array& tracer);

// How cooperative groups are run: see zk_launch.
void set_schedule(int);
void set_checking(bool);

void set_prelude_directory(const std::string&);
// A Metal function as C++ or CUDA, without a kernel.
std::string rewrite_text(const std::string& metal_text, Dialect, bool single);

}  // namespace zmlx
