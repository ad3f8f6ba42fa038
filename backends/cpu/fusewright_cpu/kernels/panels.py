"""Loops of a product with packed weights, for the kernels of `amx_linear`, `vector_linear` and `direct_conv`.

Weights are packed in panels of columns in the order of reading. A work item is one panel for a chunk of rows, block after block.
Each thread has a share of successive items, whose results lie side by side; when it is done it takes items of others, because
cores of a virtual machine, or beside other processes, differ in speed from one moment to the next. While an item is computed, the
next panel is fetched, for the weights of a model come from memory (docs/studies/onednn.md).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.math import ACTIVATIONS
from fusewright_cpu.emit.pointwise import cast, memory_type, to_bf16s
from fusewright_cpu.emit.text import Fn, Module, V, const, i64
from fusewright_cpu.kernels.by_hand import NARROW, WIDE, AmxLinear, DirectConv, FirstConv, VectorLinear
from fusewright_cpu.kernels.parts import ceil_div, each, fetch, least, load, store, taken, word
from fusewright_cpu.policy import LOOPS

APART = 8
"""Words between the counters of threads: a cache line."""
LINE = 64
"""Bytes of a cache line."""
TOGETHER = (4, 3, 2, 1)
"""Rows of a block that are rounded together: the first that divides a block."""

MOST_LANES = 16
"""Elements of the widest register."""
SHORT = frozenset({"", "relu", "clamp", "leaky_relu", "hardswish", "hardsigmoid"})
"""Activations of a few instructions: sums are stored out of registers, each row with code of its own."""

Product: TypeAlias = AmxLinear | VectorLinear | DirectConv | FirstConv


def emit_panels(module: Module, a: Product, name: str, parallel: bool, body: Panels) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`), of
    which `body` is the function `name.body`."""
    body.write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    size = sizes(f, a, block)
    rows, panels = body.of_item(f, size, threads)
    items = f.mul(ceil_div(f, body.count(f, size), panels), ceil_div(f, size["m"], rows))
    work = f.mul(f.mul(size["m"], body.width(f, size)), f.add(f.bin("sdiv", size["k"], i64(body.products_per_unit)), i64(2)))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    shared = f.let("ptr", 1, f"alloca i64, {f.mul(team, i64(APART))}, align 64")
    each(f, i64(0), team, 1, lambda t: f.raw(f"store i64 0, {f.gep('i64', shared, f.mul(t, i64(APART)))}"))
    for at, number in enumerate((team, rows, panels), 1):
        f.raw(f"store {number}, {f.gep('i64', shared, i64(at))}")
    start(f, name, block, team, shared, team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


def kinds_of_panels(f: Fn, n: V) -> tuple[V, V, V]:
    """Return the number of wide panels of a weight of n columns, that of all, and their columns (see `by_hand.panels_of`)."""
    vectors = ceil_div(f, n, i64(MOST_LANES))
    left = f.bin("urem", vectors, i64(3))
    wide = f.bin("sub", f.bin("udiv", vectors, i64(3)), f.conv("zext", f.cmp("icmp eq", left, i64(1)), "i64"))
    wide = f.select(f.cmp("icmp slt", wide, i64(0)), i64(0), wide)
    narrow = ceil_div(f, f.bin("sub", n, f.mul(wide, i64(WIDE))), i64(NARROW))
    return wide, f.add(wide, narrow), f.add(f.mul(wide, i64(WIDE)), f.mul(narrow, i64(NARROW)))


def column_of(f: Fn, panel: V, wide: V) -> V:
    """Return where the columns of a panel begin, the first of which are wide."""
    before = least(f, panel, wide)
    return f.add(f.mul(before, i64(WIDE)), f.mul(f.bin("sub", panel, before), i64(NARROW)))


def sizes(f: Fn, a: Product, block: V) -> dict[str, V]:
    """Return the sizes in an argument block, by name."""
    return {name: word(f, block, len(a.buffers) + at) for at, name in enumerate(a.symbols)}


class Panels(abc.ABC):
    """`void body(ptr block, i64 lo, i64 hi, ptr shared)`: a thread, number `lo`. `shared` holds for each thread, APART words apart,
    how many items of its share are taken, and behind the first count the number of threads, and the rows and panels of an item."""

    columns: int
    rows: int
    """Rows of a block, which are multiplied together."""
    chunk: int
    """Rows of a work item."""
    held: int
    """Rows whose sums are in memory."""
    held_panels = 1
    dtype: str
    products_per_unit: int
    """Products that take as long as one element of a loop kernel."""

    def __init__(self, module: Module, a: Product, name: str) -> None:
        self.a = a
        self.f = f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        self.w = min(module.target.vector_bytes // 4, MOST_LANES)
        self.sums = f.alloca("float", self.held_panels * self.held * self.columns)
        """Of a block or more, row after row."""
        block, names = f.args[0], [b.name for b in a.buffers]
        self.base = {name: f.conv("inttoptr", word(f, block, at), "ptr") for at, name in enumerate(names)}
        self.size = sizes(f, a, block)
        first = len(names) + len(a.symbols)
        bits = [f.conv("bitcast", word(f, block, first + at), "double") for at in range(len(a.scalars))]
        self.scalars = [f.conv("fptrunc", x, "float") for x in bits]
        self.element = memory_type(self.dtype)

    def block(self, row: V, panel: V, weights: V, ahead: V) -> None:
        """Compute a block from a row on."""
        self.products(row, weights, ahead)
        self.finish(row, panel, self.sums)

    def products(self, row: V, weights: V, ahead: V) -> None:
        """Compute the sums of a block from a row on, and fetch lines of the next panel at `ahead`."""
        raise NotImplementedError

    @abc.abstractmethod
    def panel_bytes(self) -> V:
        """Return the bytes of a panel."""

    def count(self, f: Fn, size: Mapping[str, V]) -> V:
        """Return the number of panels."""
        return ceil_div(f, size["n"], i64(self.columns))

    def width(self, f: Fn, size: Mapping[str, V]) -> V:
        """Return the results of a row."""
        return size["n"]

    def of_item(self, f: Fn, size: Mapping[str, V], threads: V) -> tuple[V, V]:
        """Return the rows of a work item, a multiple of those of a block, and its panels."""
        return i64(self.chunk), i64(1)

    def place(self, panel: V) -> tuple[V, V, V]:
        """Return where the columns of a panel begin, how many are left from there on, and how far rows of the result are apart."""
        column = self.f.mul(panel, i64(self.columns))
        return column, self.f.bin("sub", self.size["n"], column), self.size["n"]

    def start_of(self, row: V, i: V, apart: V) -> V:
        """Return where row `i` of a block begins in the result."""
        return self.f.mul(self.f.add(row, i), apart)

    def ahead(self, row: V) -> V:
        """Return where a block that begins `row` rows into its chunk starts to fetch, in bytes."""
        raise NotImplementedError

    def run(self, work: Callable[[], None]) -> None:
        work()

    def write(self) -> None:
        f = self.f
        self.bytes = self.panel_bytes()
        team, self.item_rows, self.item_panels = (word(f, f.args[3], at) for at in (1, 2, 3))
        self.panels = self.count(f, self.size)
        self.strips = ceil_div(f, self.panels, self.item_panels)
        items = f.mul(self.strips, ceil_div(f, self.size["m"], self.item_rows))

        def of_thread(t: V) -> None:
            whose = f.bin("srem", f.add(f.args[1], t), team)
            first, end = (f.bin("sdiv", f.mul(items, n), team) for n in (whose, f.add(whose, i64(1))))
            taken(f, f.gep("i64", f.args[3], f.mul(whose, i64(APART))), f.bin("sub", end, first), partial(self._item, first))

        self.run(lambda: each(f, i64(0), team, 1, of_thread))
        f.raw("ret void")
        f.finish()

    def _item(self, first: V, number: V, following: V) -> None:
        """Compute panels for the rows of a chunk."""
        f, size = self.f, self.size
        item = f.add(first, number)
        strip, row = f.bin("srem", item, self.strips), f.mul(f.bin("sdiv", item, self.strips), self.item_rows)
        panel, then = (f.mul(n, self.item_panels) for n in (strip, f.bin("srem", f.add(first, following), self.strips)))
        self.blocks(row, least(f, f.bin("sub", size["m"], row), self.item_rows), panel, then)

    def blocks(self, row: V, count: V, panel: V, then: V) -> None:
        """Compute `count` rows from one on of the panels from one on; those of the next item begin with `then`."""
        f = self.f
        weights, ahead = self.weights(panel), self.weights(then)
        last = f.bin("sub", self.size["m"], i64(self.rows))

        def block(at: V) -> None:
            here = least(f, f.add(row, at), last)  # the last block overlaps the one before it
            self.block(here, panel, weights, f.gep("i8", ahead, self.ahead(at)))

        each(f, i64(0), count, self.rows, block)

    def weights(self, panel: V) -> V:
        return self.f.gep("i8", self.base["weight"], self.f.mul(panel, self.bytes))

    def fetch(self, p: V, lines: int) -> None:
        """Fetch some cache lines."""
        for line in range(lines):
            fetch(self.f, self.f.gep("i8", p, i64(LINE * line)))

    def finish(self, row: V, panel: V, sums: V) -> None:
        """Store the results of a block."""
        f = self.f
        column, left, apart = self.place(panel)
        if self.w == MOST_LANES:  # AVX-512 stores as fast with a mask
            return self._store(row, column, apart, sums, left)
        whole = f.cmp("icmp sge", left, i64(self.columns))

        def stored(left: V | None) -> list[V]:
            self._store(row, column, apart, sums, left)
            return []

        f.when(whole, lambda: stored(None))
        f.when(f.bin("xor", whole, const(True, "i1")), lambda: stored(left))

    def _store(self, row: V, column: V, apart: V, sums: V, left: V | None) -> None:
        """Store a block whose first columns are `left`, by default all."""
        f = self.f
        together = next(n for n in TOGETHER if self.rows % n == 0)
        store_rows = self._storing(row, column, apart, left)

        def some(first: V) -> None:
            rows = [f.add(first, i64(r)) for r in range(together)]
            places = [f.add(f.mul(i, i64(self.columns)), i64(c)) for i in rows for c in self._parts_of_row()]
            store_rows(rows, [load(f, "float", f.gep("float", sums, p), self.w, 4 * self.w) for p in places])

        each(f, i64(0), i64(self.rows), together, some)

    def end_block(self, row: V, panel: V, sums: list[V]) -> None:
        """Store the results of a block whose sums are in registers, directly if that is little code."""
        f = self.f
        if self.w != MOST_LANES or self.a.after not in SHORT:
            for i, x in enumerate(sums):
                store(f, x, f.gep("float", self.sums, i64(i * x.w)), 4 * x.w)
            return self.finish(row, panel, self.sums)
        column, left, apart = self.place(panel)
        self._storing(row, column, apart, left)([i64(r) for r in range(self.rows)], sums)

    def _parts_of_row(self) -> range:
        return range(0, self.columns, self.w)

    def _storing(self, row: V, column: V, apart: V, left: V | None) -> Callable[[list[V], list[V]], None]:
        """Return a function that stores rows of a block, given their numbers and their sums."""
        f, a, parts = self.f, self.a, self._parts_of_row()
        there = [None if left is None else f.cmp("icmp slt", f.iota(self.w), f.bin("sub", left, i64(c))) for c in parts]
        bias = [load(f, "float", f.gep("float", self.base["bias"], f.add(column, i64(c))), self.w) for c in parts] if a.bias else []

        def rows(numbers: list[V], sums: list[V]) -> None:
            made, places, given = [], [], iter(sums)
            for i in numbers:
                start = f.add(self.start_of(row, i, apart), column)
                for v, c in enumerate(parts):
                    x = next(given)
                    x = f.bin("fadd", x, bias[v]) if a.bias else x
                    at = f.add(start, i64(c))
                    if a.add:
                        other = load(f, self.element, f.gep(self.element, self.base["other"], at), self.w, 2, there[v])
                        x = f.bin("fadd", x, cast(f, other, self.dtype, "f32"))
                    made.append(ACTIVATIONS[a.after](f, x, *self.scalars))
                    places.append((f.gep(self.element, self.base["out"], at), there[v]))
            for x, (p, mask) in zip(to_bf16s(f, made) if self.dtype == "bf16" else made, places, strict=True):
                store(f, x, p, 2, mask)

        return rows
