"""The Arm core of this machine and its features, by torch's names. The table of cores is `fusewright_cpu.arm`."""

from __future__ import annotations

from collections.abc import Iterable

from fusewright_cpu.arm import ARM_CORES, ArmCore, System, core_of, features_of, system

_TORCH = {"fullfp16": "fp16_arith", "dotprod": "dot", "fp-armv8": ""}
"""LLVM's feature names -> torch's, where they differ; "" where torch has none."""


def here() -> tuple[str, frozenset[str]]:
    """Return the name of this machine's core ("aarch64" if unknown) and its features."""
    found = core_of(system())
    return found.name if found else "aarch64", said(system())


def said(of: System) -> frozenset[str]:
    """Return the features that a system reports."""
    found = features_of(of)
    return _named(found, 8 * of.sve_bytes if "sve" in found else 0)


def simulated(core: str) -> frozenset[str] | None:
    """Return the features of a core in the table, or None."""
    found: ArmCore | None = ARM_CORES.get(core)
    return None if found is None else _named(found.features, found.sve_bits)


def _named(features: Iterable[str], sve_bits: int) -> frozenset[str]:
    """Translate to torch's names, and add the SVE vector length, for example "sve256"."""
    names = {_TORCH.get(f, f) for f in features} - {""}
    return frozenset(names | ({f"sve{sve_bits}"} if sve_bits else set()))
