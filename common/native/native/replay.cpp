#include "replay.h"

#include <cstring>
#include <stdexcept>

#include "tensor.h"

namespace fusewright::native {
namespace {

using Launch = int (*)(void*, void*);
using UpdateCopy = int (*)(void*, void*, const void*, void*);
using UpdateKernel = int (*)(void*, void*, const void*);

constexpr std::size_t ALIGNED = 128;  // of arguments: tensor descriptors ask for 64

void check(std::size_t at, std::size_t size) {
  if (at > size || sizeof(std::int64_t) > size - at) throw std::out_of_range("no address lies there");
}

// A `KernelNode` whose parameters point to its own copy of the arguments.
class Kernel {
 public:
  Kernel(const KernelNode& k, std::size_t values) : node_(k.node), parameters_(k.parameters), patches_(k.patches) {
    check(k.pointer_at, parameters_.size());
    for (std::size_t place : k.places)
      if (place >= k.arguments.size()) throw std::out_of_range("no argument begins there");
    for (auto [at, value, delta] : patches_) {
      check(at, k.arguments.size());
      if (value >= values) throw std::out_of_range("no such result");
    }
    memory_.resize(k.arguments.size() + ALIGNED);
    arguments_ = memory_.data() + (-reinterpret_cast<std::uintptr_t>(memory_.data()) & (ALIGNED - 1));
    std::memcpy(arguments_, k.arguments.data(), k.arguments.size());
    for (std::size_t place : k.places) pointers_.push_back(arguments_ + place);
    void* array = pointers_.data();
    std::memcpy(&parameters_[k.pointer_at], &array, sizeof array);
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Whether the kernel has these addresses and numbers at the graph's next launch.
  bool set(const Graph& graph, const std::int64_t* values) {
    for (auto [at, value, delta] : patches_) {
      std::int64_t before, now = values[value] + delta;
      std::memcpy(&before, arguments_ + at, sizeof before);
      std::memcpy(arguments_ + at, &now, sizeof now);
      current_ = current_ && before == now;
    }
    if (!current_)
      current_ = !reinterpret_cast<UpdateKernel>(graph.kernel)(reinterpret_cast<void*>(graph.handle),
                                                               reinterpret_cast<void*>(node_), parameters_.data());
    return current_;
  }

 private:
  std::uintptr_t node_;
  std::string parameters_;
  std::vector<Patch> patches_;
  std::vector<char> memory_;
  char* arguments_;
  std::vector<void*> pointers_;
  bool current_ = true;  // whether the driver has the arguments as they are
};

class Replay : public Body {
 public:
  Replay(const Graph& graph, std::int64_t device, const CurrentDevice& current, std::vector<Input> inputs,
         std::vector<Result> results, std::vector<Number> numbers, const std::vector<KernelNode>& kernels)
      : graph_(graph), device_(device), current_(current), inputs_(std::move(inputs)), results_(std::move(results)),
        numbers_(std::move(numbers)), values_(results_.size() + numbers_.size()) {
    for (const Input& i : inputs_) check(i.copy.offset, i.copy.parameters.size());
    for (const Result& r : results_) check(r.copy.offset, r.copy.parameters.size());
    for (const KernelNode& k : kernels) kernels_.push_back(std::make_unique<Kernel>(k, values_.size()));
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
    for (std::size_t k = 0; k < numbers_.size(); ++k)
      if (!take_number(k, args[0], &good)) return nullptr;
    if (!good) Py_RETURN_NONE;
    for (Input& i : inputs_)
      if (!copy_in(i, args[0], &good)) return nullptr;
    PyObject* made = PyList_New(static_cast<Py_ssize_t>(results_.size()));
    for (std::size_t k = 0; made && k < results_.size(); ++k)
      if (!allocate(k, made, &good)) Py_CLEAR(made);
    if (!made) return nullptr;
    for (std::size_t k = 0; good && k < kernels_.size(); ++k) good = kernels_[k]->set(graph_, values_.data());
    if (!good) return Py_DECREF(made), Py_NewRef(Py_None);
    return launch(stream) ? made : (Py_DECREF(made), nullptr);
  }

 private:
  // The argument at a place, or null with an error set.
  static PyObject* argument(PyObject* args, Py_ssize_t place) {
    if (place < PyList_GET_SIZE(args)) return PyList_GET_ITEM(args, place);
    return PyErr_Format(PyExc_IndexError, "no argument %zd", place);
  }

  bool take_number(std::size_t k, PyObject* args, bool* good) {
    auto [place, most] = numbers_[k];
    PyObject* given = argument(args, place);
    if (!given) return false;
    int overflow = 0;
    std::int64_t value = PyLong_CheckExact(given) ? PyLong_AsLongLongAndOverflow(given, &overflow) : -1;
    values_[results_.size() + k] = value;
    *good = *good && !overflow && 0 <= value && value <= most;
    return true;
  }

  bool copy_in(Input& i, PyObject* args, bool* good) const {
    PyObject* given = argument(args, i.place);
    std::int64_t from;
    if (!given || !address_of(given, &from)) return false;
    *good = *good && set(i.copy, from);
    return true;
  }

  bool allocate(std::size_t k, PyObject* made, bool* good) {
    Result& r = results_[k];
    PyObject* tensor = current_.empty(r.size, r.stride, r.dtype);
    if (!tensor) return false;
    PyList_SET_ITEM(made, static_cast<Py_ssize_t>(k), tensor);
    if (!raw_address_of(tensor, &values_[k])) return false;
    *good = *good && set(r.copy, values_[k]);
    return true;
  }

  // Whether the copy has this address at the graph's next launch. Launches that are queued keep theirs.
  bool set(CopyNode& c, std::int64_t address) const {
    std::int64_t before;
    std::memcpy(&before, &c.parameters[c.offset], sizeof before);
    if (!c.node || before == address) return true;
    std::memcpy(&c.parameters[c.offset], &address, sizeof address);
    if (!reinterpret_cast<UpdateCopy>(graph_.copy)(reinterpret_cast<void*>(graph_.handle), reinterpret_cast<void*>(c.node),
                                                 c.parameters.data(), reinterpret_cast<void*>(graph_.context)))
      return true;
    std::memset(&c.parameters[c.offset], 0, sizeof address);  // whatever it has now
    return false;
  }

  bool launch(std::int64_t stream) const {
    if (!graph_.launch) return true;
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
  std::vector<Number> numbers_;
  std::vector<std::int64_t> values_;  // of a call: the addresses of its results, and its numbers
  std::vector<std::unique_ptr<Kernel>> kernels_;
};

}  // namespace

std::unique_ptr<Body> replay(const Graph& graph, std::int64_t device, const CurrentDevice& current, std::vector<Input> inputs,
                             std::vector<Result> results, std::vector<Number> numbers, const std::vector<KernelNode>& kernels) {
  return std::make_unique<Replay>(graph, device, current, std::move(inputs), std::move(results), std::move(numbers), kernels);
}

}  // namespace fusewright::native
