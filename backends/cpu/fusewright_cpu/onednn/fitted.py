"""Numbers that were fitted to oneDNN's products on one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """Numbers that were fitted on one machine. Choices that they take part in are measured wherever the backend runs."""

    source: str
    packed_gain: float
    """A packed copy of a weight doubles its memory, so it must be this much faster than the weight as it is."""
    copy: float
    """Time of a kernel that transposes a matrix, in plain copies of it."""
    small_product: int
    """Multiplications below which a bf16 product of symbolic size stays with eager: oneDNN's fixed cost of 12 us is more than
    it takes."""


FITTED = Fitted(
    "2-core AMD Zen 5 virtual machine (AVX-512), 2026-11-21, docs/studies/onednn.md",
    packed_gain=1.04, copy=1.5, small_product=1 << 15,
)  # fmt: skip
