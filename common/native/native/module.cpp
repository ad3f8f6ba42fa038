// The Python module `_core`. The declarations of the callables document their arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "call_cache.h"
#include "device.h"
#include "launch.h"
#include "launch_queue.h"
#include "replay.h"
#include "tensor.h"
#include "watch.h"

namespace py = pybind11;
using namespace fusewright::native;

namespace {

py::object callable(std::unique_ptr<Body> body) {
  PyObject* made = body ? make_callable(std::move(body)) : nullptr;
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// The Python side of a `DeviceLaunch`: `launch` is the callable, the other methods register what it may handle itself.
class Device {
 public:
  Device(const LaunchFunctions& driver, std::uintptr_t errors, const CurrentDevice& current, const py::object& bytes) {
    auto body = std::make_unique<DeviceLaunch>(driver, errors, current, bytes.ptr());
    body_ = body.get();
    call = callable(std::move(body));
  }
  DeviceLaunch& body() { return *body_; }
  py::object call;

 private:
  DeviceLaunch* body_;  // lives as long as `call`
};

// See `LaunchFunctions`.
using Addresses = std::array<std::uintptr_t, 8>;

LaunchFunctions functions(const Addresses& a) { return {a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]}; }

struct OpenQueue : Body {
  PyObject* call(PyObject* const*, Py_ssize_t) override { return open_queue(), Py_NewRef(Py_None); }
};

struct CloseQueue : Body {
  PyObject* call(PyObject* const*, Py_ssize_t) override { return close_queue() ? Py_NewRef(Py_None) : nullptr; }
};

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.attr("INTERFACE") = 4;  // grows with each change of what follows
  m.attr("Call") = py::reinterpret_steal<py::object>(make_type());
  m.def("bind_tensors", [](const py::object& tensor_class, const py::object& parameter_class, const py::object& without_memory,
                           const Queries& queries) {
    if (!bind_tensors(tensor_class.ptr(), parameter_class.ptr(), without_memory.ptr(), queries))
      throw py::error_already_set();
  });
  m.def("launch", [](std::uintptr_t kernel, std::vector<std::int32_t> places) {
    return callable(launch(kernel, std::move(places)));
  });
  py::class_<CurrentDevice>(m, "CurrentDevice")
      .def(py::init([](const py::object& device, const py::object& stream, const py::object& empty) {
    return std::make_unique<CurrentDevice>(device.ptr(), stream.ptr(), empty.ptr());
  }), py::arg("device"), py::arg("stream"), py::arg("empty"));
  m.def("call_cache", [](const py::object& run, const py::object& trace, const Addresses& driver, std::uintptr_t encode,
                         const CurrentDevice& current, bool at_once) {
    return callable(call_cache(run.ptr(), trace.ptr(), functions(driver), encode, current, at_once));
  });
  m.attr("open_queue") = callable(std::make_unique<OpenQueue>());
  m.attr("close_queue") = callable(std::make_unique<CloseQueue>());
  using Node = std::tuple<std::uintptr_t, py::bytes, std::size_t>;
  using Copied = std::vector<std::pair<Py_ssize_t, Node>>;
  using Returned = std::vector<std::tuple<Node, py::object, py::object, py::object>>;
  using Arguments = std::tuple<std::uintptr_t, py::bytes, std::size_t, py::bytes, std::vector<std::size_t>, std::vector<Patch>>;
  using Handles = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>;
  m.def("replay", [](const Handles& graph, std::int64_t device, const CurrentDevice& current, const Copied& copied,
                     const Returned& returned, const std::vector<Number>& numbers, const std::vector<Arguments>& written) {
    auto node = [](const Node& n) { return CopyNode{std::get<0>(n), std::get<1>(n), std::get<2>(n)}; };
    std::vector<Input> inputs;
    for (const auto& [place, n] : copied) inputs.push_back({place, node(n)});
    std::vector<Result> results;
    for (const auto& [n, size, stride, dtype] : returned) results.push_back({node(n), size.ptr(), stride.ptr(), dtype.ptr()});
    std::vector<KernelNode> kernels;
    for (const auto& [n, parameters, pointer_at, arguments, places, patches] : written)
      kernels.push_back({n, parameters, pointer_at, arguments, places, patches});
    auto [launch, copy, kernel, handle, context] = graph;
    Graph of{launch, copy, kernel, handle, context};
    return callable(replay(of, device, current, std::move(inputs), std::move(results), numbers, kernels));
  });
  m.def("watch", [](const py::object& arguments, const std::vector<Py_ssize_t>& places, const std::vector<Py_ssize_t>& moving) {
    return callable(watch(arguments.ptr(), places, moving));
  });
  auto same = [](const py::tuple& containers, const py::tuple& entries, bool ids) {
    int found = same_entries(containers.ptr(), entries.ptr(), ids);
    if (found < 0) throw py::error_already_set();
    return found == 1;
  };
  m.def("same_entries", [same](const py::tuple& containers, const py::tuple& entries) { return same(containers, entries, false); });
  m.def("same_ids", [same](const py::tuple& containers, const py::tuple& entries) { return same(containers, entries, true); });
  m.def("words", [](const std::vector<std::pair<std::uintptr_t, int>>& places) { return callable(words(places)); });
  py::class_<Device>(m, "Device")
      .def(py::init([](const Addresses& driver, std::uintptr_t errors, const CurrentDevice& current, const py::object& bytes) {
    return std::make_unique<Device>(functions(driver), errors, current, bytes);
  }), py::arg("driver"), py::arg("errors"), py::arg("current"), py::arg("bytes"))
      .def_readonly("launch", &Device::call)
      .def("learn_sizes", [](Device& d, std::vector<std::int64_t> sizes, bool wide, bool even,
                             std::vector<unsigned> programs, std::vector<std::int64_t> parts, std::int64_t bytes) {
        d.body().learn_sizes(std::move(sizes), wide, even, std::move(programs), std::move(parts), bytes);
      })
      .def("learn_programs", [](Device& d, std::vector<std::int64_t> most, std::vector<Programs> functions) {
        d.body().learn_programs(std::move(most), std::move(functions));
      })
      .def("learn_variant", [](Device& d, std::int64_t device, bool wide, bool aligned, bool even,
                               std::vector<Function> functions, std::string letters, std::uintptr_t after) {
        d.body().learn_variant(device, wide, aligned, even, std::move(functions), std::move(letters), after);
      });
}
