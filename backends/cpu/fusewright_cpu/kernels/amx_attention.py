"""Attention in bf16 with both products on AMX: the packed keys and values of `attention` are tiles already."""

from __future__ import annotations

from collections.abc import Callable

from fusewright_cpu.emit.intrinsics import multiplies_pairs
from fusewright_cpu.emit.text import Module, V, i64
from fusewright_cpu.kernels.amx import PAIRS, TILE_ROWS, Tiles
from fusewright_cpu.kernels.attention import Body
from fusewright_cpu.kernels.by_hand import Attention
from fusewright_cpu.kernels.parts import each, least, load, store
from fusewright_cpu.target import CpuTarget

SUMS, X, W = (0, 1, 2, 3), (4, 5), (6, 7)
"""Tiles: sums of two by two, two of rows, two of columns."""


class OnTiles(Body):
    """Two tiles of rows at a time, and two of keys or columns."""

    rows, most_rows = 2 * TILE_ROWS, 256
    tiles: Callable[..., Tiles] = Tiles

    @staticmethod
    def takes(a: Attention, target: CpuTarget) -> bool:
        return a.dtype == "bf16" and target.has("amx-bf16") and multiplies_pairs(target)

    def __init__(self, module: Module, a: Attention, name: str) -> None:
        super().__init__(module, a, name)
        self.t = type(self).tiles(self.f)

    def keys_per_step(self) -> int:
        return 2 * PAIRS

    def run(self, items: Callable[[], None]) -> None:
        self.t.configure()
        items()
        self.t.release()

    def rows_from(self, r0: V) -> V:
        """Rows past the last one are multiplied, but have no probabilities."""
        return least(self.f, self.f.bin("sub", self.f.add(self.last_row, i64(1)), r0), i64(self.rows))

    def multiply_keys(self, vectors: V) -> None:
        f, words = self.f, self.words

        def pair(j: V) -> None:
            for tile in SUMS:
                self.t.zero(tile)

            def step(at: V) -> None:
                for tile, row in zip(X, (0, TILE_ROWS), strict=True):
                    self._tile_load(tile, self.q_pack, f.add(at, i64(row * words)), words)
                for v, tile in enumerate(W):
                    keys = f.mul(f.add(j, i64(v)), i64(words * PAIRS))
                    self._tile_load(tile, self.k_pack, f.add(keys, f.mul(at, i64(PAIRS))), PAIRS)
                self._products(2)

            each(f, i64(0), i64(words), PAIRS, step)
            self._tile_store(self.scores, f.mul(j, i64(PAIRS)), self.block, 2)

        each(f, i64(0), vectors, 2, pair)

    def add_values(self, here: V, seen: V) -> None:
        f, width = self.f, self.width
        rows = f.gep("float", self.acc, f.mul(here, i64(width)))

        def fade(i: V) -> None:
            factor = load(f, "float", f.gep("float", self.fade, i))
            row = f.gep("float", rows, f.mul(i, i64(width)))
            for c in range(0, width, self.w):
                p = f.gep("float", row, i64(c))
                store(f, f.bin("fmul", load(f, "float", p, self.w), factor), p)

        each(f, i64(0), i64(self.rows), 1, fade)
        for c in range(0, width, 2 * PAIRS):
            self._add_columns(rows, c, min(2, (width - c) // PAIRS), seen)

    def _add_columns(self, rows: V, c: int, n: int, seen: V) -> None:
        """Add the products with `n` tiles of columns from c on."""
        f, width = self.f, self.width
        for i in range(2):
            for v in range(n):
                self._tile_load(SUMS[2 * i + v], rows, i64(i * TILE_ROWS * width + c + v * PAIRS), width)

        def step(k: V) -> None:
            for i, tile in enumerate(X):
                at = f.add(i64(i * TILE_ROWS * self.block), k)
                self.t.load(tile, f.gep("bfloat", self.weights, at), i64(2 * self.block))
            for v in range(n):
                at = f.mul(f.bin("sdiv", k, i64(2)), i64(width))
                self._tile_load(W[v], self.v_pack, f.add(at, i64(c + v * PAIRS)), width)
            self._products(n)

        each(f, i64(0), seen, 2 * PAIRS, step)
        self._tile_store(rows, i64(c), width, n)

    def _tile_load(self, tile: int, base: V, at: V, apart: int) -> None:
        """Load a tile of words, whose rows are `apart` words apart."""
        self.t.load(tile, self.f.gep("i32", base, at), i64(4 * apart))

    def _products(self, n: int) -> None:
        for i in range(2):
            for v in range(n):
                self.t.multiply(SUMS[2 * i + v], X[i], W[v])

    def _tile_store(self, base: V, at: V, apart: int, n: int) -> None:
        """Store the sums of two tiles of rows by `n` of columns."""
        for i in range(2):
            for v in range(n):
                place = self.f.add(at, i64(i * TILE_ROWS * apart + v * PAIRS))
                self.t.store(SUMS[2 * i + v], self.f.gep("float", base, place), i64(4 * apart))
