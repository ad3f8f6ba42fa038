"""Turn kernels into callables: on a GPU (machine code launched through the driver) or on CPU tensors (the interpreter).

    module = compile_kernels(kernels, target)          # builds, in parallel, what this process does not have yet
    launch = module.launcher(kernel)
    launch(tensors, sizes, scalars)                    # on torch's current stream

A launch allocates nothing, unless programs share rows (then one workspace from torch's stream-ordered
allocator), and waits for nothing, so it can be captured in a CUDA or HIP graph. When a kernel finds an error
(an index out of bounds), the GPU writes it to host memory, and the next launch that can fail,
or `raise_errors()`, raises it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from fusewright.interface import HOST
from fusewright.toolkit.ir import checks
from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.serial import positional, structural_hash
from fusewright.toolkit.ir.types import to_torch
from fusewright.toolkit.rules.offsets import offsets_bound
from fusewright_triton.build.binaries import Built, Code, Variant, Wanted, ask
from fusewright_triton.emit import schedule
from fusewright_triton.emit.emitter import Source, emit
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.run import archive, handwritten
from fusewright_triton.run.launch import GpuLauncher
from fusewright_triton.target import Target

Number = int | float | bool


class Launch(Protocol):
    """Run a kernel on its buffers in order; the caller has allocated the outputs and checked all arguments."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Number] = ()
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """Compiled code of several kernels, by structural hash."""

    kernels: Mapping[str, Kernel]
    sources: Mapping[str, Source]
    make: Callable[[str, Kernel], Launch]

    def launcher(self, kernel: Kernel) -> Launch:
        """Return a callable for `kernel`, which must be one of this module's."""
        return self.by_hash(structural_hash(kernel))

    def by_hash(self, key: str) -> Launch:
        """Return a callable for the kernel of this hash."""
        return self.make(key, self.kernels[key])


class Library:
    """The kernels that this process has for a target. Equal kernels of one configuration are built once. Kernels are stored as
    `positional` returns them: a value under a hash must not contain names that the hash does not cover."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.lock = threading.RLock()
        self.built: dict[tuple[str, schedule.Config, Variant], Built] = {}
        self.asked: dict[tuple[str, schedule.Config, Variant], Future[Built]] = {}
        self.code: dict[str, Future[Code]] = {}
        self.configs: dict[tuple[str, tuple[int, ...]], schedule.Config] = {}

    def ask(self, orders: Mapping[str, Wanted]) -> None:
        """Start building every ordered kernel that is missing; `orders` are keyed by structural hash."""
        with self.lock:
            missing = {at: o for at, o in self._missing(orders).items() if at not in self.asked}
            self.asked.update(zip(missing, ask(list(missing.values()), self.target, self.code), strict=True))

    def get(self, orders: Mapping[str, Wanted]) -> None:
        """Build every ordered kernel that is missing, and wait for them."""
        with self.lock:
            self.ask(orders)
            for at in self._missing(orders):
                self.built[at] = self.asked.pop(at).result()

    def _missing(self, orders: Mapping[str, Wanted]) -> dict[tuple[str, schedule.Config, Variant], Wanted]:
        found = {(key, o.config, o.variant): o for key, o in orders.items()}
        return {at: o for at, o in found.items() if at not in self.built}

    def variant(self, key: str, kernel: Kernel, how: schedule.Config, variant: Variant) -> Built:
        """Return one binary of a kernel, built on first request."""
        with self.lock:
            if (key, how, variant) not in self.built:
                self.get({key: Wanted(kernel, how, variant)})
            return self.built[key, how, variant]

    def config(self, key: str, kernel: Kernel) -> schedule.Config:
        """Return the formula's configuration of a kernel, for the sizes that it was traced with."""
        return self.configs.setdefault((key, kernel.hints), schedule.choose(kernel, self.target))


@functools.cache
def library(target: Target) -> Library:
    """This process's kernels for `target`."""
    return Library(target)


def first_variant(kernel: Kernel) -> Variant:
    """Return the variant to build while only the hints of sizes are known."""
    hints = kernel.hints
    even = bool(kernel.symbols) and all(v % 16 == 0 for v in hints)
    return Variant(offsets_bound(kernel, hints) >= schedule.WIDE, True, even)


def compile_kernels(
    kernels: Sequence[Kernel],
    target: Target,
    configs: Mapping[str, schedule.Config] = MappingProxyType({}),
) -> CompiledModule:
    """Compile `kernels` to machine code. No GPU is touched before the first launch. `configs` are configurations by structural
    hash; the formula gives the others.

    Raise `Unsupported` or `workers.BuildError` when one of them cannot be built."""
    by_hash = {structural_hash(k): positional(k) for k in kernels}
    lib = library(target)
    how = _configs(lib, by_hash, configs)
    lib.get(_orders(by_hash, how))
    return _module(lib, by_hash, how)


