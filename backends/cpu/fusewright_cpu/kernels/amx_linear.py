"""A linear of bf16 on AMX: `out = after(x @ weight.T (+ bias) (+ other))`, with fp32 sums that are rounded once, behind all of it.

Weights are packed in panels of 32 columns, tile after tile in the order of reading. A work item is one panel for up to 128 rows, 32
rows by 32 columns at a time, in four tiles of sums. Each thread has a share of successive items, whose results lie side by side;
when it is done it takes items of others, because cores of a virtual machine differ in speed from one moment to the next. While an
item is computed, the next panel is fetched, for the weights of a model come from memory (docs/studies/onednn.md).
"""

from __future__ import annotations

from functools import partial

import torch

from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.pointwise import cast, to_bf16s
from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.activations import ACTIVATIONS
from fusewright_cpu.kernels.amx import PAIRS, TILE_ROWS, Tiles
from fusewright_cpu.kernels.by_hand import AMX_BLOCK as BLOCK
from fusewright_cpu.kernels.by_hand import AmxLinear
from fusewright_cpu.kernels.parts import ceil_div, each, fetch, least, load, store, taken, word
from fusewright_cpu.policy import LOOPS

STEP = 2 * PAIRS
"""Elements of k per tile."""
TILE = 1024
"""Bytes of a tile."""
PANEL = 2 * TILE
"""Bytes of a panel of weights per step of k."""
CHUNK = 4
"""Blocks of rows of a work item."""
APART = 8
"""Words between the counters of threads: a cache line."""
LINES = 8
"""Cache lines of the next panel that are fetched per step: all of it in four blocks of rows."""
TOGETHER = 4
"""Rows of a block that are rounded together."""
SUM00, SUM01, SUM10, SUM11, X0, X1, W0, W1 = range(8)


