// Torch's functions for the current GPU: `device()` is its index, `stream(device)` the handle of its current stream,
// `empty(size, stride, dtype)` allocates on it.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fusewright::native {

class Gpu {
 public:
  Gpu(PyObject* device, PyObject* stream, PyObject* empty);
  Gpu(const Gpu& other) : Gpu(other.device_, other.stream_, other.empty_) {}
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  // False with an error set.
  bool current(std::int64_t* device) const;
  bool stream(std::int64_t device, std::int64_t* handle) const;

  // A new reference, or null with an error set.
  PyObject* empty(PyObject* size, PyObject* stride, PyObject* dtype) const;

 private:
  PyObject *device_, *stream_, *empty_;
};

}  // namespace fusewright::native
