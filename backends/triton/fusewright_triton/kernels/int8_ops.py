"""Products with 8-bit weights as torch operators that a plan can name, on GPUs and (interpreted) on CPU tensors.

`fusewright_triton::int8_linear`: float activations. `fusewright_triton::int8_mm`: 8-bit activations, 32-bit sums.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fusewright_triton.run.handwritten import NAMESPACE, Kernel, operator, or_else
from fusewright_triton.target import named

LINEAR = f"{NAMESPACE}::int8_linear.default"
MM = f"{NAMESPACE}::int8_mm.default"

BLOCKS, JOIN = Kernel("int8", "blocks"), Kernel("int8", "joined")

SHORTEST = 1024
"""The shortest part of a sum that is worth its own program."""

JOINED = 1024
"""Columns of one program that combines parts."""


LEAST_ROWS, MULTIPLE = 17, 8
"""What cuBLAS requires of an int8 product: the least rows of the left operand, and a divisor of K and N."""


@dataclass(frozen=True)
class Tiles:
    """Blocks of BM x BN results over BK products at a time, in `split` parts of K, and how Triton builds them."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    split: int = 1


@functools.cache
def tiles(m: int, n: int, k: int, itemsize: int, target: str) -> Tiles:
    """Return the tiles, as measured on an H100. With few rows the bytes of the weight are the limit: narrow blocks, and with fewer
    than two per multiprocessor K is split. Other targets get what fits their shared memory."""
    t = named(target)
    if m <= 16:
        bm, bn, bk, warps = 16, 32, 128, 4
    elif m <= 64:
        bm, bn, bk, warps = (64, 128, 128, 8) if n >= 12288 else (64, 32, 256, 8)
    elif m <= 128 and n < 8192:
        bm, bn, bk, warps = 64, 64, 256, 4
    else:
        bm, bn, bk, warps = 128, 64 if t.matrix == "wmma" else 128, 64 if itemsize > 1 and n >= 8192 else 128, 8
    split = 1
    while m <= 64 and -(-n // bn) * split < 2 * t.units and k // (2 * split) >= SHORTEST and split < 8:
        split *= 2
    stages = 5 if bm == 16 else 3
    room = t.shared - 4096
    while stages * bk * (bm * itemsize + bn) > room and (stages > 2 or bk > 32):
        stages, bk = (stages - 1, bk) if stages > 2 else (stages, bk // 2)
    return Tiles(bm, bn, bk, warps, stages if t.triton == "cuda" else 2, split)


def linear_by_torch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, target: str
) -> torch.Tensor:
    """Compute `int8_linear` as eager does, with a wider copy of the weight."""
    out = torch.nn.functional.linear(x, weight.to(x.dtype))
    out = out if scale is None else out * scale
    return (out if bias is None else out + bias).to(x.dtype)


def mm_by_torch(x: torch.Tensor, weight: torch.Tensor, target: str) -> torch.Tensor:
    """Compute `int8_mm` by the library, with operands that it refuses padded with zeros."""
    (m, k), n = x.shape, weight.shape[0]
    more = -k % MULTIPLE
    x = torch.nn.functional.pad(x, (0, more, 0, max(0, LEAST_ROWS - m)))
    weight = torch.nn.functional.pad(weight, (0, more, 0, -n % MULTIPLE))
    return torch._int_mm(x, weight.t())[:m, :n].contiguous()


@or_else(linear_by_torch)
def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, target: str
) -> torch.Tensor:
    """Compute (x @ weight.T) * scale + bias with one rounding, at the end.

    x [M, K] of floats; weight [N, K] int8; scale and bias [N] of floats. The result has x's type.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _run(x, weight, scale, bias, out, target)


@or_else(mm_by_torch)
def int8_mm(x: torch.Tensor, weight: torch.Tensor, target: str) -> torch.Tensor:
    """Compute x @ weight.T in int32: x [M, K] and weight [N, K] int8, of any M, N and K."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.int32, device=x.device)
    return _run(x, weight, None, None, out, target)


def _run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor,
    target: str,
) -> torch.Tensor:  # fmt: skip
    x, weight = _dense(x), _dense(weight)
    (m, k), n = x.shape, weight.shape[0]
    if not out.numel():
        return out
    integer = out.dtype == torch.int32
    how = tiles(m, n, k, x.element_size(), target)
    factors = [out if t is None else t.contiguous() for t in (scale, bias)]
    given = {"SCALED": scale is not None, "BIASED": bias is not None, "INTEGER": integer, "SPLIT": how.split}
    into = out if how.split == 1 else out.new_empty((how.split, m, n), dtype=torch.int32 if integer else torch.float32)
    fixed = {"EVEN": k % how.bk == 0, "BM": how.bm, "BN": how.bn, "BK": how.bk, "PRECISION": "ieee"}
    args: tuple[Any, ...] = (x, weight, *factors, into, m, n, k, x.stride(0), weight.stride(0), n)
    programs = -(-m // how.bm) * -(-n // how.bn) * how.split
    t = named(target)
    BLOCKS.launch(t, programs, args, {**given, **fixed}, num_warps=how.warps, num_stages=how.stages)
    if how.split > 1:
        over = m * -(-n // JOINED)
        JOIN.launch(t, over, (into, *factors, out, m, n), {**given, "BN": JOINED}, num_warps=4)
    return out


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(1) == 1 else t.contiguous()


def _meta_linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _meta_mm(x: torch.Tensor, weight: torch.Tensor, target: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.int32)


operator(
    "int8_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, str target) -> Tensor", int8_linear, _meta_linear
)
operator("int8_mm(Tensor x, Tensor weight, str target) -> Tensor", int8_mm, _meta_mm)