def packing(n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how a weight [n, k] is packed, `k` a multiple of 32: the padding with zeros, the shape of the padded weight as panels,
    halves, columns, steps, rows and pairs, and the order of these in memory."""
    return (0, 0, 0, -n % BLOCK), (-(-n // BLOCK), 2, PAIRS, k // STEP, PAIRS, 2), (0, 3, 1, 4, 2, 5)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight."""
    pad, shape, order = packing(*weight.shape)
    return torch.nn.functional.pad(weight, pad).view(shape).permute(order).contiguous()


def emit_amx_linear(module: Module, a: AmxLinear, name: str, parallel: bool, tiles: type[Tiles] = Tiles) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    _Body(module, a, f"{name}.body", tiles).write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    m, n, k = (word(f, block, len(a.buffers) + at) for at in range(3))
    items = f.mul(ceil_div(f, n, i64(BLOCK)), ceil_div(f, m, i64(CHUNK * BLOCK)))
    work = f.mul(f.mul(m, n), f.add(f.bin("sdiv", k, i64(2 * STEP)), i64(2)))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    shared = f.let("ptr", 1, f"alloca i64, {f.mul(team, i64(APART))}, align 64")
    each(f, i64(0), team, 1, lambda t: f.raw(f"store i64 0, {f.gep('i64', shared, f.mul(t, i64(APART)))}"))
    f.raw(f"store {team}, {f.gep('i64', shared, i64(1))}")
    start(f, name, block, team, shared, team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


class _Body:
    """`void body(ptr block, i64 lo, i64 hi, ptr shared)`: a thread, number `lo`. `shared` holds for each thread, APART words apart,
    how many items of its share are taken, and in its second word the number of threads."""

    def __init__(self, module: Module, a: AmxLinear, name: str, tiles: type[Tiles]) -> None:
        self.a = a
        self.f = f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        self.tiles = tiles(f)
        self.w = min(module.target.vector_bytes // 4, PAIRS)
        self.sums = f.alloca("float", BLOCK * BLOCK)
        block, names = f.args[0], [b.name for b in a.buffers]
        self.base = {name: f.conv("inttoptr", word(f, block, at), "ptr") for at, name in enumerate(names)}
        self.size = {s: word(f, block, len(names) + at) for at, s in enumerate(a.symbols)}
        first = len(names) + len(a.symbols)
        bits = [f.conv("bitcast", word(f, block, first + at), "double") for at in range(len(a.scalars))]
        self.scalars = [f.conv("fptrunc", x, "float") for x in bits]

    def write(self) -> None:
        f = self.f
        self.steps = f.bin("sdiv", self.size["k"], i64(STEP))
        self.panel = f.mul(self.steps, i64(PANEL))
        """Bytes of a panel of weights."""
        self.row_bytes = f.mul(self.size["step"], i64(2))
        self.panels = ceil_div(f, self.size["n"], i64(BLOCK))
        items = f.mul(self.panels, ceil_div(f, self.size["m"], i64(CHUNK * BLOCK)))
        team = f.let("i64", 1, f"load i64, {f.gep('i64', f.args[3], i64(1))}")

        def share(t: V) -> None:
            whose = f.bin("srem", f.add(f.args[1], t), team)
            first, end = (f.bin("sdiv", f.mul(items, n), team) for n in (whose, f.add(whose, i64(1))))
            taken(f, f.gep("i64", f.args[3], f.mul(whose, i64(APART))), f.bin("sub", end, first), partial(self._item, first))

        self.tiles.configure()
        each(f, i64(0), team, 1, share)
        self.tiles.release()
        f.raw("ret void")
        f.finish()

    def _item(self, first: V, taken: V, following: V) -> None:
        """Compute a panel for the rows of a chunk."""
        f, size = self.f, self.size
        item = f.add(first, taken)
        panel, row = f.bin("srem", item, self.panels), f.mul(f.bin("sdiv", item, self.panels), i64(CHUNK * BLOCK))
        weights, ahead = (self._weights(p) for p in (panel, f.bin("srem", f.add(first, following), self.panels)))
        last = f.bin("sub", size["m"], i64(BLOCK))

        def block(at: V) -> None:
            here = least(f, f.add(row, at), last)  # the last block overlaps the one before it
            self._products(here, weights, f.gep("i8", ahead, f.mul(at, i64(LINES * 64 // BLOCK))))
            self._finish(here, panel)

        each(f, i64(0), least(f, f.bin("sub", size["m"], row), i64(CHUNK * BLOCK)), BLOCK, block)

    def _weights(self, panel: V) -> V:
        return self.f.gep("i8", self.base["weight"], self.f.mul(panel, self.panel))

    def _products(self, row: V, weights: V, ahead: V) -> None:
        """Compute the sums of a block."""
        f, t = self.f, self.tiles
        for tile in (SUM00, SUM01, SUM10, SUM11):
            t.zero(tile)
        upper = f.gep("i16", self.base["x"], f.mul(row, self.size["step"]))
        lower = f.gep("i16", upper, f.mul(self.size["step"], i64(TILE_ROWS)))

        def step(s: V) -> None:
            at = f.mul(s, i64(PANEL))
            w, x = f.gep("i8", weights, at), f.mul(s, i64(STEP))
            for line in range(LINES):
                fetch(f, f.gep("i8", ahead, f.add(at, i64(64 * line))))
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

    def _finish(self, row: V, p: V) -> None:
        """Store the results of a block."""
        f, a, sums = self.f, self.a, self.sums
        column = f.mul(p, i64(BLOCK))
        parts = range(0, BLOCK, self.w)
        left = f.bin("sub", self.size["n"], column)
        there = [f.cmp("icmp slt", f.iota(self.w), f.bin("sub", left, i64(c))) for c in parts]
        bias = [load(f, "float", f.gep("float", self.base["bias"], f.add(column, i64(c))), self.w) for c in parts] if a.bias else []

        def rows(first: V) -> None:
            made, places = [], []
            for r in range(TOGETHER):
                i = f.add(first, i64(r))
                start = f.add(f.mul(f.add(row, i), self.size["n"]), column)
                for v, c in enumerate(parts):
                    x = load(f, "float", f.gep("float", sums, f.add(f.mul(i, i64(BLOCK)), i64(c))), self.w, 4 * self.w)
                    x = f.bin("fadd", x, bias[v]) if a.bias else x
                    at = f.add(start, i64(c))
                    if a.add:
                        other = load(f, "i16", f.gep("i16", self.base["other"], at), self.w, 2, there[v])
                        x = f.bin("fadd", x, cast(f, other, "bf16", "f32"))
                    made.append(ACTIVATIONS[a.after](f, x, *self.scalars))
                    places.append((f.gep("i16", self.base["out"], at), there[v]))
            for x, (p, mask) in zip(to_bf16s(f, made), places, strict=True):
                store(f, x, p, 2, mask)

        each(f, i64(0), i64(BLOCK), TOGETHER, rows)
