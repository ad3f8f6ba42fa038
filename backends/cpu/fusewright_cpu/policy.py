"""What the host may assume of a CPU that runs loop kernels on torch's own threads, and where torch's eager kernels are faster."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusewright.interface import DevicePolicy, OpView, Splits
from fusewright.toolkit.fuse.eager import Alone, Condition
from fusewright.toolkit.rules.space import layout_of
from fusewright_cpu.openmp import limited

LARGE = 1 << 17
"""The least bytes of a result for rows about size: for smaller ones the call overhead dominates."""
ZIPPED = 6
"""The most tensors that a kernel stacks along a new last dimension by zipping vectors: two of 1024x768 in 0.13 ms, eager 0.53."""


def _channels_last(op: OpView) -> bool:
    """Match dense channels-last images; eager's group norm refuses every other non-contiguous layout."""
    spec = next(op.inputs()).spec
    return spec is not None and spec.rank == 4 and layout_of(spec) == "channels_last"


def _fp32_rows(op: OpView) -> bool:
    """Match fp32 images whose rows are dense."""
    spec = op.out.spec
    return spec is not None and spec.dtype == torch.float32 and spec.stride[-1] == 1


def _fp32(op: OpView) -> bool:
    return op.out.spec is not None and op.out.spec.dtype == torch.float32


def _not_zipped(op: OpView) -> bool:
    spec = op.out.spec
    zipped = op.op == "stack" and spec is not None and op.arg("dim") in (-1, spec.rank - 1)
    return not zipped or len(op.arg("tensors")) > ZIPPED


ZEN5 = "2-core AMD Zen 5 virtual machine (AVX-512), 2026-11-21, docs/studies/cpu-models.md and gpu-kernels.md"

EAGER: tuple[Condition, ...] = (
    Condition(
        "group norms of channels-last images", frozenset({"group_norm", "group_norm_backward"}), when=_channels_last, source=ZEN5,
        why="a kernel's rows, a group's channels of all pixels, lie apart: with silu behind, 320x64x64 takes 1.96 ms, eager 0.28; "
        "a training step of 128x64x64 in 32 groups behind a convolution 21.5, eager 6.8 (a Xeon, one thread, 2026-11-27)",
    ),
    Condition(
        "rows of a table", frozenset({"embedding", "index_select"}), least=LARGE, alone=Alone.only_moves, source=ZEN5,
        why="a kernel looks at the index of every element",
    ),
    Condition(
        "copies", frozenset({"clone", "reshape", "cat", "stack", "repeat"}), least=LARGE, when=_not_zipped, source=ZEN5,
        alone=lambda k: k.only_moves() and not k.transposes(),
        why="eager moves runs of elements: every second column of 4096x1024 3.4 ms, eager 0.73",
    ),
    Condition(
        "images in fp32 planes, resized", frozenset({"upsample_bilinear2d"}), least=LARGE, when=_fp32_rows, source=ZEN5,
        alone=lambda k: True,
        why="eager goes along rows, a kernel gathers each element: 64x56x56 to 112x112 0.79 ms, eager 0.50",
    ),
    Condition(
        "places of fp32 images", frozenset({"grid_sampler_2d"}), least=LARGE, when=_fp32, alone=lambda k: True,
        source="one thread of an AMD EPYC (AVX-512), 2026-11-30, docs/studies/cpu-models.md",
        why="eager finds each place once for all channels, a kernel for each: 4x8x64x64 bilinear 0.34 ms, eager 0.22, nearest 0.22 "
        "and 0.13; of halves and volumes a kernel is mostly faster",
    ),
    Condition(
        "gradients of max pooling", frozenset({"max_pool2d_backward"}), least=LARGE,
        source="CPU time of one core of an AMD EPYC (AVX-512), 2026-11-23, docs/studies/training.md",
        why="eager adds each gradient to one element, a kernel looks at four windows for each: 8x64x56x56 6.6 ms, eager 0.68",
    ),
)  # fmt: skip

CONTRACTED = 1 << 22
"""The least multiplications of a sum that is left to a library, which has to be called and may need copies: of 2 x 128 x 128 x 128
as loops 0.20 to 0.41 ms, as products 0.15 to 0.17; of 4 x 256 x 8 x 256 0.08 to 0.18 and 0.12 to 0.13 (one thread of an AMD EPYC
(AVX-512), 2026-11-29)."""


def _contracts(dtype: torch.dtype, batch: int, m: int, k: int, n: int) -> bool:
    return min(m, k, n) >= 16 and batch * m * k * n >= CONTRACTED


CPU = DevicePolicy(
    arena=64,  # a cache line, and the widest vector
    workers=torch.get_num_threads,
    splits=Splits(),  # the defaults were fitted on a CPU
    batches=True,  # 144 products of 4x32x32: 1.1 ms, with copies 0.33 (one thread of a Xeon, 2026-11-28)
    contracts=_contracts,
    eager=EAGER,
    flops_per_second=2e11,
    bytes_per_second=2e10,
    call_seconds=3e-6,
    limit=limited,
    worth_waking=5e-6,
)
"""Speeds are those of two server cores. They predict for how long an op must run before a second thread pays off: convolutions and
linears of 3 us took 31 to 37 us on one thread of an EPYC and 31 to 34 on two, those of 20 us 70 and 50 (2026-11-23)."""


@dataclass(frozen=True)
class Loops:
    """Numbers of the formula that makes loops of a kernel, fitted on one machine. Other machines start from them too, as there is
    no library call to fall back to."""

    source: str
    block: int
    """Elements of a vectorised parallel axis in one work item."""
    tile: int
    """Tiles, along either axis, of one work item."""
    grain: int
    """Lane-instructions for which a second thread is worth waking (about 3 us of one core)."""


LOOPS = Loops(ZEN5, block=1024, tile=8, grain=150_000)
