"""Copies inside a captured CUDA graph, of inputs into its memory and of results out of it, whose outer address each call sets.

A copy beside the graph costs the host as much as a launch, 3 to 4 us; a node with a new address 0.6 (docs/studies/replay.md).

Source: CUDA Driver API, stream and graph management.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from fusewright.plan.native import CopyNode
from fusewright_triton.run.driver import DriverError, driver


class _Memcpy(ctypes.Structure):
    """CUDA_MEMCPY3D: of each side position, level of detail, kind of memory, addresses, array, pitch and height."""

    _fields_ = (
        ("source_at", ctypes.c_size_t * 4), ("source_kind", ctypes.c_int), ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64), ("source_array", ctypes.c_void_p * 2), ("source_pitch", ctypes.c_size_t * 2),
        ("target_at", ctypes.c_size_t * 4), ("target_kind", ctypes.c_int), ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64), ("target_array", ctypes.c_void_p * 2), ("target_pitch", ctypes.c_size_t * 2),
        ("extent", ctypes.c_size_t * 3),
    )  # fmt: skip


def copy_in(buffers: Mapping[int, torch.Tensor]) -> dict[int, CopyNode]:
    """Capture copies into these dense buffers on the current stream, from addresses that are set later."""
    return {k: _copy(t, _Memcpy.source.offset) for k, t in buffers.items()}


def copy_out(results: Sequence[torch.Tensor]) -> list[tuple[CopyNode, torch.Tensor]]:
    """Capture copies of these dense tensors to addresses that are set later."""
    return [(_copy(t, _Memcpy.target.offset), t) for t in results]


def functions() -> tuple[int, int, int]:
    """Return the addresses of the driver's functions that launch a graph, set a copy and set a kernel's arguments."""
    d = driver("cuda")
    names = "cuGraphLaunch", "cuGraphExecMemcpyNodeSetParams", "cuGraphExecKernelNodeSetParams_v2"
    launch, copy, kernel = map(d.address, names)
    return launch, copy, kernel


def context() -> int:
    """Return the handle of the current context."""
    found = ctypes.c_void_p()
    d = driver("cuda")
    d.call("find the context", d.lib.cuCtxGetCurrent, ctypes.byref(found))
    return found.value or 0


def _copy(inner: torch.Tensor, outer: int) -> CopyNode:
    """Capture a copy of `inner`, or to it, where `outer` is the offset of the other address."""
    count = inner.numel() * inner.element_size()
    if not count:
        return CopyNode(0, bytes(ctypes.sizeof(_Memcpy)), outer)
    scratch = torch.empty(count, dtype=torch.uint8, device=inner.device)  # in the graph's pool, and never read or written
    to, source = (inner, scratch) if outer == _Memcpy.source.offset else (scratch, inner)
    d, stream = driver("cuda"), torch.cuda.current_stream().cuda_stream
    addresses = (ctypes.c_uint64(t.data_ptr()) for t in (to, source))
    d.call("capture a copy", d.lib.cuMemcpyDtoDAsync_v2, *addresses, ctypes.c_size_t(count), ctypes.c_void_p(stream))
    node = ctypes.c_void_p(last_node(stream))
    made = _Memcpy()
    d.call("read a copy", d.lib.cuGraphMemcpyNodeGetParams, node, ctypes.byref(made))
    if (made.target, made.source) != (to.data_ptr(), source.data_ptr()):
        raise DriverError("the driver describes a copy in another way than its interface says")
    return CopyNode(node.value or 0, bytes(made), outer)


def last_node(stream: int) -> int:
    """Return the node that a stream's capture has just added; 0 if it is empty."""
    status, identity, graph, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    d = driver("cuda")
    d.call(
        "find what was captured", d.lib.cuStreamGetCaptureInfo_v2, ctypes.c_void_p(stream), ctypes.byref(status),
        ctypes.byref(identity), ctypes.byref(graph), ctypes.byref(nodes), ctypes.byref(count),
    )  # fmt: skip
    if count.value > 1:
        raise DriverError(f"a capture ends with {count.value} nodes side by side")
    return int(nodes[0] or 0) if count.value else 0
