"""An emitted kernel and how to dispatch it; the same for Metal and its simulation.

    source = emit(kernel)                                   # `emitter`
    shaders = compile_shader(library([source]))             # of torch.mps, or `simulate.compile_shader`
    for call in source.calls(tensors, sizes, scalars, errors):
        getattr(shaders, call.entry)(*call.args, threads=call.threads, group_size=call.group_size)

Arguments have the types that `torch.mps.compile_shader` takes: tensors become `device` pointers, a list of ints `constant long*`,
a list of floats `constant float*`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from fusewright.toolkit.ir.checks import ZERO_DIVISION, word
from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.ir import Kernel

Number: TypeAlias = int | float | bool
Kind: TypeAlias = Literal["buffer", "sizes", "reals", "integers", "errors"]
Three: TypeAlias = tuple[int, int, int]

MOST_ARGUMENTS = 31
"""Entries in Metal's buffer argument table."""
SLOT = torch.int32
"""Type of the error buffer."""


class Unsupported(Exception):
    """The kernel needs something that Metal does not have; the caller leaves its ops to torch's own calls."""


@dataclass(frozen=True, slots=True)
class Argument:
    """The argument at one index of the buffer table. For kind "buffer", `buffer` is the position among the kernel's buffers."""

    kind: Kind
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One launch of `entry`: `threads` in each direction (as functions of the kernel's sizes), in threadgroups of `group`."""

    entry: str
    arguments: tuple[Argument, ...]
    threads: tuple[Extent, Extent, Extent]
    group: Three


@dataclass(frozen=True, slots=True)
class Call:
    """A dispatch with concrete arguments, as the function of a compiled shader takes them."""

    entry: str
    args: tuple[Any, ...]
    threads: Three
    group_size: Three


@dataclass(frozen=True, slots=True)
class Variant:
    """Assumptions of emitted code. `aligned`: buffers start at multiples of `Source.alignment`; `wide`: offsets are 64-bit;
    `check_division`: integer division by zero is reported, as eager does on CPUs but not on GPUs."""

    aligned: bool = True
    wide: bool = False
    check_division: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """The Metal functions of a kernel, without the prelude that all kernels share (`emitter.library` adds it).

    `alignment`: bytes per buffer; if a buffer is not aligned to it, the variant that is not `aligned` is needed.
    `errors`: number of elements of the error buffer (`SLOT`), all 0 before the first dispatch; 0 if there is no such buffer.
    `apart`: inputs must not alias outputs, because they are read after outputs are stored: by a later dispatch, if the kernel had
    too many arguments for one, or because a row is too long to be held.
    """

    kernel: Kernel
    variant: Variant
    text: str
    dispatches: tuple[Dispatch, ...]
    alignment: tuple[int, ...]
    errors: int = 0
    apart: bool = False

    def aligned(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether buffers are aligned as the code requires. On a device, offsets into buffers count, not host addresses."""
        return all(_start(t) % a == 0 for t, a in zip(tensors, self.alignment, strict=True) if a > 1)

    def calls(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int] = (),
        scalars: Sequence[Number] = (),
        errors: torch.Tensor | None = None,
    ) -> Iterator[Call]:
        """Yield the calls in order; none if the kernel has no points."""
        numbers: dict[str, Any] = {
            "sizes": list(sizes),
            "reals": [float(x) for x, s in zip(scalars, self.kernel.scalars, strict=True) if s.dtype in ("f32", "f64")],
            "integers": [
                int(x) for x, s in zip(scalars, self.kernel.scalars, strict=True) if s.dtype in ("i64", "bool")
            ],
            "errors": errors,
        }
        given = apart(tensors, self.kernel) if self.apart else tensors
        for d in self.dispatches:
            threads = tuple(evaluate(n, sizes) for n in d.threads)
            if math.prod(threads) > 0:
                args = tuple(given[a.buffer] if a.kind == "buffer" else numbers[a.kind] for a in d.arguments)
                yield Call(d.entry, args, (threads[0], threads[1], threads[2]), d.group)


def _start(t: torch.Tensor) -> int:
    """Return the start of a tensor in bytes: on a device the offset, since allocations are aligned to 256."""
    return t.data_ptr() if t.device.type == "cpu" else int(t.storage_offset()) * t.element_size()


def apart(tensors: Sequence[torch.Tensor], kernel: Kernel) -> list[torch.Tensor]:
    """Return the tensors, with copies of inputs that alias an output, because they are read after it is stored."""
    written = [_memory(t) for t, b in zip(tensors, kernel.buffers, strict=True) if b.access != "in"]
    return [
        _copy(t) if b.access == "in" and any(_meet(_memory(t), w) for w in written) else t
        for t, b in zip(tensors, kernel.buffers, strict=True)
    ]


def _memory(t: torch.Tensor) -> tuple[int, int]:
    """Return the tensor's first and last byte address."""
    start = t.untyped_storage().data_ptr() + int(t.storage_offset()) * t.element_size()
    return start, start + _elements(t) * t.element_size()


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _elements(t: torch.Tensor) -> int:
    """Return the number of elements from the first to the last, gaps included."""
    return 0 if t.numel() == 0 else 1 + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))


def _copy(t: torch.Tensor) -> torch.Tensor:
    return t.as_strided((_elements(t),), (1,)).clone().as_strided(t.shape, t.stride(), 0)


def most_threads(group: Three) -> str:
    """Return the attribute that limits a function's threadgroup size, so that Metal's compiler allocates few enough registers for a
    threadgroup this large. Without it, a kernel that holds much of a row may be refused at dispatch."""
    return f"[[max_total_threads_per_threadgroup({math.prod(group)})]]"


def error_word(errors: torch.Tensor) -> int:
    """Return the word of the failed check that eager makes first (`fusewright.toolkit.ir.checks`), or 0. Each check has four words:
    its number if it failed, the index in two words, padding."""
    failed = [row for row in errors.cpu().view(-1, 4).tolist() if row[0]]
    if not failed:
        return 0
    site, low, high, _ = min(failed)
    return word(site, (high << 32) | (low & 0xFFFFFFFF)) if site != ZERO_DIVISION else ZERO_DIVISION
