"""The loops of one row stage, with the accumulators of its reductions and scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.ir import Kernel, Node, Stage
from fusewright.toolkit.ir.types import DType
from fusewright_cpu.emit.memory import Lanes
from fusewright_cpu.emit.reduce import Reducer, Scanner, State
from fusewright_cpu.emit.segments import RowEnd, row_end
from fusewright_cpu.emit.strategy import Strategy, row_units
from fusewright_cpu.emit.text import Fn, V, i64
from fusewright_cpu.target import CpuTarget

CHAIN = 16
"""The most floats added one after the other, as in torch's sums: longer ones are sums of partial sums, and so on, so that the error
grows with the number of levels, not of floats."""


def chunks(steps: int, inner: int = 1) -> list[int]:
    """Return the lengths of the chunks, longest first, that make a loop of `steps` with `inner` additions each one in which no more
    than `CHAIN` follow each other: as few as possible, and alike in length."""
    widths: list[int] = []
    left, most = steps, max(CHAIN // inner, 1)
    while left > most:
        parts = -(-left // most)
        widths.insert(0, -(-left // parts) * (widths[0] if widths else 1))
        left, most = -(-steps // widths[0]), CHAIN
    return widths


class Writer(Protocol):
    """The interface that emits the nodes of a stage: the function's body; see `body.Body`."""

    kernel: Kernel
    how: Strategy
    target: CpuTarget
    f: Fn
    lanes: Lanes
    types: dict[int, DType]
    uniform: dict[int, V]
    units: list[dict[int, V]]
    known: dict[int, bool]

    @property
    def axes(self) -> Mapping[int, frozenset[int]]: ...
    @property
    def rows(self) -> list[int]: ...
    def size(self, axis: int) -> V: ...
    def value(self, n: int, u: int) -> V: ...
    def nodes(self, nodes: Iterable[Node], units: int) -> None: ...
    def keep_store(self, n: Node, x: V, u: int) -> None: ...
    def scalar_code(self) -> None: ...
    def tail_mask(self, i: V, hi: V, lanes: int) -> V: ...


