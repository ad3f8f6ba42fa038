// Launch a device kernel through its driver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call.h"
#include "current_device.h"
#include "hash.h"
#include "launch_queue.h"

namespace fusewright::native {

// A loaded function: its handle, threads and bytes of shared memory.
using Function = std::tuple<std::uintptr_t, unsigned, unsigned>;

// A polynomial in a launch's sizes, terms of a coefficient and positions; how many programs a function has: a number, times the
// blocks of each axis.
using Polynomial = std::vector<std::pair<std::int64_t, std::vector<std::size_t>>>;
using Programs = std::pair<std::int64_t, std::vector<std::pair<Polynomial, std::int64_t>>>;

// A kernel with the launch parameters learned from Python: see `Device` in module.cpp, which exposes it.
class DeviceLaunch : public Body {
 public:
  // `bytes` is the type of a workspace's elements.
  DeviceLaunch(const LaunchFunctions& driver, std::uintptr_t errors, const CurrentDevice& current, PyObject* bytes);
  ~DeviceLaunch() override;
  // `parts` are offsets into a workspace of `bytes`, whose addresses follow the other parameters.
  void learn_sizes(std::vector<std::int64_t> sizes, bool wide, bool even, std::vector<unsigned> programs,
                   std::vector<std::int64_t> parts, std::int64_t bytes);
  // For all sizes from 0 up to `most`, with 32-bit offsets and without a workspace.
  void learn_programs(std::vector<std::int64_t> most, std::vector<Programs> functions);
  void learn_variant(std::int64_t device, bool wide, bool aligned, bool even, std::vector<Function> functions,
                     std::string letters, std::uintptr_t after);
  PyObject* call(PyObject* const* args, Py_ssize_t count) override;

 private:
  struct Sizes {
    bool wide, even;
    std::vector<unsigned> programs;
    std::vector<std::int64_t> parts;
    std::int64_t bytes;
  };
  struct Variant {
    std::int64_t device;
    bool wide, aligned, even;
    std::vector<Function> functions;
    std::string letters;  // types of the given parameters: q 8 bytes, i 4 bytes, f and d floats
    std::uintptr_t after;  // one more parameter after them; 0 for none
  };
  const Sizes* sizes_of(PyObject* sizes) const;  // an error may be set
  const Sizes* computed(const std::vector<std::int64_t>& sizes) const;  // valid until this thread's next launch; null if not learned
  const Variant* variant_of(std::int64_t device, const Sizes& sizes, bool aligned) const;
  // What `call` returns; an error may be set.
  long try_launch(PyObject* const* args) const;
  long launch(const Variant& v, const Sizes& s, std::vector<std::int64_t>& values, PyObject* tensors) const;

  LaunchFunctions driver_;
  const volatile std::int32_t* errors_;
  CurrentDevice current_;
  PyObject* bytes_;
  std::unordered_map<std::vector<std::int64_t>, std::unique_ptr<Sizes>, Hash> sizes_;
  std::vector<std::int64_t> most_;
  std::vector<Programs> programs_;
  std::vector<std::unique_ptr<Variant>> variants_;
};

}  // namespace fusewright::native
