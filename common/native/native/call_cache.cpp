#include "call_cache.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "hash.h"
#include "tensor.h"

namespace fusewright::native {
namespace {

namespace py = pybind11;

using Encode = int (*)(void*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*, const std::uint32_t*,
                       const std::uint32_t*, int, int, int, int);

constexpr std::size_t MOST_KEYS = 1024;   // layouts that are remembered
constexpr std::size_t MOST_TENSORS = 32;
constexpr std::size_t DESCRIPTOR = 128, MOST_DESCRIPTORS = 256;  // bytes of one, and how many each argument keeps
constexpr int L2_128_BYTES = 2;

using Key = std::vector<std::int64_t>;

// The arguments of a call as words, with the addresses of its tensors.
struct Arguments {
  Key key;
  std::int64_t addresses[MOST_TENSORS];
  PyObject* objects[MOST_TENSORS];
  std::size_t tensors = 0;
  std::int64_t device = -1;

  // False if a value is of a kind that no key can hold; an error may be set.
  bool add(PyObject* x) {
    if (is_plain_tensor(x)) return add_tensor(x);
    if (x == Py_None) return key.push_back('N'), true;
    if (PyBool_Check(x)) return key.push_back(x == Py_True ? 'T' : 'F'), true;
    if (PyLong_CheckExact(x)) return add_integer(x);
    if (PyFloat_CheckExact(x)) {
      double d = PyFloat_AS_DOUBLE(x);
      return add_bytes('f', reinterpret_cast<const char*>(&d), sizeof d);
    }
    if (PyUnicode_CheckExact(x)) {
      Py_ssize_t length;
      const char* text = PyUnicode_AsUTF8AndSize(x, &length);
      return text && add_bytes('s', text, static_cast<std::size_t>(length));
    }
    if (!PyList_CheckExact(x) && !PyTuple_Check(x)) return false;
    key.push_back('['), key.push_back(PySequence_Fast_GET_SIZE(x));
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(x); ++k)
      if (PyObject* item = PySequence_Fast_GET_ITEM(x, k); is_tensor(item) || !add(item)) return false;
    return true;
  }

  // The name of a keyword, which is no argument of that text.
  bool add_name(PyObject* name) { return key.push_back('k'), add(name); }

 private:
  bool add_integer(PyObject* x) {
    int overflow;
    key.push_back('i'), key.push_back(PyLong_AsLongLongAndOverflow(x, &overflow));
    return !overflow;
  }
  bool add_bytes(char kind, const char* bytes, std::size_t count) {
    key.push_back(kind), key.push_back(static_cast<std::int64_t>(count));
    for (std::size_t k = 0; k < count; k += 8) {
      std::int64_t word = 0;
      std::memcpy(&word, bytes + k, std::min<std::size_t>(8, count - k));
      key.push_back(word);
    }
    return true;
  }
  // Kernels assume the alignment of addresses, so it belongs to the key. What is left to Python: tensors on several devices, without
  // an address (empty ones, zeros without memory, freed ones), or views that negate. No kernel takes complex ones, which may conjugate.
  bool add_tensor(PyObject* x) {
    std::int64_t on, address;
    bool negated;
    key.push_back('t');
    if (!negates(x, &negated) || negated) return false;
    if (tensors == MOST_TENSORS || !append_layout(x, &on, &key) || !raw_address_of(x, &address) || !address) return false;
    key.push_back(address & 15);
    if (tensors && on != device) return false;
    device = on;
    objects[tensors] = x, addresses[tensors++] = address;
    return true;
  }
};

struct Allocation {
  py::object size, stride, dtype;
};

// An argument that is a tensor descriptor, with those that were encoded for earlier addresses.
struct Descriptor {
  Encoding how;
  std::map<std::int64_t, std::array<char, DESCRIPTOR>> encoded;

  bool place(char* to, std::int64_t address, std::uintptr_t encode) {
    auto found = encoded.find(address);
    if (found == encoded.end()) {
      const auto& [pointer, type, sizes, strides, block, swizzle] = how;
      std::vector<std::uint32_t> ones(sizes.size(), 1);
      if (!encode || reinterpret_cast<Encode>(encode)(to, type, static_cast<std::uint32_t>(sizes.size()),
                                                      reinterpret_cast<void*>(address), sizes.data(), strides.data(), block.data(),
                                                      ones.data(), 0, swizzle, L2_128_BYTES, 0))
        return false;
      if (encoded.size() >= MOST_DESCRIPTORS) encoded.clear();
      std::memcpy(encoded[address].data(), to, DESCRIPTOR);
      return true;
    }
    std::memcpy(to, found->second.data(), DESCRIPTOR);
    return true;
  }
};

struct Step {
  LaunchStep what;
  std::vector<Descriptor> descriptors;
};

struct Program {
  std::int64_t device;
  std::vector<Allocation> made;
  std::vector<Step> steps;
  std::size_t result;
};

// `told` is the tuple of `call_cache`. Null if it exceeds what a call can hold.
std::shared_ptr<Program> program_of(const py::tuple& told) {
  auto p = std::make_shared<Program>();
  p->device = told[0].cast<std::int64_t>(), p->result = told[3].cast<std::size_t>();
  for (py::handle a : told[1]) {
    auto parts = py::reinterpret_borrow<py::tuple>(a);
    p->made.push_back({parts[0], parts[1], parts[2]});
  }
  for (py::handle s : told[2]) {
    Step step{s.cast<LaunchStep>(), {}};
    for (const Encoding& e : std::get<7>(step.what)) step.descriptors.push_back({e, {}});
    if (std::get<4>(step.what).size() > MOST_ARGUMENT_BYTES || std::get<5>(step.what).size() > MOST_PARAMETERS) return nullptr;
    p->steps.push_back(std::move(step));
  }
  return p->made.size() <= MOST_TENSORS && p->result < p->made.size() ? p : nullptr;
}

class CallCache : public Body {
 public:
  CallCache(PyObject* run, PyObject* trace, const LaunchFunctions& driver, std::uintptr_t encode, const CurrentDevice& current,
            bool at_once)
      : run_(run), trace_(trace), driver_(driver), encode_(encode), current_(current), at_once_(at_once) {
    Py_INCREF(run_), Py_INCREF(trace_);
  }
  ~CallCache() override { Py_DECREF(run_), Py_DECREF(trace_); }

