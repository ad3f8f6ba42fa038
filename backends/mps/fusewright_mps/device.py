"""Everything used of `torch.mps`, behind one small interface, so that it can be recorded and simulated.

    metal = TorchMps()
    library = metal.compile_shader(source)
    library.add(x, y, out, n, threads=n, group_size=256, arg_casts={3: "int32"})

An argument is a tensor (a buffer, starting at the tensor's first element), an int (int64, or the type that `arg_casts` gives for
its position), a float (fp32) or a list of ints or floats. Dispatches are encoded in order in torch's only stream, asynchronously:
see `torch/csrc/mps/Module.cpp` of torch 2.13.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusewright.interface import Unavailable

DEVICE = "mps"

OLDEST = (14, 0)
"""Oldest macOS with Metal 3.1, which has bf16."""


class Function(Protocol):
    """A kernel function of a library. `threads` is the total along up to three axes, `group_size` the threads of a threadgroup."""

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int],
        group_size: int | Sequence[int],
        arg_casts: dict[int, str] | None = None,
    ) -> None: ...


class Library(Protocol):
    """A compiled shader library; its functions are attributes."""

    def __getattr__(self, name: str) -> Function: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Words being copied to the host; `ready` tells whether `words` have arrived."""

    words: torch.Tensor
    ready: Callable[[], bool]


class Metal(Protocol):
    """The part of the device that the runtime uses. `encoded` counts dispatches."""

    encoded: int

    @property
    def device(self) -> str:
        """The torch device of its tensors."""
        ...

    def compile_shader(self, source: str) -> Library:
        """Compile every kernel function in the source. Raise SyntaxError or RuntimeError with the compiler's message."""
        ...

    def fetch(self, words: torch.Tensor) -> Fetched:
        """Start copying a few words to the host after the work already encoded, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...


class TorchMps:
    """The real device."""

    device = DEVICE

    def __init__(self) -> None:
        self.encoded = 0

    def compile_shader(self, source: str) -> Library:
        library: Library = torch.mps.compile_shader(source)
        return library

    def fetch(self, words: torch.Tensor) -> Fetched:
        host = torch.empty(words.shape, dtype=words.dtype, device="cpu")
        host.copy_(words, non_blocking=True)
        event = torch.mps.Event()
        event.record()
        return Fetched(host, event.query)

    def synchronize(self) -> None:
        torch.mps.synchronize()


@functools.cache
def torch_mps() -> Metal:
    """This process's device."""
    return TorchMps()


def missing() -> Unavailable | None:
    """Return why this machine does not have the device, or None."""
    if sys.platform != "darwin":
        return Unavailable(f"this is {sys.platform}", "use a Mac with Apple silicon")
    if not torch.backends.mps.is_built():
        return Unavailable("torch is built without MPS", "install the macOS arm64 build of torch")
    if not torch.backends.mps.is_available():
        return Unavailable("no Metal device is found", "macOS 14 or later on Apple silicon is needed")
    if macos() < OLDEST:
        return Unavailable(f"macOS {platform.mac_ver()[0]} has no Metal 3.1", "update to macOS 14 or later")
    return None


def macos() -> tuple[int, ...]:
    """Return the version of macOS; an unreadable version counts as new enough."""
    return tuple(int(n) for n in platform.mac_ver()[0].split(".")[:2] if n.isdigit()) or OLDEST


def chip() -> str:
    """Return the name of the chip, e.g. "Apple M3 Pro"."""
    return torch.backends.mps.get_name()


def cores() -> int | None:
    """Return the number of GPU cores, or None if torch does not report it."""
    count = getattr(torch.backends.mps, "get_core_count", None)
    return int(count()) if count is not None else None
