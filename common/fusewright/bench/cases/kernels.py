"""Memory-bound kernels: small functions that every contender compiles, judged by bandwidth against a measured copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fusewright.bench.suite import Built, UnknownModel
from fusewright.errors import nearest

PREFIX = "kernel"
SIZES: dict[str, tuple[int, int]] = {
    "64x768": (64, 768),
    "1024x768": (1024, 768),
    "16384x1024": (16384, 1024),
}
"""Rows by columns: within a core's L2 (192 KiB per tensor in fp32), within L3 (3 MiB), out of cache (64 MiB). Other sizes are
parsed from the name."""
_SIZE = re.compile(r"[1-9]\d*x[1-9]\d*")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Kernel:
    """`fn(*inputs)`; `inputs` names the shape of each: "full" is (rows, columns), "row" is (columns,)."""

    fn: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]


def _silu_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


def _add_gelu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + y)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, dim=-1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _bias_residual_norm(
    x: torch.Tensor, shift: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return F.layer_norm(x + shift + residual, x.shape[-1:], weight, bias)


KERNELS: dict[str, Kernel] = {
    "add_gelu": Kernel(_add_gelu, ("full", "full")),
    "silu_mul": Kernel(_silu_mul, ("full", "full")),
    "layer_norm": Kernel(_layer_norm, ("full", "row", "row")),
    "softmax": Kernel(_softmax, ("full",)),
    "rms_norm": Kernel(_rms_norm, ("full", "row")),
    "bias_residual_norm": Kernel(_bias_residual_norm, ("full", "row", "full", "row", "row")),
}


def is_kernel(model: str) -> bool:
    """Whether a model's name is a kernel's."""
    return model.startswith(f"{PREFIX}:")


def names() -> list[str]:
    """`kernel:NAME:SIZE` for every kernel and size, as `build_kernel` takes them."""
    return [f"{PREFIX}:{kernel}:{size}" for kernel in KERNELS for size in SIZES]


def check(ref: str) -> tuple[str, str]:
    """The name and the size in `kernel:NAME:SIZE`. Raises `UnknownModel`."""
    name, _, size = ref.partition(":")[2].partition(":")
    if name not in KERNELS or not _SIZE.fullmatch(size):
        raise UnknownModel(f"there is no kernel {ref!r}; {nearest(ref, names())}")
    return name, size


def build_kernel(ref: str, dtype: str) -> Built:
    """The call for `kernel:NAME:SIZE`. `extra["bytes"]` is what it must move: every input read once, the output written once.

    Raises `UnknownModel`.
    """
    name, size = check(ref)
    if dtype not in DTYPES:
        raise UnknownModel(f"{ref} is computed in {', '.join(DTYPES)}, not {dtype}")
    kernel, shape = KERNELS[name], tuple(map(int, size.split("x")))
    generator = torch.Generator().manual_seed(0)
    args = tuple(
        torch.randn(shape if kind == "full" else shape[1:], generator=generator).to(DTYPES[dtype])
        for kind in kernel.inputs
    )
    moved = sum(arg.nbytes for arg in args) + args[0].nbytes
    return Built(ref, kernel.fn, args, dtype=dtype, extra={"bytes": moved})


def bandwidth(row: dict[str, Any], contender: str) -> float | None:
    """GB/s that a contender reached in a row; None if it was not measured."""
    entry = row["contenders"].get(contender, {})
    if entry.get("status") != "ok":
        return None
    return float(row["extra"]["bytes"] / entry["steady"]["median_ms"] / 1e6)
