#include "tensor.h"

#include <descrobject.h>

namespace fusewright::native {
namespace {

PyTypeObject* tensors = nullptr;
PyObject *parameters = nullptr, *on_null = nullptr, *nothing = nullptr;  // the last: an empty tuple

// A member of the class, and its C function if calling that is equivalent.
struct Member {
  PyObject* name = nullptr;
  PyObject* found = nullptr;
  PyCFunction method = nullptr;
  PyCFunctionWithKeywords general = nullptr;
  getter get = nullptr;
  void* closure = nullptr;

  bool bind(const char* text) {
    name = PyUnicode_InternFromString(text);
    found = name ? PyObject_GetAttr(reinterpret_cast<PyObject*>(tensors), name) : nullptr;
    if (!found) return false;
    method = nullptr, general = nullptr, get = nullptr;
    if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
      PyMethodDef* def = reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
      if (def->ml_flags == METH_NOARGS) method = def->ml_meth;
      if (def->ml_flags == (METH_VARARGS | METH_KEYWORDS))
        general = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(def->ml_meth));
    } else if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
      PyGetSetDef* def = reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;
      get = def->get, closure = def->closure;
    }
    return true;
  }
  PyObject* called(PyObject* t) const {
    return method ? method(t, nullptr) : general ? general(t, nothing, nullptr) : PyObject_CallMethodNoArgs(t, name);
  }
  PyObject* read(PyObject* t) const { return get ? get(t, closure) : PyObject_GetAttr(t, name); }
};

Member data_ptr, version, get_device, dtype, shape, stride, is_neg;

// Torch's own functions, if they can be called, and where in a Python tensor their argument lies.
int (*own_address)(void*, void**) = nullptr;
std::int64_t (*own_version)(const void*) = nullptr;
std::vector<std::uintptr_t> own_layout;
std::size_t inside = 0;

void* cpp_tensor(PyObject* tensor) { return reinterpret_cast<char*>(tensor) + inside; }

template <typename T>
bool ask(std::size_t which, PyObject* tensor, T* answer) {
  return !reinterpret_cast<int (*)(void*, T*)>(own_layout[which])(cpp_tensor(tensor), answer);
}

// `append_layout` by torch's own functions; false, with nothing done, if they cannot.
bool append_own_layout(PyObject* tensor, std::int64_t* device, std::vector<std::int64_t>* words) {
  std::int64_t rank, *sizes, *strides;
  std::int32_t type, index;
  if (own_layout.empty() || !is_plain_tensor(tensor) || !ask(0, tensor, &rank) || !ask(1, tensor, &sizes) ||
      !ask(2, tensor, &strides) || !ask(3, tensor, &type) || !ask(4, tensor, &index))
    return false;
  *device = index;
  words->insert(words->end(), {type, index, rank});
  words->insert(words->end(), sizes, sizes + rank);
  words->insert(words->end(), strides, strides + rank);
  return true;
}

// Append a tuple of integers, and take it.
bool append(PyObject* sizes, std::vector<std::int64_t>* words) {
  bool good = sizes && PyTuple_Check(sizes);
  for (Py_ssize_t k = 0; good && k < PyTuple_GET_SIZE(sizes); ++k) {
    std::int64_t size = 0;
    good = integer_of(PyTuple_GET_ITEM(sizes, k), &size);
    words->push_back(size);
  }
  if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "sizes are no tuple");
  Py_XDECREF(sizes);
  return good;
}

bool refuse(PyObject* x) {
  PyErr_Format(PyExc_TypeError, "a tensor was expected, not %s", Py_TYPE(x)->tp_name);
  return false;
}

}  // namespace

