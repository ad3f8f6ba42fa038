"""Builds the kernel of a group of ops: axes, values at each element, stores. Equal groups share one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusewright.interface import Dim, OpView, Splits, TensorSpec, Value, hint
from fusewright.sizes.expr import leaves
from fusewright.toolkit.ir import Builder, Index, IndexTooComplex, Kernel, Val, structural_hash
from fusewright.toolkit.ir.extent import Atom, Extent, evaluate, substitute, symbol
from fusewright.toolkit.ir.symbols import Step, close
from fusewright.toolkit.ir.types import DType, from_torch, to_torch
from fusewright.toolkit.ir.verify import kernel_pass
from fusewright.toolkit.rules.evaluate import KernelEvaluator, KernelRow, Space
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.kinds import Domain, Level, Map, Row, Rule, Scatter, View
from fusewright.toolkit.rules.space import At, ShapeMismatch, product, shape_of, stride_of
from fusewright.toolkit.transform.scans import split_scan
from fusewright.toolkit.transform.split import split_rows
from fusewright.toolkit.transform.split_columns import few_columns, split_columns

__all__ = ["Built", "build_group", "loop_order", "space_for"]


@dataclass(frozen=True)
class Built:
    """A kernel with the values that it reads and writes. `inplace` are the (output, input) pairs that may alias;
    `sizes` gives the kernel's symbols in terms of the graph's names.
    """

    kernel: Kernel
    hash: str
    inputs: tuple[int, ...]
    outs: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...]
    sizes: tuple[Extent, ...] = ()
    checked: frozenset[int] = frozenset()
    """Results of ops whose indices the kernel checks in full ..."""
    partly: frozenset[int] = frozenset()
    """... and of ops whose indices it checks only in part."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One rule of one op. Groups consist of units."""

    op: OpView
    rule: Map | Row | Scatter

    def domain(self) -> Domain:
        if isinstance(self.rule, Row):
            return self.rule.domain(self.op)
        if isinstance(self.rule, Scatter):
            return Domain(self.rule.shape(self.op), ())
        return Domain(shape_of(self.op.out.spec), ())

    def outs(self) -> tuple[tuple[Value, Level], ...]:
        """The values that the unit computes. None for a scatter, whose result is complete only after its kernel."""
        if isinstance(self.rule, Scatter):
            return ()
        if isinstance(self.rule, Row):
            found = ((self.op.outs[k], level) for k, level in self.rule.made(self.op))
            return tuple((v, level) for v, level in found if v.spec is not None)
        return tuple((v, "full") for v in self.op.outs if v.spec is not None and 0 not in v.spec.shape)

    def outs_in(self, numel: Extent) -> tuple[tuple[Value, Level], ...]:
        """Like `outs`, in a domain of `numel` elements: a map over fewer elements runs once per row."""
        if isinstance(self.rule, Map) and product(shape_of(self.op.out.spec)) != numel:
            return tuple((v, "row") for v, _ in self.outs())
        return self.outs()


def units_of(flow: Flow, op: OpView) -> list[Unit]:
    """The units of an op; empty for views and for ops without rules."""
    return [Unit(op, rule) for rule in flow.rules(op) if not isinstance(rule, View) and _makes_something(op, rule)]


def _makes_something(op: OpView, rule: Rule) -> bool:
    return not isinstance(rule, Row) or any(op.outs[k].spec is not None for k, _ in rule.made(op))


@dataclass(frozen=True)
class Root:
    """A value that the kernel stores, and its level."""

    value: Value
    level: Level


GUESS = 64
"""The hint of a symbol that is not by itself a dimension of any tensor."""


def size_hints(values: Sequence[Value]) -> dict[Atom, int]:
    """Map the atoms in sizes, in order, to the sizes seen when tracing; `GUESS` for atoms that are not a size by themselves."""
    hints: dict[Atom, int] = {}
    seen: dict[Atom, int] = {}
    for v in values:
        for d in (v.dim,) if v.spec is None else v.spec.shape:
            if isinstance(d, Dim):
                hints.update(dict.fromkeys(leaves(d.expr), GUESS))
                if d.expr.atom is not None:
                    seen[d.expr.atom] = d.hint
        if v.spec is not None and not v.spec.static:
            hints.update(dict.fromkeys((a for s in stride_of(v.spec) for a in leaves(s)), GUESS))
    return {**hints, **seen}


