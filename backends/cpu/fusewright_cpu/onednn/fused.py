"""A CPU backend whose float products, convolutions and attention go to torch's oneDNN, with kernels around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from fusewright import machine
from fusewright.interface import CompileContext, Compiled, OpView, Region, Verdict, Why
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.region.builder import OWN_STRIDES, STRIDE_FREE, Builder
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.rewrite import Row, by_root, claimed, first
from fusewright_cpu.loader import llvm_loader
from fusewright_cpu.onednn import norms
from fusewright_cpu.onednn.lowerings import LOWERINGS, ROWS

SWITCHES = (
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32", "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision", "backends.cpu.get_cpu_capability",
)  # fmt: skip
ENV = ("ONEDNN_*", "DNNL_*", "ATEN_CPU_CAPABILITY", "MKL_*")


class OneDnnBackend(FusedBackend):
    """`rows` claim what library calls compute; those of a subclass may be asked before these."""

    device_type = "cpu"
    constant_masks = True  # attention under `is_causal` skips the future instead of reading a mask of it
    lowerings = LOWERINGS
    rows: ClassVar[Mapping[str, Sequence[Row]]] = by_root(ROWS)
    loader = llvm_loader
    namespaces: ClassVar[Sequence[str]] = ("mkldnn", "onednn")
    options: ClassVar[Mapping[str, Any]] = {
        # Weights in oneDNN's own layout: "auto" where that measures faster, "never", "always".
        "prepack": "auto",
        # Let relu and clamp ride on a product, which turns a NaN into 0.
        "finite_math": False,
    }
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"prepack": ("auto", "never", "always")}
    environment: ClassVar[Mapping[str, str]] = {
        "FUSEWRIGHT_CPU_ISA": "for tests: compute as a lesser CPU would, 'avx2' or 'avx' on x86, a core's name on Arm"
    }
    rules: ClassVar[Sequence[str]] = (norms.RULE,)

    def supports(self, op: OpView) -> Verdict:
        """By the table or as a kernel; ops that take any strides may lie between as ATen calls."""
        verdict = super().supports(op)
        if verdict.why is Why.NO_LOWERING and (op.op in STRIDE_FREE or op.op in OWN_STRIDES):
            return Verdict(Why.CARRIED, "ATen, inside the region")
        return verdict

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        graph = self.rewritten(RegionGraph(region), ctx)
        builder = Builder(graph, ctx, owner=self, built=self.built)
        claimed(graph, ctx.rules, lambda op: first(self.rows.get(op.op, ()), op, graph, builder, ctx.rules))
        for op in graph:
            claim = graph.claim_of(op)
            if claim is None and not norms.lower(op, builder):
                builder.leave(op)
            elif claim is not None and claim.at is op:  # everything that the call reads is there by now
                claim.write(builder)
        fragment = fuse(builder.finish(), ctx, builder.calls, policy=self.policy())
        notes, kernels = {**fragment.notes, **builder.notes}, {**fragment.kernels, **builder.kernels}
        return replace(fragment, notes=notes, kernels=kernels)

    def rewritten(self, graph: RegionGraph, ctx: CompileContext) -> RegionGraph:
        """The region with ops that this backend puts in place of others, before anything is claimed."""
        return graph

    def fingerprint(self) -> str:
        """With what oneDNN is told from outside: measured choices depend on it."""
        return f"{super().fingerprint()}-torch {torch.__version__}-{machine.torch_switches(*SWITCHES)}-{machine.environment(*ENV)}"
