"""Run kernels in an emulated AArch64 Python for `emulator.Emulator`: each line is a request `library symbol file threads`,
answered with the kernel's result. Imports only llvmlite.

A library is object code `NAME.o` with `NAME.json`, the symbols that it defines and imports. The file holds a count of words, for
each word a size in bytes (0: the word is a number) and the number or the buffer's offset in the file, then the buffers. Each buffer
is mapped so that it ends right before an inaccessible guard page.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from ci.aarch64.link import CALLED, LINKER, address, module

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None)
LIBC.mmap.restype, LIBC.mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *[ctypes.c_size_t] * 5)
LIBC.mprotect.argtypes = LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PRIVATE, _NOWHERE = 0x22, ctypes.c_size_t(-1).value  # MAP_PRIVATE | MAP_ANONYMOUS, and no file


class Team:
    """The thread pool that kernels call; it runs one thread after another."""

    size = 1
    me = 0

    @classmethod
    def functions(cls) -> Mapping[str, Any]:
        """Return libgomp's functions as C functions."""

        def parallel(body: int, data: int, threads: int, flags: int) -> None:
            cls.size, run = threads, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
            for cls.me in range(threads):
                run(data)
            cls.size, cls.me = 1, 0

        number, pointer = ctypes.CFUNCTYPE(ctypes.c_int), ctypes.c_void_p
        return {
            "omp_get_thread_num": number(lambda: cls.me),
            "omp_get_num_threads": number(lambda: cls.size),
            "GOMP_parallel": ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_uint, ctypes.c_uint)(parallel),
        }


class Guest:
    """The libraries linked so far."""

    def __init__(self, marked: str) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small", jit=True)
        self.linker = module(LINKER).Linker(machine)
        self.team, self.linked = Team.functions(), dict[str, Any]()
        words = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
        self.marked = ctypes.CFUNCTYPE(ctypes.c_int64, *words)(self.code(marked)["marked"])

    def code(self, library: str) -> Mapping[str, int]:
        """Return the addresses of a library's functions."""
        if library not in self.linked:
            index = json.loads(Path(f"{library}.json").read_text())
            theirs = {s: address(LIBC, s) for s in {*index["imports"], *CALLED} - {*self.team}}
            imports = {**theirs, **{s: ctypes.cast(f, ctypes.c_void_p).value or 0 for s, f in self.team.items()}}
            code = Path(f"{library}.o").read_bytes()
            self.linked[library] = self.linker.link(code, {s: s for s in index["symbols"]}, imports)
        addresses: Mapping[str, int] = self.linked[library].addresses
        return addresses

    def answer(self, library: str, symbol: str, file: str, threads: int) -> int:
        """Run a kernel and return its result. The file's buffers are changed in place."""
        kernel, data = self.code(library)[symbol], bytearray(Path(file).read_bytes())
        count = struct.unpack_from("<q", data)[0]
        heads = [struct.unpack_from("<qq", data, 8 + 16 * k) for k in range(count)]
        held = [Guarded(bytes(data[at : at + size])) if size else None for size, at in heads]
        words = [at if g is None else g.start for g, (_, at) in zip(held, heads, strict=True)]
        result = int(self.marked(kernel, (ctypes.c_int64 * (count + 1))(*words, 0), threads))
        for g, (size, at) in zip(held, heads, strict=True):
            if g is not None:
                data[at : at + size] = ctypes.string_at(g.start, size)
                g.free()
        Path(file).write_bytes(data)
        return result


class Guarded:
    """Bytes that end right before an inaccessible guard page."""

    def __init__(self, content: bytes) -> None:
        self.room = -(-len(content) // PAGE) * PAGE + PAGE
        self.base = LIBC.mmap(None, self.room, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, _NOWHERE, 0)
        assert LIBC.mprotect(self.base + self.room - PAGE, PAGE, 0) == 0, "no page can be guarded"
        self.start = self.base + self.room - PAGE - len(content)
        ctypes.memmove(self.start, content, len(content))

    def free(self) -> None:
        LIBC.munmap(self.base, self.room, 0)


def main(marked: str) -> None:
    guest = Guest(marked)
    for line in sys.stdin:
        library, symbol, file, threads = line.split()
        print(guest.answer(library, symbol, file, int(threads)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
