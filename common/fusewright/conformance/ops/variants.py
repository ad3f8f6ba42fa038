"""The ways in which C2 calls a sample of a row: sizes, layouts and values."""

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
    """A way to call a sample. `first`: only the first sample of a row, `weights`: its weights are constants, and change;
    `relative`: each element is held to its own size, not to the largest one's."""

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
    """The same values with the dimensions in the opposite order in memory."""
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def gapped(t: Tensor) -> Tensor:
    """The same values in every second element of memory, from the second on."""
    memory = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 1, dtype=t.dtype, device=t.device)
    return memory[..., 1::2].copy_(t)


def expanded(t: Tensor) -> Tensor:
    """The first row again and again, without memory of its own."""
    return t[:1].expand(t.shape)


# ---------------------------------------------------------------- values

ODD = (math.nan, math.inf, -math.inf, -0.0)
WIDE = (2**62 + 1, -(2**53) - 1, 2**31, -(2**31) - 1)
"""Integers that are not themselves in a float, in fp64 or in 32 bits."""
FAR = 64
"""What exp and the like overflow from in fp32, times a sample."""


def _first(args: list[object], wanted: Callable[[Tensor], bool]) -> Tensor:
    """The first dense tensor of that kind. NotFinite where there is none."""
    found = (t for t in rules.tensors(args) if t.is_contiguous() and t.numel() > 4 and wanted(t))
    if (first := next(found, None)) is None:
        raise NotFinite
    return first


def _spread(t: Tensor, values: tuple[float, ...]) -> None:
    """Write values into a tensor, a quarter of it apart."""
    t.view(-1)[torch.arange(4) * (t.numel() // 4)] = torch.tensor(values, dtype=t.dtype)


def odd(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """NaN, infinities and a negative zero in the first floating tensor."""
    args, kwargs = arguments(op, case, dtype)
    if op.kind is Kind.RANDOM:
        raise NotFinite
    _spread(_first(args, Tensor.is_floating_point), ODD)
    return args, kwargs


def _far(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """The first floating tensor times `FAR`."""
    args, kwargs = arguments(op, case, dtype)
    if op.kind is Kind.RANDOM:
        raise NotFinite
    _first(args, Tensor.is_floating_point).mul_(FAR)
    return args, kwargs


def _near_zero(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """Numbers from 2^-4 down to 2^-23, of functions of one tensor: there 1 + x has not the digits of x."""
    args, kwargs = arguments(op, case, dtype)
    if op.kind is not Kind.POINTWISE or len(list(rules.tensors(args))) != 1:
        raise NotFinite
    x = _first(args, Tensor.is_floating_point)
    x.mul_(torch.exp2(-(4.0 + torch.arange(x.numel()) % 20)).view(x.shape))
    return args, kwargs


def _wide(op: Op, case: Case, dtype: torch.dtype) -> Arguments:
    """Large integers in the first tensor of the dtype under test, which indices and sizes are not of."""
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
"""What is tried with each row and dtype. What eager refuses of it is left out."""
