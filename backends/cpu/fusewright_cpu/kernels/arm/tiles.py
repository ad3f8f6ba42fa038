"""Loops of a product with a packed matrix on Arm, whose instruction multiplies registers of 16 bytes: two rows of 8 bytes by two
columns, or one row of 4 by four columns. Subclasses decide the element type, int8 or bf16.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from fusewright.toolkit.ir.ir import Buffer
from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.text import Fn, Module, V, const, i64
from fusewright_cpu.kernels.parts import ceil_div, each, least, load, store, word
from fusewright_cpu.policy import LOOPS

COLUMNS = 8
"""Columns of a tile; packed weights and per-column vectors are padded to a multiple of it."""
STEP = 16
"""Bytes of a row per step of the inner loop; packed rows are padded to a multiple of it."""
TILE = 32
"""Rows of `x` that are packed together."""
BLOCK = 64
"""Columns of one work item."""
HIGH, LOW = 8, 2
"""Rows multiplied together, and rows of the smaller last step."""


def emit_tiles(body: Tiles, name: str, parallel: bool) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    module = body.f.module
    body.write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    m, n, k = (word(f, block, len(body.buffers) + at) for at in range(3))
    groups = word(f, block, len(body.buffers) + 3) if body.grouped else i64(1)
    items = f.mul(f.mul(ceil_div(f, m, i64(TILE)), ceil_div(f, n, i64(BLOCK))), groups)
    work = f.bin("sdiv", f.mul(f.mul(m, groups), f.mul(n, f.add(k, i64(STEP)))), i64(COLUMNS))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    start(f, name, block, items, f.alloca("i64", 1, 8), team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


class Tiles(abc.ABC):
    """`void body(ptr block, i64 lo, i64 hi, ptr)`: work items lo to hi, each a tile of rows and a block of columns.

    Rows are packed in groups of `group`, with 8 bytes of each in turn; a register of weights holds `columns`. A packed element
    has `bytes` bytes. Buffers are "x", "weight", others and "out". Sizes begin with m, n, k and, if the rows of `x` belong to
    several products side by side (`grouped`), the number of these products.
    """

    columns: int
    group: int
    bytes: ClassVar[int] = 1
    sum_type: ClassVar[str] = "i32"
    grouped: ClassVar[bool] = False

    def __init__(self, module: Module, name: str, buffers: Sequence[Buffer], sizes: int) -> None:
        self.buffers = buffers
        self.f = f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        block, names = f.args[0], [b.name for b in buffers]
        self.base = {name: f.conv("inttoptr", word(f, block, at), "ptr") for at, name in enumerate(names)}
        self.sizes = [word(f, block, len(names) + at) for at in range(sizes)]
        self.m, self.n, self.k = self.sizes[:3]
        self.weights = self.base["weight"]
        """Weights of the current product."""

    def packed_bytes(self) -> V:
        """Return the bytes of a packed row or column, a multiple of STEP."""
        f = self.f
        return f.bin("and", f.add(f.mul(self.k, i64(self.bytes)), i64(STEP - 1)), i64(-STEP))

    def tile_of(self, packed: V) -> V:
        """Return the tile of rows that is the `packed`th to be packed."""
        return packed

    @abc.abstractmethod
    def eight(self, row: V, j: V, there: V | None) -> V:
        """Return 8 bytes of a row of `x` from element j on in packed form; at the end of a row, only those that are `there`."""

    @abc.abstractmethod
    def multiply(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V]) -> list[V]:
        """Return `sums` plus the products of STEP bytes of rows and columns, from byte k of a row on."""

    @abc.abstractmethod
    def result(self, sums: Sequence[V], row: V, c: V, packed: V) -> None:
        """Store COLUMNS elements of a row of `out` from column c on. `packed` is the row's number in the tile."""

    def packed_row(self, r: V, eights: Sequence[V]) -> None:
        """Receive the accumulators of a packed row, if `summed` returned any."""
        assert not eights

    def summed(self) -> list[V]:
        """Return the initial accumulators of a packed row: zeros."""
        return []

    def add(self, sums: Sequence[V], x: V, there: V | None) -> list[V]:
        """Return the accumulators of `summed` after 8 more bytes."""
        return []

    def write(self) -> None:
        f = self.f
        self.width = self.packed_bytes()
        f.module.declare("malloc", "ptr", ["i64"], external=True)
        f.module.declare("free", "void", ["ptr"], external=True)
        packed = f.add(f.mul(self.width, i64(TILE)), i64(STEP))
        self.rows = f.let("ptr", 1, f"call ptr @malloc({f.add(packed, i64(4 * TILE))})")
        self.totals = f.gep("i8", self.rows, packed)
        """A 32-bit number for each packed row."""
        blocks = ceil_div(f, self.n, i64(BLOCK))

        def item(i: V, carried: list[V]) -> list[V]:
            packed, part = f.bin("sdiv", i, blocks), f.bin("srem", i, blocks)
            tile = self.tile_of(packed)
            f.when(f.cmp("icmp ne", packed, carried[0]), lambda: self._pack(tile))
            self._block(tile, f.mul(part, i64(BLOCK)))
            return [packed]

        f.loop(f.args[1], f.args[2], i64(1), [i64(-1)], item)
        f.raw(f"call void @free({self.rows})")
        f.raw("ret void")
        f.finish()

    def _high(self, tile: V) -> tuple[V, V]:
        """Return (rows of a tile that are multiplied HIGH together, the same plus the LOW ones after them)."""
        f = self.f
        rows = least(f, f.bin("sub", self.m, f.mul(tile, i64(TILE))), i64(TILE))
        high = f.mul(f.bin("sdiv", f.add(rows, i64(HIGH - LOW - 1)), i64(HIGH)), i64(HIGH))
        more = f.cmp("icmp slt", high, rows)
        return high, f.select(more, f.add(high, i64(LOW)), high)

    def _row(self, tile: V, r: V) -> V:
        """Return the index of a row of `x`; past the last one, that of the last."""
        f = self.f
        return least(f, f.add(f.mul(tile, i64(TILE)), r), f.bin("sub", self.m, i64(1)))

    def _pack(self, tile: V) -> list[V]:
        f = self.f

        def row(r: V) -> None:
            first, inner = f.bin("sdiv", r, i64(self.group)), f.bin("srem", r, i64(self.group))
            at = f.add(f.mul(first, f.mul(self.width, i64(self.group))), f.mul(inner, i64(8)))
            self.packed_row(r, self.pack_row(self._row(tile, r), f.gep("i8", self.rows, at), self.summed()))

        if self.bytes > 1:
            self._pad(tile)
        each(f, i64(0), self._high(tile)[1], 1, row)
        return []

    def pack_row(self, row: V, to: V, sums: list[V]) -> list[V]:
        """Pack a row of `x`; return its accumulators."""
        return self.pack_elements(self.f.mul(row, self.k), self.k, to, sums)

    def pack_elements(self, source: V, count: V, to: V, sums: list[V]) -> list[V]:
        """Pack `count` elements from `source` on, 8 bytes at a time."""
        f, some = self.f, 8 // self.bytes
        whole = f.bin("and", count, i64(-some))

        def eight(j: V, sums: list[V], there: V | None = None) -> list[V]:
            x = self.eight(source, j, there)
            store(f, x, f.gep("i8", to, f.mul(j, i64(self.group * self.bytes))), 8)
            return self.add(sums, x, there)

        def last() -> list[V]:
            return eight(whole, sums, f.cmp("icmp slt", f.iota(some), f.bin("sub", count, whole)))

        sums = f.loop(i64(0), whole, i64(some), sums, eight)
        return f.when(f.cmp("icmp slt", whole, count), last, sums)

    def _pad(self, tile: V) -> None:
        """Fill the last step of packed rows with zeros: stale bytes could be NaN or infinity."""
        f = self.f
        rows = f.bin("sdiv", self._high(tile)[1], i64(self.group))

        def group(r: V) -> None:
            end = f.mul(f.mul(f.add(r, i64(1)), self.width), i64(self.group))
            last = f.gep("i8", self.rows, f.bin("sub", end, i64(STEP * self.group)))
            store(f, V("zeroinitializer", "i8", STEP * self.group), last, 8)

        each(f, i64(0), rows, 1, group)

    def _block(self, tile: V, first: V) -> None:
        """Compute a block of columns, for all rows of the tile."""
        f = self.f
        high, stop = self._high(tile)

        def columns(c: V) -> None:
            each(f, i64(0), high, HIGH, lambda r: self._tile(tile, r, c, HIGH))
            each(f, high, stop, LOW, lambda r: self._tile(tile, r, c, LOW))

        each(f, first, least(f, f.add(first, i64(BLOCK)), self.n), COLUMNS, columns)

    def _tile(self, tile: V, r: V, c: V, rows: int) -> None:
        """Compute `rows` rows from r on of COLUMNS columns from c on."""
        f = self.f
        x, w = f.gep("i8", self.rows, f.mul(r, self.width)), f.gep("i8", self.weights, f.mul(c, self.width))
        xs = [f.gep("i8", x, f.mul(self.width, i64(i * self.group))) for i in range(rows // self.group)]
        ws = [f.gep("i8", w, f.mul(self.width, i64(g * self.columns))) for g in range(COLUMNS // self.columns)]
        zero = V("zeroinitializer", self.sum_type, 4)
        sums = f.loop(i64(0), self.width, i64(STEP), [zero] * (len(xs) * len(ws)), lambda k, s: self.multiply(xs, ws, k, s))
        per = [sums[i * len(ws) : (i + 1) * len(ws)] for i in range(len(xs))]
        for i, found in enumerate(self.of_rows(per)):
            at = f.add(r, i64(i))
            self.result(found, self._row(tile, at), c, at)

    def load16(self, p: V, at: V, offset: int) -> V:
        """Load a register."""
        return load(self.f, "i8", self.f.gep("i8", p, self.f.add(at, i64(offset))), 16, 8)

    def squares(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V], name: str) -> list[V]:
        """Implement `multiply` with an instruction of two rows by two columns."""
        out, at = list(sums), self.f.mul(k, i64(2))
        for half in (0, 16):
            right = [self.load16(w, at, half) for w in ws]
            for i, p in enumerate(xs):
                x = self.load16(p, at, half)
                for g, w in enumerate(right):
                    out[i * len(ws) + g] = self.call(name, out[i * len(ws) + g], x, w)
        return out

    def call(self, name: str, acc: V, x: V, y: V) -> V:
        """Call a NEON instruction `acc + x y` by its name in LLVM."""
        f, (t, many) = self.f, ("i8", 16) if self.bytes == 1 else ("bfloat", 8)
        x, y = (v if self.bytes == 1 else f.let(t, many, f"bitcast {v} to <{many} x {t}>") for v in (x, y))
        full = f"llvm.aarch64.neon.{name}"
        f.module.declare(full, acc.ty, [acc.ty, x.ty, y.ty])
        return f.let(self.sum_type, 4, f"call {acc.ty} @{full}({acc}, {x}, {y})")

    def of_rows(self, sums: Sequence[Sequence[V]]) -> list[list[V]]:
        """Return the sums of each row in the order of columns."""
        if self.group == 1:
            return [list(row) for row in sums]
        out: list[list[V]] = []
        for tiles in sums:
            both = [(a, b) for a, b in zip(tiles[::2], tiles[1::2], strict=True)]
            out += [[self.f.shuffle(a, b, pick) for a, b in both] for pick in ([0, 1, 4, 5], [2, 3, 6, 7])]
        return out

    def store(self, x: V, to: V, left: V) -> None:
        """Store four elements, or the first `left` of them."""
        f = self.f
        full = f.cmp("icmp sge", left, i64(4))

        def all_of_them() -> list[V]:
            store(f, x, to, 2)
            return []

        def one(lane: int) -> list[V]:
            store(f, f.extract(x, lane), f.gep(x.t, to, i64(lane)), 2)
            return []

        def some() -> list[V]:
            for lane in range(3):
                f.when(f.cmp("icmp slt", i64(lane), left), partial(one, lane))
            return []

        f.when(full, all_of_them)
        f.when(f.bin("xor", full, const(True, "i1")), some)
