// Arrays that wait for others: MLX's Depends, which knows no jvp and no vmap, with both.
#include "core.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace zmlx {
namespace {

class After final : public mx::Primitive {
 public:
  After(mx::Stream stream, size_t kept) : Primitive(stream), kept_(kept) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (size_t i = 0; i < kept_; ++i) outputs[i].copy_shared_buffer(inputs[i]);
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    eval_cpu(inputs, outputs);
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>&) override {
    std::vector<mx::array> result;
    for (size_t i : argnums) {
      result.push_back(i < kept_ ? cotangents[i] : mx::zeros_like(primals[i]));
    }
    return result;
  }

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override {
    std::vector<mx::array> result;
    for (size_t i = 0; i < kept_; ++i) result.push_back(mx::zeros_like(primals[i]));
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (size_t(argnums[i]) < kept_) result[argnums[i]] = tangents[i];
    }
    return result;
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    std::vector<mx::array> kept, others(inputs.begin() + kept_, inputs.end());
    std::vector<int> kept_axes;
    for (size_t i = 0; i < kept_; ++i) {
      // All results are mapped: MLX asks the next node of what is not, too, and some (Matmul) then
      // take their first axis for the mapped one.
      kept.push_back(axes[i] < 0 ? repeated(inputs[i], inputs, axes) : inputs[i]);
      kept_axes.push_back(std::max(axes[i], 0));
    }
    return {after(kept, others), kept_axes};
  }

  const char* name() const override { return "After"; }

 private:
  static mx::array repeated(const mx::array& x, const std::vector<mx::array>& inputs,
                            const std::vector<int>& axes) {
    mx::Shape shape = x.shape();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (axes[i] < 0) continue;
      shape.insert(shape.begin(), inputs[i].shape(axes[i]));
      return mx::broadcast_to(x, std::move(shape));
    }
    return x;
  }

  size_t kept_;
};

}  // namespace

std::vector<mx::array> after(std::vector<mx::array> arrays, const std::vector<mx::array>& others) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (auto& x : arrays) {
    shapes.push_back(x.shape());
    dtypes.push_back(x.dtype());
  }
  mx::Stream stream = arrays.at(0).has_primitive() ? arrays[0].primitive().stream()
                                                   : mx::default_stream(mx::default_device());
  auto primitive = std::make_shared<After>(stream, arrays.size());
  arrays.insert(arrays.end(), others.begin(), others.end());
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, arrays);
}

}  // namespace zmlx
