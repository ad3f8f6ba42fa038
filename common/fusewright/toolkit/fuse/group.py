"""Decides which ops share a kernel: greedily, in topological order, by the bytes of loads and stores saved."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusewright.interface import OpView, Splits, Value
from fusewright.plan.order import closure
from fusewright.toolkit.fuse.build import Unit, loop_order, segments, size_hints, space_for, units_of
from fusewright.toolkit.ir import Builder, IndexTooComplex, Val
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.symbols import size_hint
from fusewright.toolkit.rules.evaluate import KernelEvaluator, KernelRow, Space, compute_dtype
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.kinds import Domain, Level, Map, Row, Scatter
from fusewright.toolkit.rules.space import At, NotAligned, ShapeMismatch, product, shape_of, stride_of

MAX_UNITS = 48
"""The most ops in one kernel."""

MAX_BUFFERS = 24
"""The most tensors that one kernel reads and writes: pointers that do not fit in registers cost time."""

NEAR = 24
"""A unit joins a kernel that only reads the same values if its ops are at most this far away in the graph, to keep lifetimes
short.
"""


PASS_COST = 40
"""Vector instructions that take as long as storing an element and reading it again: about six bytes on a GPU."""

ONE_PASS = frozenset(
    """
    sum mean prod prod_all amax amin any all vector_norm mse_loss smooth_l1_loss huber_loss soft_margin_loss bce bce_with_logits
    """.split()
)
"""Reductions that pass over a row once. Where kernels reduce parts of it, these may store what they are computed with."""

TINY = 64
"""Maps of at most this many elements share kernels even without common values: a launch costs more than they do."""


@dataclass(eq=False)
class Group:
    """The ops of one kernel. `levels` maps the values that it computes to "full" (per element of the domain) or "row". `once`: its
    elements are stored while its rows are reduced, and not computed again for what needs the results."""

    id: int
    domain: Domain
    units: list[Unit] = field(default_factory=list)
    levels: dict[int, Level] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    last: int = 0
    once: bool = False
    builder: Builder = field(init=False)
    space: Space = field(init=False)

    def __post_init__(self) -> None:
        self.set_domain(self.domain)

    def set_domain(self, domain: Domain) -> None:
        self.domain = domain
        self.builder, self.space = space_for(domain, loop_order(domain, None, True))
        self.segments = segments(domain)
        self.numel = product(domain.shape)
        outer = tuple(s for d, s in enumerate(domain.shape) if d not in domain.dims)
        self.row_numel: Extent | None = product(outer) if domain.dims else None

    @property
    def has_rows(self) -> bool:
        return bool(self.domain.dims)

    @property
    def scatters(self) -> bool:
        return any(isinstance(u.rule, Scatter) for u in self.units)


class Probe(KernelEvaluator):
    """Runs a rule without building a kernel, to learn whether it reads the group's values at the element where the group has
    them, and what it loads.
    """

    def __init__(self, flow: Flow, space: Space, builder: Builder, levels: Mapping[int, Level]) -> None:
        super().__init__(builder, flow, frozenset(levels))
        self.space, self.levels = space, levels
        self.reads: dict[int, int] = {}

    def _value(self, v: Value, at: At) -> Val:
        level = self.levels.get(v.id)
        if level is None:
            return super()._value(v, at)
        if at.linear != (self.space.base if level == "full" else self.space.row).linear:
            raise NotAligned("read at another element")
        return self._dummy(v)

    def load(self, v: Value, at: At) -> Val:
        assert v.spec is not None
        self.address(v.spec, at)
        self.reads[v.id] = v.spec.bytes_hint()
        return self._dummy(v)

    def _dummy(self, v: Value) -> Val:
        assert v.spec is not None
        return self.b.const(0, compute_dtype(v.spec.dtype))


class Grouper:
    """Groups ops; see the module docstring. `fixed` maps ops that a call computes to the number of that call, and `reads` has the
    values that each call reads: its ops may name others, of which those are made."""

    def __init__(
        self, flow: Flow, ops: Sequence[OpView], fixed: Mapping[int, int], reads: Sequence[Sequence[Value]],
        needed: frozenset[int], solo: frozenset[int], splits: Splits,
    ) -> None:  # fmt: skip
        self.flow, self.ops, self.fixed, self.needed, self.solo, self.splits = flow, ops, fixed, needed, solo, splits
        self.reads = reads
        self.groups: list[Group | None] = []
        self.group_of: dict[int, Group] = {}
        self.scatter_of: dict[int, Group] = {}
        self._needs: list[int] = []
        self._reach: dict[int, int] = {}
        self._readers: dict[int, list[Group]] = {}
        self._calls: dict[int, int] = {}
        self._tiny: dict[Extent, Group] = {}

    def run(self) -> list[Group]:
        """Return the groups, each in topological order."""
        for position, op in enumerate(self.ops):
            if op.id in self.fixed:
                self._call(op)
            elif self.flow.is_view(op) or self.flow.is_inline(op):
                mask = self._mask(op.inputs())
                self._reach.update((v.id, mask) for v in op.outs)
            else:
                for unit in units_of(self.flow, op):
                    self.place(unit, position)
        return [g for g in self.groups if g is not None]

    def place(self, unit: Unit, position: int) -> Group:
        """Put a unit into the best group that accepts it, or into a new one."""
        group = None if unit.op.id in self.solo else self._best(unit, position)
        if group is None:
            group = Group(self._fresh(), unit.domain())
            self.groups[group.id] = group
            probe = self._probed(unit, group, group.space, {})
            self._enter(unit, group, probe.reads if probe else {}, position)
            if isinstance(unit.rule, Map) and isinstance(group.numel, int) and group.numel <= TINY:
                self._tiny[group.numel] = group
        return group

    def alone(self, unit: Unit, position: int) -> Group:
        """Make a group for an inlined op whose result is needed as a tensor. One-element ops that only connect inputs of the
        region to its outputs (step counters) share a group, since they cannot introduce a cycle."""
        outside = not self._mask(unit.op.inputs()) and not any(self.flow.users.get(v.id) for v in unit.op.outs)
        size = product(unit.domain().shape)
        group = self._tiny.get(-1) if outside and size == 1 else None
        if group is None or len(group.units) >= MAX_BUFFERS // 2:
            group = Group(self._fresh(), unit.domain())
            self.groups[group.id] = group
            if outside and size == 1:
                self._tiny[-1] = group
        self._enter(unit, group, {}, position)
        return group

    # ---- dependencies ----

    def _fresh(self) -> int:
        self.groups.append(None)
        self._needs.append(0)
        return len(self.groups) - 1

    def _mask(self, values: Iterable[Value]) -> int:
        mask = 0
        for v in values:
            mask |= self._reach.get(v.id, 0)
        return mask

    def _call(self, op: OpView) -> None:
        call = self.fixed[op.id]
        if call not in self._calls:
            self._calls[call] = self._fresh()
        at = self._calls[call]
        mask = self._mask((*op.inputs(), *self.reads[call])) & ~(1 << at)
        self._needs[at] |= mask
        self._reach.update((v.id, mask | 1 << at) for v in op.outs)

    def _would_wait(self, unit: Unit, group: Group) -> bool:
        """Whether the unit depends on the group through something outside it, which would make a cycle."""
        outside = 0
        for v in unit.op.inputs():
            for s in self.flow.sources(v):
                if self.group_of.get(s.id) is not group:
                    outside |= self._reach.get(s.id, 0)
        return bool(closure(outside & ~(1 << group.id), self._needs) >> group.id & 1) or bool(outside >> group.id & 1)

    def _enter(self, unit: Unit, group: Group, reads: Mapping[int, int], position: int) -> None:
        mask = self._mask(unit.op.inputs())
        self._needs[group.id] |= mask & ~(1 << group.id)
        group.units.append(unit)
        group.last = position
        if isinstance(unit.rule, Scatter):
            self.scatter_of[unit.op.id] = group
            self._reach[unit.op.out.id] = mask | 1 << group.id
        for v, level in unit.outs_in(group.numel):
            group.levels[v.id] = level
            self.group_of[v.id] = group
            self._reach[v.id] = mask | 1 << group.id
        for i, size in reads.items():
            group.reads[i] = size
            readers = self._readers.setdefault(i, [])
            if group not in readers:
                readers.append(group)

    # ---- choice ----

    def _best(self, unit: Unit, position: int) -> Group | None:
        """The group that accepts the unit and shares the most bytes with it. Compatible producers are merged first."""
        scores: dict[Group, int] = {}
        makers: list[Group] = []
        for v in {s.id: s for i in unit.op.inputs() for s in self.flow.sources(i)}.values():
            size = v.spec.bytes_hint() if v.spec is not None else 0
            maker = self.group_of.get(v.id)
            if maker is not None:
                makers.append(maker)
                scores[maker] = scores.get(maker, 0) + 2 * size
            for reader in self._readers.get(v.id, ()):
                if reader is not maker and position - reader.last <= NEAR:
                    scores[reader] = scores.get(reader, 0) + size
        tiny = self._tiny.get(product(unit.domain().shape)) if isinstance(unit.rule, Map) else None
        if tiny is not None and self.groups[tiny.id] is tiny:
            scores.setdefault(tiny, 0)
        for group in sorted(scores, key=lambda g: (-scores[g], -g.id)):
            if not isinstance(unit.rule, Scatter) or group in makers or group.scatters:
                reads = self._joined(unit, group)
                if reads is not None:
                    self._enter(unit, group, reads, position)
                    self._merge_others(group, makers)
                    return group
        return None

    def _joined(self, unit: Unit, group: Group) -> dict[int, int] | None:
        """The values that the unit would load in the group; None if it cannot join. A row op gives a map group its rows."""
        if len(group.units) >= MAX_UNITS or self._would_wait(unit, group):
            return None
        if group.scatters and not all(map(replaces, (unit, *(u for u in group.units if isinstance(u.rule, Scatter))))):
            return None
        domain = self._common_domain(unit, group)
        if domain is None:
            return None
        space, builder = group.space, group.builder
        if domain is not group.domain:
            builder, space = space_for(domain, loop_order(domain, None, True))
        probe = self._probed(unit, group, space, group.levels, builder)
        if probe is None or len({*probe.reads, *group.reads}) + len(group.levels) > MAX_BUFFERS + len(group.units):
            return None
        if domain is not group.domain:
            group.once = self._stores_first([unit], domain, group)
            group.set_domain(domain)
        return probe.reads

    def _common_domain(self, unit: Unit, group: Group) -> Domain | None:
        """The domain of the group once the unit has joined, or None."""
        wanted = unit.domain()
        n = product(wanted.shape)
        if in_parts(group.units, group.domain, self.splits):
            # in a kernel split by parts of its rows, what needs their results would run on one worker
            alike = in_parts([unit], wanted, self.splits) and segments(wanted) == group.segments
            beside = n == group.numel and isinstance(unit.rule, Map) and one_pass(group.units) and self._is_beside_rows(unit, group)
            return group.domain if alike or n == group.row_numel or beside else None
        shares = one_pass([unit]) and not group.has_rows
        if not shares and in_parts([unit], wanted, self.splits) and not self._private([unit], group):
            return None
        if group.once and not (n == group.row_numel or (one_pass([unit]) and self._is_beside_rows(unit, group))):
            return None
        if isinstance(unit.rule, Row):
            if group.has_rows:
                return group.domain if segments(wanted) == group.segments else None
            free = self._passes_once(unit, wanted) or not self._stores_first([unit], wanted, group)
            return wanted if free and n == group.numel else None
        if isinstance(unit.rule, Scatter):
            return group.domain if n == group.numel and not group.has_rows else None
        if n == group.numel:
            return None if self._streams(group) else group.domain
        return group.domain if n == group.row_numel else None

    def _is_beside_rows(self, unit: Unit, group: Group) -> bool:
        """Whether a unit needs no result of the group's rows, so that it is computed with their elements."""
        read = (s.id for v in unit.op.inputs() for s in self.flow.sources(v))
        return not isinstance(unit.rule, Scatter) and all(group.levels.get(i) != "row" for i in read)

    def _passes_once(self, unit: Unit, domain: Domain) -> bool:
        """Whether rows in parts, or too long to be held and next to each other in memory, are passed over once: nothing is computed
        again for them."""
        if not one_pass([unit]):
            return False
        return in_parts([unit], domain, self.splits) or (reads_again(unit, domain, self.splits) and not is_column(domain))

    def _streams(self, group: Group) -> bool:
        """Whether the group reduces columns too long to be held, of which nothing is left for a second pass."""
        if not group.has_rows or not is_column(group.domain):
            return False
        row = product(tuple(group.domain.shape[d] for d in group.domain.dims))
        return not isinstance(row, int) or row > self.splits.held_column

    def _stores_first(self, units: Sequence[Unit], domain: Domain, group: Group) -> bool:
        """Whether the values of a group are stored before these units reduce its columns, rather than computed with them: if others
        need them too, or each of several passes would compute them again at a high cost."""
        passes = any(in_passes(u, domain, self.splits) for u in units)
        again = any(reads_again(u, domain, self.splits) for u in units)
        if (passes or again) and any(self._cost(u) > PASS_COST for u in group.units):
            return True
        dear = passes or is_column(domain) or (again and sum(group.reads.values()) > 2 * _largest(units))
        return dear and not self._private(units, group)

    def _cost(self, unit: Unit) -> int:
        """Return the highest cost of an op that a map computes: its own, or one inlined in it."""
        rules = [unit.rule, *(self.flow.rules(op)[0] for op in self.flow.inlined(unit.op.inputs()))]
        return max((rule.cost for rule in rules if isinstance(rule, Map)), default=0)

    def _private(self, units: Sequence[Unit], group: Group) -> bool:
        """Whether only the group and these units use the group's values, so that a column reduction may absorb it."""
        inside = {u.op.id for u in (*group.units, *units)}
        return all(self._read_within(i, inside) for i in group.levels)

    def _read_within(self, value: int, ops: Collection[int]) -> bool:
        """Whether only these ops read a value, also by way of inlined ops."""
        todo, inlined = [value], set[int]()
        while todo:
            v = todo.pop()
            users = [u for u in self.flow.users.get(v, ()) if u.id not in ops and u.id not in inlined]
            if v in self.needed or not all(map(self.flow.is_inline, users)):
                return False
            inlined.update(u.id for u in users)
            todo += [out.id for u in users for out in u.outs]
        return True

    def _probed(
        self, unit: Unit, group: Group, space: Space, levels: Mapping[int, Level], builder: Builder | None = None
    ) -> Probe | None:
        probe = Probe(self.flow, space, builder or group.builder, levels)
        try:
            if isinstance(unit.rule, Row):
                unit.rule.code(KernelRow(probe, space, unit.domain()), unit.op)
            elif isinstance(unit.rule, Scatter):
                for v in unit.op.inputs():  # the start value of the result is read before the kernel runs
                    if v is unit.op.args[0] and any(s.id in levels for s in self.flow.sources(v)):
                        return None
                shape = unit.rule.shape(unit.op)
                unit.rule.code(probe, unit.op, space.base.reshape(shape))
            elif isinstance(unit.rule, Map):
                for v, level in unit.outs_in(product(space.domain.shape)):
                    at = (space.base if level == "full" else space.row).reshape(shape_of(v.spec))
                    unit.rule.code(probe, unit.op, unit.op.outs.index(v), at)
        except (NotAligned, IndexTooComplex, ShapeMismatch):
            return None
        return probe

    # ---- merging ----

    def _merge_others(self, group: Group, makers: Sequence[Group]) -> None:
        for other in makers:
            if other is not group and self.groups[other.id] is other and self._mergeable(group, other):
                self._merge(group, other)

    def _mergeable(self, a: Group, b: Group) -> bool:
        if a.scatters or b.scatters or len(a.units) + len(b.units) > MAX_UNITS:
            return False
        if len({*a.reads, *b.reads}) + len(a.levels) + len(b.levels) > MAX_BUFFERS + len(a.units) + len(b.units):
            return False
        if b.has_rows and (not a.has_rows or a.once or b.once or a.segments != b.segments):
            return False
        if a.numel != b.numel or self._streams(a):
            return False
        if any(u.op.id in self.solo for u in b.units):
            return False
        if a.has_rows and not b.has_rows and self._stores_first(a.units, a.domain, b):
            return False
        around_a = closure(self._needs[a.id] & ~(1 << b.id | 1 << a.id), self._needs)
        around_b = closure(self._needs[b.id] & ~(1 << a.id | 1 << b.id), self._needs)
        if around_a >> b.id & 1 or around_b >> a.id & 1 or self._needs[b.id] >> a.id & 1:
            return False
        return self._fits_together(a, b)

    def _fits_together(self, a: Group, b: Group) -> bool:
        """Whether the units of each group read the other's values at the element where it has them."""
        levels = {**a.levels, **b.levels}
        for unit in a.units:
            if any(s.id in b.levels for v in unit.op.inputs() for s in self.flow.sources(v)) and (
                self._probed(unit, a, a.space, levels) is None
            ):
                return False
        return all(isinstance(u.rule, Row) or self._probed(u, a, a.space, levels) is not None for u in b.units)

    def _merge(self, a: Group, b: Group) -> None:
        """Merge `b` into `a`. The number of `b` remains valid as an alias of `a`."""
        order = {op.id: i for i, op in enumerate(self.ops)}
        a.units = sorted([*b.units, *a.units], key=lambda u: order[u.op.id])
        a.levels.update(b.levels)
        a.reads.update(b.reads)
        self._needs[a.id] = (self._needs[a.id] | self._needs[b.id]) & ~(1 << a.id | 1 << b.id)
        self._needs[b.id] = 1 << a.id
        for i in b.levels:
            self.group_of[i] = a
            self._reach[i] |= 1 << a.id
        for readers in self._readers.values():
            if b in readers:
                readers[:] = [g for g in readers if g is not b and g is not a] + [a]
        self.groups[b.id] = None


