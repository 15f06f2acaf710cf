// The lazy node: an MLX primitive that runs a compiled kernel on the CPU stream.
//
// It derives from MLX's own CustomKernel, whose `eval_cpu` only throws. So a graph that holds one
// is exported as the custom kernel that it is, Metal text included.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <stdexcept>

#include "core.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast_primitives.h"
#include "mlx/ops.h"
#include "mlx/scheduler.h"
#include "mlx/utils.h"
#include "runtime.h"
#include "transformed.h"

// Hidden in libmlx, and the first virtual function of the class, so that whoever defines it has the
// virtual table to derive from.
void mlx::core::fast::CustomKernel::eval_gpu(const std::vector<array>&, std::vector<array>&) {
  throw std::runtime_error("[zmlx] This custom kernel runs on the CPU only.");
}

namespace zmlx {
namespace {

std::atomic<int> schedule{0};
std::atomic<int> checking{0};

// Whether MLX may have lost count of its tasks. It counts every tenth, and the thread that evaluates
// waits where too many are under way. A task that throws keeps the next enqueue from returning, so
// that one may stay counted for ever; ten of those would block every later evaluation.
std::atomic<bool> uncounted{false};

// Waits until all that the stream was given is done.
void finish(mx::Stream stream) {
  auto done = std::make_shared<std::promise<void>>();
  mx::scheduler::enqueue(stream, [done] { done->set_value(); });
  done->get_future().wait();
}

// Lets the stream finish, and then counts nothing as under way.
void count_again(mx::Stream stream) {
  uncounted = false;
  finish(stream);
  for (int n = mx::scheduler::n_active_tasks(); n > 0; --n) {
    mx::scheduler::notify_task_completion(stream);
  }
}

// Bytes that are worth a wait of some microseconds.
constexpr size_t worth_waiting = 1 << 18;

// What another device waits for may not have been handed to it yet.
bool may_wait() {
  static const bool alone = !mx::is_available(mx::Device(mx::Device::gpu));
  return alone;
}

// Whether to wait before memory is donated. Tasks hold the memory that they read until they have run:
// a gradient's norm holds the gradient. Whether a kernel may take it would depend on who is faster.
bool awaited(const Launch& launch, const std::vector<mx::array>& inputs) {
  bool held = false;
  size_t bytes = 0;
  for (auto [from, to] : launch.donate) {
    held = held || inputs[from].data_shared_ptr().use_count() > 1;
    bytes += inputs[from].nbytes();
  }
  return held && bytes >= worth_waiting;
}

constexpr uintptr_t page = 4096, line = 64;

// Where in a page to write what follows from `reads`, on a multiple of a line.
//
// A processor tells a load from the stores before it by the low bits of their addresses, 12 to 20 of
// them. A loop that writes a little ahead of where it reads, counted in these bits, has every load
// wait for a store that it does not need, and takes up to five times as long. So the place is just
// before one of the reads: that from which the nearest read behind is farthest away.
uintptr_t place_in_page(const std::vector<uintptr_t>& reads) {
  uintptr_t best = 0, longest = 0;
  for (uintptr_t read : reads) {
    uintptr_t place = read % page / line * line, ahead = page;
    for (uintptr_t other : reads) ahead = std::min(ahead, (place - other - 1) % page + 1);
    if (ahead > longest) best = place, longest = ahead;
  }
  return best;
}

// MLX's allocator on a CPU gives null where the system has no more, and counts that as memory in use
// ever after. So the system is asked first, for what is large.
void expect_memory(size_t bytes) {
  constexpr size_t large = size_t(1) << 30;
  if (bytes < large) return;
  void* volatile block = std::malloc(bytes);  // which is not to be optimised away
  std::free(block);
  if (block) return;
  throw std::runtime_error("[malloc] Unable to allocate " + std::to_string(bytes) + " bytes.");
}

// Gives an array its memory; `reads` are the addresses of what is read while it is written.
//
// Blocks of MLX's allocator start in the middle of a line, so that every long vector that is moved
// touches two, and blocks of equal size follow each other with the distance that place_in_page()
// warns of: a large array gets a page more than it needs, and starts where it should.
//
// The C library returns large blocks to the system when they are freed, so the next array of that
// size is of new pages: handing those out 4 KiB at a time takes longer than most kernels do. Where
// the system leaves the choice to the program, large blocks ask for huge pages.
void allocate(mx::array& a, const std::vector<uintptr_t>& reads = {}, bool aligned = false) {
  constexpr size_t large = 1 << 16;
  if (a.nbytes() < large && !aligned) {
    a.set_data(mx::allocator::malloc(a.nbytes()));
    return;
  }
  mx::array block(a.shape(), a.dtype(), nullptr, {});
  expect_memory(a.nbytes() + page);
  block.set_data(mx::allocator::malloc(a.nbytes() + page));
  auto start = reinterpret_cast<uintptr_t>(block.data<char>());
  uintptr_t skip = reads.empty() ? -start % line : (place_in_page(reads) - start) % page;
  a.copy_shared_buffer(block, a.strides(), block.flags(), a.size(), skip / a.itemsize());
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t huge = 2 << 20;
  if (a.nbytes() >= 2 * huge) {
    start = reinterpret_cast<uintptr_t>(a.data<char>());
    uintptr_t first = (start + huge - 1) / huge * huge, last = (start + a.nbytes()) / huge * huge;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a wish: it may fail
  }
#endif
}

bool row_contiguous(const mx::array& a) { return a.flags().row_contiguous; }

// One element of an output as `init_value` fills it, converted as MLX's astype does.
uint64_t element_bits(float value, mx::Dtype dtype) {
  uint64_t bits = 0;
  auto put = [&](auto element) {
    static_assert(sizeof element <= sizeof bits);
    std::memcpy(&bits, &element, sizeof element);
  };
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_:
      put(value != 0);
      break;
    case mx::Dtype::Val::uint8:
      put(uint8_t(value));
      break;
    case mx::Dtype::Val::uint16:
      put(uint16_t(value));
      break;
    case mx::Dtype::Val::uint32:
      put(uint32_t(value));
      break;
    case mx::Dtype::Val::uint64:
      put(uint64_t(value));
      break;
    case mx::Dtype::Val::int8:
      put(int8_t(value));
      break;
    case mx::Dtype::Val::int16:
      put(int16_t(value));
      break;
    case mx::Dtype::Val::int32:
      put(int32_t(value));
      break;
    case mx::Dtype::Val::int64:
      put(int64_t(value));
      break;
    case mx::Dtype::Val::float16:
      put(mx::float16_t(value));
      break;
    case mx::Dtype::Val::bfloat16:
      put(mx::bfloat16_t(value));
      break;
    case mx::Dtype::Val::float64:
      put(double(value));
      break;
    case mx::Dtype::Val::float32:
    case mx::Dtype::Val::complex64:  // the imaginary part stays zero
      put(value);
      break;
  }
  return bits;
}

void fill(void* to, uint64_t bits, size_t count, size_t itemsize) {
  auto fill_as = [&](auto element) {
    std::memcpy(&element, &bits, sizeof element);
    std::fill_n(static_cast<decltype(element)*>(to), count, element);
  };
  switch (itemsize) {
    case 1:
      return fill_as(uint8_t());
    case 2:
      return fill_as(uint16_t());
    case 4:
      return fill_as(uint32_t());
    default:
      return fill_as(uint64_t());
  }
}

// The op that a kernel belongs to: names are "OP_HASH" or "OP__PART_HASH".
std::string op_name(const std::string& kernel) {
  size_t part = kernel.find("__");
  if (part != std::string::npos && part > 0) return kernel.substr(0, part);
  size_t hash = kernel.rfind('_');
  bool hashed = hash != std::string::npos && kernel.size() - hash == 13 &&
                kernel.find_first_not_of("0123456789abcdef", hash + 1) == std::string::npos;
  return hashed ? kernel.substr(0, hash) : kernel;
}

// Everything that the stream's thread needs, after the arrays' own descriptors may be gone.
// MLX keeps the memory of inputs, outputs and temporaries alive until the task is done.
struct Task {
  struct Copy {
    const char* from;
    char* to;
    size_t itemsize;
    mx::Shape shape;
    mx::Strides strides;
  };
  struct Shape {
    mx::Shape shape;
    mx::Strides strides;
    int ndim;
  };

