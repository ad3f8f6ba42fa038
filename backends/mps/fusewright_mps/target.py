"""Apple GPU families. Limits: Apple's Metal Feature Set Tables."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One GPU family. `threadgroup` is the threadgroup memory in bytes, `lanes` the width of a SIMD group."""

    family: str
    lanes: int = 32
    threadgroup: int = 32 * 1024
    max_threads: int = 1024
    features: frozenset[str] = frozenset({"fp16", "bf16", "simdgroup_matrix"})


# M1 computes bf16 in software (Metal 3.1 emulates it); M3 brought dynamic caching with family 9.
FAMILIES: dict[int, Target] = {
    1: Target("apple7", features=frozenset({"fp16", "simdgroup_matrix"})),
    2: Target("apple8"),
    3: Target("apple9"),
    4: Target("apple9"),
}


def family_of(chip: str) -> Target:
    """The target of a chip by its name, e.g. "Apple M3 Pro". An unknown one counts as the newest known."""
    found = re.search(r"\bM(\d+)\b", chip)
    generation = int(found.group(1)) if found else 1
    return FAMILIES.get(generation, FAMILIES[max(FAMILIES)])