def ask_for_kernels(kernels: Mapping[str, Kernel], target: Target) -> None:
    """Start building kernels, by structural hash, that `compile_kernels` will be called with, while this process goes on."""
    by_hash = {key: positional(k) for key, k in kernels.items()}
    lib = library(target)
    lib.ask(_orders(by_hash, _configs(lib, by_hash, {})))


def _orders(kernels: Mapping[str, Kernel], how: Mapping[str, schedule.Config]) -> dict[str, Wanted]:
    return {key: Wanted(k, how[key], first_variant(k)) for key, k in kernels.items()}


def _configs(
    lib: Library, kernels: Mapping[str, Kernel], chosen: Mapping[str, schedule.Config]
) -> dict[str, schedule.Config]:
    return {key: chosen.get(key) or lib.config(key, k) for key, k in kernels.items()}


def _module(lib: Library, kernels: Mapping[str, Kernel], how: Mapping[str, schedule.Config]) -> CompiledModule:
    """Return launchers of kernels whose first variants the library has; others are built when a launch needs them."""

    def make(key: str, kernel: Kernel) -> Launch:
        return GpuLauncher(kernel, lib.target, functools.partial(lib.variant, key, kernel, how[key]))

    sources = {key: lib.built[key, how[key], first_variant(k)].source for key, k in kernels.items()}
    return CompiledModule(kernels, sources, make)


def pack_kernels(
    kernels: Mapping[str, Kernel],
    target: Target,
    configs: Mapping[str, schedule.Config] = MappingProxyType({}),
    by_hand: Iterable[handwritten.Order] = (),
) -> bytes:
    """Serialize compiled kernels, by structural hash, with every variant of them that this process has, and the ordered
    handwritten kernels, for the cache on disk."""
    lib, kernels = library(target), {key: positional(k) for key, k in kernels.items()}
    how = _configs(lib, kernels, configs)
    with lib.lock:
        built = {at: b for at, b in lib.built.items() if how.get(at[0]) == at[1]}
    ordered = handwritten.library(target).could_be_built(by_hand)
    return archive.pack(target, archive.Stored(kernels, how, built, ordered))


def unpack_kernels(data: bytes, target: Target) -> CompiledModule:
    """Load what `pack_kernels` returned, without Triton. Raise ValueError, KeyError or TypeError for data that does not fit."""
    stored, lib = archive.unpack(data, target), library(target)
    missing = [
        k.name for key, k in stored.kernels.items() if (key, stored.configs[key], first_variant(k)) not in stored.built
    ]
    if missing:
        raise ValueError(f"there is no code for {', '.join(missing)}")
    with lib.lock:
        lib.built.update({at: b for at, b in stored.built.items() if at not in lib.built})
    for order, code in stored.by_hand.items():
        handwritten.library(target).add(order, code)
    return _module(lib, stored.kernels, stored.configs)


@functools.lru_cache(1024)
def refused(kernel: Kernel, target: Target) -> str | None:
    """Return why the emitter cannot print a kernel, or None."""
    try:
        emit(kernel, library(target).config(structural_hash(kernel), kernel))
    except Unsupported as e:
        return str(e)
    return None


def simulate_kernels(kernels: Sequence[Kernel], target: Target | None = None) -> CompiledModule:
    """Run the same source on CPU tensors with Triton's interpreter, with the configuration of `target`, or without one
    with the large blocks that suit the interpreter."""
    by_hash = {structural_hash(k): k for k in kernels}

    def source(k: Kernel) -> Source:
        how = schedule.simulation(k) if target is None else schedule.choose(k, target)
        return emit(k, how, check_division=True)

    sources = {key: source(k) for key, k in by_hash.items()}
    return CompiledModule(by_hash, sources, lambda key, k: SimulatedLauncher(k, sources[key]))


class SimulatedLauncher:
    """Run a source's functions with the interpreter. Errors are raised at once."""

    def __init__(self, kernel: Kernel, source: Source) -> None:
        from fusewright_triton.run.interpreter import Simulated

        self.kernel, self.source = kernel, source
        self.simulated = Simulated(source.text, [f.name for f in source.functions])

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Number] = ()
    ) -> None:
        """Run the kernel; an error that one of its checks finds is raised as eager raises it."""
        error = torch.zeros(1, dtype=torch.int64, device=HOST)
        parts = [torch.empty(evaluate(count, sizes), dtype=to_torch(dtype), device=HOST) for dtype, count in self.source.workspace]
        given = {
            "buffer": iter(tensors),
            "scalar": (int(x) if isinstance(x, bool) else x for x in scalars),
            "size": iter(sizes),
            "error": iter([error]),
            "part": iter(parts),
        }
        args = [next(given[p.kind]) for p in self.source.parameters]
        for k, f in enumerate(self.source.functions):
            programs = f.programs(sizes)
            if programs:
                self.simulated.run(k, programs, args)
        code = int(error)
        if code:
            raise checks.error(self.kernel, code, sizes)
