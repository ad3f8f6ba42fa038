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
from fusewright.toolkit.region.match import siblings
from fusewright_cpu import llvm_loader
from fusewright_onednn import lowerings, norms, patterns, target
from fusewright_onednn.lowerings import LOWERINGS
from fusewright_onednn.patterns import Match

SWITCHES = (
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32", "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision", "backends.cpu.get_cpu_capability",
)  # fmt: skip
ENV = ("ONEDNN_*", "DNNL_*", "ATEN_CPU_CAPABILITY", "MKL_*")


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
            return Verdict(Why.OK, "ATen, inside the region")
        return verdict

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        builder = Builder(region, ctx, owner=self)
        matches = find_matches(region, builder)
        groups = _concatenations(region, builder, matches)
        for op in region.ops:
            if op.id in groups:
                if groups[op.id][0] is op:
                    lowerings.concatenated(groups[op.id], builder)
            elif op.id in matches:
                m = matches[op.id]
                if m.last is op:  # everything that the call reads is there by now
                    _code(m.anchor, ctx.device)(m, builder)
            elif not norms.lower(op, builder):
                builder.keep(op)
        fragment = fuse(builder.finish(), ctx, builder.calls)
        notes, kernels = {**fragment.notes, **builder.notes}, {**fragment.kernels, **builder.kernels}
        return replace(fragment, notes=notes, kernels=kernels)

    def fingerprint(self) -> str:
        """With what oneDNN is told from outside: measured choices depend on it."""
        return f"{super().fingerprint()}-torch {torch.__version__}-{machine.torch_switches(*SWITCHES)}-{machine.environment(*ENV)}"


def _code(op: OpView, device: Device) -> lowerings.OpCode:
    row = LOWERINGS.find(op, device)
    if isinstance(row, Verdict):
        raise ValueError(f"{op.op} is in the region, but the table says {row}")
    return row.code


def find_matches(region: Region, b: Builder) -> dict[int, Match]:
    """Anchors with their neighbours: id of every op that takes part -> the match. An op is in one match
    only."""
    found: dict[int, Match] = {}
    finite = b.ctx.options["finite_math"]
    for anchor in region.ops:
        if anchor.op not in LOWERINGS or anchor.id in found:
            continue

        def allowed(stage: str, op: OpView, anchor: OpView = anchor) -> bool:
            if op.id in found:
                return False
            if stage == "unary" and not (finite or patterns.POST_OPS[op.op].exact):
                return False
            return anchor.op != "conv" or lowerings.conv_match_allowed(stage, op, anchor, b)

        m = patterns.match(anchor, b.links, allowed)
        found.update((op.id, m) for op in m.ops)
    return found


def _concatenations(region: Region, b: Builder, matches: Mapping[int, Match]) -> dict[int, tuple[OpView, ...]]:
    """Linears without neighbours that share their input and are faster as one product: op id -> its group."""
    found: dict[int, tuple[OpView, ...]] = {}
    alone = [op for op in region.ops if op.id in matches and not matches[op.id].posts]
    for group in siblings(alone, lambda op: lowerings.may_concat(op, b)):
        if lowerings.concat_pays(group, b):
            found.update((op.id, group) for op in group)
    return found
