"""Launch built kernels on a GPU with little overhead: arguments are bound once, a launch only fills in addresses."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright import machine
from fusewright.errors import without_memory
from fusewright.interface import HOST, Number
from fusewright.plan import native
from fusewright.toolkit.ir.extent import evaluate, terms_of
from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.types import TYPES
from fusewright.toolkit.rules.offsets import depends, grow, offsets_bound, only_added
from fusewright_triton.build.binaries import Built, Variant
from fusewright_triton.emit.schedule import WIDE
from fusewright_triton.emit.values import INDEX_ERROR, ZERO_DIVISION
from fusewright_triton.run import graph_kernels
from fusewright_triton.run.driver import driver
from fusewright_triton.target import Target

PART_ALIGNMENT = 256
MOST_SIZES = 4096
"""The most sets of sizes that a launcher remembers."""
FACTORS = 1 << 16, 1 << 12, 1 << 8, 16, 4, 2
"""How many times as large as the first sizes those may be that the native launcher computes programs for."""
BITS = 31, 24, 20, 16
"""Of the largest numbers that a recorded launch may be given with offsets of 32 bits, in order of preference."""
MOST_NUMBERS = 4
FORMATS = {"f32": "f4x", "f64": "d", "i32": "i4x", "i64": "q"}
"""`struct` format characters of scalar arguments."""
NOT_LAUNCHED = -1
"""The native launcher's answer when Python must launch; k + 1 means that the driver refused function k, 0 success."""


class Errors:
    """One word of pinned host memory that kernels write error codes to. Reading it does not synchronize."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, device=HOST, pin_memory=True)
        self.address = self.flag.data_ptr()
        self.word = ctypes.c_int32.from_address(self.address)

    def check(self) -> None:
        """Raise the error that a finished kernel reported, once."""
        code = self.word.value
        if code:
            self.word.value = 0
            raise_error(code, "a kernel")


@functools.cache
def errors() -> Errors:
    """Return the process's error word. Memory pinned by torch has one address on the host and on every device."""
    return Errors()


def raise_errors() -> None:
    """Wait for the current stream, then raise what its kernels reported."""
    torch.cuda.current_stream().synchronize()
    errors().check()


