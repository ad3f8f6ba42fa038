"""A depthwise convolution of channels-last images with the activations around it: `out = after(conv(before(x), weight) + bias)`.

A work item is a row of the result in CHANNELS channels. The rows of `x` that it reads lie in a ring, widened to fp32, with `before`
applied and zeros around the image, so that each element is prepared once and no border is tested. Successive items of a thread
add only the rows that are new. A vector is one pixel's channels; the products of several pixels share loads of weights and of `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeAlias

from fusewright_cpu.emit.entry import share, start
from fusewright_cpu.emit.math import ACTIVATIONS
from fusewright_cpu.emit.pointwise import cast, memory_type, to_bf16s
from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.by_hand import DEPTHWISE_CHANNELS as CHANNELS
from fusewright_cpu.kernels.by_hand import Depthwise
from fusewright_cpu.kernels.parts import ceil_div, each, least, load, store, word
from fusewright_cpu.policy import LOOPS

STAGED = 4
"""Pixels per step of the loop that prepares rows."""
LARGE = 2 << 20
"""Bytes of an image from which on its rows are read in all channels at a time: caches fetch the channels of other work items as
well, and have lost them again by then."""
MOST_ROWS = 1 << 20
"""The most bytes of all rows in the ring."""
UNROLLED = 25
"""The most taps for which the code of a pixel has no loop over the rows of its window."""
LINE = 64
"""Bytes of a cache line."""

Line: TypeAlias = tuple[V, Sequence[V]]


def emit_depthwise(module: Module, d: Depthwise, name: str, parallel: bool) -> None:
    """Add the function `name`, `int64 name(int64 *block, int64 threads)`, the same form as that of loop kernels (see `entry`)."""
    _Body(module, d, f"{name}.body").write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    size = _sizes(f, d, block)
    items = f.mul(f.mul(size["n"], ceil_div(f, size["c"], i64(CHANNELS))), size["oh"])
    points = f.mul(f.mul(size["n"], size["c"]), f.mul(size["oh"], size["ow"]))
    work = f.mul(points, i64(d.kernel[0] * d.kernel[1] + 2 * d.stride[0] * d.stride[1]))
    team = least(f, least(f, items, threads), f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1)))
    start(f, name, block, items, f.alloca("i64", 1, 8), team if parallel else None)
    f.raw("ret i64 0")
    f.finish()


def _sizes(f: Fn, d: Depthwise, block: V) -> dict[str, V]:
    return {s: word(f, block, len(d.buffers) + at) for at, s in enumerate(d.symbols)}


class _Body:
    """`void body(ptr block, i64 lo, i64 hi, ptr)`: work items lo to hi, rows of a block of channels after each other."""

    def __init__(self, module: Module, d: Depthwise, name: str) -> None:
        self.d = d
        self.f = f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        self.w = module.target.vector_bytes // 4
        self.element = memory_type(d.dtype)
        block = f.args[0]
        self.base = {b.name: f.conv("inttoptr", word(f, block, at), "ptr") for at, b in enumerate(d.buffers)}
        self.size = _sizes(f, d, block)
        first = len(d.buffers) + len(d.symbols)
        words = [f.conv("bitcast", word(f, block, first + at), "double") for at in range(len(d.scalars))]
        limits = dict(zip((s.name for s in d.scalars), (f.conv("fptrunc", x, "float") for x in words), strict=True))
        self.limits = {side: [v for name, v in limits.items() if name.startswith(side)] for side in ("before", "after")}

    def write(self) -> None:
        f, d, size = self.f, self.d, self.size
        self.blocks = ceil_div(f, size["c"], i64(CHANNELS))
        self.width = f.add(f.mul(f.bin("sub", size["ow"], i64(1)), i64(d.stride[1])), i64(d.kernel[1]))
        """Pixels of a row in the ring, for each vector of channels."""
        self.row = f.mul(self.width, i64(CHANNELS))
        self.rows = f.mul(self.row, i64(d.kernel[0]))
        """Elements of the ring, for each block of channels."""
        bytes_of_x = f.mul(f.mul(size["c"], i64(4 if d.dtype == "f32" else 2)), f.mul(size["h"], size["w"]))
        large = f.cmp("icmp sgt", bytes_of_x, i64(LARGE))
        fits = f.cmp("icmp sle", f.mul(self.rows, f.mul(self.blocks, i64(4))), i64(MOST_ROWS))
        self.together = f.select(f.bin("and", large, fits), self.blocks, i64(1))
        """Blocks of channels whose work items for a row follow each other."""
        f.module.declare("malloc", "ptr", ["i64"], external=True)
        f.module.declare("free", "void", ["ptr"], external=True)
        bytes_ = f.add(f.mul(f.mul(self.rows, i64(4)), self.together), i64(LINE))
        memory = f.let("ptr", 1, f"call ptr @malloc({bytes_})")
        line = f.bin("and", f.add(f.conv("ptrtoint", memory, "i64"), i64(LINE - 1)), i64(-LINE))
        self.memory = f.conv("inttoptr", line, "ptr")
        each(f, f.args[1], f.args[2], 1, self._item)
        f.raw(f"call void @free({memory})")
        f.raw("ret void")
        f.finish()

    def _item(self, i: V) -> None:
        """Compute a row. What the row above reads too is in the ring if this thread computed that. Rows are counted from the first
        one of the padded image."""
        f, d, size = self.f, self.d, self.size
        part, within = f.bin("sdiv", i, self.together), f.bin("srem", i, self.together)
        y, first = f.bin("srem", part, size["oh"]), f.bin("sdiv", part, size["oh"])
        block = f.add(f.mul(first, self.together), within)
        image, channel = f.bin("sdiv", block, self.blocks), f.mul(f.bin("srem", block, self.blocks), i64(CHANNELS))
        top = f.mul(y, i64(d.stride[0]))
        end = f.add(top, i64(d.kernel[0]))
        above = f.bin("and", f.cmp("icmp sgt", y, i64(0)), f.cmp("icmp sge", f.bin("sub", i, self.together), f.args[1]))
        new = f.select(above, f.add(top, i64(max(0, d.kernel[0] - d.stride[0]))), top)
        self.ring = f.gep("float", self.memory, f.mul(within, self.rows))
        there = least(f, f.bin("sub", size["c"], channel), i64(CHANNELS))
        source = f.add(f.mul(image, size["step_n"]), channel)
        target = f.add(f.mul(f.mul(f.add(f.mul(image, size["oh"]), y), size["ow"]), size["c"]), channel)
        each(f, new, end, 1, lambda r: self._vectors(there, lambda v, left: self._stage(r, source, v, left)))
        self._vectors(there, lambda v, left: self._products(top, channel, target, v, left))

    def _vectors(self, there: V, body: Callable[[V, V | None], None]) -> None:
        """Emit `body(v, None)` for each whole vector of channels from v on, and `body(v, left)` for the rest."""
        f = self.f
        whole = f.bin("and", there, i64(-self.w)) if self.d.part else there
        each(f, i64(0), whole, self.w, lambda v: body(v, None))
        if not self.d.part:
            return

        def rest() -> list[V]:
            body(whole, f.cmp("icmp slt", f.iota(self.w), f.bin("sub", there, whole)))
            return []

        f.when(f.cmp("icmp slt", whole, there), rest)

    def _pixels(self, r: V, v: V) -> V:
        """Return the address of a row's vectors in the ring."""
        f = self.f
        slot = f.mul(f.bin("srem", r, i64(self.d.kernel[0])), self.row)
        return f.gep("float", self.ring, f.add(slot, f.mul(v, self.width)))

    def _stage(self, r: V, source: V, v: V, left: V | None) -> None:
        """Put one vector of every pixel of a row into the ring."""
        f, size = self.f, self.size
        y = f.bin("sub", r, size["pad_y"])
        inside = f.bin("and", f.cmp("icmp sge", y, i64(0)), f.cmp("icmp slt", y, size["h"]))
        begin = f.select(inside, least(f, size["pad_x"], self.width), self.width)
        end = least(f, f.add(begin, size["w"]), self.width)
        to = self._pixels(r, v)
        x = f.add(f.add(source, f.mul(y, size["step_y"])), v)
        zero = V("zeroinitializer", "float", self.w)

        def put(p: V, value: V) -> None:
            store(f, value, f.gep("float", to, f.mul(p, i64(self.w))), 4 * self.w)

        def pixels(first: V, count: int) -> None:
            for k in range(count):
                p = f.add(first, i64(k))
                at = f.add(x, f.mul(f.bin("sub", p, begin), size["step_x"]))
                loaded = self._read(at, left)
                put(p, ACTIVATIONS[self.d.before](f, loaded, *self.limits["before"]))

        each(f, i64(0), begin, 1, lambda p: put(p, zero))
        most_of_them = f.add(begin, f.bin("and", f.bin("sub", end, begin), i64(-STAGED)))
        each(f, begin, most_of_them, STAGED, lambda p: pixels(p, STAGED))
        each(f, most_of_them, end, 1, lambda p: pixels(p, 1))
        each(f, end, self.width, 1, lambda p: put(p, zero))

    def _read(self, at: V, left: V | None) -> V:
        f = self.f
        x = load(f, self.element, f.gep(self.element, self.base["x"], at), self.w, 2, left)
        return cast(f, x, self.d.dtype, "f32")

    def _products(self, top: V, channel: V, target: V, v: V, left: V | None) -> None:
        """Compute one vector of every pixel of a row."""
        f, (ky, kx) = self.f, self.d.kernel
        padded, at = f.mul(self.blocks, i64(CHANNELS)), f.add(channel, v)

        def vector(name: str, row: V) -> V:
            return load(f, "float", f.gep("float", self.base[name], f.add(f.mul(row, padded), at)), self.w)

        def line(k: V) -> Line:
            """Return a row of pixels and the weights for it."""
            weights = [vector("weight", f.add(f.mul(k, i64(kx)), i64(j))) for j in range(kx)]
            return self._pixels(f.add(top, k), v), weights

        bias = vector("bias", i64(0))
        lines = [line(i64(k)) for k in range(ky)] if ky * kx <= UNROLLED else None
        to, ow = f.add(target, v), self.size["ow"]

        def sums(count: int, first: V) -> list[V]:
            if lines is not None:
                return reduce(lambda sums, line: self._added(sums, line, first), lines, [bias] * count)
            return f.loop(i64(0), i64(ky), i64(1), [bias] * count, lambda k, sums: self._added(sums, line(k), first))

        main = f.bin("sub", ow, f.bin("srem", ow, i64(self.d.columns)))
        for begin, end, count in ((i64(0), main, self.d.columns), (main, ow, 1)):
            each(f, begin, end, count, lambda first, count=count: self._finish(sums(count, first), to, left, first))  # type: ignore[misc]

    def _added(self, sums: Sequence[V], line: Line, first: V) -> list[V]:
        """Add to the sums of consecutive pixels the products of one row of the window."""
        f, (row, weights), step, made = self.f, line, self.d.stride[1], list(sums)
        for j in range((len(sums) - 1) * step + len(weights)):
            reads = [(o, j - o * step) for o in range(len(sums)) if 0 <= j - o * step < len(weights)]
            if reads:
                at = f.mul(f.add(f.mul(first, i64(step)), i64(j)), i64(self.w))
                x = load(f, "float", f.gep("float", row, at), self.w, 4 * self.w)
                for o, k in reads:
                    made[o] = f.fma(x, weights[k], made[o])
        return made

    def _finish(self, sums: Sequence[V], to: V, left: V | None, first: V) -> None:
        """Store one vector of consecutive pixels."""
        f = self.f
        made = [ACTIVATIONS[self.d.after](f, total, *self.limits["after"]) for total in sums]
        for o, x in enumerate(to_bf16s(f, made) if self.d.dtype == "bf16" else made):
            at = f.add(to, f.mul(f.add(first, i64(o)), self.size["c"]))
            store(f, x, f.gep(self.element, self.base["out"], at), 2, left)
