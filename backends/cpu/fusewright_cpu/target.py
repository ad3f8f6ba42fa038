"""The CPU that code is generated for: triple, name, features, and the properties that the emitter needs."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass

import llvmlite
import llvmlite.binding as llvm

from fusewright_cpu import arm
from fusewright_cpu.arm import ARM_CORES


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """`vector_bytes` is the width of a register; `masks` means that the tail of a row uses masked loads and
    stores; `fma` that there is a fused multiply-add."""

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    masks: bool
    fma: bool

    def has(self, feature: str) -> bool:
        """Return whether the feature string turns `feature` on."""
        return f"+{feature}" in self.features.split(",")

    @property
    def arm(self) -> bool:
        """Return whether this is a 64-bit Arm CPU."""
        return self.triple.startswith(("aarch64", "arm64"))

    @property
    def sve_bits(self) -> int:
        """Return the length of an SVE vector, 0 without SVE. Code runs with this length only."""
        return self.vector_bytes * 8 if self.has("sve") else 0

    @property
    def fma_overwrites_addend(self) -> bool:
        """Return whether a multiply-add can only overwrite its addend, as NEON's does, so that a constant addend costs a
        move. SVE's and x86's may overwrite a factor."""
        return self.arm and self.vector_bytes == 16

    @property
    def masks_by_lanes(self) -> bool:
        """Return whether masked loads and stores are split into lanes, as on NEON: whole vectors cost less."""
        return self.arm and not self.has("sve")

    @property
    def registers(self) -> int:
        """Return the number of vector registers."""
        return 32 if self.arm or self.has("avx512f") else 16

    @property
    def converts_half(self) -> bool:
        """Return whether the CPU converts f16; without that, code would call compiler support functions that a JIT does not
        have."""
        return not self.triple.startswith(("x86_64", "amd64", "i686")) or self.has("f16c")

    @property
    def fingerprint(self) -> str:
        """Return a string that names everything that object code depends on; equal on equal machines."""
        version = ".".join(map(str, llvm.llvm_version_info))
        sve = f"/sve{self.sve_bits}" if self.sve_bits else ""
        return f"{self.triple}/{self.cpu}/{self.features}{sve}/llvm {version}, llvmlite {llvmlite.__version__}"


SVE_BITS = (128, 256, 512)
"""Supported lengths of SVE vectors; for others, code uses NEON."""

def _from_features(triple: str, cpu: str, features: str) -> CpuTarget:
    on = set(features.split(","))
    if {"+avx512f", "+avx512bw", "+avx512vl", "+avx512dq"} <= on:
        return CpuTarget(triple, cpu, features, 64, masks=True, fma=True)
    if "+avx2" in on and "+fma" in on:
        return CpuTarget(triple, cpu, features, 32, masks=True, fma=True)
    return CpuTarget(triple, cpu, features, 16, masks=False, fma="+fma" in on)


ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18


def _permitted_tiles() -> bool:
    """Ask Linux for the tiles of AMX, which it gives a process only on demand (Documentation/arch/x86/xstate.rst)."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0


@functools.cache
def host_target() -> CpuTarget:
    """Return this machine's target. The environment variable FUSEWRIGHT_CPU_ISA narrows it, for tests: "avx2" or "avx" on x86, a
    core of `ARM_CORES` on Arm."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    name, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    if "+amx-tile" in features.split(",") and not _permitted_tiles():
        features = ",".join(f.replace("+", "-") if f.startswith("+amx") else f for f in features.split(","))
    narrow = os.environ.get("FUSEWRIGHT_CPU_ISA", "")
    if triple.startswith(("aarch64", "arm64")):
        return aarch64_target(narrow, triple) if narrow else _arm_host(triple)
    if narrow and triple.startswith("x86_64"):
        return x86_target(narrow, triple)
    return _from_features(triple, name, features)


def x86_target(isa: str, triple: str = "x86_64-unknown-linux-gnu") -> CpuTarget:
    """Return a generic x86-64 of level "avx512", "avx2" or "avx" (with F16C, without AVX2, FMA and masks).
    Raise ValueError for another."""
    levels = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "avx": "x86-64-v2"}
    if isa not in levels:
        raise ValueError(f"no level {isa!r} of x86-64 (FUSEWRIGHT_CPU_ISA); known are {', '.join(levels)}")
    cpu = levels[isa]
    wide = {"avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"], "avx2": [], "avx": []}[isa]
    mid = ["avx", "f16c"] if isa == "avx" else ["avx", "avx2", "fma", "f16c", "bmi", "bmi2"]
    return _from_features(triple, cpu, ",".join(f"+{f}" for f in mid + wide))


def aarch64_target(cpu: str = "neoverse-v1", triple: str = "") -> CpuTarget:
    """Return a core of `ARM_CORES`. Raise ValueError for an unknown one."""
    if cpu not in ARM_CORES:
        raise ValueError(f"no Arm core {cpu!r}; known are {', '.join(ARM_CORES)}")
    system = "arm64-apple-macosx" if cpu.startswith("apple") else "aarch64-unknown-linux-gnu"
    return _arm(triple or system, cpu, ARM_CORES[cpu].features, ARM_CORES[cpu].sve_bits)


def _arm(triple: str, cpu: str, features: tuple[str, ...], sve_bits: int) -> CpuTarget:
    """Return an Arm target, with SVE switched off if its length is not supported."""
    wide = sve_bits in SVE_BITS
    on = [f"+{f}" for f in features if wide or not f.startswith("sve")]
    text = ",".join(on if wide else [*on, "-sve"])
    return CpuTarget(triple, cpu, text, sve_bits // 8 if wide else 16, masks=True, fma=True)


def _arm_host(triple: str) -> CpuTarget:
    """Return this Arm machine's target, from what its system reports. A core that is not in the table is a generic one."""
    system = arm.system()
    core, found = arm.core_of(system) or ARM_CORES["generic"], arm.features_of(system)
    on = tuple(f for f in arm.LLVM if f in found)
    return _arm(triple, core.name, (*ARM_CORES["generic"].features, *on), 8 * system.sve_bytes)


def target_machine(target: CpuTarget, opt: int = 2) -> llvm.TargetMachine:
    """Return LLVM's target machine, with position-independent code, as a JIT needs on every platform."""
    if target.triple.split("-")[0] != llvm.get_process_triple().split("-")[0]:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        host_target()
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(
        cpu=target.cpu, features=target.features, opt=opt, reloc="pic", codemodel="small", jit=True
    )
