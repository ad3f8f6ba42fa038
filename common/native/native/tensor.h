// What is asked of tensors: by the C functions behind `Tensor.data_ptr` and `Tensor._version` where these are plain methods of
// the class, else through Python's own call. Nothing of torch's layout is known here.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fusewright::native {

// Takes the class of tensors, and `without_memory(tensor)`: what stands for a null address, or an error. False with an error set.
bool bind_tensors(PyObject* tensor_class, PyObject* without_memory);

bool is_tensor(PyObject* x);

// False with an error set. A null address is one as `without_memory` has it.
bool address_of(PyObject* tensor, std::int64_t* address);

// The same, but a null address stays one.
bool raw_address_of(PyObject* tensor, std::int64_t* address);

// The index of its device, -1 on the host.
bool device_of(PyObject* tensor, std::int64_t* device);

bool version_of(PyObject* tensor, std::int64_t* version);

// Of a Python int, wrapped to 64 bits as ctypes does it.
bool integer_of(PyObject* x, std::int64_t* value);

}  // namespace fusewright::native
