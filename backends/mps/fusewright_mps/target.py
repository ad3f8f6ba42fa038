"""Apple GPUs by chip: the properties that kernels are sized for.

Families and limits come from Apple's Metal Feature Set Tables. GPU cores and bandwidth are those of the chip's largest
configuration, from Apple's announcement; `of_chip` takes the actual number of cores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

SCALAR = frozenset({"fp16", "simdgroup_matrix"})


@dataclass(frozen=True)
class Target:
    """One chip. `cores`: GPU cores; `bandwidth`: memory bandwidth in GB/s; `source`: Apple's announcement.

    `lanes`: width of a SIMD group; `threadgroup`: threadgroup memory in bytes; `max_threads`: largest threadgroup; `buffers`: most
    buffers per kernel. `schedulers`: instruction schedulers per core, each issuing for one SIMD group; `in_flight`: SIMD groups per
    core needed to hide memory latency; `resident`: most threads per core. Apple does not publish these three; the values are
    measurements on M1 and M2 from github.com/philipturner/metal-benchmarks.
    """

    chip: str
    family: str
    cores: int
    bandwidth: float
    source: str
    features: frozenset[str] = SCALAR | {"bf16"}
    lanes: int = 32
    threadgroup: int = 32 * 1024
    max_threads: int = 1024
    buffers: int = 31
    schedulers: int = 4
    in_flight: int = 16
    resident: int = 3072

    @property
    def simdgroups(self) -> int:
        """Number of SIMD groups that keep the whole GPU's memory busy."""
        return self.cores * self.in_flight

    @property
    def flops(self) -> float:
        """fp32 operations per second: 128 lanes per core, one multiply-add each, at about 1.4 GHz."""
        return self.cores * 128 * 2 * 1.4e9


_M1 = SCALAR  # bf16 is emulated by Metal 3.1
_M5 = SCALAR | {"bf16", "neural_accelerator"}  # a matrix unit in each core, through Metal 4's tensor operations

TARGETS: dict[str, Target] = {
    t.chip: t
    for t in (
        Target("M1", "apple7", 8, 68, "Apple unleashes M1, 2020-11-10; MacBook Air (M1, 2020) specifications", _M1),
        Target("M1 Pro", "apple7", 16, 200, "Introducing M1 Pro and M1 Max, 2021-10-18", _M1),
        Target("M1 Max", "apple7", 32, 400, "Introducing M1 Pro and M1 Max, 2021-10-18", _M1),
        Target("M1 Ultra", "apple7", 64, 800, "Apple unveils M1 Ultra, 2022-03-08", _M1),
        Target("M2", "apple8", 10, 100, "Apple unveils M2, 2022-06-06"),
        Target("M2 Pro", "apple8", 19, 200, "Apple unveils M2 Pro and M2 Max, 2023-01-17"),
        Target("M2 Max", "apple8", 38, 400, "Apple unveils M2 Pro and M2 Max, 2023-01-17"),
        Target("M2 Ultra", "apple8", 76, 800, "Apple introduces M2 Ultra, 2023-06-05"),
        Target("M3", "apple9", 10, 100, "Apple unveils M3, M3 Pro, and M3 Max, 2023-10-30"),
        Target("M3 Pro", "apple9", 18, 150, "Apple unveils M3, M3 Pro, and M3 Max, 2023-10-30"),
        Target("M3 Max", "apple9", 40, 400, "Apple unveils M3, M3 Pro, and M3 Max, 2023-10-30"),
        Target("M3 Ultra", "apple9", 80, 819, "Apple reveals M3 Ultra, 2025-03-05"),
        Target("M4", "apple9", 10, 120, "Apple introduces M4 Pro and M4 Max, 2024-10-30"),
        Target("M4 Pro", "apple9", 20, 273, "Apple introduces M4 Pro and M4 Max, 2024-10-30"),
        Target("M4 Max", "apple9", 40, 546, "Apple introduces M4 Pro and M4 Max, 2024-10-30"),
        Target("M5", "apple10", 10, 153, "Apple unleashes M5, 2025-10-15", _M5),
        Target("M5 Pro", "apple10", 20, 307, "Apple debuts M5 Pro and M5 Max, 2026-03-03", _M5),
        Target("M5 Max", "apple10", 40, 614, "Apple debuts M5 Pro and M5 Max, 2026-03-03", _M5),
    )
}

TYPICAL = TARGETS["M3 Pro"]
"""The chip that kernels are sized for when none is named."""


def of_chip(name: str, cores: int | None = None) -> Target:
    """Return the target for a chip name such as "Apple M3 Pro". An unknown generation maps to the newest older one of its size."""
    found = re.search(r"\bM(\d+)(?: (Pro|Max|Ultra))?\b", name)
    generation, size = (int(found[1]), found[2]) if found else (1, None)
    known = [g for g in range(generation, 0, -1) if _named(g, size) in TARGETS]
    target = TARGETS[_named(known[0], size)] if known else TARGETS["M1"]
    return replace(target, cores=cores) if cores else target


def _named(generation: int, size: str | None) -> str:
    return f"M{generation} {size}" if size else f"M{generation}"
