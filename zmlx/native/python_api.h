// Python's C interface as far as the core uses it: stable-ABI functions (Python 3.10 on), declared
// by hand, so that the core needs no Python headers to build and one build serves every Python.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <utility>

extern "C" {
typedef struct _object PyObject;
typedef intptr_t Py_ssize_t;
struct PyMethodDef {
  const char* name;
  void* function;
  int flags;
  const char* doc;
};
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyObject *PyExc_ValueError, *PyExc_TypeError, *PyExc_RuntimeError, *PyExc_IndexError,
    *PyExc_KeyboardInterrupt;
extern PyObject PyTuple_Type, PyList_Type, PyCapsule_Type, PyLong_Type, PyFloat_Type, PyUnicode_Type;

PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PyObject* PyObject_CallNoArgs(PyObject*);
PyObject* PyObject_CallMethod(PyObject*, const char* name, const char* format, ...);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
PyObject* PyObject_Str(PyObject*);

PyObject* PyTuple_New(Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
PyObject* PySequence_Tuple(PyObject*);
PyObject* PyDict_New();
int PyDict_SetItemString(PyObject*, const char*, PyObject*);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
PyObject* PyUnicode_FromStringAndSize(const char*, Py_ssize_t);
PyObject* PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char* errors);
const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*);
PyObject* PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject*);
long long PyLong_AsLongLongAndOverflow(PyObject*, int*);
double PyFloat_AsDouble(PyObject*);
int PyObject_IsTrue(PyObject*);
PyObject* PyCapsule_New(void*, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char* name);

PyObject* PyErr_Occurred();
void PyErr_SetObject(PyObject*, PyObject*);
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_NormalizeException(PyObject**, PyObject**, PyObject**);
void PyErr_Clear();
void PyErr_SetInterrupt();
int PyErr_CheckSignals();
int PyErr_GivenExceptionMatches(PyObject*, PyObject*);
int PyGILState_Ensure();
void PyGILState_Release(int);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace zmlx {

inline PyObject* const none = &_Py_NoneStruct;

// The head of an object is its reference count and its type, in every build with a global lock.
inline PyObject* type_of(PyObject* object) { return reinterpret_cast<PyObject**>(object)[1]; }

// A Python error is set; the function returns null to Python.
struct PythonError {};

// An owned reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* object) : object_(object) {
    if (!object) throw PythonError{};
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

inline PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// Asks Python for its lock, by one of the functions above.
//
// Once the interpreter is on its way out, a daemon thread does not get it, and Python ends the thread
// by unwinding its stack: that aborts in destructors, and lets go of MLX's and our references without
// the lock. So the thread stays where it is, as it does from Python 3.14 on, until the process ends.
template <typename Ask>
void with_patience(Ask ask) {
  struct Patience {
    bool needed = true;
    ~Patience() {
      while (needed) pause();
    }
  } patience;
  ask();
  patience.needed = false;
}

// The interpreter's lock, on a thread that may or may not hold it already.
struct HoldPython {
  int state;
  HoldPython() {
    with_patience([&] { state = PyGILState_Ensure(); });
  }
  ~HoldPython() { PyGILState_Release(state); }
};

}  // namespace zmlx
