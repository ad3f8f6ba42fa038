"""Turn kernels into callables: one LLVM module per call of `compile_kernels`, LLJIT, object code that can be
stored. `codegen` is imported when something is emitted: code from the plan cache is only linked.

A kernel's symbol is `fw_` and its hash, so equal kernels of a process are compiled and linked
once, and object code from the disk cache is found by the same name. Code lives as long as somebody holds its
`Linked` module, as every launcher does: a model's code is unloaded with the model."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusewright_cpu.run.launch import Launcher
from fusewright_cpu.run.linker import Linked, Linker
from fusewright_cpu.run.pool import pool_symbols, symbol_address
from fusewright_cpu.run.sources import Source, hash_of, symbol_name
from fusewright_cpu.target import host_target, target_machine

ALWAYS = ("memcpy", "memset", "memmove")
"""Functions that code generation may call on its own."""


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """Code of several kernels. `linked` maps a kernel's hash to the code that holds it.

    `object_bytes` is the object code of the kernels that were new to the process when this module was made
    (empty when none was), and `symbols` the outside functions it needs."""

    linked: Mapping[str, Linked]
    object_bytes: bytes
    symbols: tuple[str, ...]

    @property
    def addresses(self) -> dict[str, int]:
        """Return the C function of each kernel by hash (see `entry`), valid while this object or a launcher is held."""
        return {h: module.addresses[h] for h, module in self.linked.items()}

    def launcher(self, kernel: Source) -> Launcher:
        """Return a Python callable for `kernel`, which must be one of this module's."""
        h = hash_of(kernel)
        return Launcher(kernel, self.linked[h].addresses[h], self.linked[h])


class _Process:
    """The process's JIT. It forgets code that nobody holds; the addresses of held code never change."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.machine = target_machine(host_target())
        self.linker = Linker(self.machine)
        self.loaded: weakref.WeakValueDictionary[str, Linked] = weakref.WeakValueDictionary()

    def link(self, code: bytes, hashes: Iterable[str], symbols: Iterable[str]) -> Linked:
        """Load object code that holds the kernels `hashes`. Raise LinkError when that fails, KeyError when this process lacks
        one of `symbols`."""
        imports = {s: symbol_address(s) for s in sorted({*symbols, *ALWAYS})}
        linked = self.linker.link(code, {h: symbol_name(h) for h in hashes}, imports)
        self.loaded.update(dict.fromkeys(linked.addresses, linked))
        return linked


_CREATION = threading.Lock()


def _process() -> _Process:
    with _CREATION:
        return _only_process()


@functools.cache
def _only_process() -> _Process:
    return _Process()


def compile_kernels(kernels: Sequence[Source]) -> CompiledModule:
    """Compile what this process does not have yet, in one module. Raise UnsupportedKernel when this machine
    cannot run a kernel, LinkError when its code cannot be loaded."""
    from fusewright_cpu.run.codegen import kernels_to_text, to_object

    by_hash = {hash_of(k): k for k in kernels}
    process = _process()
    with process.lock:
        known = _held(process, by_hash)
        new = {h: k for h, k in by_hash.items() if h not in known}
        if not new:
            return CompiledModule(known, b"", ())
        text, symbols = kernels_to_text(new, host_target(), bool(pool_symbols()))
        linked = process.link(to_object(text, process.machine), new, symbols)
        return CompiledModule({h: known.get(h, linked) for h in by_hash}, linked.code, symbols)


def _held(process: _Process, hashes: Iterable[str]) -> dict[str, Linked]:
    """Return and hold those of the kernels that are loaded: another thread may drop its own hold at any time."""
    return {h: linked for h in hashes if (linked := process.loaded.get(h)) is not None}


def images(hashes: Iterable[str]) -> list[Linked]:
    """Return the code that holds these kernels of the process, each once. Raise KeyError for a kernel that is not loaded."""
    process = _process()
    with process.lock:
        found = [process.loaded[h] for h in hashes]
    return list({id(i): i for i in found}.values())


def load_module(object_bytes: bytes, hashes: Sequence[str], symbols: Sequence[str]) -> CompiledModule:
    """Link stored object code. The caller has checked that `host_target().fingerprint` is the one it was
    made for.

    Raise LinkError when it does not fit or lacks a kernel; KeyError when this process lacks one of `symbols`.
    """
    process = _process()
    with process.lock:
        known = _held(process, hashes)
        missing = [h for h in hashes if h not in known]
        linked = process.link(object_bytes, missing, symbols) if missing else None
        found = {h: module for h in hashes if (module := known.get(h, linked)) is not None}
        return CompiledModule(found, object_bytes, tuple(symbols))