class RowLoops:
    """The loops of one row stage. They carry accumulators as a flat list: for every unit, every
    reduction's state.

    In row mode without masked memory a last unit of scalar accumulators handles the tail.
    """

    def __init__(self, body: Writer, stage: Stage, depth: dict[int, int]) -> None:
        self.b, self.f, self.stage, self.depth = body, body.f, stage, depth
        self.inner = [n for n in stage.nodes if depth[n.id] == len(body.rows) - 1]
        self.nodes = {n.id: n for n in stage.nodes}
        types = body.types
        reduces = [n for n in stage.nodes if n.op == "reduce"]
        self.twins = {a.id: n.id for a in reduces for n in reduces if a.how == f"arg{n.how}" and a.args == n.args}
        """Position of an extreme -> the extreme, which is found with it."""
        self.reducers = [Reducer(n, types[n.args[0]]) for n in reduces if n.id not in self.twins.values()]
        self.scanners = [Scanner(n) for n in stage.nodes if n.op == "scan"]
        self.accumulators: list[Reducer | Scanner] = [*self.reducers, *self.scanners]
        self.row = body.how.row
        scalar = self.row and not (body.target.masks and all(s.by_vectors for s in self.scanners))
        scalar = scalar and bool(self.scanners)
        self.w = 1 if scalar else body.how.lanes if self.row else body.lanes.w
        self.end = row_end(body.kernel, stage, None if self.row else body.how.v)
        self._cascades = any(r.cascades for r in self.reducers) and not self.scanners
        self.count = self._unit_count()
        self.stop = body.size(body.rows[0])
        """Where the first row axis ends."""
        self.extra = self.row and self.w > 1 and not body.target.masks

    def _unit_count(self) -> int:
        if not self.row:
            return len(self.b.units)
        if self.w == 1 or self.scanners:
            return 1
        n = self.b.kernel.sizes[-1]
        tested = None if self.end is None else self.end.condition
        inner = [n for n in self.stage.nodes if n.id != tested and tested not in n.args[:1]]
        units = row_units(inner, self.b.target)
        while isinstance(n, int) and units > 1 and units * self.w > n:
            units //= 2
        return units

    def run(self) -> None:
        if self.end is not None:
            self.b.known[self.end.condition] = True
            self.stop = self._early(self.end)
        states = self._level(0, self._start())
        if self.end is not None:
            del self.b.known[self.end.condition]
        self._finish(states)
        if self.row:
            self.b.scalar_code()

    def _early(self, end: RowEnd) -> V:
        """Return the steps of the first row axis before the row's end."""
        b, f, size = self.b, self.f, self.stop
        limit = (
            b.lanes.index(end.limit.index, {}, 0, lanes=False) if end.limit.index else i64(int(end.limit.value or 0))
        )
        n = f.bin("sub", limit, b.lanes.index(end.start, {}, 0, lanes=False))
        n = f.select(f.cmp("icmp slt", n, size), n, size)
        return f.select(f.cmp("icmp sgt", n, i64(0)), n, i64(0))

    # accumulators

    def _state_width(self, operand: int) -> int:
        if self.row:
            return self.w
        varies = self.b.how.v in self.b.axes[operand]
        return self.w if varies else 1

    def _start(self) -> State:
        out: State = []
        for k in range(self.count + (1 if self.extra else 0)):
            for r in self.accumulators:
                w = self._state_width(self._operand(r)) if k < self.count else 1
                if r.node.recurs:
                    out.append(self.f.splat(self.b.value(self.nodes[r.node.args[1]].args[0], 0 if self.row else k), w))
                    continue
                out.extend(r.start(self.f, w))
        return out

    @staticmethod
    def _operand(r: Reducer | Scanner) -> int:
        """Return the value whose lanes the accumulator has."""
        return r.node.id if isinstance(r, Scanner) else r.node.args[0]

    def _split(self, states: State) -> list[list[State]]:
        """Split flat states into lists per unit and accumulator."""
        it, out = iter(states), []
        for _ in range(self.count + (1 if self.extra else 0)):
            unit = []
            for r in self.accumulators:
                unit.append([next(it) for _ in r.start(self.f, 1)])
            out.append(unit)
        return out

    def _merge(self, a: State, b: State) -> State:
        out: State = []
        for x, y in zip(self._split(a), self._split(b), strict=True):
            for r, s, t in zip(self.reducers, x, y, strict=True):
                out.extend(r.merge(self.f, s, t))
        return out

    def _finish(self, states: State) -> None:
        units = self._split(states)
        for k, r in enumerate(self.reducers):
            if not self.row:
                for u, unit in enumerate(units):
                    self._done(r, unit[k], self.b.units[u])
                continue
            vectors = [unit[k] for unit in units[: self.count]]
            while len(vectors) > 1:
                half = len(vectors) // 2
                vectors = [r.merge(self.f, vectors[i], vectors[i + half]) for i in range(half)]
            total = r.fold(self.f, vectors[0])
            if self.extra:
                total = r.merge(self.f, total, units[-1][k])
            self._done(r, total, self.b.uniform)

    def _done(self, r: Reducer, state: State, values: dict[int, V]) -> None:
        values[r.node.id] = r.finish(self.f, state)
        if r.node.id in self.twins:
            values[self.twins[r.node.id]] = state[0]

    # loops

    def _level(self, d: int, states: State) -> State:
        """Emit loop `d` of the row axes and everything inside it."""
        b, axis = self.b, self.b.rows[d]
        last = d == len(b.rows) - 1
        if last and self.row:
            return self._vector_loop(states)
        inner = 1 if last else self._inner(d)
        apart = self._cascades and inner > CHAIN // 2

        def body(i: V, carried: list[V]) -> list[V]:
            b.lanes.axis[axis] = i
            if last:
                return self._steps(carried, range(self.count))
            b.nodes([n for n in self.stage.nodes if self.depth[n.id] == d], self.count)
            return self._merge(carried, self._level(d + 1, self._start())) if apart else self._level(d + 1, carried)

        return self._loop(i64(0), self._size(d), 1, states, body, self._likely(d), 1 if apart else inner)

    def _likely(self, d: int) -> int:
        """Return the steps of row axis `d` for which a loop of unknown steps has chunks."""
        return max(evaluate(self.b.kernel.sizes[self.b.rows[d]], self.b.kernel.hints), CHAIN**4)

    def _inner(self, d: int) -> int:
        """Return the number of steps inside one of axis `d`: of many, each has a sum of its own."""
        steps = [evaluate(self.b.kernel.sizes[axis], self.b.kernel.hints) for axis in self.b.rows[d + 1 :]]
        if self.row:
            steps[-1] = -(-steps[-1] // (self.count * self.w))
        return max(math.prod(steps), 1)

    def _size(self, d: int) -> V:
        """Return the steps of row axis `d`."""
        return self.b.size(self.b.rows[d]) if d else self.stop

    def _loop(
        self, lo: V, hi: V, step: int, states: State, body: Callable[[V, list[V]], list[V]], likely: int, inner: int = 1
    ) -> State:
        """Emit a loop over one row axis with `inner` additions a step, of `likely` steps if their number is not known. Long float
        sums are split into chunks, and chunks of chunks."""
        known = -(-(int(hi.name) - int(lo.name)) // step) if lo.lit and hi.lit else None
        widths = chunks(likely if known is None else known, inner) if self._cascades else ()
        return self._chunks(lo, hi, step, states, body, widths, known)

    def _chunks(
        self, lo: V, hi: V, step: int, states: State, body: Callable[[V, list[V]], list[V]],
        widths: Sequence[int], known: int | None,
    ) -> State:  # fmt: skip
        """Emit a loop in chunks of `widths` steps, longest first; `known` is the number of its steps, if it is a constant."""
        f = self.f
        if not widths:
            return f.loop(lo, hi, i64(step), states, body)
        width, whole = widths[0], known is not None and known % widths[0] == 0

        def chunk(at: V, total: list[V]) -> list[V]:
            top = f.add(at, i64(step * width))
            top = top if whole else f.select(f.cmp("icmp slt", top, hi), top, hi)
            return self._merge(total, self._chunks(at, top, step, self._start(), body, widths[1:], width if whole else None))

        return f.loop(lo, hi, i64(step * width), states, chunk)

    def _vector_loop(self, states: State) -> State:
        """Emit the innermost row axis, vectorised: full steps, then a masked or scalar tail."""
        n, step = self._size(len(self.b.rows) - 1), self.count * self.w
        static = int(n.name) if n.lit else None
        main = i64(static - static % step) if static is not None else self.f.bin("and", n, i64(-step))
        likely = self._likely(len(self.b.rows) - 1) // step
        states = self._span(i64(0), main, self.count, self.w, False, states, likely)
        if static is not None and static % step == 0:
            return states
        if not self.extra:
            masked = self.w > 1 and (static is None or static % self.w != 0)
            return self._span(main, n, 1, self.w, masked, states, self.count)
        single = i64(static - static % self.w) if static is not None else self.f.bin("and", n, i64(-self.w))
        if self.count > 1:
            states = self._span(main, single, 1, self.w, False, states, self.count)
        whole = static is not None and static % self.w == 0
        return states if whole else self._span(single, n, 1, 1, False, states, self.w)

    def _span(self, lo: V, hi: V, units: int, w: int, masked: bool, states: State, likely: int) -> State:
        b, axis = self.b, self.b.rows[-1]
        first = self.count if self.extra and w == 1 else 0

        def body(i: V, carried: list[V]) -> list[V]:
            b.lanes.axis[axis], b.lanes.w, b.lanes.vectorised = i, w, w > 1
            b.lanes.mask = b.tail_mask(i, hi, w) if masked else None
            return self._steps(carried, range(first, first + units))

        out = self._loop(lo, hi, units * w, states, body, likely)
        b.scalar_code()
        return out

    def _steps(self, carried: State, active: range) -> State:
        """Emit the nodes of the innermost loop for the units in `active`, and their accumulators' steps."""
        b, states = self.b, self._split(carried)
        if self.row:
            b.units = [{} for _ in active]
        outer, known = dict(b.uniform), [dict(u) for u in b.units]
        scans = {s.node.id: k + len(self.reducers) for k, s in enumerate(self.scanners)}
        for n in self.inner:
            if n.id in self.twins.values():
                continue
            if n.op == "state":
                place = next(i for s, i in scans.items() if self.nodes[s].args[1:] == (n.id,))
                for u, k in enumerate(active):
                    b.units[u][n.id] = states[k][place][0]
            elif n.op in ("reduce", "scan"):
                for u, k in enumerate(active):
                    self._accumulate(n, u, states[k], scans)
            else:
                b.nodes([n], len(active))
        b.uniform, b.units = outer, known
        return [v for unit in states for state in unit for v in state]

    def _accumulate(self, n: Node, u: int, unit: list[State], scans: dict[int, int]) -> None:
        b = self.b
        x = b.value(n.args[0], u)
        if n.op == "scan":
            k = scans[n.id]
            w, scanner = unit[k][0].w, self.scanners[k - len(self.reducers)]
            out = x = self.f.splat(x, w)
            if n.recurs:
                unit[k] = [out]
            else:
                unit[k], out = scanner.step(self.f, unit[k], x, self.row)
            b.units[u][n.id] = out
            if n.keep:
                b.keep_store(n, out, u)
            return
        k = next(i for i, r in enumerate(self.reducers) if r.node.id == n.id)
        w = unit[k][0].w
        x = self.f.splat(x, w)
        if (factors := self._factors(n)) is not None:
            state = unit[k][0]
            left, right = (self.f.splat(b.value(a, u), w) for a in factors)
            new = self.f.fma(left, right, state)
            unit[k] = [new if b.lanes.mask is None or w == 1 else self.f.select(b.lanes.mask, new, state)]
            return
        unit[k] = self.reducers[k].step(self.f, unit[k], x, self._position(u), b.lanes.mask if w > 1 else None)

    def _factors(self, n: Node) -> tuple[int, ...] | None:
        """Return the factors of a product that may be fused unrounded into the add of a sum, as in a library's products.
        Not on x86, whose results stay as they were."""
        x = self.nodes.get(n.args[0])
        fuses = self.b.target.arm and n.how == "sum" and x is not None and x.op == "mul"
        return x.args if fuses and x is not None and self.b.types[x.id] in ("f32", "f64") else None

    def _position(self, u: int) -> V:
        """Return the position in the row, for arg-reductions."""
        b, f, at = self.b, self.f, i64(0)
        if not any(r.how.startswith("arg") for r in self.reducers):
            return at
        for r in b.rows:
            step = b.lanes.spread(r, u)
            at = f.add(f.mul(at, b.size(r)) if at.w == 1 else at, step)
        return at
