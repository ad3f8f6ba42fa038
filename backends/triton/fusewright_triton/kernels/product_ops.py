"""Products with epilogues as a torch operator that a plan can name, on GPUs and (interpreted) on CPU tensors.

`fusewright_triton::linear_activation`: activation(x @ weight.T + bias + residual), rows of any width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusewright_triton.run.handwritten import NAMESPACE, Kernel, TensorDescriptor, operator, or_else
from fusewright_triton.target import Target, named

ANY, HOPPER = Kernel("product", "product"), Kernel("hopper", "product")
LINEAR = f"{NAMESPACE}::linear_activation.default"

DTYPES = (torch.bfloat16, torch.float16)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "": lambda x: x,
}
"""The activations that the kernels apply to their sums, with eager's functions for them."""

ALIGNED = 16
"""The alignment (bytes) of address and rows of a matrix with a descriptor (CUDA driver API, cuTensorMapEncodeTiled)."""

GROUP = 8


@dataclass(frozen=True)
class Tiles:
    """Blocks of BM x BN results over BK products at a time, and how Triton builds the kernel."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    halves: bool = False


IN_TURNS = Tiles(128, 128, 64, 8, 6)
"""Tiles of `kernels/hopper.py`, per warp group: 64 registers of sums in each thread. A ring of 192 KiB (160 KiB is
a tenth slower) and 32 KiB of results fill the shared memory."""
STARTING, TURNING = 96, 112
"""Registers per thread at the start, and later in the threads that multiply; the loading warp gives up the difference."""


def tiles(t: Target, m: int, n: int) -> Tiles:
    """Return the blocks of `kernels/product.py` for an [M, N] result: wide ones where they occupy as many multiprocessors;
    on targets without measurements, what fits the shared memory."""
    if t.fitted is None or t.matrix != "wgmma":
        return Tiles(64, 64, 32, 4, 2) if t.shared <= 1 << 16 else Tiles(128, 128, 32, 8, 3)
    wide, narrow = (rounds(m, n, 128, bn, t.units) * bn for bn in (256, 128))
    return Tiles(128, 256, 64, 8, 4, True) if wide <= narrow * t.fitted.narrow_tiles else Tiles(128, 128, 64, 8, 4)


def rounds(m: int, n: int, bm: int, bn: int, units: int) -> int:
    """Return how many tiles the busiest multiprocessor computes."""
    return -(-(-(-m // bm) * -(-n // bn)) // units)


def gain(t: Target, m: int, k: int, n: int, saved: int) -> float:
    """Return the seconds that `kernels/hopper.py` should save over a library's product and a kernel that moves `saved` bytes."""
    by = t.bounds
    ours = rounds(m, n, IN_TURNS.bm, IN_TURNS.bn, t.units) * -(-k // IN_TURNS.bk) * by.kernel_step
    return 2 * m * n * k / by.library_flops + m * n * by.library_result + saved / by.bandwidth - ours


def by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    target: str,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `linear_activation` by torch's own calls."""
    out = torch.nn.functional.linear(x, weight, bias)
    return ACTIVATIONS[activation](out if residual is None else out + residual.reshape(out.shape)).contiguous()


@or_else(by_torch)
def linear_activation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    target: str,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute activation(x @ weight.T + bias + residual), dense [.., N], with one rounding at the end.

    x [.., K], weight [N, K], bf16 or fp16. `activation` is "", "gelu", "gelu_tanh", "silu", "sigmoid" or "relu"; the residual
    has the result's shape.
    """
    rows, weight = _described(x.reshape(-1, x.shape[-1])), _described(weight)
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    more = [out if t is None else _dense(t) for t in (bias, residual)]
    fixed = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ACT": activation}
    t = named(target)
    in_turns = _aligned(out) and t.matrix == "wgmma" and x.device.type != "cpu"
    (_in_turns if in_turns else _one_by_one)(t, rows, weight, out, more, fixed)
    return out


def _aligned(out: torch.Tensor) -> bool:
    """Return whether a descriptor can describe rows of a result."""
    return out.shape[-1] * out.element_size() % ALIGNED == 0


def _one_by_one(
    t: Target, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, more: Sequence[torch.Tensor], fixed: dict[str, Any]
) -> None:  # fmt: skip
    (m, k), n = x.shape, weight.shape[0]
    how, direct = tiles(t, m, n), not _aligned(out)
    given, kept = TensorDescriptor(x, (how.bm, how.bk)), TensorDescriptor(weight, (how.bn, how.bk))
    to = given if direct else TensorDescriptor(out.view(m, n), (how.bm, how.bn // 2 if how.halves else how.bn))
    fixed = {**fixed, **_blocks(how), "DIRECT": direct, "HALVES": how.halves}
    programs = _programs(t, m, n, how, out)
    ANY.launch(t, programs, (given, kept, to, *more, out, m, n, k), fixed, num_warps=how.warps, num_stages=how.stages)


# Gluon's API still changes: another Triton may need other code.
@or_else(_one_by_one, "one that is 10 to 30% slower runs instead")
def _in_turns(
    t: Target,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    more: Sequence[torch.Tensor],
    fixed: dict[str, Any],
) -> None:
    (m, k), n, how = x.shape, weight.shape[0], IN_TURNS
    bias, residual = more
    given, kept = TensorDescriptor(x, (how.bm, how.bk)), TensorDescriptor(weight, (how.bn, how.bk))
    added, to = (TensorDescriptor(v.view(m, n), (how.bm, how.bn // 4)) for v in (residual, out))
    # a residual needs room for all four quarters of a tile, which is a stage of the ring
    rooms = {"STAGES": how.stages - 1, "PARTS": 4} if fixed["RESIDUAL"] else {"STAGES": how.stages, "PARTS": 2}
    rooms["REGISTERS"] = TURNING
    programs, options = _programs(t, m, n, how, out), {"num_warps": how.warps, "maxnreg": STARTING}
    HOPPER.launch(t, programs, (given, kept, to, added, bias, m, n, k), {**fixed, **_blocks(how), **rooms}, **options)


def _dense(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor at an address that a descriptor may name."""
    return t if t.is_contiguous() and t.data_ptr() % ALIGNED == 0 else t.clone(memory_format=torch.contiguous_format)


def _blocks(how: Tiles) -> dict[str, int]:
    return {"BM": how.bm, "BN": how.bn, "BK": how.bk, "GROUP": GROUP}


def _programs(t: Target, m: int, n: int, how: Tiles, out: torch.Tensor) -> int:
    """One to a multiprocessor, or to a tile."""
    return min(-(-m // how.bm) * -(-n // how.bn), units_of(t, out.device))


def units_of(t: Target, device: torch.device) -> int:
    """Multiprocessors of a device, or of the target where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else t.units


def _described(t: torch.Tensor) -> torch.Tensor:
    """A matrix that a descriptor can name: dense rows, addresses and rows aligned. Else a copy, with longer rows if need be."""
    step = ALIGNED // t.element_size()
    if t.stride(1) == 1 and t.stride(0) % step == 0 and t.data_ptr() % ALIGNED == 0 and t.stride(0) >= t.shape[1]:
        return t
    rows = t.new_empty((t.shape[0], -(-t.shape[1] // step) * step))
    return rows[:, : t.shape[1]].copy_(t)


def _meta(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


operator(
    "linear_activation(Tensor x, Tensor weight, Tensor? bias, str activation, str target, Tensor? residual=None) -> Tensor",
    linear_activation,
    _meta,
)
