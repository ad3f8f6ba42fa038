"""What a module can hold: loop kernels, and kernels that are written by hand. Both have a name, buffers, sizes and scalars,
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
from fusewright_cpu.emit.entry import emit_kernel
from fusewright_cpu.emit.text import Module
from fusewright_cpu.emit.unroll import unrolled
from fusewright_cpu.kernels.attention import Attention, emit_attention
from fusewright_cpu.kernels.bf16_linear import Bf16Linear, emit_bf16_linear
from fusewright_cpu.kernels.gemv import Gemv, emit_gemv
from fusewright_cpu.kernels.int8_conv import Int8Conv, emit_int8_conv
from fusewright_cpu.kernels.int8_linear import Int8Linear, emit_int8_linear

Source: TypeAlias = Kernel | Attention | Gemv | Int8Linear | Int8Conv | Bf16Linear


def hash_of(source: Source) -> str:
    """SHA-256 (hex) of what the function computes; equal in every process."""
    if isinstance(source, Kernel):
        return structural_hash(source)
    return hashlib.sha256(json.dumps(to_json(source), sort_keys=True).encode()).hexdigest()


def emit(module: Module, source: Source, name: str, parallel: bool) -> None:
    """Adds the function `name` to the module. `UnsupportedKernel` when its target lacks what the source needs."""
    match source:
        case Kernel():
            emit_kernel(module, unrolled(source), name, parallel)
        case Attention():
            emit_attention(module, source, name, parallel)
        case Gemv():
            emit_gemv(module, source, name, parallel)
        case Int8Linear():
            emit_int8_linear(module, source, name, parallel)
        case Int8Conv():
            emit_int8_conv(module, source, name, parallel)
        case Bf16Linear():
            emit_bf16_linear(module, source, name, parallel)


_BY_HAND: dict[str, type[Attention | Gemv | Int8Linear | Int8Conv | Bf16Linear]] = {
    "attention": Attention, "gemv": Gemv, "int8_linear": Int8Linear, "int8_conv": Int8Conv, "bf16_linear": Bf16Linear,
}  # fmt: skip


def to_json(source: Source) -> dict[str, Any]:
    """The source as JSON data."""
    if isinstance(source, Kernel):
        return kernel_to_json(source)
    return {next(k for k, t in _BY_HAND.items() if isinstance(source, t)): asdict(source)}


def from_json(data: Mapping[str, Any]) -> Source:
    """What `to_json` described. ValueError for data of another version."""
    for name, kind in _BY_HAND.items():
        if name in data:
            return kind(**data[name])
    return kernel_from_json(dict(data))
