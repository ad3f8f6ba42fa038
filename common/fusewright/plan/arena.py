"""The arena: one block of memory for all intermediate buffers of known size, laid out by lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """Bytes that are live from instruction `start` to instruction `end`, both included."""

    id: int
    bytes: int
    start: int
    end: int


def layout(buffers: Sequence[Buffer], align: int) -> tuple[dict[int, int], int]:
    """Return offsets by buffer id, multiples of `align` bytes, and the size of the arena.

    Greedy by size: place the largest buffer first, each at the lowest offset that overlaps no buffer live at the same time
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
