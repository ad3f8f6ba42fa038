"""A product of few rows with a matrix of weights (GEMV), `out = x @ (weight (- zero)).T (* scale) (+ bias)`, as in decoding: its
time is that of reading the weights once.

Several rows of weights are multiplied together, so that each vector of `x` is read once for all of them and there are enough
accumulators to hide the latency of a multiply-add. bf16 weights are widened two to a 32-bit word, the low half by a shift and the
high one by a mask. This uses whole vectors and permutes the elements, which does not matter to a sum. Where the CPU multiplies
pairs of bf16 and both sides are bf16, the words are used directly. int8 weights are widened to fp32 and their row's
zero point is subtracted from each (exactly: after the sum the difference would cancel); each row's sum is multiplied by its scale.
Sums are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.interleave import unzip
from fusewright_cpu.emit.intrinsics import dot_pairs, multiplies_pairs, widened
from fusewright_cpu.emit.pointwise import cast, memory_type
from fusewright_cpu.emit.text import Fn, Module, V, const, i64
from fusewright_cpu.kernels.by_hand import Gemv
from fusewright_cpu.kernels.parts import ceil_div, each, least, load, store, word
from fusewright_cpu.policy import LOOPS


def emit_gemv(module: Module, g: Gemv, name: str, parallel: bool) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    body = _Body(module, g, f"{name}.body")
    body.write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    n, k = (word(f, block, len(g.buffers) + at) for at in range(2))
    items = ceil_div(f, n, i64(body.together))
    work = f.mul(f.mul(n, k), i64(g.rows + 2))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    start(f, name, block, items, f.alloca("i64", 1, 8), team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


class _Body:
    """`void body(ptr block, i64 lo, i64 hi, ptr)`: work items lo to hi, each `together` rows of weights.

    A row is processed in chunks of `chunk` elements, which are `parts` vectors of 32-bit lanes: neighbours, or with `words` the
    halves of words. `pairs`: words that are multiplied directly.
    """

    def __init__(self, module: Module, g: Gemv, name: str) -> None:
        self.g, target = g, module.target
        self.f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        self.w = w = target.vector_bytes // 4
        self.words = g.weight == "bf16"
        self.pairs = self.words and g.dtype == "bf16" and multiplies_pairs(target)
        self.parts = (1 if self.pairs else 2) if self.words else 4 if g.weight == "i8" and target.arm else 1
        self.chunk = w * (2 if self.words else self.parts)
        self.together = 4 if target.registers == 32 else 2
        sums = 16 if target.registers == 32 else 8
        self.unroll = max(1, sums // (self.together * g.rows * min(self.parts, 2)))
        """Chunks per step, each with its own accumulators."""

    def write(self) -> None:
        f, g, block = self.f, self.g, self.f.args[0]
        names = [b.name for b in g.buffers]
        self.base = {name: f.conv("inttoptr", word(f, block, at), "ptr") for at, name in enumerate(names)}
        self.n, self.k = (word(f, block, len(names) + at) for at in range(2))
        last = f.bin("sub", self.n, i64(1))

        def item(i: V) -> None:
            first = f.mul(i, i64(self.together))
            # past the last row, repeat it, with the same result
            self._rows([least(f, f.add(first, i64(r)), last) for r in range(self.together)])

        each(f, f.args[1], f.args[2], 1, item)
        f.raw("ret void")
        f.finish()

    def _rows(self, at: Sequence[V]) -> None:
        """Compute the results of some rows of weights."""
        f, g = self.f, self.g
        weights = [(self._row("weight", r), self._zero(r)) for r in at]
        xs = [self._row("x", i64(m)) for m in range(g.rows)]
        zero = V("zeroinitializer", "float", self.w)
        pairs = [(x, w) for w in range(len(at)) for x in range(g.rows)]
        whole = f.bin("and", self.k, i64(-self.chunk))
        main = f.mul(f.bin("sdiv", whole, i64(self.chunk * self.unroll)), i64(self.chunk * self.unroll))

        def step(k: V, sums: list[V], unroll: int) -> list[V]:
            out = list(sums)
            for u in range(unroll):
                at = f.add(k, i64(u * self.chunk))
                out[u * len(pairs) : (u + 1) * len(pairs)] = self._chunk(
                    xs, weights, at, None, out[u * len(pairs) : (u + 1) * len(pairs)]
                )
            return out

        sums = [zero] * (len(pairs) * self.unroll)
        sums = f.loop(i64(0), main, i64(self.chunk * self.unroll), sums, lambda k, s: step(k, s, self.unroll))
        if self.unroll > 1:
            joined = [self._total([sums[p + u * len(pairs)] for u in range(self.unroll)]) for p in range(len(pairs))]
            sums = f.loop(main, whole, i64(self.chunk), joined, lambda k, s: step(k, s, 1))
        sums = f.when(
            f.cmp("icmp slt", whole, self.k),
            lambda: self._chunk(xs, weights, whole, f.bin("sub", self.k, whole), sums), sums,
        )  # fmt: skip
        for (m, r), total in zip(pairs, sums, strict=True):
            self._result(total, m, at[r])

    def _total(self, vectors: list[V]) -> V:
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [self.f.bin("fadd", vectors[i], vectors[i + half]) for i in range(half)] + vectors[2 * half :]
        return vectors[0]

    def _row(self, name: str, row: V) -> V:
        """Return the address of a row of `k` elements."""
        t = self.g.weight if name == "weight" else self.g.dtype
        return self.f.gep(memory_type(t), self.base[name], self.f.mul(row, self.k))

    def _zero(self, row: V) -> V | None:
        """Return the zero point of a row of weights in every lane."""
        f = self.f
        return f.splat(load(f, "float", f.gep("float", self.base["zero"], row)), self.w) if self.g.zeros else None

    def _chunk(
        self, xs: list[V], weights: Sequence[tuple[V, V | None]], at: V, left: V | None, sums: Sequence[V]
    ) -> list[V]:
        """Add the products of the chunk at `at` to `sums`; of the last chunk only the `left` elements."""
        f, out = self.f, list(sums)
        loaded = [self._read_weight(p, zero, at, left) for p, zero in weights]
        halves = [self._read_words(p, at, left) for p in xs] if self.words else []
        for part in range(self.parts):
            some = [halves[m][part] if self.words else self._read_x(p, at, part, left) for m, p in enumerate(xs)]
            for r, raw in enumerate(loaded):
                w = raw[part]
                for m, x in enumerate(some):
                    total = out[r * len(xs) + m]
                    out[r * len(xs) + m] = dot_pairs(f, total, x, w) if self.pairs else f.fma(x, w, total)
        return out

    def _there(self, w: int, left: V | None, offset: int = 0) -> V | None:
        """Return the mask of `w` elements from `offset` on."""
        f = self.f
        return None if left is None else f.cmp("icmp slt", f.iota(w), f.bin("sub", left, i64(offset)))

    def _read_weight(self, row: V, zero: V | None, at: V, left: V | None) -> list[V]:
        """Load a chunk of weights, in parts."""
        f, w = self.f, self.w
        if self.words:
            return self._halves(self._bf16_words(row, at, left))
        if self.g.weight == "f32":
            return [load(f, "float", f.gep("float", row, at), w, 4, self._there(w, left))]
        p = f.gep("i8", row, at)
        wide = [f.conv("sitofp", x, "float") for x in self._bytes(p, left)]
        return wide if zero is None else [f.bin("fsub", x, zero) for x in wide]

    def _bytes(self, p: V, left: V | None) -> list[V]:
        """Load a chunk of int8 as vectors of i32."""
        f, w = self.f, self.w
        if f.module.target.sve_bits:
            there = [None if left is None else f.bin("sub", left, i64(w * i)) for i in range(self.parts)]
            return [widened(f, "i8", f.gep("i8", p, i64(w * i)), w, n) for i, n in enumerate(there)]
        x = load(f, "i8", p, self.chunk, 1, self._there(self.chunk, left))
        parts, t = [x], "i8"
        while len(parts) < self.parts:
            t, half = {"i8": "i16", "i16": "i32"}[t], parts[0].w // 2
            split = [f.lanes(v, range(a, a + half)) for v in parts for a in (0, half)]
            parts = [f.conv("sext", v, t) for v in split]
        return [f.conv("sext", v, "i32") for v in parts]

    def _bf16_words(self, row: V, at: V, left: V | None) -> V:
        """Load a chunk of bf16 as i32, two in each."""
        f, w = self.f, self.w
        p = f.gep("i16", row, at)
        if left is None:
            return load(f, "i32", p, w, 2)
        x = load(f, "i16", p, 2 * w, 2, self._there(2 * w, left))
        return f.let("i32", w, f"bitcast {x} to <{w} x i32>")

    def _halves(self, x: V) -> list[V]:
        """Return words unchanged, or the floats of their low halves and those of their high ones."""
        f = self.f
        if self.pairs:
            return [x]
        low, high = f.bin("shl", x, const(16, "i32")), f.bin("and", x, const(-65536, "i32"))
        return [f.conv("bitcast", v, "float") for v in (low, high)]

    def _read_words(self, row: V, at: V, left: V | None) -> list[V]:
        """Load a chunk of `x` in the order of words."""
        f, w = self.f, self.w
        if self.g.dtype == "bf16":
            return self._halves(self._bf16_words(row, at, left))
        there = [self._there(w, left, a) for a in (0, w)]
        p = [f.gep("float", row, f.add(at, i64(a))) for a in (0, w)]
        return unzip(f, [load(f, "float", q, w, 4, m) for q, m in zip(p, there, strict=True)])

    def _read_x(self, row: V, at: V, part: int, left: V | None) -> V:
        """Load one part of a chunk of `x`."""
        f, w, t = self.f, self.w, memory_type(self.g.dtype)
        p = f.gep(t, row, f.add(at, i64(part * w)))
        x = load(f, t, p, w, 4 if t == "float" else 2, self._there(w, left, part * w))
        return cast(f, x, self.g.dtype, "f32")

    def _result(self, sums: V, m: int, row: V) -> None:
        """Store one element of `out`."""
        f, g = self.f, self.g
        name = f"llvm.vector.reduce.fadd.v{sums.w}f32"
        f.module.declare(name, "float", ["float", sums.ty])
        x = f.let("float", 1, f"call reassoc float @{name}(float -0.0, {sums})")
        if g.weight == "i8":
            x = f.bin("fmul", x, load(f, "float", f.gep("float", self.base["scale"], row)))
        if g.bias:
            t = memory_type(g.bias)
            x = f.bin("fadd", x, cast(f, load(f, t, f.gep(t, self.base["bias"], row), 1, 2), g.bias, "f32"))
        t = memory_type(g.dtype)
        at = f.add(f.mul(i64(m), self.n), row)
        store(f, cast(f, x, "f32", g.dtype), f.gep(t, self.base["out"], at), 2)
