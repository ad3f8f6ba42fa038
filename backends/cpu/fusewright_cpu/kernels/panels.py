"""Loops of a linear with packed weights, for the kernels of `amx_linear` and `vector_linear`.

Weights are packed in panels of columns in the order of reading. A work item is one panel for a chunk of rows, block after block.
Each thread has a share of successive items, whose results lie side by side; when it is done it takes items of others, because
cores of a virtual machine, or beside other processes, differ in speed from one moment to the next. While an item is computed, the
next panel is fetched, for the weights of a model come from memory (docs/studies/onednn.md).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.math import ACTIVATIONS
from fusewright_cpu.emit.pointwise import cast, memory_type, to_bf16s
from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.by_hand import AmxLinear, VectorLinear
from fusewright_cpu.kernels.parts import ceil_div, each, fetch, least, load, store, taken, word
from fusewright_cpu.policy import LOOPS

APART = 8
"""Words between the counters of threads: a cache line."""
LINE = 64
"""Bytes of a cache line."""
TOGETHER = 4
"""Rows of a block that are rounded together."""


def emit_panels(module: Module, a: AmxLinear | VectorLinear, name: str, parallel: bool, body: Panels) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`), of
    which `body` is the function `name.body`."""
    body.write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    m, n, k = (word(f, block, len(a.buffers) + at) for at in range(3))
    items = f.mul(ceil_div(f, n, i64(body.columns)), ceil_div(f, m, i64(body.chunk)))
    work = f.mul(f.mul(m, n), f.add(f.bin("sdiv", k, i64(body.products_per_unit)), i64(2)))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    shared = f.let("ptr", 1, f"alloca i64, {f.mul(team, i64(APART))}, align 64")
    each(f, i64(0), team, 1, lambda t: f.raw(f"store i64 0, {f.gep('i64', shared, f.mul(t, i64(APART)))}"))
    f.raw(f"store {team}, {f.gep('i64', shared, i64(1))}")
    start(f, name, block, team, shared, team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


class Panels(abc.ABC):
    """`void body(ptr block, i64 lo, i64 hi, ptr shared)`: a thread, number `lo`. `shared` holds for each thread, APART words apart,
    how many items of its share are taken, and in its second word the number of threads."""

    columns: ClassVar[int]
    rows: ClassVar[int]
    """Rows of a block, which are multiplied together."""
    chunk: ClassVar[int]
    """Rows of a work item."""
    dtype: ClassVar[str]
    products_per_unit: ClassVar[int]
    """Products that take as long as one element of a loop kernel."""

    def __init__(self, module: Module, a: AmxLinear | VectorLinear, name: str) -> None:
        self.a = a
        self.f = f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        self.w = min(module.target.vector_bytes // 4, 16)
        self.sums = f.alloca("float", self.rows * self.columns)
        """Of a block, row after row."""
        block, names = f.args[0], [b.name for b in a.buffers]
        self.base = {name: f.conv("inttoptr", word(f, block, at), "ptr") for at, name in enumerate(names)}
        self.size = {s: word(f, block, len(names) + at) for at, s in enumerate(a.symbols)}
        first = len(names) + len(a.symbols)
        bits = [f.conv("bitcast", word(f, block, first + at), "double") for at in range(len(a.scalars))]
        self.scalars = [f.conv("fptrunc", x, "float") for x in bits]
        self.element = memory_type(self.dtype)

    @abc.abstractmethod
    def products(self, row: V, weights: V, ahead: V) -> None:
        """Compute the sums of a block from a row on, and fetch lines of the next panel at `ahead`."""

    @abc.abstractmethod
    def panel_bytes(self) -> V:
        """Return the bytes of a panel."""

    @abc.abstractmethod
    def ahead(self, row: V) -> V:
        """Return where a block that begins `row` rows into its chunk starts to fetch, in bytes."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def write(self) -> None:
        f = self.f
        self.bytes = self.panel_bytes()
        self.panels = ceil_div(f, self.size["n"], i64(self.columns))
        items = f.mul(self.panels, ceil_div(f, self.size["m"], i64(self.chunk)))
        team = f.let("i64", 1, f"load i64, {f.gep('i64', f.args[3], i64(1))}")

        def of_thread(t: V) -> None:
            whose = f.bin("srem", f.add(f.args[1], t), team)
            first, end = (f.bin("sdiv", f.mul(items, n), team) for n in (whose, f.add(whose, i64(1))))
            taken(f, f.gep("i64", f.args[3], f.mul(whose, i64(APART))), f.bin("sub", end, first), partial(self._item, first))

        self.run(lambda: each(f, i64(0), team, 1, of_thread))
        f.raw("ret void")
        f.finish()

    def _item(self, first: V, number: V, following: V) -> None:
        """Compute a panel for the rows of a chunk."""
        f, size = self.f, self.size
        item = f.add(first, number)
        panel, row = f.bin("srem", item, self.panels), f.mul(f.bin("sdiv", item, self.panels), i64(self.chunk))
        weights, ahead = (self._weights(p) for p in (panel, f.bin("srem", f.add(first, following), self.panels)))
        last = f.bin("sub", size["m"], i64(self.rows))

        def block(at: V) -> None:
            here = least(f, f.add(row, at), last)  # the last block overlaps the one before it
            self.products(here, weights, f.gep("i8", ahead, self.ahead(at)))
            self._finish(here, panel)

        each(f, i64(0), least(f, f.bin("sub", size["m"], row), i64(self.chunk)), self.rows, block)

    def _weights(self, panel: V) -> V:
        return self.f.gep("i8", self.base["weight"], self.f.mul(panel, self.bytes))

    def fetch(self, p: V, lines: int) -> None:
        """Fetch some cache lines."""
        for line in range(lines):
            fetch(self.f, self.f.gep("i8", p, i64(LINE * line)))

    def _finish(self, row: V, panel: V) -> None:
        """Store the results of a block."""
        f, a = self.f, self.a
        column = f.mul(panel, i64(self.columns))
        parts = range(0, self.columns, self.w)
        left = f.bin("sub", self.size["n"], column)
        there = [f.cmp("icmp slt", f.iota(self.w), f.bin("sub", left, i64(c))) for c in parts]
        bias = [load(f, "float", f.gep("float", self.base["bias"], f.add(column, i64(c))), self.w) for c in parts] if a.bias else []

        def some(first: V) -> None:
            made, places = [], []
            for r in range(TOGETHER):
                i = f.add(first, i64(r))
                start = f.add(f.mul(f.add(row, i), self.size["n"]), column)
                for v, c in enumerate(parts):
                    x = load(f, "float", f.gep("float", self.sums, f.add(f.mul(i, i64(self.columns)), i64(c))), self.w, 4 * self.w)
                    x = f.bin("fadd", x, bias[v]) if a.bias else x
                    at = f.add(start, i64(c))
                    if a.add:
                        other = load(f, self.element, f.gep(self.element, self.base["other"], at), self.w, 2, there[v])
                        x = f.bin("fadd", x, cast(f, other, self.dtype, "f32"))
                    made.append(ACTIVATIONS[a.after](f, x, *self.scalars))
                    places.append((f.gep(self.element, self.base["out"], at), there[v]))
            for x, (p, mask) in zip(to_bf16s(f, made) if self.dtype == "bf16" else made, places, strict=True):
                store(f, x, p, 2, mask)

        each(f, i64(0), i64(self.rows), TOGETHER, some)
