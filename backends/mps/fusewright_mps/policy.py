"""What the host may assume of an Apple GPU."""

from __future__ import annotations

from fusewright.interface import DevicePolicy
from fusewright_mps.target import Target

CALL_SECONDS = 5e-6
"""What encoding one dispatch from Python costs, in round figures: nobody has measured it here."""


def policy(target: Target) -> DevicePolicy:
    """No arena: MPSGraph copies inputs that begin inside of a buffer on macOS 14, so results are tensors of torch's allocator.
    Loops are cut as the host cuts them by default, and no row prefers eager: nobody has measured where it is faster."""
    return DevicePolicy(
        flops_per_second=target.flops, bytes_per_second=target.bandwidth * 1e9, call_seconds=CALL_SECONDS
    )
