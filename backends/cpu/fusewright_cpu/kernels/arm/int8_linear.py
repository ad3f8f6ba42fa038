"""A linear of int8 on Arm: `out = (x - x_zero) * x_scale @ ((weight - w_zero) * w_scale).T (+ bias)`.

`smmla` (i8mm) multiplies two rows of 8 by two columns of 8 at once, `sdot` (dotprod) one row of 4 by four columns of 4.
Weights are packed for it once; rows of `x` are packed tile by tile, unsigned ones as signed with another zero point.
The terms of the zero points are subtracted after the sum, which is exact in int32. The sum is scaled, and the bias added, in fp64,
with one rounding to fp32: the result equals that of a q/dq graph with a correctly rounded product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusewright_cpu.emit.pointwise import cast, memory_type
from fusewright_cpu.emit.text import Module, V, const, i64
from fusewright_cpu.kernels.arm.tiles import COLUMNS, STEP, Tiles, emit_tiles
from fusewright_cpu.kernels.by_hand import FORMS, Int8Linear, Int8Product
from fusewright_cpu.kernels.parts import load, store

MOST_K, MOST_K_WITH_ZEROS = 65_536, 32_768
"""The longest sums of products that fit int32 for any values: of weights, and of weights minus their zero points."""
def packed(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Pack int8 [n, k] for kernels of this form: pad with zeros to whole tiles, and store register after register."""
    _, columns, bytes_ = FORMS[form]
    n, k = (-(-size // of) * of for size, of in zip(weight.shape, (COLUMNS, STEP), strict=True))
    full = torch.nn.functional.pad(weight, (0, k - weight.shape[1], 0, n - weight.shape[0]))
    return full.view(n // columns, columns, k // bytes_, bytes_).permute(0, 2, 1, 3).reshape(-1)


def padded(per_column: torch.Tensor) -> torch.Tensor:
    """Pad a vector [n] of scales, sums of weights or biases with zeros to whole tiles."""
    return torch.nn.functional.pad(per_column, (0, -per_column.shape[0] % COLUMNS))


def emit_int8_linear(module: Module, a: Int8Linear, name: str, parallel: bool) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    emit_tiles(Int8Tiles(module, a, f"{name}.body"), name, parallel)


class Int8Tiles(Tiles):
    """Tiles of int8."""

    def __init__(self, module: Module, a: Int8Product, name: str) -> None:
        super().__init__(module, name, a.buffers, len(a.symbols))
        self.a = a
        self.row_step = self.sizes[a.symbols.index("row_step")]
        _, self.columns, _ = FORMS[a.form]
        self.group = 2 if a.form == "smmla" else 1

    def eight(self, row: V, j: V, there: V | None) -> V:
        f = self.f
        x = load(f, "i8", f.gep("i8", self.base["x"], f.add(row, j)), 8, 1, there)
        return f.bin("xor", x, const(-128, "i8")) if self.a.x == "u8" else x

    def summed(self) -> list[V]:
        return [V("zeroinitializer", "i32", 8)] if self.a.zeros else []

    def add(self, sums: Sequence[V], x: V, there: V | None) -> list[V]:
        if there is not None and sums and self.a.x == "u8":
            x = self.f.select(there, x, V("zeroinitializer", "i8", 8))
        return [self.f.bin("add", s, self.f.conv("sext", x, "i32")) for s in sums]

    def packed_row(self, r: V, eights: Sequence[V]) -> None:
        for total in eights:
            store(self.f, self._added(total), self.f.gep("i32", self.totals, r))

    def _added(self, x: V) -> V:
        """Return the sum of a vector's lanes."""
        name = f"llvm.vector.reduce.add.v{x.w}i32"
        self.f.module.declare(name, "i32", [x.ty])
        return self.f.let("i32", 1, f"call i32 @{name}({x})")

    def multiply(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V]) -> list[V]:
        if self.a.form == "smmla":
            return self.squares(xs, ws, k, sums, "smmla.v4i32.v16i8")
        return self._dots(xs, ws, k, sums)

    def _dots(self, xs: Sequence[V], ws: Sequence[V], k: V, sums: Sequence[V]) -> list[V]:
        """Multiply one row by four columns in each register."""
        f, out, at = self.f, list(sums), self.f.mul(k, i64(4))
        left = [f.let("i32", 4, f"bitcast {self.load16(p, k, 0)} to <4 x i32>") for p in xs]
        for q in range(4):
            right = [self.load16(w, at, 16 * q) for w in ws]
            for i, x in enumerate(left):
                four = f.let("i8", 16, f"bitcast {f.lanes(x, [q] * 4)} to <16 x i8>")
                for g, w in enumerate(right):
                    out[i * len(ws) + g] = self.call("sdot.v4i32.v16i8", out[i * len(ws) + g], w, four)
        return out

    def result(self, sums: Sequence[V], row: V, c: V, packed: V) -> None:
        f, t = self.f, memory_type(self.a.out)
        finish = self._of_row(row, packed) if self.a.scaled else lambda x, _: x
        for i, x in enumerate(sums):
            first = f.add(c, i64(4 * i))
            to = f.gep(t, self.base["out"], self.place(row, first))
            self.store(finish(x, first), to, f.bin("sub", self.n, first))

    def place(self, row: V, first: V) -> V:
        """Return the offset in `out` of the element at a row and column."""
        return self.f.add(self.f.mul(row, self.n), first)

    def of_columns(self, name: str, ty: str, first: V) -> V:
        """Load four per-column values of the current product."""
        f = self.f
        return load(f, ty, f.gep(ty, self.base[name], first), 4)

    def _of_row(self, row: V, packed: V) -> Callable[[V, V], V]:
        """Return a function that makes four results from four sums of a row, from a given column on."""
        f, at = self.f, self.f.mul(row, self.row_step)
        zero, scale = (load(f, ty, f.gep(ty, self.base[n], at)) for n, ty in (("x_zero", "i32"), ("x_scale", "float")))
        zero = f.bin("sub", zero, const(128, "i32")) if self.a.x == "u8" else zero
        factor = f.conv("fpext", scale, "double")
        if self.a.zeros:
            of_zeros = f.bin("mul", zero, f.conv("trunc", self.k, "i32"))
            total = f.bin("sub", load(f, "i32", f.gep("i32", self.totals, packed)), of_zeros)

        def finish(x: V, first: V) -> V:
            def columns(name: str, ty: str) -> V:
                return self.of_columns(name, ty, first)

            x = f.bin("sub", x, f.bin("mul", columns("sums", "i32"), zero))
            if self.a.zeros:
                x = f.bin("sub", x, f.bin("mul", columns("w_zero", "i32"), total))
            x = f.conv("sitofp", x, "double")
            x = f.bin("fmul", x, f.bin("fmul", f.conv("fpext", columns("w_scale", "float"), "double"), factor))
            if self.a.bias:
                x = f.bin("fadd", x, f.conv("fpext", columns("bias", "float"), "double"))
            return cast(f, f.conv("fptrunc", x, "float"), "f32", self.a.out)

        return finish

