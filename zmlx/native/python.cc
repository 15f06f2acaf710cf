// The functions that Python calls. `ctypes.PyDLL` loads the core and takes them from one
// dictionary, so no module definition, and no version of Python, is built in.
#include "python_values.h"

#include "mlx/version.h"

namespace zmlx {
namespace {

// A compiler's messages may hold bytes that are no UTF-8.
void set_error(PyObject* type, const std::exception& error) {
  const char* text = error.what();
  PyObject* message = PyUnicode_DecodeUTF8(text, Py_ssize_t(std::strlen(text)), "replace");
  if (message) PyErr_SetObject(type, Ref(message).get());
}

// Every function runs inside this: C++ exceptions become Python's.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    release_dropped_records();
    return body();
  } catch (const PythonError&) {
  } catch (const Interrupted&) {
  } catch (const TypeError& error) {
    set_error(PyExc_TypeError, error);
  } catch (const std::invalid_argument& error) {
    set_error(PyExc_ValueError, error);
  } catch (const std::exception& error) {
    // A terminal's ^C reaches the compiler, too: that it stopped is then not what happened.
    if (PyErr_CheckSignals() == 0) set_error(PyExc_RuntimeError, error);
  }
  return nullptr;
}

void expect_arguments(const char* function, Py_ssize_t got, Py_ssize_t least, Py_ssize_t most) {
  if (got >= least && got <= most) return;
  std::string wanted = std::to_string(least);
  if (most > least) wanted += " to " + std::to_string(most);
  throw TypeError(std::string("[") + function + "] takes " + wanted + " arguments but got " +
                  std::to_string(got) + ".");
}

PyObject* return_none() { return new_reference(none); }

// Compilers take a while, and need nothing of Python's.
void without_lock(const std::function<void()>& body) {
  struct Unlocked {
    void* state = PyEval_SaveThread();
    ~Unlocked() {
      with_patience([&] { PyEval_RestoreThread(state); });
    }
  } unlocked;
  body();
}

using Arguments = PyObject* const*;

PyObject* py_kernel(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("kernel", count, 8, 8);
    KernelSpec spec{text_of(args[0]), list_of(args[1], text_of), list_of(args[2], text_of),
                    text_of(args[3]), text_of(args[4]), truth_of(args[5]), truth_of(args[6])};
    std::string mode = text_of(args[7]);
    if (mode == "safe") {
      spec.math_mode = mx::MathMode::Safe;
    } else if (mode == "relaxed") {
      spec.math_mode = mx::MathMode::Relaxed;
    } else if (mode == "fast") {
      spec.math_mode = mx::MathMode::Fast;
    } else {
      throw std::invalid_argument(
          "[kernel] 'math_mode' must be 'safe', 'relaxed' or 'fast' but got '" + mode + "'.");
    }
    return encapsulate(shared_kernel(std::move(spec)));
  });
}

PyObject* py_metal_text(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("metal_text", count, 7, 7);
    return to_python(from_capsule<Kernel>(args[0])->metal(call_of(args + 1)).text);
  });
}

Dialect dialect_of(PyObject* object) {
  std::string name = text_of(object);
  if (name == "cpu") return Dialect::cpu;
  if (name == "cuda") return Dialect::cuda;
  throw std::invalid_argument("[zmlx] 'dialect' must be 'cpu' or 'cuda' but got '" + name + "'.");
}

PyObject* py_source(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("source", count, 8, 8);
    auto& kernel = *from_capsule<Kernel>(args[0]);
    Call call = call_of(args + 1);
    return to_python(
        kernel.rewritten(kernel.metal(call), one_thread(call), dialect_of(args[7])).text);
  });
}

PyObject* py_rewrite(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("rewrite", count, 3, 3);
    return to_python(rewrite_text(text_of(args[0]), dialect_of(args[1]), truth_of(args[2])));
  });
}

