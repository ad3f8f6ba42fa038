"""A linear of fp32: `out = after(x @ weight.T (+ bias) (+ other))`.

With AVX-512 a block has up to 24 vectors of sums, which are in registers with a row of weights and one element of x. After PART
products sums are added to those before: as exact as eager's, which adds in parts as well. Those of the last part are stored out of
registers: of few features, memory between them and the results would take as long as the products. The loops are those of `panels`.
With AVX2 the rows are pixels of `direct_conv`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.by_hand import NARROW, WIDE, VectorLinear
from fusewright_cpu.kernels.direct_conv import ITEMS, Rows
from fusewright_cpu.kernels.panels import LINE, Panels, column_of, emit_panels, kinds_of_panels
from fusewright_cpu.kernels.parts import add_to, added_to, each, least, load, with_products

LANES = 16
BLOCKS = 8
"""Blocks of a work item."""
SMALL = 8192
"""The most elements of a weight that stays in the first cache beside everything else."""
PART = 256
"""The most products in one running sum (see `onednn.sums`)."""


def packing(n: int, k: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how a weight [n, k] is packed: the padding with zeros, the shape of the padded weight as panels, columns and k, and
    the order of these in memory."""
    return (0, 0, 0, -n % columns), (-(-n // columns), columns, k), (0, 2, 1)


def packed(weight: torch.Tensor, a: VectorLinear) -> torch.Tensor:
    """Pack a weight."""
    (n, k), first, made = weight.shape, 0, []
    for count, columns in a.panels(n):
        rows = weight[first : min(n, first + count * columns)]
        pad, shape, order = packing(len(rows), k, columns)
        made.append(torch.nn.functional.pad(rows, pad).view(shape).permute(order).reshape(-1))
        first += count * columns
    return torch.cat(made)


def emit_vector_linear(module: Module, a: VectorLinear, name: str, parallel: bool) -> None:
    """Add the function `name` (see `emit_panels`)."""
    body = _Vectors if module.target.vector_bytes == 64 else Rows
    emit_panels(module, a, name, parallel, body(module, a, f"{name}.body"))


class _Vectors(Panels):
    dtype, products_per_unit = "f32", LANES

    def __init__(self, module: Module, a: VectorLinear, name: str) -> None:
        self.rows, self.columns, self.held, self.chunk = a.rows, a.columns, a.rows, BLOCKS * a.rows
        super().__init__(module, a, name)
        if a.narrow:
            self.wide, _, _ = kinds_of_panels(self.f, self.size["n"])
        self.lines = self.f.mul(self.size["k"], i64(4))
        """Bytes of a column."""

    def panel_bytes(self) -> V:
        return self.f.mul(self.size["k"], i64(4 * self.columns))

    def count(self, f: Fn, size: Mapping[str, V]) -> V:
        if not self.a.narrow:  # type: ignore[union-attr]
            return super().count(f, size)
        return kinds_of_panels(f, size["n"])[1]

    def place(self, panel: V) -> tuple[V, V, V]:
        column = self._column(panel)
        return column, self.f.bin("sub", self.size["n"], column), self.size["n"]

    def weights(self, panel: V) -> V:
        return self.f.gep("i8", self.base["weight"], self.f.mul(self._column(panel), self.lines))

    def _column(self, panel: V) -> V:
        """Return where the columns of a panel begin."""
        f = self.f
        if not self.a.narrow:  # type: ignore[union-attr]
            return f.mul(panel, i64(self.columns))
        return column_of(f, panel, self.wide)

    def of_item(self, f: Fn, size: Mapping[str, V], threads: V) -> tuple[V, V]:
        """Return all panels of a small weight, so that results are written in the order of memory."""
        small = f.cmp("icmp sle", f.mul(size["k"], size["n"]), i64(SMALL))
        enough = f.cmp("icmp sge", f.bin("sdiv", size["m"], i64(self.chunk)), f.mul(threads, i64(ITEMS)))
        return i64(self.chunk), f.select(f.bin("and", small, enough), self.count(f, size), i64(1))

    def blocks(self, row: V, count: V, panel: V, then: V) -> None:
        f, a = self.f, self.a
        last, ahead = f.bin("sub", self.size["m"], i64(self.rows)), self.weights(then)
        end = least(f, f.add(panel, self.item_panels), self.panels)

        def of(panel: V, here: V, at: V, columns: int) -> list[V]:
            self.columns = columns
            self.block(here, panel, self.weights(panel), f.gep("i8", ahead, self.ahead(at)))
            return []

        def block(at: V) -> None:
            here = least(f, f.add(row, at), last)  # the last block overlaps the one before it

            def of_panel(p: V) -> None:
                if not a.narrow:  # type: ignore[union-attr]
                    of(p, here, at, a.columns)
                    return
                f.choose(f.cmp("icmp slt", p, self.wide), lambda: of(p, here, at, WIDE), lambda: of(p, here, at, NARROW))

            each(f, panel, end, 1, of_panel)

        each(f, i64(0), count, self.rows, block)

    def ahead(self, row: V) -> V:
        """Each block of an item fetches one of successive lines."""
        return self.f.mul(self.f.bin("udiv", row, i64(self.rows)), i64(LINE))

    def block(self, row: V, panel: V, weights: V, ahead: V) -> None:
        f, k, vectors = self.f, self.size["k"], self.columns // LANES
        xs = [f.gep("float", self.base["x"], f.mul(f.add(row, i64(r)), self.size["step"])) for r in range(self.rows)]
        places = [f.gep("float", self.sums, i64(i * LANES)) for i in range(self.rows * vectors)]
        zero = V("zeroinitializer", "float", LANES)

        def step(at: V, sums: list[V]) -> list[V]:
            self.fetch(f.gep("i8", ahead, f.mul(at, i64(LINE * vectors))), 1)
            w = f.mul(at, i64(self.columns))
            ws = [load(f, "float", f.gep("float", weights, f.add(w, i64(v * LANES))), LANES, 64) for v in range(vectors)]
            return with_products(f, sums, xs, at, ws)

        def part(first: V, end: V) -> list[V]:
            return f.loop(first, end, i64(1), [zero] * len(places), step)  # unrolled, LLVM would spill sums

        def more(first: V) -> None:
            add_to(f, places, part(first, f.add(first, i64(PART))), first)

        last = f.bin("and", f.bin("sub", k, i64(1)), i64(-PART))
        each(f, i64(0), last, PART, more)
        made = part(last, k)
        self.end_block(row, panel, added_to(f, places, made, last))
