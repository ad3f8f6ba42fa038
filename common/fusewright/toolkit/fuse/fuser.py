"""Lowers a region to a fragment: the given library calls, loop kernels for the other ops, and views in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from fusewright.interface import CompileContext, DevicePolicy, Dim, Fragment, OpView, Region, TensorSpec, Value
from fusewright.plan.ir import Instruction, Launch, Ref, reads
from fusewright.plan.order import topological
from fusewright.sizes.expr import Atom, Extent, NumberOf, SizeOf, solve, substitute, symbol
from fusewright.toolkit.fuse.build import Built, Root, Unit, build_group, in_steps, loop_order, units_of
from fusewright.toolkit.fuse.call import LibraryCall
from fusewright.toolkit.fuse.eager import Alone, Condition, faster
from fusewright.toolkit.fuse.group import Group, Grouper
from fusewright.toolkit.fuse.scattered import build_scatter
from fusewright.toolkit.fuse.signature import MEMO, KernelMemo, Signature
from fusewright.toolkit.ir import IndexTooComplex, Kernel
from fusewright.toolkit.lower.tables import rules_of, verdict
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.kinds import Domain, Row, Rule
from fusewright.toolkit.rules.space import NotAligned, ShapeMismatch, product, shape_of

POLICY = DevicePolicy()
"""The policy for an unknown device."""


class Unplaceable(Exception):
    """Ops that cannot form one kernel (or a single op that cannot form any)."""

    def __init__(self, ops: Sequence[OpView], why: str, inlined: Iterable[int] = ()) -> None:
        super().__init__(why)
        self.groups = {frozenset(op.id for op in ops): frozenset(inlined)}
        """Their ids, and those of the inlined ops that they read."""


class NoKernels(Exception):
    """All groups of a round that cannot form a kernel."""

    def __init__(self, groups: Iterable[Unplaceable]) -> None:
        super().__init__("groups that are no kernels")
        self.groups = {ids: inlined for g in groups for ids, inlined in g.groups.items()}


class BetterEager(Exception):
    """Ops that a kernel could compute but eager computes faster: ids, each with its condition."""

    def __init__(self, ops: Mapping[int, Condition]) -> None:
        super().__init__("eager is faster")
        self.ops = ops


class Unchecked(Exception):
    """Ops whose indices no kernel checks in full, because their readers need only a part of the result."""

    def __init__(self, ops: Iterable[int]) -> None:
        super().__init__("indices that no kernel checks")
        self.ops = frozenset(ops)


@dataclass
class _Item:
    """Instructions that stay together when the fragment is ordered."""

    position: int
    instructions: tuple[Instruction, ...]
    reads: frozenset[int]
    makes: frozenset[int]


@dataclass
class Fused:
    """The lowered region before it becomes a fragment."""

    items: list[_Item] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)


def fuse(
    region: Region, ctx: CompileContext, calls: Sequence[LibraryCall] = (), memo: KernelMemo = MEMO,
    policy: DevicePolicy = POLICY,
) -> Fragment:  # fmt: skip
    """Lower a region: emit `calls` as given and every other op as part of a kernel, or as an eager call where it has no
    rule or the device's `policy` says that eager is faster.
    """
    solo: set[int] = set()
    whole: frozenset[int] = frozenset()
    called = _called(calls)
    ours = [op for op in region.ops if op.id not in called]
    plain = dict.fromkeys(constant_ops(region) - called | {op.id for op in ours if not verdict(op)}, "eager")
    plain |= {op.id: row.note for op in ours if (row := faster(policy.eager, op))}
    while True:  # each failed round enlarges one of these sets
        known = len(plain), len(solo), len(whole)
        try:
            fused = _Planner(region, ctx, calls, plain, frozenset(solo), memo, whole, policy).run()
            return Fragment(_ordered(fused.items), fused.notes, fused.kernels)
        except BetterEager as e:
            plain |= {i: row.note for i, row in e.ops.items()}
        except Unchecked as e:
            plain |= dict.fromkeys(e.ops & whole, "eager")  # stored whole, and still not known to be checked in full
            whole |= e.ops
        except (NoKernels, Unplaceable) as e:
            for ids, inlined in e.groups.items():
                if len(ids) > 1 and not ids <= solo:
                    solo |= ids
                elif inlined - whole:
                    whole |= inlined
                else:
                    plain |= dict.fromkeys(ids, "eager")
        if known == (len(plain), len(solo), len(whole)):
            raise AssertionError(f"{region.name} is planned again with nothing changed")


def _called(calls: Sequence[LibraryCall]) -> set[int]:
    """The ops that library calls compute. Raises ValueError if two calls compute the same op: the first result would be lost."""
    found: set[int] = set()
    for c in calls:
        twice = found & set(c.ops)
        if twice:
            raise ValueError(f"two library calls compute the same ops: {sorted(twice)}")
        found.update(c.ops)
    return found


def constant_ops(region: Region) -> set[int]:
    """Ops that compute constants from constants only. They stay eager calls, which run once when weights are prepared."""
    known = region.constants
    return {op.id for op in region.ops if known.issuperset(v.id for v in (*op.inputs(), *op.outs))}


class _Planner:
    """One planning round. `plain`: ops that eager runs, with notes; `solo`: ops that get a kernel of their own; `whole`: ops
    whose results must be stored.
    """

    def __init__(
        self, region: Region, ctx: CompileContext, calls: Sequence[LibraryCall],
        plain: Mapping[int, str], solo: frozenset[int], memo: KernelMemo, whole: frozenset[int] = frozenset(),
        policy: DevicePolicy = POLICY,
    ) -> None:  # fmt: skip
        self.region, self.ctx, self.calls, self.solo, self.memo, self.policy = region, ctx, calls, solo, memo, policy
        self.position = {op.id: k for k, op in enumerate(region.ops)}
        by_id = {op.id: op for op in region.ops}
        in_order = sorted(plain, key=self.position.__getitem__)
        alone = [LibraryCall((i,), (ctx.aten(by_id[i]),), plain[i]) for i in in_order]
        self.all_calls = [*calls, *alone]
        self.fixed = {i: k for k, c in enumerate(self.all_calls) for i in c.ops}
        rules: dict[int, tuple[Rule, ...]] = {op.id: () if op.id in self.fixed else rules_of(op) for op in region.ops}
        self.values = {v.id: v for op in region.ops for v in (*op.inputs(), *op.outs)}
        self.reads = [[self.values[r] for i in c.instructions for r in reads(i) if r in self.values] for c in self.all_calls]
        self.needed = self._needed_by_calls() | {v.id: v for i in whole - self.fixed.keys() for v in by_id[i].outs}
        rounds = region.phase != "infer"
        self.flow = Flow(region.ops, lambda op: rules[op.id], frozenset(self.fixed), frozenset(self.needed), whole, rounds)
        self.checked: set[int] = set()
        self.partly: set[int] = set()
        self.out = Fused()
        self.sizes = _Sizes(region)

    def run(self) -> Fused:
        behind = frozenset(self._behind_views(self.needed))
        grouper = Grouper(self.flow, self.region.ops, self.fixed, self.reads, behind, self.solo, self.policy.splits)
        stored = self._stored(grouper.run(), self.needed, grouper)
        groups = [g for g in grouper.groups if g is not None]
        slower = {g.units[0].op.id: row for g in groups if (row := self._better_eager(g, stored))}
        if slower:
            raise BetterEager(slower)
        self._add_groups(groups, stored)
        if self.partly - self.checked:
            raise Unchecked(self.flow.producer[v][0].id for v in self.partly - self.checked)
        for call in self.all_calls:
            self._add_call(call)
        return self.out

    def _add_groups(self, groups: Iterable[Group], stored: set[int]) -> None:
        """Build every group, collecting all failures: raising at the first would cost one round per failure."""
        failed: list[Unplaceable] = []
        for group in groups:
            try:
                self._add_group(group, stored)
            except Unplaceable as e:
                failed.append(e)
        if failed:
            raise NoKernels(failed)

    # ---- what must be in memory ----

    def _needed_by_calls(self) -> dict[int, Value]:
        """Values that must be tensors because a call reads them or the region returns them."""
        return {v.id: v for v in chain(self.region.outputs, *self.reads)}

    def _behind_views(self, values: Mapping[int, Value]) -> set[int]:
        """`values` together with the values that they are views of."""
        found: set[int] = set()
        for v in values.values():
            found.add(v.id)
            made = self.flow.producer.get(v.id)
            while made is not None and self.flow.is_view(made[0]):
                base = next(iter(made[0].inputs()))
                found.add(base.id)
                made = self.flow.producer.get(base.id)
        return found

    def _stored(self, groups: list[Group], needed: Mapping[int, Value], grouper: Grouper) -> set[int]:
        """Every value that a kernel must store. Creates groups for inlined ops that are needed as tensors."""
        stored: set[int] = set()
        todo = list(needed.values())
        reached: set[Group] = set()
        views: set[int] = set()
        while todo:
            v = todo.pop()
            made = self.flow.producer.get(v.id)
            if made is None or v.id in stored:
                continue
            op, k = made
            if self.flow.is_view(op):
                if op.id not in views:
                    views.add(op.id)
                    self._add_view(op)
                    todo.extend(op.inputs())
                continue
            stored.add(v.id)
            group = self._group_of(op, k, grouper)
            if group not in reached:
                reached.add(group)
                todo.extend(s for u in group.units for s in self._loaded(u, group))
        for g in groups:
            if g not in reached:
                grouper.groups[g.id] = None
        return stored

    def _loaded(self, unit: Unit, group: Group) -> list[Value]:
        """The values a unit may load from memory: sources behind views and inlined ops, except those its group computes."""
        found = [s for v in unit.op.inputs() for s in self.flow.sources(v)]
        return [s for s in found if s.spec is not None and s.id not in group.levels]

    def _better_eager(self, group: Group, stored: set[int]) -> Condition | None:
        op = group.units[0].op
        kernel = Alone(op, self.flow, lambda: self._kernel(group, stored).kernel)
        return faster(self.policy.eager, op, kernel) if len(group.units) == 1 else None

    def _group_of(self, op: OpView, k: int, grouper: Grouper) -> Group:
        v = op.outs[k]
        found = grouper.group_of.get(v.id) or grouper.scatter_of.get(op.id)
        if found is not None:
            return found
        if v.spec is None or 0 in v.spec.shape or not units_of(self.flow, op):
            raise Unplaceable((op,), "an output that kernels do not make")
        unit = next(u for u in units_of(self.flow, op) if any(x.id == v.id for x, _ in u.outs()))
        return grouper.alone(unit, self.position[op.id])

    # ---- instructions ----

    def _add_call(self, call: LibraryCall) -> None:
        makes = frozenset(o for i in call.instructions for o in i.outs)
        read = frozenset(r for i in call.instructions for r in reads(i)) - makes
        position = max(self.position[i] for i in call.ops)
        self.out.items.append(_Item(position, call.instructions, read, makes))
        if call.note:
            self.out.notes.update(dict.fromkeys(call.ops, call.note))

    def _add_view(self, op: OpView) -> None:
        read = frozenset(v.id for v in op.inputs())
        item = _Item(self.position[op.id], (self.ctx.aten(op),), read, frozenset(v.id for v in op.outs))
        self.out.items.append(item)

    def _add_group(self, group: Group, stored: set[int]) -> None:
        units = group.units
        ops = [u.op for u in units]
        try:
            if group.scatters:
                instructions = self._scatter(group, stored)
            else:
                parts = in_steps(self._kernel(group, stored), self._temporary(group), self.policy.splits)
                instructions = tuple(self._launch(part, ops) for part in parts)
        except (NotAligned, IndexTooComplex, ShapeMismatch) as e:
            read_inline = self.flow.inlined((v for op in ops for v in op.inputs()), through=False)
            raise Unplaceable(ops, str(e), [op.id for op in read_inline]) from e
        made = frozenset(o for i in instructions for o in i.outs)
        read = frozenset(r for i in instructions for r in reads(i)) - made
        self.out.items.append(_Item(max(self.position[op.id] for op in ops), instructions, read, made))
        for op in ops:
            self.out.notes[op.id] = f"kernel {instructions[-1].kernel[:8]}"

    def _kernel(self, group: Group, stored: set[int]) -> Built:
        roots = roots_of(group, stored)
        domain, ordered = final_domain(group, roots)
        order = loop_order(domain, _model(self.flow, group, roots, domain), ordered)
        signature = Signature(self.flow)
        key = signature.of(group.units, domain, order, roots)
        built = self.memo.get(key, signature.ids)
        if built is None:
            built = build_group(self.flow, kernel_name(group.units), group.units, domain, order, roots)
            self.memo.put(key, signature.number, built)
        self._note_checks(built)
        return built

    def _note_checks(self, built: Built) -> None:
        self.checked |= built.checked
        self.partly |= built.partly

    def _launch(self, built: Built, ops: Sequence[OpView], updates: tuple[tuple[int, int], ...] = ()) -> Launch:
        self.out.kernels[built.hash] = built.kernel
        sizes = tuple(self.sizes.source(s, built.inputs, ops) for s in built.sizes)
        inputs = tuple(Ref(i) for i in built.inputs)
        ids = tuple(dict.fromkeys(op.id for op in ops))
        return Launch(built.hash, inputs, built.outs, sizes, (), built.inplace, updates, ids)

    def _scatter(self, group: Group, stored: set[int]) -> tuple[Launch, ...]:
        launches = []
        parts = build_scatter(self.flow, group, roots_of(group, stored), self._temporary(group))
        for built, updates in parts:
            self._note_checks(built)
            launches.append(self._launch(built, [u.op for u in group.units], updates))
        return tuple(launches)

    def _temporary(self, group: Group) -> Callable[[TensorSpec], int]:
        """Return a function that makes values passed between the kernels of one group, on its device."""
        device = next(v.spec.device for u in group.units for v in u.op.outs if v.spec is not None)
        return lambda spec: self.ctx.value(replace(spec, device=device)).id


def roots_of(group: Group, stored: set[int]) -> list[Root]:
    """The values that the group's kernel stores."""
    return [
        Root(v, group.levels[v.id]) for u in group.units for v, _ in u.outs() if v.id in stored and v.id in group.levels
    ]


