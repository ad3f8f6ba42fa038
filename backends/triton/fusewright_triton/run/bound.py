"""Lay out the arguments of a kernel for the driver: in memory, in the order of the kernel's parameters."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.errors import without_memory
from fusewright_triton.build.binaries import Binary
from fusewright_triton.run.driver import DESCRIPTOR, Driver

SLOT = 8


@dataclass(frozen=True, eq=False, slots=True)
class TensorDescriptor:
    """A matrix with dense rows that a kernel reads or writes by blocks of this size, through a tensor descriptor. Address and
    row stride are multiples of 16 bytes."""

    tensor: torch.Tensor
    block: tuple[int, ...]


@dataclass(slots=True)
class Bound:
    """A function loaded for one device, with memory for its arguments in which everything but addresses is filled in.

    `pointers` lists the arguments (by position) whose addresses `place` writes, and where; `descriptors` those for which it
    writes a descriptor, unless their addresses are unchanged.
    """

    function: int
    threads: int
    shared: int
    launch: Callable[..., int]
    memory: ctypes.Array[ctypes.c_char]
    params: ctypes.Array[ctypes.c_void_p]
    pointers: list[tuple[int, int]]
    descriptors: list[_Descriptor]

    def place(self, args: Sequence[Any]) -> None:
        """Write the addresses of `args` into the memory."""
        for k, at in self.pointers:
            struct.pack_into("<Q", self.memory, at, _address(args[k]))
        for d in self.descriptors:
            d.place(args[d.argument].tensor)


@dataclass(slots=True)
class _Descriptor:
    argument: int
    at: int
    how: Mapping[str, Any]
    driver: Driver
    address: int = -1

    def place(self, t: torch.Tensor) -> None:
        address = _address(t)
        if address != self.address:
            self.driver.describe(self.at, address, t.shape, t.stride(), self.how)
            self.address = address


def _address(a: torch.Tensor | TensorDescriptor) -> int:
    t = a.tensor if isinstance(a, TensorDescriptor) else a
    return t.data_ptr() or without_memory(t)


def bind(code: Binary, function: int, args: Sequence[Any], compiled_in: Sequence[bool], d: Driver) -> Bound:
    """Bind the arguments of a function that is loaded for torch's current device. Those that are `compiled_in` are no parameters.

    With hardware descriptors a descriptor is one parameter, followed by sizes (i32) and strides (i64); without them, an
    address, sizes, strides (i64) and a flag replace it. Two scratch memory addresses, which no kernel uses, end the list.
    """
    fields: list[
        tuple[str, Any]
    ] = []  # struct's letter and the value; "" for a descriptor; "Q" with the argument's position
    metas = iter(code.descriptors)
    descriptors, pointers = [], []
    for k, a in enumerate(args):
        if compiled_in[k]:
            continue
        if isinstance(a, TensorDescriptor):
            shape, stride = a.tensor.shape, a.tensor.stride()
            how = next(metas, None)
            if how is not None:
                descriptors.append((k, len(fields), how))
                fields.append(("", None))
            else:
                pointers.append((k, len(fields)))
                fields += [("Q", 0), *(("q", n) for n in (*shape, *stride)), ("B", 0)]
            fields += [*(("i", n) for n in shape), *(("q", n) for n in stride)]
        elif isinstance(a, torch.Tensor):
            pointers.append((k, len(fields)))
            fields.append(("Q", 0))
        elif isinstance(a, float):
            fields.append(("f", a))
        else:
            fields.append(("i" if -(1 << 31) <= a < 1 << 31 else "q", a))
    fields += [("Q", 0)] * 2
    return _laid_out(code, function, fields, pointers, descriptors, d)


def _laid_out(
    code: Binary,
    function: int,
    fields: Sequence[tuple[str, Any]],
    pointers: Sequence[tuple[int, int]],
    descriptors: Sequence[tuple[int, int, Mapping[str, Any]]],
    d: Driver,
) -> Bound:
    """Lay out memory with the descriptors first, which must be aligned, and then a slot for each other parameter."""
    first = len(descriptors) * DESCRIPTOR
    memory = ctypes.create_string_buffer(first + SLOT * len(fields) + DESCRIPTOR)
    start = -ctypes.addressof(memory) % DESCRIPTOR
    at = [start + first + SLOT * k for k in range(len(fields))]
    for n, (_, k, _) in enumerate(descriptors):
        at[k] = start + n * DESCRIPTOR
    for place, (letter, value) in zip(at, fields, strict=True):
        if letter:
            struct.pack_into(f"<{letter}", memory, place, value)
    base = ctypes.addressof(memory)
    return Bound(
        function, code.threads, code.shared, d.launcher(), memory,
        (ctypes.c_void_p * len(fields))(*(base + place for place in at)),
        [(k, at[field]) for k, field in pointers],
        [_Descriptor(k, base + at[field], how, d) for k, field, how in descriptors],
    )  # fmt: skip
