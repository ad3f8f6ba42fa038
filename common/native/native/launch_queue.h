// Device kernels that are launched one after the other, given to the driver as one graph: a launch costs the host 4 us, a graph's
// kernel with new arguments 0.4 to 0.9 and a graph of eight 5 to 10 (docs/studies/replay.md).
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace fusewright::native {

constexpr std::size_t MOST_ARGUMENT_BYTES = 4096, MOST_PARAMETERS = 128;  // of a kernel; Python launches those with more

// Addresses of the driver's functions: cuLaunchKernel or hipModuleLaunchKernel, then, to queue launches (else 0), cuCtxGetCurrent,
// cuStreamIsCapturing, cuGraphCreate, cuGraphAddKernelNode_v2, cuGraphInstantiateWithFlags, cuGraphExecKernelNodeSetParams_v2 and
// cuGraphLaunch.
struct LaunchFunctions {
  std::uintptr_t launch, context, capturing, create, add, instantiate, set, run;
};

// A kernel of one-dimensional blocks, and memory for its arguments.
struct KernelLaunch {
  std::uintptr_t function;
  unsigned blocks, threads, shared;
  void* parameters[MOST_PARAMETERS];  // point into the arguments
  alignas(128) char arguments[MOST_ARGUMENT_BYTES];  // tensor descriptors ask for 64
};

// This thread's next launch, to be filled in. What is queued for another stream or driver is launched first. Null with an error set.
KernelLaunch* next_launch(const LaunchFunctions& driver, std::int64_t stream);

// Launch what `next_launch` gave, or queue it if the queue is open; then `tensors`, which it reads or writes, are kept until it is
// launched, so that their memory goes to nobody else before. The driver's error code, or -1 with an error set.
int launch_next(PyObject* const* tensors, std::size_t count);

// Queue this thread's launches until `close_queue`. In between, nothing but launches may put work on the stream or read results.
void open_queue();

// Launch what is queued, and queue nothing any more. False with an error set.
bool close_queue();

}  // namespace fusewright::native
