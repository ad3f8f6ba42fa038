#include "replay.h"

#include <cstring>
#include <stdexcept>

#include "tensor.h"

namespace fusewright::native {
namespace {

using Launch = int (*)(void*, void*);
using Update = int (*)(void*, void*, const void*, void*);

void check(const CopyNode& c) {
  if (c.offset + sizeof(std::int64_t) > c.parameters.size()) throw std::out_of_range("no address lies there");
}

class Replay : public Body {
 public:
  Replay(const Graph& graph, std::int64_t device, const CurrentDevice& current, std::vector<Input> inputs,
         std::vector<Result> results)
      : graph_(graph), device_(device), current_(current), inputs_(std::move(inputs)), results_(std::move(results)) {
    for (const Input& i : inputs_) check(i.copy);
    for (const Result& r : results_) check(r.copy);
    for (const Result& r : results_) Py_INCREF(r.size), Py_INCREF(r.stride), Py_INCREF(r.dtype);
  }
  ~Replay() override {
    for (const Result& r : results_) Py_DECREF(r.size), Py_DECREF(r.stride), Py_DECREF(r.dtype);
  }

  PyObject* call(PyObject* const* args, Py_ssize_t count) override {
    if (count != 1 || !PyList_CheckExact(args[0])) return PyErr_Format(PyExc_TypeError, "a list of arguments was expected");
    std::int64_t current, stream;
    if (!current_.index(&current)) return nullptr;
    if (current != device_) Py_RETURN_NONE;
    if (!current_.stream(current, &stream)) return nullptr;
    bool good = true;
    for (Input& i : inputs_)
      if (!copy_in(i, args[0], &good)) return nullptr;
    PyObject* made = PyList_New(static_cast<Py_ssize_t>(results_.size()));
    for (std::size_t k = 0; made && k < results_.size(); ++k)
      if (!copy_out(results_[k], made, static_cast<Py_ssize_t>(k), &good)) Py_CLEAR(made);
    if (!made) return nullptr;
    if (!good) return Py_DECREF(made), Py_NewRef(Py_None);
    return launch(stream) ? made : (Py_DECREF(made), nullptr);
  }

 private:
  bool copy_in(Input& i, PyObject* args, bool* good) const {
    if (i.place >= PyList_GET_SIZE(args)) return PyErr_Format(PyExc_IndexError, "no argument %zd", i.place), false;
    std::int64_t from;
    if (!address_of(PyList_GET_ITEM(args, i.place), &from)) return false;
    *good = *good && set(i.copy, from);
    return true;
  }

  bool copy_out(Result& r, PyObject* made, Py_ssize_t k, bool* good) const {
    PyObject* tensor = current_.empty(r.size, r.stride, r.dtype);
    std::int64_t to;
    if (!tensor) return false;
    PyList_SET_ITEM(made, k, tensor);
    if (!raw_address_of(tensor, &to)) return false;
    *good = *good && set(r.copy, to);
    return true;
  }

  // Whether the copy has this address at the graph's next launch. Launches that are queued keep theirs.
  bool set(CopyNode& c, std::int64_t address) const {
    std::int64_t before;
    std::memcpy(&before, &c.parameters[c.offset], sizeof before);
    if (!c.node || before == address) return true;
    std::memcpy(&c.parameters[c.offset], &address, sizeof address);
    if (!reinterpret_cast<Update>(graph_.update)(reinterpret_cast<void*>(graph_.handle), reinterpret_cast<void*>(c.node),
                                                 c.parameters.data(), reinterpret_cast<void*>(graph_.context)))
      return true;
    std::memset(&c.parameters[c.offset], 0, sizeof address);  // whatever it has now
    return false;
  }

  bool launch(std::int64_t stream) const {
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = reinterpret_cast<Launch>(graph_.launch)(reinterpret_cast<void*>(graph_.handle), reinterpret_cast<void*>(stream));
    Py_END_ALLOW_THREADS
    if (refused) PyErr_Format(PyExc_RuntimeError, "the driver refuses to launch a graph: error %d", refused);
    return !refused;
  }

  Graph graph_;
  std::int64_t device_;
  CurrentDevice current_;
  std::vector<Input> inputs_;
  std::vector<Result> results_;
};

}  // namespace

std::unique_ptr<Body> replay(const Graph& graph, std::int64_t device, const CurrentDevice& current, std::vector<Input> inputs,
                             std::vector<Result> results) {
  return std::make_unique<Replay>(graph, device, current, std::move(inputs), std::move(results));
}

}  // namespace fusewright::native
