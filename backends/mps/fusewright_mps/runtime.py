"""Turn kernels into callables: one shader library per plan, dispatched in order in torch's own stream.

    code = MetalLoader(torch_mps(), target)(kernels)
    code[hash].call(tensors, sizes, scalars)

Launches are asynchronous. An error that a kernel detects (such as an index out of bounds) is raised by `raise_errors`, or by a
later launch of the same kernel once the error words have reached the host; in simulation, immediately.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fusewright.interface import HOST, KernelCode, Unavailable
from fusewright.toolkit.ir import Kernel
from fusewright.toolkit.ir.checks import error
from fusewright.toolkit.ir.serial import from_json, positional, structural_hash, to_json
from fusewright_mps.device import Fetched, Library, Metal
from fusewright_mps.emit.source import SLOT, error_word
from fusewright_mps.emitter import Source, Variant, emit, library, variant_for
from fusewright_mps.kernels import handwritten
from fusewright_mps.kernels.decode import Combined, Parts
from fusewright_mps.kernels.gemv import Gemv
from fusewright_mps.kernels.handwritten import Handwritten
from fusewright_mps.target import Target

Number = int | float | bool
Launched: TypeAlias = Kernel | Handwritten

BY_HAND: dict[str, type[Handwritten]] = {k.kind: k for k in (Gemv, Parts, Combined)}

MOST_SIZES = 256
"""Number of size tuples whose variant is remembered."""


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled variant of a kernel, with its functions by name."""

    source: Source
    functions: Mapping[str, Any]


class MetalLoader:
    """A `Loader` for one device. With `check_division`, integer division by zero is an error, as in eager on CPUs."""

    def __init__(self, metal: Metal, target: Target, check_division: bool = False) -> None:
        self.metal, self.target, self.check_division = metal, target, check_division

    def __call__(self, kernels: Mapping[str, Launched]) -> Mapping[str, KernelCode]:
        """Compile the variants for the traced sizes as one library; other variants are compiled when a launch needs them."""
        kernels = {h: _unnamed(k) for h, k in kernels.items()}
        shaders = {h: Shaders(k, self.metal, self.target, self.check_division) for h, k in kernels.items()}
        first = {h: s.source(s.expected) for h, s in shaders.items()}
        if first:
            compiled = self.metal.compile_shader(library(first.values()))
            for h, s in shaders.items():
                s.add(first[h], compiled)
        return {h: KernelCode(Launcher(s), kernel=kernels[h]) for h, s in shaders.items()}

    def pack(self, kernels: Mapping[str, Launched]) -> bytes | None:
        """Pack the kernels without code: the system caches what Metal's compiler made of their source."""
        return json.dumps({h: _as_json(k) for h, k in kernels.items()}).encode()

    def unpack(self, data: bytes) -> Mapping[str, KernelCode]:
        kernels = {h: _read(k) for h, k in json.loads(data).items()}
        wrong = [k.name for h, k in kernels.items() if _hash(k) != h]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} under the hash of another kernel")
        return self(kernels)

    def fingerprint(self) -> str:
        """The chip that kernels are sized for."""
        return f"{self.target.chip}-{self.target.cores}"


def _unnamed(kernel: Launched) -> Launched:
    """Replace names by positions, as anything cached under a hash requires."""
    return kernel if isinstance(kernel, Handwritten) else positional(kernel)


def _as_json(kernel: Launched) -> dict[str, Any]:
    return handwritten.to_json(kernel) if isinstance(kernel, Handwritten) else to_json(positional(kernel))


def _read(data: dict[str, Any]) -> Launched:
    return handwritten.from_json(data, BY_HAND) if "by_hand" in data else from_json(data)


def _hash(kernel: Launched) -> str:
    return handwritten.hash_of(kernel) if isinstance(kernel, Handwritten) else structural_hash(kernel)


class HostMetal:
    """A simulated device: runs Metal source, compiled as C++, on CPU tensors."""

    device = HOST

    def __init__(self) -> None:
        self.encoded = 0

    def compile_shader(self, source: str) -> Library:
        from fusewright_mps.simulate.library import compile_shader

        library: Library = compile_shader(source)
        return library

    def fetch(self, words: torch.Tensor) -> Fetched:
        return Fetched(words, lambda: True)

    def synchronize(self) -> None:
        """Do nothing: a dispatch has finished when it returns."""


@functools.cache
def host_metal() -> Metal:
    """Return this process's simulated device."""
    return HostMetal()


