"""From a region to library calls with their neighbours: found first, written when the region is walked in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value, Verdict
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.region.builder import Builder
from fusewright_triton.select.gemv import opened
from fusewright_triton.target import Target, named

log = logging.getLogger(__name__)


@dataclass
class Found:
    """A library call that takes `ops`. `write` is called at `at` (the op that is last in the region, or, where all
    results are slices of one product, the first). `also` are calls that it counts on: all of them are taken, or none."""

    ops: tuple[OpView, ...]
    at: OpView
    write: Callable[[Calls], None]
    note: str
    also: tuple[Found, ...] = ()


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
    def target(self) -> Target:
        return named(self.ctx.device.arch)

    def pays(self, key: str, library: Callable[[], Thunk], kernel: Callable[[], Thunk]) -> bool:
        """Whether a kernel within the target's bounds is faster than the library's call: so it is where the bounds were
        fitted, and simulated, which has no speed; elsewhere by a short measurement."""
        if self.target.fitted is not None or self.ctx.device.simulated:
            return True
        return self.ctx.choose(key, Lazy({"library": library, "kernel": kernel})) == "kernel"

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

    def free(self, op: OpView) -> bool:
        """Whether no call has taken an op."""
        return op.id not in self.found

    def only_user(self, value: Value) -> OpView | None:
        """The op that alone reads a value, if it may still be taken."""
        user = self.b.links.only_user(value)
        return user if user is not None and self.free(user) else None

    def take(self, found: Found) -> bool:
        """Let a call compute its ops; False, and nothing is taken, where another one computes some of them already. What two
        calls took would be made by the second alone, and what the first leaves unmade be read."""
        taken: dict[int, Found] = {}
        for part in (found, *found.also):
            mine = {op.id: part for op in part.ops}
            if not mine.keys().isdisjoint(self.found.keys() | taken.keys()):
                return False
            taken |= mine
        self.found |= taken
        return True

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
        if calls.free(op) and not isinstance(row, Verdict):
            found = row.code(op, calls)
            if found is not None and not calls.take(found):
                log.debug("%s of %s is left out: another call has taken a part of it", found.note, op.op)
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
