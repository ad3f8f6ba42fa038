// Python callables implemented in C++, without the cost of a general binding: arguments are passed as an array.
#pragma once

#include <Python.h>

#include <memory>

namespace fusewright::native {

class Body {
 public:
  virtual ~Body() = default;
  // A new reference, or null with a Python error set.
  virtual PyObject* call(PyObject* const* args, Py_ssize_t count) = 0;
  // The same with keywords, whose values follow the `count` others; by default there may be none.
  virtual PyObject* call_with(PyObject* const* args, Py_ssize_t count, PyObject* keywords);
};

// Create the Python type; null with an error set.
PyObject* make_type();

// A callable of that type; null with an error set.
PyObject* make_callable(std::unique_ptr<Body> body);

}  // namespace fusewright::native
