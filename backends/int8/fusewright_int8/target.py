"""Instruction sets of x86-64 that multiply int8, best first. Source: Intel SDM volume 2, AMD64 APM volume 4."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import dataclass

from fusewright import machine


@dataclass(frozen=True)
class Target:
    """A way to multiply int8. `needs`: CPU features; `vector`: bytes in a vector register."""

    arch: str
    needs: frozenset[str]
    vector: int


TARGETS: tuple[Target, ...] = (
    Target("amx_int8", frozenset({"amx_tile", "amx_int8", "avx512_vnni"}), 64),
    Target("avx512_vnni", frozenset({"avx512_f", "avx512_bw", "avx512_vl", "avx512_vnni"}), 64),
    Target("avx_vnni", frozenset({"avx2", "avx_vnni"}), 32),
    Target("avx2", frozenset({"avx2", "fma3"}), 32),
)

VNNI = frozenset({"avx512_vnni", "avx_vnni"})
"""Features, each of which multiplies bytes with sums in 32 bits. Without them `vpmaddubsw` does, which saturates at 16 bits."""

BELOW_VNNI = frozenset({"SSE41", "AVX", "AVX2", "AVX512_CORE"})
"""Values of oneDNN's `ONEDNN_MAX_CPU_ISA` that hide VNNI from it."""


def best(features: Set[str]) -> Target | None:
    """Return the best target for a CPU with these features, or None."""
    return next((t for t in TARGETS if t.needs <= features), None)


def onednn_features() -> frozenset[str]:
    """Return the CPU's features that oneDNN uses."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return machine.cpu_features() - (VNNI if most.upper() in BELOW_VNNI else frozenset())
