"""Launching built kernels on a GPU with little overhead: arguments are bound once, a launch fills in addresses."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusewright.toolkit.kernel.extent import evaluate
from fusewright.toolkit.kernel.ir import Kernel
from fusewright.toolkit.kernel.types import TYPES
from fusewright_triton.binaries import Built, Variant
from fusewright_triton.config import WIDE, offsets_bound
from fusewright_triton.driver import driver
from fusewright_triton.emitter import Parameter
from fusewright_triton.program import INDEX_ERROR, ZERO_DIVISION
from fusewright_triton.target import Target

PART_ALIGNMENT = 256
C_TYPES: Mapping[str, type[ctypes._SimpleCData]] = {
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
}
"""C types of numbers among the arguments."""


class Errors:
    """One word of pinned host memory that kernels write error codes to. Reading it waits for nothing."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.address = self.flag.data_ptr()
        self.word = ctypes.c_int32.from_address(self.address)

    def check(self) -> None:
        """Raises what a finished kernel reported, once."""
        code = self.word.value
        if code:
            self.word.value = 0
            raise_error(code, "a kernel")


@functools.cache
def errors() -> Errors:
    """The process's error word. Memory pinned by torch has one address on the host and on every device."""
    return Errors()


def raise_errors() -> None:
    """Waits for the current stream, then raises what its kernels reported."""
    torch.cuda.current_stream().synchronize()
    errors().check()


def raise_error(code: int, name: str) -> None:
    """Raises what an error code stands for, as eager does on the CPU."""
    if code == INDEX_ERROR:
        raise IndexError(f"index out of range in {name}")
    if code == ZERO_DIVISION:
        raise RuntimeError("ZeroDivisionError")
    raise RuntimeError(f"{name} failed with code {code}")


@dataclass(slots=True)
class _Bound:
    """Arguments of one variant on the current device: `values` are C values by parameter, `pointers` their addresses."""

    built: Built
    functions: list[int]
    values: list[ctypes._SimpleCData]
    params: ctypes.Array[ctypes.c_void_p]
    parts: list[ctypes._SimpleCData]


class GpuLauncher:
    """`launcher(tensors, sizes, scalars)` launches on torch's current stream. See `runtime` for what it promises.

    Variants of the code (unaligned addresses, offsets beyond 32 bits) are built when they are first needed.
    Launches from several threads at once each get arguments of their own.
    """

    def __init__(self, kernel: Kernel, target: Target, variant: Callable[[Variant], Built]) -> None:
        self.kernel, self.target, self._variant = kernel, target, variant
        self._free: dict[tuple[int, Variant], list[_Bound]] = {}
        self._launch: Callable[..., int] | None = None
        self._static = not kernel.symbols
        self._wide = offsets_bound(kernel, kernel.size_hints()) >= WIDE
        self._reports = any(n.op == "bound" for n in kernel.nodes())

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int] = (),
        scalars: Sequence[int | float | bool] = (),
    ) -> None:
        """Raises errors of earlier launches that are known by now: IndexError for an index out of bounds."""
        device = tensors[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(tensors, sizes, scalars)
        addresses = [t.data_ptr() for t in tensors]
        key = (device, self._pick(addresses, sizes))
        free = self._free.setdefault(key, [])
        bound = free.pop() if free else self._bind(key[1])
        try:
            self._run(bound, addresses, sizes, scalars)
        finally:
            free.append(bound)

    def _pick(self, addresses: Sequence[int], sizes: Sequence[int]) -> Variant:
        """The variant that these arguments need."""
        joined = 0
        for a in addresses:
            joined |= a
        if self._static:
            return Variant(self._wide, not joined & 15)
        even = all(s % 16 == 0 for s in sizes)
        env = dict(zip(self.kernel.symbols, sizes, strict=True))
        return Variant(offsets_bound(self.kernel, env) >= WIDE, not joined & 15, even)

    def _bind(self, variant: Variant) -> _Bound:
        built = self._variant(variant)
        d = driver(self.target.triton)
        self._launch = d.launcher()
        functions = [d.load(b.code, b.name, b.shared) for b in built.binaries]
        values = [_value(p) for p in built.source.parameters]
        # Triton's functions take two more addresses, of scratch memory that these kernels do not use
        extra = [ctypes.c_void_p(0), ctypes.c_void_p(0)]
        params = (ctypes.c_void_p * (len(values) + 2))(*(ctypes.addressof(v) for v in (*values, *extra)))
        parts = [v for v, p in zip(values, built.source.parameters, strict=True) if p.kind == "part"]
        for v, p in zip(values, built.source.parameters, strict=True):
            if p.kind == "error":
                v.value = errors().address
        return _Bound(built, functions, [*values, *extra], params, parts)

    def _run(
        self, b: _Bound, addresses: Sequence[int], sizes: Sequence[int], scalars: Sequence[int | float | bool]
    ) -> None:
        values, i = b.values, 0
        for given in (addresses, scalars, sizes):
            for x in given:
                values[i].value = x
                i += 1
        if self._reports:
            errors().check()
        env = dict(zip(self.kernel.symbols, sizes, strict=True))
        # held until the launches are queued; the allocator gives it to later work of this stream only
        workspace = self._workspace(b, env) if b.parts else None
        stream = torch.cuda.current_stream().cuda_stream
        for function, f, binary in zip(b.functions, b.built.source.functions, b.built.binaries, strict=True):
            programs = f.programs(env)
            if programs and self._launch is not None:
                code = self._launch(
                    function, programs, 1, 1, binary.threads, 1, 1, binary.shared, stream, b.params, None
                )
                if code:
                    raise driver(self.target.triton).error(code, f"launch {binary.name}")
        del workspace

    def _workspace(self, b: _Bound, env: Mapping[str, int]) -> torch.Tensor:
        offsets, total = [], 0
        for dtype, count in b.built.source.workspace:
            offsets.append(total)
            size = TYPES[dtype].size * evaluate(count, env)
            total += -(-size // PART_ALIGNMENT) * PART_ALIGNMENT
        memory = torch.empty(total, dtype=torch.uint8, device="cuda")
        base = memory.data_ptr()
        for v, offset in zip(b.parts, offsets, strict=True):
            v.value = base + offset
        return memory


def _value(p: Parameter) -> ctypes._SimpleCData:
    return ctypes.c_uint64(0) if p.pointer else C_TYPES[p.dtype](0)
