"""Properties of the GPUs that Triton kernels are tuned to. Numbers are the vendors' own.

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
    """The source of fitted numbers: the device, the date, and the records of the measurements."""

    device: str
    date: str
    records: tuple[str, ...]


@dataclass(frozen=True)
class Thresholds:
    """Thresholds for choosing between a kernel and a library call, fitted on one device."""

    source: Measured
    product_results: int
    """The least number of results for which a product kernel is worth compiling."""
    product_rows: int
    """Rows of a block: for fewer, a library's kernels for few rows are faster."""
    library_flops: float
    """Operations per second of the library's products."""
    unaligned_flops: tuple[float, float]
    """The same of its kernels for rows of an odd length, and of others that are no multiple of 16 bytes."""
    library_result: float
    """Seconds that the library takes to write one result, while nothing is multiplied."""
    kernel_step: float
    """Seconds for one step of the ring of `kernels/hopper.py`: 128 x 128 x 64 products on each multiprocessor."""
    bandwidth: float
    """Bytes per second of a loop kernel."""
    narrow_tiles: float
    """Time of two full tiles of 128 x 128 divided by that of one of 128 x 256."""
    padded_results: int
    """The least elements of a matrix for which a product of widths that suit no fast kernel is padded: copies in front of it and
    behind must cost less than that kernel. On an H200 products of odd features in bf16 took 11 us for 1024 x 319 x 256 (padded 4, a
    copy 5), 109 for 65536 rows (26, 68) (2026-11-28, docs/studies/gpu-products.md)."""
    sibling_weights: int
    """The most elements of concatenated weights: they are a second copy, and large products gain nothing."""
    gemv_rows: int
    """The most rows for which dot products with rows of the weight (GEMV) beat a library's product on matrix units."""
    gemv_weights: int
    """The least elements of a weight for which a kernel beats a library call."""
    int8_rows: int
    """The most rows for which a product that reads 8-bit weights directly beats one with weights widened beforehand."""
    decode_keys: int
    """The least keys for which our attention of few queries beats torch's."""
    narrow_head: int
    """The largest head dimension for which our attention with a mask is faster."""
    short_sequence: int
    """The most keys for which our attention is faster whatever the mask."""
    mask_step: int
    """The largest stride (bytes) between elements of a mask for which reading it in place costs less than a copy."""
    short_rows: float
    """The least heads, as a share of the multiprocessors, for which the kernel for few keys fills the device."""


@dataclass(frozen=True)
class Schedule:
    """Numbers of the formula that cuts loop kernels into programs. Other targets start from them too, as there is no library call
    to fall back to; `autotune` measures around the formula's choice."""

    source: Measured
    persistent: int
    """The longest row (elements) that one program holds in registers."""
    split_worth: int
    """Elements per program above which a split pays when multiprocessors idle."""
    max_split: int
    matrix: int
    """The least elements of a matrix whose products with few rows have a rule of their own."""
    product_step: int
    """Elements of such a matrix, times the rows that it multiplies, that a program holds at a time."""
    row_elements: tuple[int, int]
    """Elements of a held row per lane: for rows below 1024, and for longer ones. With larger thread blocks a multiprocessor
    has no room for a second block while the first waits for its reductions."""
    point_bytes_ahead: int
    """The widest loads that a lane has in flight in a pointwise kernel of few operands."""
    lane_words: int
    """The most 32-bit words of rows next to each other per lane, counting every operand once. On an H200 a softmax of eight
    operands (10 words an element) took 163 us with 8 rows and 320 words, 200 with 160, 193 with 4 rows, 261 with 16, 278 with 1."""
    early_words: int
    """The most 32-bit registers of a lane for loads issued before the first of them is needed."""
    sums_together: int
    """The number of sums that are reduced together."""
    steps_ahead: int
    """The number of steps of a recurrence whose loads are under way."""
    beyond_caches: int
    """The least bytes of a tensor that no cache holds."""


_RESULTS = "docs/results/2026-11-21-"
H100 = Thresholds(
    Measured(
        "NVIDIA H100 80GB HBM3", "2026-11-21",
        tuple(f"{_RESULTS}h100-{name}.json" for name in ("products", "attention", "few-keys", "all")),
    ),
    product_results=1 << 22, product_rows=128, library_flops=760e12, unaligned_flops=(130e12, 230e12), library_result=0.48e-12,
    kernel_step=0.385e-6, bandwidth=3e12, narrow_tiles=1.15, padded_results=1 << 18, sibling_weights=1 << 25, gemv_rows=4,
    gemv_weights=1 << 17, int8_rows=256, decode_keys=64, narrow_head=64, short_sequence=64, mask_step=32, short_rows=0.5,
)  # fmt: skip
"""The model of products was fitted to 19 shapes, with errors of up to 15%. For rows of any length: 8192 x 768 x 30522 took 1632 us
(with 30528 columns 578); with odd rows on all sides, 8205 x 2949 x 5921 on an H200, 2130 (364), 135e12 operations a second."""

FORMULA = Schedule(
    Measured("NVIDIA H100 80GB HBM3", "2026-11-21", (f"{_RESULTS}h100-kernels.json",)),
    persistent=32768, split_worth=32768, max_split=128, matrix=1 << 16, product_step=8192, row_elements=(16, 32),
    point_bytes_ahead=2, lane_words=320, early_words=64, sums_together=3, steps_ahead=4, beyond_caches=1 << 27,
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One GPU architecture. `shared` is the shared memory (LDS) that one block may use, in bytes.

    `lanes` is the width of a warp or wave, `units` the number of multiprocessors (compute units) of its common model,
    `matrix` the kind of matrix instruction, `thread_registers` and `block_registers` the number of 32-bit registers that one
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
    """None for a target without measurements: a condition is then measured where that is cheap, else the library call stays."""
    schedule: Schedule = FORMULA

    @property
    def bounds(self) -> Thresholds:
        """Return the bounds within which a kernel is worth a try: this target's own, else those of the measured device."""
        return self.fitted or H100

    @property
    def options(self) -> tuple[tuple[str, object], ...]:
        """Return the options for Triton's compiler besides the number of warps. Denormals are kept, as eager keeps them."""
        common = (("sanitize_overflow", False),)
        return (*common, ("enable_reflect_ftz", False)) if self.triton == "cuda" else common

    @property
    def compiler(self) -> list[int | str]:
        """Return the target in Triton's terms: backend, architecture, lanes."""
        return [self.triton, int(self.arch.removeprefix("sm_")) if self.triton == "cuda" else self.arch, self.lanes]

    @property
    def all_features(self) -> frozenset[str]:
        """Return features as a `Device` lists them, including the matrix kind and 8-bit floats."""
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
    """Return the target of a compute capability: its own row, or the nearest older one of the same major."""
    major, minor = capability
    older = [m for m in range(minor, -1, -1) if f"sm_{major}{m}" in NVIDIA]
    return NVIDIA[f"sm_{major}{older[0]}"] if older else None


def amd(name: str) -> Target | None:
    """Return the target of an architecture as HIP names it, e.g. "gfx942:sramecc+:xnack-"."""
    return AMD.get(name.split(":")[0])


@functools.cache
def named(arch: str) -> Target:
    """Return the target of a device by the name that its backend gives it. Raise ValueError for others."""
    found = amd(arch) or (nvidia((int(arch[3:-1]), int(arch[-1]))) if arch.startswith("sm_") else None)
    if found is None:
        raise ValueError(f"{arch} has no target")
    return found
