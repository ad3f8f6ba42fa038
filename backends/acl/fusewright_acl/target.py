"""The Arm core at hand and what it has, by the names that torch has for features. The table of cores is `fusewright_cpu.arm`."""

from __future__ import annotations

from collections.abc import Iterable

from fusewright_cpu.arm import ARM_CORES, ArmCore, System, core_of, features_of, system

_TORCH = {"fullfp16": "fp16_arith", "dotprod": "dot", "fp-armv8": ""}
"""Names of LLVM's that torch has another one for, or none."""


def here() -> tuple[str, frozenset[str]]:
    """The name of this machine's core, "aarch64" for one that is not known, and its features."""
    found = core_of(system())
    return found.name if found else "aarch64", said(system())


def said(of: System) -> frozenset[str]:
    """The features that a system tells of."""
    found = features_of(of)
    return _named(found, 8 * of.sve_bytes if "sve" in found else 0)


def simulated(core: str) -> frozenset[str] | None:
    """The features of a core of the table; None for one that is not there."""
    found: ArmCore | None = ARM_CORES.get(core)
    return None if found is None else _named(found.features, found.sve_bits)


def _named(features: Iterable[str], sve_bits: int) -> frozenset[str]:
    """With "sve256" for how long a vector of SVE is."""
    names = {_TORCH.get(f, f) for f in features} - {""}
    return frozenset(names | ({f"sve{sve_bits}"} if sve_bits else set()))