bool bind_tensors(PyObject* tensor_class, PyObject* parameter_class, PyObject* without_memory, const Queries& queries) {
  if (!PyType_Check(tensor_class)) {
    PyErr_SetString(PyExc_TypeError, "the class of tensors was expected");
    return false;
  }
  nothing = PyTuple_New(0);
  if (!nothing) return false;
  Py_INCREF(tensor_class), Py_INCREF(parameter_class), Py_INCREF(without_memory);
  auto [address, counter, offset, layout] = queries;
  own_layout = layout.size() == 6 ? layout : std::vector<std::uintptr_t>();
  own_address = reinterpret_cast<int (*)(void*, void**)>(address), inside = offset;
  own_version = reinterpret_cast<std::int64_t (*)(const void*)>(counter);
  tensors = reinterpret_cast<PyTypeObject*>(tensor_class), parameters = parameter_class, on_null = without_memory;
  return data_ptr.bind("data_ptr") && version.bind("_version") && get_device.bind("get_device") && dtype.bind("dtype") &&
         shape.bind("shape") && stride.bind("stride") && is_neg.bind("is_neg");
}

bool is_plain_tensor(PyObject* x) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == reinterpret_cast<PyObject*>(tensors) || type == parameters;
}

bool append_layout(PyObject* tensor, std::int64_t* device, std::vector<std::int64_t>* words) {
  if (append_own_layout(tensor, device, words)) return true;
  if (!device_of(tensor, device)) return false;
  PyObject* type = dtype.read(tensor);
  if (!type) return false;
  words->push_back(reinterpret_cast<std::intptr_t>(type));  // torch keeps one object for each
  Py_DECREF(type);
  words->push_back(*device);
  std::size_t rank = words->size();
  words->push_back(0);
  if (!append(shape.read(tensor), words)) return false;
  (*words)[rank] = static_cast<std::int64_t>(words->size() - rank) - 1;
  return append(stride.called(tensor), words);
}

bool negates(PyObject* tensor, bool* found) {
  PyObject* answer = is_neg.called(tensor);
  *found = answer == Py_True;
  Py_XDECREF(answer);
  return answer;
}

bool is_tensor(PyObject* x) { return tensors && PyObject_TypeCheck(x, tensors); }

bool raw_address_of(PyObject* tensor, std::int64_t* address) {
  void* found = nullptr;
  if (own_address && is_plain_tensor(tensor) && !own_address(cpp_tensor(tensor), &found))
    return *address = reinterpret_cast<std::intptr_t>(found), true;
  return is_tensor(tensor) ? take_integer(data_ptr.called(tensor), address) : refuse(tensor);
}

bool address_of(PyObject* tensor, std::int64_t* address) {
  if (!raw_address_of(tensor, address)) return false;
  return *address || take_integer(PyObject_CallOneArg(on_null, tensor), address);
}

std::int64_t bytes_of(PyObject* tensor) {
  std::int64_t bytes;
  return !own_layout.empty() && is_plain_tensor(tensor) && ask(5, tensor, &bytes) ? bytes : 1ll << 40;
}

bool device_of(PyObject* tensor, std::int64_t* device) {
  std::int32_t index;
  if (!own_layout.empty() && is_plain_tensor(tensor) && ask(4, tensor, &index)) return *device = index, true;
  return is_tensor(tensor) ? take_integer(get_device.called(tensor), device) : refuse(tensor);
}

bool version_of(PyObject* tensor, std::int64_t* found) {
  if (own_version && is_plain_tensor(tensor)) return *found = own_version(cpp_tensor(tensor)), true;
  return first_version_of(tensor, found);
}

bool first_version_of(PyObject* tensor, std::int64_t* found) {
  return is_tensor(tensor) ? take_integer(version.read(tensor), found) : refuse(tensor);
}

bool take_integer(PyObject* made, std::int64_t* value) {
  bool good = made && integer_of(made, value);
  Py_XDECREF(made);
  return good;
}

bool integer_of(PyObject* x, std::int64_t* value) {
  if (PyLong_CheckExact(x)) {
    *value = static_cast<std::int64_t>(PyLong_AsUnsignedLongLongMask(x));
    return !(*value == -1 && PyErr_Occurred());
  }
  PyObject* number = PyNumber_Index(x);
  if (!number) return false;
  *value = static_cast<std::int64_t>(PyLong_AsUnsignedLongLongMask(number));
  Py_DECREF(number);
  return !(*value == -1 && PyErr_Occurred());
}

}  // namespace fusewright::native
