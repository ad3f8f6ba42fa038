"""A recording device: keeps every `torch.mps` call of the runtime as data, and checks it against torch's and Metal's limits.

    metal = Recorded()                      # runs nothing; Recorded(other) forwards every call
    MetalLoader(metal, target)(kernels)
    metal.compiled[0].source, metal.dispatches[0].threads

It replaces the device in tests, or wraps a real one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fusewright_mps.device import Fetched, Library, Metal

MOST_ARGUMENTS = 31
MOST_THREADS = 1024
MOST_BYTES = 4096
"""Most bytes of numbers in one argument: the limit of an encoder's `setBytes`."""
CASTS = frozenset({"fp16", "bf16", "int32", "int16", "int8", "uint8"})

Number: TypeAlias = int | float


@dataclass(frozen=True)
class Buffer:
    """A tensor argument: its storage, and its byte offset in that storage."""

    storage: int
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Compiled:
    """A call of `compile_shader`."""

    source: str


@dataclass(frozen=True)
class Dispatch:
    """A call of a kernel function, with `args` in buffer-table order."""

    entry: str
    args: tuple[Buffer | Number | tuple[Number, ...], ...]
    threads: tuple[int, ...]
    group_size: tuple[int, ...]
    arg_casts: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Waited:
    """A call of `synchronize`, or of `fetch`, which starts a copy to the host."""

    what: str


Event: TypeAlias = Compiled | Dispatch | Waited


@dataclass
class Recorded:
    """`inner`, if given, does the work."""

    inner: Metal | None = None
    events: list[Event] = field(default_factory=list)
    encoded: int = 0

    @property
    def device(self) -> str:
        return "cpu" if self.inner is None else self.inner.device

    @property
    def compiled(self) -> list[Compiled]:
        return [e for e in self.events if isinstance(e, Compiled)]

    @property
    def dispatches(self) -> list[Dispatch]:
        return [e for e in self.events if isinstance(e, Dispatch)]

    def compile_shader(self, source: str) -> Library:
        self.events.append(Compiled(source))
        return _Functions(self, None if self.inner is None else self.inner.compile_shader(source))

    def fetch(self, words: torch.Tensor) -> Fetched:
        self.events.append(Waited("fetch"))
        return Fetched(words, lambda: True) if self.inner is None else self.inner.fetch(words)

    def synchronize(self) -> None:
        self.events.append(Waited("synchronize"))
        if self.inner is not None:
            self.inner.synchronize()


class _Functions:
    """A library that records its calls and rejects those that torch would reject."""

    def __init__(self, record: Recorded, inner: Library | None) -> None:
        self._record, self._inner = record, inner

    def __getattr__(self, name: str) -> _Function:
        return _Function(self._record, name, None if self._inner is None else getattr(self._inner, name))


@dataclass
class _Function:
    record: Recorded
    name: str
    inner: Any

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int],
        group_size: int | Sequence[int],
        arg_casts: dict[int, str] | None = None,
    ) -> None:
        casts = arg_casts or {}
        shape = _shape(threads), _shape(group_size)
        _check(self.name, args, *shape, casts)
        given = tuple(_argument(a) for a in args)
        self.record.events.append(Dispatch(self.name, given, *shape, tuple(sorted(casts.items()))))
        if self.inner is not None:
            self.inner(*args, threads=threads, group_size=group_size, **({"arg_casts": casts} if casts else {}))


def _shape(n: int | Sequence[int]) -> tuple[int, ...]:
    return (n,) if isinstance(n, int) else tuple(n)


def _argument(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return Buffer(a.untyped_storage().data_ptr(), int(a.storage_offset()) * a.element_size(), a.dtype)
    return tuple(a) if isinstance(a, list | tuple) else a


def _check(name: str, args: Sequence[Any], threads: Sequence[int], group: Sequence[int], casts: dict[int, str]) -> None:
    """Raise TypeError or ValueError for what torch or Metal would reject or crash on."""
    if len(args) > MOST_ARGUMENTS:
        raise ValueError(f"{name} is given {len(args)} arguments; Metal's buffer table has {MOST_ARGUMENTS} entries")
    if not 1 <= len(threads) <= 3 or len(threads) != len(group):
        raise ValueError(f"{name}: threads {threads} and threadgroups of {group} must have as many axes, up to three")
    if min(threads) < 1 or min(group) < 1:
        raise ValueError(f"{name}: threads {threads} in threadgroups of {group}: Metal dispatches no empty grid")
    if math.prod(group) > MOST_THREADS:
        raise ValueError(f"{name}: a threadgroup of {group} has more than {MOST_THREADS} threads")
    if unknown := set(casts.values()) - CASTS:
        raise ValueError(f"{name}: torch casts arguments to {', '.join(sorted(CASTS))}, not to {', '.join(unknown)}")
    for k, a in enumerate(args):
        _check_argument(f"argument {k} of {name}", a)


def _check_argument(what: str, a: Any) -> None:
    if isinstance(a, torch.Tensor):
        return
    numbers = list(a) if isinstance(a, list | tuple) else [a]
    if not numbers:
        raise TypeError(f"{what} is an empty list")
    if not all(type(n) is int for n in numbers) and not all(type(n) is float for n in numbers):
        raise TypeError(f"{what} is {a!r}; a tensor, ints or floats are taken")
    if 8 * len(numbers) > MOST_BYTES:
        raise ValueError(f"{what} has {len(numbers)} numbers; {MOST_BYTES} bytes are taken")
