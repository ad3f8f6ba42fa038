#include "watch.h"

#include <cstring>
#include <stdexcept>

#include "tensor.h"

namespace fusewright::native {
namespace {

struct Seen {
  Py_ssize_t place;
  PyObject* object;  // compared, never dereferenced
  std::int64_t address, version;
};

// A list or tuple as an array, which is null for an empty list; false with an error set.
bool items_of(PyObject* sequence, PyObject*** items, Py_ssize_t* count) {
  if (!PyList_CheckExact(sequence) && !PyTuple_CheckExact(sequence)) {
    PyErr_SetString(PyExc_TypeError, "a list or tuple of tensors was expected");
    return false;
  }
  *count = PySequence_Fast_GET_SIZE(sequence);
  *items = PySequence_Fast_ITEMS(sequence);
  return true;
}

class Watch : public Body {
 public:
  Py_ssize_t expected = 0;
  std::vector<Seen> whole, moving;

  PyObject* call(PyObject* const* args, Py_ssize_t count) override {
    if (count != 1) return PyErr_Format(PyExc_TypeError, "one list of tensors was expected");
    Py_ssize_t given = 0;
    PyObject** items = nullptr;
    if (!items_of(args[0], &items, &given)) return nullptr;
    int same = given == expected;
    for (std::size_t k = 0; same && k < whole.size(); ++k) same = items[whole[k].place] == whole[k].object;
    for (std::size_t k = 0; same > 0 && k < moving.size(); ++k) same = there(items[moving[k].place], moving[k]);
    for (std::size_t k = 0; same > 0 && k < whole.size(); ++k) same = unchanged(whole[k]);
    return same < 0 ? nullptr : PyBool_FromLong(same);
  }

 private:
  static int there(PyObject* tensor, const Seen& s) {
    std::int64_t address;
    return raw_address_of(tensor, &address) ? address == s.address : -1;
  }
  static int unchanged(const Seen& s) {
    std::int64_t version;
    if (!version_of(s.object, &version)) return -1;
    return version == s.version ? there(s.object, s) : 0;
  }
};

struct Word {
  const void* at;
  int bytes;
  std::uint64_t value;
};

std::uint64_t read(const void* at, int bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, static_cast<std::size_t>(bytes));
  return value;
}

class Words : public Body {
 public:
  std::vector<Word> all;

  PyObject* call(PyObject* const*, Py_ssize_t count) override {
    if (count) return PyErr_Format(PyExc_TypeError, "no arguments were expected");
    bool same = true;  // no early exit, so that loads overlap
    for (const Word& w : all) same &= read(w.at, w.bytes) == w.value;
    return PyBool_FromLong(same);
  }
};

}  // namespace

std::unique_ptr<Body> watch(PyObject* arguments, const std::vector<Py_ssize_t>& places, const std::vector<Py_ssize_t>& moving) {
  auto made = std::make_unique<Watch>();
  PyObject** items = nullptr;
  if (!items_of(arguments, &items, &made->expected)) return nullptr;
  for (const auto* group : {&places, &moving})
    for (Py_ssize_t k : *group) {
      if (k < 0 || k >= made->expected) throw std::out_of_range("no such argument");
      Seen s{k, items[k], 0, 0};
      if (!first_version_of(items[k], &s.version) || !raw_address_of(items[k], &s.address)) return nullptr;
      (group == &places ? made->whole : made->moving).push_back(s);
    }
  return made;
}

std::unique_ptr<Body> words(const std::vector<std::pair<std::uintptr_t, int>>& places) {
  auto made = std::make_unique<Words>();
  for (auto [address, bytes] : places) {
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) throw std::invalid_argument("a word has 1, 2, 4 or 8 bytes");
    const void* at = reinterpret_cast<const void*>(address);
    made->all.push_back({at, bytes, read(at, bytes)});
  }
  return made;
}

// The dictionary of a class, which the class keeps alive.
static PyObject* attributes_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* held = PyType_GetDict(type);
  Py_XDECREF(held);
  return held;
#else
  return type->tp_dict;
#endif
}

int same_entries(PyObject* containers, PyObject* entries, bool ids) {
  const Py_ssize_t count = PyTuple_GET_SIZE(entries);
  Py_ssize_t at = 0;
  auto is = [&](PyObject* found) {
    if (at >= count) return false;
    PyObject* expected = PyTuple_GET_ITEM(entries, at++);
    return ids ? PyLong_AsVoidPtr(expected) == found : expected == found;
  };
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(containers); ++k) {
    PyObject* held = PyTuple_GET_ITEM(containers, k);
    if (PyType_Check(held)) held = attributes_of(reinterpret_cast<PyTypeObject*>(held));
    if (PyDict_Check(held)) {
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t place = 0; PyDict_Next(held, &place, &key, &value);)
        if ((!ids && !is(key)) || !is(value)) return PyErr_Occurred() ? -1 : 0;
    } else if (PyList_Check(held)) {
      for (Py_ssize_t j = 0; j < PyList_GET_SIZE(held); ++j)
        if (!is(PyList_GET_ITEM(held, j))) return PyErr_Occurred() ? -1 : 0;
    } else {
      PyErr_SetString(PyExc_TypeError, "a dict, list or class was expected");
      return -1;
    }
  }
  return at == count;
}

}  // namespace fusewright::native
