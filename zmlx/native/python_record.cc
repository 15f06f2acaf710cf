// Transforms answered by Python: the record of an op, called from inside MLX's graph transforms.
#include <atomic>

#include "python_values.h"

namespace zmlx {
namespace {

// The Python error as a C++ exception that MLX's own binding turns back into the nearest type.
[[noreturn]] void throw_python_error() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  bool is_value = PyErr_GivenExceptionMatches(type, PyExc_ValueError);
  bool is_index = PyErr_GivenExceptionMatches(type, PyExc_IndexError);
  bool is_runtime = type == PyExc_RuntimeError;
  bool is_interrupt = PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt);
  std::string text;
  if (PyObject* message = value ? PyObject_Str(value) : nullptr) {
    if (const char* utf8 = PyUnicode_AsUTF8AndSize(message, nullptr)) text = utf8;
    Py_DecRef(message);
  }
  if (!is_value && !is_index && !is_runtime) {
    if (PyObject* name = PyObject_GetAttrString(type, "__name__")) {
      if (const char* utf8 = PyUnicode_AsUTF8AndSize(name, nullptr)) {
        text = std::string(utf8) + ": " + text;
      }
      Py_DecRef(name);
    }
  }
  for (PyObject* object : {type, value, trace}) {
    if (object) Py_DecRef(object);
  }
  // Of a message that could not be made: making one looks for signals.
  PyObject* failure = PyErr_Occurred();
  is_interrupt |= failure && PyErr_GivenExceptionMatches(failure, PyExc_KeyboardInterrupt);
  PyErr_Clear();
  // MLX's binding has no type for it: Python raises it again once it is back from there.
  if (is_interrupt) PyErr_SetInterrupt();
  if (is_value) throw std::invalid_argument(text);
  if (is_index) throw std::out_of_range(text);
  throw std::runtime_error(text);
}

// Python errors leave as C++ exceptions, since it is MLX that called us.
template <typename Body>
auto rethrowing(Body body) {
  try {
    return body();
  } catch (const PythonError&) {
    throw_python_error();
  }
}

// Nodes die on whatever thread lets go of them last, perhaps while another thread holds Python's
// lock and waits for this one. So references are never dropped there: they wait in a list, which
// needs no lock either, for the next call.
struct Dropped {
  PyObject* object;
  Dropped* next;
};
std::atomic<Dropped*> dropped{nullptr};

class PythonRecord final : public Record {
 public:
  explicit PythonRecord(PyObject* object) : object_(new_reference(object)) {}
  ~PythonRecord() override {
    auto* node = new Dropped{object_, dropped.load(std::memory_order_relaxed)};
    while (!dropped.compare_exchange_weak(node->next, node, std::memory_order_release)) {
    }
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override {
    HoldPython hold;
    return rethrowing([&] {
      Ref answer(call("vjp", "(NNNN)", to_python(primals), to_python(cotangents),
                      to_python(argnums), to_python(outputs)));
      return arrays_of(answer.get(), "vjp");
    });
  }

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override {
    HoldPython hold;
    return rethrowing([&] {
      Ref answer(call("jvp", "(NNN)", to_python(primals), to_python(tangents), to_python(argnums)));
      return arrays_of(answer.get(), "jvp");
    });
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    HoldPython hold;
    return rethrowing([&] {
      Ref answer(call("vmap", "(NN)", to_python(inputs), to_python(axes)));
      Items pair(answer.get());
      if (pair.size() != 2) throw TypeError("[vmap] must return (outputs, axes).");
      return std::make_pair(arrays_of(pair[0], "vmap"),
                            list_of(pair[1], [](PyObject* axis) { return int_of(axis, "axes"); }));
    });
  }

 private:
  // A reference to each converted argument is taken over by the call.
  template <typename... Arguments>
  PyObject* call(const char* method, const char* format, Arguments... arguments) {
    return PyObject_CallMethod(object_, method, format, arguments...);
  }

  PyObject* object_;
};

}  // namespace

std::shared_ptr<Record> make_record(PyObject* object) {
  return std::make_shared<PythonRecord>(object);
}

void release_dropped_records() {
  if (!dropped.load(std::memory_order_relaxed)) return;
  Dropped* node = dropped.exchange(nullptr, std::memory_order_acquire);
  while (node) {
    Dropped* next = node->next;
    Py_DecRef(node->object);
    delete node;
    node = next;
  }
}

}  // namespace zmlx
