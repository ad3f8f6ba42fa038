"""A linear of fp32 on Arm with bf16 products: `out = bf16(x) @ weight.T (+ bias)`, with sums, bias and `out` in fp32.

`bfmmla` multiplies two rows of 4 by two columns of 4 at once. Weights are rounded to bf16 and packed for it once; rows of `x` are
packed tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fusewright_cpu.emit.pointwise import cast
from fusewright_cpu.emit.text import Module, V, i64
from fusewright_cpu.kernels.arm.tiles import COLUMNS, STEP, Tiles, emit_tiles
from fusewright_cpu.kernels.by_hand import Bf16Linear
from fusewright_cpu.kernels.parts import load

WIDTH = STEP // 2
"""Elements of a row per step of the inner loop."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Pack [n, k] as bf16 for the kernel, one-dimensional: pad with zeros to whole tiles, and store register after register."""
    n, k = (-(-size // of) * of for size, of in zip(weight.shape, (COLUMNS, WIDTH), strict=True))
    full = torch.nn.functional.pad(weight.bfloat16(), (0, k - weight.shape[1], 0, n - weight.shape[0]))
    return full.view(n // 2, 2, k // 4, 4).permute(0, 2, 1, 3).reshape(-1)


def emit_bf16_linear(module: Module, a: Bf16Linear, name: str, parallel: bool) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    emit_tiles(_Body(module, a, f"{name}.body"), name, parallel)


class _Body(Tiles):
    """Tiles of bf16."""

    columns = group = 2
    bytes: ClassVar[int] = 2
    sum_type: ClassVar[str] = "float"

    def __init__(self, module: Module, a: Bf16Linear, name: str) -> None:
        super().__init__(module, name, a.buffers, len(a.symbols))
        self.a = a

    def eight(self, row: V, j: V, there: V | None) -> V:
        f = self.f
        x = load(f, "float", f.gep("float", self.base["x"], f.add(row, j)), 4, 4, there)
        return cast(f, x, "f32", "bf16")

    def multiply(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V]) -> list[V]:
        return self.squares(xs, ws, k, sums, "bfmmla")

    def result(self, sums: Sequence[V], row: V, c: V, packed: V) -> None:
        f = self.f
        for i, x in enumerate(sums):
            first = f.add(c, i64(4 * i))
            if self.a.bias:
                x = f.bin("fadd", x, load(f, "float", f.gep("float", self.base["bias"], first), 4))
            to = f.gep("float", self.base["out"], f.add(f.mul(row, self.n), first))
            self.store(x, to, f.bin("sub", self.n, first))
