"""The int8 dot-product instructions of x86-64, best first. Source: Intel SDM volume 2, AMD64 APM volume 4."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


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
)


def best(features: Set[str]) -> Target | None:
    """Return the best target for a CPU with these features, or None."""
    return next((t for t in TARGETS if t.needs <= features), None)
