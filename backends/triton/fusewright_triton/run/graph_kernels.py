"""Kernels of a captured CUDA graph that write results where each call allocates them, or take numbers that each call gives.

A kernel beside the graph costs the host 10 us with all around it, a node with new arguments a quarter of one
(docs/studies/replay.md). Where the arguments of a library's kernel hold an address is documented nowhere, so the kernels are
captured twice, with results in different places: a word that differs by as much as a result's address is an address in it. Where
our own kernels take a number is known (`note`).

Source: CUDA Driver API, graph management and execution control.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusewright.interface import Number
from fusewright.plan.native import KernelNode
from fusewright_triton.run.driver import driver
from fusewright_triton.run.graph_copies import last_node
from fusewright_triton.run.memsets import MEMSET, KernelParameters, Memset, call, listed

KERNEL = 0
"""CU_GRAPH_NODE_TYPE_KERNEL."""
WORD = 8
ALIGNED = 64
"""Alignment of each argument: that of a tensor descriptor."""
MOST_ARGUMENTS = 256
NO_ARGUMENT = 1
"""CUDA_ERROR_INVALID_VALUE, for an argument that a function does not have."""
END, BUFFER = 0, 1
"""CU_LAUNCH_PARAM_END and CU_LAUNCH_PARAM_BUFFER_POINTER: keys in a list of words that says where arguments lie in one block."""
MOST_WORDS = 8
MOST_NUMBER = (1 << 62) - 1
"""Of a number of 64 bits; kernels may take less."""


class Unknown(RuntimeError):
    """The addresses in the arguments of captured kernels cannot be told."""


@dataclass(frozen=True)
class Captured:
    """A captured kernel or memset: its node, the node's parameters without the arguments, and the bytes of each argument."""

    node: int
    parameters: bytes
    arguments: tuple[bytes, ...]

    def code(self) -> tuple[bytes, list[int]]:
        """All but the values of the arguments."""
        return self.parameters, list(map(len, self.arguments))


def here() -> int:
    """Return the node that the capture on the current stream has just added."""
    return last_node(torch.cuda.current_stream().cuda_stream)


def captured_since(before: int) -> list[Captured]:
    """Return the kernels that were captured one behind another on the current stream after the node `before` (0: all)."""
    found = []
    node = here()
    while node != before:
        found.append(_read(node))
        earlier = listed("cuGraphNodeGetDependencies", node)
        if len(earlier) > 1 or (not earlier and before):
            raise Unknown("kernels were captured side by side")
        node = earlier[0] if earlier else 0
    return found[::-1]


@dataclass(frozen=True)
class Use:
    """A captured kernel that takes a number as its argument `at`, the most that it may be."""

    kernel: Captured
    at: int
    most: int


def note(numbers: Mapping[int, Number], most: int) -> None:
    """Tell these numbers, by the position of an argument, that the kernel which was captured last takes them. Raise `RuntimeError`
    if it would be another kernel for other numbers."""
    if most < 0:
        raise RuntimeError("how many programs a kernel has depends on a number")
    kernel = _read(here())
    for at, n in numbers.items():
        if int.from_bytes(kernel.arguments[at], "little") != n:
            raise Unknown("a kernel's arguments are not in the order of its parameters")
        n.uses.append(Use(kernel, at, most))


def taking(numbers: Mapping[int, Number], first: int) -> tuple[list[KernelNode], list[tuple[int, int]]]:
    """Return the captured kernels that take numbers, which patches count from `first`, once for each use, and of each number its
    place among the arguments and the most that it may be."""
    nodes: list[KernelNode] = []
    ranges = []
    for which, (place, n) in enumerate(numbers.items(), first):
        for u in n.uses:
            node = _laid_out(u.kernel)
            nodes.append(replace(node, patches=((node.places[u.at], which, 0),)))
        ranges.append((place, min((u.most for u in n.uses), default=MOST_NUMBER)))
    return nodes, ranges


def joined(nodes: Sequence[KernelNode]) -> list[KernelNode]:
    """Return each node once, with all its patches."""
    found: dict[int, KernelNode] = {}
    for n in nodes:
        before = found.get(n.node)
        found[n.node] = n if before is None else replace(before, patches=(*before.patches, *n.patches))
    return list(found.values())


