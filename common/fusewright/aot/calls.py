"""The signature of a call of a saved program: the structure of its arguments, and the type of each leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import storage
from fusewright.errors import ArtifactError
from fusewright.interface import HOST
from fusewright.plan.serial import DTYPES

Example = tuple[tuple[Any, ...], dict[str, Any]]
ORDINARY = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that are no more than their elements."""
_PLAIN = (bool, int, float, str, type(None))


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
        if type(x) in ORDINARY and x.layout is torch.strided and not x.is_nested:
            return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device.type)
        if type(x) in _PLAIN:
            return cls(value=x)
        raise ArtifactError(f"an argument is {text(x)}; programs take ordinary tensors and plain values")

    def fits(self, x: Any) -> bool:
        """Whether a program takes `x` here, in whatever layout."""
        if self.dtype is None:  # repr tells -0.0 from 0.0
            return type(x) is type(self.value) and repr(x) == repr(self.value)
        if type(x) not in ORDINARY or x.layout is not torch.strided or x.is_nested:
            return False
        return bool(x.dtype is self.dtype and x.shape == self.shape and x.device.type == self.device)

    def is_of(self, weight: Any) -> bool:
        """Whether a weight is exactly this in memory."""
        return self.fits(weight) and self.looks_like(weight) and not storage.lazy(weight)

    def looks_like(self, weight: torch.Tensor) -> bool:
        """Like `is_of`, for a weight that was this and has kept its address: `weight.data = weight.t()` does."""
        lazy = self.dtype is not None and self.dtype.is_complex and weight.is_conj()
        return weight.dtype is self.dtype and weight.shape == self.shape and weight.stride() == self.stride and not lazy

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
        return _text(self.dtype, self.shape, self.device) if self.dtype else repr(self.value)


def text(x: Any) -> str:
    """A value of a call, in words."""
    if not isinstance(x, torch.Tensor):
        return repr(x) if type(x) in _PLAIN else f"a {type(x).__qualname__}"
    if type(x) not in ORDINARY:
        return f"a {type(x).__qualname__}"
    if x.is_nested or x.layout is not torch.strided:
        return f"a tensor of layout {'nested' if x.is_nested else x.layout}"
    return _text(x.dtype, x.shape, str(x.device))


def _text(dtype: torch.dtype, shape: Sequence[int], device: str) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if device == HOST else f' on {device}'}"


class _Said(str):
    __repr__ = str.__str__


def call_text(leaves: Sequence[str], spec: Any) -> str:
    """The arguments of a call as they are written, given each leaf in words."""
    args, kwargs = compat.pytree.tree_unflatten(map(_Said, leaves), spec)
    return ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])


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
            raise ArtifactError(f"an input {why}. Give a tensor with memory of its own")
    if x.stride() == leaf.stride:
        return x
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=x.dtype, device=x.device).copy_(x)
