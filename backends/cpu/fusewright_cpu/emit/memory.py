"""Addresses, loads and stores: contiguous, broadcast or gathered, chosen from the stride along the
vectorised axis."""

from __future__ import annotations

from fusewright.toolkit.ir.checks import INDEX_BITS
from fusewright.toolkit.ir.extent import Atom, Extent, SizeExpr
from fusewright.toolkit.ir.index import Coefs, Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.types import TYPES
from fusewright_cpu.emit.interleave import unzip, zipped
from fusewright_cpu.emit.intrinsics import widened
from fusewright_cpu.emit.pointwise import LLVM_TYPE, cast, maximum, memory_type, minimum
from fusewright_cpu.emit.text import Fn, V, const, i64


class Arguments:
    """The argument block of a kernel inside a function: `i64[buffers, sizes, scalars]`, read once on
    entry."""

    def __init__(self, f: Fn, kernel: Kernel, block: V) -> None:
        self.f, self.kernel = f, kernel
        self.position = 0
        self.buffers = [f.conv("inttoptr", self._next(block), "ptr") for _ in kernel.buffers]
        self.symbols: dict[Atom, V] = {s: self._next(block) for s in kernel.symbols}
        self.scalars = [self._scalar(self._next(block), s.dtype) for s in kernel.scalars]

    def _next(self, block: V) -> V:
        f = self.f
        v = f.let("i64", 1, f"load i64, {f.gep('i64', block, i64(self.position))}")
        self.position += 1
        return v

    def _scalar(self, bits: V, dtype: str) -> V:
        if TYPES[dtype].kind == "float":
            return self.f.conv("fptrunc", self.f.conv("bitcast", bits, "double"), LLVM_TYPE[dtype])
        return self.f.cmp("icmp ne", bits, i64(0)) if dtype == "bool" else bits

    def extent(self, e: Extent) -> V:
        """Return the value of a size or stride."""
        if not isinstance(e, SizeExpr):
            return i64(e)
        total = i64(0)
        for m, c in e.terms:
            product = i64(c)
            for s in m:
                product = self.f.mul(product, self.symbols[s])
            total = self.f.add(total, product)
        return total


