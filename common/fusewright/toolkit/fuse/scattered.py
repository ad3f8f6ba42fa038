"""Builds the kernels of a scatter: start values, stores, and the final computation on the accumulated values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.fuse.build import (
    Built,
    Root,
    Unit,
    finished,
    loop_order,
    size_hints,
    space_for,
    store,
    values_of,
)
from fusewright.toolkit.fuse.group import Group
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.ir.types import compute_type, from_torch, to_torch
from fusewright.toolkit.rules.evaluate import KernelEvaluator, Space
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.kinds import Accumulator, Address, Domain, Scatter
from fusewright.toolkit.rules.space import At, shape_of

Part = tuple[Built, tuple[tuple[int, int], ...]]
"""A kernel, and its (output, input) pairs that are one tensor, updated in place."""


@dataclass(frozen=True)
class _Job:
    """One scatter of a group. Its accumulators are held in the values `started`, then `last`, of these types."""

    unit: Unit
    accumulators: Sequence[Accumulator]
    specs: Sequence[TensorSpec]
    started: Sequence[int]
    last: Sequence[int]


def build_scatter(
    flow: Flow, group: Group, roots: Sequence[Root], temporary: Callable[[TensorSpec], int]
) -> list[Part]:
    """Build the launches of a group that ends in scatters. `temporary` returns the id of a new value."""
    jobs = [_job(u, u.rule, temporary) for u in group.units if isinstance(u.rule, Scatter)]
    parts: list[Part] = [
        (_start(flow, j.unit, a, spec, i), ())
        for j in jobs
        for a, spec, i in zip(j.accumulators, j.specs, j.started, strict=True)
    ]
    main = _stores(flow, group, roots, jobs)
    inputs = {i: k for k, i in enumerate(main.inputs)}
    parts.append((main, tuple((k, inputs[i]) for k, i in enumerate(i for j in jobs for i in j.started))))
    parts += [(_finish(flow, j.unit, j.specs, j.last), ()) for j in jobs if list(j.last) != [j.unit.op.out.id]]
    return parts


def _job(unit: Unit, rule: Scatter, temporary: Callable[[TensorSpec], int]) -> _Job:
    op = unit.op
    assert op.out.spec is not None
    accumulators = rule.accumulators(op)
    specs = [replace(op.out.spec, dtype=to_torch(a.dtype), const=False) for a in accumulators]
    started = [temporary(s) for s in specs]
    last = [op.out.id] if rule.finish(op) is None else [temporary(s) for s in specs]
    return _Job(unit, accumulators, specs, started, last)


def _map_space(flow: Flow, unit: Unit, name: str) -> tuple[KernelEvaluator, Space]:
    """Make a space with one axis per dim of the op's result, in the order of its strides."""
    domain = Domain(shape_of(unit.op.out.spec), ())
    hints = size_hints(values_of(flow, [unit]))
    b, space = space_for(domain, loop_order(domain, unit.op.out, False), name, hints)
    return KernelEvaluator(b, flow, frozenset()), space


def _start(flow: Flow, unit: Unit, a: Accumulator, spec: TensorSpec, out: int) -> Built:
    e, space = _map_space(flow, unit, f"{unit.op.op}_start")
    value = a.init(e, unit.op, space.base)
    store(e, e.b.output("y0", a.dtype), spec, space.base, value)
    return finished(e, [out])


def _stores(flow: Flow, group: Group, roots: Sequence[Root], jobs: Sequence[_Job]) -> Built:
    domain = jobs[0].unit.domain()
    name = jobs[0].unit.op.op
    b, space = space_for(domain, range(len(domain.shape)), name, size_hints(values_of(flow, group.units)))
    e = KernelEvaluator(b, flow, frozenset(group.levels))
    made = [_made(e, j.unit, space) for j in jobs]
    stored = [(r.value, space.base.reshape(shape_of(r.value.spec))) for r in roots]
    results = [(v, at, e.value(v, at)) for v, at in stored]
    started = [i for j in jobs for i in j.started]
    for i, spec in zip(started, (s for j in jobs for s in j.specs), strict=True):
        e.buffer(Value(i, spec))  # an input parameter of the kernel, although it is written like an output
    number = count()
    for j, (places, values) in zip(jobs, made, strict=True):
        for a, spec, value in zip(j.accumulators, j.specs, values, strict=True):
            buffer, new = b.inout(f"a{next(number)}", a.dtype), b.cast(value, a.dtype)
            if isinstance(places, Address):
                b.store(buffer, places.index, new, places.inside, how=a.how)
            else:
                b.store(buffer, e.address(spec, At(shape_of(spec), places)), new, how=a.how)
    for k, (v, at, val) in enumerate(results):
        store(e, b.output(f"y{k}", _stored_type(v)), v.spec, at, val)  # type: ignore[arg-type]
    last = [i for j in jobs for i in j.last]
    return finished(e, [*last, *(r.value.id for r in roots)], started)


def _made(e: KernelEvaluator, unit: Unit, space: Space) -> tuple[tuple[Index, ...] | Address, tuple[Val, ...]]:
    """The places and values that a scatter stores, over a domain with as many elements as its own."""
    rule = unit.rule
    assert isinstance(rule, Scatter)
    return rule.code(e, unit.op, space.base.reshape(rule.shape(unit.op)))


def _stored_type(v: Value) -> str:
    assert v.spec is not None
    return from_torch(v.spec.dtype)


def _finish(flow: Flow, unit: Unit, specs: Sequence[TensorSpec], accumulated: Sequence[int]) -> Built:
    assert isinstance(unit.rule, Scatter)
    op: OpView = unit.op
    finish = unit.rule.finish(op)
    assert finish is not None and op.out.spec is not None
    e, space = _map_space(flow, unit, f"{op.op}_finish")
    values = tuple(
        e.b.cast(e.load(Value(i, s), space.base), compute_type(_stored_type(Value(i, s))))
        for i, s in zip(accumulated, specs, strict=True)
    )
    result = finish(e, op, space.base, values)
    store(e, e.b.output("y0", _stored_type(op.out)), op.out.spec, space.base, result)
    return finished(e, [op.out.id])
