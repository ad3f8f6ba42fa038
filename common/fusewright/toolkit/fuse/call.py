"""Library calls inside a region, as a backend passes them to the fuser."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.plan.ir import Instruction


@dataclass(frozen=True)
class LibraryCall:
    """Instructions that compute the ops `ops` of a region: an anchor and the ops fused into its call."""

    ops: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    note: str = ""
