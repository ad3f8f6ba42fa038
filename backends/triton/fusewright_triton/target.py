"""What the GPUs have that a Triton kernel can be tuned to. Numbers are the vendors' own.

NVIDIA: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
AMD: ROCm "AMD GPU specifications" (LDS, register files, wavefront size) and LLVM's AMDGPU usage guide.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

KiB = 1024


@dataclass(frozen=True)
class Target:
    """One GPU architecture. `shared` is the shared memory (LDS) that one block may use, in bytes.

    `lanes` is the width of a warp or wave, `units` how many multiprocessors (compute units) its common model has,
    `matrix` the kind of matrix instruction, `thread_registers` and `block_registers` how many 32-bit registers one
    thread and one block may have, `fp8` the 8-bit float types that it multiplies, by torch's names.
    """

    arch: str
    triton: Literal["cuda", "hip"]
    lanes: int
    shared: int
    units: int
    matrix: Literal["mma", "wgmma", "tcgen05", "mfma", "wmma"]
    thread_registers: int
    block_registers: int
    fp8: tuple[str, ...] = ()
    features: frozenset[str] = frozenset({"fp16", "bf16"})

    @property
    def options(self) -> tuple[tuple[str, object], ...]:
        """What Triton's compiler is told beside the number of warps. Denormals are kept, as eager keeps them."""
        common = (("sanitize_overflow", False),)
        return (*common, ("enable_reflect_ftz", False)) if self.triton == "cuda" else common

    @property
    def compiler(self) -> list[int | str]:
        """What Triton's compiler calls it: backend, architecture, lanes."""
        return [self.triton, int(self.arch.removeprefix("sm_")) if self.triton == "cuda" else self.arch, self.lanes]

    @property
    def all_features(self) -> frozenset[str]:
        """Features as a `Device` lists them: the matrix kind and 8-bit floats are features too."""
        return self.features | {self.matrix} | set(self.fp8)


_OCP = ("float8_e4m3fn", "float8_e5m2")
_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")  # CDNA3 has 8-bit formats of its own, CDNA4 those of the OCP


def _cuda(arch: str, kib: int, units: int, matrix: Literal["mma", "wgmma", "tcgen05"], *extra: str) -> Target:
    fp8 = () if arch in ("sm_80", "sm_86") else _OCP
    features = frozenset({"fp16", "bf16", "tf32", *extra})
    return Target(arch, "cuda", 32, kib * KiB, units, matrix, 255, 64 * KiB, fp8, features)


NVIDIA: dict[str, Target] = {
    t.arch: t
    for t in (
        _cuda("sm_80", 163, 108, "mma"),
        _cuda("sm_86", 99, 84, "mma"),
        _cuda("sm_89", 99, 128, "mma"),
        _cuda("sm_90", 227, 132, "wgmma", "tma"),
        _cuda("sm_100", 227, 148, "tcgen05", "tma"),
        _cuda("sm_120", 99, 170, "mma", "tma"),
    )
}

AMD: dict[str, Target] = {
    t.arch: t
    for t in (
        Target("gfx90a", "hip", 64, 64 * KiB, 104, "mfma", 512, 128 * KiB),  # MI210, MI250
        Target("gfx942", "hip", 64, 64 * KiB, 304, "mfma", 512, 128 * KiB, _FNUZ),  # MI300, MI325
        Target("gfx950", "hip", 64, 160 * KiB, 256, "mfma", 512, 128 * KiB, _OCP),  # MI350, MI355
        Target("gfx1100", "hip", 32, 64 * KiB, 96, "wmma", 256, 96 * KiB),  # RX 7900
    )
}


def nvidia(capability: tuple[int, int]) -> Target | None:
    """The target of a compute capability: its own row, or the nearest older one of the same major."""
    major, minor = capability
    older = [m for m in range(minor, -1, -1) if f"sm_{major}{m}" in NVIDIA]
    return NVIDIA[f"sm_{major}{older[0]}"] if older else None


def amd(name: str) -> Target | None:
    """The target of an architecture as HIP names it, e.g. "gfx942:sramecc+:xnack-"."""
    return AMD.get(name.split(":")[0])


@functools.cache
def named(arch: str) -> Target:
    """The target of a device by the name that its backend gives it. ValueError for others."""
    found = amd(arch) or (nvidia((int(arch[3:-1]), int(arch[-1]))) if arch.startswith("sm_") else None)
    if found is None:
        raise ValueError(f"{arch} has no target")
    return found
