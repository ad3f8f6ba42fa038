"""Attention as one handwritten kernel: softmax(q k^T * scale + mask) v in one pass over the keys.

Keys and values of a block are packed once and serve many rows. Six rows at a time are multiplied with them in registers,
and their contribution of the block is added to that of the previous blocks (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). Scores, softmax and sums are fp32. Products of bf16 use the CPU's instructions
(`vdpbf16ps`, `bfdot`), with probabilities rounded to bf16, as in torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.intrinsics import dot_pairs, multiplies_pairs, near_bf16
from fusewright_cpu.emit.math import exp2
from fusewright_cpu.emit.pointwise import cast, to_bf16
from fusewright_cpu.emit.text import Fn, Module, V, const, i64
from fusewright_cpu.emit.tiles import transpose
from fusewright_cpu.kernels.by_hand import Attention
from fusewright_cpu.kernels.parts import ceil_div, each, least, load, most, store, word
from fusewright_cpu.policy import LOOPS

ROWS = 6
"""Rows of queries whose scores are in registers together (one tile)."""
MOST_ROWS = 252
"""The most rows of one work item, all of which share one packing of the keys."""
LEAST_ROWS = 48
"""The least rows of a work item: below this, packing costs too much to divide further."""
BLOCK = 1 << 14
"""Elements of the keys that are packed at a time: with the values they fit a second-level cache."""
UNROLL = 4
CHAIN = 256
"""The most keys whose values are added one after the other, as in eager's products: of more, such sums are added up, so that the
error does not grow with their number."""


def emit_attention(module: Module, a: Attention, name: str, parallel: bool, of: type[Body]) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    body = of(module, a, f"{name}.body")
    body.write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    batch, heads, rows, keys = (word(f, block, len(a.buffers) + k) for k in range(4))
    groups = f.mul(batch, heads)
    some = most(f, rows, i64(1))
    wanted = least(f, ceil_div(f, f.mul(threads, i64(4)), most(f, groups, i64(1))), ceil_div(f, some, i64(LEAST_ROWS)))
    chunks = most(f, ceil_div(f, some, i64(body.most_rows)), wanted)
    chunk = f.mul(ceil_div(f, ceil_div(f, some, chunks), i64(body.rows)), i64(body.rows))
    shared = f.alloca("i64", 1, 8)
    f.raw(f"store {chunk}, {shared}")
    items = f.mul(groups, ceil_div(f, rows, chunk))
    work = f.mul(f.mul(groups, f.mul(rows, keys)), i64(a.width // 4 + 2))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    start(f, name, block, items, shared, team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


class Body:
    """`void body(ptr block, i64 lo, i64 hi, ptr chunk)`: work items lo to hi, each a number of rows of one head.

    `word` is the unit of products: a float, or with `pairs` two bf16 in an i32. Packed widths are padded with zeros to whole
    vectors.
    """

    rows, most_rows = ROWS, MOST_ROWS

    def __init__(self, module: Module, a: Attention, name: str) -> None:
        self.a = a
        self.f = f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        target = module.target
        self.w = w = target.vector_bytes // 4
        self.vectors = 4 if target.registers == 32 else 2
        self.pairs = a.dtype == "bf16" and multiplies_pairs(target)
        self.per = 2 if self.pairs else 1
        self.word = "i32" if self.pairs else "float"
        self.words = -(-a.width // (self.per * w)) * w
        """Words of a packed row of a query or key."""
        self.width = -(-a.width // w) * w
        """Words of a packed row of values, and floats of an accumulated row."""
        self.unroll = 2 if target.arm else UNROLL
        """Words per step of a product, at most the keys of a vector. With four, LLVM spills sums on Arm."""
        self.step = self.keys_per_step()
        """Keys that are multiplied together; their number is rounded up to it."""
        self.block = max(self.step, BLOCK // self.width // self.step * self.step)
        """Keys of one block."""
        self.q_pack, self.k_pack = f.alloca(self.word, self.rows * self.words), f.alloca(self.word, self.block * self.words)
        self.v_pack = f.alloca(self.word, self.block // self.per * self.width)
        self.scores = f.alloca("float", self.rows * self.block)
        self.weights = f.alloca("bfloat", self.rows * self.block) if self.pairs else self.scores
        self.acc = f.alloca("float", self.most_rows * self.width)
        self.top, self.total = f.alloca("float", self.most_rows + w), f.alloca("float", self.most_rows + w)
        self.fresh, self.fade, self.sums = (f.alloca("float", self.rows + w) for _ in range(3))
        """Per row of a tile: the largest new score (later the shift of scores), the factor for the old sums, and the new sums."""

    def keys_per_step(self) -> int:
        return self.w

    def write(self) -> None:
        f, a, block = self.f, self.a, self.f.args[0]
        n = len(a.buffers)
        pointers = [f.conv("inttoptr", word(f, block, k), "ptr") for k in range(n)]
        self.size = {s: word(f, block, n + k) for k, s in enumerate(a.symbols)}
        bits = f.conv("bitcast", word(f, block, n + len(a.symbols)), "double")
        self.scale = f.conv("fptrunc", bits, "float")
        self.base = dict(zip((b.name for b in a.buffers), pointers, strict=True))
        self.last_row = f.bin("sub", self.size["rows"], i64(1))
        chunk = f.let("i64", 1, f"load i64, {f.args[3]}")
        chunks = ceil_div(f, self.size["rows"], chunk)

        def item(i: V) -> None:
            group, part = f.bin("sdiv", i, chunks), f.bin("srem", i, chunks)
            b, h = f.bin("sdiv", group, self.size["heads"]), f.bin("srem", group, self.size["heads"])
            self.at = {name: self._head(name, b, h) for name in self.base}
            first = f.mul(part, chunk)
            self._rows(first, least(f, f.add(first, chunk), self.size["rows"]))

        self.run(lambda: self._each(f.args[1], f.args[2], 1, item))
        f.raw("ret void")
        f.finish()

    def run(self, items: Callable[[], None]) -> None:
        items()

    def whole(self, keys: V) -> V:
        """Round a number of keys up to whole steps."""
        return self.f.mul(ceil_div(self.f, keys, i64(self.step)), i64(self.step))

    # memory

    def _type(self, name: str) -> str:
        """Return the type of a buffer's elements in memory."""
        return {"f32": "float", "bf16": "i16", "bool": "i8"}[self.a.mask if name == "mask" else self.a.dtype]

    def _head(self, name: str, b: V, h: V) -> V:
        f = self.f
        at = f.add(f.mul(b, self.size[f"{name}_b"]), f.mul(h, self.size[f"{name}_h"]))
        return f.gep(self._type(name), self.base[name], at)

    def _row(self, name: str, row: V) -> V:
        """Return the address of a row of this head."""
        return self.f.gep(self._type(name), self.at[name], self.f.mul(row, self.size[f"{name}_l"]))

    def _each(self, lo: V, hi: V, step: int, body: Callable[[V], None]) -> None:
        each(self.f, lo, hi, step, body)

    def _columns(self, step: int, body: Callable[[V, int], None]) -> None:
        """Call body(first column, number of columns) for the columns of a head, `step` at a time."""
        full = self.a.width // step * step
        if full:
            self._each(i64(0), i64(full), step, lambda c: body(c, step))
        if full < self.a.width:
            body(i64(full), self.a.width - full)

    def _load(self, t: str, p: V, w: int = 1, align: int = 4, there: int | V | None = None) -> V:
        return load(self.f, t, p, w, align, there)

    def _store(self, x: V, p: V, align: int = 4, there: int | None = None) -> None:
        store(self.f, x, p, align, there)

    def _floats(self, t: str, p: V, there: int | V | None = None) -> V:
        """Load a vector of floats from elements of type `t`."""
        if t == "float":
            return self._load(t, p, self.w, 4, there)
        return cast(self.f, self._load(t, p, self.w, 2, there), "bf16", "f32")

    def _words(self, name: str, row: V, c: V, there: int) -> V:
        """Load columns from c on of a row of queries or keys as a vector of words, padded with zeros."""
        t = self._type(name)
        p = self.f.gep(t, row, c)
        if not self.pairs:
            return self._floats(t, p, there)
        x = self._load(t, p, 2 * self.w, 2, there)
        return self.f.let("i32", self.w, f"bitcast {x} to <{self.w} x i32>")

    # one work item

    def _rows(self, first: V, last: V) -> None:
        """Process rows first to last of a head, block of keys by block of keys."""
        f = self.f
        low, zero = const(-math.inf, "float"), const(0.0, "float")
        count = f.mul(ceil_div(f, f.bin("sub", last, first), i64(self.rows)), i64(self.rows))

        def clear(i: V) -> None:
            self._store(low, f.gep("float", self.top, i))
            self._store(zero, f.gep("float", self.total, i))

        self._each(i64(0), count, 1, clear)
        none = f.splat(zero, self.w)
        floats = f.mul(count, i64(self.width))
        self._each(i64(0), floats, self.w, lambda i: self._store(none, f.gep("float", self.acc, i)))
        end = least(f, self.size["keys"], last) if self.a.causal else self.size["keys"]

        def keys(k0: V) -> None:
            count = least(f, f.bin("sub", end, k0), i64(self.block))
            self._pack_keys(k0, count)
            self._pack_values(k0, count)

            def some(r0: V) -> None:
                seen = count
                if self.a.causal:
                    seen = least(f, count, f.bin("sub", f.add(r0, i64(self.rows)), k0))
                f.when(f.cmp("icmp sgt", seen, i64(0)), lambda: self._tile(f.bin("sub", r0, first), r0, k0, seen))

            self._each(first, last, self.rows, some)

        self._each(i64(0), end, self.block, keys)
        self._each(first, last, 1, lambda r: self._result(f.bin("sub", r, first), r))

    def _result(self, here: V, r: V) -> None:
        """Store one row of the result: the accumulated values divided by the sum of the row's probabilities."""
        f = self.f
        total = self._load("float", f.gep("float", self.total, here))
        none = f.cmp("fcmp oeq", total, const(0.0, "float"))
        factor = f.select(none, const(0.0, "float"), f.bin("fdiv", const(1.0, "float"), total))
        row, acc = self._row("out", r), f.gep("float", self.acc, f.mul(here, i64(self.width)))

        def column(c: V, there: int) -> None:
            x = f.bin("fmul", self._load("float", f.gep("float", acc, c), self.w), factor)
            if self.a.dtype == "bf16":
                self._store(to_bf16(f, x), f.gep("i16", row, c), 2, there)
            else:
                self._store(x, f.gep("float", row, c), 4, there)

        self._columns(self.w, column)

    # packing

    def _pack_keys(self, k0: V, count: V) -> None:
        """Pack keys across the lanes: [vector of keys][word][lane]. Lanes past the last key repeat it."""
        f, w = self.f, self.w
        last = f.bin("sub", self.size["keys"], i64(1))

        def pack(j: V) -> None:
            starts = [self._row("key", least(f, f.add(f.add(k0, j), i64(i)), last)) for i in range(w)]

            def square(c: V, there: int) -> None:
                rows = [self._words("key", p, c, there) for p in starts]
                at = f.add(f.mul(j, i64(self.words)), f.mul(f.bin("sdiv", c, i64(self.per)), i64(w)))
                to = f.gep(self.word, self.k_pack, at)
                for i, x in enumerate(transpose(f, rows)):
                    self._store(x, f.gep(self.word, to, i64(i * w)), 4 * w)

            self._columns(w * self.per, square)

        self._each(i64(0), count if self.step == w else self.whole(count), w, pack)

    def _pack_values(self, k0: V, count: V) -> None:
        """Pack rows of values one after another, or with pairs two rows as one; pad with zeros after the last to whole vectors of
        keys."""
        f, w = self.f, self.w
        stop = self.whole(count)
        last = f.bin("sub", count, i64(1))

        def pack(j: V) -> None:
            rows = []
            for i in range(self.per):
                key = f.add(j, i64(i))
                row = self._row("value", f.add(k0, least(f, key, last)))
                rows.append((f.cmp("icmp sle", key, last), row))
            to = f.gep(self.word, self.v_pack, f.mul(f.bin("sdiv", j, i64(self.per)), i64(self.width)))

            def column(c: V, there: int) -> None:
                self._store(self._value_words(rows, c, there), f.gep(self.word, to, c), 4 * w)

            self._columns(w, column)

        self._each(i64(0), stop, self.per, pack)

    def _value_words(self, rows: Sequence[tuple[V, V]], c: V, there: int) -> V:
        f, t = self.f, self._type("value")
        parts = []
        for real, row in rows:
            p = f.gep(t, row, c)
            x = self._load(t, p, self.w, 2, there) if self.pairs else self._floats(t, p, there)
            parts.append(f.select(real, x, const(0, x.t)))
        if not self.pairs:
            return parts[0]
        low, high = (f.conv("zext", x, "i32") for x in parts)
        return f.bin("or", low, f.bin("shl", high, const(16, "i32")))

    # one tile: some rows and the keys of a block

    def _tile(self, here: V, r0: V, k0: V, seen: V) -> list[V]:
        f, w = self.f, self.w
        self._pack_queries(r0)
        vectors = ceil_div(f, seen, i64(w)) if self.step == w else f.bin("sdiv", self.whole(seen), i64(w))
        self.multiply_keys(vectors)
        self._softmax(r0, k0, here, seen, vectors)
        self.add_values(here, seen)
        return []

    def multiply_keys(self, vectors: V) -> None:
        """Compute the scores of a tile's rows with some vectors of keys."""
        f, w = self.f, self.w
        queries = [f.gep(self.word, self.q_pack, i64(i * self.words)) for i in range(self.rows)]
        whole = f.mul(f.bin("sdiv", vectors, i64(self.vectors)), i64(self.vectors))
        count = i64(-(-self.a.width // (self.per * self.unroll)) * self.unroll)

        def scores(n: int, j: V) -> None:
            keys = f.gep(self.word, self.k_pack, f.mul(j, i64(self.words * w)))
            start = [[V("zeroinitializer", "float", w)] * n for _ in range(self.rows)]
            for i, row in enumerate(self._product(queries, keys, w, self.words * w, count, start)):
                for v, x in enumerate(row):
                    at = f.add(f.mul(f.add(j, i64(v)), i64(w)), i64(i * self.block))
                    self._store(x, f.gep("float", self.scores, at), 4 * w)

        self._each(i64(0), whole, self.vectors, lambda j: scores(self.vectors, j))
        self._each(whole, vectors, 1, lambda j: scores(1, j))

    def _pack_queries(self, r0: V) -> None:
        """Pack the rows of a tile; past the last row, repeat it."""
        f = self.f

        def pack(i: V) -> None:
            row = self._row("query", least(f, f.add(r0, i), self.last_row))
            to = f.gep(self.word, self.q_pack, f.mul(i, i64(self.words)))

            def column(c: V, there: int) -> None:
                at = f.gep(self.word, to, f.bin("sdiv", c, i64(self.per)))
                self._store(self._words("query", row, c, there), at, 4 * self.w)

            self._columns(self.w * self.per, column)

        self._each(i64(0), i64(self.rows), 1, pack)

    def _product(
        self, rows: Sequence[V], right: V, step: int, apart: int, count: V, start: list[list[V]]
    ) -> list[list[V]]:
        """Return start[i][v] + the sum over words n < count of rows[i][n] * right[n * step + v * apart ...], one vector each.
        `count` is a multiple of `unroll`."""
        f, w, n = self.f, self.w, len(start[0])

        def body(at: V, carried: list[V]) -> list[V]:
            out = list(carried)
            for u in range(self.unroll):
                k = f.add(at, i64(u))
                base = f.mul(k, i64(step))
                b = [
                    self._load(self.word, f.gep(self.word, right, f.add(base, i64(v * apart))), w, 4 * w)
                    for v in range(n)
                ]
                for i, row in enumerate(rows):
                    x = f.splat(self._load(self.word, f.gep(self.word, row, k)), w)
                    for v in range(n):
                        out[i * n + v] = self._multiply(x, b[v], out[i * n + v])
            return out

        flat = f.loop(i64(0), count, i64(self.unroll), [x for row in start for x in row], body)
        return [flat[i * n : (i + 1) * n] for i in range(len(rows))]

    def _multiply(self, x: V, y: V, acc: V) -> V:
        """acc + x * y, over both halves of pairs."""
        f = self.f
        if not self.pairs:
            return f.fma(x, y, acc)
        return dot_pairs(f, acc, x, y)

    def _softmax(self, r0: V, k0: V, here: V, seen: V, vectors: V) -> None:
        """Turn scores into probabilities, and compute the factor by which earlier sums now count. Values that exist once per
        row are computed for all rows of the tile in the lanes of a vector."""
        f, w = self.f, self.w

        def weigh(i: V) -> None:
            row = least(f, f.add(r0, i), self.last_row)
            top = self._weigh(self._scores_of(i), row, k0, seen, vectors)
            self._store(self._across(top, _largest), f.gep("float", self.fresh, i))

        rows = self.rows_from(r0)
        self._each(i64(0), rows, 1, weigh)
        low, log2e = const(-math.inf, "float"), const(math.log2(math.e), "float")
        for c in range(0, self.rows, w):
            top_at, fresh_at, fade_at = (
                f.gep("float", p, i)
                for p, i in ((self.top, f.add(here, i64(c))), (self.fresh, i64(c)), (self.fade, i64(c)))
            )
            before = self._load("float", top_at, w)
            most = _largest(f, before, self._load("float", fresh_at, w))
            none = f.cmp("fcmp oeq", most, low)
            shift = f.select(none, const(0.0, "float"), most)
            self._store(exp2(f, f.bin("fmul", f.bin("fsub", before, shift), log2e)), fade_at)
            self._store(shift, fresh_at)
            self._store(most, top_at, 4, min(w, self.rows - c))

        def power(i: V) -> None:
            scores, shift = self._scores_of(i), self._load("float", f.gep("float", self.fresh, i))

            def step(j: V, total: list[V]) -> list[V]:
                score = self._load("float", f.gep("float", scores, j), w, 4 * w)
                x = exp2(f, f.bin("fmul", f.bin("fsub", score, shift), log2e))  # before the product, which may overflow
                self._store_weights(x, i, j)
                return [f.bin("fadd", total[0], x)]

            zero = V("zeroinitializer", "float", w)
            (total,) = f.loop(i64(0), f.mul(vectors, i64(w)), i64(w), [zero], step)
            self._store(self._across(total, lambda f, a, b: f.bin("fadd", a, b)), f.gep("float", self.sums, i))

        self._each(i64(0), rows, 1, power)
        for c in range(0, self.rows, w):
            at = f.gep("float", self.total, f.add(here, i64(c)))
            sums, fade = (self._load("float", f.gep("float", p, i64(c)), w) for p in (self.sums, self.fade))
            self._store(f.fma(self._load("float", at, w), fade, sums), at, 4, min(w, self.rows - c))

    def rows_from(self, r0: V) -> V:
        """Return for how many rows of a tile probabilities are computed."""
        return i64(self.rows)

    def _scores_of(self, i: V) -> V:
        return self.f.gep("float", self.scores, self.f.mul(i, i64(self.block)))

    def _store_weights(self, x: V, i: V, j: V) -> None:
        """Store the probabilities of row i at keys from j on; those of pairs without special handling of subnormals."""
        f = self.f
        if not self.pairs:
            self._store(x, f.gep("float", self._scores_of(i), j), 4 * self.w)
            return
        half = near_bf16(f, x)
        self._store(half, f.gep("bfloat", self.weights, f.add(f.mul(i, i64(self.block)), j)), 2 * self.w)

    def _weigh(self, scores: V, row: V, k0: V, seen: V, vectors: V) -> V:
        """Scale and mask the scores of a row; return the largest in each lane."""
        f, w, a = self.f, self.w, self.a
        mask = f.gep(self._type("mask"), self._row("mask", row), k0) if a.mask else None
        limit = seen
        if a.causal:
            limit = least(f, seen, f.bin("sub", f.add(row, i64(1)), k0))
            limit = most(f, limit, i64(0))
        low = V(f"splat (float {const(-math.inf, 'float').name})", "float", w)

        def step(j: V, top: V, last: bool) -> V:
            p = f.gep("float", scores, j)
            x = f.bin("fmul", self._load("float", p, w, 4 * w), self.scale)
            inside = f.cmp("icmp slt", f.bin("add", j, f.iota(w)), limit) if last else None
            x = x if mask is None else self._masked(x, f.gep(self._type("mask"), mask, j), inside)
            x = x if inside is None else f.select(inside, x, low)
            self._store(x, p, 4 * w)
            return _largest(f, x, top)

        full = f.bin("and", limit, i64(-w))
        top = f.loop(i64(0), full, i64(w), [low], lambda j, c: [step(j, c[0], False)])
        return f.loop(full, f.mul(vectors, i64(w)), i64(w), top, lambda j, c: [step(j, c[0], True)])[0]

    def _masked(self, x: V, p: V, inside: V | None) -> V:
        """Apply the mask at `p` to scores; only lanes `inside` read it."""
        f, t = self.f, self._type("mask")
        if t != "i8":
            return f.bin("fadd", x, self._floats(t, p, inside))
        keep = f.cmp("icmp ne", self._load(t, p, self.w, 1, inside), const(0, "i8"))
        return f.select(keep, x, const(-math.inf, "float"))

    def _across(self, x: V, join: Callable[[Fn, V, V], V]) -> V:
        """Reduce all lanes to one."""
        f, w = self.f, x.w
        while w > 1:
            w //= 2
            x = join(f, *(f.lanes(x, range(at, at + w)) if w > 1 else f.extract(x, at) for at in (0, w)))
        return x

    def add_values(self, here: V, seen: V) -> None:
        """Compute acc = acc * fade + weights @ values, for the rows of a tile."""
        f, w = self.f, self.w
        count = f.mul(ceil_div(f, seen, i64(self.per * self.unroll)), i64(self.unroll))
        fades = [self._load("float", f.gep("float", self.fade, i64(i))) for i in range(self.rows)]
        rows = [f.gep("float", self.acc, f.mul(f.add(here, i64(i)), i64(self.width))) for i in range(self.rows)]

        def columns(c: V, n: int) -> None:
            places = [[f.gep("float", row, f.add(c, i64(v * w))) for v in range(n)] for row in rows]

            def some(first: V, words: V, factors: Sequence[V]) -> None:
                at = f.mul(first, i64(self.per))
                starts = [f.add(at, i64(i * self.block)) for i in range(self.rows)]
                weights = [f.gep("bfloat" if self.pairs else "float", self.weights, i) for i in starts]
                values = f.gep(self.word, self.v_pack, f.add(c, f.mul(first, i64(self.width))))
                none = [[V("zeroinitializer", "float", w)] * n for _ in range(self.rows)]
                sums = self._product(weights, values, self.width, w, words, none)
                for row, xs, factor in zip(places, sums, factors, strict=True):
                    for p, x in zip(row, xs, strict=True):
                        self._store(f.fma(self._load("float", p, w), f.splat(factor, w), x), p)

            if self.block <= CHAIN:
                some(i64(0), count, fades)
                return
            words, one = CHAIN // self.per, const(1.0, "float")

            def part(first: V) -> None:
                begins = f.cmp("icmp eq", first, i64(0))
                some(first, least(f, f.bin("sub", count, first), i64(words)), [f.select(begins, x, one) for x in fades])

            self._each(i64(0), count, words, part)

        step = self.vectors * w
        full = self.width // step * step
        if full:
            self._each(i64(0), i64(full), step, lambda c: columns(c, self.vectors))
        if full < self.width:
            columns(i64(full), (self.width - full) // w)


def _largest(f: Fn, a: V, b: V) -> V:
    """Return the larger one; `b` where one is NaN."""
    return f.select(f.cmp("fcmp ogt", a, b), a, b)