  std::shared_ptr<const Launch> launch;
  std::vector<void*> buffers;
  std::vector<void*> outputs;
  std::vector<size_t> output_sizes;
  std::vector<Copy> copies;
  std::vector<std::unique_ptr<Shape>> shapes;  // buffers point into them
  uint64_t bytes = 0;
  zk_failure failure = {};

  void run();
};

void Task::run() {
  for (auto& copy : copies) {
    copy_to_contiguous(copy.from, copy.to, copy.itemsize, copy.shape.data(), copy.strides.data(),
                       int(copy.shape.size()));
  }
  statistics().contiguous_copies += copies.size();
  if (launch->init_value) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      mx::Dtype dtype = launch->output_dtypes[i];
      fill(outputs[i], element_bits(*launch->init_value, dtype), output_sizes[i], dtype.size());
    }
  }
  zk_launch call = {};
  uint64_t groups = 1;
  for (int axis = 0; axis < 3; ++axis) {
    call.grid[axis] = launch->grid[axis];
    if (call.grid[axis] == 0) return;
    call.group[axis] = std::min(launch->threadgroup[axis], launch->grid[axis]);
    call.groups[axis] = (call.grid[axis] + call.group[axis] - 1) / call.group[axis];
    groups *= call.groups[axis];
  }
  call.buffers = buffers.data();
  call.schedule = schedule.load(std::memory_order_relaxed);
  call.checking = checking.load(std::memory_order_relaxed);
  call.failure = &failure;
  const Program& program = *launch->program;
  uint64_t work = bytes;
  if (program.cooperative) {
    call.runtime = runtime();
    // A thread that meets others costs about what a kilobyte of traffic does.
    work = std::max<uint64_t>(
        work, 1024ull * groups * call.group[0] * call.group[1] * call.group[2]);
  }
  statistics().launches++;
  parallel(groups, work, [&](zk_worker* worker, uint64_t begin, uint64_t end) {
    RunningKernel running;
    program.run(&call, worker, begin, end);
  });
  if (failure.set) {
    uncounted = true;
    throw std::runtime_error("[" + op_name(launch->kernel->spec.name) + "] " + failure.text);
  }
}

