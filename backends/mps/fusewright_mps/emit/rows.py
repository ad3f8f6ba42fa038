"""Kernels with rows: threads share the row of a point and make one pass over it per stage. Partial reductions are combined with
simdgroup functions, and across a threadgroup through threadgroup memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusewright.toolkit.ir.extent import Extent, evaluate, product
from fusewright.toolkit.ir.ir import Node, Stage
from fusewright.toolkit.ir.types import DType
from fusewright.toolkit.transform.online_softmax import pairs
from fusewright.toolkit.transform.split import identity
from fusewright_mps.emit.memory import FUNCTORS, Order
from fusewright_mps.emit.operators import METAL, combined, literal
from fusewright_mps.emit.points import Points, parts
from fusewright_mps.emit.schedule import FORCED, HELD, LANES
from fusewright_mps.emit.source import Unsupported

LONG, TURNS = 32, 16
"""Sums of more than LONG steps are added to the total every TURNS steps."""
_FUNCTOR = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}


class Rows(Points):
    """A function whose threads share rows. The kernel has no mean or m2 reductions (`without_moments` replaced them)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.order = Order()
        self.place_of = {n.id: k for k, n in enumerate(self.kernel.nodes())}
        self.stage_of = {n.id: k for k, s in enumerate(self.kernel.stages) for n in s.nodes}
        self.rowwise = {n.id for s in self.kernel.stages if s.over == "PR" for n in s.nodes if n.op != "reduce"}
        self.shared_lines: list[str] = []
        self.sums: list[Node] = []
        self.apart = False
        """Whether a row is read again after a store to an output that might alias it."""
        self.plan_held()
        self.joined = self._joined()
        """Ids of softmax maxima -> ids of the sums computed in the same pass (online softmax)."""

    # what stays in registers

    def plan_held(self) -> None:
        """Decide which row values stay in registers: loads that a later stage repeats, and values that the kernel marks `keep`."""
        self.again: dict[int, int] = {}
        steps = self.config.held
        if not steps or self.config.workers not in ("simd", "group"):
            return
        found = self._equal_loads()
        kept = {n.id for n in self.nodes.values() if n.keep} | set(found.values())
        kept = {i for i in kept if self.config.along in self.axes[i]}
        cost = steps * self.config.vector * len(kept)
        if kept and (cost <= HELD or (self._overwritten() and cost <= FORCED)):
            self.again = {i: c for i, c in found.items() if c in kept}
            self.held = {i: f"h{i}" for i in kept} | {i: f"h{c}" for i, c in self.again.items()}

    def _equal_loads(self) -> dict[int, int]:
        """Map loads that repeat a load of an earlier stage to the first such load, unless the buffer was stored to in between."""
        first: dict[tuple[object, ...], Node] = {}
        out: dict[int, int] = {}
        epoch: dict[int | None, int] = {}
        for n in self.kernel.nodes():
            if n.op == "store":
                epoch[n.buffer] = epoch.get(n.buffer, 0) + 1
            if n.op != "load" or n.id not in self.rowwise or n.args or (n.index and n.index.indirect):
                continue
            same = first.setdefault((n.buffer, n.index, epoch.get(n.buffer, 0)), n)
            if self.stage_of[same.id] < self.stage_of[n.id]:
                out[n.id] = same.id
        return out

    def _joined(self) -> dict[int, int]:
        """Pair softmax maxima with their sums; empty if rows are held in registers or belong to one thread."""
        if self.held or self.config.workers == "thread" or any(n.op == "scan" for n in self.nodes.values()):
            return {}
        own = {i for s in self.kernel.stages for n, i in self._twins(s).items() if n == i}
        found = {top: total for total, top in pairs(self.kernel).items() if {total, top} <= own}
        return {top: total for top, total in found.items() if self._operand_type(self.nodes[top]) == "f32"}

    # the function

    def write(self) -> None:
        self._place()
        for k, stage in enumerate(self.kernel.stages):
            if stage.over == "P":
                for n in stage.nodes:
                    self._wait(n, by_row=False)
                    self.node(n, over_row=False)
            else:
                self._row_stage(k, stage)

    def threads(self) -> tuple[Extent, Extent, Extent]:
        sizes, c = self.kernel.sizes, self.config
        x, y = (sizes[c.order[0]] if c.order else 1), (sizes[c.order[1]] if len(c.order) > 1 else 1)
        z = product(sizes[a] for a in c.order[2:])
        if c.workers == "group":
            return x * c.count, y, z
        if c.workers == "simd":
            return parts(x, c.group[0] // LANES) * c.group[0], y, z
        if c.workers == "columns":
            return parts(x, LANES) * LANES, y * c.count, z
        return x, y, z

    def _place(self) -> None:
        """Define the axes of P, and which thread stores values that exist once per point."""
        c = self.config
        if c.workers == "thread":
            self.positions(1)
        elif c.workers == "group":
            self.leader = "tid == 0"
            self.positions(1)
        elif c.workers == "simd":
            self.leader = "lane == 0"
            self._place_simd()
        else:
            self._place_columns()

    def _place_simd(self) -> None:
        together, order = self.config.group[0] // LANES, self.config.order
        if together == 1 or not order:
            self.positions(1)
            return
        size, text = self.kernel.sizes[order[0]], f"at.x * {together} + simd"
        if not isinstance(size, int) or size % together:
            unsigned = "ulong" if self.variant.wide else "uint"
            self.put(f"if ({text} >= {unsigned}({self.address.extent(size)})) {{ return; }}")
        self.positions(1, x=text)

    def _place_columns(self) -> None:
        """Place columns; points past the end repeat the last point and store nothing."""
        size, text = self.kernel.sizes[self.config.order[0]], f"at.x * {LANES} + lane"
        self.leader = "simd == 0" if self.config.count > 1 else ""
        if isinstance(size, int) and size % LANES == 0:
            self.positions(1, x=text)
            return
        unsigned = "ulong" if self.variant.wide else "uint"
        points = f"{unsigned}({self.address.extent(size)})"
        self.put(f"const bool alive = {text} < {points};")
        self.positions(1, x=f"(alive ? {text} : {points} - 1)")
        self.inside = self.asked = "alive"
        self.leader = f"{self.leader} && alive" if self.leader else "alive"

    # stages over the row

    def _row_stage(self, k: int, stage: Stage) -> None:
        twins, done = self._twins(stage), set(self.joined.values())
        reductions = [n for n in stage.nodes if twins.get(n.id) == n.id and n.id not in done]
        roots = [n for n in stage.nodes if n.op in ("store", "bound") or n in reductions]
        if roots:
            self._pass(k, roots, reductions)
        self.names.update({i: self.names[twin] for i, twin in twins.items()})

    def _twins(self, stage: Stage) -> dict[int, int]:
        """Map the reductions of a stage to the first equal one, by id."""
        first: dict[tuple[str, int], int] = {}
        return {n.id: first.setdefault((n.how, n.args[0]), n.id) for n in stage.nodes if n.op == "reduce"}

    def _pass(self, k: int, roots: Sequence[Node], reductions: Sequence[Node]) -> None:
        todo = self._closure(roots, k)
        self.reading = {n.id for n in todo if n.id in self.held and (n.id in self.again or self.stage_of[n.id] < k)}
        scans = any(n.op == "scan" for n in todo)
        if scans and self.config.workers == "columns":
            raise Unsupported("a scan by simdgroups that lie across its row")
        for n in todo:
            if n.id not in self.reading:
                self._wait(n, by_row=True)
        for n in todo:
            self._begin(n, fresh=self.stage_of[n.id] == k)
        self._sums_begin([n for n in todo if n.op == "reduce"], scans)
        self._loop(todo, scans and self.config.workers != "thread")
        self._gather()
        self._finish(reductions)

    def _closure(self, roots: Sequence[Node], k: int) -> list[Node]:
        """Return the nodes this pass computes for the roots: row values, including those of earlier stages that are not held."""
        todo, found = [n.id for n in roots], set[int]()
        while todo:
            i = todo.pop()
            if i in found:
                continue
            found.add(i)
            if i in self.held and (i in self.again or self.stage_of[i] < k):
                continue
            todo.extend(u for u in self.nodes[i].uses() if u in self.rowwise)
        nodes = [self.nodes[i] for i in sorted(found, key=self.place_of.__getitem__)]
        again = [n for n in nodes if self.stage_of[n.id] < k and n.id not in self.held]
        if self._changed(again, k, same=True):
            raise Unsupported("a long row is needed again after it was overwritten; torch's own calls run it in steps")
        self.apart |= self._changed(again, k)
        return nodes

    def _overwritten(self) -> bool:
        """Whether recomputing a value marked `keep` would read memory that a store has overwritten."""
        kept = [n for n in self.nodes.values() if n.keep]
        needed = self._needed(kept)
        return any(self._changed(needed, k) for k in range(len(self.kernel.stages)))

    def _needed(self, roots: Sequence[Node]) -> list[Node]:
        todo, found = [n.id for n in roots], set[int]()
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo.extend(u for u in self.nodes[i].uses() if u in self.rowwise)
        return [self.nodes[i] for i in found]

    def _changed(self, again: Sequence[Node], k: int, same: bool = False) -> bool:
        """Whether a load among `again` may read what a store before stage `k` wrote: to the same buffer or, unless `same`, to an
        output that aliases an input."""
        for n in (n for n in again if n.op == "load"):
            for s in self.kernel.stages[self.stage_of[n.id] : k]:
                if any(
                    m.op == "store"
                    and (m.buffer == n.buffer or (not same and m.dtype == n.dtype and m.index == n.index))
                    for m in s.nodes
                ):
                    return True
        return False

    def _wait(self, n: Node, by_row: bool) -> None:
        """Emit a barrier if an access needs one."""
        if self.config.workers == "thread" or n.op not in ("load", "store"):
            return
        if self.order.before(n, by_row):
            who = "simdgroup" if self.config.workers == "simd" else "threadgroup"
            self.put(f"{who}_barrier(mem_flags::mem_device);")

    def _begin(self, n: Node, fresh: bool) -> None:
        """Declare the variables that the loop carries."""
        if n.id in self.joined:
            self.put(f"float2 m{n.id} = FW_ONLINE;")
        elif n.op == "reduce":
            dtype = self._operand_type(n)
            self.put(f"{METAL[dtype]} a{n.id} = {self._identity(n)};")
            if n.how.startswith("arg"):
                self.put(f"{self.integer} b{n.id} = 0;")
        elif n.recurs:
            self.put(f"{METAL[n.dtype]} c{n.args[1]} = {self.operand(self.nodes[n.args[1]].args[0])};")
        elif n.op == "scan":
            self.put(f"{METAL[n.dtype]} c{n.id} = {literal(identity(n.how, n.dtype), n.dtype)};")
        elif n.id in self.held and fresh and n.id not in self.again:
            v = self.config.vector
            self.put(f"{METAL[n.dtype]}{v if v > 1 else ''} h{n.id}[{self.config.held}] = {{}};")

    def _operand_type(self, n: Node) -> DType:
        return self.nodes[n.args[0]].dtype

    def _identity(self, n: Node) -> str:
        return literal(identity(n.how.removeprefix("arg"), self._operand_type(n)), self._operand_type(n))

    # loops

    def _loop(self, todo: Sequence[Node], scans: bool) -> None:
        if scans:
            self._scan_loop(todo)
        elif self.config.workers == "thread":
            self._nested(todo, range(len(self.kernel.p), len(self.kernel.sizes)))
        elif self.held:
            self._held_loop(todo)
        else:
            self._shared_loop(todo)

    def _nested(self, todo: Sequence[Node], axes: Sequence[int]) -> None:
        """Emit nested loops over the whole row, for one thread."""
        if not axes:
            self._cell(todo, 1)
            return
        name, size = self.axis_name(axes[0]), self.address.extent(self.kernel.sizes[axes[0]])
        with self.block(f"for ({self.integer} {name} = 0; {name} < {size}; {name}++)"):
            self.where[axes[0]] = name
            self._nested(todo, axes[1:])

    def _worker(self) -> str:
        who = {"group": "tid", "simd": "lane", "columns": "simd"}[self.config.workers]
        return f"{self.integer}({who})"

    def _shared_loop(self, todo: Sequence[Node]) -> None:
        """Emit a loop in which neighbouring workers take neighbouring elements. If the last axis is long enough, outer axes become
        outer loops; otherwise one loop runs over the flattened row and recovers its axes by division."""
        n_p, v = len(self.kernel.p), self.config.vector
        axes = list(range(n_p, len(self.kernel.sizes)))
        last, stride = self.kernel.sizes[axes[-1]], self.config.count * v
        if len(axes) > 1 and evaluate(last, self.kernel.hints) >= stride:
            self._outer(todo, axes, stride)
            return
        start = self._worker() + (f" * {v}" if v > 1 else "")
        name = "r" if len(axes) > 1 else self.axis_name(axes[0])
        size = self.address.extent(product(self.kernel.r))
        with self.block(f"for ({self.integer} {name} = {start}; {name} < {size}; {name} += {stride})"):
            self._split_row(axes)
            self._cell(todo, v)

    def _outer(self, todo: Sequence[Node], axes: Sequence[int], stride: int) -> None:
        name, size = self.axis_name(axes[0]), self.address.extent(self.kernel.sizes[axes[0]])
        last, v = len(axes) == 1, self.config.vector
        start = (self._worker() + (f" * {v}" if v > 1 else "")) if last else "0"
        step = f"{name} += {stride}" if last else f"{name}++"
        with self.block(f"for ({self.integer} {name} = {start}; {name} < {size}; {step})"):
            self.where[axes[0]] = name
            if last:
                self._cell(todo, v)
            else:
                self._outer(todo, axes[1:], stride)

    def _split_row(self, axes: Sequence[int]) -> None:
        """Define the axes of a row from the flat position `r`."""
        if len(axes) == 1:
            self.where[axes[0]] = self.axis_name(axes[0])
            return
        unsigned = "ulong" if self.variant.wide else "uint"
        inner: Extent = 1
        for a in reversed(axes):
            text = f"{unsigned}(r)" if inner == 1 else f"{unsigned}(r) / {unsigned}({self.address.divisor(inner)})"
            text = text if a == axes[0] else f"{text} % {unsigned}({self.address.divisor(self.kernel.sizes[a])})"
            name = self.where[a] = self.axis_name(a)
            if a in self._used_axes() or a == axes[-1]:
                self.put(f"const {self.integer} {name} = {self.integer}({text});")
            inner = inner * self.kernel.sizes[a]

    def _held_loop(self, todo: Sequence[Node]) -> None:
        """Emit a loop with a fixed number of steps, unrolled so that held values stay in registers."""
        c = self.config
        axes = list(range(len(self.kernel.p), len(self.kernel.sizes)))
        row = math.prod(s for s in self.kernel.r if isinstance(s, int))
        name = "r" if len(axes) > 1 else self.axis_name(axes[0])
        self.step = "s" if c.held > 1 else "0"
        worker = self._worker() if c.held == 1 else f"(s * {c.count} + {self._worker()})"
        with self.block(f"FW_UNROLL for (int s = 0; s < {c.held}; s++)" if c.held > 1 else ""):
            self.put(f"const {self.integer} {name} = {worker}{f' * {c.vector}' if c.vector > 1 else ''};")
            whole = row % (c.count * c.vector) == 0
            if whole:
                self._split_row(axes)
                self._cell(todo, c.vector)
            else:
                with self.block(f"if ({name} < {self.address.number(row)})"):
                    self._split_row(axes)
                    self._cell(todo, c.vector)

    def _scan_loop(self, todo: Sequence[Node]) -> None:
        """Emit a loop in which all threads of a row take every step; those past the end repeat the last element and are masked."""
        axis, count = len(self.kernel.p), self.config.count
        name, size, at = self.axis_name(axis), self.address.extent(self.kernel.sizes[axis]), f"base + {self._worker()}"
        if count > LANES:
            self.put("uint side = 0;")
        with self.block(f"for ({self.integer} base = 0; base < {size}; base += {count})"):
            self.put(f"const bool inside = {at} < {size};")
            self.put(f"const {self.integer} {name} = inside ? {at} : {size} - 1;")
            self.where[axis] = name
            before = self.inside, self.asked
            self.inside = self.asked = "inside"
            self.cell(todo, over_row=True, vector=1)
            self.inside, self.asked = before
            if count > LANES:
                self.put("side ^= 1;")

    def _cell(self, todo: Sequence[Node], vector: int) -> None:
        """Emit one step of a loop; long sums are added to their totals every `TURNS` steps."""
        self.cell(todo, over_row=True, vector=vector)
        if self.sums and self._chain() > LONG:
            with self.block(f"if (++turn == {TURNS})"):
                self._gather(again=True)
                self.put("turn = 0;")

    # sums of floats: short chains of additions, because each addition rounds

    def _chain(self) -> int:
        """Return the number of sequential additions per thread, at the traced sizes."""
        row = math.prod(evaluate(s, self.kernel.hints) for s in self.kernel.r)
        return row // (self.config.count * self.config.vector)

    def _sums_begin(self, found: Sequence[Node], scans: bool) -> None:
        """Declare partial accumulators, one per vector lane, for the sums that need them."""
        v = self.config.vector
        wanted = not scans and (v > 1 or self._chain() > LONG)
        in_parts = [n for n in found if (n.how == "sum" and n.dtype == "f32") or n.id in self.joined]
        self.sums = in_parts if wanted else []
        for n in self.sums:
            if n.id in self.joined:
                self.put(f"float2 q{n.id}[{v}] = {{{', '.join(['FW_ONLINE'] * v)}}};")
            else:
                self.put(f"float{v if v > 1 else ''} q{n.id} = {self._zeros()};")
        if self.sums and self._chain() > LONG:
            self.put("int turn = 0;")

    def _gather(self, again: bool = False) -> None:
        v = self.config.vector
        for n in self.sums:
            q = f"q{n.id}"
            if n.id in self.joined:
                self._gather_joined(n, again)
                continue
            total = {1: q, 2: f"({q}[0] + {q}[1])", 4: f"(({q}[0] + {q}[1]) + ({q}[2] + {q}[3]))"}[v]
            self.put(f"a{n.id} = a{n.id} + {total};")
            if again:
                self.put(f"{q} = {self._zeros()};")

    def _gather_joined(self, n: Node, again: bool) -> None:
        for k in range(self.config.vector):
            self.put(f"m{n.id} = fw_online_joined(m{n.id}, q{n.id}[{k}]);")
        if again:
            for k in range(self.config.vector):
                self.put(f"q{n.id}[{k}] = FW_ONLINE;")

    def _zeros(self) -> str:
        return f"float{self.config.vector}(0.0f)" if self.config.vector > 1 else "0.0f"

    # reductions and scans

    def node(self, n: Node, over_row: bool) -> None:
        if n.op == "reduce":
            self._reduce(n)
        elif n.op == "scan":
            self._scan(n)
        elif n.op == "state":
            self.names[n.id] = f"v{n.id}"
            self.put(f"const {METAL[n.dtype]} v{n.id} = c{n.id};")
        else:
            super().node(n, over_row)

    def _scan(self, n: Node) -> None:
        if n.recurs:
            self.names[n.id] = f"v{n.id}"
            self.put(f"const {METAL[n.dtype]} v{n.id} = {self.operand(n.args[0])};")
            self.put(f"c{n.args[1]} = v{n.id};")
            return
        x, kind, edge = self.operand(n.args[0]), METAL[n.dtype], literal(identity(n.how, n.dtype), n.dtype)
        self.names[n.id] = f"v{n.id}"
        if self.config.workers == "thread":
            self.put(f"c{n.id} = {combined(n.how, n.dtype, f'c{n.id}', x)};")
            self.put(f"const {kind} v{n.id} = c{n.id};")
            return
        scan = f"fw_simd_scan<{FUNCTORS[_FUNCTOR[n.how]]}>"
        self.put(f"const {kind} y{n.id} = {scan}(inside ? {x} : {edge}, lane);")
        if self.config.count > LANES:
            self._scan_of_group(n, scan, edge)
            return
        self.put(f"const {kind} v{n.id} = {combined(n.how, n.dtype, f'c{n.id}', f'y{n.id}')};")
        self.put(f"c{n.id} = fw_from(v{n.id}, {LANES - 1});")

    def _scan_of_group(self, n: Node, scan: str, edge: str) -> None:
        """Add the totals of preceding simdgroups through threadgroup memory. Steps alternate between two halves of it, so that one
        barrier per step is enough."""
        kind, simds = METAL[n.dtype], self.config.count // LANES
        c, y, z, b, g = (f"{letter}{n.id}" for letter in "cyzbg")
        half = self._share(n, "t", kind, 2 * simds) + f"[side * {simds} + "
        self.put(f"if (lane == {LANES - 1}) {{ {half}simd] = {y}; }}")
        self.put("threadgroup_barrier(mem_flags::mem_threadgroup);")
        mine = f"{half}lane]" if simds == LANES else f"(lane < {simds} ? {half}lane] : {edge})"
        self.put(f"const {kind} {g} = {mine};")
        self.put(f"const {kind} {z} = {scan}({g}, lane);")
        self.put(f"const {kind} {b} = simd == 0 ? {edge} : fw_from({z}, ushort(simd - 1));")
        self.put(f"const {kind} v{n.id} = {combined(n.how, n.dtype, combined(n.how, n.dtype, c, b), y)};")
        self.put(f"{c} = {combined(n.how, n.dtype, c, f'fw_from({z}, {simds - 1})')};")

    def _reduce(self, n: Node) -> None:
        """Accumulate one element into this thread's part of a reduction."""
        x, dtype = self.operand(n.args[0]), self._operand_type(n)
        if n.id in self.joined:
            name = f"m{n.id}" if n not in self.sums else f"q{n.id}[{'k' if self.config.vector > 1 else 0}]"
            self.put(f"{name} = fw_online({name}, {x});")
            return
        if n in self.sums:
            name = f"q{n.id}[k]" if self.config.vector > 1 else f"q{n.id}"
            self.put(f"{name} = {name} + {x};")
            return
        if not n.how.startswith("arg"):
            line = f"a{n.id} = {combined(n.how, dtype, f'a{n.id}', x)};"
            self.put(f"if (inside) {{ {line} }}" if self.inside == "inside" else line)
            return
        test = f"fw_beats_{n.how[3:]}({x}, a{n.id})"
        with self.block(f"if ({'inside && ' if self.inside == 'inside' else ''}{test})"):
            self.put(f"a{n.id} = {x};")
            self.put(f"b{n.id} = {self._position()};")

    def _position(self) -> str:
        """Return the flat position of the current element in the row."""
        n_p = len(self.kernel.p)
        text = ""
        for a in range(n_p, len(self.kernel.sizes)):
            size = self.address.extent(self.kernel.sizes[a])
            text = (
                self.where[a] if not text else f"({text}) * {size if size.isalnum() else f'({size})'} + {self.where[a]}"
            )
        return text

    # combining partial reductions

    def _finish(self, found: Sequence[Node]) -> None:
        if found and self.config.workers != "thread" and self.config.workers != "columns":
            for n in found:
                self._in_simd(n)
        if found and self.config.workers == "group" and self.config.count > LANES:
            self._in_group(found)
        if found and self.config.workers == "columns" and self.config.count > 1:
            self._in_columns(found)
        for n in found:
            if n.how.startswith("arg"):
                self.put(f"const long v{n.id} = long(b{n.id});")
                self.names[n.id] = f"v{n.id}"
            elif n.id in self.joined:
                total = self.joined[n.id]
                self.put(f"const float a{n.id} = m{n.id}[0];")
                self.put(f"const float a{total} = fw_online_sum(m{n.id});")
                self.names |= {n.id: f"a{n.id}", total: f"a{total}"}
            else:
                self.names[n.id] = f"a{n.id}"

    def _in_simd(self, n: Node) -> None:
        """Reduce over the simdgroup; afterwards all lanes have the result."""
        a, b = f"a{n.id}", f"b{n.id}"
        if n.id in self.joined:
            self.put(f"m{n.id} = fw_simd_online(m{n.id});")
            return
        if not n.how.startswith("arg"):
            self.put(f"{a} = fw_simd_{n.how}({a});")
            return
        most = "0x7fffffffffffffffl" if self.variant.wide else "0x7fffffff"
        with self.block(""):
            self.put(f"const {METAL[self._operand_type(n)]} m{n.id} = fw_simd_{n.how[3:]}({a});")
            self.put(f"{b} = fw_simd_min(fw_same({a}, m{n.id}) ? {b} : {most});")
            self.put(f"{a} = m{n.id};")

    def _share(self, n: Node, name: str, kind: str, count: int) -> str:
        self.shared_lines.append(f"    threadgroup {kind} {name}{n.id}[{count}];")
        return f"{name}{n.id}"

    def _in_group(self, found: Sequence[Node]) -> None:
        """Exchange the simdgroups' partial results through threadgroup memory; every simdgroup then combines all of them itself."""
        simds = self.config.count // LANES
        with self.block("if (lane == 0)"):
            for n in found:
                self._leave(n, simds, "simd")
        self.put("threadgroup_barrier(mem_flags::mem_threadgroup);")
        for n in found:
            if simds < LANES:
                self.put(f"m{n.id} = FW_ONLINE;" if n.id in self.joined else f"a{n.id} = {self._identity(n)};")
                with self.block(f"if (lane < {simds})"):
                    self._read_shared(n, "lane")
            else:
                self._read_shared(n, "lane")
            self._in_simd(n)

    def _leave(self, n: Node, count: int, at: str) -> None:
        """Write this thread's partial result to threadgroup memory."""
        if n.id in self.joined:
            for k, i in enumerate((n.id, self.joined[n.id])):
                self.put(f"{self._share(self.nodes[i], 't', 'float', count)}[{at}] = m{n.id}[{k}];")
            return
        self.put(f"{self._share(n, 't', METAL[self._operand_type(n)], count)}[{at}] = a{n.id};")
        if n.how.startswith("arg"):
            self.put(f"{self._share(n, 'g', self.integer, count)}[{at}] = b{n.id};")

    def _read_shared(self, n: Node, at: str) -> None:
        if n.id in self.joined:
            self.put(f"m{n.id} = float2(t{n.id}[{at}], t{self.joined[n.id]}[{at}]);")
            return
        self.put(f"a{n.id} = t{n.id}[{at}];")
        if n.how.startswith("arg"):
            self.put(f"b{n.id} = g{n.id}[{at}];")

    def _in_columns(self, found: Sequence[Node]) -> None:
        """Combine the simdgroups' partial results of each column through threadgroup memory."""
        count = self.config.count
        for n in found:
            self._leave(n, count * LANES, f"simd * {LANES} + lane")
        self.put("threadgroup_barrier(mem_flags::mem_threadgroup);")
        for n in found:
            self._read_shared(n, "lane")
        with self.block(f"for (uint s = 1; s < {count}; s++)"):
            for n in found:
                self._add_column(n)

    def _add_column(self, n: Node) -> None:
        dtype, at = self._operand_type(n), f"s * {LANES} + lane"
        if n.id in self.joined:
            there = f"float2(t{n.id}[{at}], t{self.joined[n.id]}[{at}])"
            self.put(f"m{n.id} = fw_online_joined(m{n.id}, {there});")
            return
        self.put(f"const {METAL[dtype]} y{n.id} = t{n.id}[{at}];")
        if not n.how.startswith("arg"):
            self.put(f"a{n.id} = {combined(n.how, dtype, f'a{n.id}', f'y{n.id}')};")
            return
        self.put(f"const {self.integer} z{n.id} = g{n.id}[{at}];")
        a, y, b, z = (f"{c}{n.id}" for c in "aybz")
        with self.block(f"if (fw_beats_{n.how[3:]}({y}, {a}) || (fw_same({y}, {a}) && {z} < {b}))"):
            self.put(f"{a} = {y};")
            self.put(f"{b} = {z};")
