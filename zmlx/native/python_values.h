// MLX's values inside Python objects, in both directions, and the arguments of the binding.
//
// An mx.array is a nanobind object: 16 bytes of PyObject, a 32-bit offset, a 32-bit flag word. The
// C++ value is at object + offset, or behind a pointer there when flag bit 2 is clear. Results are
// made the other way round: a placeholder that Python makes for us is given the C++ array. The core
// tests this on known objects before it does anything else (python.cc).
#pragma once

#include <cstring>
#include <limits>
#include <stdexcept>

#include "core.h"
#include "python_api.h"

namespace zmlx {

struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

inline std::string type_name(PyObject* object) {
  PyObject* name = PyObject_GetAttrString(type_of(object), "__name__");
  const char* text = name ? PyUnicode_AsUTF8AndSize(name, nullptr) : nullptr;
  std::string result = text ? text : "?";
  if (name) Py_DecRef(name);
  return result;
}

// ---- values of MLX inside Python objects ------------------------------------------------------

// What the core was shown at load: the types, and a bound `__copy__` that makes placeholders.
struct Python {
  PyObject* array_type = nullptr;
  PyObject* dtype_type = nullptr;
  PyObject* stream_type = nullptr;
  PyObject* make_placeholder = nullptr;
};
inline Python python;

template <typename T>
T* value_of(PyObject* object) {
  auto bytes = reinterpret_cast<char*>(object);
  int32_t offset;
  uint32_t flags;
  std::memcpy(&offset, bytes + 16, sizeof offset);
  std::memcpy(&flags, bytes + 20, sizeof flags);
  char* place = bytes + offset;
  if (!(flags & 4)) std::memcpy(&place, place, sizeof place);
  return reinterpret_cast<T*>(place);
}

inline bool is_array(PyObject* object) { return type_of(object) == python.array_type; }

inline mx::array& array_of(PyObject* object, const char* argument) {
  if (!is_array(object)) {
    throw TypeError(std::string("[zmlx] '") + argument + "' must hold mx.array objects but got " +
                    type_name(object) + ".");
  }
  return *value_of<mx::array>(object);
}

inline PyObject* to_python(const mx::array& value) {
  Ref placeholder(PyObject_CallNoArgs(python.make_placeholder));
  value_of<mx::array>(placeholder.get())->overwrite_descriptor(value);
  return placeholder.release();
}

template <typename List, typename Convert>
PyObject* to_tuple(const List& values, Convert convert) {
  Ref tuple(PyTuple_New(Py_ssize_t(values.size())));
  Py_ssize_t i = 0;
  for (auto& value : values) PyTuple_SetItem(tuple.get(), i++, convert(value));
  return tuple.release();
}

inline PyObject* to_python(const std::vector<mx::array>& values) {
  return to_tuple(values, [](auto& value) { return to_python(value); });
}

inline PyObject* to_python(const std::vector<int>& values) {
  return to_tuple(values, [](int value) { return Ref(PyLong_FromLongLong(value)).release(); });
}

inline PyObject* to_python(const std::string& text) {
  return Ref(PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size()))).release();
}

// ---- arguments --------------------------------------------------------------------------------

inline std::string text_of(PyObject* object) {
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (!text) throw PythonError{};
  return std::string(text, size);
}

inline long long integer_of(PyObject* object, long long least, long long most,
                            const char* argument) {
  int overflow = 0;
  long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (value == -1 && PyErr_Occurred()) throw PythonError{};
  if (overflow || value < least || value > most) {
    throw std::invalid_argument(std::string("[zmlx] '") + argument + "' must be from " +
                                std::to_string(least) + " to " + std::to_string(most) +
                                " but got " + text_of(Ref(PyObject_Str(object)).get()) + ".");
  }
  return value;
}

inline int int_of(PyObject* object, const char* argument) {
  return int(integer_of(object, std::numeric_limits<int>::min(), std::numeric_limits<int>::max(),
                        argument));
}

inline bool truth_of(PyObject* object) {
  int value = PyObject_IsTrue(object);
  if (value < 0) throw PythonError{};
  return value;
}