def loop_order(domain: Domain, like: Value | None, ordered: bool) -> tuple[int, ...]:
    """Order the dims of the domain from outermost to innermost loop, parallel ones first, by the strides of `like`, which has the
    domain's elements in this or another shape."""
    rank = len(domain.shape)
    outer = [d for d in range(rank) if d not in domain.dims]
    inner = list(domain.dims)
    steps = None if like is None or like.spec is None else _steps(domain, like.spec)
    if steps is not None:
        outer.sort(key=lambda d: (-steps[d], d))
        if not ordered:
            inner.sort(key=lambda d: (-steps[d], d))
    return (*outer, *inner)


def _steps(domain: Domain, spec: TensorSpec) -> list[int] | None:
    """Return how far apart neighbours along each dim of the domain lie in a tensor of as many elements, of fixed sizes if its shape
    differs. None if no formula says."""
    if shape_of(spec) == domain.shape:
        return [hint(s) for s in spec.stride]
    if not spec.static or 0 in domain.shape:
        return None
    rank = len(domain.shape)
    _, space = space_for(domain, range(rank))
    try:
        address = KernelEvaluator.address(spec, space.base.reshape(shape_of(spec)))
        ends = [address.substitute([Index(int(a == d)) for a in range(rank)], ()) for d in range(rank)]
    except (IndexTooComplex, ShapeMismatch):
        return None
    steps = [e.offset for e in ends if isinstance(e.offset, int) and e == Index(e.offset)]
    return [s if size != 1 else 0 for s, size in zip(steps, domain.shape, strict=True)] if len(steps) == rank else None


def space_for(
    domain: Domain, order: Sequence[int], name: str = "fused", hints: dict[Atom, int] | None = None
) -> tuple[Builder, Space]:
    """Make a builder with one axis per dim of the domain, in this order, and the space of its elements."""
    n_p = len(domain.shape) - len(domain.dims)
    sizes = [domain.shape[d] for d in order]
    b = Builder(name, sizes[:n_p], sizes[n_p:], hints)
    axes = dict(zip(order, b.axes, strict=True))
    return b, Space.of(domain, axes)


def add_rows(e: KernelEvaluator, space: Space, units: Sequence[Unit]) -> None:
    """Compute the results of row units (in topological order) over the space and record them in `e`."""
    for u in units:
        if not isinstance(u.rule, Row):
            continue
        results = u.rule.code(KernelRow(e, space, u.domain()), u.op)
        for (k, level), val in zip(u.rule.made(u.op), results, strict=True):
            out = u.op.outs[k]
            if out.spec is not None:
                at = space.base if level == "full" else space.row
                e.rows[out.id] = (e.held(val, out), at.linear)


def segments(domain: Domain) -> tuple[tuple[bool, Extent], ...]:
    """The domain's dims in order as (reduced?, size), without sizes of one and with neighbours of the same kind merged."""
    out: list[tuple[bool, Extent]] = []
    for d, s in enumerate(domain.shape):
        reduced = d in domain.dims
        if s == 1:
            continue
        if out and out[-1][0] == reduced:
            out[-1] = (reduced, out[-1][1] * s)
        else:
            out.append((reduced, s))
    return tuple(out)


def build_group(
    flow: Flow, name: str, units: Sequence[Unit], domain: Domain, order: Sequence[int], roots: Sequence[Root]
) -> Built:
    """Build the kernel that computes `units` (in topological order) and stores `roots`.

    Raises NotAligned or IndexTooComplex if they cannot be one kernel.
    """
    b, space = space_for(domain, order, name, size_hints(values_of(flow, units)))
    e = KernelEvaluator(b, flow, frozenset(v.id for u in units for v, _ in u.outs()))
    add_rows(e, space, units)
    stored = []
    for root in roots:
        assert root.value.spec is not None
        at = (space.base if root.level == "full" else space.row).reshape(shape_of(root.value.spec))
        stored.append((root.value, at, e.value(root.value, at)))
    for k, (value, at, val) in enumerate(stored):
        spec = value.spec
        assert spec is not None
        store(e, b.output(f"y{k}", from_torch(spec.dtype)), spec, at, val)
    return finished(e, [r.value.id for r in roots])


def values_of(flow: Flow, units: Sequence[Unit]) -> list[Value]:
    """Every value that the units use, including those behind views and inlined ops."""
    values = [v for u in units for v in (*u.op.inputs(), *u.op.outs)]
    return values + [s for u in units for v in u.op.inputs() for s in flow.sources(v)]