class Lanes:
    """The current position of emitted code: the scalar value of every axis, and the vector along `v`.

    Unit `u` of a vector loop covers elements `axis[v] + u * w ...`, or is at `axis[units_along] + u` if that is
    another axis; `mask` (with a single unit) cuts the last one short."""

    def __init__(self, f: Fn, args: Arguments, v: int | None, error: V) -> None:
        self.f, self.args, self.v, self.error = f, args, v, error
        self.axis: dict[int, V] = {}
        self.w = 1
        self.vectorised = False
        self.units_along = v
        self.mask: V | None = None

    def position(self, a: int, u: int) -> V:
        """Return the scalar value of axis `a` in unit `u` (its first lane)."""
        at = self.axis[a]
        if a != self.units_along or not self.vectorised or not u:
            return at
        return self.f.add(at, i64(u * self.w if a == self.v else u))

    def spread(self, a: int, u: int) -> V:
        """Return the value of axis `a` in every lane."""
        at = self.position(a, u)
        if a == self.v and self.vectorised and self.w > 1:
            return self.f.bin("add", at, self.f.iota(self.w))
        return at

    def affine(self, offset: Extent, coefs: Coefs, u: int, lanes: bool) -> V:
        """Return an affine form: with `lanes` a vector if it varies, else its value in the first lane."""
        f, total = self.f, self.args.extent(offset)
        for a, c in coefs:
            at = self.spread(a, u) if lanes else self.position(a, u)
            total = f.add(total, f.mul(at, self.args.extent(c)) if at.w == 1 else f.bin("mul", at, self.args.extent(c)))
        return total

    def index(self, ix: Index, values: dict[int, V], u: int, lanes: bool) -> V:
        """Return the value of an index expression, see `affine`."""
        f, total = self.f, self.affine(ix.offset, ix.coefs, u, lanes)
        for d in ix.divmods:
            q = self.affine(d.offset, d.coefs, u, lanes)
            q = self._floor(q, d.div)
            q = self._modulo(q, d.mod) if d.mod is not None else q
            total = f.add(total, f.bin("mul", q, self.args.extent(d.stride)))
        for i in ix.indirect:
            total = f.add(total, f.bin("mul", values[i.value], self.args.extent(i.stride)))
        return total

    def _floor(self, x: V, d: Extent) -> V:
        """Return floor division by a positive divisor."""
        if d == 1:
            return x
        f, by = self.f, self.args.extent(d)
        q = f.bin("sdiv", x, by)
        below = f.cmp("icmp slt", f.bin("sub", x, f.bin("mul", q, by)), i64(0))
        return f.bin("add", q, f.conv("sext", below, "i64"))

    def _modulo(self, x: V, m: Extent) -> V:
        f, by = self.f, self.args.extent(m)
        r = f.bin("srem", x, by)
        return f.select(f.cmp("icmp slt", r, i64(0)), f.bin("add", r, by), r)

    def contiguous(self, n: Node, values: dict[int, V]) -> bool:
        """Return whether the lanes of an access are neighbours in memory."""
        ix = n.index
        if self.w == 1 or self.v is None or ix is None or ix.stride_of(self.v) != 1:
            return False
        return all(values[i.value].w == 1 for i in ix.indirect)

    def active(self, n_mask: V | None) -> V | None:
        """Return the mask of an access: the tail's, the program's own, or both."""
        if self.mask is None or n_mask is None:
            return n_mask if self.mask is None else self.mask
        return self.f.bin("and", self.mask, n_mask)

    # accesses

    def load(self, n: Node, values: dict[int, V], u: int, varying: bool) -> V:
        """Emit a `load` node; `values` holds its operands."""
        own = values[n.args[0]] if n.args else None
        other = values[n.args[1]] if n.args else None
        if not varying or self.w == 1:
            return self._load_scalar(n, values, u, own, other)
        if self.contiguous(n, values):
            return self.from_memory(self._load_row(n, values, u, own, other), n)
        return self.from_memory(self._gather(n, values, u, own, other), n)

    def from_memory(self, x: V, n: Node) -> V:
        return self.f.cmp("icmp ne", x, const(0, "i8")) if n.dtype == "bool" else x

    def _other(self, n: Node, other: V | None) -> V:
        t = memory_type(n.dtype)
        if other is None:
            return const(0, t)
        return self.f.conv("zext", other, "i8") if n.dtype == "bool" else other

    def _pointer(self, n: Node, values: dict[int, V], u: int, lanes: bool) -> V:
        if n.index is None or n.buffer is None:
            raise ValueError("verify the kernel first")
        at = self.index(n.index, values, u, lanes)
        return self.f.gep(memory_type(n.dtype), self.args.buffers[n.buffer], at)

    def load_interleaved(self, n: Node, base: Index, stride: int, u: int) -> list[V]:
        """Load the values at `base`, `base + 1` ... of a buffer whose stride along the lanes is `stride`."""
        f, t, size = self.f, memory_type(n.dtype), TYPES[n.dtype].size
        if n.buffer is None:
            raise ValueError("verify the kernel first")
        at, parts = self.index(base, {}, u, lanes=False), []
        for k in range(stride):
            p = f.gep(t, self.args.buffers[n.buffer], f.add(at, i64(k * self.w)))
            parts.append(f.let(t, self.w, f"load <{self.w} x {t}>, {p}, align {size}"))
        return [self.from_memory(x, n) for x in unzip(f, parts)]

    def store_interleaved(self, n: Node, base: Index, places: list[V], u: int) -> None:
        """Store one vector of values for each place of a set of stores, side by side from `base` on."""
        f, t, size = self.f, memory_type(n.dtype), TYPES[n.dtype].size
        if n.buffer is None:
            raise ValueError("verify the kernel first")
        places = [self.in_memory(x, n) for x in places]
        at = self.index(base, {}, u, lanes=False)
        for k, x in enumerate(zipped(f, places)):
            f.raw(f"store {x}, {f.gep(t, self.args.buffers[n.buffer], f.add(at, i64(k * self.w)))}, align {size}")

    def load_rows(self, n: Node, count: int) -> list[V]:
        """Load vectors along `units_along`, one for each of `count` points of `v`."""
        f, t, size = self.f, memory_type(n.dtype), TYPES[n.dtype].size
        return [f.let(t, count, f"load <{count} x {t}>, {p}, align {size}") for p in self._rows(n, count)]

    def store_rows(self, n: Node, rows: list[V]) -> None:
        """Store vectors along `units_along`, one for each point of `v` from the first on."""
        for x, p in zip(rows, self._rows(n, len(rows)), strict=True):
            self.f.raw(f"store {x}, {p}, align {TYPES[n.dtype].size}")

    def _rows(self, n: Node, count: int) -> list[V]:
        """Return the addresses of the vectors along `units_along` at `count` points of `v`."""
        f, t = self.f, memory_type(n.dtype)
        if n.index is None or n.buffer is None or self.v is None:
            raise ValueError("verify the kernel first")
        at, step = self.index(n.index, {}, 0, lanes=False), self.args.extent(dict(n.index.coefs)[self.v])
        return [f.gep(t, self.args.buffers[n.buffer], f.add(at, f.mul(step, i64(k)))) for k in range(count)]

    def in_memory(self, x: V, n: Node) -> V:
        """Return a vector of what a store writes."""
        return self.f.splat(self.f.conv("zext", x, "i8") if n.dtype == "bool" else x, self.w)

    def _load_scalar(self, n: Node, values: dict[int, V], u: int, own: V | None, other: V | None) -> V:
        f, t = self.f, memory_type(n.dtype)

        def read() -> list[V]:
            p = self._pointer(n, values, u, lanes=False)
            return [f.let(t, 1, f"load {t}, {p}, align {TYPES[n.dtype].size}")]

        if own is None:
            return self.from_memory(read()[0], n)
        return self.from_memory(f.when(own, read, [self._other(n, other)])[0], n)

    def _load_row(self, n: Node, values: dict[int, V], u: int, own: V | None, other: V | None) -> V:
        f, t, w, size = self.f, memory_type(n.dtype), self.w, TYPES[n.dtype].size
        p = self._pointer(n, values, u, lanes=False)
        mask = self.active(own)
        if mask is None:
            if n.dtype == "bf16" and f.module.target.sve_bits == 32 * w > 128:  # to be widened
                return f.conv("trunc", widened(f, t, p, w), t)
            return f.let(t, w, f"load <{w} x {t}>, {p}, align {size}")
        name = f"llvm.masked.load.v{w}{_mangled(t)}.p0"
        fill = f.splat(self._other(n, other), w)
        f.module.declare(name, fill.ty, ["ptr", "i32", f"<{w} x i1>", fill.ty])
        return f.let(t, w, f"call {fill.ty} @{name}({p}, i32 {size}, {f.splat(mask, w)}, {fill})")

    def _gather(self, n: Node, values: dict[int, V], u: int, own: V | None, other: V | None) -> V:
        f, t, w, size = self.f, memory_type(n.dtype), self.w, TYPES[n.dtype].size
        p = f.splat(self._pointer(n, values, u, lanes=True), w)
        mask = f.splat(self.active(own) or const(True, "i1"), w)
        name = f"llvm.masked.gather.v{w}{_mangled(t)}.v{w}p0"
        fill = f.splat(self._other(n, other), w)
        f.module.declare(name, fill.ty, [p.ty, "i32", mask.ty, fill.ty])
        return f.let(t, w, f"call {fill.ty} @{name}({p}, i32 {size}, {mask}, {fill})")

    def store(self, n: Node, values: dict[int, V], u: int, varying: bool) -> None:
        """Emit a `store` node."""
        x = values[n.args[0]]
        x = self.f.conv("zext", x, "i8") if n.dtype == "bool" else x
        own = values[n.args[1]] if len(n.args) > 1 else None
        if not varying or self.w == 1:
            self._store_scalar(n, values, u, x, own)
        elif self.contiguous(n, values):
            self._store_row(n, values, u, x, own)
        else:
            self._scatter(n, values, u, x, own)

    def _combined(self, n: Node, old: V, x: V) -> V:
        """Return the value that an accumulating store writes."""
        f, is_float = self.f, TYPES[n.dtype].kind == "float"
        if n.dtype in ("bf16", "f16"):
            wide = self._combine(n.how, cast(f, old, n.dtype, "f32"), cast(f, x, n.dtype, "f32"), True, True)
            return cast(f, wide, "f32", n.dtype)
        return self._combine(n.how, old, x, is_float, TYPES[n.dtype].signed)

    def _combine(self, how: str, old: V, x: V, is_float: bool, signed: bool) -> V:
        f = self.f
        if how in ("add", "mul"):
            return f.bin(("f" if is_float else "") + how, old, x)
        if is_float:
            return (maximum if how == "max" else minimum)(f, x, old)
        pred = f"icmp {'s' if signed else 'u'}{'gt' if how == 'max' else 'lt'}"
        return f.select(f.cmp(pred, x, old), x, old)

    def _store_scalar(self, n: Node, values: dict[int, V], u: int, x: V, own: V | None) -> None:
        f, t, size = self.f, memory_type(n.dtype), TYPES[n.dtype].size

        def write() -> list[V]:
            p = self._pointer(n, values, u, lanes=False)
            new = self._combined(n, f.let(t, 1, f"load {t}, {p}, align {size}"), x) if n.how else x
            f.raw(f"store {new}, {p}, align {size}")
            return []

        if own is None:
            write()
        else:
            f.when(own, write)

    def _store_row(self, n: Node, values: dict[int, V], u: int, x: V, own: V | None) -> None:
        f, t, w, size = self.f, memory_type(n.dtype), self.w, TYPES[n.dtype].size
        if n.how:
            x = self._combined(n, self._load_row(n, values, u, own, None), x)
        p = self._pointer(n, values, u, lanes=False)
        x, mask = f.splat(x, w), self.active(own)
        if mask is None:
            f.raw(f"store {x}, {p}, align {size}")
            return
        name = f"llvm.masked.store.v{w}{_mangled(t)}.p0"
        f.module.declare(name, "void", [x.ty, "ptr", "i32", f"<{w} x i1>"])
        f.raw(f"call void @{name}({x}, {p}, i32 {size}, {f.splat(mask, w)})")

    def _scatter(self, n: Node, values: dict[int, V], u: int, x: V, own: V | None) -> None:
        f, t, w, size = self.f, memory_type(n.dtype), self.w, TYPES[n.dtype].size
        if n.how:
            x = self._combined(n, self._gather(n, values, u, own, None), x)
        p = f.splat(self._pointer(n, values, u, lanes=True), w)
        x, mask = f.splat(x, w), f.splat(self.active(own) or const(True, "i1"), w)
        name = f"llvm.masked.scatter.v{w}{_mangled(t)}.v{w}p0"
        f.module.declare(name, "void", [x.ty, p.ty, "i32", mask.ty])
        f.raw(f"call void @{name}({x}, {p}, i32 {size}, {mask})")

    # errors

    def report(self, bad: V, site: int, own: V | None = None, index: V | None = None) -> None:
        """Write the launch's error word (see `kernel.checks`) when any active lane is `bad`: the number of the check
        and the index of the first such lane. Keep the error of an earlier check."""
        f = self.f
        mask = self.active(own) if bad.w > 1 else own
        if mask is not None:
            bad = f.bin("and", bad, mask)

        def write() -> list[V]:
            old = f.let("i64", 1, f"load i64, {self.error}")
            new = i64(site) if index is None else self._word(site, f.first(bad, index))
            before = f.bin("sub", f.bin("and", old, i64(255)), i64(1))  # 0, no failure, orders last
            kept = f.cmp("icmp ule", before, i64(site - 1))
            f.raw(f"store {f.select(kept, old, new)}, {self.error}")
            return []

        f.when(f.any(bad), write)

    def _word(self, site: int, index: V) -> V:
        top = 1 << (INDEX_BITS - 1)
        near = self.f.call("smax", "i64", [self.f.call("smin", "i64", [index, i64(top - 1)]), i64(-top)])
        return self.f.bin("or", self.f.bin("shl", near, i64(8)), i64(site))

    def bound(self, n: Node, values: dict[int, V]) -> V:
        """Emit a `bound` node: the index itself where it is legal, else 0 and a report."""
        f, given = self.f, values[n.args[0]]
        x = given
        size = self.args.extent(n.extent if n.extent is not None else 0)
        if n.how == "wrap":
            x = f.select(f.cmp("icmp slt", x, i64(0)), f.bin("add", x, size), x)
        bad = f.cmp("icmp uge", x, size)
        self.report(bad, int(n.value or 1), values[n.args[1]] if len(n.args) > 1 else None, given)
        return f.select(bad, i64(0), x)


def _mangled(t: str) -> str:
    return {"float": "f32", "double": "f64", "half": "f16"}.get(t, t)