def final_domain(group: Group, roots: Sequence[Root]) -> tuple[Domain, bool]:
    """The domain to build with, and whether its rows must run in order."""
    ordered = [u for u in group.units if isinstance(u.rule, Row) and u.rule.ordered]
    if ordered:
        return ordered[0].domain(), True
    if group.has_rows or not roots:
        return group.domain, False
    biggest = max((r.value for r in roots), key=lambda v: (v.spec.bytes_hint(), v.spec.rank))  # type: ignore[union-attr]
    return Domain(shape_of(biggest.spec), ()), False


def _model(flow: Flow, group: Group, roots: Sequence[Root], domain: Domain) -> Value | None:
    """The tensor whose layout the loops follow: the first stored one with the domain's shape, else the first such input, else one
    with as many elements."""
    values = [v for v in (*(r.value for r in roots), *(v for u in group.units for v in u.op.inputs())) if v.spec is not None]
    alike = (v for v in values if v.spec is not None and shape_of(v.spec) == domain.shape)
    return next(alike, next((v for v in values if product(shape_of(v.spec)) == product(domain.shape)), None))


def kernel_name(units: Sequence[Unit]) -> str:
    """A readable name made of the ops."""
    names = list(dict.fromkeys(u.op.op for u in units))
    return "_".join(names[:4]) + (f"_and_{len(names) - 4}" if len(names) > 4 else "")