inline mx::Dtype dtype_of(PyObject* object, const char* argument) {
  if (type_of(object) != python.dtype_type) {
    throw TypeError(std::string("[zmlx] '") + argument + "' must be an mx.Dtype but got " +
                    type_name(object) + ".");
  }
  return *value_of<mx::Dtype>(object);
}

// The items of a tuple, or of anything that makes one.
class Items {
 public:
  explicit Items(PyObject* object)
      : tuple_(type_of(object) == &PyTuple_Type ? new_reference(object) : PySequence_Tuple(object)),
        size_(size_t(PyTuple_Size(tuple_.get()))) {}
  size_t size() const { return size_; }
  PyObject* operator[](size_t i) const { return PyTuple_GetItem(tuple_.get(), Py_ssize_t(i)); }

 private:
  Ref tuple_;
  size_t size_;
};

template <typename Convert>
auto list_of(PyObject* object, Convert convert) {
  Items items(object);
  std::vector<decltype(convert(items[0]))> result;
  result.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) result.push_back(convert(items[i]));
  return result;
}

inline std::vector<mx::array> arrays_of(PyObject* object, const char* argument) {
  return list_of(object, [&](PyObject* item) -> mx::array { return array_of(item, argument); });
}

inline Extent extent_of(PyObject* object, const char* argument) {
  Items items(object);
  if (items.size() != 3) {
    throw std::invalid_argument(std::string("[zmlx] '") + argument +
                                "' must hold 3 integers but got " + std::to_string(items.size()) +
                                ".");
  }
  return {int_of(items[0], argument), int_of(items[1], argument), int_of(items[2], argument)};
}

inline mx::fast::TemplateArg template_value(PyObject* object) {
  if (object == &_Py_TrueStruct) return true;
  if (object == &_Py_FalseStruct) return false;
  if (type_of(object) == python.dtype_type) return *value_of<mx::Dtype>(object);
  return int_of(object, "template");
}

inline TemplateArguments template_of(PyObject* object) {
  if (object == none) return {};
  return list_of(object, [](PyObject* item) {
    Items pair(item);
    if (pair.size() != 2) throw TypeError("[zmlx] 'template' must hold pairs (name, value).");
    return std::make_pair(text_of(pair[0]), template_value(pair[1]));
  });
}

// Arguments 1 to 6 of metal_text, source and prepare: all that a call says besides its kernel.
inline Call call_of(PyObject* const* args) {
  auto shape_of = [](PyObject* item) {
    mx::Shape shape;
    for (int size : list_of(item, [](PyObject* value) { return int_of(value, "output_shapes"); })) {
      shape.push_back(size);
    }
    return shape;
  };
  auto output_dtype = [](PyObject* item) { return dtype_of(item, "output_dtypes"); };
  return {arrays_of(args[0], "inputs"),
          template_of(args[1]),
          extent_of(args[2], "grid"),
          extent_of(args[3], "threadgroup"),
          list_of(args[4], shape_of),
          list_of(args[5], output_dtype),
          std::nullopt};
}

// ---- objects of the core in capsules ----------------------------------------------------------

template <typename T>
struct Capsule;
template <>
struct Capsule<Kernel> {
  static constexpr const char* name = "zmlx.Kernel";
};
template <>
struct Capsule<Launch> {
  static constexpr const char* name = "zmlx.Launch";
};

template <typename T>
PyObject* encapsulate(std::shared_ptr<const T> value) {
  auto kept = new std::shared_ptr<const T>(std::move(value));
  auto destroy = [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<const T>*>(
        PyCapsule_GetPointer(capsule, Capsule<T>::name));
  };
  return Ref(PyCapsule_New(kept, Capsule<T>::name, destroy)).release();
}

template <typename T>
const std::shared_ptr<const T>& from_capsule(PyObject* object) {
  void* pointer = PyCapsule_GetPointer(object, Capsule<T>::name);
  if (!pointer) throw PythonError{};
  return *static_cast<std::shared_ptr<const T>*>(pointer);
}


// ---- records ----------------------------------------------------------------------------------

// A node's answers to transforms, from a Python object with the methods vjp, jvp and vmap.
std::shared_ptr<Record> make_record(PyObject*);
// Lets go of the objects of nodes that died since the last call.
void release_dropped_records();

}  // namespace zmlx
