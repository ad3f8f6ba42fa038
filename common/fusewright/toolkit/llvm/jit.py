"""From kernels to callables: one LLVM module per call of `compile_kernels`, LLJIT, object code that can be
stored.

A kernel's symbol is `fw_` and its hash, so equal kernels of a process are compiled and linked
once, and object code from the disk cache is found by the same name."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import llvmlite.binding as llvm

from fusewright.toolkit.llvm.entry import new_module
from fusewright.toolkit.llvm.launch import Launcher
from fusewright.toolkit.llvm.pool import pool_symbols, symbol_address
from fusewright.toolkit.llvm.sources import Source, emit, hash_of
from fusewright.toolkit.llvm.target import CpuTarget, host_target, target_machine

ALWAYS = ("memcpy", "memset", "memmove")
"""Functions that code generation may call on its own."""


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """Code of several kernels. `addresses` maps a kernel's hash to its C function (see `entry`).

    `object_bytes` is the object code of the kernels that were new to the process when this module was made
    (empty when none was), and `symbols` the outside functions it needs; both go to the disk cache."""

    addresses: Mapping[str, int]
    object_bytes: bytes
    symbols: tuple[str, ...]

    def launcher(self, kernel: Source) -> Launcher:
        """A Python callable for `kernel`, which must be one of this module's."""
        return Launcher(kernel, self.addresses[hash_of(kernel)])


@dataclass(frozen=True, slots=True)
class Image:
    """Linked object code: the kernels in it, and the outside symbols that it needs."""

    code: bytes
    hashes: tuple[str, ...]
    symbols: tuple[str, ...]


class _Process:
    """The process's JIT: linked code lives as long as the process, so addresses never go stale."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.machine = target_machine(host_target())
        self.lljit = llvm.create_lljit_compiler(self.machine)
        self.names = itertools.count()
        self.trackers: list[object] = []
        self.addresses: dict[str, int] = {}
        self.images: dict[str, Image] = {}

    def link(self, code: bytes, hashes: Iterable[str], symbols: Iterable[str]) -> None:
        wanted = list(hashes)
        builder = llvm.JITLibraryBuilder().add_object_img(code)
        for s in sorted({*symbols, *ALWAYS}):
            builder.import_symbol(s, symbol_address(s))
        for h in wanted:
            builder.export_symbol(symbol_name(h))
        tracker = builder.link(self.lljit, f"fusewright{next(self.names)}")
        self.trackers.append(tracker)
        image = Image(code, tuple(wanted), tuple(symbols))
        for h in wanted:
            self.addresses[h] = tracker[symbol_name(h)]
            self.images[h] = image


_CREATION = threading.Lock()


def _process() -> _Process:
    with _CREATION:
        return _only_process()


@functools.cache
def _only_process() -> _Process:
    return _Process()


def symbol_name(kernel_hash: str) -> str:
    """The symbol of a kernel in object code."""
    return f"fw_{kernel_hash[:32]}"


def kernels_to_text(kernels: Mapping[str, Source], target: CpuTarget, parallel: bool) -> tuple[str, tuple[str, ...]]:
    """LLVM IR of the kernels (by hash) for any target, and the outside symbols that it needs."""
    module = new_module(target)
    for h, kernel in kernels.items():
        emit(module, kernel, symbol_name(h), parallel)
    return module.render(), tuple(sorted(module.symbols))


def to_object(text: str, machine: llvm.TargetMachine) -> bytes:
    """Object code of a module. The code is vectorised and its invariants are hoisted already: three passes
    give the speed of the O2 pipeline at a tenth of its time."""
    module = llvm.parse_assembly(text)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
    passes = llvm.create_new_function_pass_manager()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    code: bytes = machine.emit_object(module)
    return code


def compile_kernels(kernels: Sequence[Source]) -> CompiledModule:
    """Compiles what this process does not have yet, in one module. UnsupportedKernel when this machine
    cannot run one."""
    by_hash = {hash_of(k): k for k in kernels}
    process = _process()
    with process.lock:
        new = {h: k for h, k in by_hash.items() if h not in process.addresses}
        code, symbols = b"", tuple[str, ...]()
        if new:
            text, symbols = kernels_to_text(new, host_target(), bool(pool_symbols()))
            code = to_object(text, process.machine)
            process.link(code, new, symbols)
        return CompiledModule({h: process.addresses[h] for h in by_hash}, code, symbols)


def images(hashes: Iterable[str]) -> list[Image]:
    """The object code that holds these kernels of the process, each once. KeyError for a kernel that is not loaded."""
    process = _process()
    with process.lock:
        found = [process.images[h] for h in hashes]
    return list({id(i): i for i in found}.values())


def load_module(object_bytes: bytes, hashes: Sequence[str], symbols: Sequence[str]) -> CompiledModule:
    """Links stored object code. The caller has checked that `host_target().fingerprint` is the one it was
    made for.

    RuntimeError when a kernel is missing in it; KeyError when this process lacks one of `symbols`.
    """
    process = _process()
    with process.lock:
        missing = [h for h in hashes if h not in process.addresses]
        if missing:
            process.link(object_bytes, missing, symbols)
        return CompiledModule({h: process.addresses[h] for h in hashes}, object_bytes, tuple(symbols))