def replaces(unit: Unit) -> bool:
    """Whether a unit is a scatter that only overwrites elements; several such scatters over one domain share a kernel."""
    rule = unit.rule
    return (
        isinstance(rule, Scatter)
        and rule.finish(unit.op) is None
        and not any(a.how for a in rule.accumulators(unit.op))
    )


def in_parts(units: Iterable[Unit], domain: Domain, splits: Splits) -> bool:
    """Whether units reduce rows so long and so few that their kernel runs in two steps (see `transform.split`)."""
    rules = [u.rule for u in units if isinstance(u.rule, Row)]
    if not rules:  # asked for each op that may join a group: without looking at all of the group's sizes
        return False
    row = product(tuple(domain.shape[d] for d in domain.dims))
    points = product(tuple(s for d, s in enumerate(domain.shape) if d not in domain.dims))
    known = isinstance(row, int) and isinstance(points, int)
    hints = {} if known else size_hints([v for u in units for v in (*u.op.inputs(), *u.op.outs)])
    if size_hint(row, hints) < splits.long_row or size_hint(points, hints) > splits.few_points:
        return False
    return all(level == "row" for rule in rules for level in rule.levels)


def one_pass(units: Iterable[Unit]) -> bool:
    """Whether the rows of units are passed over once (see `ONE_PASS`)."""
    return all(u.op.op in ONE_PASS for u in units if isinstance(u.rule, Row))


