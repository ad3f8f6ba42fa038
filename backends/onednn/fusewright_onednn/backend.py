"""The backend `x86_onednn`: finds the ops that oneDNN computes, with their neighbours, and lowers them
region by region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from fusewright import machine
from fusewright.interface import (
    CompileContext,
    Compiled,
    Device,
    OpView,
    Region,
    Unavailable,
    Verdict,
    Why,
)
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.region.builder import OWN_STRIDES, STRIDE_FREE, Builder
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.rewrite import by_root, claimed, first
from fusewright_cpu import llvm_loader
from fusewright_onednn import norms, target
from fusewright_onednn.lowerings import LOWERINGS, ROWS

SWITCHES = (
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32", "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision", "backends.cpu.get_cpu_capability",
)  # fmt: skip
ENV = ("ONEDNN_*", "DNNL_*", "ATEN_CPU_CAPABILITY", "MKL_*")

_ROWS = by_root(ROWS)


class X86OneDnn(FusedBackend):
    """x86-64 CPUs with AVX2 or better, with the oneDNN that torch carries."""

    name = "x86_onednn"
    device_type = "cpu"
    priority = 50
    constant_masks = True  # attention under `is_causal` skips the future instead of reading a mask of it
    lowerings = LOWERINGS
    loader = llvm_loader
    namespaces = ("mkldnn", "onednn")
    options: ClassVar[Mapping[str, Any]] = {
        # Weights in oneDNN's own layout: "auto" where that measures faster, "never", "always".
        "prepack": "auto",
        # Let relu and clamp ride on a product, which turns a NaN into 0.
        "finite_math": False,
    }

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if machine.arch() != "x86_64":
            return Unavailable(f"this is {machine.arch()}", "use an x86-64 machine")
        features = machine.cpu_features()
        found = target.best(features)
        if found is None:
            return Unavailable("the CPU has no AVX2", "use a CPU of 2015 or later")
        if not torch.backends.mkldnn.is_available():
            return Unavailable("torch is built without oneDNN", "install a build of torch with oneDNN")
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            features |= {"mkldnn_bf16"}
        version = target.onednn_version(torch.__config__.show())
        return Device("cpu", found.arch, features, f"oneDNN {version}".rstrip())

    def supports(self, op: OpView) -> Verdict:
        """By the table or as a kernel; ops that take any strides may lie between as ATen calls."""
        verdict = super().supports(op)
        if verdict.why is Why.NO_LOWERING and (op.op in STRIDE_FREE or op.op in OWN_STRIDES):
            return Verdict(Why.CARRIED, "ATen, inside the region")
        return verdict

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        graph = RegionGraph(region)
        builder = Builder(graph, ctx, owner=self, built=self.built)
        claimed(graph, ctx.rules, lambda op: first(_ROWS.get(op.op, ()), op, graph, builder, ctx.rules))
        for op in graph:
            claim = graph.claim_of(op)
            if claim is None and not norms.lower(op, builder):
                builder.leave(op)
            elif claim is not None and claim.at is op:  # everything that the call reads is there by now
                claim.write(builder)
        fragment = fuse(builder.finish(), ctx, builder.calls, policy=self.policy())
        notes, kernels = {**fragment.notes, **builder.notes}, {**fragment.kernels, **builder.kernels}
        return replace(fragment, notes=notes, kernels=kernels)

    def fingerprint(self) -> str:
        """With what oneDNN is told from outside: measured choices depend on it."""
        return f"{super().fingerprint()}-torch {torch.__version__}-{machine.torch_switches(*SWITCHES)}-{machine.environment(*ENV)}"