// What `mx.export_function` writes of a node. Copying it costs more than the rest of a launch, so
// only nodes made inside a trace carry it; those also have the constants among their inputs.
struct Exported {
  bool shown = false;
  std::string name;
  std::string text;
  std::vector<InputInfo> infos;
};

class KernelPrimitive final : public Transformed<mx::fast::CustomKernel> {
 public:
  KernelPrimitive(mx::Stream stream, std::shared_ptr<const Launch> launch,
                  std::shared_ptr<Record> record, size_t inputs, Exported exported)
      : Transformed(std::move(record), inputs, launch->output_shapes.size(), stream,
                    std::move(exported.name), std::move(exported.text),
                    std::make_tuple(launch->grid[0], launch->grid[1], launch->grid[2]),
                    std::make_tuple(launch->threadgroup[0], launch->threadgroup[1],
                                    launch->threadgroup[2]),
                    std::move(exported.infos), launch->kernel->spec.ensure_row_contiguous,
                    launch->init_value, std::vector<mx::fast::ScalarArg>{}, false, 0,
                    int(launch->kernel->spec.math_mode)),
        launch_(std::move(launch)),
        exportable_(exported.shown) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  // The name is what the exporter goes by: it must not take an empty text for a kernel's.
  const char* name() const override {
    return exportable_ ? CustomKernel::name() : kernel().c_str();
  }

 protected:
  const std::string& kernel() const override { return launch_->kernel->spec.name; }

 private:
  std::shared_ptr<const Launch> launch_;
  bool exportable_;
};

