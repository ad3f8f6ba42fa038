"""A convolution of images of few channels, as a network's first: `out = after(conv(x, weight) (+ bias) (+ other))`.

A work item is a line of the result, for which the lines of `x` that it reads are copied, channel by channel, between zeros, so that
no border is tested and images in planes need no other layout. Sums are fp32, as few as need no parts. A block is `rows` pixels by
`columns` channels, whose sums, weights and one element of x are in registers. The loops are those of `panels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusewright_cpu.emit.pointwise import cast
from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.by_hand import FirstConv
from fusewright_cpu.kernels.panels import Panels, emit_panels
from fusewright_cpu.kernels.parts import each, least, load, store, with_products

LINE = 64
"""Bytes of a cache line."""


def emit_first_conv(module: Module, a: FirstConv, name: str, parallel: bool) -> None:
    """Add the function `name` (see `emit_panels`)."""
    emit_panels(module, a, name, parallel, _Lines(module, a, f"{name}.body"))


class _Lines(Panels):
    """Lines of the result as work items, with all panels."""

    a: FirstConv

    def __init__(self, module: Module, a: FirstConv, name: str) -> None:
        self.dtype, self.rows, self.columns, self.held, self.chunk = a.dtype, a.rows, a.columns, a.rows, a.rows
        self.products_per_unit = self.lanes = module.target.vector_bytes // 4
        super().__init__(module, a, name)

    def of_item(self, f: Fn, size: Mapping[str, V], threads: V) -> tuple[V, V]:
        return size["ow"], self.count(f, size)

    def panel_bytes(self) -> V:
        return self.f.mul(self.size["k"], i64(4 * self.columns))

    def run(self, work: Callable[[], None]) -> None:
        f, a, size = self.f, self.a, self.size
        self.pixels = f.add(f.mul(f.bin("sub", size["ow"], i64(1)), i64(a.stride[1])), i64(a.kernel[1]))
        """Pixels of a copied line."""
        f.module.declare("malloc", "ptr", ["i64"], external=True)
        f.module.declare("free", "void", ["ptr"], external=True)
        lines = f.mul(size["c"], i64(a.kernel[0]))
        # whole vectors are written, and the last one may begin anywhere in the last line
        bytes_ = f.add(f.mul(f.mul(lines, self.pixels), i64(4)), i64(2 * LINE))
        memory = f.let("ptr", 1, f"call ptr @malloc({bytes_})")
        start = f.bin("and", f.add(f.conv("ptrtoint", memory, "i64"), i64(LINE - 1)), i64(-LINE))
        self.lines = f.conv("inttoptr", start, "ptr")
        work()
        f.raw(f"call void @free({memory})")

    def blocks(self, row: V, count: V, panel: V, then: V) -> None:
        f, size = self.f, self.size
        line = f.bin("udiv", row, size["ow"])
        self._copy_lines(f.bin("udiv", line, size["oh"]), f.bin("urem", line, size["oh"]))
        last = f.bin("sub", size["ow"], i64(self.rows))

        def block(at: V) -> None:
            pixel = least(f, at, last)  # the last block overlaps the one before it
            each(f, i64(0), self.panels, 1, lambda p: self._block(f.add(row, pixel), pixel, p))

        each(f, i64(0), size["ow"], self.rows, block)

    def _copy_lines(self, image: V, y: V) -> None:
        """Copy what a line of the result reads."""
        f, a, size = self.f, self.a, self.size
        top = f.bin("sub", f.mul(y, i64(a.stride[0])), size["pad_y"])

        def of_channel(c: V) -> None:
            start = f.add(f.mul(image, size["step_n"]), f.mul(c, size["step_c"]))

            def line(k: V) -> None:
                to = f.gep("float", self.lines, f.mul(f.add(f.mul(c, i64(a.kernel[0])), k), self.pixels))
                self._copy_line(to, f.add(top, k), start)

            each(f, i64(0), i64(a.kernel[0]), 1, line)

        each(f, i64(0), size["c"], 1, of_channel)

    def _copy_line(self, to: V, y: V, start: V) -> None:
        f, size = self.f, self.size
        inside = f.bin("and", f.cmp("icmp sge", y, i64(0)), f.cmp("icmp slt", y, size["h"]))
        begin = f.select(inside, least(f, size["pad_x"], self.pixels), self.pixels)
        many = least(f, size["w"], f.bin("sub", self.pixels, begin))
        end = f.add(begin, many)
        x = f.gep(self.element, self.base["x"], f.add(start, f.mul(y, size["step_y"])))
        to_x = f.gep("float", to, begin)
        zero, w = V("0.0", "float", lit=True), self.w

        def put(x: V, at: V, there: V | None = None) -> None:
            store(f, cast(f, x, self.dtype, "f32"), f.gep("float", to_x, at), 4, there)

        def dense() -> list[V]:
            whole = f.bin("and", many, i64(-w))
            each(f, i64(0), whole, w, lambda at: put(load(f, self.element, f.gep(self.element, x, at), w, 2), at))
            each(f, whole, many, 1, lambda at: put(load(f, self.element, f.gep(self.element, x, at), 1, 2), at))
            return []

        def apart() -> list[V]:
            places = size["step_x"]
            each(f, i64(0), many, 1, lambda at: put(load(f, self.element, f.gep(self.element, x, f.mul(at, places)), 1, 2), at))
            return []

        each(f, i64(0), begin, 1, lambda at: store(f, zero, f.gep("float", to, at)))
        f.choose(f.cmp("icmp eq", size["step_x"], i64(1)), dense, apart)
        each(f, end, self.pixels, 1, lambda at: store(f, zero, f.gep("float", to, at)))

    def _block(self, row: V, pixel: V, panel: V) -> None:
        f, a, size = self.f, self.a, self.size
        vectors, weights = self.columns // self.lanes, self.weights(panel)
        x = f.gep("float", self.lines, f.mul(pixel, i64(a.stride[1])))
        xs = [f.gep("float", x, i64(r * a.stride[1])) for r in range(self.rows)]

        def line(number: V, sums: list[V]) -> list[V]:
            at_line, first = f.mul(number, self.pixels), f.mul(number, i64(a.kernel[1]))

            def tap(t: V, sums: list[V]) -> list[V]:
                w = f.gep("float", weights, f.mul(f.add(first, t), i64(self.columns)))
                ws = [load(f, "float", f.gep("float", w, i64(v * self.lanes)), self.lanes, 32) for v in range(vectors)]
                return with_products(f, sums, xs, f.add(at_line, t), ws)

            return f.loop(i64(0), i64(a.kernel[1]), i64(1), sums, tap)

        zeros = [V("zeroinitializer", "float", self.lanes)] * (self.rows * vectors)
        sums = f.loop(i64(0), f.mul(size["c"], i64(a.kernel[0])), i64(1), zeros, line)
        self.end_block(row, panel, sums)
