#include "device.h"

#include <cstring>
#include <stdexcept>

#include "tensor.h"

namespace fusewright::native {
namespace {

constexpr long DONE = 0, NOT_MINE = -1;
// Python handles what comes later, tens of us a launch: each position of a decoder that counts them in Python is a size. None is
// ever removed: another thread's launch may read it.
constexpr std::size_t MOST_SIZES = 1 << 15, MOST_VARIANTS = 16;

bool number_of(PyObject* x, char letter, std::int64_t* value) {
  if (letter != 'f' && letter != 'd') return integer_of(x, value);
  double d = PyFloat_AsDouble(x);
  if (d == -1.0 && PyErr_Occurred()) return false;
  *value = 0;
  float f = static_cast<float>(d);
  std::memcpy(value, letter == 'd' ? static_cast<void*>(&d) : static_cast<void*>(&f), letter == 'd' ? 8 : 4);
  return true;
}

}  // namespace

DeviceLaunch::DeviceLaunch(const LaunchFunctions& driver, std::uintptr_t errors, const CurrentDevice& current, PyObject* bytes)
    : driver_(driver), errors_(reinterpret_cast<const volatile std::int32_t*>(errors)), current_(current), bytes_(bytes) {
  Py_INCREF(bytes_);
}

DeviceLaunch::~DeviceLaunch() { Py_DECREF(bytes_); }

void DeviceLaunch::learn_sizes(std::vector<std::int64_t> sizes, bool wide, bool even, std::vector<unsigned> programs,
                               std::vector<std::int64_t> parts, std::int64_t bytes) {
  if (sizes_.size() < MOST_SIZES)
    sizes_.try_emplace(std::move(sizes), std::make_unique<Sizes>(Sizes{wide, even, std::move(programs), std::move(parts), bytes}));
}

void DeviceLaunch::learn_programs(std::vector<std::int64_t> most, std::vector<Programs> functions) {
  for (const auto& [split, axes] : functions)
    for (const auto& [size, block] : axes)
      for (const auto& [coefficient, positions] : size)
        for (std::size_t k : positions)
          if (k >= most.size() || block < 1) throw std::out_of_range("no such size");
  most_ = std::move(most), programs_ = std::move(functions);
}

void DeviceLaunch::learn_variant(std::int64_t device, bool wide, bool aligned, bool even, std::vector<Function> functions,
                                 std::string letters, std::uintptr_t after) {
  if (variants_.size() < MOST_VARIANTS)
    variants_.push_back(std::make_unique<Variant>(
        Variant{device, wide, aligned, even, std::move(functions), std::move(letters), after}));
}

const DeviceLaunch::Sizes* DeviceLaunch::sizes_of(PyObject* given) const {
  std::vector<std::int64_t> values(static_cast<std::size_t>(PyTuple_GET_SIZE(given)));
  for (std::size_t k = 0; k < values.size(); ++k) {
    PyObject* size = PyTuple_GET_ITEM(given, k);
    if (!PyLong_CheckExact(size) || !integer_of(size, &values[k])) return nullptr;  // a `Number` is noted, by Python
  }
  if (const Sizes* s = computed(values)) return s;
  auto found = sizes_.find(values);
  return found == sizes_.end() ? nullptr : found->second.get();
}

const DeviceLaunch::Sizes* DeviceLaunch::computed(const std::vector<std::int64_t>& sizes) const {
  thread_local Sizes s{};
  if (programs_.empty() || sizes.size() != most_.size()) return nullptr;
  s.even = !sizes.empty();
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    if (sizes[k] < 0 || sizes[k] > most_[k]) return nullptr;
    s.even = s.even && sizes[k] % 16 == 0;
  }
  s.programs.clear();
  for (const auto& [split, axes] : programs_) {
    std::int64_t count = split;
    for (const auto& [size, block] : axes) {
      std::int64_t total = 0;
      for (const auto& [coefficient, positions] : size) {
        std::int64_t term = coefficient;
        for (std::size_t k : positions) term *= sizes[k];
        total += term;
      }
      count *= (total + block - 1) / block;
    }
    s.programs.push_back(static_cast<unsigned>(count));
  }
  return &s;
}

const DeviceLaunch::Variant* DeviceLaunch::variant_of(std::int64_t device, const Sizes& s, bool aligned) const {
  for (const auto& v : variants_)
    if (v->device == device && v->wide == s.wide && v->aligned == aligned && v->even == s.even) return v.get();
  return nullptr;
}

