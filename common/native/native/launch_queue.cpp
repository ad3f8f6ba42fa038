#include "launch_queue.h"

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "hash.h"
#include "tensor.h"

namespace fusewright::native {
namespace {

// CUDA_KERNEL_NODE_PARAMS, version 2 ("CUDA Driver API", data types).
struct NodeParameters {
  void* function;
  unsigned blocks[3], threads[3], shared;
  void **parameters, **extra, *kernel, *context;
};

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using Context = int (*)(void**);
using Capturing = int (*)(void*, int*);
using Create = int (*)(void**, unsigned);
using Add = int (*)(void**, void*, void* const*, std::size_t, const NodeParameters*);
using Instantiate = int (*)(void**, void*, unsigned long long);
using Set = int (*)(void*, void*, const NodeParameters*);
using Run = int (*)(void*, void*);

constexpr std::size_t FEWEST = 4, LONGEST = 8;     // launches in a graph: two or three cost no less by themselves, more than eight no
                                                   // less for each
constexpr std::int64_t MOST_BYTES = 64ll << 20;    // of tensors kept alive; kernels that touch more take the device longer than the host
constexpr std::size_t COPIES = 4;                  // graphs of the same kernels that take turns: one that is running is slow to change
constexpr unsigned SEEN = 8;                       // times that the same kernels must come before they get (another) graph
constexpr std::size_t MOST_GRAPHS = 128, MOST_KEYS = 4096;
constexpr int NO_CONTEXT = 201;

// The driver's graph of some kernels in a row. It is never destroyed: it may be running.
struct Graph {
  void* executable;
  std::array<void*, LONGEST> nodes;
  bool busy;
};

struct Graphs {
  unsigned seen = 0;
  std::size_t next = 0;
  bool refused = false;
  std::vector<std::unique_ptr<Graph>> made;
};

using Key = std::array<std::uintptr_t, LONGEST>;  // the functions

std::unordered_map<Key, Graphs, Hash> known;  // the GIL guards both
std::size_t count_of_graphs = 0;

struct Queue {
  bool open = false, waits = false;  // whether a plan allows it; whether the launches since the last flush do
  LaunchFunctions driver{};
  std::int64_t stream = 0, bytes = 0;
  std::size_t count = 0;
  std::unique_ptr<KernelLaunch[]> launches;
  std::vector<PyObject*> held;
};

thread_local Queue queue;

NodeParameters parameters_of(KernelLaunch& k) {
  return {reinterpret_cast<void*>(k.function), {k.blocks, 1, 1}, {k.threads, 1, 1}, k.shared, k.parameters, nullptr, nullptr, nullptr};
}

int launch_one(const LaunchFunctions& driver, std::int64_t stream, KernelLaunch& k) {
  return reinterpret_cast<Launch>(driver.launch)(reinterpret_cast<void*>(k.function), k.blocks, 1, 1, k.threads, 1, 1, k.shared,
                                                 reinterpret_cast<void*>(stream), k.parameters, nullptr);
}

// Null if the driver refuses, with its code in `refused`.
std::unique_ptr<Graph> build(const LaunchFunctions& driver, KernelLaunch* launches, std::size_t count, int* refused) {
  void *graph = nullptr, *last = nullptr;
  auto made = std::make_unique<Graph>();
  *refused = reinterpret_cast<Create>(driver.create)(&graph, 0);
  for (std::size_t k = 0; !*refused && k < count; ++k) {
    NodeParameters p = parameters_of(launches[k]);
    *refused = reinterpret_cast<Add>(driver.add)(&made->nodes[k], graph, &last, last ? 1 : 0, &p);
    last = made->nodes[k];
  }
  if (!*refused) *refused = reinterpret_cast<Instantiate>(driver.instantiate)(&made->executable, graph, 0);
  return *refused ? nullptr : std::move(made);
}

// A graph for what is queued that nobody uses, or null.
Graph* graph_of(const Queue& q) {
  if (!q.driver.run || q.count < FEWEST) return nullptr;
  Key key{};
  for (std::size_t k = 0; k < q.count; ++k) key[k] = q.launches[k].function;
  if (known.size() >= MOST_KEYS && !known.count(key)) return nullptr;
  Graphs& graphs = known[key];
  if (graphs.refused) return nullptr;
  if (graphs.made.size() < COPIES && ++graphs.seen >= SEEN && count_of_graphs < MOST_GRAPHS) {
    int refused;
    auto made = build(q.driver, q.launches.get(), q.count, &refused);
    graphs.seen = 0, graphs.refused = refused && refused != NO_CONTEXT;
    if (made) graphs.made.push_back(std::move(made)), ++count_of_graphs;
  }
  for (std::size_t k = 0; k < graphs.made.size(); ++k) {
    Graph* g = graphs.made[graphs.next++ % graphs.made.size()].get();
    if (!g->busy) return g->busy = true, g;
  }
  return nullptr;
}

bool launch_graph(const Queue& q, const Graph& graph) {
  int refused = 0;
  for (std::size_t k = 0; !refused && k < q.count; ++k) {
    NodeParameters p = parameters_of(q.launches[k]);
    refused = reinterpret_cast<Set>(q.driver.set)(graph.executable, graph.nodes[k], &p);
  }
  return !refused && !reinterpret_cast<Run>(q.driver.run)(graph.executable, reinterpret_cast<void*>(q.stream));
}

// Whether a launch may wait. Not in a capture, nor in a thread without a context: Python helps these, launch by launch.
bool may_queue(const LaunchFunctions& driver, std::int64_t stream) {
  void* context = nullptr;
  int capturing = 0;
  return driver.run && !reinterpret_cast<Context>(driver.context)(&context) && context &&
         !reinterpret_cast<Capturing>(driver.capturing)(reinterpret_cast<void*>(stream), &capturing) && !capturing;
}

// Launch what is queued. False with an error set.
bool flush() {
  Queue& q = queue;
  if (!q.count) return true;
  Graph* graph = graph_of(q);
  int refused = 0;
  Py_BEGIN_ALLOW_THREADS
  if (!graph || !launch_graph(q, *graph))
    for (std::size_t k = 0; !refused && k < q.count; ++k) refused = launch_one(q.driver, q.stream, q.launches[k]);
  Py_END_ALLOW_THREADS
  if (graph) graph->busy = false;
  q.count = 0, q.bytes = 0;
  std::vector<PyObject*> held;
  held.swap(q.held);
  for (PyObject* tensor : held) Py_DECREF(tensor);
  if (refused) PyErr_Format(PyExc_RuntimeError, "the driver refuses to launch a kernel: error %d", refused);
  return !refused;
}

}  // namespace

KernelLaunch* next_launch(const LaunchFunctions& driver, std::int64_t stream) {
  Queue& q = queue;
  if (q.count && (q.stream != stream || q.driver.launch != driver.launch) && !flush()) return nullptr;
  if (!q.launches) q.launches = std::make_unique<KernelLaunch[]>(LONGEST);
  if (!q.count) q.driver = driver, q.stream = stream, q.waits = q.open && may_queue(driver, stream);
  return &q.launches[q.count];
}

int launch_next(PyObject* const* tensors, std::size_t count) {
  Queue& q = queue;
  if (!q.waits) {
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = launch_one(q.driver, q.stream, q.launches[0]);
    Py_END_ALLOW_THREADS
    return refused;
  }
  ++q.count;
  for (std::size_t k = 0; k < count; ++k) {
    q.held.push_back(Py_NewRef(tensors[k]));
    q.bytes += bytes_of(tensors[k]);
  }
  return q.count < LONGEST && q.bytes < MOST_BYTES || flush() ? 0 : -1;
}

void open_queue() { queue.open = true; }

bool close_queue() {
  queue.open = false;
  return flush();
}

}  // namespace fusewright::native
