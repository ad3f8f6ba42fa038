"""The signature of a call of a saved program: the structure of its arguments, and the type of each leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import storage
from fusewright.errors import ArtifactError
from fusewright.plan.serial import DTYPES

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Leaf:
    """A tensor by its type, or (`dtype` is None) a plain value that the program was specialized for."""

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: str = ""
    value: Any = None

    @classmethod
    def of(cls, x: Any) -> Leaf:
        """Raises `ArtifactError` for anything else."""
        if isinstance(x, torch.Tensor):
            return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device.type)
        if isinstance(x, bool | int | float | str | None):
            return cls(value=x)
        raise ArtifactError(f"an argument is {type(x).__name__}; programs take tensors and plain values")

    def fits(self, x: Any) -> bool:
        if self.dtype is None:
            return type(x) is type(self.value) and x == self.value
        return isinstance(x, torch.Tensor) and (x.dtype, tuple(x.shape), x.device.type) == (
            self.dtype,
            self.shape,
            self.device,
        )

    def as_data(self) -> list[Any]:
        name = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return [list(self.shape), list(self.stride), name, self.device, self.value]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Leaf:
        shape, stride, dtype, device, value = data
        return cls(
            tuple(map(int, shape)), tuple(map(int, stride)), DTYPES[dtype] if dtype else None, str(device), value
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}" if self.dtype else repr(self.value)


def as_example(given: Any) -> Example:
    """The arguments of one call, given as a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Leaves and structure, independent of the order of keyword arguments."""
    leaves, spec = compat.pytree.tree_flatten((args, {k: kwargs[k] for k in sorted(kwargs)}))
    return leaves, spec


def laid_out(x: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """Return the tensor in the memory layout that kernels rely on."""
    if why := storage.why_not(x):
        x = storage.materialized(x)
        if why := storage.why_not(x):
            raise ArtifactError(f"an input {why}")
    if x.stride() == leaf.stride:
        return x
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=x.dtype, device=x.device).copy_(x)
