"""Print LLVM IR as text: values with a lane count, one function at a time, loops as callbacks.

Text is used because building objects in Python and printing them costs several times what LLVM itself needs for
these kernels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fusewright_cpu.target import CpuTarget

BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "bfloat": 16, "float": 32, "double": 64}


CONSTANTS = 4
"""Constants in a register whose lanes serve as factors."""


@dataclass(frozen=True, slots=True)
class V:
    """A scalar (`w` 1) or vector value of element type `t`. `lit` marks a literal that can be written as a
    splat."""

    name: str
    t: str
    w: int = 1
    lit: bool = False

    @property
    def ty(self) -> str:
        return self.t if self.w == 1 else f"<{self.w} x {self.t}>"

    def __str__(self) -> str:
        return f"{self.ty} {self.name}"


def f32_literal(x: float) -> str:
    """Return a float constant in LLVM's notation: the bits of the double with the value of the rounded float."""
    try:
        rounded = struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        rounded = float("inf") if x > 0 else float("-inf")
    return f64_literal(rounded)


def f64_literal(x: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"


def const(x: float | int | bool, t: str) -> V:
    """Return a literal of element type `t`."""
    if t == "double":
        return V(f64_literal(float(x)), t, lit=True)
    if t in ("float", "half"):
        return V(f32_literal(float(x)), t, lit=True)
    if t == "i1":
        return V("true" if x else "false", t, lit=True)
    n, top = int(x), 1 << (BITS[t] - 1)
    return V(str((n + top) % (2 * top) - top), t, lit=True)


def i64(x: int) -> V:
    return const(x, "i64")


@dataclass
class Module:
    """Functions, declarations and helpers of one LLVM module."""

    target: CpuTarget
    attributes: str
    functions: list[str] = field(default_factory=list)
    declarations: dict[str, str] = field(default_factory=dict)
    symbols: set[str] = field(default_factory=set)
    """External symbols (libm, the thread pool) for which the JIT must supply addresses."""
    helpers: set[str] = field(default_factory=set)
    constants: dict[str, str] = field(default_factory=dict)
    """Names of constants in memory, by type and value."""

    def declare(self, name: str, result: str, args: Sequence[str], external: bool = False) -> None:
        self.declarations.setdefault(name, f"declare {result} @{name}({', '.join(args)})")
        if external:
            self.symbols.add(name)

    def render(self) -> str:
        constants = [f"{name} = private constant {value}" for value, name in self.constants.items()]
        parts = [f'target triple = "{self.target.triple}"', *constants, *self.declarations.values(), *self.functions]
        return "\n".join([*parts, f"attributes #0 = {{ {self.attributes} }}", ""])


class Fn:
    """One function under construction. `result` and `args` are LLVM types; arguments are `%a0`, `%a1`, ..."""

    def __init__(self, module: Module, name: str, result: str, args: Sequence[str], linkage: str = "internal") -> None:
        self.module, self.name = module, name
        self.head = f"define {linkage} {result} @{name}({', '.join(f'{t} %a{i}' for i, t in enumerate(args))}) #0 {{"
        self.args = [V(f"%a{i}", t) for i, t in enumerate(args)]
        self.allocas: list[str] = []
        self.lines: list[str] = []
        self.count = 0
        self.here = "entry"
        self.splats: dict[tuple[str, V, int], V] = {}
        self.memo: dict[tuple[str, str], V] = {}
        self.held: dict[str, V] = {}

    def finish(self) -> None:
        """Add the function to the module; it must have been terminated."""
        self.module.functions.append("\n".join([self.head, "entry:", *self.allocas, *self.lines, "}"]))

    def fresh(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def raw(self, line: str) -> None:
        self.lines.append("  " + line)

    def let(self, t: str, w: int, text: str) -> V:
        """Define a value by an instruction. An equal instruction of the same block is reused."""
        pure = not text.startswith(("load", "call", "phi", "tail", "atomicrmw"))
        key = (self.here, text)
        if pure and key in self.memo:
            return self.memo[key]
        v = V(self.fresh(), t, w)
        self.raw(f"{v.name} = {text}")
        if pure:
            self.memo[key] = v
        return v

    def alloca(self, t: str, count: int, align: int = 64) -> V:
        v = V(self.fresh(), "ptr")
        self.allocas.append(f"  {v.name} = alloca {t}, i64 {count}, align {align}")
        return v

    # blocks

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.here = name

    def new_label(self, what: str) -> str:
        self.count += 1
        return f"{what}{self.count}"

    def loop(self, lo: V, hi: V, step: V, carried: Sequence[V], body: Callable[[V, list[V]], Sequence[V]]) -> list[V]:
        """Emit `for (i = lo; i < hi; i += step) carried = body(i, carried)`; return the final values."""
        head, inside, done = self.new_label("loop"), self.new_label("body"), self.new_label("done")
        before = self.here
        self.raw(f"br label %{head}")
        self.label(head)
        i = V(self.fresh(), "i64")
        phis = [V(self.fresh(), c.t, c.w) for c in carried]
        at = len(self.lines)
        self.lines.extend([""] * (1 + len(phis)))
        go = self.let("i1", 1, f"icmp slt i64 {i.name}, {hi.name}")
        self.raw(f"br i1 {go.name}, label %{inside}, label %{done}")
        self.label(inside)
        after = list(body(i, phis))
        nxt = self.let("i64", 1, f"add nsw i64 {i.name}, {step.name}")
        latch = self.here
        self.raw(f"br label %{head}")
        self.lines[at] = f"  {i.name} = phi i64 [ {lo.name}, %{before} ], [ {nxt.name}, %{latch} ]"
        for k, (phi, start, end) in enumerate(zip(phis, carried, after, strict=True)):
            # incoming splats cannot be emitted here: callers carry values of the right width
            text = f"  {phi.name} = phi {phi.ty} [ {start.name}, %{before} ], [ {end.name}, %{latch} ]"
            self.lines[at + 1 + k] = text
        self.label(done)
        return phis

    def when(self, cond: V, body: Callable[[], Sequence[V]], otherwise: Sequence[V] = ()) -> list[V]:
        """Emit `cond ? body() : otherwise` with a branch."""
        yes, done = self.new_label("then"), self.new_label("endif")
        before = self.here
        self.raw(f"br i1 {cond.name}, label %{yes}, label %{done}")
        self.label(yes)
        results = list(body())
        end = self.here
        self.raw(f"br label %{done}")
        self.label(done)
        return [
            self.let(a.t, a.w, f"phi {a.ty} [ {a.name}, %{end} ], [ {b.name}, %{before} ]")
            for a, b in zip(results, otherwise, strict=True)
        ]

    def choose(self, cond: V, body: Callable[[], Sequence[V]], otherwise: Callable[[], Sequence[V]]) -> list[V]:
        """Emit `cond ? body() : otherwise()` with branches."""
        yes, no, done = self.new_label("then"), self.new_label("else"), self.new_label("endif")
        self.raw(f"br i1 {cond.name}, label %{yes}, label %{no}")
        found = []
        for label, made in ((yes, body), (no, otherwise)):
            self.label(label)
            found.append((list(made()), self.here))
            self.raw(f"br label %{done}")
        self.label(done)
        (first, then), (second, end) = found
        pairs = zip(first, second, strict=True)
        return [self.let(a.t, a.w, f"phi {a.ty} [ {a.name}, %{then} ], [ {b.name}, %{end} ]") for a, b in pairs]

    # values

    def splat(self, v: V, w: int) -> V:
        """Return `v` in every one of `w` lanes."""
        if v.w == w:
            return v
        if v.lit:
            return V(f"splat ({v.t} {v.name})", v.t, w, lit=True)
        key = (self.here, v, w)
        if key not in self.splats:
            one = self.let(v.t, w, f"insertelement <{w} x {v.t}> poison, {v.t} {v.name}, i64 0")
            zero = f"<{w} x i32> zeroinitializer"
            self.splats[key] = self.let(v.t, w, f"shufflevector {one}, <{w} x {v.t}> poison, {zero}")
        return self.splats[key]

    def lane_constants(self, xs: Sequence[float], like: V) -> list[V]:
        """Return each of `xs` as one lane of a register that holds several: NEON multiplies by such a lane. LLVM
        would give each constant its own register."""
        out: list[V] = []
        for k in range(0, len(xs), CONSTANTS):
            some = xs[k : k + CONSTANTS]
            held = self._held([*some, *[0.0] * (CONSTANTS - len(some))], like.t)
            out += [self.lanes(held, [lane] * like.w) for lane in range(len(some))]
        return out

    def _held(self, xs: Sequence[float], t: str) -> V:
        """Return a vector of constants whose values LLVM does not know, read on entry."""
        ty = f"<{len(xs)} x {t}>"
        value = f"{ty} <{', '.join(str(const(x, t)) for x in xs)}>"
        if value not in self.held:
            name = self.module.constants.setdefault(value, f"@fw.constants.{len(self.module.constants)}")
            self.held[value] = V(self.fresh(), t, len(xs))
            self.allocas.append(f"  {self.held[value].name} = load volatile {ty}, ptr {name}")
        return self.held[value]

    def same(self, *vs: V) -> list[V]:
        """Return the values with one common lane count."""
        w = max(v.w for v in vs)
        return [self.splat(v, w) for v in vs]

    def bin(self, op: str, a: V, b: V) -> V:
        a, b = self.same(a, b)
        return self.let(a.t, a.w, f"{op} {a}, {b.name}")

    def add(self, a: V, b: V) -> V:
        if a.lit and b.lit and a.w == b.w == 1 and a.t == "i64":
            return i64(int(a.name) + int(b.name))
        if a.name == "0" or b.name == "0":
            return b if a.name == "0" and b.w >= a.w else a if b.name == "0" and a.w >= b.w else self.bin("add", a, b)
        return self.bin("add", a, b)

    def mul(self, a: V, b: V) -> V:
        if a.lit and b.lit and a.w == b.w == 1 and a.t == "i64":
            return i64(int(a.name) * int(b.name))
        return b if a.name == "1" else a if b.name == "1" else self.bin("mul", a, b)

    def cmp(self, pred: str, a: V, b: V) -> V:
        """Compare; `pred` is e.g. "icmp slt" or "fcmp olt"."""
        a, b = self.same(a, b)
        return self.let("i1", a.w, f"{pred} {a}, {b.name}")

    def select(self, c: V, a: V, b: V) -> V:
        w = max(c.w, a.w, b.w)
        a, b = self.splat(a, w), self.splat(b, w)
        c = self.splat(c, w)
        return self.let(a.t, w, f"select {c}, {a}, {b}")

    def conv(self, op: str, a: V, t: str) -> V:
        """Emit a conversion instruction, e.g. zext, sitofp, bitcast."""
        if a.t == t:
            return a
        to = t if a.w == 1 else f"<{a.w} x {t}>"
        return self.let(t, a.w, f"{op} {a} to {to}")

    def call(self, name: str, result: str, args: Sequence[V], w: int | None = None, flags: str = "") -> V:
        """Call an overloaded LLVM intrinsic, e.g. call("fma", "float", [a, b, c]): the suffix follows from the
        result. `flags` are fast-math flags."""
        same = self.same(*args)
        width = same[0].w if w is None else w
        suffix = _suffix(result, width)
        full = f"llvm.{name}.{suffix}"
        ty = result if width == 1 else f"<{width} x {result}>"
        self.module.declare(full, ty, [v.ty for v in same])
        return self.let(result, width, f"call {flags}{ty} @{full}({', '.join(map(str, same))})")

    def fma(self, a: V, b: V, c: V) -> V:
        return self.call("fma", a.t, [a, b, c])

    def fneg(self, a: V) -> V:
        return self.let(a.t, a.w, f"fneg {a}")

    def lanes(self, v: V, pick: Sequence[int]) -> V:
        """Shuffle one vector."""
        idx = ", ".join(f"i32 {p}" for p in pick)
        return self.let(v.t, len(pick), f"shufflevector {v}, {v.ty} poison, <{len(pick)} x i32> <{idx}>")

    def shuffle(self, a: V, b: V, pick: Sequence[int]) -> V:
        """Pick lanes of two vectors of one type, those of `b` numbered after those of `a`."""
        idx = ", ".join(f"i32 {p}" for p in pick)
        return self.let(a.t, len(pick), f"shufflevector {a}, {b}, <{len(pick)} x i32> <{idx}>")

    def extract(self, v: V, lane: int) -> V:
        return v if v.w == 1 else self.let(v.t, 1, f"extractelement {v}, i64 {lane}")

    def iota(self, w: int, t: str = "i64") -> V:
        """Return 0, 1, 2, ... in `w` lanes."""
        if w == 1:
            return const(0, t)
        return V("<" + ", ".join(f"{t} {i}" for i in range(w)) + ">", t, w)

    def any(self, m: V) -> V:
        """Return whether any lane of a mask is set."""
        if m.w == 1:
            return m
        self.module.declare(f"llvm.vector.reduce.or.{_suffix('i1', m.w)}", "i1", [m.ty])
        return self.let("i1", 1, f"call i1 @llvm.vector.reduce.or.{_suffix('i1', m.w)}({m})")

    def first(self, m: V, x: V) -> V:
        """Return `x` in the first set lane of a mask that has one."""
        if m.w == 1:
            return self.extract(x, 0)
        bits = self.conv("zext", V(self.let(f"i{m.w}", 1, f"bitcast {m} to i{m.w}").name, f"i{m.w}"), "i64")
        lane = self.count_zeros(bits)
        return self.let(x.t, 1, f"extractelement {self.splat(x, m.w)}, {lane}")

    def count_zeros(self, x: V) -> V:
        """Return the number of trailing zeros of a non-zero i64."""
        self.module.declare("llvm.cttz.i64", "i64", ["i64", "i1"])
        return self.let("i64", 1, f"call i64 @llvm.cttz.i64({x}, i1 true)")

    def gep(self, t: str, base: V, offset: V) -> V:
        """Return the address(es) of element `offset` of an array of `t` at `base`."""
        w = max(base.w, offset.w)
        return self.let("ptr", w, f"getelementptr {t}, {base}, {offset}")


def _suffix(t: str, w: int) -> str:
    base = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}.get(t, t)
    return base if w == 1 else f"v{w}{base}"