PyObject* py_prepare(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("prepare", count, 9, 11);
    Call call = call_of(args + 1);
    if (args[7] != none) {
      double value = PyFloat_AsDouble(args[7]);
      if (value == -1 && PyErr_Occurred()) throw PythonError{};
      call.init_value = float(value);
    }
    size_t constants = 0;
    if (args[8] != none) {
      for (auto& constant : arrays_of(args[8], "constants")) {
        call.inputs.push_back(constant);
        ++constants;
      }
    }
    std::vector<std::pair<int, int>> donate;
    if (count >= 10 && args[9] != none) {
      donate = list_of(args[9], [](PyObject* item) {
        Items pair(item);
        if (pair.size() != 2) throw TypeError("[prepare] 'donate' must hold pairs of indices.");
        return std::make_pair(int_of(pair[0], "donate"), int_of(pair[1], "donate"));
      });
    }
    return encapsulate(prepare(from_capsule<Kernel>(args[0]), call, constants, std::move(donate),
                               count == 11 && truth_of(args[10]), without_lock));
  });
}

PyObject* result_of(std::vector<mx::array>&& outputs) {
  return outputs.size() == 1 ? to_python(outputs[0]) : to_python(outputs);
}

std::string signature_of(const std::vector<mx::array>& inputs) {
  std::string bytes;
  for (auto& input : inputs) append_signature(bytes, input);
  return bytes;
}

std::optional<mx::Stream> stream_of(PyObject* object) {
  if (object == none) return std::nullopt;
  if (type_of(object) != python.stream_type) {
    throw TypeError("[launch] 'stream' must be an mx.Stream or None but got " +
                    type_name(object) + ".");
  }
  mx::Stream stream = *value_of<mx::Stream>(object);
  if (stream.device != mx::Device::cpu) {
    throw std::invalid_argument("[launch] 'stream' must be a stream of the CPU.");
  }
  return stream;
}

PyObject* py_launch(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("launch", count, 2, 4);
    auto& launch = from_capsule<Launch>(args[0]);
    auto inputs = arrays_of(args[1], "inputs");
    if (signature_of(inputs) != launch->signature) {
      throw std::invalid_argument("[" + launch->kernel->spec.name +
                                  "] 'inputs' must have the shapes and dtypes that the launch was "
                                  "prepared for.");
    }
    std::shared_ptr<Record> record;
    if (count > 2 && args[2] != none) record = make_record(args[2]);
    return result_of(zmlx::launch(launch, std::move(inputs), std::move(record),
                                  count > 3 ? stream_of(args[3]) : std::nullopt));
  });
}

PyObject* py_with_record(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("with_record", count, 4, 4);
    return result_of(with_record(text_of(args[0]), arrays_of(args[1], "outputs"),
                                 size_t(int_of(args[2], "inputs")),
                                 args[3] == none ? nullptr : make_record(args[3])));
  });
}

PyObject* py_run(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("run", count, 2, 2);
    Items items(args[1]);
    std::vector<mx::array> inputs;
    inputs.reserve(items.size());
    std::string bytes;
    for (size_t i = 0; i < items.size(); ++i) {
      if (!is_array(items[i])) return return_none();
      auto& input = array_of(items[i], "inputs");
      if (input.is_tracer()) return return_none();
      append_signature(bytes, input);
      inputs.push_back(input);
    }
    Ref key(PyBytes_FromStringAndSize(bytes.data(), Py_ssize_t(bytes.size())));
    PyObject* plan = PyDict_GetItemWithError(args[0], key.get());
    if (!plan) {
      if (PyErr_Occurred()) throw PythonError{};
      return return_none();
    }
    auto& launch = from_capsule<Launch>(plan);
    if (bytes != launch->signature) {
      throw std::invalid_argument("[run] 'plans' must hold launches under their own signatures.");
    }
    return result_of(zmlx::launch(launch, std::move(inputs), nullptr));
  });
}

PyObject* py_signature(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("signature", count, 1, 1);
    std::string bytes = signature_of(arrays_of(args[0], "inputs"));
    return PyBytes_FromStringAndSize(bytes.data(), Py_ssize_t(bytes.size()));
  });
}

