"""The CPU that code is made for: triple, name, features, and what the emitter needs to know of them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import llvmlite
import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """`vector_bytes` is the width of a register; `masks` says that masked loads and stores are cheap; `fma`
    that it has one."""

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    masks: bool
    fma: bool

    def has(self, feature: str) -> bool:
        """Whether the feature string turns `feature` on."""
        return f"+{feature}" in self.features.split(",")

    @property
    def converts_half(self) -> bool:
        """Whether it converts f16; without, code would call compiler support functions that a JIT does not
        have."""
        return not self.triple.startswith(("x86_64", "amd64", "i686")) or self.has("f16c")

    @property
    def fingerprint(self) -> str:
        """Names everything that object code depends on; equal on equal machines."""
        version = ".".join(map(str, llvm.llvm_version_info))
        return f"{self.triple}/{self.cpu}/{self.features}/llvm {version}, llvmlite {llvmlite.__version__}"


def _from_features(triple: str, cpu: str, features: str) -> CpuTarget:
    on = set(features.split(","))
    if triple.startswith(("aarch64", "arm64")):
        return CpuTarget(triple, cpu, features, 16, masks=False, fma=True)
    if {"+avx512f", "+avx512bw", "+avx512vl", "+avx512dq"} <= on:
        return CpuTarget(triple, cpu, features, 64, masks=True, fma=True)
    if "+avx2" in on and "+fma" in on:
        return CpuTarget(triple, cpu, features, 32, masks=True, fma=True)
    return CpuTarget(triple, cpu, features, 16, masks=False, fma="+fma" in on)


@functools.cache
def host_target() -> CpuTarget:
    """This machine. The environment variable FUSEWRIGHT_CPU_ISA ("avx2" or "avx") narrows x86, for tests."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    name, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    narrow = os.environ.get("FUSEWRIGHT_CPU_ISA", "")
    if narrow and triple.startswith("x86_64"):
        return x86_target(narrow, triple)
    return _from_features(triple, name, features)


def x86_target(isa: str, triple: str = "x86_64-unknown-linux-gnu") -> CpuTarget:
    """A generic x86-64 of level "avx512", "avx2" or "avx" (with F16C, without AVX2, FMA and masks)."""
    cpu = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "avx": "x86-64-v2"}[isa]
    wide = {"avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"], "avx2": [], "avx": []}[isa]
    mid = ["avx", "f16c"] if isa == "avx" else ["avx", "avx2", "fma", "f16c", "bmi", "bmi2"]
    return _from_features(triple, cpu, ",".join(f"+{f}" for f in mid + wide))


def aarch64_target(cpu: str = "neoverse-v1", triple: str = "aarch64-unknown-linux-gnu") -> CpuTarget:
    """An AArch64 machine with NEON."""
    return _from_features(triple, cpu, "+neon,+fp-armv8,+fullfp16")


def target_machine(target: CpuTarget, opt: int = 2) -> llvm.TargetMachine:
    """LLVM's machine for `target`, with position-independent code, as a JIT needs on every platform."""
    if target.triple.split("-")[0] != llvm.get_process_triple().split("-")[0]:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        host_target()
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(
        cpu=target.cpu, features=target.features, opt=opt, reloc="pic", codemodel="small", jit=True
    )
