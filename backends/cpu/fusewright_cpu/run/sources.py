"""The contents of a module: loop kernels and handwritten kernels. Both have a name, buffers, sizes and scalars,
and become a C function of the same form (see `entry`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.serial import from_json as kernel_from_json
from fusewright.toolkit.ir.serial import structural_hash
from fusewright.toolkit.ir.serial import to_json as kernel_to_json
from fusewright_cpu.kernels.by_hand import (
    AmxLinear,
    Attention,
    Bf16Linear,
    Depthwise,
    DirectConv,
    FirstConv,
    Gemv,
    Int8Conv,
    Int8Linear,
    VectorLinear,
)

ByHand: TypeAlias = (
    Attention | Gemv | Int8Linear | Int8Conv | Bf16Linear | Depthwise | AmxLinear | VectorLinear | DirectConv | FirstConv
)
Source: TypeAlias = Kernel | ByHand


def hash_of(source: Source) -> str:
    """Return the SHA-256 (hex) of what the function computes; equal in every process."""
    if isinstance(source, Kernel):
        return structural_hash(source)
    return hashlib.sha256(json.dumps(to_json(source), sort_keys=True).encode()).hexdigest()


def symbol_name(kernel_hash: str) -> str:
    """Return the symbol of a kernel in object code."""
    return f"fw_{kernel_hash[:32]}"


_BY_HAND: dict[str, type[ByHand]] = {
    "attention": Attention, "gemv": Gemv, "int8_linear": Int8Linear, "int8_conv": Int8Conv, "bf16_linear": Bf16Linear,
    "depthwise": Depthwise, "amx_linear": AmxLinear, "vector_linear": VectorLinear,
    "direct_conv": DirectConv, "first_conv": FirstConv,
}  # fmt: skip


def to_json(source: Source) -> dict[str, Any]:
    """Return the source as JSON data."""
    if isinstance(source, Kernel):
        return kernel_to_json(source)
    return {next(k for k, t in _BY_HAND.items() if isinstance(source, t)): asdict(source)}


def from_json(data: Mapping[str, Any]) -> Source:
    """Restore the source from `to_json`. Raise ValueError for data of another version."""
    for name, kind in _BY_HAND.items():
        if name in data:
            return kind(**data[name])
    return kernel_from_json(dict(data))
