"""Convert torch's traced metadata (FakeTensor, SymInt) to the interface's value objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fusewright import _torch_compat as compat
from fusewright.interface import HOST, Dim, Size, TensorSpec
from fusewright.sizes.expr import Extent
from fusewright.sizes.traced import from_sympy


def size(s: int | torch.SymInt) -> Size:
    """Convert a size to an int, or to a Dim if it is symbolic."""
    if isinstance(s, int):
        return s
    expr, seen, lo, hi = compat.symbol_of(s)
    found = from_sympy(expr)
    return found if isinstance(found, int) else Dim(found, seen, lo, hi)


def extent(s: int | torch.SymInt) -> Extent:
    """Convert a size to an int or a formula. Without bounds and hint, and so cheaper than `size`."""
    return s if isinstance(s, int) else from_sympy(compat.expression_of(s))


def contiguous_strides(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a contiguous tensor, of numbers, formulas or symbolic sizes; the latter are asked nothing."""
    strides: list[Any] = [1]
    for n in reversed(sizes[1:]):
        strides.append(n * strides[-1])
    return tuple(reversed(strides)) if sizes else ()


def by_stride(x: torch.Tensor) -> list[int]:
    """The dims of a tensor, the outermost in memory first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def tensor_spec(t: torch.Tensor, const: bool = False) -> TensorSpec:
    """The spec of a traced tensor. Layouts without strides (sparse, mkldnn) get empty strides."""
    stride = tuple(map(size, t.stride())) if t.layout is torch.strided else ()
    return TensorSpec(tuple(map(size, t.shape)), stride, t.dtype, device_text(t.device), const)


def device_text(device: torch.device) -> str:
    """A device as specs name it: by type and index. The host has no index."""
    return HOST if device.type == HOST else str(device)


def value_of(node: Node) -> Any:
    """The traced value of a node: a FakeTensor, SymInt, number, tuple of these, or None."""
    return node.meta.get("val")
