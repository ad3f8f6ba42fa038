"""Which block of sums a product or convolution of fp32 computes at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusewright_cpu.kernels.by_hand import panels_of
from fusewright_cpu.target import CpuTarget

NARROW_COST = 1.08
"""Time of a narrow panel's products in a convolution: blocks of 7 rows have few sums (3x3 to 32 channels: 1.1 of 12 rows')."""


@dataclass(frozen=True)
class Tile:
    """Pixels and channels of a block, and how long its products take relative to the best."""

    rows: int
    columns: int
    cost: float = 1.0
    narrow: bool = False
    """Whether the last panels are narrower (see `by_hand.VectorLinear`)."""

    def work(self, pixels: int, channels: int) -> float:
        """Return how long a result of so many pixels and channels takes."""
        (wide, columns), *rest = panels_of(channels, self.columns, self.narrow)
        width = wide * columns + NARROW_COST * sum(n * columns for n, columns in rest)
        return math.ceil(pixels / self.rows) * self.rows * width * self.cost


TILES = {
    # 2-core AMD Zen 3, 2026-11-25: docs/studies/onednn.md
    32: (Tile(6, 16), Tile(4, 24, 1.1), Tile(4, 16, 1.1)),
    # 2-core Xeon (AVX-512), 2026-11-27: the same; most fill 24 of the 32 registers with sums
    64: (Tile(8, 48), Tile(12, 32, 1.03), Tile(6, 64, 1.03), Tile(16, 16, 1.3)),
}
"""Blocks of sums that fit in registers, by the bytes of one."""


LINEAR_TILES = {
    # the same Xeon, 2026-11-28: 7 divides the pixels of most images, and blocks of 7 or 8 rows by 32 columns lose nothing; one
    # number of rows for almost all needs the fewest kernels
    64: (Tile(7, 48, narrow=True), Tile(8, 48, 1.02, narrow=True), Tile(16, 16, 1.3)),
}
"""The same for linears."""
CONV_TILES = {32: TILES[32], 64: (*LINEAR_TILES[64], Tile(12, 32))}
"""The same for convolutions (the same Xeon, 2026-11-28)."""
FIRST_TILES = {32: TILES[32], 64: (Tile(14, 32), Tile(12, 32), Tile(8, 48), Tile(6, 64), Tile(16, 16, 1.3))}
"""The same for convolutions of few channels, whose pixels need no pointers of their own (2-core Xeon, 2026-11-28)."""


def conv_tile_of(pixels: int, channels: int, target: CpuTarget) -> Tile | None:
    """Return the tile that wastes least on a convolution's result of so many pixels and channels of a group, or None."""
    return _best(CONV_TILES, pixels, channels, target)


def tile_of(pixels: int, channels: int, target: CpuTarget) -> Tile | None:
    """Return the tile that wastes least on a result of so many pixels and channels of a group, or None."""
    return _best(TILES, pixels, channels, target)


def linear_tile_of(rows: int, columns: int, target: CpuTarget) -> Tile | None:
    """Return the tile that wastes least on a linear's result, or None."""
    return _best(LINEAR_TILES, rows, columns, target)


def first_tile_of(width: int, channels: int, target: CpuTarget) -> Tile | None:
    """Return the tile that wastes least on lines of a result of few channels' convolution, or None."""
    return _best(FIRST_TILES, width, channels, target)


def _best(tiles: Mapping[int, Sequence[Tile]], rows: int, columns: int, target: CpuTarget) -> Tile | None:
    fitting = (t for t in tiles.get(target.vector_bytes, ()) if t.rows <= rows)
    return min(fitting, key=lambda t: t.work(rows, columns), default=None)