def _read(node: int) -> Captured:
    kind, p, memset = ctypes.c_int(), KernelParameters(), Memset()
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value == MEMSET:  # of a library's counters: they stay where they are
        call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(memset))
        return Captured(node, bytes(memset), ())
    if kind.value != KERNEL:
        raise Unknown(f"a node of type {kind.value} was captured")
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(p))
    arguments = tuple(ctypes.string_at(at, size) for at, size in _arguments(p))
    p.extra = p.params = None
    return Captured(node, bytes(p), arguments)


def _arguments(p: KernelParameters) -> list[tuple[int, int]]:
    """Return the address and the size of each argument."""
    layout = _layout(p)
    if p.params:
        addresses = (ctypes.c_uint64 * len(layout)).from_address(p.params)
        return [(at, size) for at, (_, size) in zip(addresses, layout, strict=True)]
    block = _block(p.extra) if p.extra else 0
    if not block and layout:
        raise Unknown("a kernel has its arguments neither one by one nor in a block")
    return [(block + offset, size) for offset, size in layout]


def _block(extra: int) -> int:
    """Return the address of a block of arguments; 0 if there is none."""
    words = (ctypes.c_uint64 * MOST_WORDS).from_address(extra)
    for key, value in zip(words[::2], words[1::2], strict=True):
        if key in (END, BUFFER):
            return int(value) if key == BUFFER else 0
    return 0


def _layout(p: KernelParameters) -> list[tuple[int, int]]:
    """Return the offset and the size of each of a function's arguments."""
    lib = driver("cuda").lib
    of, name = (p.function, "cuFuncGetParamInfo") if p.function else (p.kernel, "cuKernelGetParamInfo")
    ask = getattr(lib, name, None)
    if ask is None:
        raise Unknown(f"the driver is older than {name}")
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while len(found) <= MOST_ARGUMENTS:
        code = ask(ctypes.c_void_p(of), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size))
        if code == NO_ARGUMENT:
            return found
        if code:
            raise Unknown(f"the driver does not describe a kernel's arguments: error {code}")
        found.append((offset.value, size.value))
    raise Unknown(f"a kernel has more than {MOST_ARGUMENTS} arguments")


def naming(
    results: Sequence[torch.Tensor], kernels: Sequence[Captured], moved: Sequence[torch.Tensor], others: Sequence[Captured]
) -> list[KernelNode]:
    """Return those of `kernels` whose arguments name `results`. `others` are the same kernels, captured with the tensors `moved` in
    the place of the results. Raise `Unknown` if they differ in anything else."""
    if [k.code() for k in kernels] != [k.code() for k in others]:
        raise Unknown("kernels differ from one capture to the next")
    spans = [(t.data_ptr(), t.numel() * t.element_size(), u.data_ptr()) for t, u in zip(results, moved, strict=True)]
    nodes = [_node(k, other, spans) for k, other in zip(kernels, others, strict=True)]
    if {which for n in nodes for _, which, _ in n.patches} != set(range(len(results))):
        raise Unknown("no kernel names a result")
    return [n for n in nodes if n.patches]


def _node(kernel: Captured, other: Captured, spans: Sequence[tuple[int, int, int]]) -> KernelNode:
    made, patches = _laid_out(kernel), []
    for start, mine, theirs in zip(made.places, kernel.arguments, other.arguments, strict=True):
        for at in range(0, len(mine), WORD):
            word, moved = mine[at : at + WORD], theirs[at : at + WORD]
            if word != moved:
                patches.append((start + at, *_inside(word, moved, spans)))
    return replace(made, patches=tuple(patches))


def _laid_out(kernel: Captured) -> KernelNode:
    """Return a kernel with its arguments in one block, in which each has at least a word."""
    packed, places = bytearray(), []
    for argument in kernel.arguments:
        packed += bytes(-len(packed) % ALIGNED)
        places.append(len(packed))
        packed += argument.ljust(WORD, b"\0")
    return KernelNode(kernel.node, kernel.parameters, KernelParameters.params.offset, bytes(packed), tuple(places), ())


def _inside(mine: bytes, theirs: bytes, spans: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return which result a word is an address in, and the distance from its start."""
    if len(mine) == WORD:
        here, there = (int.from_bytes(w, "little") for w in (mine, theirs))
        for which, (start, count, moved) in enumerate(spans):
            if 0 <= here - start < count and there - here == moved - start:
                return which, here - start
    raise Unknown("kernels differ in more than the addresses of results")
