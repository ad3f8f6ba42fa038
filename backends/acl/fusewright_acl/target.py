"""The Arm cores that this backend knows, and what each brings.

Part numbers are those of MIDR_EL1 in Arm's Technical Reference Manuals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One core. `sve_bits` is the length of an SVE vector, 0 without SVE."""

    core: str
    machine: str
    sve_bits: int
    features: frozenset[str]


_V1 = frozenset({"neon", "fp16_arith", "dot", "bf16", "i8mm", "sve"})

# By (implementer, part) of /proc/cpuinfo; 0x41 is Arm.
CORES: dict[tuple[int, int], Target] = {
    (0x41, 0xD0C): Target("neoverse-n1", "Graviton2", 0, frozenset({"neon", "fp16_arith", "dot"})),
    (0x41, 0xD40): Target("neoverse-v1", "Graviton3", 256, _V1),
    (0x41, 0xD49): Target("neoverse-n2", "", 128, _V1 | {"sve2"}),
    (0x41, 0xD4F): Target("neoverse-v2", "Graviton4", 128, _V1 | {"sve2"}),
}


def core_of(cpuinfo: str) -> Target | None:
    """The core that a text in the form of /proc/cpuinfo names, or None for one that is not in the table."""
    implementer = re.search(r"^CPU implementer\s*:\s*0x(\w+)$", cpuinfo, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*0x(\w+)$", cpuinfo, re.MULTILINE)
    return CORES.get((int(implementer[1], 16), int(part[1], 16))) if implementer and part else None