def unsimulated() -> Unavailable | None:
    """Return why this machine cannot simulate the device, or None."""
    from fusewright_mps.simulate.compiler import NoCompiler, compiler

    try:
        compiler()
    except NoCompiler as e:
        return Unavailable(str(e), "install g++ or clang++")
    return None


class Shaders:
    """The variants of one kernel that this process has compiled."""

    def __init__(self, kernel: Launched, metal: Metal, target: Target, check_division: bool) -> None:
        self.kernel, self.metal, self.target, self.check_division = kernel, metal, target, check_division
        self.expected = self._for(kernel.hints)
        self._built: dict[Variant, Built] = {}
        self._variants: dict[tuple[int, ...], Variant] = {}

    def source(self, variant: Variant) -> Source:
        """Return the kernel's functions: emitted for a loop kernel, its own text for a handwritten one."""
        if isinstance(self.kernel, Handwritten):
            return self.kernel.source(variant)
        return emit(self.kernel, variant, self.target)

    def _for(self, sizes: Sequence[int]) -> Variant:
        if isinstance(self.kernel, Handwritten):
            return Variant()
        return variant_for(self.kernel, sizes, True, self.check_division)

    def add(self, source: Source, compiled: Library) -> Built:
        """Keep a compiled variant. Each function is looked up only once, because torch builds a pipeline for it."""
        built = Built(source, {d.entry: getattr(compiled, d.entry) for d in source.dispatches})
        self._built[source.variant] = built
        return built

    def fitting(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> Built:
        """Return the variant for these sizes and for the alignment of these tensors."""
        built = self._variant(self._variants.get(sizes) or self._of_sizes(sizes))
        if built.source.aligned(tensors):
            return built
        return self._variant(replace(built.source.variant, aligned=False))

    def _of_sizes(self, sizes: tuple[int, ...]) -> Variant:
        if len(self._variants) >= MOST_SIZES:
            self._variants.clear()
        found = self._variants[sizes] = self._for(sizes)
        return found

    def _variant(self, variant: Variant) -> Built:
        if variant in self._built:
            return self._built[variant]
        source = self.source(variant)
        built = self.add(source, self.metal.compile_shader(library([source])))
        self._built[variant] = built
        return built


class Launcher:
    """`launcher(tensors, sizes, scalars)` encodes the dispatches of a kernel."""

    def __init__(self, shaders: Shaders) -> None:
        self.shaders = shaders
        self.words: Words | None = None

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Number] = ()
    ) -> None:
        """Launch the kernel, after raising any error of an earlier launch that has reached the host."""
        built = self.shaders.fitting(tensors, tuple(sizes))
        words = self._words(built.source.errors) if built.source.errors else None
        if words is not None:
            words.check()
        metal = self.shaders.metal
        for call in built.source.calls(tensors, sizes, scalars, None if words is None else words.on_device):
            built.functions[call.entry](*call.args, threads=call.threads, group_size=call.group_size)
            metal.encoded += 1
        if words is not None:
            words.launched(tuple(sizes))

    def _words(self, slots: int) -> Words:
        if self.words is None or len(self.words.on_device) != slots:
            self.words = Words(self.shaders.kernel, self.shaders.metal, slots)
            _watched.add(self.words)
        return self.words


_watched: weakref.WeakSet[Words] = weakref.WeakSet()


class Words:
    """The error words that launches of one kernel write, and their pending copies to the host."""

    def __init__(self, kernel: Launched, metal: Metal, slots: int) -> None:
        self.kernel, self.metal = kernel, metal
        self.on_device = torch.zeros(slots, dtype=SLOT, device=metal.device)
        self.pending: list[tuple[Fetched, tuple[int, ...]]] = []

    def launched(self, sizes: tuple[int, ...]) -> None:
        """Note that a launch with these sizes has been encoded."""
        self.pending.append((self.metal.fetch(self.on_device), sizes))
        if self.metal.device == HOST:
            self.check()

    def check(self) -> None:
        """Raise the error of the first failed launch that the host knows of, as eager would."""
        for fetched, sizes in self._arrived():
            if word := error_word(fetched.words):
                self.pending.clear()
                self.on_device.zero_()
                raise error(self.kernel, word, sizes)  # type: ignore[arg-type]

    def _arrived(self) -> Iterator[tuple[Fetched, tuple[int, ...]]]:
        while self.pending and self.pending[0][0].ready():
            yield self.pending.pop(0)


def raise_errors(metal: Metal) -> None:
    """Wait for the device, and raise any error that a kernel has detected."""
    metal.synchronize()
    for words in list(_watched):
        words.check()
