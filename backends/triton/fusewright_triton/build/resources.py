"""The multiprocessor resources that a kernel's machine code uses, read from the code itself without a GPU or a driver.

NVIDIA: section `.nv.info` of the cubin, which the CUDA binary utilities print (`cuobjdump -elf`). AMD: the metadata of the
code object, as LLVM's AMDGPU usage guide defines it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fusewright_triton.build.binaries import Binary
from fusewright_triton.target import Target

_REGISTERS, _FRAME = 0x2F, 0x11
_WITH_VALUE = 4
"""The format of an attribute whose value follows it in the section."""


@dataclass(frozen=True)
class Resources:
    """Registers of one thread (32 bits each), bytes of a thread's local memory (off the chip, for registers that spill),
    bytes of shared memory (LDS) of one block."""

    registers: int
    scratch: int
    shared: int


def resources(b: Binary, t: Target) -> Resources:
    """Read the resources of a binary. Raise ValueError for one without them (one from the cache has no listing)."""
    return _nvidia(b) if t.triton == "cuda" else _amd(b)


def over_limits(b: Binary, t: Target) -> list[str]:
    """Describe each limit of the target that a binary exceeds; empty when it can be launched."""
    used = resources(b, t)
    facts = {
        f"{b.threads} threads in a block": (b.threads, 1024),
        f"{used.shared} bytes of shared memory": (used.shared, t.shared),
        f"{used.registers} registers a thread": (used.registers, t.thread_registers),
        f"{used.registers * b.threads} registers in a block": (used.registers * b.threads, t.block_registers),
    }
    return [f"{what}, {t.arch} has {limit}" for what, (value, limit) in facts.items() if value > limit]


def _nvidia(b: Binary) -> Resources:
    found: dict[int, int] = {}
    for name, data in _sections(b.code):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(data):
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == _WITH_VALUE:
                if attribute in (_REGISTERS, _FRAME):  # one per function; the kernel's own includes its callees
                    _, value = struct.unpack_from("<II", data, at)
                    found[attribute] = max(found.get(attribute, 0), value)
                at += size
    if _REGISTERS not in found:
        raise ValueError(f"{b.name}: the cubin does not say how many registers it takes")
    return Resources(found[_REGISTERS], found.get(_FRAME, 0), b.shared)


def _sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of an ELF64 file's sections."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    count, names = struct.unpack_from("<HH", code, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", code, table + 64 * i) for i in range(count)]
    for name, kind, _, _, offset, size in headers:
        start = headers[names][4] + name
        # a section without bits has a size but no bytes in the file
        yield code[start : code.index(b"\0", start)].decode(), b"" if kind == 8 else code[offset : offset + size]


def _amd(b: Binary) -> Resources:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", b.listing)
        if found is None:
            raise ValueError(f"{b.name}: the code object does not say its {name}")
        return int(found[1])

    # Triton requests LDS at launch; the code object's own is fixed
    shared = max(b.shared, field("group_segment_fixed_size"))
    return Resources(field("vgpr_count"), field("private_segment_fixed_size"), shared)
