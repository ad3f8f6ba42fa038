"""A linear of int8 on Arm: `out = (x - x_zero) * x_scale @ ((weight - w_zero) * w_scale).T (+ bias)`.

`smmla` (i8mm) multiplies two rows of 8 by two columns of 8 at once, `sdot` (dotprod) one row of 4 by four columns of 4.
Weights are packed for it once; rows of `x` are packed for a tile of them, unsigned ones as signed with another zero point.
What the zero points add is taken off behind the sum, which is exact in int32. It is scaled, and the bias is added, in fp64,
and that is rounded to fp32 once: the result is what a q/dq graph gives whose product is rounded correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fusewright.toolkit.ir.ir import Buffer, Scalar
from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.pointwise import cast, memory_type
from fusewright_cpu.emit.text import Fn, Module, V, const, i64
from fusewright_cpu.kernels.parts import ceil_div, each, least, load, store, word
from fusewright_cpu.policy import LOOPS
from fusewright_cpu.target import CpuTarget

COLUMNS = 8
"""Columns of a tile; of weights, scales, sums and bias there are a multiple of it."""
STEP = 16
"""Elements of a row that a loop takes at once; packed rows have a multiple of it."""
TILE = 32
"""Rows of `x` that are packed together."""
BLOCK = 64
"""Columns of one work item."""
HIGH, LOW = 8, 2
"""Rows multiplied together, and those of a last few."""
MOST_K, MOST_K_WITH_ZEROS = 65_536, 32_768
"""Longest sums of products that fit int32 whatever the values are: of weights, and of weights less their zero points."""
FORMS = {"smmla": ("i8mm", 2, 8), "sdot": ("dotprod", 4, 4)}
"""By instruction: the feature that has it, and the columns and elements of each that a register of weights holds."""


def form_of(target: CpuTarget) -> str:
    """The best instruction of a target, or ""."""
    return next((form for form, (feature, *_) in FORMS.items() if target.arm and target.has(feature)), "")


def packed(weight: torch.Tensor, form: str) -> torch.Tensor:
    """int8 [n, k] as kernels of this form read it: zeros up to whole tiles, registers one behind the other."""
    _, columns, bytes_ = FORMS[form]
    n, k = (-(-size // of) * of for size, of in zip(weight.shape, (COLUMNS, STEP), strict=True))
    full = torch.nn.functional.pad(weight, (0, k - weight.shape[1], 0, n - weight.shape[0]))
    return full.view(n // columns, columns, k // bytes_, bytes_).permute(0, 2, 1, 3).reshape(-1)


def padded(per_column: torch.Tensor) -> torch.Tensor:
    """A vector [n] of scales, sums of weights or biases, with zeros up to whole tiles."""
    return torch.nn.functional.pad(per_column, (0, -per_column.shape[0] % COLUMNS))


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """The kernel for one type of `x` ("i8", "u8") and `out` ("f32", "bf16", "i32"); lengths are arguments.

    `x` is [m, k], `out` [m, n]; `weight` is `packed`. `w_scale` fp32, `sums` (of each row of the weights) int32 and `bias`
    fp32 are `padded`, and so is `w_zero` int32, which is there where weights have zero points (`zeros`). `x_scale` fp32 and
    `x_zero` int32 are [m], or [1] where `row_step` is 0. An int32 `out` is the sums of int8 `x`: then there are no scales,
    zero points and bias.
    """

    x: str
    out: str
    form: str
    bias: bool = False
    zeros: bool = False

    @property
    def name(self) -> str:
        more = "".join(f"_{n}" for n in ("bias", "zeros") if getattr(self, n))
        return f"int8_linear_{self.x}_{self.out}_{self.form}{more}"

    @property
    def scaled(self) -> bool:
        """Whether sums are scaled."""
        return self.out != "i32"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        types = {"x": self.x, "weight": "i8"}
        types |= {"w_scale": "f32", "sums": "i32", "x_scale": "f32", "x_zero": "i32"} if self.scaled else {}
        types |= {"w_zero": "i32"} if self.zeros else {}
        types |= {"bias": "f32"} if self.bias else {}
        return (*(Buffer(n, t, "in") for n, t in types.items()), Buffer("out", self.out, "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("m", "n", "k", "row_step")

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return ()

    def refused(self, target: CpuTarget) -> str:
        """Why this kernel is not written for the target, or ""."""
        if self.form not in FORMS or not target.arm or not target.has(FORMS[self.form][0]):
            return f"needs an Arm CPU with {' or '.join(FORMS)}"
        plain = self.out == "i32" and self.x == "i8" and not (self.bias or self.zeros)
        known = plain or (self.x in ("i8", "u8") and self.out in ("f32", "bf16"))
        return "" if known else "only int8 and uint8, with results of fp32 or bf16, or sums of int8"


def emit_int8_linear(module: Module, a: Int8Linear, name: str, parallel: bool) -> None:
    """Adds the function `name`, `int64 name(int64 *block, int64 threads)` as loop kernels are (see `entry`)."""
    _Body(module, a, f"{name}.body").write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    m, n, k = (word(f, block, len(a.buffers) + at) for at in range(3))
    items = f.mul(ceil_div(f, m, i64(TILE)), ceil_div(f, n, i64(BLOCK)))
    work = f.bin("sdiv", f.mul(m, f.mul(n, f.add(k, i64(STEP)))), i64(COLUMNS))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    start(f, name, block, items, f.alloca("i64", 1, 8), team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


class _Body:
    """`void body(ptr block, i64 lo, i64 hi, ptr)`: work items lo to hi, each a tile of rows and a block of columns.

    Rows are packed in groups of `group`, 8 bytes of each in turn.
    """

    def __init__(self, module: Module, a: Int8Linear, name: str) -> None:
        self.a = a
        self.f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        _, self.columns, self.bytes = FORMS[a.form]
        self.group = 2 if a.form == "smmla" else 1

    def write(self) -> None:
        f, a, block = self.f, self.a, self.f.args[0]
        names = [b.name for b in a.buffers]
        self.base = {name: f.conv("inttoptr", word(f, block, at), "ptr") for at, name in enumerate(names)}
        self.m, self.n, self.k, self.row_step = (word(f, block, len(names) + at) for at in range(4))
        self.width = f.bin("and", f.add(self.k, i64(STEP - 1)), i64(-STEP))
        """Bytes of a packed row or column."""
        f.module.declare("malloc", "ptr", ["i64"], external=True)
        f.module.declare("free", "void", ["ptr"], external=True)
        packed = f.add(f.mul(self.width, i64(TILE)), i64(STEP))
        self.rows = f.let("ptr", 1, f"call ptr @malloc({f.add(packed, i64(4 * TILE))})")
        self.totals = f.gep("i8", self.rows, packed)
        """The sum of each packed row, where weights have zero points."""
        blocks = ceil_div(f, self.n, i64(BLOCK))

        def item(i: V, carried: list[V]) -> list[V]:
            tile, part = f.bin("sdiv", i, blocks), f.bin("srem", i, blocks)
            f.when(f.cmp("icmp ne", tile, carried[0]), lambda: self._pack(tile))
            self._block(tile, f.mul(part, i64(BLOCK)))
            return [tile]

        f.loop(f.args[1], f.args[2], i64(1), [i64(-1)], item)
        f.raw(f"call void @free({self.rows})")
        f.raw("ret void")
        f.finish()

    def _high(self, tile: V) -> tuple[V, V]:
        """(rows of a tile that are multiplied HIGH together, rows with the LOW ones behind them)."""
        f = self.f
        rows = least(f, f.bin("sub", self.m, f.mul(tile, i64(TILE))), i64(TILE))
        high = f.mul(f.bin("sdiv", f.add(rows, i64(HIGH - LOW - 1)), i64(HIGH)), i64(HIGH))
        more = f.cmp("icmp slt", high, rows)
        return high, f.select(more, f.add(high, i64(LOW)), high)

    def _row(self, tile: V, r: V) -> V:
        """A row of `x`; behind the last one that row again."""
        f = self.f
        return least(f, f.add(f.mul(tile, i64(TILE)), r), f.bin("sub", self.m, i64(1)))

    def _pack(self, tile: V) -> list[V]:
        f, whole = self.f, self.f.bin("and", self.k, i64(-8))

        def row(r: V) -> None:
            source = f.gep("i8", self.base["x"], f.mul(self._row(tile, r), self.k))
            first, inner = f.bin("sdiv", r, i64(self.group)), f.bin("srem", r, i64(self.group))
            to = f.gep("i8", self.rows, f.add(f.mul(first, f.mul(self.width, i64(self.group))), f.mul(inner, i64(8))))

            def eight(j: V, sums: list[V], there: V | None = None) -> list[V]:
                x = load(f, "i8", f.gep("i8", source, j), 8, 1, there)
                x = f.bin("xor", x, const(-128, "i8")) if self.a.x == "u8" else x
                store(f, x, f.gep("i8", to, f.mul(j, i64(self.group))), 8)
                if there is not None and sums and self.a.x == "u8":
                    x = f.select(there, x, V("zeroinitializer", "i8", 8))
                return [f.bin("add", s, f.conv("sext", x, "i32")) for s in sums]

            def last() -> list[V]:
                return eight(whole, sums, f.cmp("icmp slt", f.iota(8), f.bin("sub", self.k, whole)))

            sums = [V("zeroinitializer", "i32", 8)] if self.a.zeros else []
            sums = f.loop(i64(0), whole, i64(8), sums, eight)
            for total in f.when(f.cmp("icmp slt", whole, self.k), last, sums):
                store(f, self._added(total), f.gep("i32", self.totals, r))

        each(f, i64(0), self._high(tile)[1], 1, row)
        return []

    def _added(self, x: V) -> V:
        """The sum of a vector's lanes."""
        name = f"llvm.vector.reduce.add.v{x.w}i32"
        self.f.module.declare(name, "i32", [x.ty])
        return self.f.let("i32", 1, f"call i32 @{name}({x})")

    def _block(self, tile: V, first: V) -> None:
        """A block of columns, for all rows of the tile."""
        f = self.f
        high, stop = self._high(tile)

        def columns(c: V) -> None:
            each(f, i64(0), high, HIGH, lambda r: self._tile(tile, r, c, HIGH))
            each(f, high, stop, LOW, lambda r: self._tile(tile, r, c, LOW))

        each(f, first, least(f, f.add(first, i64(BLOCK)), self.n), COLUMNS, columns)

    def _tile(self, tile: V, r: V, c: V, rows: int) -> None:
        """`rows` rows from r on of COLUMNS columns from c on."""
        f = self.f
        x, w = f.gep("i8", self.rows, f.mul(r, self.width)), f.gep("i8", self.base["weight"], f.mul(c, self.width))
        xs = [f.gep("i8", x, f.mul(self.width, i64(i * self.group))) for i in range(rows // self.group)]
        ws = [f.gep("i8", w, f.mul(self.width, i64(g * self.columns))) for g in range(COLUMNS // self.columns)]
        zero = V("zeroinitializer", "i32", 4)
        multiply = self._matrix if self.a.form == "smmla" else self._dots
        sums = f.loop(i64(0), self.width, i64(STEP), [zero] * (len(xs) * len(ws)), lambda k, s: multiply(xs, ws, k, s))
        per = [sums[i * len(ws) : (i + 1) * len(ws)] for i in range(len(xs))]
        for i, found in enumerate(self._of_rows(per)):
            at = f.add(r, i64(i))
            self._result(found, self._row(tile, at), c, at)

    def _load16(self, p: V, at: V, offset: int) -> V:
        return load(self.f, "i8", self.f.gep("i8", p, self.f.add(at, i64(offset))), 16, 8)

    def _matrix(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V]) -> list[V]:
        """Two rows by two columns in each register."""
        out, at = list(sums), self.f.mul(k, i64(2))
        for half in (0, 16):
            right = [self._load16(w, at, half) for w in ws]
            for i, p in enumerate(xs):
                x = self._load16(p, at, half)
                for g, w in enumerate(right):
                    out[i * len(ws) + g] = self._call("smmla", out[i * len(ws) + g], x, w)
        return out

    def _dots(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V]) -> list[V]:
        """One row by four columns in each register."""
        f, out, at = self.f, list(sums), self.f.mul(k, i64(4))
        left = [f.let("i32", 4, f"bitcast {self._load16(p, k, 0)} to <4 x i32>") for p in xs]
        for q in range(4):
            right = [self._load16(w, at, 16 * q) for w in ws]
            for i, x in enumerate(left):
                four = f.let("i8", 16, f"bitcast {f.lanes(x, [q] * 4)} to <16 x i8>")
                for g, w in enumerate(right):
                    out[i * len(ws) + g] = self._call("sdot", out[i * len(ws) + g], w, four)
        return out

    def _call(self, name: str, acc: V, x: V, y: V) -> V:
        full = f"llvm.aarch64.neon.{name}.v4i32.v16i8"
        self.f.module.declare(full, acc.ty, [acc.ty, x.ty, y.ty])
        return self.f.let("i32", 4, f"call {acc.ty} @{full}({acc}, {x}, {y})")

    def _of_rows(self, sums: Sequence[Sequence[V]]) -> list[list[V]]:
        """The sums of each row in the order of columns."""
        if self.a.form == "sdot":
            return [list(row) for row in sums]
        out: list[list[V]] = []
        for tiles in sums:
            both = [(a, b) for a, b in zip(tiles[::2], tiles[1::2], strict=True)]
            out += [[self.f.shuffle(a, b, pick) for a, b in both] for pick in ([0, 1, 4, 5], [2, 3, 6, 7])]
        return out

    def _result(self, sums: Sequence[V], row: V, c: V, packed: V) -> None:
        """COLUMNS elements of a row of `out`, fewer at its end. `packed` is the row's number in the tile."""
        f, t = self.f, memory_type(self.a.out)
        finish = self._of_row(row, packed) if self.a.scaled else lambda x, _: x
        for i, x in enumerate(sums):
            first = f.add(c, i64(4 * i))
            to = f.gep(t, self.base["out"], f.add(f.mul(row, self.n), first))
            self._store(finish(x, first), to, f.bin("sub", self.n, first))

    def _of_row(self, row: V, packed: V) -> Callable[[V, V], V]:
        """What makes four results of four sums of a row, from a column on."""
        f, at = self.f, self.f.mul(row, self.row_step)
        zero, scale = (load(f, ty, f.gep(ty, self.base[n], at)) for n, ty in (("x_zero", "i32"), ("x_scale", "float")))
        zero = f.bin("sub", zero, const(128, "i32")) if self.a.x == "u8" else zero
        factor = f.conv("fpext", scale, "double")
        if self.a.zeros:
            of_zeros = f.bin("mul", zero, f.conv("trunc", self.k, "i32"))
            total = f.bin("sub", load(f, "i32", f.gep("i32", self.totals, packed)), of_zeros)

        def finish(x: V, first: V) -> V:
            def columns(name: str, ty: str) -> V:
                return load(f, ty, f.gep(ty, self.base[name], first), 4)

            x = f.bin("sub", x, f.bin("mul", columns("sums", "i32"), zero))
            if self.a.zeros:
                x = f.bin("sub", x, f.bin("mul", columns("w_zero", "i32"), total))
            x = f.conv("sitofp", x, "double")
            x = f.bin("fmul", x, f.bin("fmul", f.conv("fpext", columns("w_scale", "float"), "double"), factor))
            if self.a.bias:
                x = f.bin("fadd", x, f.conv("fpext", columns("bias", "float"), "double"))
            return cast(f, f.conv("fptrunc", x, "float"), "f32", self.a.out)

        return finish

    def _store(self, x: V, to: V, left: V) -> None:
        """Four elements, or the first `left` of them."""
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
