"""From a region to library calls with their neighbours: found first, written when the region is walked in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value, Verdict
from fusewright.plan.ir import Ref
from fusewright.toolkit.builder import Builder
from fusewright.toolkit.library import LoweringTable
from fusewright_triton.few_rows import opened


@dataclass
class Found:
    """A library call that takes `ops`. `write` is called at `last` (the op that is last in the region, or, where all
    results are slices of one product, the first)."""

    ops: tuple[OpView, ...]
    at: OpView
    write: Callable[[Calls], None]
    note: str


@dataclass
class Calls:
    """What a lowering may ask about the region (`b` is its builder), and where it puts what it found."""

    region: Region
    b: Builder
    found: dict[int, Found] = field(default_factory=dict)
    padded: dict[int, Ref] = field(default_factory=dict)
    """Copies with padded rows, by id of what was copied."""

    @property
    def ctx(self) -> CompileContext:
        return self.b.ctx

    @property
    def fused(self) -> bool:
        """Whether the device's own fused calls are there; simulated ones compute by plain ops."""
        return not self.ctx.device.simulated

    def producer(self, value: Value) -> OpView | None:
        """The op of the region that makes a value."""
        return next((op for op in self.region.ops if value in op.outs), None)

    def is_const(self, *values: Value | None) -> bool:
        """Whether values are made of weights only, so that what is made of them can be kept. None (no bias) counts."""
        return all(map(self.b.is_const, values))

    def take(self, found: Found) -> None:
        """Let a call compute its ops."""
        self.found.update((op.id, found) for op in found.ops)

    def exact(self, value: Value | None) -> Ref | None:
        """A value with the graph's strides; None stays None."""
        return None if value is None else self.b.exact(value)


OpCode: TypeAlias = Callable[[OpView, Calls], Found | None]
"""A lowering: the call for an op and its neighbours, or None, which leaves the op to eager's own call."""


def rewritten(table: LoweringTable[OpCode], region: Region, ctx: CompileContext) -> Builder:
    """The region with a table's library calls in it. Raises what lowerings raise."""
    region = opened(region, ctx)
    b = Builder(region, ctx)
    calls = Calls(region, b)
    for op in region.ops:
        row = table.find(op, ctx.device)
        if op.id not in calls.found and not isinstance(row, Verdict):
            found = row.code(op, calls)
            if found is not None:
                calls.take(found)
    for op in region.ops:
        here = calls.found.get(op.id)
        if here is None:
            b.keep(op)
        elif here.at is op:
            here.write(calls)
            b.taken(here.ops)
            b.notes.update(dict.fromkeys((o.id for o in here.ops), here.note))
    return b


def spec_of(value: Any) -> TensorSpec:
    """The type of a tensor value."""
    assert isinstance(value, Value) and value.spec is not None
    return value.spec
