// One call of a graph of a device's driver that copies the call's inputs into its own memory, passes its numbers to kernels, and
// copies or writes its results into fresh memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call.h"
#include "current_device.h"

namespace fusewright::native {

// An instantiated graph. `launch` is cuGraphLaunch (0: the caller launches it); `copy` is cuGraphExecMemcpyNodeSetParams, which takes
// the graph, a node, the node's parameters and `context`; `kernel` is cuGraphExecKernelNodeSetParams, which takes the first three.
struct Graph {
  std::uintptr_t launch, copy, kernel, handle, context;
};

// A copy that the graph makes: its node (0 for an empty tensor, which needs none), the parameters, and where in them the
// address lies that each call sets.
struct CopyNode {
  std::uintptr_t node;
  std::string parameters;
  std::size_t offset;
};

struct Input {
  Py_ssize_t place;  // among the arguments
  CopyNode copy;
};

// A result that the graph copies out, or that its kernels write (the copy's node is 0).
struct Result {
  CopyNode copy;
  PyObject *size, *stride, *dtype;
};

// A number that kernels take: its place among the arguments, and the most that it may be; the least is 0.
using Number = std::pair<Py_ssize_t, std::int64_t>;

// A word of a kernel's arguments that each call sets: where they hold it, and which result's address it is, and how far from its
// start; numbers count behind the results.
using Patch = std::tuple<std::size_t, std::size_t, std::int64_t>;

// A kernel with addresses of results or numbers among its arguments: its node; the node's parameters, and where in them the address
// of the array of arguments lies; the arguments' bytes, and where in these each argument begins.
struct KernelNode {
  std::uintptr_t node;
  std::string parameters;
  std::size_t pointer_at;
  std::string arguments;
  std::vector<std::size_t> places;
  std::vector<Patch> patches;
};

// call(arguments): a list of the results; None, with nothing done, if another device is current, a number is out of its range or the
// driver refuses an address.
std::unique_ptr<Body> replay(const Graph& graph, std::int64_t device, const CurrentDevice& current, std::vector<Input> inputs,
                             std::vector<Result> results, std::vector<Number> numbers, const std::vector<KernelNode>& kernels);

}  // namespace fusewright::native
