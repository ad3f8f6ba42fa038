// Torch's functions for the current GPU: `device()` is its index, `stream(device)` the handle of its current stream,
// `empty(size, stride, dtype)` allocates on it.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fusewright::native {

class CurrentDevice {
 public:
  CurrentDevice(PyObject* device, PyObject* stream, PyObject* empty);
  CurrentDevice(const CurrentDevice& other) : CurrentDevice(other.device_, other.stream_, other.empty_) {}
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice();

  // False with an error set.
  bool index(std::int64_t* device) const;
  bool stream(std::int64_t device, std::int64_t* handle) const;

  // A new reference, or null with an error set.
  PyObject* empty(PyObject* size, PyObject* stride, PyObject* dtype) const;

 private:
  PyObject *device_, *stream_, *empty_;
};

}  // namespace fusewright::native
