"""Load object code into executable memory and unload it again. Needs only llvmlite, so that the linker can be tested on
machines where torch does not run (`ci/aarch64/link.py`).

LLVM has two linkers. JITLink, used here, lays a module out in one piece and reaches other libraries through its own
stubs. RuntimeDyld, llvmlite's default on ELF, maps section by section, and aborts the process if two sections end up
more than 2 GiB apart, which happens once the address space is heavily used.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

GENERATION = 64
"""Modules linked by one LLJIT: an unloaded module leaves 10 KB of names in its LLJIT, which are freed with the LLJIT."""


class LinkError(RuntimeError):
    """Code that cannot be linked into this process; the caller leaves those ops to eager."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Linked:
    """Object code in executable memory, unloaded when nobody holds this object any more. `addresses` are those of its functions,
    by the keys that `link` was given, and `imports` the outside functions that it needs."""

    code: bytes
    addresses: Mapping[str, int]
    imports: tuple[str, ...]
    tracker: object


class Linker:
    """Links for one machine. It has no lock: callers must take turns."""

    def __init__(self, machine: llvm.TargetMachine) -> None:
        self._machine = machine
        self._names = itertools.count()
        self._lljit: llvm.orcjit.LLJIT | None = None

    def link(self, code: bytes, exports: Mapping[str, str], imports: Mapping[str, int]) -> Linked:
        """Load object code that defines the symbols `exports` (the values) and may call `imports`. Raise LinkError when it does
        not define them, is damaged, or memory runs out."""
        builder = llvm.JITLibraryBuilder().add_object_img(code)
        for name, address in imports.items():
            builder.import_symbol(name, address)
        for symbol in exports.values():
            builder.export_symbol(symbol)
        number = next(self._names)
        try:
            if self._lljit is None or number % GENERATION == 0:
                self._lljit = llvm.create_lljit_compiler(self._machine, use_jit_link=True)
            tracker = builder.link(self._lljit, f"fusewright{number}")
        except RuntimeError as e:
            raise LinkError(f"machine code cannot be linked: {e}") from e
        return Linked(code, {k: tracker[symbol] for k, symbol in exports.items()}, tuple(imports), tracker)
