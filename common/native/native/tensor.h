// Queries on tensors: through torch's own functions or those behind `Tensor.data_ptr` and `Tensor._version` if these are plain methods
// of the class, else through Python calls. Independent of torch's memory layout.
#pragma once

#include <Python.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace fusewright::native {

// Set the classes of tensors and of parameters, and `without_memory(tensor)`, which returns a replacement for a null address or
// raises. False with an error set.
// `queries` are torch's C functions for the address and the version of a tensor, and where their argument lies in a Python tensor;
// zeros for none. Then those for the number of dimensions, sizes, strides, dtype, index of the device and bytes of memory, or none. See
// `tensor_queries` of the package's file of private names.
using Queries = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t, std::vector<std::uintptr_t>>;
bool bind_tensors(PyObject* tensor_class, PyObject* parameter_class, PyObject* without_memory, const Queries& queries);

bool is_tensor(PyObject* x);

// False with an error set. A null address is replaced by the result of `without_memory`.
bool address_of(PyObject* tensor, std::int64_t* address);

// The same, but a null address is kept.
bool raw_address_of(PyObject* tensor, std::int64_t* address);

// Bytes of the memory that the tensor is in or a view of, very many if torch does not say.
std::int64_t bytes_of(PyObject* tensor);

// The index of the tensor's device, -1 on the host.
bool device_of(PyObject* tensor, std::int64_t* device);

// Append what a tensor's memory looks like: dtype, device (also stored in `device`), sizes and strides. False with an error set.
bool append_layout(PyObject* tensor, std::int64_t* device, std::vector<std::int64_t>* words);

// Whether the tensor is a view that negates its memory when it is read. False with an error set.
bool negates(PyObject* tensor, bool* found);

// Whether the object is of the tensor class itself, or of its class for parameters.
bool is_plain_tensor(PyObject* x);

// Only of a tensor that `first_version_of` answered for: the exception that torch's function throws for others, which are made in
// inference mode, ends the process, since this extension has an unwinder of its own.
bool version_of(PyObject* tensor, std::int64_t* version);

bool first_version_of(PyObject* tensor, std::int64_t* version);

// The value of a result, which is released; false with an error set, also if there is none.
bool take_integer(PyObject* made, std::int64_t* value);

// The value of a Python int, wrapped to 64 bits as in ctypes.
bool integer_of(PyObject* x, std::int64_t* value);

}  // namespace fusewright::native
