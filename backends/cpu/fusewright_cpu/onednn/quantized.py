"""Quantized products on CPU backends: which ops a pattern may still claim, and what `explain` says about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fusewright.interface import CompileContext, Compiled, Fragment, OpView, Region, Verdict, Why
from fusewright.toolkit.region.graph import RegionGraph
from fusewright_cpu.onednn.fused import OneDnnBackend

UNLESS_QUANTIZED = (Why.NO_LOWERING, Why.DYNAMIC_SHAPE, Why.ATTR, Why.DEVICE_FEATURE)
"""Reasons to refuse an op that a pattern may take all the same."""


class QuantizedBackend(OneDnnBackend):
    """A oneDNN backend whose rows take products between quantize and dequantize."""

    shows_constants = True
    carried: ClassVar[frozenset[str]] = frozenset()
    """Rows that are claimed so that a pattern may take them; otherwise eager's own call runs them."""
    products: ClassVar[tuple[str, ...]] = ()
    """Rows that may be quantized."""

    def why_not(self, op: OpView, graph: RegionGraph, note: str) -> str | None:
        """Return why a product with quantized operands, described in the plan by `note`, is not int8."""
        raise NotImplementedError

    def supports(self, op: OpView) -> Verdict:
        """Answer like every oneDNN backend; ops that only a quantized pattern can take may be in a region too."""
        verdict = super().supports(op)
        if not verdict and op.op in self.carried and verdict.why in UNLESS_QUANTIZED:
            return Verdict(Why.CARRIED, f"eager's own call, unless it is part of an int8 one ({verdict})")
        return verdict

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        compiled = super().compile(region, ctx)
        if not isinstance(compiled, Fragment):
            return compiled
        return replace(compiled, notes={**compiled.notes, **self._stayed(region, compiled)})

    def _stayed(self, region: Region, compiled: Fragment) -> dict[int, str]:
        """Return the products that are not int8, and why."""
        graph, notes = RegionGraph(region), compiled.notes
        asked = {op.id: self.why_not(op, graph, notes.get(op.id, "")) for op in region.ops if op.op in self.products}
        return {i: f"not int8: {why}; {notes.get(i, 'eager')}" for i, why in asked.items() if why}