def in_passes(unit: Unit, domain: Domain, splits: Splits) -> bool:
    """Whether a row unit has long rows that are strided in memory, as those of channels-last images are, which nothing holds from
    one pass to the next (where they are few, each pass is a kernel: see `transform.split_columns`)."""
    full = [v for v in unit.op.inputs() if v.spec is not None and shape_of(v.spec) == domain.shape]
    if not isinstance(unit.rule, Row) or not any(_is_strided(v, domain) for v in full):
        return False
    sizes = [size_hint(s, size_hints(full)) for s in domain.shape]
    row, numel = math.prod(sizes[d] for d in domain.dims), math.prod(sizes)
    few = numel <= splits.passes_again * row
    return few and row >= splits.column_rows and numel >= splits.column_elements


def reads_again(unit: Unit, domain: Domain, splits: Splits) -> bool:
    """Whether a row unit has rows too long to be held, so that what it reads is computed again in each pass."""
    if not isinstance(unit.rule, Row):
        return False
    row = product(tuple(domain.shape[d] for d in domain.dims))
    return (row if isinstance(row, int) else size_hint(row, size_hints([*unit.op.inputs()]))) > splits.held_row


def _largest(units: Sequence[Unit]) -> int:
    """Return the bytes of the largest value that these units read."""
    return max(v.spec.bytes_hint() for u in units for v in u.op.inputs() if v.spec is not None)


def _is_strided(v: Value, domain: Domain) -> bool:
    """Whether the neighbours of an element of `v` in memory belong to other rows."""
    assert v.spec is not None
    along = [d for d, (size, step) in enumerate(zip(domain.shape, stride_of(v.spec), strict=True)) if step == 1 and size != 1]
    return bool(along) and not set(along) & set(domain.dims)


def is_column(domain: Domain) -> bool:
    """Whether rows are strided in memory: the last dim of the domain (beside sizes of 1) is not reduced."""
    real = [d for d, s in enumerate(domain.shape) if s != 1]
    return bool(domain.dims) and bool(real) and real[-1] not in domain.dims
