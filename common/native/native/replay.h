// One call of a graph of a device's driver that copies the call's inputs into its own memory and its results into fresh memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "current_device.h"

namespace fusewright::native {

// An instantiated graph. `launch` is cuGraphLaunch; `update` is cuGraphExecMemcpyNodeSetParams, which takes the graph, a node, the
// node's parameters and `context`.
struct Graph {
  std::uintptr_t launch, update, handle, context;
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

struct Result {
  CopyNode copy;
  PyObject *size, *stride, *dtype;
};

// call(arguments): a list of the results; None, with nothing done, if another device is current or the driver refuses an address.
std::unique_ptr<Body> replay(const Graph& graph, std::int64_t device, const CurrentDevice& current, std::vector<Input> inputs,
                             std::vector<Result> results);

}  // namespace fusewright::native