class _Sizes:
    """Finds where the values of sizes come from at run time."""

    def __init__(self, region: Region) -> None:
        self._specs: dict[int, TensorSpec] = {}
        self._known: dict[Atom, Extent] = {}
        self._solved: dict[Atom, Extent] = {}
        for v in region.inputs:
            if v.spec is None and v.dim is not None and v.dim.expr.atom is not None:
                self._known.setdefault(v.dim.expr.atom, symbol(NumberOf(v.id)))
        for v in (*region.inputs, *(x for op in region.ops for x in (*op.inputs(), *op.outs))):
            if v.spec is not None:
                self._specs[v.id] = v.spec
        for v in region.inputs:
            _read_dims(v.id, v.spec, self._known, self._solved)

    def source(self, size: Extent, inputs: Iterable[int], ops: Sequence[OpView]) -> Extent:
        """The run-time source of a size of a launch: a dim of its own inputs if possible, else of the region's. What no dim is by
        itself follows from one that it determines."""
        own: dict[Atom, Extent] = {}
        solved: dict[Atom, Extent] = {}
        for i in inputs:
            _read_dims(i, self._specs.get(i), own, solved)

        def read(atom: Atom) -> Extent | None:
            found = next((k[atom] for k in (own, self._known, solved, self._solved) if atom in k), None)
            if found is None and isinstance(atom, str):
                raise Unplaceable(ops, f"no tensor has the size {atom}")
            return found

        return substitute(size, read)


def _read_dims(value: int, spec: TensorSpec | None, known: dict[Atom, Extent], solved: dict[Atom, Extent]) -> None:
    """Add the size symbols that a tensor's shape determines, with their source: those that are a dim, and others."""
    for d, s in enumerate(spec.shape if spec is not None else ()):
        found = solve(s.expr, symbol(SizeOf(value, d))) if isinstance(s, Dim) else None
        if found is not None:
            (known if s.expr.atom is not None else solved).setdefault(*found)  # type: ignore[union-attr]


def _ordered(items: list[_Item]) -> tuple[Instruction, ...]:
    """Sort topologically, as close to the graph's order as the groups allow. Raises ValueError if groups form a cycle."""
    items.sort(key=lambda i: i.position)
    maker = {v: k for k, item in enumerate(items) for v in item.makes}
    waits = [{maker[r] for r in item.reads if r in maker} - {k} for k, item in enumerate(items)]
    return tuple(i for k in topological(waits) for i in items[k].instructions)
