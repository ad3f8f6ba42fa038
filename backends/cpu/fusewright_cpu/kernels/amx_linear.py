"""A linear of bf16 on AMX: `out = after(x @ weight.T (+ bias) (+ other))`, with fp32 sums that are rounded once, behind all of it.

A block is 32 rows by 32 columns, in four tiles of sums; panels of weights are tiles already. The loops are those of `panels`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusewright_cpu.emit.text import Module, V, i64
from fusewright_cpu.kernels.amx import PAIRS, TILE_ROWS, Tiles
from fusewright_cpu.kernels.by_hand import AMX_BLOCK as BLOCK
from fusewright_cpu.kernels.by_hand import AmxLinear
from fusewright_cpu.kernels.panels import Panels, emit_panels
from fusewright_cpu.kernels.parts import each

STEP = 2 * PAIRS
"""Elements of k per tile."""
TILE = 1024
"""Bytes of a tile."""
PANEL = 2 * TILE
"""Bytes of a panel of weights per step of k."""
LINES = 8
"""Cache lines of the next panel that are fetched per step: all of it in four blocks of rows."""
SUM00, SUM01, SUM10, SUM11, X0, X1, W0, W1 = range(8)


def packing(n: int, k: int, columns: int = BLOCK) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how a weight [n, k] is packed, `k` a multiple of 32: the padding with zeros, the shape of the padded weight as panels,
    halves, columns, steps, rows and pairs, and the order of these in memory."""
    return (0, 0, 0, -n % BLOCK), (-(-n // BLOCK), 2, PAIRS, k // STEP, PAIRS, 2), (0, 3, 1, 4, 2, 5)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight."""
    pad, shape, order = packing(*weight.shape)
    return torch.nn.functional.pad(weight, pad).view(shape).permute(order).contiguous()


def emit_amx_linear(module: Module, a: AmxLinear, name: str, parallel: bool, tiles: Callable[..., Tiles] = Tiles) -> None:
    """Add the function `name` (see `emit_panels`)."""
    emit_panels(module, a, name, parallel, _OnTiles(module, a, f"{name}.body", tiles))


class _OnTiles(Panels):
    columns, rows, held, chunk, dtype, products_per_unit = BLOCK, BLOCK, BLOCK, 4 * BLOCK, "bf16", 2 * STEP

    def __init__(self, module: Module, a: AmxLinear, name: str, tiles: Callable[..., Tiles]) -> None:
        super().__init__(module, a, name)
        self.tiles = tiles(self.f)

    def panel_bytes(self) -> V:
        self.steps = self.f.bin("sdiv", self.size["k"], i64(STEP))
        self.row_bytes = self.f.mul(self.size["step"], i64(2))
        return self.f.mul(self.steps, i64(PANEL))

    def ahead(self, row: V) -> V:
        return self.f.mul(row, i64(LINES * 64 // BLOCK))

    def run(self, work: Callable[[], None]) -> None:
        self.tiles.configure()
        work()
        self.tiles.release()

    def products(self, row: V, weights: V, ahead: V) -> None:
        f, t = self.f, self.tiles
        for tile in (SUM00, SUM01, SUM10, SUM11):
            t.zero(tile)
        upper = f.gep("i16", self.base["x"], f.mul(row, self.size["step"]))
        lower = f.gep("i16", upper, f.mul(self.size["step"], i64(TILE_ROWS)))

        def step(s: V) -> None:
            at = f.mul(s, i64(PANEL))
            w, x = f.gep("i8", weights, at), f.mul(s, i64(STEP))
            self.fetch(f.gep("i8", ahead, at), LINES)
            t.load(W0, w, i64(64))
            t.load(X0, f.gep("i16", upper, x), self.row_bytes)
            t.multiply(SUM00, X0, W0)
            t.load(W1, f.gep("i8", w, i64(TILE)), i64(64))
            t.multiply(SUM01, X0, W1)
            t.load(X1, f.gep("i16", lower, x), self.row_bytes)
            t.multiply(SUM10, X1, W0)
            t.multiply(SUM11, X1, W1)

        each(f, i64(0), self.steps, 1, step)
        for tile, (i, j) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
            t.store(tile, f.gep("float", self.sums, i64(i * TILE_ROWS * BLOCK + j * PAIRS)), i64(4 * BLOCK))
