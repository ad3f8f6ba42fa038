"""From torch's traced metadata (FakeTensor, SymInt) to the interface's value objects."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import Node

from fusewright import _torch_compat as compat
from fusewright.interface import Dim, Size, TensorSpec


def size(s: int | torch.SymInt) -> Size:
    """A size as an int, or a Dim when it is symbolic."""
    if isinstance(s, int):
        return s
    text, seen, lo, hi = compat.symbol_of(s)
    return Dim(text, seen, lo, hi) if not text.lstrip("-").isdigit() else int(text)


def symbols(s: Size) -> list[str]:
    """Names in a symbolic size, those of functions among them; none in a number."""
    return re.findall(r"[A-Za-z_]\w*", s.symbol) if isinstance(s, Dim) else []


def tensor_spec(t: torch.Tensor, const: bool = False) -> TensorSpec:
    """The spec of a traced tensor. Layouts without strides (sparse, mkldnn) get empty strides."""
    if t.layout is not torch.strided:
        return TensorSpec(tuple(map(size, t.shape)), (), t.dtype, t.device.type, const)
    return TensorSpec(tuple(map(size, t.shape)), tuple(map(size, t.stride())), t.dtype, t.device.type, const)


def value_of(node: Node) -> Any:
    """The traced value of a node: a FakeTensor, SymInt, number, tuple of these, or None."""
    return node.meta.get("val")
