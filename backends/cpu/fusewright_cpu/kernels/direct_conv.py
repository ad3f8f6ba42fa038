"""A convolution of fp32 channels-last images: `out = after(conv(x, weight) (+ bias) (+ other))`.

A block is `rows` pixels by `columns` channels, whose sums, weights and one element of x are in registers. Taps outside of the
image read zeros. Sums of at most 3/2 PART products are added to those before, as exact as eager's. The loops are those of `panels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.by_hand import NARROW, WIDE, DirectConv, VectorLinear
from fusewright_cpu.kernels.panels import Panels, column_of, emit_panels, kinds_of_panels
from fusewright_cpu.kernels.parts import add_to, ceil_div, each, least, load, with_products, word
from fusewright_cpu.kernels.parts import most as larger

SUMS = {32: 2048, 64: 8192}
"""The most sums of a panel in a work item, about, by the bytes of a register: each item reads its weights anew."""
TOGETHER = 4
"""The most panels of a work item, which read a part of its rows while it is in the second cache."""
ITEMS = 3
"""The least work items for each thread, if there are enough rows: threads differ in speed."""
FEWEST = 8
"""Blocks of a work item for the sake of that."""
PART = 256
"""The most products in one running sum (see `onednn.sums`); for a row of a window 3/2 of it."""
WORDS, INNER = 4, 3
"""Numbers that describe the window of a pixel, and which of them tells whether all windows of the block that begins with it lie
inside of the image."""
HERE = i64(0)
"""No elements ahead."""


def packing(shape: tuple[int, ...], groups: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return how a weight [groups * n, c, ky, kx] is packed: its shape with groups apart, the padding of n with zeros, the shape
    with panels apart, and the order in memory of groups, panels, columns, c, ky and kx."""
    n, rest = shape[0] // groups, shape[1:]
    panels = -(-n // columns)
    return (groups, n, *rest), (0, 0, 0, 0, 0, 0, 0, -n % columns), (groups, panels, columns, *rest), (0, 1, 4, 5, 3, 2)


def packed(weight: torch.Tensor, groups: int, a: DirectConv) -> torch.Tensor:
    """Pack a weight."""
    n, rest, first, made = weight.shape[0] // groups, weight.shape[1:], 0, []
    for count, columns in a.panels(n):
        part = weight.reshape(groups, n, *rest)[:, first : min(n, first + count * columns)].flatten(0, 1)
        apart, pad, panels, order = packing(tuple(part.shape), groups, columns)
        turned = torch.nn.functional.pad(part.reshape(apart), pad).reshape(panels).permute(order)
        made.append(turned.reshape(groups, math.prod(panels[1:])))
        first += count * columns
    return torch.cat(made, 1)


def emit_direct_conv(module: Module, a: DirectConv, name: str, parallel: bool) -> None:
    """Add the function `name` (see `emit_panels`)."""
    emit_panels(module, a, name, parallel, Pixels(module, a, f"{name}.body"))


class Pixels(Panels):
    """The pixels of the result as rows."""

    dtype, held_panels, words = "f32", TOGETHER, WORDS
    pointwise: bool

    def __init__(self, module: Module, a: DirectConv | VectorLinear, name: str) -> None:
        self.rows, self.columns = a.rows, a.columns
        self.chunk = SUMS[module.target.vector_bytes] // a.columns
        self.held = self.chunk + 2 * a.rows
        self.lanes = module.target.vector_bytes // 4
        self.products_per_unit, self.pointwise = self.lanes, not isinstance(a, DirectConv) or a.pointwise
        self.narrow = a.narrow and isinstance(a, DirectConv)
        super().__init__(module, a, name)
        self.step_of_sums = self.held * self.columns
        """Elements between the sums of two panels."""
        self.windows = self.f.alloca("i64", self.words * self.held, 8)
        """Of each pixel of an item: line and column of the image that its window begins in, where that is in `x`, and INNER."""

    def count(self, f: Fn, size: Mapping[str, V]) -> V:
        of_group = kinds_of_panels(f, size["n"])[1] if self.narrow else ceil_div(f, size["n"], i64(self.columns))
        return f.mul(of_group, size["groups"])

    def width(self, f: Fn, size: Mapping[str, V]) -> V:
        return f.mul(size["n"], size["groups"])

    def of_item(self, f: Fn, size: Mapping[str, V], threads: V) -> tuple[V, V]:
        """Return equal numbers of rows, as many as fit, and as many panels, but enough items for all threads."""
        panels, wanted = self.count(f, size), f.mul(threads, i64(ITEMS))
        most = f.add(f.bin("sdiv", size["m"], i64(FEWEST * self.rows)), i64(1))
        chunks = larger(f, ceil_div(f, size["m"], i64(self.chunk)), least(f, ceil_div(f, wanted, panels), most))
        rows = f.mul(ceil_div(f, ceil_div(f, size["m"], chunks), i64(self.rows)), i64(self.rows))
        many = f.bin("sdiv", f.mul(panels, chunks), wanted)
        return rows, larger(f, i64(1), least(f, least(f, many, panels), i64(TOGETHER)))

    def panel_bytes(self) -> V:
        f, size = self.f, self.size
        if self.narrow:
            self.wide, self.per_group, self.group_columns = kinds_of_panels(f, size["n"])
            return f.mul(size["k"], i64(4))  # of a column
        self.per_group = ceil_div(f, size["n"], i64(self.columns))
        return f.mul(size["k"], i64(4 * self.columns))

    def weights(self, panel: V) -> V:
        if not self.narrow:
            return super().weights(panel)
        f = self.f
        column = f.add(f.mul(self.group(panel), self.group_columns), self._column(panel))
        return f.gep("i8", self.base["weight"], f.mul(column, self.bytes))

    def place(self, panel: V) -> tuple[V, V, V]:
        f, n = self.f, self.size["n"]
        within = self._column(panel)
        return f.add(f.mul(self.group(panel), n), within), f.bin("sub", n, within), f.mul(n, self.size["groups"])

    def _column(self, panel: V) -> V:
        """Return where the columns of a panel begin in its group."""
        f, within = self.f, self.f.bin("srem", panel, self.per_group)
        return column_of(f, within, self.wide) if self.narrow else f.mul(within, i64(self.columns))

    def _of_kind(self, panel: V, body: Callable[[], None]) -> None:
        """Emit `body` for the kind of a panel."""
        if not self.narrow:
            return body()
        f, columns = self.f, self.columns

        def of(columns: int) -> list[V]:
            self.columns = columns
            body()
            return []

        wide = f.cmp("icmp slt", f.bin("srem", panel, self.per_group), self.wide)
        f.choose(wide, lambda: of(WIDE), lambda: of(NARROW))
        self.columns = columns
        return None

    def group(self, panel: V) -> V:
        return self.f.bin("sdiv", panel, self.per_group)

    def image(self, panel: V) -> V:
        """Return the address of the channels that a panel reads."""
        return self.f.gep("float", self.base["x"], self.f.mul(self.group(panel), self.size["c"]))

    def blocks(self, row: V, count: V, panel: V, then: V) -> None:
        """Compute a part of the sums for all blocks, whose weights stay in the first cache, then the next."""
        f, size = self.f, self.size
        last = f.bin("sub", size["m"], i64(self.rows))
        start = self.first = least(f, row, last)
        panels = least(f, f.bin("sub", self.panels, panel), self.item_panels)
        if not self.pointwise:
            self._find_windows(start, f.bin("sub", least(f, f.add(row, count), size["m"]), start))
            each(f, i64(0), count, self.rows, lambda at: self._find_inner(f.bin("sub", least(f, f.add(row, at), last), start)))

        def each_block(body: Callable[[V, V, V, V], None], y: V | None = None) -> None:
            """Emit `body(panel, row, row from the first on, sums)` for each block of each panel (whose windows have a row `y`)."""

            def of_panel(p: V) -> None:
                held = f.gep("float", self.sums, f.mul(p, i64(self.step_of_sums)))
                this = f.add(panel, p)

                def block(at: V) -> None:
                    r = f.bin("sub", least(f, f.add(row, at), last), start)
                    body(this, f.add(start, r), r, f.gep("float", held, f.mul(at, i64(self.columns))))

                self.use(this)
                self._of_kind(this, lambda: self.of_row(y, lambda: each(f, i64(0), count, self.rows, block)))

            each(f, i64(0), panels, 1, of_panel)

        if self.pointwise:
            each(f, i64(0), size["c"], PART, lambda c: each_block(lambda p, at, r, sums: self._pixels_of_part(at, sums, c)))
        else:
            self._parts(lambda y, x, c: each_block(lambda p, at, r, sums: self._windows_of_part(r, sums, y, x, c), y))
        each_block(lambda p, at, r, sums: self.finish(at, p, sums))

    def of_row(self, y: V | None, body: Callable[[], None]) -> None:
        """Emit `body` if windows of the panel in use have a row `y`."""
        body()

    def use(self, panel: V) -> None:
        """Multiply by this panel from now on."""
        f = self.f
        self.x, self.here = self.image(panel), self.weights(panel)
        self.there = self.weights(f.bin("srem", f.add(panel, i64(1)), self.panels))

    def _parts(self, body: Callable[[V, V, V], None]) -> None:
        """Emit `body` for each part of the sums: a window, a row of it, or a tap of it, from a channel on."""
        f, size = self.f, self.size
        row, most = f.mul(size["kx"], size["c"]), i64(PART + PART // 2)
        self.span = f.select(f.cmp("icmp sle", row, most), size["kx"], i64(1))
        self.tall = f.select(f.cmp("icmp sle", f.mul(row, size["ky"]), most), size["ky"], i64(1))
        self.longest = f.select(f.cmp("icmp sgt", self.span, i64(1)), most, i64(PART))
        self.dense = f.bin("and", f.cmp("icmp eq", size["step_x"], size["c"]), f.cmp("icmp eq", size["dilation_x"], i64(1)))

        def columns(y: V) -> None:
            def channels(x: V, _: list[V]) -> list[V]:
                each(f, i64(0), size["c"], PART, lambda c: body(y, x, c))
                return []

            f.loop(i64(0), size["kx"], self.span, [], channels)

        def rows(y: V, _: list[V]) -> list[V]:
            columns(y)
            return []

        f.loop(i64(0), size["ky"], self.tall, [], rows)

    def _find_windows(self, start: V, count: V) -> None:
        """Store the windows of pixels from one on."""
        f, size = self.f, self.size
        line, x = f.bin("udiv", start, size["ow"]), f.bin("urem", start, size["ow"])
        image, y = f.bin("udiv", line, size["oh"]), f.bin("urem", line, size["oh"])

        def next_one(r: V, pixel: list[V]) -> list[V]:
            image, y, x = pixel
            for at, v in enumerate(self.window_of(image, y, x)):
                f.raw(f"store {v}, {f.gep('i64', self._window(r), i64(at if at < INNER else at + 1))}")
            x = f.add(x, i64(1))
            end = f.cmp("icmp eq", x, size["ow"])
            x, y = f.select(end, i64(0), x), f.select(end, f.add(y, i64(1)), y)
            end = f.cmp("icmp eq", y, size["oh"])
            return [f.select(end, f.add(image, i64(1)), image), f.select(end, i64(0), y), x]

        f.loop(i64(0), count, i64(1), [image, y, x], next_one)

    def _find_inner(self, at: V) -> None:
        """Store whether all windows of the block that begins with a pixel lie inside of the image."""
        f, size = self.f, self.size

        def with_pixel(k: V, so_far: list[V]) -> list[V]:
            window, inner = self._window(f.add(at, k)), so_far[0]
            for number, (axis, side) in enumerate((("y", "h"), ("x", "w"))):
                first, last = self.reach(word(f, window, number), axis)
                inside = f.bin("and", f.cmp("icmp sge", first, i64(0)), f.cmp("icmp slt", last, size[side]))
                inner = f.bin("and", inner, f.conv("zext", inside, "i64"))
            return [inner]

        (inner,) = f.loop(i64(0), i64(self.rows), i64(1), [i64(1)], with_pixel)
        f.raw(f"store {inner}, {f.gep('i64', self._window(at), i64(INNER))}")

    def _window(self, pixel: V) -> V:
        """Return where the words of a pixel are."""
        return self.f.gep("i64", self.windows, self.f.mul(pixel, i64(self.words)))

    def reach(self, at: V, axis: str) -> tuple[V, V]:
        """Return the first and the last line or column of the image in a window that begins with `at`."""
        f, size = self.f, self.size
        return at, f.add(at, f.mul(f.bin("sub", size[f"k{axis}"], i64(1)), size[f"dilation_{axis}"]))

    def window_of(self, image: V, y: V, x: V) -> tuple[V, ...]:
        """Return the words that describe the window of a pixel."""
        f, size = self.f, self.size
        top = f.bin("sub", f.mul(y, size["stride_y"]), size["pad_y"])
        left = f.bin("sub", f.mul(x, size["stride_x"]), size["pad_x"])
        return top, left, self.where(image, top, left)

    def where(self, image: V, y: V, x: V) -> V:
        """Return where a pixel of the image is in `x`."""
        f, size = self.f, self.size
        return f.add(f.mul(image, size["step_n"]), f.add(f.mul(y, size["step_y"]), f.mul(x, size["step_x"])))

    def offset(self, tap: V, axis: str) -> V:
        """Return how far a tap is from the beginning of a window."""
        return self.f.mul(tap, self.size[f"dilation_{axis}"])

    def _pixels_of_part(self, row: V, sums: V, c: V) -> None:
        f = self.f
        pointers = [f.gep("float", self.x, f.mul(f.add(row, i64(r)), self.size["step_x"])) for r in range(self.rows)]
        end = least(f, f.add(c, i64(PART)), self.size["c"])
        self._add(sums, self._run(pointers, i64(0), c, end, self._zeros()), c)

    def _windows_of_part(self, r: V, sums: V, y: V, x: V, c: V) -> None:
        f, size = self.f, self.size
        rows = self.first_row(y), least(f, f.add(y, self.tall), size["ky"])

        def inner() -> list[V]:
            return f.loop(*rows, i64(1), self._zeros(), lambda line, so_far: self._runs_of_row(r, line, x, c, so_far))

        def checked() -> list[V]:
            return f.loop(*rows, i64(1), self._zeros(), lambda line, so_far: self._taps_of_row(r, line, x, c, so_far))

        flag = f.cmp("icmp ne", word(f, self._window(r), INNER), i64(0))
        before = f.bin("or", f.bin("sub", rows[0], self.first_row(i64(0))), f.bin("or", x, c))
        made = f.choose(flag, inner, checked)
        self._add(sums, made, before)

    def _runs_of_row(self, r: V, y: V, x: V, c: V, so_far: list[V]) -> list[V]:
        """Add the products of taps from one on of a row of the window that lies inside of the image, in one run if it is dense."""
        f, size = self.f, self.size
        wheres = [word(f, self._window(f.add(r, i64(k))), 2) for k in range(self.rows)]
        down = f.mul(self.offset(y, "y"), size["step_y"])
        pointers = [f.gep("float", self.x, f.add(at, down)) for at in wheres]
        end = least(f, f.add(x, self.span), size["kx"])

        def taps(t: V, so_far: list[V]) -> list[V]:
            many = f.select(self.dense, f.bin("sub", end, t), i64(1))
            last = least(f, f.mul(many, size["c"]), f.add(c, self.longest))
            from_here = f.mul(self.offset(t, "x"), size["step_x"])
            return self._run(pointers, self._bytes(f.mul(f.add(f.mul(y, size["kx"]), t), size["c"])), c, last, so_far, from_here)

        return f.loop(self.first_tap(x), end, f.select(self.dense, self.span, i64(1)), so_far, taps)

    def _taps_of_row(self, r: V, y: V, x: V, c: V, so_far: list[V]) -> list[V]:
        """The same where taps may be outside: these read zeros."""
        f, size = self.f, self.size
        down = self.offset(y, "y")
        tops, lefts, wheres = ([word(f, self._window(f.add(r, i64(k))), at) for k in range(self.rows)] for at in range(3))
        inside = [f.cmp("icmp ult", f.add(top, down), size["h"]) for top in tops]
        starts = [f.add(at, f.mul(down, size["step_y"])) for at in wheres]

        def tap(t: V, so_far: list[V]) -> list[V]:
            off = self.offset(t, "x")
            pointers = []
            for first, there, at in zip(lefts, inside, starts, strict=True):
                within = f.bin("and", there, f.cmp("icmp ult", f.add(first, off), size["w"]))
                p = f.gep("float", self.x, f.add(at, f.mul(off, size["step_x"])))
                pointers.append(f.select(within, p, self.base["zero"]))
            done = self._bytes(f.mul(f.add(f.mul(y, size["kx"]), t), size["c"]))
            return self._run(pointers, done, c, least(f, f.add(c, i64(PART)), size["c"]), so_far)

        return f.loop(self.first_tap(x), least(f, f.add(x, self.span), size["kx"]), i64(1), so_far, tap)

    def first_tap(self, x: V) -> V:
        """Return the first tap of a part that begins with `x`."""
        return x

    def first_row(self, y: V) -> V:
        """Return the first row of the window in a part that begins with `y`."""
        return y

    def _zeros(self) -> list[V]:
        return [V("zeroinitializer", "float", self.lanes)] * (self.rows * self.columns // self.lanes)

    def _bytes(self, products: V) -> V:
        """Return the bytes of a panel for so many products."""
        return self.f.mul(products, i64(4 * self.columns))

    def _run(self, pointers: list[V], done: V, first: V, end: V, sums: list[V], ahead: V = HERE) -> list[V]:
        """Add the products of elements from one on, which lie `ahead` of the pointers, and fetch as much of the next panel. `done`:
        bytes of a panel before these."""
        f, vectors = self.f, self.columns // self.lanes
        weights, following = (f.gep("i8", p, done) for p in (self.here, self.there))

        def step(c: V, sums: list[V]) -> list[V]:
            w = f.mul(c, i64(self.columns))
            self.fetch(f.gep("i8", following, self._bytes(c)), 1)
            ws = [load(f, "float", f.gep("float", weights, f.add(w, i64(v * self.lanes))), self.lanes, 32) for v in range(vectors)]
            return with_products(f, sums, pointers, f.add(c, ahead), ws)

        return f.loop(first, end, i64(1), sums, step)

    def _add(self, to: V, sums: list[V], before: V) -> None:
        """Add sums to those in memory, or write them if nothing came `before`."""
        add_to(self.f, [self.f.gep("float", to, i64(i * self.lanes)) for i in range(len(sums))], sums, before)


class Rows(Pixels):
    """The rows of a linear as the pixels of an image."""

    def __init__(self, module: Module, a: VectorLinear, name: str) -> None:
        super().__init__(module, a, name)
        self.size |= {"c": self.size["k"], "step_x": self.size["step"]}

    def count(self, f: Fn, size: Mapping[str, V]) -> V:
        return ceil_div(f, size["n"], i64(self.columns))

    def width(self, f: Fn, size: Mapping[str, V]) -> V:
        return Panels.width(self, f, size)

    def place(self, panel: V) -> tuple[V, V, V]:
        return Panels.place(self, panel)

    def image(self, panel: V) -> V:
        return self.base["x"]
