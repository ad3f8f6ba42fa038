"""Lower a region to library calls fused with their neighbours: rows claim first, then the claims are written in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fusewright.interface import CompileContext, Device, OpView, Region, Value, Verdict
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.region import gemv
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import Claim, RegionGraph
from fusewright.toolkit.region.rewrite import Row, claimed, first
from fusewright_triton.target import Target, named


@dataclass
class Calls:
    """What a row may ask about the region, and the builder `b` that it writes to."""

    graph: RegionGraph
    b: Builder
    padded: dict[tuple[int, int, int], Value] = field(default_factory=dict)
    """Copies padded with zeros, by the id of the original and the number of rows and columns added."""

    @property
    def ctx(self) -> CompileContext:
        return self.b.ctx

    @property
    def target(self) -> Target:
        return named(self.ctx.device.arch)

    def pays(self, key: str, library: Callable[[], Thunk], kernel: Callable[[], Thunk]) -> bool:
        """Return whether a kernel within the target's bounds is faster than the library call: always where the bounds were
        fitted and in simulation, which has no speed; elsewhere by a short measurement."""
        if self.target.fitted is not None or self.ctx.device.simulated:
            return True
        return self.ctx.choose(key, Lazy({"library": library, "kernel": kernel})) == "kernel"

    @property
    def fused(self) -> bool:
        """Return whether the device's own fused calls are available; simulated devices compute with plain ops."""
        return not self.ctx.device.simulated

    def is_const(self, *values: Value | None) -> bool:
        """Return whether values depend on weights only, so that results derived from them can be kept. None (no bias) counts."""
        return all(map(self.graph.is_const, values))

    def made(self, target: str, *args: Any) -> Ref:
        """Emit a call, and return what it makes."""
        value = self.ctx.value(None)
        self.b.call(target, *args, out=value)
        return Ref(value.id)

    def exact(self, value: Value | None) -> Ref | None:
        """Return a value with the graph's strides; None stays None."""
        return None if value is None else self.b.exact(value)


def few_rows(device: Device) -> gemv.Bounds | None:
    """Return the bounds within which products of few rows are sums; None on devices where nobody measured: each weight would have
    a kernel of its own."""
    found = named(device.arch)
    measured = found.fitted is not None or device.simulated
    return gemv.Bounds(found.bounds.gemv_rows, found.bounds.gemv_weights) if measured else None


OpCode: TypeAlias = Callable[[OpView, Calls], Claim | None]
"""A lowering: the claim of an op and its neighbours, or None, which leaves the op to eager's own call."""


def by_rows(rows: Sequence[Row]) -> OpCode:
    """Return the lowering that asks these rows, in order."""
    return lambda op, c: first(rows, op, c.graph, c, c.ctx.rules)


def rewritten(table: LoweringTable[OpCode], region: Region, ctx: CompileContext) -> Builder:
    """Return the region with a table's library calls in it. Exceptions of lowerings pass through."""
    graph = RegionGraph(region)
    if (bounds := few_rows(ctx.device)) is not None:
        gemv.rewrite_products(graph, ctx, bounds)
    b = Builder(graph, ctx, row_major_norms=graph.phase == "infer")
    calls = Calls(graph, b)

    def ask(op: OpView) -> Claim | None:
        row = table.find(op, ctx.device)
        return None if isinstance(row, Verdict) else row.code(op, calls)

    claimed(graph, ctx.rules, ask)
    b.write_claims(calls)
    return b
