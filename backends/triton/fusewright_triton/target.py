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
class Measured:
    """Where numbers come from: the device, the day, and the records that hold what was measured."""

    device: str
    date: str
    records: tuple[str, ...]


@dataclass(frozen=True)
class Thresholds:
    """What decides between a kernel and a library's call, fitted on one device."""

    source: Measured
    product_results: int
    """Results from which on a product kernel is worth its compilation."""
    product_rows: int
    """Rows of a block: fewer leave a library's kernels for few rows faster."""
    library_flops: float
    """Operations a second of the library's products."""
    library_result: float
    """Seconds that the library needs for each result, which it writes while nothing is multiplied."""
    kernel_step: float
    """Seconds of one step of the ring of `kernels/hopper.py`, 128 x 128 x 64 products on each multiprocessor."""
    bandwidth: float
    """Bytes a second of a loop kernel."""
    narrow_tiles: float
    """Time of two tiles of 128 x 128 over that of one of 128 x 256, both full."""
    padded_results: int
    """Results from which on a width that suits no fast kernel is padded: the copy back must cost less than the slow kernel."""
    sibling_weights: int
    """Elements of concatenated weights at most: they are a second copy, and large products gain nothing."""
    gemv_rows: int
    """Rows up to which sums of a row of weights are faster than a library's products on matrix units."""
    gemv_weights: int
    """Elements of a weight below which a library's call takes no longer than a kernel."""
    int8_rows: int
    """Rows up to which a product that reads 8-bit weights as they are beats one with weights that are widened before it."""
    decode_keys: int
    """Keys below which torch's attention of few queries does as well."""
    narrow_head: int
    """Elements of a head up to which our attention with a mask is faster."""
    short_sequence: int
    """Keys up to which it is so whatever the mask."""
    mask_step: int
    """Bytes from one element of a mask to the next up to which reading it as it is costs less than a copy."""
    short_rows: float
    """Heads, as a share of the multiprocessors, from which on the kernel for few keys fills the device."""


@dataclass(frozen=True)
class Schedule:
    """Numbers of the formula that cuts loop kernels into programs. There is no library's call to stay with, so other targets
    start from them too; `autotune` measures around what the formula says."""

    source: Measured
    persistent: int
    """Longest row (elements) that one program holds in registers."""
    split_worth: int
    """Elements per program above which a split pays when multiprocessors idle."""
    max_split: int
    matrix: int
    """Elements of a matrix from which on its products with few rows have a rule of their own."""
    product_step: int
    """Elements of such a matrix, times rows that it multiplies, that a program holds at a time."""
    row_elements: tuple[int, int]
    """Elements of a held row to a lane: of rows below 1024, and of longer ones. Blocks of more threads leave a multiprocessor
    no room for a second one while the first waits for its reductions."""
    point_bytes_ahead: int
    """Widest loads that a lane has under way in a pointwise kernel of few operands."""
    early_words: int
    """Most 32-bit registers of a lane that loads may take before the first of them is needed."""
    sums_together: int
    """Sums that are taken together."""
    beyond_caches: int
    """Bytes of a tensor that no cache holds."""


_RESULTS = "docs/results/2026-11-21-"
H100 = Thresholds(
    Measured(
        "NVIDIA H100 80GB HBM3", "2026-11-21",
        tuple(f"{_RESULTS}h100-{name}.json" for name in ("products", "attention", "few-keys", "all")),
    ),
    product_results=1 << 22, product_rows=128, library_flops=760e12, library_result=0.48e-12, kernel_step=0.385e-6,
    bandwidth=3e12, narrow_tiles=1.15, padded_results=1 << 22, sibling_weights=1 << 25, gemv_rows=4, gemv_weights=1 << 17,
    int8_rows=256, decode_keys=64, narrow_head=64, short_sequence=64, mask_step=32, short_rows=0.5,
)  # fmt: skip
"""The model of products was fitted to 19 shapes, with errors of up to 15%."""

FORMULA = Schedule(
    Measured("NVIDIA H100 80GB HBM3", "2026-11-21", (f"{_RESULTS}h100-kernels.json",)),
    persistent=32768, split_worth=32768, max_split=128, matrix=1 << 16, product_step=8192, row_elements=(16, 32),
    point_bytes_ahead=2, early_words=64, sums_together=3, beyond_caches=1 << 27,
)  # fmt: skip


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
    fitted: Thresholds | None = None
    """None where nobody measured: a condition is then measured where that is cheap, else the library's call stays."""
    schedule: Schedule = FORMULA

    @property
    def bounds(self) -> Thresholds:
        """Between which a kernel is worth a try: this target's own, else those of the device that has been measured."""
        return self.fitted or H100

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


def _cuda(
    arch: str, kib: int, units: int, matrix: Literal["mma", "wgmma", "tcgen05"], *extra: str, fitted: Thresholds | None = None
) -> Target:
    fp8 = () if arch in ("sm_80", "sm_86") else _OCP
    features = frozenset({"fp16", "bf16", "tf32", *extra})
    return Target(arch, "cuda", 32, kib * KiB, units, matrix, 255, 64 * KiB, fp8, features, fitted)


NVIDIA: dict[str, Target] = {
    t.arch: t
    for t in (
        _cuda("sm_80", 163, 108, "mma"),
        _cuda("sm_86", 99, 84, "mma"),
        _cuda("sm_89", 99, 128, "mma"),
        _cuda("sm_90", 227, 132, "wgmma", "tma", fitted=H100),
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
