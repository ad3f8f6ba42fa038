"""Shared parts of handwritten kernels: words of the argument block, small arithmetic, loops, masked access."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright_cpu.emit.text import Fn, V, i64

_SHORT = {"float": "f32", "bfloat": "bf16"}


def word(f: Fn, block: V, k: int) -> V:
    """Return word `k` of an argument block."""
    return f.let("i64", 1, f"load i64, {f.gep('i64', block, i64(k))}")


def least(f: Fn, a: V, b: V) -> V:
    return f.select(f.cmp("icmp slt", a, b), a, b)


def most(f: Fn, a: V, b: V) -> V:
    return f.select(f.cmp("icmp sgt", a, b), a, b)


def ceil_div(f: Fn, a: V, b: V) -> V:
    """Return a / b, rounded up."""
    return f.bin("sdiv", f.add(a, f.bin("sub", b, i64(1))), b)


def each(f: Fn, lo: V, hi: V, step: int, body: Callable[[V], None]) -> None:
    """Emit `for (i = lo; i < hi; i += step) body(i)`."""

    def inside(i: V, _: list[V]) -> list[V]:
        body(i)
        return []

    f.loop(lo, hi, i64(step), [], inside)


def load(f: Fn, t: str, p: V, w: int = 1, align: int = 4, there: int | V | None = None) -> V:
    """Load a vector; lanes that are not `there` (a count or a mask) are not read and become zero."""
    ty = t if w == 1 else f"<{w} x {t}>"
    if there is None or there == w:
        return f.let(t, w, f"load {ty}, {p}, align {align}")
    mask = f.cmp("icmp slt", f.iota(w), i64(there)) if isinstance(there, int) else there
    name = f"llvm.masked.load.v{w}{_SHORT.get(t, t)}.p0"
    f.module.declare(name, ty, ["ptr", "i32", mask.ty, ty])
    return f.let(t, w, f"call {ty} @{name}({p}, i32 {align}, {mask}, {ty} zeroinitializer)")


def store(f: Fn, x: V, p: V, align: int = 4, there: int | V | None = None) -> None:
    """Store a vector, or those of its lanes that are `there` (a count or a mask)."""
    if there is None or there == x.w:
        f.raw(f"store {x}, {p}, align {align}")
        return
    mask = f.cmp("icmp slt", f.iota(x.w), i64(there)) if isinstance(there, int) else there
    name = f"llvm.masked.store.v{x.w}{_SHORT.get(x.t, x.t)}.p0"
    f.module.declare(name, "void", [x.ty, "ptr", "i32", mask.ty])
    f.raw(f"call void @{name}({x}, {p}, i32 {align}, {mask})")


def fetch(f: Fn, p: V) -> None:
    """Bring a cache line to the second-level cache; any address is fine."""
    f.module.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
    f.raw(f"call void @llvm.prefetch.p0({p}, i32 0, i32 2, i32 1)")


def with_products(f: Fn, sums: Sequence[V], rows: Sequence[V], k: V, weights: Sequence[V]) -> list[V]:
    """Return sums (vectors of fp32, by row) plus the products of element `k` of each row with these vectors of weights."""
    out, n = list(sums), len(weights)
    for r, row in enumerate(rows):
        x = f.splat(load(f, "float", f.gep("float", row, k)), weights[0].w)
        for v, weight in enumerate(weights):
            out[r * n + v] = f.fma(x, weight, out[r * n + v])
    return out


def added_to(f: Fn, places: Sequence[V], sums: Sequence[V], before: V) -> list[V]:
    """Return sums (vectors of fp32), with those in memory added if anything came `before`."""
    align = 4 * sums[0].w

    def added() -> list[V]:
        return [f.bin("fadd", load(f, "float", p, s.w, align), s) for p, s in zip(places, sums, strict=True)]

    return f.when(f.cmp("icmp ne", before, i64(0)), added, list(sums))


def add_to(f: Fn, places: Sequence[V], sums: Sequence[V], before: V) -> None:
    """Add sums (vectors of fp32) to those in memory, or write them if nothing came `before`."""
    for p, s in zip(places, added_to(f, places, sums, before), strict=True):
        store(f, s, p, 4 * s.w)


def taken(f: Fn, counter: V, end: V, body: Callable[[V, V], None]) -> None:
    """Emit a loop over work items that threads take from a shared counter: `body(item, the one after it)`. The counter starts
    at 0."""
    head, inside, done = f.new_label("take"), f.new_label("body"), f.new_label("done")

    def take() -> V:
        return f.let("i64", 1, f"atomicrmw add {counter}, i64 1 monotonic, align 8")

    first, before = take(), f.here
    f.raw(f"br label %{head}")
    f.label(head)
    item, at = V(f.fresh(), "i64"), len(f.lines)
    f.raw("")
    f.raw(f"br i1 {f.cmp('icmp slt', item, end).name}, label %{inside}, label %{done}")
    f.label(inside)
    following = take()
    body(item, following)
    f.lines[at] = f"  {item.name} = phi i64 [ {first.name}, %{before} ], [ {following.name}, %{f.here} ]"
    f.raw(f"br label %{head}")
    f.label(done)
