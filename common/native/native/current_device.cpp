#include "current_device.h"

#include "tensor.h"

namespace fusewright::native {

CurrentDevice::CurrentDevice(PyObject* device, PyObject* stream, PyObject* empty) : device_(device), stream_(stream), empty_(empty) {
  Py_INCREF(device_), Py_INCREF(stream_), Py_INCREF(empty_);
}

CurrentDevice::~CurrentDevice() { Py_DECREF(device_), Py_DECREF(stream_), Py_DECREF(empty_); }

bool CurrentDevice::index(std::int64_t* device) const { return take_integer(PyObject_CallNoArgs(device_), device); }

bool CurrentDevice::stream(std::int64_t device, std::int64_t* handle) const {
  PyObject* index = PyLong_FromLongLong(device);
  bool good = index && take_integer(PyObject_CallOneArg(stream_, index), handle);
  Py_XDECREF(index);
  return good;
}

PyObject* CurrentDevice::empty(PyObject* size, PyObject* stride, PyObject* dtype) const {
  PyObject* how[] = {size, stride, dtype};
  return PyObject_Vectorcall(empty_, how, 3, nullptr);
}

}  // namespace fusewright::native
