#include "copies.h"

#include "tensor.h"

namespace fusewright::native {
namespace {

using Copy = int (*)(std::uintptr_t, std::uintptr_t, std::size_t, void*);

class Copies : public Body {
 public:
  explicit Copies(const Copying& how) : how_(how) {}

 protected:
  // False with an error set, or because another device is current.
  bool begin(std::int64_t* stream) const {
    std::int64_t current;
    return how_.current.index(&current) && current == how_.device && how_.current.stream(current, stream);
  }
  bool copy(std::int64_t to, std::int64_t from, std::size_t bytes, std::int64_t stream) const {
    int refused = 0;
    Py_BEGIN_ALLOW_THREADS
    if (bytes)
      refused = reinterpret_cast<Copy>(how_.copy)(static_cast<std::uintptr_t>(to), static_cast<std::uintptr_t>(from), bytes,
                                                  reinterpret_cast<void*>(stream));
    Py_END_ALLOW_THREADS
    if (refused) PyErr_Format(PyExc_RuntimeError, "the driver refuses a copy: error %d", refused);
    return !refused;
  }

  Copying how_;
};

class CopyIn : public Copies {
 public:
  CopyIn(const Copying& how, std::vector<std::pair<std::int64_t, std::size_t>> targets)
      : Copies(how), targets_(std::move(targets)) {}

  PyObject* call(PyObject* const* args, Py_ssize_t count) override {
    if (count != 1 || !PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) != static_cast<Py_ssize_t>(targets_.size()))
      return PyErr_Format(PyExc_TypeError, "a list of %zu tensors was expected", targets_.size());
    std::int64_t stream, from;
    if (!begin(&stream)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    for (std::size_t k = 0; k < targets_.size(); ++k)
      if (!address_of(PyList_GET_ITEM(args[0], static_cast<Py_ssize_t>(k)), &from) ||
          !copy(targets_[k].first, from, targets_[k].second, stream))
        return nullptr;
    Py_RETURN_TRUE;
  }

 private:
  std::vector<std::pair<std::int64_t, std::size_t>> targets_;
};

class CopyOut : public Copies {
 public:
  struct Source {
    std::int64_t address;
    std::size_t bytes;
    PyObject* how[3];
  };

  using Copies::Copies;
  ~CopyOut() override {
    for (Source& s : sources)
      for (PyObject* held : s.how) Py_DECREF(held);
  }

  PyObject* call(PyObject* const*, Py_ssize_t count) override {
    if (count) return PyErr_Format(PyExc_TypeError, "no arguments were expected");
    std::int64_t stream, to;
    if (!begin(&stream)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    PyObject* made = PyList_New(static_cast<Py_ssize_t>(sources.size()));
    for (std::size_t k = 0; made && k < sources.size(); ++k) {
      const Source& s = sources[k];
      PyObject* t = how_.current.empty(s.how[0], s.how[1], s.how[2]);
      if (!t || !raw_address_of(t, &to) || !copy(to, s.address, s.bytes, stream)) {
        Py_XDECREF(t);
        Py_CLEAR(made);
      } else {
        PyList_SET_ITEM(made, static_cast<Py_ssize_t>(k), t);
      }
    }
    return made;
  }

  std::vector<Source> sources;
};

}  // namespace

std::unique_ptr<Body> copy_in(const Copying& how, std::vector<std::pair<std::int64_t, std::size_t>> targets) {
  return std::make_unique<CopyIn>(how, std::move(targets));
}

std::unique_ptr<Body> copy_out(const Copying& how,
                               const std::vector<std::tuple<std::int64_t, std::size_t, PyObject*, PyObject*, PyObject*>>& sources) {
  auto made = std::make_unique<CopyOut>(how);
  for (auto [address, bytes, size, stride, dtype] : sources) {
    Py_INCREF(size), Py_INCREF(stride), Py_INCREF(dtype);
    made->sources.push_back({address, bytes, {size, stride, dtype}});
  }
  return made;
}

}  // namespace fusewright::native
