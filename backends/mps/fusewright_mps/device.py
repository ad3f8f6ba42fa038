"""All that is asked of `torch.mps`, as one small object, so that it can be recorded and simulated.

    metal = TorchMps()
    library = metal.compile_shader(source)
    library.add(x, y, out, n, threads=n, group_size=256, arg_casts={3: "int32"})

An argument is a tensor (a buffer, from where the tensor begins), an int (int64, or what `arg_casts` says by position), a float
(fp32) or a list of one of them. Dispatches are encoded one behind another in the one stream that torch has, and wait for
nothing: `torch/csrc/mps/Module.cpp` of torch 2.13.
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
"""macOS with Metal 3.1, which has bf16."""


class Function(Protocol):
    """A kernel function of a library. `threads` counts all threads along up to three axes, `group_size` those of a group."""

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int],
        group_size: int | Sequence[int],
        arg_casts: dict[int, str] | None = None,
    ) -> None: ...


class Library(Protocol):
    """A compiled source; its functions are attributes."""

    def __getattr__(self, name: str) -> Function: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Words on their way to the host: `ready` says whether `words` are there."""

    words: torch.Tensor
    ready: Callable[[], bool]


class Metal(Protocol):
    """What the runtime needs of the device. `encoded` counts dispatches."""

    encoded: int

    @property
    def device(self) -> str:
        """Where its tensors are."""
        ...

    def compile_shader(self, source: str) -> Library:
        """A library of every kernel function in the source. SyntaxError or RuntimeError with the compiler's message."""
        ...

    def fetch(self, words: torch.Tensor) -> Fetched:
        """Begin to copy a few words to the host, behind the work that is encoded already; nobody waits."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        ...


class TorchMps:
    """The real one."""

    device = DEVICE

    def __init__(self) -> None:
        self.encoded = 0

    def compile_shader(self, source: str) -> Library:
        library: Library = torch.mps.compile_shader(source)
        return library

    def fetch(self, words: torch.Tensor) -> Fetched:
        host = torch.empty(words.shape, dtype=words.dtype)
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
    """What keeps this machine from having the device, or None."""
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
    """The version of the system; what does not tell counts as new enough."""
    return tuple(int(n) for n in platform.mac_ver()[0].split(".")[:2] if n.isdigit()) or OLDEST


def chip() -> str:
    """The name of the chip, e.g. "Apple M3 Pro"."""
    return torch.backends.mps.get_name()


def cores() -> int | None:
    """GPU cores of the chip, where torch says it."""
    count = getattr(torch.backends.mps, "get_core_count", None)
    return int(count()) if count is not None else None
