"""Which block of sums a product or convolution of fp32 computes at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusewright_cpu.target import CpuTarget


@dataclass(frozen=True)
class Tile:
    """Pixels and channels of a block, and how long its products take relative to the best."""

    rows: int
    columns: int
    cost: float = 1.0


TILES = {
    # 2-core AMD Zen 3, 2026-11-25: docs/studies/onednn.md
    32: (Tile(6, 16), Tile(4, 24, 1.1), Tile(4, 16, 1.1)),
    # 2-core Xeon (AVX-512), 2026-11-27: the same; most fill 24 of the 32 registers with sums
    64: (Tile(8, 48), Tile(12, 32, 1.03), Tile(6, 64, 1.03), Tile(16, 16, 1.3)),
}
"""Blocks of sums that fit in registers, by the bytes of one."""


def tile_of(pixels: int, channels: int, target: CpuTarget) -> Tile | None:
    """Return the tile that wastes least on a result of so many pixels and channels of a group (of a linear, rows and columns), or
    None."""

    def work(t: Tile) -> float:
        return math.ceil(pixels / t.rows) * t.rows * math.ceil(channels / t.columns) * t.columns * t.cost

    return min((t for t in TILES.get(target.vector_bytes, ()) if t.rows <= pixels), key=work, default=None)
