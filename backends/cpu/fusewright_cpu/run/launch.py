"""Calling compiled kernels from Python."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch

from fusewright.errors import without_memory
from fusewright.plan import native
from fusewright.toolkit.ir import checks
from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.types import is_float, to_torch
from fusewright_cpu.run.sources import Source

_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def float_bits(x: float) -> int:
    """Return a float's bits, as stored in the argument block."""
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits


class Launcher:
    """`launcher(tensors, sizes, scalars)` runs the kernel on torch's threads. It checks only the
    error code: the plan checked shapes, types and strides when it was made. Safe to call from several
    threads. `code` keeps the function at `address` loaded; callers that use the address directly must hold the launcher."""

    def __init__(self, kernel: Source, address: int, code: object) -> None:
        self.kernel, self.address, self._code = kernel, address, code
        self._block = ctypes.c_int64 * max(len(kernel.buffers) + len(kernel.symbols) + len(kernel.scalars), 1)
        self._floats = tuple(is_float(s.dtype) for s in kernel.scalars)
        self._call = _PROTOTYPE(address)

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[int | float | bool] = ()
    ) -> None:
        """Run the kernel; afterwards, raise an error that one of its checks found, as eager raises it."""
        words = [t.data_ptr() or without_memory(t) for t in tensors]
        block = self._block(*words, *sizes, *self._words(scalars))
        code = self._call(ctypes.addressof(block), torch.get_num_threads())
        if code:
            raise error(self.kernel, code, sizes)

    def bound(self, sizes: Sequence[int] = (), scalars: Sequence[int | float | bool] = ()) -> Callable[..., None]:
        """Return a function of the tensors that launches as plans do, for measurements: the host's part of a short call decides
        what is faster. From one thread at a time."""
        core, buffers = native.extension(), len(self.kernel.buffers)
        if core is None:
            return lambda *tensors: self(tensors, sizes, scalars)
        block = self._block(*[0] * buffers, *sizes, *self._words(scalars))
        call, at, workers = core.launch(self.address, tuple(range(buffers))), ctypes.addressof(block), torch.get_num_threads()

        def launch(*tensors: torch.Tensor) -> None:
            if code := call(at, workers, *tensors):
                raise error(self.kernel, code, block[buffers:])  # which holds the block

        return launch

    def _words(self, scalars: Sequence[int | float | bool]) -> list[int]:
        return [float_bits(x) if wide else int(x) for x, wide in zip(scalars, self._floats, strict=True)]

    def checked(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int] = (),
        scalars: Sequence[int | float | bool] = (),
    ) -> None:
        """Run after checking the types and counts of arguments; for tests and first runs."""
        k = self.kernel
        if (len(tensors), len(sizes), len(scalars)) != (len(k.buffers), len(k.symbols), len(k.scalars)):
            raise TypeError(
                f"{k.name} takes {len(k.buffers)} tensors, {len(k.symbols)} sizes, {len(k.scalars)} scalars"
            )
        for t, b in zip(tensors, k.buffers, strict=True):
            if t.dtype != to_torch(b.dtype) or t.device.type != "cpu":
                raise TypeError(f"{k.name}: {b.name} must be {b.dtype} on the CPU, not {t.dtype} on {t.device}")
        self(tensors, sizes, scalars)


def error(kernel: Source, code: int, sizes: Sequence[int]) -> Exception:
    """Return the exception for a launch's error word. `sizes`: the launch's sizes, or its argument block from them on."""
    if isinstance(kernel, Kernel):
        return checks.error(kernel, code, sizes)
    return RuntimeError(f"{kernel.name} failed with code {code}")
