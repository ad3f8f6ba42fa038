"""The Arm cores that this backend knows, what each brings, and what the system says of the one at hand.

Part numbers are those of MIDR_EL1 in Arm's Technical Reference Manuals; bits of the auxiliary vector are those of Linux
(Documentation/arch/arm64/elf_hwcaps.rst); names under macOS are those of sysctl(3).
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """One core. `sve_bits` is the length of an SVE vector, 0 without SVE."""

    core: str
    machine: str
    sve_bits: int
    features: frozenset[str]


_N1 = frozenset({"neon", "fp16_arith", "dot"})
_V1 = _N1 | {"bf16", "i8mm", "sve"}

# By (implementer, part) of MIDR_EL1; 0x41 is Arm, 0x61 Apple.
CORES: dict[tuple[int, int], Target] = {
    (0x41, 0xD0C): Target("neoverse-n1", "Graviton2", 0, _N1),
    (0x41, 0xD40): Target("neoverse-v1", "Graviton3", 256, _V1),
    (0x41, 0xD49): Target("neoverse-n2", "", 128, _V1 | {"sve2"}),
    (0x41, 0xD4F): Target("neoverse-v2", "Graviton4", 128, _V1 | {"sve2"}),
    (0x61, 0x023): Target("apple-m1", "Apple M1", 0, _N1),
    (0x61, 0x033): Target("apple-m2", "Apple M2", 0, _N1 | {"bf16", "i8mm"}),
    (0x61, 0x043): Target("apple-m3", "Apple M3", 0, _N1 | {"bf16", "i8mm"}),
}

NAMES: Mapping[str, Target] = {t.core: t for t in CORES.values()}

# Bit of AT_HWCAP, or 64 + bit of AT_HWCAP2 -> feature, by torch's name where it has one.
_HWCAP = {
    1: "neon", 10: "fp16_arith", 20: "dot", 22: "sve", 64 + 1: "sve2", 64 + 9: "sve_i8mm", 64 + 12: "sve_bf16",
    64 + 13: "i8mm", 64 + 14: "bf16",
}  # fmt: skip
_SYSCTL = {
    "hw.optional.AdvSIMD": "neon", "hw.optional.arm.FEAT_FP16": "fp16_arith", "hw.optional.arm.FEAT_DotProd": "dot",
    "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_I8MM": "i8mm",
}  # fmt: skip
_AT_HWCAP, _AT_HWCAP2, _PR_SVE_GET_VL = 16, 26, 51
_CPUINFO = Path("/proc/cpuinfo")
_MIDR = Path("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")


@dataclass(frozen=True)
class System:
    """What an operating system says of its CPU: Linux the auxiliary vector, the length of a vector and what identifies the
    core, macOS the values of `sysctl`."""

    hwcap: int = 0
    hwcap2: int = 0
    sve_bytes: int = 0
    cpuinfo: str = ""
    midr: int = 0
    sysctl: Mapping[str, int | str] = field(default_factory=dict)


def features_of(system: System) -> frozenset[str]:
    """Names of what the CPU has; "sve256" says how long an SVE vector is."""
    bits = system.hwcap | system.hwcap2 << 64
    found = {name for bit, name in _HWCAP.items() if bits >> bit & 1}
    found |= {name for key, name in _SYSCTL.items() if system.sysctl.get(key) == 1}
    return frozenset(found | {f"sve{8 * system.sve_bytes}"} if "sve" in found and system.sve_bytes else found)


def core_of(system: System) -> Target | None:
    """The core, or None for one that is not in the table or that the system does not name."""
    brand = str(system.sysctl.get("machdep.cpu.brand_string", ""))
    if brand:
        return next((t for t in CORES.values() if t.machine and brand.startswith(t.machine)), None)
    implementer = re.search(r"^CPU implementer\s*:\s*0x(\w+)$", system.cpuinfo, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*0x(\w+)$", system.cpuinfo, re.MULTILINE)
    if implementer and part:
        return CORES.get((int(implementer[1], 16), int(part[1], 16)))
    return CORES.get((system.midr >> 24 & 0xFF, system.midr >> 4 & 0xFFF))


@functools.cache
def system() -> System:
    """What this machine's says."""
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
