#include "call.h"

#include <structmember.h>

#include <cstddef>

namespace fusewright::native {
namespace {

struct Object {
  PyObject_HEAD
  vectorcallfunc entry;
  Body* body;
};

PyTypeObject* type = nullptr;

PyObject* enter(PyObject* self, PyObject* const* args, std::size_t flags, PyObject* keywords) {
  Body* body = reinterpret_cast<Object*>(self)->body;
  bool named = keywords && PyTuple_GET_SIZE(keywords);
  return named ? body->call_with(args, PyVectorcall_NARGS(flags), keywords) : body->call(args, PyVectorcall_NARGS(flags));
}

void destroy(PyObject* self) {
  PyTypeObject* of = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->body;
  of->tp_free(self);
  Py_DECREF(of);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, entry), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    "fusewright_native._core.Call", sizeof(Object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
};

}  // namespace

PyObject* Body::call_with(PyObject* const*, Py_ssize_t, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "it takes no keyword arguments");
  return nullptr;
}

PyObject* make_type() {
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return reinterpret_cast<PyObject*>(type);
}

PyObject* make_callable(std::unique_ptr<Body> body) {
  auto* made = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  if (!made) return nullptr;
  made->entry = enter;
  made->body = body.release();
  return reinterpret_cast<PyObject*>(made);
}

}  // namespace fusewright::native
