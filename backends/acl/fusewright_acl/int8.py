"""Operators that pack int8 weights for the kernels of `fusewright_cpu.kernels`; they run once per weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fusewright_acl.fpmath import NAMESPACE
from fusewright_cpu.kernels.arm import int8_conv, int8_linear

PACK, PACK_CONV, SUMS, COLUMNS = (
    f"{NAMESPACE}::{name}.default" for name in ("int8_pack", "int8_pack_conv", "int8_sums", "int8_columns")
)


def int8_pack(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Pack int8 [n, k] for the kernel of this form, into one dimension."""
    return int8_linear.packed(weight, form).contiguous()


def int8_pack_conv(weight: torch.Tensor, groups: int, run: int, form: str) -> torch.Tensor:
    """Pack int8 [n, depth, ky, kx] for the kernel of this form, into one dimension. `run`: contiguous bytes in `x`."""
    return int8_conv.packed(weight, groups, run, form).contiguous()


def int8_sums(weight: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Return the int32 sum of each row of int8 [n, ...], padded as the kernel reads it."""
    return int8_conv.padded(weight.flatten(1).sum(1).to(torch.int32), groups)


def int8_columns(values: torch.Tensor, n: int, dtype: torch.dtype, groups: int = 1) -> torch.Tensor:
    """Return one number for each of n columns, given one for all or one for each, padded as the kernel reads it."""
    return int8_conv.padded(values.reshape(-1).to(dtype, copy=True).expand(n), groups).contiguous()


_OPERATORS: Mapping[Callable[..., torch.Tensor], str] = {
    int8_pack: "(Tensor weight, str form) -> Tensor",
    int8_pack_conv: "(Tensor weight, int groups, int run, str form) -> Tensor",
    int8_sums: "(Tensor weight, int groups=1) -> Tensor",
    int8_columns: "(Tensor values, int n, ScalarType dtype, int groups=1) -> Tensor",
}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _function, _schema in _OPERATORS.items():
    _library.define(f"{_function.__name__}{_schema}")
    _library.impl(_function.__name__, _function, "CPU")