def store(e: KernelEvaluator, buffer: int, spec: TensorSpec, at: At, val: Val, how: str = "") -> None:
    """Store a value in a tensor's dtype and layout."""
    e.b.store(buffer, e.address(spec, at), e.b.cast(val, from_torch(spec.dtype)), how=how)


def finished(e: KernelEvaluator, outs: Sequence[int], always: Sequence[int] = ()) -> Built:
    """Build the verified kernel, with only the size symbols and tensors that it uses, plus the inputs `always`."""
    kernel = e.b.build()
    by_buffer = {buffer: i for i, buffer in e.buffers.items()}
    used = {n.buffer for n in kernel.nodes() if n.buffer is not None}
    kept = [k for k, b in enumerate(kernel.buffers) if k in used or b.access != "in" or by_buffer.get(k) in always]
    if len(kept) != len(kernel.buffers):
        kernel = with_buffers(kernel, kept)
    kernel, order = close(kernel, dict(enumerate(kernel.hints)))
    sizes = tuple(symbol(e.b.symbols[k]) for k in order if isinstance(k, int))
    inputs = tuple(by_buffer[k] for k in kept if k in by_buffer)
    return Built(kernel, structural_hash(kernel), inputs, tuple(outs), sharing(kernel), sizes, *e.coverage())


def in_steps(built: Built, temporary: Callable[[TensorSpec], int], splits: Splits) -> list[Built]:
    """Split a kernel that reduces or scans few long rows into several launches; return any other kernel as it is.
    `temporary` returns the id of a new value.
    """
    ids = [*built.inputs, *built.outs]
    split = split_rows(built.kernel, splits)
    if split is None:
        steps = split_columns(built.kernel) if few_columns(built.kernel, splits) else split_scan(built.kernel, splits)
        if steps is None:
            return [built]
        ids += [temporary(_flat(t, n, built)) for t, n in steps.temporaries]
        return [b for s in steps.steps for b in in_steps(_over(s, ids, built), temporary, splits)]
    partials = [temporary(_flat(t, n, built)) for t, n in split.partials]
    first = _over(split.first, [*(ids[b] for b in split.first_buffers), *partials], built)
    return [first, _over(split.second, [*ids, *partials], built)]


def _flat(dtype: DType, count: Extent, built: Built) -> TensorSpec:
    """A dense 1-D tensor whose size is a formula over a kernel's symbols."""
    n = _named(count, built)
    return TensorSpec((n if isinstance(n, int) else Dim(n, evaluate(count, built.kernel.hints)),), (1,), to_torch(dtype))


def _named(size: Extent, built: Built) -> Extent:
    """Rewrite a formula over a kernel's symbols in the graph's names."""
    return substitute(size, lambda a: built.sizes[a] if isinstance(a, int) else None)


def _over(step: Step, ids: Sequence[int], built: Built) -> Built:
    """A step of `built` over these values, dropping those that it does not use and putting those that it writes last."""
    kernel = step.kernel
    used = {n.buffer for n in kernel.nodes() if n.buffer is not None}
    inputs = [k for k, b in enumerate(kernel.buffers) if b.access == "in" and k in used]
    outs = [k for k, b in enumerate(kernel.buffers) if b.access != "in" and k in used]
    kernel = with_buffers(kernel, [*inputs, *outs])
    found = tuple(ids[k] for k in inputs), tuple(ids[k] for k in outs)
    return Built(kernel, structural_hash(kernel), *found, sharing(kernel), tuple(_named(s, built) for s in step.sizes))


@kernel_pass("with_buffers")
def with_buffers(kernel: Kernel, kept: Sequence[int]) -> Kernel:
    """Restrict the kernel to these buffers, in this order."""
    number = {old: new for new, old in enumerate(kept)}
    stages = tuple(
        replace(s, nodes=tuple(n if n.buffer is None else replace(n, buffer=number[n.buffer]) for n in s.nodes))
        for s in kernel.stages
    )
    return replace(kernel, buffers=tuple(kernel.buffers[k] for k in kept), stages=stages)


def sharing(kernel: Kernel) -> tuple[tuple[int, int], ...]:
    """The (output, input) positions whose tensors may alias."""
    ins = [i for i, b in enumerate(kernel.buffers) if b.access == "in"]
    outs = [i for i, b in enumerate(kernel.buffers) if b.access == "out"]
    return tuple((o, i) for o, out in enumerate(outs) for i, source in enumerate(ins) if kernel.may_share(out, source))
