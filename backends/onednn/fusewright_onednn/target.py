"""The x86-64 instruction-set levels that this backend knows, and the version of torch's oneDNN.

Levels are those of the x86-64 psABI (https://gitlab.com/x86-psABIs/x86-64-ABI), with torch's names for the features.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One instruction-set level."""

    arch: str
    requires: frozenset[str]


_V3 = frozenset({"avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt"})

# Best first. AVX2 is the minimum for oneDNN's fast kernels.
TARGETS: tuple[Target, ...] = (
    Target("x86_64_v4", _V3 | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}),
    Target("x86_64_v3", _V3),
)


def best(features: frozenset[str]) -> Target | None:
    """Return the highest level whose features are all present; None below AVX2."""
    return next((t for t in TARGETS if t.requires <= features), None)


def onednn_version(build_info: str) -> str:
    """Return oneDNN's version from the text of `torch.__config__.show()`, "" if the text does not give it."""
    found = re.search(r"MKL-DNN v([\d.]+)|oneDNN v([\d.]+)", build_info)
    return (found[1] or found[2]) if found else ""
