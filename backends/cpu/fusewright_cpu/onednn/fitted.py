"""Constants that were fitted to oneDNN's products on one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """Constants that were fitted on one machine. Choices that depend on them are still measured wherever the backend runs."""

    source: str
    packed_gain: float
    """The least speed-up for which a weight is packed, as the packed copy doubles its memory."""
    copy: float
    """Time of a kernel that transposes a matrix, relative to a plain copy of it."""
    small_product: int
    """The number of multiplications below which a bf16 product of symbolic size stays with eager: oneDNN's fixed cost of 12 us is
    more than the product takes."""
    mkl_flops: float
    """The least work for which a weight in MKL's layout is measured: below it, eager's call packs the weight in no time."""


FITTED = Fitted(
    "2-core AMD Zen 5 virtual machine (AVX-512), 2026-11-21, docs/studies/onednn.md",
    packed_gain=1.04, copy=1.5, small_product=1 << 15, mkl_flops=1e6,
)  # fmt: skip