// Appends an option by its exact type, since 1, 1.0 and True are equal and not the same. False for
// anything else than plain values, and lists and tuples of them that are not deep.
bool append_option(std::string& to, PyObject* option, int deepest = 8) {
  auto append = [&](char kind, auto value) {
    to += kind;
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  };
  PyObject* type = type_of(option);
  if (option == none) return append('n', char(0));
  if (option == &_Py_TrueStruct || option == &_Py_FalseStruct) {
    return append('b', char(option == &_Py_TrueStruct));
  }
  if (type == &PyLong_Type) {
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(option, &overflow);
    return !overflow && append('i', value);
  }
  if (type == &PyFloat_Type) return append('f', PyFloat_AsDouble(option));
  if (type == &PyUnicode_Type) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(option, &size);
    if (!text) {  // half of a pair of surrogates
      PyErr_Clear();
      return false;
    }
    append('s', size);
    to.append(text, size_t(size));
    return true;
  }
  if (type == python.dtype_type) return append('d', value_of<mx::Dtype>(option)->val());
  bool tuple = type == &PyTuple_Type;
  if (!(tuple || type == &PyList_Type) || deepest == 0) return false;
  Items items(option);
  append(tuple ? 't' : 'l', items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (!append_option(to, items[i], deepest - 1)) return false;
  }
  return true;
}

// Arrays by dtype and shape and options by value, or nothing where one is traced or no such thing.
std::optional<std::string> call_key(PyObject* arrays, PyObject* options) {
  std::string bytes;
  Items items(arrays);
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i] == none) {
      bytes += char(-1);  // no dtype
      continue;
    }
    if (!is_array(items[i])) return std::nullopt;
    auto& array = array_of(items[i], "arrays");
    if (array.is_tracer()) return std::nullopt;
    append_signature(bytes, array);
  }
  if (!append_option(bytes, options)) return std::nullopt;
  return bytes;
}

PyObject* py_call_key(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("call_key", count, 2, 2);
    auto bytes = call_key(args[0], args[1]);
    if (!bytes) return return_none();
    return PyBytes_FromStringAndSize(bytes->data(), Py_ssize_t(bytes->size()));
  });
}

PyObject* py_known(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("known", count, 3, 3);
    auto bytes = call_key(args[1], args[2]);
    if (!bytes) return return_none();
    Ref key(PyBytes_FromStringAndSize(bytes->data(), Py_ssize_t(bytes->size())));
    PyObject* found = PyDict_GetItemWithError(args[0], key.get());
    if (!found && PyErr_Occurred()) throw PythonError{};
    return found ? new_reference(found) : key.release();
  });
}

PyObject* py_tracing(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("tracing", count, 1, 1);
    int kind = 0;
    for (auto& input : arrays_of(args[0], "inputs")) {
      if (!input.is_tracer()) continue;
      kind = in_shapeless_trace(input) ? 2 : 1;
      break;
    }
    return PyLong_FromLongLong(kind);
  });
}

PyObject* py_is_primal(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("is_primal", count, 1, 1);
    const mx::array& x = array_of(args[0], "x");
    // vjp and jvp trace copies of what they are given, and mark them.
    bool copied = x.is_tracer() && x.has_primitive() &&
                  std::strcmp(x.primitive().name(), "Copy") == 0;
    return PyLong_FromLongLong(copied);
  });
}

PyObject* py_after(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("after", count, 2, 2);
    return result_of(after(arrays_of(args[0], "arrays"), arrays_of(args[1], "others")));
  });
}

PyObject* py_set_threads(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("set_threads", count, 1, 1);
    set_threads(int_of(args[0], "n"));
    return return_none();
  });
}

PyObject* py_threads(PyObject*, Arguments, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("threads", count, 0, 0);
    return PyLong_FromLongLong(threads());
  });
}

PyObject* py_set_schedule(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("set_schedule", count, 1, 1);
    set_schedule(int(integer_of(args[0], 0, std::numeric_limits<int>::max(), "schedule")));
    return return_none();
  });
}