def raise_error(code: int, name: str) -> None:
    """Raise the error of a code, as eager does on the CPU."""
    if code == INDEX_ERROR:
        raise IndexError(f"index out of range in {name}")
    if code == ZERO_DIVISION:
        raise RuntimeError("ZeroDivisionError")
    raise RuntimeError(f"{name} failed with code {code}")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the sizes of a launch determine: the code variant, programs per function, and for shared rows the offsets of the
    parts in their workspace and its length."""

    wide: bool
    even: bool
    programs: tuple[int, ...]
    parts: tuple[int, ...]
    workspace: int


@dataclass(slots=True)
class _Bound:
    """One variant, loaded for one device, with a buffer for its arguments: 8 bytes each, in the order of parameters.

    `functions` holds (handle, threads, shared bytes, name); `pack` writes addresses, scalars and sizes into `memory`,
    `pack_parts` the addresses of parts. `params` are the addresses of the arguments, as the driver wants them.
    """

    functions: list[tuple[int, int, int, str]]
    memory: ctypes.Array[ctypes.c_char]
    params: ctypes.Array[ctypes.c_void_p]
    pack: Callable[..., None]
    pack_parts: Callable[..., None]
    parts_at: int


def _not_launched(*_: Any) -> int:
    """Let Python launch, after what is queued."""
    if (queue := native.launch_queue()) is not None:
        queue.close()
    return NOT_LAUNCHED


class GpuLauncher:
    """`launcher(tensors, sizes, scalars)` launches on torch's current stream. See `runtime` for its guarantees.

    Variants of the code (unaligned addresses, offsets beyond 32 bits) are built when they are first needed.
    Concurrent launches from several threads each get their own arguments.
    """

    queues = True  # what it launches by itself waits for nobody's queue: see `native.queues`

    def __init__(self, kernel: Kernel, target: Target, variant: Callable[[Variant], Built]) -> None:
        self.kernel, self.target, self._variant = kernel, target, variant
        self._free: dict[tuple[int, bool, bool, bool], list[_Bound]] = {}
        self._launch: Callable[..., int] = lambda *_: 0
        self._sizes: dict[tuple[int, ...], _Sizes] = {}
        self._reports = any(n.op == "bound" for n in kernel.nodes())
        self._native: Any | None = None
        self._fast: Callable[..., int] = _not_launched

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int] = (),
        scalars: Sequence[int | float | bool] = (),
    ) -> None:
        """Launch. Raise errors of earlier launches that are known by now: IndexError for an index out of bounds."""
        left = self._fast(tensors, sizes, scalars)
        if left:
            self._by_python(tensors, sizes, scalars, max(left - 1, 0))

    def _by_python(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], scalars: Sequence[int | float | bool], first: int
    ) -> None:
        """Launch the functions from `first` on, and let the native launcher handle new sizes the next time."""
        device = tensors[0].get_device()
        if device != torch.cuda.current_device():
            if device < 0:
                raise RuntimeError(f"{self.kernel.name} was given a tensor of the CPU")
            with torch.cuda.device(device):
                return self._by_python(tensors, sizes, scalars, first)
        if self._reports:
            errors().check()
        addresses = [t.data_ptr() or without_memory(t) for t in tensors]
        joined = 0
        for a in addresses:
            joined |= a
        numbers, most = {k: n for k, n in enumerate(sizes) if isinstance(n, Number)}, 0
        if numbers:
            known, most = self._with_numbers(tuple(map(int, sizes)), numbers)
        else:
            known = self._sizes.get(tuple(sizes)) or self._from_sizes(tuple(sizes))
        key = (device, known.wide, not joined & 15, known.even)
        free = self._free.get(key)
        bound = free.pop() if free else self._bind(Variant(*key[1:]), device)
        bound.pack(bound.memory, 0, *addresses, *scalars, *sizes)
        # keep it until the launches are queued; the allocator gives it only to later work of this stream
        workspace = self._place_parts(bound, known, tensors[0].device) if known.workspace else None
        stream, launch = machine.current_stream(device), self._launch
        for (function, threads, shared, name), programs in list(zip(bound.functions, known.programs, strict=True))[first:]:
            if programs:
                arguments = (function, programs, 1, 1, threads, 1, 1, shared, stream, bound.params, None)
                if launch(*arguments):
                    driver(self.target.triton).relaunch(name, *arguments)
                if numbers and torch.cuda.is_current_stream_capturing():
                    graph_kernels.note({len(addresses) + len(scalars) + k: n for k, n in numbers.items()}, most)
        del workspace
        self._free.setdefault(key, []).append(bound)

    def _from_sizes(self, sizes: tuple[int, ...]) -> _Sizes:
        even = bool(sizes) and all(s % 16 == 0 for s in sizes)
        found = self._determined(sizes, offsets_bound(self.kernel, sizes) >= WIDE, even)
        if len(self._sizes) >= MOST_SIZES:
            self._sizes.clear()
        self._sizes[sizes] = found
        self._teach_sizes(sizes, found)
        return found

    def _with_numbers(self, sizes: tuple[int, ...], numbers: Mapping[int, int]) -> tuple[_Sizes, int]:
        """Return what sizes determine of which some are `numbers`, by position, that differ from call to call, and the most that
        these may then be; -1 if how many programs run depends on them."""
        most = self._most_narrow(sizes, numbers)
        if any(depends(e, numbers) for e in self.kernel.sizes):
            return self._from_sizes(sizes), -1
        return self._determined(sizes, not most, False), most or graph_kernels.MOST_NUMBER

    def _most_narrow(self, sizes: Sequence[int], numbers: Mapping[int, int]) -> int:
        """Return the most that some sizes may be with offsets of 32 bits; 0 if that is not known, or hardly more than they are."""
        if len(numbers) > MOST_NUMBERS or not only_added(self.kernel, numbers):
            return 0
        for most in ((1 << bits) - 1 for bits in BITS):
            ends = itertools.product((0, most), repeat=len(numbers))
            boxes = ([dict(zip(numbers, end, strict=True)).get(k, s) for k, s in enumerate(sizes)] for end in ends)
            if all(offsets_bound(self.kernel, box) < WIDE for box in boxes):
                return most if 2 * max(numbers.values()) <= most else 0
        return 0

    def _determined(self, sizes: tuple[int, ...], wide: bool, even: bool) -> _Sizes:
        source = self._variant(Variant(wide, True, even)).source
        if not wide and any(evaluate(count, sizes) >= WIDE for _, count in source.workspace):
            wide = True  # many short rows, where the split of few long ones was chosen
            source = self._variant(Variant(wide, True, even)).source
        offsets, total = [], 0
        for dtype, count in source.workspace:
            offsets.append(total)
            length = TYPES[dtype].size * evaluate(count, sizes)
            total += -(-length // PART_ALIGNMENT) * PART_ALIGNMENT
        programs = tuple(f.programs(sizes) for f in source.functions)
        return _Sizes(wide, even, programs, tuple(offsets), total)

    def _teach_programs(self, sizes: tuple[int, ...]) -> None:
        """Let the native launcher compute what sizes determine, for all up to some multiple of these."""
        if not sizes or not grow(self.kernel):
            return
        source = self._variant(Variant(False, True, self._sizes[sizes].even)).source
        if source.workspace:
            return
        for factor in FACTORS:
            most = [factor * max(s, 1) for s in sizes]
            if offsets_bound(self.kernel, most, [1] * len(sizes)) < WIDE:
                axes = ([([(c, m) for m, c in terms_of(size)], block) for size, block in f.grid] for f in source.functions)
                told = [(f.split, grid) for f, grid in zip(source.functions, axes, strict=True)]
                self._native.learn_programs(most, told)  # type: ignore[union-attr]
                return

    def _teach_sizes(self, sizes: tuple[int, ...], found: _Sizes) -> None:
        if self._native is not None:
            self._native.learn_sizes(sizes, found.wide, found.even, found.programs, found.parts, found.workspace)

    def _teach_variant(self, device: int, variant: Variant, bound: _Bound, letters: str, reports: bool) -> None:
        """Let the native launcher launch this code itself."""
        if self._native is None:
            d = driver(self.target.triton)
            self._native = native.device_launch(d.launch_functions(), errors().address if self._reports else 0)
            if self._native is None:
                return
            self._fast = self._native.launch
            for sizes, found in self._sizes.items():
                self._teach_sizes(sizes, found)
            if not variant.wide:
                self._teach_programs(next((sizes for sizes, found in self._sizes.items() if not found.wide), ()))
        functions = [(handle, threads, shared) for handle, threads, shared, _ in bound.functions]
        self._native.learn_variant(device, *variant, functions, letters, errors().address if reports else 0)

    def _bind(self, variant: Variant, device: int) -> _Bound:
        built = self._variant(variant)
        d = driver(self.target.triton)
        self._launch = d.launcher()
        functions = [(d.load(b.code, b.name, b.shared), b.threads, b.shared, b.name) for b in built.binaries]
        parameters = built.source.parameters
        given = [p for p in parameters if p.kind in ("buffer", "scalar", "size")]
        parts = sum(p.kind == "part" for p in parameters)
        # Triton's functions take two more addresses, of scratch memory that these kernels do not use
        memory = ctypes.create_string_buffer(8 * (len(parameters) + 2))
        base = ctypes.addressof(memory)
        params = (ctypes.c_void_p * (len(parameters) + 2))(*(base + 8 * k for k in range(len(parameters) + 2)))
        reports = len(parameters) > len(given) + parts
        if reports:
            struct.pack_into("<Q", memory, 8 * len(given), errors().address)
        bound = _Bound(
            functions,
            memory,
            params,
            struct.Struct("<" + "".join("Q" if p.pointer else FORMATS[p.dtype] for p in given)).pack_into,
            struct.Struct("<" + "Q" * parts).pack_into,
            8 * (len(parameters) - parts),
        )
        if (device, *variant) not in self._free:
            self._teach_variant(device, variant, bound, "".join("q" if p.pointer else FORMATS[p.dtype][0] for p in given), reports)
        return bound

    def _place_parts(self, bound: _Bound, sizes: _Sizes, device: torch.device) -> torch.Tensor:
        workspace = torch.empty(sizes.workspace, dtype=torch.uint8, device=device)
        base = workspace.data_ptr()
        bound.pack_parts(bound.memory, bound.parts_at, *(base + offset for offset in sizes.parts))
        return workspace
