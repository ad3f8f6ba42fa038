"""Element types of kernel values: names, torch types, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

DType: TypeAlias = str
"""One of the keys of `TYPES`."""

Kind: TypeAlias = Literal["float", "int", "bool"]


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """An element type. `compute` is False for the half types, which are only loaded, stored, cast and moved;
    their math is done in f32."""

    name: DType
    torch: torch.dtype
    size: int
    kind: Kind
    signed: bool = True
    compute: bool = True


TYPES: dict[DType, TypeInfo] = {
    t.name: t
    for t in (
        TypeInfo("f32", torch.float32, 4, "float"),
        TypeInfo("f64", torch.float64, 8, "float"),
        TypeInfo("bf16", torch.bfloat16, 2, "float", compute=False),
        TypeInfo("f16", torch.float16, 2, "float", compute=False),
        TypeInfo("i8", torch.int8, 1, "int"),
        TypeInfo("u8", torch.uint8, 1, "int", signed=False),
        TypeInfo("i16", torch.int16, 2, "int"),
        TypeInfo("i32", torch.int32, 4, "int"),
        TypeInfo("i64", torch.int64, 8, "int"),
        TypeInfo("bool", torch.bool, 1, "bool", signed=False),
    )
}

_BY_TORCH = {t.torch: t.name for t in TYPES.values()}


def from_torch(dtype: torch.dtype) -> DType:
    """The kernel type of a torch dtype. Raises KeyError if kernels lack it (complex, float8 ...)."""
    return _BY_TORCH[dtype]


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of a kernel type."""
    return TYPES[dtype].torch


def is_float(dtype: DType) -> bool:
    return TYPES[dtype].kind == "float"


def is_int(dtype: DType) -> bool:
    return TYPES[dtype].kind == "int"


def compute_type(dtype: DType) -> DType:
    """The type in which math on `dtype` is done: f32 for the half types, the type itself otherwise."""
    return dtype if TYPES[dtype].compute else "f32"
