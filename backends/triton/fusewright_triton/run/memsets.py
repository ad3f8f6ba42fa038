"""Replace memset nodes of a captured CUDA graph by kernel nodes.

cuBLASLt clears counters before some products, and cuDNN before attention. The driver launches a graph of kernels alone in one
go, however many there are; every memset node among them costs the host a microsecond more per launch.

Source: CUDA Driver API, graph management; PTX ISA.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from fusewright_triton.run.driver import DriverError, driver

MEMSET = 2
"""CU_GRAPH_NODE_TYPE_MEMSET."""

THREADS = 256
WORDS = 4
"""Words that a thread stores: cuDNN clears weight gradients of megabytes, where blocks of one word a thread start too slowly."""

FILL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 start, .param .u32 word, .param .u32 words)
{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [start];
    ld.param.u32 %r1, [word];
    ld.param.u32 %r2, [words];
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    shl.b32 %r6, %r6, 2;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra done;
    sub.u32 %r7, %r2, %r6;
    mul.wide.u32 %d2, %r6, 4;
    add.s64 %d3, %d1, %d2;
    cvt.u32.u64 %r8, %d3;
    and.b32 %r8, %r8, 15;
    setp.lt.u32 %p2, %r7, 4;
    setp.ne.or.u32 %p2, %r8, 0, %p2;
    @%p2 bra each;
    st.global.v4.u32 [%d3], {%r1, %r1, %r1, %r1};
    ret;
each:
    st.global.u32 [%d3], %r1;
    setp.lt.u32 %p3, %r7, 2;
    @%p3 bra done;
    st.global.u32 [%d3+4], %r1;
    setp.lt.u32 %p3, %r7, 3;
    @%p3 bra done;
    st.global.u32 [%d3+8], %r1;
    setp.lt.u32 %p3, %r7, 4;
    @%p3 bra done;
    st.global.u32 [%d3+12], %r1;
done:
    ret;
}
"""


class Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of `size` bytes each."""

    _fields_ = (
        ("start", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32), ("params", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


def words_of(m: Memset) -> tuple[int, int] | None:
    """Return a memset as (word, count) of 32-bit words; None if it is not expressible in words."""
    total = m.width * m.size
    if m.height != 1 or m.size not in (1, 2, 4) or total % 4 or m.start % 4 or not 0 < total // 4 < 1 << 31:
        return None
    value = m.value & ((1 << 8 * m.size) - 1)
    return int.from_bytes(value.to_bytes(m.size, "little") * (4 // m.size), "little"), total // 4


def dims(words: int) -> tuple[ctypes.Array[ctypes.c_uint32], ctypes.Array[ctypes.c_uint32]]:
    """Return the grid and the block that fill so many words."""
    three = ctypes.c_uint32 * 3
    return three(-(-words // (WORDS * THREADS)), 1, 1), three(THREADS, 1, 1)


@functools.cache
def _fill(device: int) -> int:
    """Return the fill kernel for one device, or 0 if the driver cannot assemble it."""
    try:
        return driver("cuda").load(FILL, "fill", 0)
    except DriverError:
        return 0


def call(name: str, *args: Any) -> None:
    """Call a driver function by its name."""
    d = driver("cuda")
    d.call(name, getattr(d.lib, name), *args)


def listed(name: str, of: int) -> list[int]:
    """Return the items that a driver function lists; it is first asked for their number."""
    count = ctypes.c_size_t()
    call(name, ctypes.c_void_p(of), None, ctypes.byref(count))
    found = (ctypes.c_void_p * max(count.value, 1))()
    if count.value:
        call(name, ctypes.c_void_p(of), found, ctypes.byref(count))
    return [int(h or 0) for h in found[: count.value]]


class _Graph:
    """A CUgraph that is not yet instantiated."""

    def __init__(self, handle: int, fill: int) -> None:
        self.handle, self.fill = ctypes.c_void_p(handle), ctypes.c_void_p(fill)

    def replaced(self, handle: int) -> bool:
        """Replace a memset node by a kernel; return whether the node was one."""
        node, kind, memset = ctypes.c_void_p(handle), ctypes.c_int(), Memset()
        call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != MEMSET:
            return False
        call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
        found = words_of(memset)
        if found is None:
            return False
        before, after = (listed(f"cuGraphNodeGet{what}", handle) for what in ("Dependencies", "DependentNodes"))
        new = self.added(memset.start, *found, before)
        if after:
            sources, targets = [int(new.value or 0)] * len(after), after
            call(
                "cuGraphAddDependencies", self.handle, _array(sources), _array(targets), ctypes.c_size_t(len(after))
            )
        call("cuGraphDestroyNode", node)
        return True

    def added(self, start: int, word: int, words: int, before: Sequence[int]) -> ctypes.c_void_p:
        """Add a kernel node that fills memory after the nodes `before`."""
        arguments = (ctypes.c_uint64(start), ctypes.c_uint32(word), ctypes.c_uint32(words))
        addresses = _array([ctypes.addressof(a) for a in arguments])
        grid, block = dims(words)
        launch = KernelParameters(self.fill, grid, block, 0, ctypes.cast(addresses, ctypes.c_void_p))
        new = ctypes.c_void_p()
        count = ctypes.c_size_t(len(before))
        call(
            "cuGraphAddKernelNode_v2", ctypes.byref(new), self.handle, _array(before), count, ctypes.byref(launch)
        )
        return new


def _array(values: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(values), 1))(*values)


def as_kernels(graph: int, device: int) -> int:
    """Replace the memset nodes of a graph (a CUgraph) that is not yet instantiated, and return their number. Raise RuntimeError
    when the driver refuses midway, which leaves the graph unusable."""
    fill = _fill(device)
    if not fill:
        return 0
    g = _Graph(graph, fill)
    return sum(map(g.replaced, listed("cuGraphGetNodes", graph)))
