"""A convolution of int8 images on Arm: `out = conv((x - x_zero) * x_scale, (weight - w_zero) * w_scale) (+ bias)`.

It is the linear of `int8_linear` over the pixels of the result. Its rows are gathered while they are packed for a tile, so no
im2col matrix is ever stored. With channels innermost a pixel's window is a few contiguous runs of bytes; bytes outside of the
image are the zero point. Each run is padded to whole groups of 8 bytes in a packed row, with weights of zero for the padding.
Convolution groups are separate products, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fusewright_cpu.emit.text import Module, V, const, i64
from fusewright_cpu.kernels.arm.int8_linear import Int8Tiles
from fusewright_cpu.kernels.arm.int8_linear import packed as packed_rows
from fusewright_cpu.kernels.arm.int8_linear import padded as padded_columns
from fusewright_cpu.kernels.arm.tiles import COLUMNS, STEP, emit_tiles
from fusewright_cpu.kernels.by_hand import Int8Conv
from fusewright_cpu.kernels.parts import ceil_div, least, load, most, store

EIGHT = 8
"""Bytes of a row that are packed at once."""


@dataclass(frozen=True)
class Geometry:
    """A convolution of [n, c, h, w] over two dimensions, each pair (y, x)."""

    image: tuple[int, int, int, int]
    columns: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of the result."""
        given = zip(self.image[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        y, x = ((size + 2 * pad - reach * (taps - 1) - 1) // step + 1 for size, taps, step, pad, reach in given)
        return y, x

    @property
    def depth(self) -> int:
        """Return the channels of a group."""
        return self.image[1] // self.groups

    @property
    def run(self) -> int:
        """Return the bytes of a contiguous run: a row of the window, or the channels of a group at one tap."""
        return self.depth * (self.kernel[1] if self.groups == 1 and self.dilation[1] == 1 else 1)

    @property
    def taps(self) -> int:
        """Return the number of products of one sum."""
        return self.depth * self.kernel[0] * self.kernel[1]

    @property
    def width(self) -> int:
        """Return the bytes of a packed row."""
        return -(-(self.taps // self.run) * -(-self.run // EIGHT) * EIGHT // STEP) * STEP

    @property
    def waste(self) -> float:
        """Return how many products are computed per useful one."""
        own = self.columns // self.groups
        return -(-own // COLUMNS) * COLUMNS * self.width / (own * self.taps)

    def sizes(self) -> tuple[int, ...]:
        """Return the kernel's sizes, see `Int8Conv.symbols`."""
        (batch, c, h, w), (oh, ow) = self.image, self.size
        runs = self.depth * self.kernel[1] // self.run
        return (
            batch * oh * ow, self.columns // self.groups, self.taps, self.groups, 0, self.width, batch, c, h, w, oh, ow, self.run,
            self.kernel[0], runs, *self.stride, *self.padding, *self.dilation,
        )  # fmt: skip


def packed(weight: torch.Tensor, groups: int, run: int, form: str) -> torch.Tensor:
    """Pack int8 [columns, depth, ky, kx] for the kernel: pad runs to whole groups of 8, then pack like `int8_linear.packed`."""
    runs = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1, run)
    rows = torch.nn.functional.pad(runs, (0, -run % EIGHT)).flatten(1)
    return torch.cat([packed_rows(part, form) for part in rows.chunk(groups)])


def padded(per_column: torch.Tensor, groups: int) -> torch.Tensor:
    """Pad a vector of columns with zeros to whole tiles in each group."""
    return torch.cat([padded_columns(part) for part in per_column.chunk(groups)])


def emit_int8_conv(module: Module, a: Int8Conv, name: str, parallel: bool) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    emit_tiles(_Body(module, a, f"{name}.body"), name, parallel)


class _Body(Int8Tiles):
    """Tiles of pixels."""

    grouped: ClassVar[bool] = True

    def __init__(self, module: Module, a: Int8Conv, name: str) -> None:
        super().__init__(module, a, name)
        self.size = dict(zip(a.symbols, self.sizes, strict=True))
        f, size = self.f, self.size
        self.padded_n = f.mul(ceil_div(f, self.n, i64(COLUMNS)), i64(COLUMNS))
        self.all_n = f.mul(self.n, size["groups"])
        self.total = f.mul(f.mul(size["batch"], size["c"]), f.mul(size["h"], size["w"]))
        self.run_bytes = f.bin("and", f.add(size["run"], i64(EIGHT - 1)), i64(-EIGHT))

    def packed_bytes(self) -> V:
        return self.size["width"]

    def tile_of(self, packed: V) -> V:
        f, groups = self.f, self.size["groups"]
        self.product = f.bin("srem", packed, groups)
        self.weights = f.gep("i8", self.base["weight"], f.mul(f.mul(self.product, self.padded_n), self.width))
        return f.bin("sdiv", packed, groups)

    def place(self, row: V, first: V) -> V:
        f = self.f
        return f.add(f.add(f.mul(row, self.all_n), f.mul(self.product, self.n)), first)

    def of_columns(self, name: str, ty: str, first: V) -> V:
        return super().of_columns(name, ty, self.f.add(first, self.f.mul(self.product, self.padded_n)))

    def pack_row(self, row: V, to: V, sums: list[V]) -> list[V]:
        """Pack the window of a pixel of the result, run by run."""
        f, size = self.f, self.size
        line, ox = f.bin("sdiv", row, size["ow"]), f.bin("srem", row, size["ow"])
        image, oy = f.bin("sdiv", line, size["oh"]), f.bin("srem", line, size["oh"])
        y, x = (f.bin("sub", f.mul(o, size[f"stride_{d}"]), size[f"pad_{d}"]) for o, d in ((oy, "y"), (ox, "x")))
        fill = self._fill()

        def run_of(ky: V, kx: V, sums: list[V]) -> list[V]:
            iy, ix = f.add(y, f.mul(ky, size["dilation_y"])), f.add(x, f.mul(kx, size["dilation_x"]))
            pixel = f.add(f.mul(f.add(f.mul(image, size["h"]), iy), size["w"]), ix)
            source = f.add(f.mul(pixel, size["c"]), f.mul(self.product, size["run"]))
            number = f.add(f.mul(ky, size["runs"]), kx)
            there = f.gep("i8", to, f.mul(f.mul(number, self.run_bytes), i64(self.group)))
            return self._run(source, self._inside(iy, ix), there, fill, sums)

        def line_of(ky: V, sums: list[V]) -> list[V]:
            return f.loop(i64(0), size["runs"], i64(1), sums, lambda kx, sums: run_of(ky, kx, sums))

        return f.loop(i64(0), size["rows"], i64(1), sums, line_of)

    def _fill(self) -> V:
        """Return 8 bytes of padding in packed form."""
        f = self.f
        zero = f.conv("trunc", load(f, "i32", self.base["x_zero"]), "i8")
        return f.splat(f.bin("xor", zero, const(-128, "i8")) if self.a.x == "u8" else zero, EIGHT)

    def _inside(self, iy: V, ix: V) -> tuple[V, V]:
        """Return the range of bytes of a run that lie in the image: the first one, and the one after the last."""
        f, size = self.f, self.size

        def within(x: V) -> V:
            return least(f, most(f, x, i64(0)), size["run"])

        row = f.bin("and", f.cmp("icmp sge", iy, i64(0)), f.cmp("icmp slt", iy, size["h"]))
        lo = within(f.mul(f.bin("sub", i64(0), ix), size["c"]))
        hi = within(f.mul(f.bin("sub", size["w"], ix), size["c"]))
        return lo, f.select(row, hi, i64(0))

    def _run(self, source: V, inside: tuple[V, V], to: V, fill: V, sums: list[V]) -> list[V]:
        """Pack one run, 8 bytes at a time; without border tests if the whole run is in the image."""
        f, run, (lo, hi) = self.f, self.size["run"], inside
        whole = f.bin("and", f.cmp("icmp eq", lo, i64(0)), f.cmp("icmp eq", hi, run))
        plain = f.select(whole, f.bin("and", run, i64(-EIGHT)), i64(0))

        def eight(j: V, sums: list[V]) -> list[V]:
            return self._packed(self.eight(source, j, None), to, j, sums)

        def border(j: V, sums: list[V]) -> list[V]:
            return self._packed(self._border(source, j, lo, hi, fill), to, j, sums)

        return f.loop(plain, run, i64(EIGHT), f.loop(i64(0), plain, i64(EIGHT), sums, eight), border)

    def _packed(self, x: V, to: V, j: V, sums: list[V]) -> list[V]:
        store(self.f, x, self.f.gep("i8", to, self.f.mul(j, i64(self.group))), 8)
        return self.add(sums, x, None)

    def _border(self, source: V, j: V, lo: V, hi: V, fill: V) -> V:
        """Return 8 bytes of a run from the `j`th on: image bytes between `lo` and `hi`, padding before and after them within
        the run, and zeros after it. Only memory of the image is read."""
        f, begin = self.f, self.f.add(source, j)
        wanted = f.bin("and", self._from(f.bin("sub", lo, j)), self._until(f.bin("sub", hi, j)))
        fits = f.bin("and", f.cmp("icmp sge", begin, i64(0)), f.cmp("icmp sle", begin, f.bin("sub", self.total, i64(EIGHT))))
        zero = V("zeroinitializer", "i8", EIGHT)
        at = f.gep("i8", self.base["x"], begin)
        (x,) = f.when(fits, lambda: [load(f, "i8", at, EIGHT, 1)], [zero])
        (x,) = f.when(f.bin("xor", fits, const(True, "i1")), lambda: [load(f, "i8", at, EIGHT, 1, wanted)], [x])
        x = f.bin("xor", x, const(-128, "i8")) if self.a.x == "u8" else x
        return f.select(self._until(f.bin("sub", self.size["run"], j)), f.select(wanted, x, fill), zero)

    def _lane(self, n: V) -> V:
        """Return a number of lanes in each of 8 bytes."""
        f = self.f
        return f.splat(f.conv("trunc", least(f, most(f, n, i64(0)), i64(EIGHT)), "i8"), EIGHT)

    def _from(self, n: V) -> V:
        """Return the mask of the lanes from the `n`th on."""
        return self.f.cmp("icmp sge", self.f.iota(EIGHT, "i8"), self._lane(n))

    def _until(self, n: V) -> V:
        """Return the mask of the first `n` lanes."""
        return self.f.cmp("icmp slt", self.f.iota(EIGHT, "i8"), self._lane(n))

