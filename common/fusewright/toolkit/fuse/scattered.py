"""Kernels of a scatter: the start values, the stores, and what is made of the accumulated values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
from fusewright.toolkit.fuse.evaluate import Evaluator, Space
from fusewright.toolkit.fuse.flow import Flow
from fusewright.toolkit.fuse.group import Group
from fusewright.toolkit.fuse.rules import Accumulator, Address, Domain, Scatter
from fusewright.toolkit.fuse.space import At, shape_of
from fusewright.toolkit.kernel.types import compute_type, from_torch, to_torch

Part = tuple[Built, tuple[tuple[int, int], ...]]
"""A kernel, and its (output, input) pairs that are one tensor, changed in place."""


def build_scatter(
    flow: Flow, group: Group, roots: Sequence[Root], temporary: Callable[[TensorSpec], int]
) -> list[Part]:
    """The launches of a group that ends in a scatter. `temporary` gives the id of a new value."""
    unit = group.units[-1]
    assert isinstance(unit.rule, Scatter)
    op, rule = unit.op, unit.rule
    assert op.out.spec is not None
    accumulators, finish = rule.accumulators(op), rule.finish(op)
    specs = [replace(op.out.spec, dtype=to_torch(a.dtype), const=False) for a in accumulators]
    started = [temporary(s) for s in specs]
    last = [op.out.id] if finish is None else [temporary(s) for s in specs]
    parts: list[Part] = [
        (_start(flow, unit, a, spec, i), ()) for a, spec, i in zip(accumulators, specs, started, strict=True)
    ]
    main = _stores(flow, group, roots, accumulators, specs, started, last)
    inputs = {i: k for k, i in enumerate(main.inputs)}
    parts.append((main, tuple((k, inputs[i]) for k, i in enumerate(started))))
    if finish is not None:
        parts.append((_finish(flow, unit, specs, last), ()))
    return parts


def _map_space(flow: Flow, unit: Unit, name: str) -> tuple[Evaluator, Space]:
    """One axis per dim of the op's result, in the order of its strides."""
    domain = Domain(shape_of(unit.op.out.spec), ())
    hints = size_hints(values_of(flow, [unit]))
    b, space = space_for(domain, loop_order(domain, unit.op.out, False), name, hints)
    return Evaluator(b, flow, frozenset()), space


def _start(flow: Flow, unit: Unit, a: Accumulator, spec: TensorSpec, out: int) -> Built:
    e, space = _map_space(flow, unit, f"{unit.op.op}_start")
    value = a.init(e, unit.op, space.base)
    store(e, e.b.output("y0", a.dtype), spec, space.base, value)
    return finished(e, [out])


def _stores(
    flow: Flow, group: Group, roots: Sequence[Root], accumulators: Sequence[Accumulator],
    specs: Sequence[TensorSpec], started: Sequence[int], last: Sequence[int],
) -> Built:  # fmt: skip
    unit = group.units[-1]
    rule = unit.rule
    assert isinstance(rule, Scatter)
    domain = unit.domain()
    b, space = space_for(domain, range(len(domain.shape)), unit.op.op, size_hints(values_of(flow, group.units)))
    e = Evaluator(b, flow, frozenset(group.levels))
    places, values = rule.code(e, unit.op, space.base)
    stored = [(r.value, space.base.reshape(shape_of(r.value.spec))) for r in roots]
    results = [(v, at, e.value(v, at)) for v, at in stored]
    for i, spec in zip(started, specs, strict=True):
        e.buffer(Value(i, spec))  # a parameter of the kernel, though it is written as an output
    for k, (a, spec, value) in enumerate(zip(accumulators, specs, values, strict=True)):
        buffer, new = b.inout(f"a{k}", a.dtype), b.cast(value, a.dtype)
        if isinstance(places, Address):
            b.store(buffer, places.index, new, places.inside, how=a.how)
        else:
            b.store(buffer, e.address(spec, At(shape_of(spec), places)), new, how=a.how)
    for k, (v, at, val) in enumerate(results):
        store(e, b.output(f"y{k}", _stored_type(v)), flow.place(v).spec, at, val)  # type: ignore[arg-type]
    return finished(e, [*last, *(flow.place(r.value).id for r in roots)], started)


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
