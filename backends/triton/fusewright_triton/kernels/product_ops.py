"""Products with epilogues as a torch operator that a plan can name, on GPUs and (interpreted) on CPU tensors.

`fusewright_triton::linear_activation`: activation(x @ weight.T + bias), rows of any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright_triton.handwritten import NAMESPACE, Described, Kernel, operator
from fusewright_triton.target import Target, named

KERNEL = Kernel("product", "product")
LINEAR = f"{NAMESPACE}::linear_activation.default"

DTYPES = (torch.bfloat16, torch.float16)

ALIGNED = 16
"""Bytes that the address and the rows of a described matrix are multiples of (CUDA driver API, cuTensorMapEncodeTiled)."""

GROUP = 8

NARROW = 1.15
"""Time of two tiles of 128 x 128 over that of one of 128 x 256, both full: measured on an H100."""


@dataclass(frozen=True)
class Tiles:
    """Blocks of BM x BN results over BK products at a time, and how Triton builds the kernel."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    halves: bool = False


def tiles(t: Target, m: int, n: int) -> Tiles:
    """The blocks for an [M, N] result: wide ones where as many multiprocessors have work. By measurement on an H100; the
    other targets have what their shared memory holds."""
    if "tma" not in t.features or t.matrix != "wgmma":
        return Tiles(64, 64, 32, 4, 2) if t.shared <= 1 << 16 else Tiles(128, 128, 32, 8, 3)
    wide, narrow = (rounds(m, n, 128, bn, t.units) * bn for bn in (256, 128))
    return Tiles(128, 256, 64, 8, 4, True) if wide <= narrow * NARROW else Tiles(128, 128, 64, 8, 4)


def rounds(m: int, n: int, bm: int, bn: int, units: int) -> int:
    """How many tiles the busiest multiprocessor computes."""
    return -(-(-(-m // bm) * -(-n // bn)) // units)


def linear_activation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, target: str
) -> torch.Tensor:
    """activation(x @ weight.T + bias) with one rounding, at the end. A dense [.., N] for x [.., K] and weight [N, K].

    bf16 or fp16. `activation` is "", "gelu", "gelu_tanh", "silu", "sigmoid" or "relu".
    """
    rows, weight = _described(x.reshape(-1, x.shape[-1])), _described(weight)
    (m, k), n = rows.shape, weight.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    t = named(target)
    how = tiles(t, m, n)
    direct = n * out.element_size() % ALIGNED != 0
    block = (how.bm, how.bn // 2 if how.halves else how.bn)
    given, kept = Described(rows, (how.bm, how.bk)), Described(weight, (how.bn, how.bk))
    to = given if direct else Described(out.view(m, n), block)
    fixed = {"BIAS": bias is not None, "ACT": activation, "DIRECT": direct, "HALVES": how.halves}
    args = (given, kept, to, out if bias is None else bias.contiguous(), out, m, n, k, n)
    _launch(how, t, (m, n), args, fixed, x.device)
    return out


def _described(t: torch.Tensor) -> torch.Tensor:
    """A matrix that a descriptor can name: dense rows, addresses and rows aligned. Else a copy, with longer rows if need be."""
    step = ALIGNED // t.element_size()
    if t.stride(1) == 1 and t.stride(0) % step == 0 and t.data_ptr() % ALIGNED == 0 and t.stride(0) >= t.shape[1]:
        return t
    rows = t.new_empty((t.shape[0], -(-t.shape[1] // step) * step))
    return rows[:, : t.shape[1]].copy_(t)


def _launch(
    how: Tiles, t: Target, shape: tuple[int, int], args: Sequence[Any], fixed: dict[str, Any], device: torch.device
) -> None:
    count = -(-shape[0] // how.bm) * -(-shape[1] // how.bn)
    fixed = {**fixed, "BM": how.bm, "BN": how.bn, "BK": how.bk, "GROUP": GROUP}
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else t.units
    KERNEL.launch(t, min(count, units), args, fixed, num_warps=how.warps, num_stages=how.stages)


def _meta(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


operator(
    "linear_activation(Tensor x, Tensor weight, Tensor? bias, str activation, str target) -> Tensor",
    linear_activation,
    _meta,
)
