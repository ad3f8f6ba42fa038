"""A base for CPU backends that send float products, convolutions and attention to torch's oneDNN, with kernels around them.
Modules that are needed only to lower are imported inside the methods that lower, as in `FusedBackend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fusewright import machine, ops
from fusewright.interface import CompileContext, Compiled, DevicePolicy, OpView, Region, Verdict, Why
from fusewright.toolkit.backend.fused import FusedBackend, imported_later
from fusewright_cpu.kernels.by_hand import MOST_GEMV_ROWS
from fusewright_cpu.loader import llvm_loader

if TYPE_CHECKING:
    from fusewright.toolkit.backend.library import LoweringTable
    from fusewright.toolkit.region.graph import RegionGraph
    from fusewright.toolkit.region.rewrite import Row

SWITCHES = (
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32", "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision", "backends.cpu.get_cpu_capability",
    "backends.mkl.is_available",
)  # fmt: skip
ENV = ("ONEDNN_*", "DNNL_*", "ATEN_CPU_CAPABILITY", "MKL_*")


CARRIED_WHOLE = ("matmul",)
"""Rows with a decomposition that is no faster."""

HALVES = {torch.bfloat16: "mkldnn_bf16", torch.float16: "mkldnn_fp16"}
"""Half types, and the feature of a device on which oneDNN multiplies them."""


def half_features() -> frozenset[str]:
    """Return the features of `HALVES` that this machine has."""
    bf16, fp16 = torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return frozenset(name for name, there in zip(HALVES.values(), (bf16, fp16), strict=True) if there)


class OneDnnBackend(FusedBackend):
    """`rows` claim ops for library calls; a subclass may put its own rows before these."""

    device_type = "cpu"
    constant_masks = True  # with `is_causal`, attention skips future keys instead of reading a mask of them
    batched_attention = True  # no fused kernel takes another number of dimensions
    loader = llvm_loader
    namespaces: ClassVar[Sequence[str]] = ("mkldnn", "mkl", "onednn")
    options: ClassVar[Mapping[str, Any]] = {
        # Weights in oneDNN's own layout, or in MKL's: "auto" where that measures faster, "never", "always".
        "prepack": "auto",
        # Fuse relu and clamp into a product, which turns a NaN into 0.
        "finite_math": False,
    }
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"prepack": ("auto", "never", "always")}
    halves: ClassVar[Mapping[torch.dtype, str]] = HALVES
    """Types whose products are computed in fp32 on devices without the feature: eager's own take several times as long."""
    environment: ClassVar[Mapping[str, str]] = {
        "FUSEWRIGHT_CPU_ISA": "for tests: compute as a lesser CPU would, 'avx2' or 'avx' on x86, a core's name on Arm"
    }

    @imported_later
    def lowerings(cls) -> LoweringTable[Any]:
        from fusewright_cpu.onednn.lowerings import LOWERINGS

        return LOWERINGS

    @imported_later
    def rows(cls) -> Mapping[str, Sequence[Row]]:
        from fusewright.toolkit.region.rewrite import by_root
        from fusewright_cpu.onednn.lowerings import ROWS

        return by_root(ROWS)

    @imported_later
    def rules(cls) -> Sequence[str]:
        from fusewright.toolkit.region.activation import ROWS
        from fusewright_cpu.onednn import heads, norms

        return (norms.RULE, norms.CONSTANTS, *(row.id for row in (*ROWS, *heads.ROWS)))

    def supports(self, op: OpView) -> Verdict:
        """Answer by the table or as a kernel; ops that take any strides may run in between as ATen calls, unless the host knows
        their primitives."""
        from fusewright.toolkit.region.builder import OWN_STRIDES, STRIDE_FREE

        verdict = super().supports(op)
        if verdict.why is not Why.NO_LOWERING or not (op.op in STRIDE_FREE or op.op in OWN_STRIDES):
            return verdict
        row = ops.OPS[op.op]
        whole = row.decompose is None or row.opened or op.op in CARRIED_WHOLE
        return Verdict(Why.CARRIED, "ATen, inside the region") if whole else verdict

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        from fusewright.toolkit.region.activation import name_activations
        from fusewright.toolkit.region.graph import RegionGraph
        from fusewright_cpu.onednn.heads import read_in_place
        from fusewright_cpu.onednn.region import lowered

        graph = RegionGraph(region)
        name_activations(graph, ctx.rules)
        read_in_place(graph, ctx)
        return lowered(self.rewritten(graph, ctx), self.rows, ctx, self)

    def rewritten(self, graph: RegionGraph, ctx: CompileContext) -> RegionGraph:
        """Return the region with ops that this backend substitutes before anything is claimed."""
        return graph

    def policy(self) -> DevicePolicy:
        return replace(super().policy(), wider=self._wider, branches=frozenset({torch.float32}))

    def _wider(self, op: str, dtype: torch.dtype, rows: int) -> torch.dtype | None:
        """Return fp32 for products of a half type that oneDNN refuses, unless a kernel of ours takes them."""
        feature = self.halves.get(dtype)
        if feature is None or feature in self.running_on().features:
            return None
        ours = dtype is torch.bfloat16 and (op == "sdpa" or (op == "linear" and rows <= MOST_GEMV_ROWS))
        return None if ours else torch.float32

    def fingerprint(self) -> str:
        """Include oneDNN's external settings: measured choices depend on them."""
        return f"{super().fingerprint()}-torch {torch.__version__}-{machine.torch_switches(*SWITCHES)}-{machine.environment(*ENV)}"
