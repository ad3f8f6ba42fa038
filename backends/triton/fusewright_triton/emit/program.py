"""Print one Triton function: the stages of a kernel from `first` to `last` for one block of points.

Rows are held in registers ("persistent"), or passed over in steps, once per stage, or shared by several programs,
which leave partial reductions for the functions after them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Node, Stage
from fusewright.toolkit.ir.types import DType
from fusewright.toolkit.transform.online_softmax import totals
from fusewright_triton.emit import reductions as red
from fusewright_triton.emit.addressing import atom, strides
from fusewright_triton.emit.held import halves
from fusewright_triton.emit.layout import Dim, Layout, axis_name, by_planes, product
from fusewright_triton.emit.operators import TRITON, Unsupported, constant
from fusewright_triton.emit.precision import approximable
from fusewright_triton.emit.prefetch import ahead, under_way
from fusewright_triton.emit.schedule import AGAIN
from fusewright_triton.emit.values import Values
from fusewright_triton.target import FORMULA


class Program(Values):
    """One function."""

    def __init__(self, layout: Layout, wide: bool, check_division: bool) -> None:
        super().__init__(layout, wide, check_division)
        self.means: dict[int, str] = {}
        self.joined: dict[int, list[int]] = {}
        """The sums that are computed with a maximum."""
        for total, found in layout.online.items():
            self.joined.setdefault(found.top, []).append(total)

    @functools.cached_property
    def guards(self) -> dict[int, tuple[int, int]]:
        """Sums of exponentials of a held row that differ from another of the same stage only for infinite maxima: both ids."""
        found, stage_of = totals(self.kernel), self.layout.stage_of
        plain = {(t.top, stage_of[i]): i for i, t in found.items() if not t.guarded}
        same = {i: (t.top, stage_of[i]) for i, t in found.items() if t.guarded}
        return {i: (at[0], plain[at]) for i, at in same.items() if at in plain}

    def write(self, first: int, last: int) -> None:
        """Print stages `first`..`last`. Partial results of earlier reductions are in the workspace."""
        self.approximable = approximable(self.kernel, first)
        self._constants(first, last)
        self._points()
        stages = self.kernel.stages
        split = self.config.split > 1
        for k in range(first, last + 1):
            if stages[k].over == "PR":
                self._row_stage(k)
            elif not split:
                self._nodes(stages[k].nodes)
        if split and last == len(stages) - 1:
            late = [n for s in stages if s.over == "P" for n in s.nodes if n.op == "store"]
            self._require(n.id for n in late)
            for n in late:
                self.memory.store(n, over_row=False)

    def _nodes(self, nodes: Iterable[Node], over_row: bool = False) -> None:
        for n in nodes:
            if n.op == "store":
                self.memory.store(n, over_row)
            elif n.op == "reduce":
                self._reduce_at_once(n)
            else:
                self.value(n)

    def _held(self, nodes: Sequence[Node]) -> None:
        """Print a stage over a row that is held: issue its loads, if few, before the first is needed, and take sums together."""
        for n in (*under_way(self, nodes), *ahead(self, nodes)):
            self.value(n)
        self._nodes([n for n in nodes if n.op != "reduce"], over_row=True)
        reductions = [n for n in nodes if n.op == "reduce" and n.id not in self.guards]
        groups: dict[tuple[DType, str], list[Node]] = {}
        for n in reductions:
            if n.how in ("sum", "mean") and n.id not in self.known and not self._found(n):
                dims = self.layout.dims_of[n.args[0]] | {self._row().var}
                groups.setdefault((self.node(n.args[0]).dtype, self.layout.shape(dims)), []).append(n)
        for found in groups.values():
            for k in range(0, len(found), FORMULA.sums_together):
                self._sums(found[k : k + FORMULA.sums_together])
        self._nodes(reductions)
        for n in nodes:
            if n.id in self.guards:
                top, plain = self.guards[n.id]
                self.put(f"{self.name(n.id)} = fw.guarded({self.name(top)}, {self.name(plain)})")
                self.known.add(n.id)

    def _require(self, ids: Iterable[int]) -> None:
        """Print values that do not vary along the row and that nodes need."""
        todo, wanted = list(ids), set[int]()
        while todo:
            n = self.node(todo.pop())
            for u in n.uses():
                if u not in wanted and u not in self.known and u not in self.layout.rowwise:
                    wanted.add(u)
                    if self.node(u).op != "reduce":
                        todo.append(u)
        for i in sorted(wanted):
            if self.node(i).op == "reduce":
                self._combine(self.node(i))
            else:
                self.value(self.node(i))

    # rows

    def _row_stage(self, k: int) -> None:
        stage = self.kernel.stages[k]
        if self.config.persistent:
            self._row_position("0")
            self._held(stage.nodes)
            return
        if not self.layout.passes_row(stage):
            return
        todo = self._closure(stage)
        self._require(n.id for n in todo)
        planes = by_planes(self.layout, [n.id for n in todo])
        begin, end = self._row_range(k) if planes is None else ("0", "0")
        for n in todo:
            self._start(n, begin)
        if planes is None:
            self._steps(k, todo, begin, end)
        else:
            self._planes(k, todo, planes)
        for n in todo:
            if n.op == "reduce":
                self._finish(n)

    def _steps(self, k: int, todo: Sequence[Node], begin: str, end: str) -> None:
        if self._peels(todo):
            begin = self._whole_steps(k, todo, begin, end)
        ahead = any(n.recurs for n in todo)
        steps = f"tl.range({begin}, {end}, RB, num_stages={FORMULA.steps_ahead})" if ahead else f"range({begin}, {end}, RB)"
        self._loop(steps, todo, _last(end, self.config.row) if self._backwards(k, todo) else None)

    def _backwards(self, k: int, todo: Sequence[Node]) -> bool:
        """Return whether to read a long row again from its end: there, caches still hold what the pass before read last. From its
        start, each step would evict what a later one needs."""
        ordered = any(n.op in ("scan", "state") or n.how.startswith("arg") or n.how == "m2" for n in todo)
        again = any(self.layout.passes_row(s) for s in self.kernel.stages[:k])
        row = evaluate(product(self.kernel.r), self.kernel.hints)
        return again and not ordered and self.config.split == 1 and row > AGAIN and halves(self.kernel)

    def _planes(self, k: int, todo: Sequence[Node], planes: Layout) -> None:
        """Print the loop over a row's planes, which begins with what all elements of a plane share."""
        flat, outside = self.layout, set(self.known)
        count = product([self.kernel.sizes[a] for a in self._row().axes[:-1]])
        begin, end = self._range(f"plane{k}", count, 1)
        back = self._backwards(k, todo)
        self.put(f"for {'turn' if back else 'plane'} in range({begin}, {end}):")
        with self.indented():
            if back:
                self.put(f"plane = {_last(end, 1)} - turn")
            self.lay(planes)
            self._outer_axes(flat)
            for n in todo:
                if n.op not in ("store", "reduce") and self._row().var not in planes.dims_of[n.id]:
                    self.value(n)
            self._steps(k, todo, "0", self.address.extent(self._row().size))
            self.lay(flat)
        self.known = outside

    def _outer_axes(self, flat: Layout) -> None:
        """Print the axes of the row that a plane has one position of."""
        plane = "tl.full((), plane, tl.int64)" if self.wide else "plane"
        axes = flat.row.axes[:-1] if flat.row else ()
        for j, (a, inner) in enumerate(strides(self.kernel, axes)):
            text = plane if inner == 1 else f"{plane} // {atom(self.address.extent(inner))}"
            size = atom(self.address.extent(self.kernel.sizes[a]))
            self.put(f"{axis_name(self.kernel, a)} = {f'{atom(text)} % {size}' if j else text}")

    def _loop(self, steps: str, todo: Sequence[Node], last: str | None = None) -> None:
        """Print a loop over steps, from the `last` one to the first if that is given."""
        self.put(f"for {'back' if last else 'start'} in {steps}:")
        outside = set(self.known)
        with self.indented():
            if last:
                self.put(f"start = {last} - back")
            self._row_position("start", always=True)
            for n in todo:
                self._step(n)
        self.known = outside

    def _whole_steps(self, k: int, todo: Sequence[Node], begin: str, end: str) -> str:
        """Print the loop over whole steps, without a mask. Return where the rest begins."""
        masked, step = self._row(), self.config.row
        bare = replace(masked, mask=None)
        if begin == "0" and isinstance(masked.size, int):
            whole = str(masked.size // step * step)
        else:
            whole = f"whole{k}"
            self.put(f"{whole} = {begin} + tl.maximum({end} - {begin}, 0) // RB * RB")  # a program may have no share
        self._masked_as(masked, bare)
        self._loop(f"range({begin}, {whole}, RB)", todo)
        self._masked_as(bare, masked)
        return whole

    def _masked_as(self, row: Dim, other: Dim) -> None:
        self.layout.dims, self.layout.row = [other if d is row else d for d in self.layout.dims], other

    def _peels(self, todo: Sequence[Node]) -> bool:
        """Return whether whole steps, which need no mask, are apart from the rest of the row: where masks would be in the way of
        loads of vectors, or every lane would have to count what it took."""
        masked = self._row().mask is not None and self.layout.each > 1
        return masked and any(n.op == "scan" or n.how == "m2" for n in todo)

    placed = False

    def _row_position(self, start: str, always: bool = False) -> None:
        row = self.layout.row
        if row is None or (self.placed and not always):
            return
        self.placed = True
        lanes = self.layout.lanes()
        text = lanes if start == "0" else f"{start} + {lanes}"
        self.put(f"{row.var} = {f'({text}).to(tl.int64)' if self.wide else text}")
        self._finish_dim(row)

    def _row_range(self, k: int) -> tuple[str, str]:
        """Return the first and last row element of this program."""
        return self._range(str(k), product(self.kernel.r), self.config.row)

    def _range(self, name: str, size: Extent, step: int) -> tuple[str, str]:
        """Return where this program's share of `size` begins and ends, a multiple of `step`."""
        limit, split = self.address.extent(size), self.config.split
        if not self.shares_row:
            return "0", limit
        if isinstance(size, int):
            chunk = str(-(-size // (step * split)) * step)
        else:
            chunk = f"({limit} + {step * split - 1}) // {step * split} * {step}"
        self.put(f"begin{name} = part * {atom(chunk)}")
        self.put(f"end{name} = tl.minimum(begin{name} + {atom(chunk)}, {limit})")
        return f"begin{name}", f"end{name}"

    def _closure(self, stage: Stage) -> list[Node]:
        """Return the stage's nodes, and the row values of earlier stages that they need, which are computed again."""
        todo, found = [n.id for n in self.layout.roots(stage)], set[int]()
        while todo:
            i = todo.pop()
            if i in found:
                continue
            found.add(i)
            todo.extend(u for u in self.node(i).uses() if u in self.layout.rowwise)
        return [self.node(i) for i in sorted(found)]

    def operand_block(self, i: int) -> str:
        """Return a value as a full block over the row, for reductions."""
        dims, row = self.layout.dims_of[i], self._row()
        text = self.operand(i)
        if row.var in dims and self.node(i).op != "const":
            return text
        return f"tl.broadcast_to({text}, {self.layout.shape(dims | {row.var})})"

    def _row(self) -> Dim:
        if self.layout.row is None:
            raise Unsupported("a row stage without row axes")
        return self.layout.row

    def _masked(self, i: int, fill: str) -> str:
        row, text = self._row(), self.operand_block(i)
        return text if row.mask is None else f"tl.where({row.mask}, {text}, {fill})"

    def _count(self, dtype: DType) -> str:
        return f"tl.full((), {self.limit}, {TRITON[dtype]})"

    def _sums(self, group: Sequence[Node]) -> None:
        """Print sums and means of blocks of one shape and type together: warps then synchronize once."""
        if len(group) == 1:
            return self._reduce_at_once(group[0])
        dtype, axis = self.node(group[0].args[0]).dtype, self.layout.row_axis()
        blocks = ", ".join(self._masked(n.args[0], red.identity(n.how, dtype)) for n in group)
        self.put(f"{', '.join(self.name(n.id) for n in group)} = fw.reduce_sum{len(group)}({blocks}, {axis})")
        for n in group:
            self.known.add(n.id)
            if n.how == "mean":
                v, i = self.name(n.id), n.args[0]
                self.means[self.alias.get(i, i)] = v
                self.put(f"{v} = {self._divided(v, dtype)}")

    def _reduce_at_once(self, n: Node) -> None:
        """Print a reduction over a row that is held whole."""
        if n.id in self.known or self._found(n):
            return
        self.known.add(n.id)
        v, i, dtype = self.name(n.id), n.args[0], self.node(n.args[0]).dtype
        axis, x = self.layout.row_axis(), self._masked(n.args[0], red.identity(n.how, dtype))
        if n.how == "m2":
            mean = self.means.get(self.alias.get(i, i), f"{v}_mean")
            if mean == f"{v}_mean":
                self.put(f"{mean} = {self._divided(f'fw.reduce_sum({x}, {axis})', dtype)}")
            self.put(f"{v}_d = {self.operand_block(i)} - {mean}")
            d, mask = f"{v}_d * {v}_d", self._row().mask
            self.put(f"{v} = fw.reduce_sum({f'tl.where({mask}, {d}, 0.0)' if mask else d}, {axis})")
        elif n.how.startswith("arg"):
            self.put(f"{v}_max, {v} = fw.reduce_{n.how}({x}, {self._positions(i)}, {axis})")
            self.put(f"{v} = {v}.to(tl.int64)")
        elif n.how == "mean":
            self.means[self.alias.get(i, i)] = v
            self.put(f"{v} = {self._divided(f'fw.reduce_sum({x}, {axis})', dtype)}")
        else:
            self.put(f"{v} = {red.fold(n.how, x, axis)}")

    def _positions(self, i: int) -> str:
        row = self._row()
        shape = self.layout.shape(self.layout.dims_of[i] | {row.var})
        return row.var if self.layout.rank == 1 else f"tl.broadcast_to({row.var}, {shape})"

    def _divided(self, text: str, dtype: DType) -> str:
        return f"fw.divide({text}, {self._count(dtype)})"

    def scan(self, n: Node) -> None:
        """Print a scan over a row that is held whole."""
        self.put(f"{self.name(n.id)} = fw.scan_{n.how}({self._scanned(n)}, {self.layout.row_axis()})")

    def _scanned(self, n: Node) -> str:
        """Return the operand of a scan, as a block of its rows."""
        x, dims = self._masked(n.args[0], red.identity(n.how, n.dtype)), self.layout.dims_of
        same = dims[n.id] == dims[n.args[0]] | {self._row().var}
        return x if same else f"tl.broadcast_to({x}, {self.layout.shape(dims[n.id])})"

    # loops over the row

    def _start(self, n: Node, begin: str) -> None:
        """Print the variables that are carried through the loop, which starts at row element `begin`."""
        if n.recurs:
            before = self.operand(self.node(n.args[1]).args[0])
            self.put(f"carry{n.args[1]} = tl.broadcast_to({before}, {self.layout.shape(self.layout.dims_of[n.id])})")
        elif n.op == "scan":
            shape = self.layout.shape(self.layout.dims_of[n.id] - {self._row().var})
            shape = self.layout.carried(()) if self.layout.each > 1 else shape
            self.put(red.Carry(f"carry{n.id}", red.identity(n.how, n.dtype), n.dtype).init(shape))
        if n.op != "reduce":
            return
        dtype = self.node(n.args[0]).dtype
        shape = self.layout.shape(self.layout.dims_of[n.args[0]] | {self._row().var})
        carried = self.layout.carried(self.layout.dims_of[n.args[0]]) if self._folds(n) else shape
        for c in red.carries(n, dtype, counts=self._folds(n)):
            self.put(c.init(carried))
        if n.id in self.joined:
            self.put(red.Carry(f"acc{self.joined[n.id][0]}", red.identity("sum", dtype), dtype).init(carried))
        if n.how.startswith("arg"):
            lanes = f"tl.arange(0, RB){self.layout.spread(self._row())}"
            lanes = lanes if begin == "0" else f"{begin} + {lanes}"
            spread = lanes if self.layout.rank == 1 else f"tl.broadcast_to({lanes}, {shape})"
            self.put(f"at{n.id} = {f'({spread}).to(tl.int64)' if self.wide else spread}")

    def _folds(self, n: Node) -> bool:
        """Return whether a lane combines elements of a step before it adds them to what it carries."""
        return self.layout.each > 1 and (n.how in ("sum", "mean", "m2") or n.id in self.joined)

    def _step(self, n: Node) -> None:
        """Print a node inside the loop."""
        if n.op == "store":
            self.memory.store(n, over_row=True)
        elif n.op == "scan":
            self.known.add(n.id)
            self._scan_step(n)
        elif n.op == "reduce":
            self._reduce_step(n)
        else:
            self.value(n)

    def _scan_step(self, n: Node) -> None:
        v, axis, carry = self.name(n.id), self.layout.row_axis(), f"carry{n.id}"
        if n.recurs:  # one element of the row at a time
            new, dims = self.operand(n.args[0]), self.layout.dims_of
            whole = dims[n.args[0]] == dims[n.id] and self.node(n.args[0]).op != "const"
            self.put(f"{v} = {new if whole else f'tl.broadcast_to({new}, {self.layout.shape(dims[n.id])})'}")
            self.put(f"carry{n.args[1]} = {v}")
            return
        if self.layout.each > 1:
            call = f'fw.scan_lanes({self._scanned(n)}, {carry}, "{n.how}", {self.layout.each})'
            self.put(f"{v}, {carry} = {call}")
            return
        self.put(f"{v}_x = {self._scanned(n)}")
        self.put(f"{v} = {red.step(n.how, n.dtype, carry, f'fw.scan_{n.how}({v}_x, {axis})')}")
        self.put(f"{carry} = {red.step(n.how, n.dtype, carry, red.fold(n.how, f'{v}_x', axis))}")

    def _reduce_step(self, n: Node) -> None:
        i, dtype, mask = n.args[0], self.node(n.args[0]).dtype, self._row().mask
        acc = f"acc{n.id}"
        if n.id in self.joined:
            both, x = f"{acc}, acc{self.joined[n.id][0]}", self._masked(i, red.identity(n.how, dtype))
            call = f"fw.online_lanes({both}, {x}, {self.layout.each})" if self._folds(n) else f"fw.online({both}, {x})"
            self.put(f"{both} = {call}")
        elif self._folds(n) and n.how == "m2":
            state = f"mean{n.id}, {acc}, n{n.id}"
            more = f"rest({state}, {self._masked(i, '0.0')}, {mask}" if mask else f"lanes({state}, {self.operand_block(i)}"
            self.put(f"{state} = fw.welford_{more}, {self.layout.each})")
        elif self._folds(n):
            x = f"fw.lanes_sum({self._masked(i, red.identity(n.how, dtype))}, {self.layout.each})"
            self.put(f"{acc} = {red.step(n.how, dtype, acc, x)}")
        elif n.how == "m2":
            self._welford_step(n, dtype)
        elif n.how.startswith("arg"):
            x = self.operand_block(i)
            better = f"fw.beats_{n.how[3:]}({x}, {acc})"
            self.put(f"better{n.id} = {f'{better} & {mask}' if mask else better}")
            self.put(f"{acc} = tl.where(better{n.id}, {x}, {acc})")
            self.put(f"at{n.id} = tl.where(better{n.id}, {self._row().var}, at{n.id})")
        else:
            self.put(f"{acc} = {red.step(n.how, dtype, acc, self._masked(i, red.identity(n.how, dtype)))}")

    def _welford_step(self, n: Node, dtype: DType) -> None:
        """Update mean and squared deviations per lane. The count is the number of steps: a lane that is masked in the
        last step does not take that step."""
        x, mask, begin = self.operand_block(n.args[0]), self._row().mask, self._begin(n)
        k, mean, acc = f"share{n.id}", f"mean{n.id}", f"acc{n.id}"
        done = "start // RB" if begin == "0" else f"(start - {begin}) // RB"
        one = constant(1.0, dtype)
        self.put(f"{k} = fw.divide({one}, tl.full((), {done} + 1, {TRITON[dtype]}))")
        self.put(f"d{n.id} = {x} - {mean}")
        self.put(f"next{n.id} = {mean} + d{n.id} * {k}")
        more = f"{acc} + d{n.id} * ({x} - next{n.id})"
        self.put(f"{acc} = {f'tl.where({mask}, {more}, {acc})' if mask else more}")
        self.put(f"{mean} = {f'tl.where({mask}, next{n.id}, {mean})' if mask else f'next{n.id}'}")

    def _begin(self, n: Node) -> str:
        return f"begin{self.layout.stage_of[n.id]}" if self.shares_row else "0"

    def _finish(self, n: Node) -> None:
        """Print the reduction's value after the loop; where programs share the row, their partial results."""
        v, dtype, axis = self.name(n.id), self.node(n.args[0]).dtype, self.layout.row_axis()
        acc = f"acc{n.id}"
        if n.id in self.joined:
            return self._finish_online(n, dtype)
        if n.how == "m2":
            counts = f"n{n.id}" if self._folds(n) else self._lane_counts(n, dtype)
            self.put(f"{v}_mean, {v}, {v}_n = fw.reduce_m2(mean{n.id}, {acc}, {counts}, {axis})")
            values = [f"{v}_mean", v]
        elif n.how.startswith("arg"):
            self.put(f"{v}_max, {v} = fw.reduce_{n.how}({acc}, at{n.id}, {axis})")
            self.put(f"{v} = {v}.to(tl.int64)")
            values = [f"{v}_max", v]
        else:
            self.put(f"{v} = {red.fold(n.how, acc, axis)}")
            values = [v]
        if self.shares_row:
            self._leave(n, dtype, values)
        else:
            if n.how == "mean":
                self.put(f"{v} = {self._divided(v, dtype)}")
            self.known.add(n.id)

    def _finish_online(self, n: Node, dtype: DType) -> None:
        """Print a maximum and the sums that were computed with it."""
        total = self.joined[n.id][0]
        self._online(n.id, f"acc{n.id}", f"acc{total}", last=not self.shares_row)
        if self.shares_row:
            self._leave(n, dtype, [self.name(n.id)])
            self._leave(self.node(total), dtype, [f"whole{n.id}"])
        else:
            self.known.update((n.id, *self.joined[n.id]))

    def _online(self, top: int, tops: str, totals: str, last: bool) -> None:
        """Print a maximum and, at `last`, its sums from those of lanes or programs."""
        axis = self.layout.row_axis()
        sums = {i: self.layout.online[i].guarded for i in self.joined[top]}
        plain = next((self.name(i) for i, guarded in sums.items() if last and not guarded), f"whole{top}")
        self.put(f"{self.name(top)}, {plain} = fw.reduce_online({tops}, {totals}, {axis}, {last})")
        for i, guarded in sums.items() if last else ():
            if guarded or self.name(i) != plain:
                self.put(f"{self.name(i)} = {f'fw.guarded({self.name(top)}, {plain})' if guarded else plain}")

    def _lane_counts(self, n: Node, dtype: DType) -> str:
        """Return how many elements each lane took, as a block like the accumulators."""
        row, begin = self._row(), self._begin(n)
        lanes = f"tl.arange(0, RB){self.layout.spread(row)}"
        shape = self.layout.shape(self.layout.dims_of[n.args[0]] | {row.var})
        end = f"end{self.layout.stage_of[n.id]}" if self.shares_row else self.limit
        length = end if begin == "0" else f"{end} - {begin}"
        self.put(f"n{n.id} = tl.maximum({atom(length)} - {lanes} + (RB - 1), 0) // RB")
        return f"tl.broadcast_to(n{n.id}, {shape}).to({TRITON[dtype]})"

    # rows that several programs share

    def _part_at(self, part: str) -> str:
        points = self.address.extent(product(self.kernel.p))
        return f"{part} * {atom(points)} + {self._point()}"

    def _point(self) -> str:
        """Return the position of a program's points among all, whatever axes its tiles have."""
        axes = tuple(range(len(self.kernel.p)))
        tile = next((d for d in self.layout.dims if d.axes == axes), None)
        return tile.var if tile else atom(self.address.index(Index(0, strides(self.kernel, axes))))

    def _point_dims(self) -> frozenset[str]:
        return self.layout.vector_names(over_row=False)

    def _leave(self, n: Node, dtype: DType, values: list[str]) -> None:
        mask = self.memory.domain_mask(self._point_dims())
        for (suffix, _), value in zip(red.parts(n, dtype), values, strict=True):
            where = f"part{suffix}_ptr + {self._part_at('part')}"
            if self.layout.rank > 1 and not self._point_dims():
                where = f"tl.broadcast_to({where}, [1, 1])"
            self.put(f"tl.store({where}, {value}{f', mask={mask}' if mask else ''})")

    def _combine(self, n: Node) -> None:
        """Compute a reduction from the partial results of an earlier launch's programs."""
        if n.id in self.known:
            return
        top = self.layout.online[n.id].top if n.id in self.layout.online else n.id
        sums = self.joined.get(top, [])
        self.known.update((n.id, top, *sums))
        got = [name for i in (top, *sums[:1]) for name in self._parts_of(self.node(i))]
        v, dtype, axis = self.name(n.id), self.node(n.args[0]).dtype, self.layout.row_axis()
        if sums:
            return self._online(top, got[0], got[1], last=True)
        if n.how == "m2":
            counts = self._part_counts(f"parts{n.id}", dtype)
            self.put(f"{v}_mean, {v}, {v}_n = fw.reduce_m2({got[0]}, {got[1]}, {counts}, {axis})")
        elif n.how.startswith("arg"):
            self.put(f"{v}_max, {v} = fw.reduce_{n.how}({got[0]}, {got[1]}, {axis})")
        else:
            folded = red.fold(n.how, got[0], axis)
            self.put(f"{v} = {self._divided(folded, dtype) if n.how == 'mean' else folded}")

    def _parts_of(self, n: Node) -> list[str]:
        """Load the partial results of one reduction: blocks with the parts along the row's axis."""
        parts, got = f"parts{n.id}", []
        self.put(f"{parts} = tl.arange(0, {self.config.split}){self.layout.spread(self._row())}")
        mask = self.memory.domain_mask(self._point_dims())
        for suffix, _ in red.parts(n, self.node(n.args[0]).dtype):
            got.append(f"got{suffix}")
            where = f"part{suffix}_ptr + {self._part_at(parts)}"
            self.put(f"got{suffix} = tl.load({where}{f', mask={mask}' if mask else ''})")
        return got

    def _part_counts(self, parts: str, dtype: DType) -> str:
        split, step = self.config.split, self.config.row
        size = product(self.kernel.r)
        chunk = (
            str(-(-size // (step * split)) * step)
            if isinstance(size, int)
            else f"(({self.limit} + {step * split - 1}) // {step * split} * {step})"
        )
        left = f"tl.minimum(tl.maximum({self.limit} - {parts} * {chunk}, 0), {chunk}).to({TRITON[dtype]})"
        return left if self.layout.rank == 1 else f"tl.broadcast_to({left}, {self._part_shape()})"

    def _part_shape(self) -> str:
        """Return the shape of a block of parts: like a row block, with the parts along the row's axis."""
        return self.layout.shape(self._point_dims() | {self._row().var}).replace("RB", str(self.config.split))


def _last(size: str, step: int) -> str:
    """Return where the last step of so many elements begins."""
    return str((int(size) - 1) // step * step) if size.isdigit() else f"({atom(size)} - 1) // {step} * {step}"
