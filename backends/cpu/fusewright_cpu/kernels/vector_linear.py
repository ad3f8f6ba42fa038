"""A linear of fp32: `out = after(x @ weight.T (+ bias) (+ other))`.

With AVX-512 a block has 24 vectors of sums, which are in registers with a row of weights and one element of x. After PART
products sums are added to those before: as exact as eager's, which adds in parts as well. The loops are those of `panels`. With
AVX2 the rows are pixels of `direct_conv`.
"""

from __future__ import annotations

import torch

from fusewright_cpu.emit.text import Module, V, i64
from fusewright_cpu.kernels.by_hand import VectorLinear
from fusewright_cpu.kernels.direct_conv import Rows
from fusewright_cpu.kernels.panels import LINE, Panels, emit_panels
from fusewright_cpu.kernels.parts import add_to, each, least, load, with_products

LANES = 16
BLOCKS = 8
"""Blocks of a work item."""
PART = 256
"""The most products in one running sum (see `onednn.sums`)."""


def packing(n: int, k: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how a weight [n, k] is packed: the padding with zeros, the shape of the padded weight as panels, columns and k, and
    the order of these in memory."""
    return (0, 0, 0, -n % columns), (-(-n // columns), columns, k), (0, 2, 1)


def packed(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Pack a weight."""
    n, k = weight.shape
    pad, shape, order = packing(n, k, columns)
    return torch.nn.functional.pad(weight, pad).view(shape).permute(order).contiguous()


def emit_vector_linear(module: Module, a: VectorLinear, name: str, parallel: bool) -> None:
    """Add the function `name` (see `emit_panels`)."""
    body = _Vectors if module.target.vector_bytes == 64 else Rows
    emit_panels(module, a, name, parallel, body(module, a, f"{name}.body"))


class _Vectors(Panels):
    dtype, products_per_unit = "f32", LANES

    def __init__(self, module: Module, a: VectorLinear, name: str) -> None:
        self.rows, self.columns, self.held, self.chunk = a.rows, a.columns, a.rows, BLOCKS * a.rows
        self.vectors = a.columns // LANES
        """Vectors of a row of sums: cache lines of a panel per step of k. Each block of an item fetches one of successive lines."""
        super().__init__(module, a, name)

    def panel_bytes(self) -> V:
        return self.f.mul(self.size["k"], i64(4 * self.columns))

    def ahead(self, row: V) -> V:
        return self.f.mul(self.f.bin("udiv", row, i64(self.rows)), i64(LINE))

    def products(self, row: V, weights: V, ahead: V) -> None:
        f, k, sums = self.f, self.size["k"], self.rows * self.vectors
        xs = [f.gep("float", self.base["x"], f.mul(f.add(row, i64(r)), self.size["step"])) for r in range(self.rows)]
        places = [f.gep("float", self.sums, i64(i * LANES)) for i in range(sums)]
        zero = V("zeroinitializer", "float", LANES)

        def step(at: V, sums: list[V]) -> list[V]:
            self.fetch(f.gep("i8", ahead, f.mul(at, i64(LINE * self.vectors))), 1)
            w = f.mul(at, i64(self.columns))
            ws = [load(f, "float", f.gep("float", weights, f.add(w, i64(v * LANES))), LANES, 64) for v in range(self.vectors)]
            return with_products(f, sums, xs, at, ws)

        def part(first: V) -> None:
            end = least(f, f.add(first, i64(PART)), k)
            made = f.loop(first, end, i64(1), [zero] * sums, step)  # unrolled, LLVM would spill sums
            add_to(f, places, made, first)

        each(f, i64(0), k, PART, part)
