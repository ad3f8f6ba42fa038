"""What the host may assume of an Apple GPU."""

from __future__ import annotations

from fusewright.interface import DevicePolicy, Splits
from fusewright_mps.target import Target

CALL_SECONDS = 5e-6
"""Rough cost of encoding one dispatch from Python; not measured."""


def policy(target: Target) -> DevicePolicy:
    """Return the device policy. There is no arena: on macOS 14 MPSGraph copies inputs that start inside a buffer, so torch's
    allocator provides results. Long rows are split where there are fewer rows than cores, into at least as many parts as cores.
    No op prefers eager, because nobody has measured where eager is faster."""
    few, parts = target.cores, max(Splits.parts, 1 << (target.cores - 1).bit_length())
    return DevicePolicy(
        splits=Splits(parts=parts, few_points=few),
        flops_per_second=target.flops,
        bytes_per_second=target.bandwidth * 1e9,
        call_seconds=CALL_SECONDS,
    )
