// The text that MLX compiles for Metal, from MLX's own generator.
//
// MLX builds a kernel's signature at each call, from dtypes, sizes and the names that the source
// uses. `export_function` runs that code without a Metal device and shows the finished node, so
// that nothing of it has to be rebuilt here and no new release can make the two differ. It works
// inside any trace of Python's too, since it brings its own.
#include <algorithm>
#include <stdexcept>
#include <variant>

#include "core.h"
#include "mlx/export.h"

namespace zmlx {
namespace {

const mx::Device gpu{mx::Device::gpu, 0};

// With several outputs, a use of <input>_shape and no thread attribute, MLX (to 0.32.4 at least)
// closes the parameter list before each of the last outputs. Only the last parameter may do so.
std::string mend_signature(std::string text, size_t parameters) {
  size_t at = text.rfind("[[kernel]] void ");  // behind those of the header
  for (size_t i = 0; at != std::string::npos && i + 1 < parameters; ++i) {
    at = text.find("[[buffer(", at);
    if (at == std::string::npos) break;
    at = text.find(")]]", at) + 3;
    if (text.compare(at, 3, ") {") == 0) text.replace(at, 3, ",");
  }
  return text;
}

// A negative template argument puts a minus into the function's name, up to MLX 0.32.3. Newer ones
// write an underscore there.
void mend_name(MetalFunction& function) {
  std::string name = function.name;
  std::replace(name.begin(), name.end(), '-', '_');
  if (name == function.name) return;
  for (size_t at = 0; (at = function.text.find(function.name, at)) != std::string::npos;) {
    function.text.replace(at, name.size(), name);
  }
  function.name = name;
}

}  // namespace

MetalFunction Kernel::metal(const Call& call) const {
  check(call);
  MetalFunction result;
  // Names beside the function so that it does not keep the caller's arrays in the trace.
  std::vector<mx::array> placeholders;
  for (auto& input : call.inputs) {
    placeholders.emplace_back(input.shape(), input.dtype(), nullptr, std::vector<mx::array>{});
  }
  auto function = [&](const std::vector<mx::array>& inputs) {
    return metal_kernel_(inputs, call.output_shapes, call.output_dtypes,
                         {call.grid[0], call.grid[1], call.grid[2]},
                         {call.threadgroup[0], call.threadgroup[1], call.threadgroup[2]},
                         call.template_arguments, std::nullopt, false, gpu);
  };
  auto callback = [&](const mx::ExportCallbackInput& event) {
    auto type = event.find("type"), name = event.find("name");
    if (type == event.end() || std::get<std::string>(type->second) != "primitive" ||
        name == event.end() || std::get<std::string>(name->second) != "CustomKernel") {
      return;
    }
    for (auto& state : std::get<std::vector<mx::StateT>>(event.at("arguments"))) {
      if (auto text = std::get_if<std::string>(&state)) {
        (result.name.empty() ? result.name : result.text) = *text;
      } else if (auto infos = std::get_if<std::vector<InputInfo>>(&state)) {
        result.input_infos = *infos;
      }
    }
  };
  mx::export_function(mx::ExportCallback(callback),
                      std::function<std::vector<mx::array>(const mx::Args&)>(function),
                      placeholders);
  if (result.text.empty() || result.input_infos.size() != call.inputs.size()) {
    throw std::runtime_error("[" + spec.name + "] This MLX does not show a custom kernel's text " +
                             "as expected; zmlx knows MLX 0.32.2 to 0.32.4.");
  }
  size_t parameters = call.output_shapes.size();
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    auto [shape, strides, ndim] = result.input_infos[i];
    parameters += 1 + (call.inputs[i].ndim() > 0 ? shape + strides + ndim : 0);
  }
  result.text = mend_signature(std::move(result.text), parameters);
  mend_name(result);
  return result;
}

}  // namespace zmlx