// call(tensors, sizes, scalars): launch on the current device's current stream. Returns DONE; NOT_MINE if Python must do it (sizes,
// code or device not learned, arguments that are not tuples, a nonzero error word); 1 + k if the driver rejected function k
// after launching those before it.
PyObject* DeviceLaunch::call(PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "tensors, sizes and scalars were expected");
  long result = try_launch(args);
  if (result != DONE && !PyErr_Occurred()) close_queue();  // Python's launches do not wait
  return PyErr_Occurred() ? nullptr : PyLong_FromLong(result);
}

long DeviceLaunch::try_launch(PyObject* const* args) const {
  bool tuples = PyTuple_CheckExact(args[0]) && PyTuple_CheckExact(args[1]) && PyTuple_CheckExact(args[2]);
  if (!tuples || !PyTuple_GET_SIZE(args[0]) || (errors_ && *errors_)) return NOT_MINE;
  const Sizes* s = sizes_of(args[1]);
  if (!s) return NOT_MINE;
  std::int64_t device, current;
  if (!device_of(PyTuple_GET_ITEM(args[0], 0), &device) || !current_.index(&current)) return NOT_MINE;
  if (device != current) return NOT_MINE;
  std::vector<std::int64_t> values;
  std::int64_t joined = 0;
  Py_ssize_t tensors = PyTuple_GET_SIZE(args[0]);
  values.reserve(static_cast<std::size_t>(tensors + PyTuple_GET_SIZE(args[1]) + PyTuple_GET_SIZE(args[2])) + 3);
  for (Py_ssize_t k = 0; k < tensors; ++k) {
    std::int64_t address;
    if (!address_of(PyTuple_GET_ITEM(args[0], k), &address)) return NOT_MINE;
    values.push_back(address), joined |= address;
  }
  const Variant* v = variant_of(device, *s, !(joined & 15));
  if (!v) return NOT_MINE;
  for (int group : {2, 1})
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(args[group]); ++k) {
      std::int64_t value = 0;
      char letter = values.size() < v->letters.size() ? v->letters[values.size()] : 'q';
      if (!number_of(PyTuple_GET_ITEM(args[group], k), letter, &value)) return NOT_MINE;
      values.push_back(value);
    }
  return launch(*v, *s, values, args[0]);
}

long DeviceLaunch::launch(const Variant& v, const Sizes& s, std::vector<std::int64_t>& values, PyObject* tensors) const {
  if (values.size() != v.letters.size() || v.functions.size() != s.programs.size() ||
      values.size() + s.parts.size() + 3 > MOST_PARAMETERS)
    return NOT_MINE;
  std::int64_t stream;
  if (!current_.stream(v.device, &stream)) return NOT_MINE;
  if (v.after) values.push_back(static_cast<std::int64_t>(v.after));
  PyObject** first = &PyTuple_GET_ITEM(tensors, 0);
  std::vector<PyObject*> touched(first, first + PyTuple_GET_SIZE(tensors));
  PyObject* workspace = nullptr;  // held until it is launched: the allocator gives it only to later work of the stream
  if (s.bytes) {
    PyObject *size = Py_BuildValue("(L)", static_cast<long long>(s.bytes)), *one = size ? Py_BuildValue("(i)", 1) : nullptr;
    workspace = one ? current_.empty(size, one, bytes_) : nullptr;
    Py_XDECREF(size), Py_XDECREF(one);
    std::int64_t base;
    if (!workspace || !address_of(workspace, &base)) return Py_XDECREF(workspace), NOT_MINE;
    for (std::int64_t offset : s.parts) values.push_back(base + offset);
    touched.push_back(workspace);
  }
  values.push_back(0), values.push_back(0);  // scratch memory, which these kernels do not use
  long result = DONE;
  for (std::size_t k = 0; k < s.programs.size() && result == DONE; ++k) {
    if (!s.programs[k]) continue;
    KernelLaunch* next = next_launch(driver_, stream);
    if (!next) break;
    std::tie(next->function, next->threads, next->shared) = v.functions[k];
    next->blocks = s.programs[k];
    std::memcpy(next->arguments, values.data(), 8 * values.size());
    for (std::size_t i = 0; i < values.size(); ++i) next->parameters[i] = next->arguments + 8 * i;
    if (int refused = launch_next(touched.data(), touched.size()); refused < 0) break;
    else if (refused) result = s.bytes ? 1 : static_cast<long>(k) + 1;  // Python has another workspace, so it repeats all
  }
  Py_XDECREF(workspace);
  return result;
}

}  // namespace fusewright::native
