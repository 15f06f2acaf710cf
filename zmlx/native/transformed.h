// A node whose answers to transforms are those of a Record: what MLX's own custom kernels lack.
#pragma once

#include <sstream>
#include <stdexcept>

#include "core.h"
#include "mlx/primitives.h"

namespace zmlx {

template <typename T>
std::vector<T> first(const std::vector<T>& values, size_t count) {
  return {values.begin(), values.begin() + count};
}

// `Base` is the primitive that computes, or mx::Primitive. Of a node's inputs the first few are
// those of the kernel; constants may follow.
template <typename Base>
class Transformed : public Base {
 public:
  template <typename... Arguments>
  Transformed(std::shared_ptr<Record> record, size_t inputs, size_t outputs,
              Arguments&&... arguments)
      : Base(std::forward<Arguments>(arguments)...),
        inputs_(inputs),
        record_(std::move(record)),
        outputs_(outputs) {}

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override {
    auto gradients = record("vjp").vjp(first(primals, inputs_), cotangents, argnums, outputs);
    expect_count("vjp", "gradients", argnums.size(), gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      expect_like("vjp", primals[argnums[i]], gradients[i]);
    }
    return gradients;
  }

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override {
    auto result = record("jvp").jvp(first(primals, inputs_), tangents, argnums);
    expect_count("jvp", "tangents", outputs_, result.size());
    return result;
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    auto result = record("vmap").vmap(first(inputs, inputs_), first(axes, inputs_));
    expect_count("vmap", "outputs", outputs_, result.first.size());
    expect_count("vmap", "axes", outputs_, result.second.size());
    return result;
  }

  // A shapeless compile asks; with a reference it never meets this primitive.
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override {
    throw std::invalid_argument("[Primitive::output_shapes] CustomKernel " + kernel() +
                                " cannot infer output shapes: for shapeless compilation give the "
                                "kernel a 'reference' through zmlx.metal.kernel.");
  }

  bool is_equivalent(const mx::Primitive&) const override { return false; }

 protected:
  // Its full name, by which MLX knows no primitive of its own.
  virtual const std::string& kernel() const = 0;

  const size_t inputs_;

 private:
  Record& record(const std::string& transform) {
    if (!record_) {
      std::string given = transform == "vjp" ? "'vjp' or 'reference'" : "'reference'";
      throw std::invalid_argument("[Primitive::" + transform +
                                  "] Not implemented for CustomKernel " + kernel() +
                                  ": wrap the call in mx.custom_function, or give the kernel a " +
                                  given + " through zmlx.metal.kernel.");
    }
    return *record_;
  }

  // MLX checks none of this: it takes the cotangent for a missing gradient and any shape for right.
  void expect_count(const char* method, const char* what, size_t wanted, size_t got) const {
    if (wanted == got) return;
    throw std::invalid_argument("[" + kernel() + "] '" + method + "' must return " +
                                std::to_string(wanted) + " " + what + " but got " +
                                std::to_string(got) + ".");
  }

  void expect_like(const char* method, const mx::array& wanted, const mx::array& got) const {
    if (wanted.shape() == got.shape() && wanted.dtype() == got.dtype()) return;
    std::ostringstream text;
    text << "[" << kernel() << "] '" << method << "' must return a gradient of shape "
         << wanted.shape() << " and dtype " << wanted.dtype() << " but got " << got.shape()
         << " and " << got.dtype() << ".";
    throw std::invalid_argument(text.str());
  }

  std::shared_ptr<Record> record_;
  size_t outputs_;
};

}  // namespace zmlx
