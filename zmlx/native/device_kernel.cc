// Launches on a GPU: MLX's CustomKernel, held by a node that takes every transform.
#include <algorithm>
#include <stdexcept>

#include "core.h"
#include "mlx/ops.h"
#include "transformed.h"

namespace zmlx {
namespace {

class DeviceKernel final : public Transformed<mx::Primitive> {
 public:
  DeviceKernel(std::string kernel, std::shared_ptr<mx::Primitive> held,
               std::shared_ptr<Record> record, size_t inputs, size_t outputs)
      : Transformed(std::move(record), inputs, outputs, held->stream()),
        kernel_(std::move(kernel)),
        held_(std::move(held)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    held_->eval_cpu(inputs, outputs);
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    held_->eval_gpu(inputs, outputs);
  }

  // Not that of what it holds, by which MLX would export it.
  const char* name() const override { return kernel_.c_str(); }

 protected:
  const std::string& kernel() const override { return kernel_; }

 private:
  std::string kernel_;
  std::shared_ptr<mx::Primitive> held_;
};

}  // namespace

std::vector<mx::array> with_record(std::string kernel, const std::vector<mx::array>& outputs,
                                   size_t inputs, std::shared_ptr<Record> record) {
  const mx::array& one = outputs.at(0);
  auto of_launch = [&](const mx::array& output) {
    return output.has_primitive() && output.primitive_id() == one.primitive_id();
  };
  if (!std::all_of(outputs.begin(), outputs.end(), of_launch) ||
      one.siblings().size() + 1 != outputs.size() || one.inputs().size() < inputs) {
    throw std::invalid_argument("[with_record] 'outputs' must be all those of a launch.");
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (auto& output : outputs) {
    shapes.push_back(output.shape());
    dtypes.push_back(output.dtype());
  }
  auto primitive = std::make_shared<DeviceKernel>(std::move(kernel), one.primitive_ptr(),
                                                  std::move(record), inputs, outputs.size());
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, one.inputs());
}

}  // namespace zmlx
