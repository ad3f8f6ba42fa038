"""What the host may assume of an Apple GPU."""

from __future__ import annotations

from fusewright.interface import DevicePolicy, Splits
from fusewright_mps.target import Target

CALL_SECONDS = 5e-6
"""What encoding one dispatch from Python costs, in round figures: nobody has measured it here."""


def policy(target: Target) -> DevicePolicy:
    """No arena: MPSGraph copies inputs that begin inside of a buffer on macOS 14, so results are tensors of torch's allocator.
    Long rows are cut where there are fewer of them than cores, into no fewer parts than cores. No row prefers eager: nobody has
    measured where it is faster."""
    few, parts = target.cores, max(Splits.parts, 1 << (target.cores - 1).bit_length())
    return DevicePolicy(
        splits=Splits(parts=parts, few_points=few),
        flops_per_second=target.flops,
        bytes_per_second=target.bandwidth * 1e9,
        call_seconds=CALL_SECONDS,
    )
