"""Emit the loops of one kernel: a function `void body(ptr args, i64 begin, i64 end, ptr error)` over a range of
work items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fusewright.toolkit.ir.checks import ZERO_DIVISION
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node, Stage, across
from fusewright.toolkit.ir.optable import OPS
from fusewright_cpu.emit.interleave import members
from fusewright_cpu.emit.memory import Arguments, Lanes
from fusewright_cpu.emit.pointwise import IntegerDivision, cast, emit_op, literal, memory_type
from fusewright_cpu.emit.rows import RowLoops
from fusewright_cpu.emit.segments import segments
from fusewright_cpu.emit.strategy import Strategy, pointwise_units, tile_units
from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.emit.tiles import across_store, transpose

STACK_BYTES = 65536
"""The largest row buffer on the stack; longer ones and those of symbolic size are on the heap."""


class Body:
    """Emits the body function of a kernel."""

    def __init__(self, module: Module, kernel: Kernel, how: Strategy, name: str) -> None:
        self.kernel, self.how, self.target = kernel, how, module.target
        self.f = Fn(module, name, "void", ["ptr", "i64", "i64", "ptr"])
        block, self.begin, self.end, error = self.f.args
        self.args = Arguments(self.f, kernel, block)
        self.lanes = Lanes(self.f, self.args, how.v, error)
        self.types = {n.id: n.dtype for n in kernel.nodes()}
        self.axes = kernel.axes_of()
        self.uniform: dict[int, V] = {}
        self.units: list[dict[int, V]] = [{}]
        self.keeps: dict[int, V] = {}
        self.heap: list[V] = []
        self.members = {} if how.row or how.lanes == 1 else members(kernel, how.v)
        self.zips = {} if how.row or how.lanes == 1 else members(kernel, how.v, "store")
        self.waiting: dict[tuple[int, Index, int], dict[int, V]] = {}
        """Stores of an interleaved set and a unit whose other members are not yet there: place -> value."""
        self.unzipped: dict[tuple[int, Index, int], list[V]] = {}
        self.transposed: dict[int, list[V]] = {}
        self.known: dict[int, bool] = {}
        self.span: Extent | None = kernel.sizes[how.v] if how.v is not None else None
        """The length of the vectorised axis that is being covered; None: only known at run time."""
        self.division = IntegerDivision(lambda bad: self.lanes.report(bad, ZERO_DIVISION))

    def write(self) -> None:
        """Emit the whole function."""
        self._allocate_rows()
        self._items()
        for p in self.heap:
            self.f.raw(f"call void @free({p})")
        self.f.raw("ret void")
        self.f.finish()

    def size(self, axis: int) -> V:
        return self.args.extent(self.kernel.sizes[axis])

    @property
    def rows(self) -> list[int]:
        return list(range(len(self.kernel.p), len(self.kernel.sizes)))

    def width(self) -> int:
        """Return the number of vectors that one tile of column mode holds."""
        if self.how.row or self.how.v is None:
            return 1
        n = self.kernel.sizes[self.how.v]
        units = tile_units(self.kernel) if self.kernel.r else self._pointwise_units()
        while isinstance(n, int) and units > 1 and units * self.how.lanes > n:
            units //= 2
        return units

    def _pointwise_units(self) -> int:
        plain = self.how.lanes > 1 and self.how.tile is None and not self.how.serial
        return pointwise_units(self.kernel, self.target) if plain else 1

    # row buffers

    def _allocate_rows(self) -> None:
        kept = [n for n in self.kernel.nodes() if n.keep]
        if not kept:
            return
        count: Extent = 1
        for s in self.kernel.r:
            count = count * s
        for n in kept:
            per = self.width() * self.how.lanes if not self.how.row else 1
            elements = count * per + self.how.lanes
            t = memory_type(n.dtype)
            size = 8 if t in ("i64", "double") else 1 if t == "i8" else 2 if t in ("i16", "half") else 4
            if isinstance(elements, int) and elements * size <= STACK_BYTES:
                self.keeps[n.id] = self.f.alloca(t, elements)
                continue
            self.f.module.declare("malloc", "ptr", ["i64"], external=True)
            self.f.module.declare("free", "void", ["ptr"], external=True)
            total = self.f.mul(self.args.extent(elements), i64(size))
            self.keeps[n.id] = self.f.let("ptr", 1, f"call ptr @malloc({total})")
            self.heap.append(self.keeps[n.id])

    def _keep_pointer(self, n: int, u: int) -> V:
        """Return the address in the row buffer of the value at this point."""
        f, at = self.f, i64(0)
        for r in self.rows:
            at = f.add(f.mul(at, self.size(r)), self.lanes.axis[r])
        if self.how.row:
            at = f.add(at, i64(u * self.lanes.w)) if self.lanes.vectorised else at
        else:
            at = f.add(f.mul(at, i64(self.width() * self.how.lanes)), i64(u * self.how.lanes))
        return f.gep(memory_type(self.types[n]), self.keeps[n], at)

    def keep_store(self, n: Node, x: V, u: int) -> None:
        x = self.f.conv("zext", x, "i8") if n.dtype == "bool" else x
        x = self.f.splat(x, self.lanes.w) if self.lanes.vectorised else x
        self.f.raw(f"store {x}, {self._keep_pointer(n.id, u)}, align {1 if x.t == 'i8' else 2}")

    def _keep_load(self, n: int, u: int) -> V:
        t, w = memory_type(self.types[n]), self.lanes.w if self.lanes.vectorised else 1
        ty = t if w == 1 else f"<{w} x {t}>"
        x = self.f.let(t, w, f"load {ty}, {self._keep_pointer(n, u)}, align {1 if t == 'i8' else 2}")
        return self.f.conv("trunc", x, "i1") if self.types[n] == "bool" else x

    # work items

    def item_axes(self) -> list[tuple[int, V]]:
        """Return (axis, count) of the axes that work items enumerate, outermost first; the vectorised one counts
        blocks."""
        out = [(a, self.size(a)) for a in self.how.parallel]
        out += [(a, self.blocks(self.f, self.args, a)) for a in self.blocked()]
        return out

    def blocked(self) -> list[int]:
        """Return the axes that are cut into blocks."""
        return [a for a in (self.how.tile, self.how.v) if a is not None and self.how.block]

    def blocks(self, f: Fn, args: Arguments, axis: int) -> V:
        """Return the number of blocks of an axis."""
        size = self.kernel.sizes[axis]
        if isinstance(size, int):
            return i64(-(-size // self.how.block))
        up = f.add(args.extent(size), i64(self.how.block - 1))
        return f.bin("sdiv", up, i64(self.how.block))

    def _items(self) -> None:
        """Emit the loop over work items: the first item is found by division, the next ones by counting up."""
        f, axes = self.f, self.item_axes()
        rest, start = self.begin, list[V]()
        for _, n in reversed(axes[1:]):
            # an empty axis means that there are no items, but the division is executed all the same
            n = f.select(f.cmp("icmp slt", n, i64(1)), i64(1), n)
            start.append(f.bin("srem", rest, n))
            rest = f.bin("sdiv", rest, n)
        start = [rest, *reversed(start)] if axes else []

        def body(_item: V, at: list[V]) -> list[V]:
            for (a, _), x in zip(axes, at, strict=True):
                self.lanes.axis[a] = x
            self._item()
            after, carry = list[V](), i64(1)
            for (_, n), x in reversed(list(zip(axes, at, strict=True))[1:]):
                x = f.bin("add", x, carry)
                full = f.cmp("icmp eq", x, n)
                after.append(f.select(full, i64(0), x))
                carry = f.conv("zext", full, "i64")
            return [f.bin("add", at[0], carry), *reversed(after)] if at else []

        f.loop(self.begin, self.end, i64(1), start, body)

    def _item(self) -> None:
        """Emit one work item: the serial axes in order, then the rows or the columns."""
        block = self.lanes.axis.get(self.how.v) if self.how.block and self.how.v is not None else None
        if self.how.tile is not None and self.how.v is not None:
            self._tiles(self.how.v, self.how.tile)
            return

        def inner(axes: Sequence[int]) -> None:
            if axes:
                self._count(axes[0], lambda: inner(axes[1:]))
            elif self.how.row or self.how.v is None:
                self._point()
            else:
                self._columns(block)

        inner(self.how.serial)

    def _count(self, axis: int, body: Callable[[], None]) -> None:
        def step(i: V, _: list[V]) -> list[V]:
            self.lanes.axis[axis] = i
            body()
            return []

        self.f.loop(i64(0), self.size(axis), i64(1), [], step)

    def _point(self) -> None:
        """Emit all stages for one point of P, with values of P as scalars."""
        self.uniform = {}
        self.scalar_code()
        for stage in self.kernel.stages:
            if stage.over == "P":
                self.nodes(stage.nodes, 1)
            else:
                self._row_stage(stage)

    def scalar_code(self) -> None:
        self.lanes.w, self.lanes.vectorised, self.lanes.mask, self.units = 1, False, None, [{}]

    # column mode

    def _columns(self, block: V | None) -> None:
        """Emit tiles of columns from the block's first to its last: full ones, then single vectors, then the
        rest."""
        v = self.how.v
        if v is None:
            raise ValueError("column mode without a vectorised axis")
        lo, hi = (i64(0), self.size(v)) if block is None else self._range(v, block)
        hoisted = self._hoisted(v)
        common, whole = dict(self.uniform), self.span
        for part in segments(self.kernel, v):
            self.known, self.span = part.known, part.stop - part.start if block is None else None
            self._column_spans(v, self._least(hi, part.start, lo), self._least(hi, part.stop, lo), hoisted, common)
        if not self.known:
            self._column_spans(v, lo, hi, hoisted, common)
        self.known, self.span = {}, whole

    def _least(self, hi: V, at: int, lo: V) -> V:
        """Return `at`, clamped to lo..hi."""
        f, x = self.f, i64(at)
        if lo.lit and hi.lit:
            return x
        x = f.select(f.cmp("icmp slt", x, hi), x, hi)
        return f.select(f.cmp("icmp sgt", x, lo), x, lo)

    def _column_spans(self, v: int, lo: V, hi: V, hoisted: set[int], common: dict[int, V]) -> None:
        """Emit the columns [lo, hi) of `v`."""
        f = self.f

        def tiles(lo: V, hi: V, units: int, lanes: int, masked: bool) -> V:
            """Emit whole tiles of `units * lanes` columns and return where they end (the last one is cut short when
            `masked`)."""
            step = units * lanes
            stop = hi if masked or self._divides(step) else self._whole(lo, hi, step)

            def body(i: V, _: list[V]) -> list[V]:
                self.lanes.axis[v], self.lanes.w, self.lanes.vectorised = i, lanes, True
                self.lanes.mask = self.tail_mask(i, hi, lanes) if masked else None
                self.uniform = dict(common)
                self._tile(units, hoisted)
                return []

            f.loop(lo, stop, i64(step), [], body)
            return stop

        self._spans(lo, hi, self.width(), self.how.lanes, tiles)

    def _range(self, axis: int, block: V) -> tuple[V, V]:
        """Return where a block of an axis begins and ends."""
        f, n = self.f, self.size(axis)
        lo = f.mul(block, i64(self.how.block))
        top = f.add(lo, i64(self.how.block))
        exact = n.lit and int(n.name) % self.how.block == 0
        return lo, top if exact else f.select(f.cmp("icmp slt", top, n), top, n)

    def _hoisted(self, *varying: int) -> set[int]:
        """Emit the nodes of the first stage that depend on none of these axes; return their ids."""
        self.uniform = {}
        self.scalar_code()
        first = self.kernel.stages[0] if self.kernel.stages else None
        if first is None or first.over != "P":
            return set()
        nodes = [n for n in first.nodes if not self.axes[n.id] & set(varying)]
        self.nodes(nodes, 1)
        return {n.id for n in nodes}

    def _divides(self, step: int, axis: int | None = None) -> bool:
        """Return whether an axis (the vectorised one) and its block are known to be multiples of `step`."""
        n = self.span if axis is None else self.kernel.sizes[axis]
        return isinstance(n, int) and n % step == 0 and self.how.block % step == 0

    def _spans(self, lo: V, hi: V, units: int, lanes: int, span: Callable[[V, V, int, int, bool], V]) -> None:
        """Cover [lo, hi) with full steps of `units` vectors, then (for a known size) of half as many and so on, then
        single vectors, then a masked or scalar tail."""
        at = span(lo, hi, units, lanes, False)
        if self._divides(units * lanes):
            return
        size = self.span
        while isinstance(size, int) and units > 2:
            units //= 2
            if size // lanes & units:
                at = span(at, hi, units, lanes, False)
                if self._divides(units * lanes):
                    return
        masks = self.target.masks or lanes == 1
        if masks and (units == 1 or not self.target.masks_by_lanes):
            span(at, hi, 1, lanes, lanes > 1 and not self._divides(lanes))
            return
        if units > 1:
            at = span(at, hi, 1, lanes, False)
        if not self._divides(lanes):
            span(at, hi, 1, lanes if masks else 1, masks)

    def _whole(self, lo: V, hi: V, step: int) -> V:
        """Return the greatest lo + k * step <= hi (lo itself when hi < lo)."""
        f = self.f
        return f.add(lo, f.bin("and", f.bin("sub", hi, lo), i64(-step)))

    def tail_mask(self, i: V, hi: V, lanes: int) -> V:
        f = self.f
        if self.target.arm:  # lanes as wide as those of the values, so that no mask needs narrowing
            t = f"i{max(8, min(64, self.target.vector_bytes * 8 // lanes))}"
            left = f.call("smin", "i64", [f.bin("sub", hi, i), i64(lanes)])
            return f.cmp("icmp ult", f.iota(lanes, t), f.conv("trunc", left, t))
        return f.cmp("icmp ult", f.iota(lanes), f.bin("sub", hi, i))

    def _tile(self, units: int, done: set[int]) -> None:
        self.unzipped = {}
        self.units = [{} for _ in range(units)]
        for stage in self.kernel.stages:
            if stage.over == "P":
                self.nodes([n for n in stage.nodes if n.id not in done], units)
            else:
                self._row_stage(stage)

    # tiles

    def _tiles(self, v: int, t: int) -> None:
        """Emit whole tiles of a block of `v` and `t`, then the rest of it, row by row."""
        (lo, hi), columns = self._range(t, self.lanes.axis[t]), self._range(v, self.lanes.axis[v])
        hoisted = self._hoisted(v, t)
        common = dict(self.uniform)
        parts = segments(self.kernel, t)
        for part in parts:
            self.known = part.known
            self._tiles_of_rows(v, t, (self._least(hi, part.start, lo), self._least(hi, part.stop, lo)), columns, hoisted, common)
        self.known = {}
        if not parts:
            self._tiles_of_rows(v, t, (lo, hi), columns, hoisted, common)

    def _tiles_of_rows(
        self, v: int, t: int, rows: tuple[V, V], columns: tuple[V, V], hoisted: set[int], common: dict[int, V]
    ) -> None:
        """Emit tiles of these points of `t`, and the rest of them."""
        f, w = self.f, self.how.lanes
        (t_lo, t_hi), (v_lo, v_hi) = rows, columns
        t_stop, v_stop = self._whole(t_lo, t_hi, w), self._whole(v_lo, v_hi, w)

        def across(i: V, _: list[V]) -> list[V]:
            self.lanes.axis[t] = i
            return f.loop(v_lo, v_stop, i64(w), [], tile)

        def tile(j: V, _: list[V]) -> list[V]:
            self.lanes.axis[v] = j
            self.lanes.w, self.lanes.vectorised, self.lanes.mask, self.lanes.units_along = w, True, None, t
            self.uniform, self.transposed = dict(common), {}
            self._tile(w, hoisted)
            self.lanes.units_along = v
            self.scalar_code()
            return []

        f.loop(t_lo, t_stop, i64(w), [], across)
        if not self.known and self._divides(w) and self._divides(w, t):
            return

        def rest(i: V, _: list[V]) -> list[V]:
            self.lanes.axis[t] = i
            self.uniform = dict(common)
            lo = f.select(f.cmp("icmp slt", i, t_stop), v_stop, v_lo)
            self._column_spans(v, lo, v_hi, hoisted, common)
            return []

        f.loop(t_lo, t_hi, i64(1), [], rest)

    # row stages

    def _row_stage(self, stage: Stage) -> None:
        """Emit loops over R: each node in the outermost loop where its operands are known, reductions and what row buffers
        hold in the innermost."""
        rows = self.rows
        last = len(rows) - 1
        depth = dict.fromkeys(self.keeps, last)
        for n in stage.nodes:
            own = [k for k, a in enumerate(rows) if a in self.axes[n.id]]
            held = n.keep or n.op in ("reduce", "scan")
            depth[n.id] = last if held else max([*own, *(depth.get(i, -1) for i in n.uses())], default=-1)
        self.nodes([n for n in stage.nodes if depth[n.id] < 0], len(self.units))
        RowLoops(self, stage, depth).run()

    # nodes

    def value(self, n: int, u: int) -> V:
        """Return an operand: of unit `u`, common to all units, or from the row buffer."""
        if n in self.units[u]:
            return self.units[u][n]
        if n in self.uniform:
            return self.uniform[n]
        x = self._keep_load(n, u)
        self.units[u][n] = x
        return x

    def varies(self, n: Node) -> bool:
        """Return whether the node has one value per lane here."""
        return self.lanes.vectorised and self.how.v in self.axes[n.id]

    def nodes(self, nodes: Iterable[Node], units: int) -> None:
        for n in nodes:
            if self.lanes.vectorised and (n.keep or {self.how.v, self.lanes.units_along} & self.axes[n.id]):
                for u in range(units):
                    self._node(n, u, varying=self.varies(n))
            else:
                self._node(n, None, varying=False)

    def _node(self, n: Node, unit: int | None, varying: bool) -> None:
        u = unit or 0
        values = {i: self.value(i, u) for i in n.uses()}
        if n.op == "store":
            self._store(n, values, u, varying)
            return
        x = self._compute(n, values, u, varying)
        if unit is None:
            self.uniform[n.id] = x
        else:
            self.units[u][n.id] = x
        if n.keep:
            self.keep_store(n, x, u)

    def _compute(self, n: Node, values: dict[int, V], u: int, varying: bool) -> V:
        f, args = self.f, [values[a] for a in n.args]
        if n.id in self.known:
            return literal(self.known[n.id], "bool")
        if n.op in OPS:
            dtype = self.types[n.args[-1]]
            return emit_op(f, n.op, dtype, args, self.division)
        match n.op:
            case "const":
                return literal(n.value if n.value is not None else 0, n.dtype)
            case "scalar":
                return self.args.scalars[int(n.value or 0)]
            case "index":
                if n.index is None:
                    raise ValueError("verify the kernel first")
                return self.lanes.index(n.index, values, u, lanes=varying)
            case "load":
                return self._load(n, values, u, varying)
            case "bound":
                return self.lanes.bound(n, values)
            case "cast":
                return cast(f, args[0], self.types[n.args[0]], n.dtype)
            case _:
                raise ValueError(f"no code for {n.op}")

    def _store(self, n: Node, values: dict[int, V], u: int, varying: bool) -> None:
        """Emit a store: alone, with an interleaved set when it is the last of it, or for all units of a tile with the last."""
        v, t = self.how.v, self.lanes.units_along
        if v is not None and t != v and across_store(self.kernel, n, v) == t:
            if u == self.lanes.w - 1:
                units = [self.lanes.in_memory(self.value(n.args[0], k), n) for k in range(self.lanes.w)]
                self.lanes.store_rows(n, transpose(self.f, units))
            return
        m = self.zips.get(n.id)
        if m is None or not varying or self.lanes.mask is not None or self.lanes.w == 1 or self.how.tile is not None:
            self.lanes.store(n, values, u, varying)
            return
        places = self.waiting.setdefault((m.buffer, m.base, u), {})
        places[m.place] = values[n.args[0]]
        if len(places) == m.stride:
            del self.waiting[m.buffer, m.base, u]
            self.lanes.store_interleaved(n, m.base, [places[k] for k in range(m.stride)], u)

    def _load(self, n: Node, values: dict[int, V], u: int, varying: bool) -> V:
        """Emit a load: alone, one of an interleaved set, or one for all units of a tile; none where its condition is known not to
        hold."""
        if n.args and self.known.get(n.args[0]) is False:
            return values[n.args[1]]
        v, t = self.how.v, self.lanes.units_along
        if v is not None and t != v and across(self.kernel, n, v) == t:
            if n.id not in self.transposed:
                rows = transpose(self.f, self.lanes.load_rows(n, self.lanes.w))
                self.transposed[n.id] = [self.lanes.from_memory(x, n) for x in rows]
            return self.transposed[n.id][u]
        m = self.members.get(n.id)
        if m is None or self.lanes.mask is not None or self.lanes.w == 1:
            return self.lanes.load(n, values, u, varying)
        key = (m.buffer, m.base, u)
        if key not in self.unzipped:
            self.unzipped[key] = self.lanes.load_interleaved(n, m.base, m.stride, u)
        return self.unzipped[key][m.place]
