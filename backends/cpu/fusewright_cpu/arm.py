"""The known 64-bit Arm cores with their features, and what the system reports about this machine's core.

Part numbers are those of MIDR_EL1 in Arm's Technical Reference Manuals; bits of the auxiliary vector are those of Linux
(Documentation/arch/arm64/elf_hwcaps.rst); names under macOS are those of sysctl(3). Features have LLVM's names.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ArmCore:
    """`part` is (implementer, part) of MIDR_EL1, or None if unknown; `machine` names machines with this core. `sve_bits` is
    the length of an SVE vector, 0 without SVE."""

    name: str
    part: tuple[int, int] | None
    machine: str
    sve_bits: int
    features: tuple[str, ...]


_N1 = ("neon", "fp-armv8", "fullfp16", "dotprod")
_MATRIX = (*_N1, "bf16", "i8mm")
_ARM, _APPLE = 0x41, 0x61
CORES: tuple[ArmCore, ...] = (
    ArmCore("generic", None, "", 0, ("neon", "fp-armv8")),
    ArmCore("neoverse-n1", (_ARM, 0xD0C), "Graviton2", 0, _N1),
    ArmCore("neoverse-v1", (_ARM, 0xD40), "Graviton3", 256, (*_MATRIX, "sve")),
    ArmCore("neoverse-n2", (_ARM, 0xD49), "", 128, (*_MATRIX, "sve", "sve2")),
    ArmCore("neoverse-v2", (_ARM, 0xD4F), "Graviton4", 128, (*_MATRIX, "sve", "sve2")),
    ArmCore("apple-m1", (_APPLE, 0x023), "Apple M1", 0, _N1),
    ArmCore("apple-m2", (_APPLE, 0x033), "Apple M2", 0, _MATRIX),
    ArmCore("apple-m3", (_APPLE, 0x043), "Apple M3", 0, _MATRIX),
    ArmCore("apple-m4", None, "Apple M4", 0, _MATRIX),
)
"""From Arm's Technical Reference Manuals, and LLVM's table of Apple's cores."""
ARM_CORES: Mapping[str, ArmCore] = {c.name: c for c in CORES}

LLVM = ("fullfp16", "dotprod", "sve", "sve2", "i8mm", "bf16")
"""Features that not every core has and that generated code uses."""

# Bit of AT_HWCAP, or 64 + bit of AT_HWCAP2.
_HWCAP = {
    1: "neon", 10: "fullfp16", 20: "dotprod", 22: "sve", 64 + 1: "sve2", 64 + 9: "sve_i8mm", 64 + 12: "sve_bf16",
    64 + 13: "i8mm", 64 + 14: "bf16",
}  # fmt: skip
_SYSCTL = {
    "hw.optional.AdvSIMD": "neon", "hw.optional.arm.FEAT_FP16": "fullfp16", "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_I8MM": "i8mm",
}  # fmt: skip
_AT_HWCAP, _AT_HWCAP2, _PR_SVE_GET_VL = 16, 26, 51
_CPUINFO = Path("/proc/cpuinfo")
_MIDR = Path("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")


@dataclass(frozen=True)
class System:
    """What an operating system reports about its CPU: on Linux the auxiliary vector, the vector length and the core's
    identification, on macOS the values of `sysctl`."""

    hwcap: int = 0
    hwcap2: int = 0
    sve_bytes: int = 0
    cpuinfo: str = ""
    midr: int = 0
    sysctl: Mapping[str, int | str] = field(default_factory=dict)


def features_of(system: System) -> frozenset[str]:
    """Return the CPU's feature names. Some are not LLVM's: "sve_i8mm" and "sve_bf16" are parts of two that are."""
    bits = system.hwcap | system.hwcap2 << 64
    found = {name for bit, name in _HWCAP.items() if bits >> bit & 1}
    return frozenset(found | {name for key, name in _SYSCTL.items() if system.sysctl.get(key) == 1})


def core_of(system: System) -> ArmCore | None:
    """Return the core, or None for one that is not in the table or that the system does not name."""
    brand = str(system.sysctl.get("machdep.cpu.brand_string", ""))
    if brand:
        return next((c for c in CORES if c.machine and brand.startswith(c.machine)), None)
    implementer = re.search(r"^CPU implementer\s*:\s*0x(\w+)$", system.cpuinfo, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*0x(\w+)$", system.cpuinfo, re.MULTILINE)
    found = (system.midr >> 24 & 0xFF, system.midr >> 4 & 0xFFF)
    if implementer and part:
        found = (int(implementer[1], 16), int(part[1], 16))
    return next((c for c in CORES if c.part == found), None)


@functools.cache
def system() -> System:
    """Return what this machine's system reports."""
    return _macos() if sys.platform == "darwin" else _linux() if sys.platform == "linux" else System()


def _linux() -> System:
    libc = ctypes.CDLL(None)
    libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    vector = libc.prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)  # -1 without SVE
    midr = int(_MIDR.read_text(), 16) if _MIDR.exists() else 0
    cpuinfo = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    return System(libc.getauxval(_AT_HWCAP), libc.getauxval(_AT_HWCAP2), vector & 0xFFFF if vector > 0 else 0, cpuinfo, midr)


def _macos() -> System:
    libc, found = ctypes.CDLL(None), {}
    for name in (*_SYSCTL, "machdep.cpu.brand_string"):
        data, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
        if libc.sysctlbyname(name.encode(), data, ctypes.byref(size), None, 0) == 0:
            found[name] = data.value.decode() if "brand" in name else int.from_bytes(data.raw[: size.value], "little")
    return System(sysctl=found)
