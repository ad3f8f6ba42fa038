"""The variants in which C2 calls each sample of a row: sizes, layouts and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewright.conformance.ops import calls
from fusewright.conformance.ops.calls import Arguments, arguments
from fusewright.conformance.ops.samples import Case, NotFinite
from fusewright.ops import Kind, Op, rules

Change = Callable[[Op, Case, torch.dtype], Arguments]


@dataclass(frozen=True)
class Variant:
    """A way to call a sample. `first`: only the first sample of a row; `weights`: weights are constants, and change;
    `relative`: errors are relative to each element, not to the largest."""

    name: str
    make: Change
    symbolic: bool = False
    first: bool = True
    weights: bool = False
    relative: bool = False


def _plain(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    return arguments(op, case, dtype)


def _sized(size: Callable[[int], int]) -> Change:
    return lambda op, case, dtype: arguments(op, calls.resized(case, size), dtype)


def _laid_out(layout: Callable[[Tensor], Tensor]) -> Change:
    def make(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
        args, kwargs = arguments(op, case, dtype)
        return calls.mapped(args, lambda t: layout(t) if t.layout is torch.strided and t.dim() else t), kwargs

    return make


def transposed(t: Tensor) -> Tensor:
    """The same values with reversed dimension order in memory."""
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def gapped(t: Tensor) -> Tensor:
    """The same values in every second element of memory, starting from the second."""
    memory = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 1, dtype=t.dtype, device=t.device)
    return memory[..., 1::2].copy_(t)


def expanded(t: Tensor) -> Tensor:
    """The first row, expanded without memory of its own."""
    return t[:1].expand(t.shape)


# ---------------------------------------------------------------- values

ODD = (math.nan, math.inf, -math.inf, -0.0)
WIDE = (2**62 + 1, -(2**53) - 1, 2**31, -(2**31) - 1)
"""Integers that fp32, fp64 or 32-bit integers cannot represent."""
FAR = 64
"""A factor that makes exp and the like overflow in fp32."""


def _first(args: list[object], wanted: Callable[[Tensor], bool]) -> Tensor:
    """The first dense tensor of that kind. NotFinite if there is none."""
    found = (t for t in rules.tensors(args) if t.is_contiguous() and t.numel() > 4 and wanted(t))
    if (first := next(found, None)) is None:
        raise NotFinite
    return first


def _spread(t: Tensor, values: tuple[float, ...]) -> None:
    """Write values into a tensor, a quarter of its length apart."""
    t.view(-1)[torch.arange(4) * (t.numel() // 4)] = torch.tensor(values, dtype=t.dtype)


def odd(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """Put NaN, infinities and a negative zero into the first floating-point tensor."""
    args, kwargs = arguments(op, case, dtype)
    if op.kind is Kind.RANDOM:
        raise NotFinite
    _spread(_first(args, Tensor.is_floating_point), ODD)
    return args, kwargs


def _far(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """Multiply the first floating-point tensor by `FAR`."""
    args, kwargs = arguments(op, case, dtype)
    if op.kind is Kind.RANDOM:
        raise NotFinite
    _first(args, Tensor.is_floating_point).mul_(FAR)
    return args, kwargs


def _near_zero(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """Numbers from 2^-4 down to 2^-23 for functions of one tensor: 1 + x loses the digits of x there."""
    args, kwargs = arguments(op, case, dtype)
    if op.kind is not Kind.POINTWISE or len(list(rules.tensors(args))) != 1:
        raise NotFinite
    x = _first(args, Tensor.is_floating_point)
    x.mul_(torch.exp2(-(4.0 + torch.arange(x.numel()) % 20)).view(x.shape))
    return args, kwargs


def _wide(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """Large integers in the first tensor of the dtype under test, which excludes indices and sizes."""
    if dtype is not torch.int64 or op.kind is Kind.RANDOM:
        raise NotFinite
    args, kwargs = arguments(op, case, dtype)
    narrow = rules.tensors(arguments(op, case, torch.int32)[0])
    under_test = {id(t) for t, n in zip(rules.tensors(args), narrow, strict=True) if n.dtype is torch.int32}
    _spread(_first(args, lambda t: id(t) in under_test), WIDE)
    return args, kwargs


VARIANTS = (
    Variant("static", _plain, first=False, weights=True),
    Variant("dynamic", _plain, symbolic=True, first=False),
    Variant("large", _sized(lambda n: 16 * n + 5 if n > 1 else n)),
    Variant("transposed", _laid_out(transposed)),
    Variant("gapped", _laid_out(gapped)),
    Variant("expanded", _laid_out(expanded)),
    Variant("empty", _sized(lambda n: 0 if n == 3 else n)),
    Variant("ones", _sized(lambda n: 1)),
    Variant("not finite", odd),
    Variant("far", _far),
    Variant("near zero", _near_zero, relative=True),
    Variant("wide", _wide),
)
"""The variants for each row and dtype. Those that eager refuses are skipped."""
