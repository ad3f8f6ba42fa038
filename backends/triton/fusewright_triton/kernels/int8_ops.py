"""Products with weights of 8 bits as torch operators that a plan can name, on GPUs and (interpreted) on CPU tensors.

`fusewright_triton::int8_linear`: activations of floats, `fusewright_triton::int8_mm`: of 8 bits too, sums of 32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusewright_triton.target import AMD

NAMESPACE = "fusewright_triton"
LINEAR = f"{NAMESPACE}::int8_linear.default"
MM = f"{NAMESPACE}::int8_mm.default"

FUNCTIONS = ("rows", "blocks")
"""The kernels of `int8.py`."""


@dataclass(frozen=True)
class Tiles:
    """Which kernel, its blocks of BM x BN results over BK products at a time, and how Triton builds it."""

    kernel: str
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def tiles(m: int, n: int, integer: bool, target: str) -> Tiles:
    """By measurement on an H100: few rows are bound by the bytes of the weight, so blocks are narrow where N is small,
    that every multiprocessor has some."""
    stages = 2 if target in AMD else 4
    if m <= ROWS:
        return Tiles("rows", 1, 4 if n <= 8192 else 8, 1024, 4, 2)
    if m <= 16:
        return Tiles("blocks", 16, 16 if n <= 4096 else 32, 256, 4, stages)
    bm = 64 if m <= 64 or integer else 128
    return Tiles("blocks", min(bm, 64), 32 if n <= 4096 else 64, 128, 4, stages)


ROWS = 2
"""Rows of activations up to which products are summed without the units for matrices."""


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, target: str
) -> torch.Tensor:
    """(x @ weight.T) * scale + bias with one rounding, at the end.

    x [M, K] of floats; weight [N, K] int8; scale and bias [N] of floats. The result has x's type.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _run(x, weight, scale, bias, out, target)


def int8_mm(x: torch.Tensor, weight: torch.Tensor, target: str) -> torch.Tensor:
    """x @ weight.T in int32: x [M, K] and weight [N, K] int8, of any M, N and K."""
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
    how = tiles(m, n, out.dtype == torch.int32, target)
    one = next((t.contiguous() for t in (scale, bias) if t is not None), out)
    args = (
        x, weight, one if scale is None else scale.contiguous(), one if bias is None else bias.contiguous(), out,
        m, n, k, x.stride(0), weight.stride(0), out.stride(0),
    )  # fmt: skip
    fixed = {
        "SCALED": scale is not None, "BIASED": bias is not None, "INTEGER": out.dtype == torch.int32, "EVEN": k % how.bk == 0,
        "BM": how.bm, "BN": how.bn, "BK": how.bk, "PRECISION": "ieee",
    }  # fmt: skip
    _launch(how, -(-m // how.bm) * -(-n // how.bn), args, fixed, x.device)
    return out


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(1) == 1 else t.contiguous()


def _launch(how: Tiles, programs: int, args: Sequence[Any], fixed: dict[str, Any], device: torch.device) -> None:
    if device.type == "cpu":
        _interpreted().run(FUNCTIONS.index(how.kernel), programs, args, **fixed)
        return
    from fusewright_triton.kernels import int8

    with torch.cuda.device(device):
        getattr(int8, how.kernel)[(programs,)](*args, **fixed, num_warps=how.warps, num_stages=how.stages)


@functools.cache
def source() -> str:
    """The kernels' source text."""
    return Path(__file__).with_name("int8.py").read_text()


@functools.cache
def _interpreted() -> Any:
    from fusewright_triton.simulate import Simulated

    return Simulated(source(), FUNCTIONS)


def _meta_linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _meta_mm(x: torch.Tensor, weight: torch.Tensor, target: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.int32)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("int8_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, str target) -> Tensor")
_library.define("int8_mm(Tensor x, Tensor weight, str target) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("int8_linear", int8_linear, _key)
    _library.impl("int8_mm", int8_mm, _key)
_library.impl("int8_linear", _meta_linear, "Meta")
_library.impl("int8_mm", _meta_mm, "Meta")
