"""The cells of adaptive pools, in the place of the windows of `pooling`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.rules.kinds import Evaluator


@dataclass(frozen=True)
class Cells:
    """`count` cells along a dimension of `length` elements: cell i is floor(i * length / count) to
    ceil((i + 1) * length / count)."""

    length: int
    count: int
    dilation: ClassVar[int] = 1

    @property
    def size(self) -> int:
        """The elements of the largest cell."""
        return max(self._sizes(self.length, self.count))

    @property
    def overlap(self) -> int:
        """The most cells that hold one element."""
        return max(self._sizes(self.count, self.length))

    @staticmethod
    def _sizes(n: int, made: int) -> list[int]:
        return [-(-(i + 1) * n // made) - i * n // made for i in range(made)]

    def start(self, cell: Index) -> Index:
        return cell * self.length // self.count

    def element(self, e: Evaluator, cell: Index, i: Index | int) -> tuple[Index, Val | None]:
        """The position of a cell's element `i`, and whether the cell has it; None: every one has."""
        place = self.start(cell) + i
        if isinstance(i, int) and i < min(self._sizes(self.length, self.count)):
            return place, None
        return place, e.position(place) < e.position(self._end(cell, self.length, self.count))

    def holding(self, e: Evaluator, place: Index) -> Iterator[tuple[Index, Index, Val | None]]:
        """What may hold an element: its place, the cell, and whether it does."""
        first, least = place * self.count // self.length, min(self._sizes(self.count, self.length))
        for i in range(self.overlap):
            cell = first + i
            there = None if i < least else e.position(cell) < e.position(self._end(place, self.count, self.length))
            yield place, cell, there

    def extent(self, e: Evaluator, cell: Index, padded: bool) -> Val | int:
        """How many elements a cell has."""
        if self.length % self.count == 0:
            return self.length // self.count
        if not cell.divmods:
            return e.b.cast(e.position(self._end(cell, self.length, self.count)) - e.position(self.start(cell)), "i32")
        n, count = self.length, e.b.const(self.count, "i32")  # an index holds no quotient of a quotient
        ahead = e.b.cast(e.position(cell), "i32") * n
        return e.b.op("floordiv", ahead + (n + self.count - 1), count) - e.b.op("floordiv", ahead, count)

    @staticmethod
    def _end(cell: Index, n: int, made: int) -> Index:
        return (cell * n + (n + made - 1)) // made
