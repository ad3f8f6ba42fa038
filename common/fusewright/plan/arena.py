"""The arena: one block of memory for all intermediate buffers whose size is known, laid out from their lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """Bytes needed from instruction `start` to instruction `end`, both included."""

    id: int
    bytes: int
    start: int
    end: int


def layout(buffers: Sequence[Buffer], align: int) -> tuple[dict[int, int], int]:
    """Offsets by buffer id, multiples of `align` bytes, and the size of the arena.

    Greedy by size: the largest buffer first, each at the lowest offset where no buffer that lives at the same time lies
    (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, section 5).
    """
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, Buffer]] = []
    total = 0
    for b in sorted(buffers, key=lambda b: (-b.bytes, b.start, b.id)):
        need = -(-b.bytes // align) * align
        at = 0
        for low, high, other in sorted(placed, key=lambda p: p[0]):
            if other.start <= b.end and b.start <= other.end:
                if at + need <= low:
                    break
                at = max(at, high)
        offsets[b.id] = at
        placed.append((at, at + need, b))
        total = max(total, at + need)
    return offsets, total