void KernelPrimitive::eval_cpu(const std::vector<mx::array>& inputs,
                               std::vector<mx::array>& outputs) {
  const Launch& launch = *launch_;
  note_stream(stream().index);
  if (uncounted) count_again(stream());
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto task = std::make_shared<Task>();
  task->launch = launch_;

  // Each output of a node holds its inputs, so that none of several outputs could take one over:
  // all but one let go while that is decided.
  std::vector<mx::array*> others;
  for (auto& output : outputs) {
    if (launch.donate.empty() || &output.inputs() == &inputs || output.is_tracer()) continue;
    output.inputs().clear();
    others.push_back(&output);
  }
  if (may_wait() && (launch.paced || awaited(launch, inputs))) finish(stream());
  // A non-contiguous input is never donated: it is copied first.
  for (auto [from, to] : launch.donate) {
    const mx::array& input = inputs[from];
    mx::array& output = outputs[to];
    if (launch.program->aligned) break;
    if (input.is_donatable() && row_contiguous(input) && input.data_size() == input.size() &&
        input.nbytes() == output.nbytes() && input.itemsize() == output.itemsize()) {
      size_t longest = 0;
      for (int size : output.shape()) longest = std::max<size_t>(longest, size);
      bool vector = output.size() <= 1 || output.size() == longest;
      output.copy_shared_buffer(input, output.strides(), {true, true, vector}, output.size());
      statistics().donations++;
    }
  }
  for (auto* output : others) output->inputs() = inputs;
  if (std::all_of(outputs.begin(), outputs.end(), [](auto& output) { return output.size() == 0; })) {
    for (auto& output : outputs) allocate(output);
    return;
  }

  auto pass_shape = [&](const InputInfo& info, const mx::array& source) {
    auto [shape, strides, ndim] = info;
    if (source.ndim() == 0 || !(shape || strides || ndim)) return;
    auto& kept = *task->shapes.emplace_back(std::make_unique<Task::Shape>(
        Task::Shape{source.shape(), source.strides(), int(source.ndim())}));
    if (shape) task->buffers.push_back(kept.shape.data());
    if (strides) task->buffers.push_back(kept.strides.data());
    if (ndim) task->buffers.push_back(&kept.ndim);
  };
  auto& infos = launch.program->metal.input_infos;
  task->buffers.reserve(inputs.size() + launch.constants.size() + outputs.size() + 3);
  std::vector<uintptr_t> reads;  // of the inputs that are longer than a page
  for (size_t i = 0; i < inputs_; ++i) {
    const mx::array& input = inputs[i];
    encoder.set_input_array(input);
    auto* address = const_cast<char*>(input.data<char>());
    bool misplaced = launch.program->aligned && reinterpret_cast<uintptr_t>(address) % line;
    if (row_contiguous(input) ? !misplaced : !launch.kernel->spec.ensure_row_contiguous) {
      task->buffers.push_back(address);
      pass_shape(infos[i], input);
    } else {
      mx::array copy(input.shape(), input.dtype(), nullptr, {});
      allocate(copy, {}, launch.program->aligned);
      task->copies.push_back({address, copy.data<char>(), input.itemsize(), input.shape(),
                              input.strides()});
      address = copy.data<char>();
      task->buffers.push_back(address);
      pass_shape(infos[i], copy);
      encoder.add_temporary(std::move(copy));
    }
    task->bytes += input.nbytes();
    if (input.nbytes() > page) reads.push_back(reinterpret_cast<uintptr_t>(address));
  }
  for (size_t i = 0; i < launch.constants.size(); ++i) {
    const mx::array& constant = launch.constants[i];
    task->buffers.push_back(const_cast<char*>(constant.data<char>()));
    pass_shape(infos[inputs_ + i], constant);
  }
  for (auto& output : outputs) {
    if (!output.data_shared_ptr()) allocate(output, reads, launch.program->aligned);
    encoder.set_output_array(output);
    task->buffers.push_back(output.data<char>());
    task->outputs.push_back(output.data<char>());
    task->output_sizes.push_back(output.size());
    task->bytes += output.nbytes();
  }
  encoder.dispatch([task] { task->run(); });
}

// True inside any trace: a tracer counts as one only there.
bool in_trace() {
  static const mx::array probe = [] {
    mx::array flagged(mx::Shape{}, mx::bool_, nullptr, {});
    flagged.set_tracer(true);
    return flagged;
  }();
  return probe.is_tracer();
}

}  // namespace

std::vector<mx::array> launch(const std::shared_ptr<const Launch>& launch,
                              std::vector<mx::array> inputs, std::shared_ptr<Record> record,
                              std::optional<mx::Stream> stream) {
  mx::Stream chosen = stream ? *stream : mx::default_stream(mx::Device::cpu);
  if (is_lost(chosen.index)) {
    throw std::runtime_error(
        "[" + op_name(launch->kernel->spec.name) +
        "] A forked process has none of MLX's threads, and that of this stream ran before the fork. "
        "Start processes with multiprocessing's 'spawn' or 'forkserver', or call "
        "mx.set_default_stream(mx.new_stream(mx.cpu)) in the forked one first.");
  }
  size_t given = inputs.size();
  Exported exported;
  if (in_trace()) {
    auto& metal = launch->program->metal;
    exported = {true, metal.name, metal.text, metal.input_infos};
    inputs.insert(inputs.end(), launch->constants.begin(), launch->constants.end());
  }
  auto primitive = std::make_shared<KernelPrimitive>(chosen, launch, std::move(record), given,
                                                     std::move(exported));
  if (launch->output_shapes.size() == 1) {
    std::vector<mx::array> result;
    result.emplace_back(launch->output_shapes[0], launch->output_dtypes[0], std::move(primitive),
                        std::move(inputs));
    return result;
  }
  return mx::array::make_arrays(launch->output_shapes, launch->output_dtypes, primitive, inputs);
}

bool in_shapeless_trace(const mx::array& tracer) {
  // MLX keeps the trace stack to itself; this op is a node in a shapeless trace and a constant
  // everywhere else.
  return mx::number_of_elements(tracer, {}, false, mx::int32, mx::Device(mx::Device::cpu))
      .has_primitive();
}

void set_schedule(int order) { schedule.store(order); }
void set_checking(bool on) { checking.store(on); }

}  // namespace zmlx
