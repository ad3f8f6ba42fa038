"""Frames: the memory of one running call of a plan, i.e. the arena with its views and the argument blocks of its kernels."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright import machine
from fusewright.interface import KernelCode, TensorSpec

_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def entry(address: int) -> Callable[[int, int], int]:
    """Wrap the C function of a kernel as a callable of (block address, workers)."""
    return _PROTOTYPE(address)


def bits(x: float | int | bool, is_float: bool) -> int:
    """A runtime scalar as stored in an argument block."""
    found: int = struct.unpack("<q", struct.pack("<d", float(x)))[0] if is_float else int(x)
    return found


class Frame:
    """Attributes: `v<id>` are arena tensors, `b<k>` is the block of launch k, `p<k>` its address."""

    def __init__(
        self, arena_bytes: int, device: str, places: Mapping[int, tuple[int, TensorSpec]],
        blocks: Mapping[int, Sequence[Any]],
    ) -> None:  # fmt: skip
        with torch.inference_mode(False):
            self.arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device or None)
            for value, (offset, spec) in places.items():
                setattr(self, f"v{value}", _view(self.arena, offset, spec))
        for k, entries in blocks.items():
            block = (ctypes.c_int64 * max(len(entries), 1))()
            for position, given in enumerate(entries):
                if isinstance(given, int):
                    block[position] = given
                elif given is not None:  # ("arena", value id)
                    block[position] = getattr(self, f"v{given[1]}").data_ptr()
            setattr(self, f"b{k}", block)
            setattr(self, f"p{k}", ctypes.addressof(block))


def _view(arena: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    shape, stride = ([int(s) for s in sizes] for sizes in (spec.shape, spec.stride))  # type: ignore[arg-type]
    empty = torch.empty(0, dtype=spec.dtype, device=arena.device)
    return empty.set_(arena.untyped_storage(), offset // spec.dtype.itemsize, shape, stride)


KEPT = max(4, machine.cores())
"""Maximum number of idle frames per plan: more than the number of cores would only hold on to arenas."""


class Frames:
    """A pool of frames, so that concurrent calls of a plan get one each."""

    def __init__(self, make: Callable[[], Frame]) -> None:
        self._make = make
        self._free: deque[Frame] = deque(maxlen=KEPT)
        self.give_back = self._free.append

    def take(self) -> Frame:
        try:
            return self._free.pop()
        except IndexError:
            return self._make()


def fail(code: KernelCode, value: int, block: Sequence[int]) -> None:
    """Raise the exception for a kernel's error code."""
    raise code.error(value, block) if code.error is not None else RuntimeError(f"a kernel failed with code {value}")
