"""Opaque callables of backends, checked for their contract: correct shapes and dtypes, inputs unmodified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fusewright.errors import BackendContractError
from fusewright.graph.spec import device_text
from fusewright.interface import Region, Size, TensorSpec
from fusewright.ops.strides import CHANNELS_LAST, like_channels_last
from fusewright.sizes.expr import Atom, evaluate


def guarded(
    backend: str, region: Region, fn: Callable[..., Sequence[torch.Tensor]]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Wrap `fn` to compare its results with the region's outputs at every call. Raises `BackendContractError`."""
    specs = [v.spec for v in region.outputs]

    def complain(what: str) -> None:
        raise BackendContractError(f"backend {backend!r}, {region.name} ({region.op_names}): {what}. This is a bug of the backend.")

    def run(*args: Any) -> Sequence[torch.Tensor]:
        tensors = [a for a in args if isinstance(a, torch.Tensor) and not a.is_inference()]
        versions = [t._version for t in tensors]
        results = tuple(fn(*args))
        if [t._version for t in tensors] != versions:
            complain("it changed one of its inputs in place")
        memory = {address(t) for t in tensors} - {0}
        if any(isinstance(t, torch.Tensor) and address(t) in memory for t in results):
            complain("a result shares memory with an input")
        if len(results) != len(specs):
            complain(f"it returned {len(results)} results where {len(specs)} were expected")
        for k, (result, spec) in enumerate(zip(results, specs, strict=True)):
            if spec is not None and (reason := mismatch(result, spec)):
                complain(f"result {k} {reason}")
        return results

    return run


def address(t: torch.Tensor) -> int:
    """The start address of the tensor's memory; 0 if it has none."""
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else 0


def mismatch(t: object, spec: TensorSpec, sizes: Mapping[Atom, int] = MappingProxyType({})) -> str:
    """How a tensor differs from its spec, or "". `sizes` has the values of symbols; strides that need others are not compared, nor
    are symbolic sizes, strides of size-1 dimensions, and sparse tensors, which have no strides."""
    if not isinstance(t, torch.Tensor):
        return f"is {type(t).__name__}, not a tensor"
    if t.dtype != spec.dtype:
        return f"has dtype {t.dtype}, expected {spec.dtype}"
    if spec.device not in (t.device.type, device_text(t.device)):
        return f"is on {t.device}, expected {spec.device}"
    if t.dim() != spec.rank or any(isinstance(e, int) and e != s for s, e in zip(t.shape, spec.shape, strict=True)):
        return f"has shape {tuple(t.shape)}, expected {tuple(map(str, spec.shape))}"
    if spec.stride and t.layout is torch.strided and t.numel():
        wanted = [_known(s, sizes) for s in spec.stride]
        if any(n != 1 and w not in (s, None) for n, s, w in zip(t.shape, t.stride(), wanted, strict=True)):
            return f"has strides {t.stride()}, expected ({', '.join(map(str, spec.stride))})"
    return ""


def another_format(t: torch.Tensor, spec: TensorSpec) -> str:
    """How the memory format that operators take from strides, also those of dims of size one, differs from its spec's, or ""."""
    if not spec.static or not spec.stride or t.dim() not in CHANNELS_LAST or t.layout is not torch.strided:
        return ""
    if 1 not in t.shape or t.stride() == spec.stride:
        return ""
    traced = torch.empty_strided(spec.shape, spec.stride, device="meta")  # type: ignore[arg-type]
    same = like_channels_last(t) == like_channels_last(traced)
    return "" if same else f"has strides {t.stride()}, expected {tuple(traced.stride())}"


def _known(size: Size, sizes: Mapping[Atom, int]) -> int | None:
    """A size as a number; None where a symbol of it is not known."""
    if isinstance(size, int):
        return size
    try:
        return evaluate(size.expr, sizes)
    except KeyError:
        return None