PyObject* py_set_checking(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("set_checking", count, 1, 1);
    set_checking(truth_of(args[0]));
    return return_none();
  });
}

PyObject* py_set_cache_directory(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("set_cache_directory", count, 1, 1);
    set_cache_directory(args[0] == none ? std::string() : text_of(args[0]));
    return return_none();
  });
}

PyObject* py_statistics(PyObject*, Arguments, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("statistics", count, 0, 0);
    Ref counts(PyDict_New());
    auto put = [&](const char* name, uint64_t value) {
      Ref number(PyLong_FromLongLong((long long)value));
      if (PyDict_SetItemString(counts.get(), name, number.get()) != 0) throw PythonError{};
    };
    put("compiles", statistics().compiles);
    put("cache_hits", statistics().cache_hits);
    put("launches", statistics().launches);
    put("contiguous_copies", statistics().contiguous_copies);
    put("donations", statistics().donations);
    return counts.release();
  });
}

PyObject* py_use_blas(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("use_blas", count, 3, 3);
    return PyLong_FromLongLong(
        route_blas(text_of(args[0]), text_of(args[1]), int_of(args[2], "threads")));
  });
}

PyObject* py_blas_in_use(PyObject*, Arguments, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("blas_in_use", count, 0, 0);
    return new_reference(blas_routed() ? &_Py_TrueStruct : &_Py_FalseStruct);
  });
}

constexpr int fastcall = 0x80;

PyMethodDef functions[] = {
    {"kernel", (void*)py_kernel, fastcall,
     "kernel(name, input_names, output_names, source, header, ensure_row_contiguous, "
     "atomic_outputs, math_mode) -> Kernel"},
    {"metal_text", (void*)py_metal_text, fastcall,
     "metal_text(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes) -> "
     "the text that MLX compiles for Metal"},
    {"source", (void*)py_source, fastcall,
     "source(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes, dialect) "
     "-> that text as 'cpu' or 'cuda' code"},
    {"rewrite", (void*)py_rewrite, fastcall,
     "rewrite(metal_text, dialect, one_thread) -> a Metal function as 'cpu' or 'cuda' code"},
    {"prepare", (void*)py_prepare, fastcall,
     "prepare(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes, "
     "init_value, constants, donate=None, paced=False) -> Launch, compiled"},
    {"launch", (void*)py_launch, fastcall,
     "launch(launch, inputs, record=None, stream=None) -> mx.array or tuple of them"},
    {"with_record", (void*)py_with_record, fastcall,
     "with_record(kernel, outputs, inputs, record) -> outputs of a launch of MLX's own, as those "
     "of a node that answers transforms; inputs: how many are the kernel's"},
    {"run", (void*)py_run, fastcall,
     "run(plans, inputs) -> the result of the launch under signature(inputs), or None when there "
     "is none or an input is traced or no mx.array"},
    {"signature", (void*)py_signature, fastcall,
     "signature(inputs) -> dtypes and shapes as bytes"},
    {"call_key", (void*)py_call_key, fastcall,
     "call_key(arrays, options) -> dtypes and shapes of the arrays, of which None is one, and the "
     "options, plain values and tuples and lists of them, as bytes; None where an array is traced or "
     "none, or an option is no such value"},
    {"known", (void*)py_known, fastcall,
     "known(ways, arrays, options) -> what a dict holds under call_key(arrays, options), else that "
     "key, which may be None"},
    {"tracing", (void*)py_tracing, fastcall,
     "tracing(inputs) -> 0: no traced input, 1: traced, 2: traced without shapes"},
    {"is_primal", (void*)py_is_primal, fastcall,
     "is_primal(x) -> 1 if x is the copy that a vjp or jvp traces, else 0"},
    {"after", (void*)py_after, fastcall,
     "after(arrays, others) -> the arrays, evaluated when the others are"},
    {"set_threads", (void*)py_set_threads, fastcall, "set_threads(n); 0: the default"},
    {"threads", (void*)py_threads, fastcall, "threads() -> threads per launch"},
    {"set_schedule", (void*)py_set_schedule, fastcall,
     "set_schedule(order); 0: breadth-first, 1: depth-first, >= 2: shuffled with that seed"},
    {"set_checking", (void*)py_set_checking, fastcall, "set_checking(on)"},
    {"set_cache_directory", (void*)py_set_cache_directory, fastcall,
     "set_cache_directory(path); None: keep nothing"},
    {"statistics", (void*)py_statistics, fastcall, "statistics() -> dict of counts"},
    {"use_blas", (void*)py_use_blas, fastcall,
     "use_blas(library, prefix, threads) -> number of routed functions"},
    {"blas_in_use", (void*)py_blas_in_use, fastcall, "blas_in_use() -> bool"},
};

