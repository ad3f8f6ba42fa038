"""AMX: eight tiles of 16 rows of 64 bytes, and products of two tiles of bf16 that are added to one of fp32.
Source: Intel SDM volume 1, chapter 18."""

from __future__ import annotations

from fusewright_cpu.emit.text import Fn, V, const, i64

TILES, TILE_ROWS, TILE_BYTES = 8, 16, 64
PAIRS = TILE_BYTES // 4
"""fp32 elements of a row, and pairs of bf16."""


class Tiles:
    """Code for tiles of full size. Numbers of tiles are part of the instructions."""

    def __init__(self, f: Fn) -> None:
        self.f = f

    def configure(self) -> None:
        """Give all tiles their full size; before anything else."""
        f = self.f
        shapes = f.alloca("i64", 8)
        words = [1, 0, *[TILE_BYTES * 0x0001_0001_0001_0001] * 2, 0, 0, TILE_ROWS * 0x0101_0101_0101_0101, 0]
        for at, word in enumerate(words):
            f.raw(f"store {const(word, 'i64')}, {f.gep('i64', shapes, i64(at))}, align 8")
        self._call("ldtilecfg", ["ptr"], f"{shapes}")

    def release(self) -> None:
        self._call("tilerelease", [], "")

    def zero(self, tile: int) -> None:
        self._call("tilezero", ["i8 immarg"], f"i8 {tile}")

    def load(self, tile: int, p: V, step: V) -> None:
        """Load a tile whose rows are `step` bytes apart."""
        self._call("tileloadd64", ["i8 immarg", "ptr", "i64"], f"i8 {tile}, {p}, {step}")

    def store(self, tile: int, p: V, step: V) -> None:
        self._call("tilestored64", ["i8 immarg", "ptr", "i64"], f"i8 {tile}, {p}, {step}")

    def multiply(self, sums: int, x: int, w: int) -> None:
        """sums[i, j] += x[i, 2 q] * w[q, 2 j] + x[i, 2 q + 1] * w[q, 2 j + 1], over all q. Subnormals count as 0."""
        self._call("tdpbf16ps", ["i8 immarg"] * 3, f"i8 {sums}, i8 {x}, i8 {w}")

    def _call(self, name: str, types: list[str], args: str) -> None:
        self.f.module.declare(f"llvm.x86.{name}", "void", types)
        self.f.raw(f"call void @llvm.x86.{name}({args})")
