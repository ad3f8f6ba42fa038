"""Lower a region to a fragment: library calls for the ops that rows claim, kernels for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusewright.interface import CompileContext, Fragment, OpView
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import Claim, RegionGraph
from fusewright.toolkit.region.rewrite import Row, claimed, first
from fusewright_cpu.onednn import norms
from fusewright_cpu.onednn.conv import depthwise


def lowered(graph: RegionGraph, rows: Mapping[str, Sequence[Row]], ctx: CompileContext, owner: FusedBackend) -> Fragment:
    """Lower a region. `rows` are grouped by the op at their root."""
    builder = Builder(graph, ctx, owner=owner, built=owner.built, row_major_norms=graph.phase == "infer")

    def ask(op: OpView) -> Claim | None:
        return first(rows.get(op.op, ()), op, graph, builder, ctx.rules)

    def ask_early(op: OpView) -> Claim | None:
        found = ask(op) if depthwise.may_be(op) else None
        return found if found is not None and depthwise.ROW.id in found.rules else None

    claimed(graph, ctx.rules, ask_early)
    claimed(graph, ctx.rules, ask)
    for op in graph:
        claim = graph.claim_of(op)
        if claim is None and not norms.lower(op, builder):
            builder.leave(op)
        elif claim is not None and claim.at is op:  # all inputs of the call exist by now
            claim.write(builder)
    fragment = fuse(builder.finish(), ctx, builder.calls, policy=owner.policy())
    notes, kernels = {**fragment.notes, **builder.notes}, {**fragment.kernels, **builder.kernels}
    return replace(fragment, notes=notes, kernels=kernels)