  PyObject* call(PyObject* const* args, Py_ssize_t count) override { return call_with(args, count, nullptr); }

  PyObject* call_with(PyObject* const* args, Py_ssize_t count, PyObject* keywords) override {
    Arguments given;
    Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    given.key.reserve(64);
    bool known = true;
    for (Py_ssize_t k = 0; known && k < count; ++k) known = given.add(args[k]);
    for (Py_ssize_t k = 0; known && k < named; ++k)
      known = given.add_name(PyTuple_GET_ITEM(keywords, k)) && given.add(args[count + k]);
    PyErr_Clear();  // Python runs into the same error
    auto plain = [&](PyObject* f) -> PyObject* {
      return close_queue() ? PyObject_Vectorcall(f, args, static_cast<std::size_t>(count), keywords) : nullptr;
    };
    if (!known || !given.tensors) return plain(run_);
    auto found = entries_.find(given.key);
    if (found == entries_.end()) {
      if (entries_.size() >= MOST_KEYS) entries_.clear();
      found = entries_.emplace(given.key, Entry{}).first;
      if (!at_once_) return plain(run_);
    }
    Entry& entry = found->second;
    if (!entry.traced) {
      entry.traced = true;
      return traced(given.key, plain(trace_));
    }
    std::shared_ptr<Program> program = entry.program;  // Python code in between may clear the entries
    PyObject* result = program ? execute(*program, given) : nullptr;
    if (result) return result;
    PyErr_Clear();
    return plain(run_);
  }

 private:
  struct Entry {
    bool traced = false;
    std::shared_ptr<Program> program;
  };

  // Keep what a traced call says, and return its result.
  PyObject* traced(const Key& key, PyObject* answer) {
    if (!answer) return nullptr;
    try {
      auto both = py::reinterpret_steal<py::tuple>(answer);
      if (auto entry = entries_.find(key); entry != entries_.end() && !both[1].is_none())
        entry->second.program = program_of(py::reinterpret_borrow<py::tuple>(both[1]));
      return py::object(both[0]).release().ptr();
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }

  // Null, maybe with an error set, if Python must do it.
  PyObject* execute(Program& p, const Arguments& given) {
    std::int64_t current, stream;
    if (given.device != p.device || !current_.index(&current) || current != p.device) return nullptr;
    bool good = current_.stream(p.device, &stream);
    PyObject* made[MOST_TENSORS];
    std::int64_t addresses[MOST_TENSORS];
    std::size_t count = 0;
    for (; good && count < p.made.size(); ++count) {
      const Allocation& a = p.made[count];
      made[count] = current_.empty(a.size.ptr(), a.stride.ptr(), a.dtype.ptr());
      if (!made[count]) {
        good = false;
        break;
      }
      good = raw_address_of(made[count], addresses + count);
    }
    for (std::size_t k = 0; good && k < p.steps.size(); ++k) good = launch(p.steps[k], given, made, addresses, count, stream);
    PyObject* result = good ? Py_NewRef(made[p.result]) : nullptr;
    while (count) Py_DECREF(made[--count]);  // the queue holds what it needs; later work of the stream reuses the rest
    return result;
  }

  bool launch(Step& step, const Arguments& given, PyObject* const* made, const std::int64_t* addresses, std::size_t count,
              std::int64_t stream) const {
    auto& [function, blocks, threads, shared, filled, places, pointers, encodings] = step.what;
    auto address = [&](const Pointer& p) {
      auto [source, delta, at] = p;
      return (source < 0 ? addresses[-1 - source] : given.addresses[source]) + delta;
    };
    KernelLaunch* next = next_launch(driver_, stream);
    if (!next) return false;
    next->function = function, next->blocks = blocks, next->threads = threads, next->shared = shared;
    std::memcpy(next->arguments, filled.data(), filled.size());
    for (const Pointer& p : pointers) {
      std::int64_t value = address(p);
      std::memcpy(next->arguments + std::get<2>(p), &value, sizeof value);
    }
    for (Descriptor& d : step.descriptors) {
      const Pointer& p = std::get<0>(d.how);
      if (!d.place(next->arguments + std::get<2>(p), address(p), encode_)) return false;
    }
    for (std::size_t k = 0; k < places.size(); ++k) next->parameters[k] = next->arguments + places[k];
    PyObject* touched[2 * MOST_TENSORS];
    PyObject** end = std::copy(made, made + count, std::copy(given.objects, given.objects + given.tensors, touched));
    return !launch_next(touched, static_cast<std::size_t>(end - touched));
  }

  PyObject *run_, *trace_;
  LaunchFunctions driver_;
  std::uintptr_t encode_;
  CurrentDevice current_;
  bool at_once_;
  std::unordered_map<Key, Entry, Hash> entries_;
};

}  // namespace

std::unique_ptr<Body> call_cache(PyObject* run, PyObject* trace, const LaunchFunctions& driver, std::uintptr_t encode,
                                 const CurrentDevice& current, bool at_once) {
  return std::make_unique<CallCache>(run, trace, driver, encode, current, at_once);
}

}  // namespace fusewright::native
