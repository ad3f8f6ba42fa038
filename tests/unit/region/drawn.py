"""Small regions for tests of the region graph."""

from __future__ import annotations

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import Claim, RegionGraph
from tests.fragments import Sketch


def branches() -> tuple[Sketch, RegionGraph]:
    """relu(x), exp(x), their sum, its neg: ops 0 to 3. The last is the region's output."""
    g = Sketch()
    x = g.input(torch.randn(2, 3))
    y = g.op("neg", g.op("add", g.op("relu", x), g.op("exp", x)))
    return g, RegionGraph(g.region([y]))


def like(op: OpView, id: int, name: str, source: Value, out: Value | None = None) -> OpView:
    """Make a unary op of another name with the type of `op`."""
    made = out if out is not None else Value(id, op.out.spec)
    return OpView(id, name, f"aten::{name}.default", ("self",), (source,), (made,))


def claim(*ops: OpView, also: tuple[Claim, ...] = (), note: str = "a call") -> Claim:
    return Claim(ops, ops[-1], lambda context: None, note, also)
