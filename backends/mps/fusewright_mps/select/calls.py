"""From a region to calls and kernels: products of few rows become sums, then rows claim, then claims are written in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value, Verdict
from fusewright.plan.ir import Launch, Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.region import gemv
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import Claim, RegionGraph
from fusewright.toolkit.region.rewrite import Row, claimed, first
from fusewright_mps.kernels.handwritten import Handwritten, hash_of
from fusewright_mps.target import Target

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

SUMS = gemv.Bounds(rows=4, weights=1 << 17)
"""Products that are written as sums, within the bounds that were fitted on an H100 (docs/studies/gpu-decoding.md). No Mac has
measured them: what speaks for sums is that a call through MPSGraph costs some 25 us to encode, and a dispatch a few."""


@dataclass
class Calls:
    """What a row may ask about the region, and what it writes to (`b`)."""

    graph: RegionGraph
    b: Builder
    target: Target
    synchronize: Callable[[], None]

    @property
    def ctx(self) -> CompileContext:
        return self.b.ctx

    def faster(self, key: str, library: Callable[[], Thunk], ours: Callable[[], Thunk]) -> bool:
        """Whether what we would do is faster than the library's call, by a short measurement; simulated, which has no speed,
        it is taken to be."""
        if self.ctx.device.simulated:
            return True
        return self.ctx.choose(key, Lazy({"library": library, "kernel": ours})) == "kernel"

    def launch(
        self,
        kernel: Handwritten,
        inputs: Sequence[Ref | None],
        outs: Sequence[int],
        op: OpView,
        scalars: Sequence[float] = (),
    ) -> None:
        """A launch of a kernel written by hand; inputs that are None are left out."""
        key = hash_of(kernel)
        self.b.kernels[key] = kernel
        given = tuple(r for r in inputs if r is not None)
        self.b.append(Launch(key, given, tuple(outs), kernel.sizes, tuple(scalars), op_ids=(op.id,)))


OpCode: TypeAlias = Callable[[OpView, Calls], Claim | None]
"""A lowering: the claim of an op and its neighbours, or None, which leaves the op to torch's own call."""


def by_rows(rows: Sequence[Row]) -> OpCode:
    """The lowering that asks these rows, in order."""
    return lambda op, c: first(rows, op, c.graph, c, c.ctx.rules)


def rewritten(
    table: LoweringTable[OpCode],
    by_hand: Callable[[OpView, Calls], bool],
    region: Region,
    ctx: CompileContext,
    target: Target,
    synchronize: Callable[[], None],
) -> Builder:
    """The region with a table's calls in it; products that are `by_hand` become no sums. Raises what lowerings raise."""
    graph = RegionGraph(region)
    b = Builder(graph, ctx)
    calls = Calls(graph, b, target, synchronize)
    gemv.rewrite_products(graph, ctx, SUMS, lambda op: by_hand(op, calls))

    def ask(op: OpView) -> Claim | None:
        row = table.find(op, ctx.device)
        return None if isinstance(row, Verdict) else row.code(op, calls)

    claimed(graph, ctx.rules, ask)
    b.write_claims(calls)
    return b


def spec_of(value: Any) -> TensorSpec:
    """The type of a tensor value."""
    assert isinstance(value, Value) and value.spec is not None
    return value.spec
