"""Which calls and kernels a region becomes: products of few rows as sums, products that read the same rows as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value, Verdict
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.region import gemv
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import Claim, RegionGraph
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.products import joined, siblings_of, taken_apart, widths_of
from fusewright.toolkit.region.rewrite import Row, claimed, first
from fusewright_mps.target import Target

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

SUMS = gemv.Bounds(rows=4, weights=1 << 17)
"""Products that are written as sums, within the bounds that were fitted on an H100 (docs/studies/gpu-decoding.md). No Mac has
measured them: what speaks for sums is that a call through MPSGraph costs some 25 us to encode, and a dispatch a few."""

REPEATS = 10
"""Products that are timed together."""


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


OpCode: TypeAlias = Callable[[OpView, Calls], Claim | None]
"""A lowering: the claim of an op and its neighbours, or None, which leaves the op to torch's own call."""


def by_rows(rows: Sequence[Row]) -> OpCode:
    """The lowering that asks these rows, in order."""
    return lambda op, c: first(rows, op, c.graph, c, c.ctx.rules)


def rewritten(
    table: LoweringTable[OpCode], region: Region, ctx: CompileContext, target: Target, synchronize: Callable[[], None]
) -> Builder:
    """The region with a table's calls in it. Raises what lowerings raise."""
    graph = RegionGraph(region)
    gemv.rewrite_products(graph, ctx, SUMS)
    b = Builder(graph, ctx)
    calls = Calls(graph, b, target, synchronize)

    def ask(op: OpView) -> Claim | None:
        row = table.find(op, ctx.device)
        return None if isinstance(row, Verdict) else row.code(op, calls)

    claimed(graph, ctx.rules, ask)
    for op in graph:
        claim = graph.claim_of(op)
        if claim is None:
            b.leave(op)
        elif claim.at is op:
            claim.write(calls)
            b.close_call(claim.ops)
            b.notes.update(dict.fromkeys((o.id for o in claim.ops), claim.note))
    return b


def spec_of(value: Any) -> TensorSpec:
    """The type of a tensor value."""
    assert isinstance(value, Value) and value.spec is not None
    return value.spec


# ---------------------------------------------------------------- products


def reason(op: OpView) -> str | None:
    """Why a linear stays torch's own call."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if not x.static or w.rank != 2 or x.rank < 2 or 0 in (*x.shape, *w.shape):
        return "symbolic, empty or no matrix"
    return "mixed dtypes" if x.dtype != w.dtype else None


def _siblings(m: Match, c: Calls) -> Match | None:
    """All linears of constants that read what this one reads."""
    group = siblings_of(m.anchor, c.graph, lambda op: reason(op) is None)
    return None if group is None else replace(m, ops=tuple(group), at=group[0])


def _joining_pays(m: Match, c: Calls) -> bool:
    """Whether one product for all is faster than one for each."""
    x, widths, biased = spec_of(m.anchor.arg("input")), widths_of(m.ops), m.anchor.arg("bias") is not None
    k = int(x.shape[-1])  # type: ignore[arg-type]
    rows = x.numel_hint() // k

    def products(ns: Sequence[int]) -> Callable[[], Thunk]:
        return lambda: _products(rows, k, ns, x, biased, c.synchronize)

    key = f"siblings {str(x.dtype).removeprefix('torch.')} {rows}x{k}x{'+'.join(map(str, widths))}{' bias' * biased}"
    return c.faster(key, products(widths), products([sum(widths)]))


def _products(
    rows: int, k: int, widths: Sequence[int], like: TensorSpec, biased: bool, synchronize: Callable[[], None]
) -> Thunk:
    x = torch.full((rows, k), 0.5, dtype=like.dtype, device=like.device)
    ws = [torch.full((n, k), 0.5, dtype=like.dtype, device=like.device) for n in widths]
    bs = [torch.zeros(n, dtype=like.dtype, device=like.device) if biased else None for n in widths]

    def run() -> None:
        for _ in range(REPEATS):
            for w, b in zip(ws, bs, strict=True):
                torch.nn.functional.linear(x, w, b)
        synchronize()

    return run


def _write_joined(m: Match, c: Calls) -> None:
    weight, bias = joined(m.ops, c.b)
    whole = c.ctx.value(None)
    c.b.call("aten::linear.default", c.b.any_strides(m.anchor.arg("input")), weight, bias, out=whole)
    taken_apart(m.ops, Ref(whole.id), c.b)


SIBLINGS = Row(
    "mps.product.siblings", chain("linear"), extend=_siblings, pays=_joining_pays, write=_write_joined,
    note=lambda m: f"one product for {len(m.ops)}",
)  # fmt: skip
