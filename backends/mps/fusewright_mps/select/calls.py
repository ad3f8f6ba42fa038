"""Lower a region to calls and kernels: products of few rows become sums, rewrite rows claim ops, claims are written in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fusewright.interface import CompileContext, OpView, Region, Verdict
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
"""Bounds of the products that are written as sums, fitted on an H100 (docs/studies/gpu-decoding.md) and not measured on a Mac.
Encoding a call through MPSGraph takes some 25 us, a dispatch only a few, which favours sums."""


@dataclass
class Calls:
    """What rewrite rows query, and the builder `b` they write to."""

    graph: RegionGraph
    b: Builder
    target: Target
    synchronize: Callable[[], None]

    @property
    def ctx(self) -> CompileContext:
        return self.b.ctx

    def faster(self, key: str, library: Callable[[], Thunk], ours: Callable[[], Thunk]) -> bool:
        """Whether our alternative measures faster than the library's call. A simulated device has no speed, so there the answer is
        always yes."""
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
        """Append a launch of a handwritten kernel, leaving out inputs that are None."""
        key = hash_of(kernel)
        self.b.kernels[key] = kernel
        given = tuple(r for r in inputs if r is not None)
        self.b.append(Launch(key, given, tuple(outs), kernel.sizes, tuple(scalars), op_ids=(op.id,)))


OpCode: TypeAlias = Callable[[OpView, Calls], Claim | None]
"""A lowering: return a claim on an op and its neighbours, or None to leave the op to torch's own call."""


def by_rows(rows: Sequence[Row]) -> OpCode:
    """Return a lowering that tries these rewrite rows in order."""
    return lambda op, c: first(rows, op, c.graph, c, c.ctx.rules)


def rewritten(
    table: LoweringTable[OpCode],
    by_hand: Callable[[OpView, Calls], bool],
    region: Region,
    ctx: CompileContext,
    target: Target,
    synchronize: Callable[[], None],
) -> Builder:
    """Return the region with the table's lowerings applied. Products that are `by_hand` do not become sums. Errors propagate."""
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