// Compares what the offset rule reads with what Python says of the same objects. `array` is
// int32 of shape (2, 3), `dtype` is mx.bfloat16, `stream` the CPU's default one.
void test_layout(PyObject* array, PyObject* dtype, PyObject* stream) {
  auto fail = [](const char* what) {
    throw std::runtime_error(std::string("[zmlx] The memory layout of ") + what + " in MLX " +
                             mx::version() +
                             " is not one that zmlx knows, so its CPU target cannot be used.");
  };
  auto plausible = [](PyObject* object) {
    int32_t offset;
    uint32_t flags;
    std::memcpy(&offset, reinterpret_cast<char*>(object) + 16, sizeof offset);
    std::memcpy(&flags, reinterpret_cast<char*>(object) + 20, sizeof flags);
    return (flags & 4) && offset >= 24 && offset <= 64 && offset % 8 == 0;
  };
  if (!plausible(array)) fail("mx.array");
  if (!plausible(dtype)) fail("mx.Dtype");
  if (!plausible(stream)) fail("mx.Stream");
  auto& value = *value_of<mx::array>(array);
  if (value.id() == 0 || value.id() % alignof(void*) != 0) fail("mx.array");
  if (value.ndim() != 2 || value.shape(0) != 2 || value.shape(1) != 3 || value.size() != 6 ||
      value.dtype() != mx::int32) {
    fail("mx.array");
  }
  if (*value_of<mx::Dtype>(dtype) != mx::bfloat16) fail("mx.Dtype");
  if (*value_of<mx::Stream>(stream) != mx::default_stream(mx::Device::cpu)) fail("mx.Stream");

  Ref copy(to_python(value));
  if (value_of<mx::array>(copy.get())->id() != value.id()) fail("mx.array");
}

}  // namespace
}  // namespace zmlx

// The binding's functions by name, or null with a Python error when this MLX is not one that the
// core can serve. Arguments: an int32 mx.array of shape (2, 3), its bound `__copy__`, mx.bfloat16,
// the CPU's default stream, the prelude's directory.
extern "C" __attribute__((visibility("default"))) PyObject* zmlx_python(
    PyObject* array, PyObject* make_placeholder, PyObject* dtype, PyObject* stream,
    PyObject* prelude) {
  using namespace zmlx;
  return guarded([&] {
    python.array_type = new_reference(type_of(array));
    python.dtype_type = new_reference(type_of(dtype));
    python.stream_type = new_reference(type_of(stream));
    python.make_placeholder = new_reference(make_placeholder);
    test_layout(array, dtype, stream);
    set_prelude_directory(text_of(prelude));
    set_interrupts([] {
      HoldPython held;
      return PyErr_CheckSignals() != 0;
    });
    threads();  // a bad $ZMLX_NUM_THREADS is reported here and not at some launch
    Ref table(PyDict_New());
    for (auto& function : functions) {
      Ref callable(PyCFunction_NewEx(&function, nullptr, nullptr));
      if (PyDict_SetItemString(table.get(), function.name, callable.get()) != 0) {
        throw PythonError{};
      }
    }
    return table.release();
  });
}
