// The Python module `_core`. It takes addresses, sizes and numbers, no torch objects; `fusewright_int8.run` checks them.
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <vector>

#include "cpu.h"
#include "drivers.h"
#include "entries.h"
#include "pool.h"

namespace py = pybind11;
using namespace fusewright::int8;
using Address = std::uintptr_t;

namespace {

py::list names() {
  py::list found;
  for (const Kernels* k : runnable()) found.append(k->name);
  return found;
}

// Entries by name, as addresses of C functions.
py::dict entries() {
  py::dict found;
  for (const NamedEntry& e : kEntries) found[e.name] = reinterpret_cast<Address>(e.run);
  return found;
}

template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

// Run an entry on words that `struct` packed; return its error code.
i64 run(Address entry, const py::bytes& packed, i64 threads) {
  const std::string_view given = packed;
  std::vector<i64> words(given.size() / sizeof(i64));
  std::memcpy(words.data(), given.data(), words.size() * sizeof(i64));
  py::gil_scoped_release released;
  return reinterpret_cast<Entry>(entry)(words.data(), threads);
}

void pack_linear(Address weight, i64 n_stride, i64 k_stride, i64 n, i64 k, Address to) {
  py::gil_scoped_release released;
  pack(at<const std::int8_t>(weight), n_stride, k_stride, n, k, at<std::int8_t>(to));
}

// sizes: n, c / groups, kh, kw, groups
void pack_conv2d(Address weight, const py::tuple& strides, const py::tuple& sizes, bool depthwise, Address to) {
  i64 stride[4], size[5];
  for (std::size_t i = 0; i < 4; ++i) stride[i] = strides[i].cast<i64>();
  for (std::size_t i = 0; i < 5; ++i) size[i] = sizes[i].cast<i64>();
  py::gil_scoped_release released;
  if (depthwise)
    pack_depthwise(at<const std::int8_t>(weight), stride, size[0], size[2], size[3], at<std::int8_t>(to));
  else
    pack_conv(at<const std::int8_t>(weight), stride, size[0], size[1], size[2], size[3], size[4], at<std::int8_t>(to));
}

}  // namespace

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  m.def("isas", names);
  m.def("isa", [] { return kernels().name; });
  m.def("use", [](const std::string& name) { use(name.c_str()); });
  m.def("set_pool", set_pool);
  m.def("packed_bytes", packed_bytes);
  m.def("depthwise_bytes", depthwise_bytes);
  m.attr("entries") = entries();
  m.def("run", run);
  m.def("pack_linear", pack_linear);
  m.def("pack_conv2d", pack_conv2d);
}
