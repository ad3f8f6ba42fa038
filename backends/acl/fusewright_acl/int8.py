"""Weights of int8 as the kernels of `fusewright_cpu.kernels.int8_linear` read them: operators that run once for each weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fusewright_acl.fpmath import NAMESPACE
from fusewright_cpu.kernels import int8_linear

PACK, SUMS, COLUMNS = (f"{NAMESPACE}::{name}.default" for name in ("int8_pack", "int8_sums", "int8_columns"))


def int8_pack(weight: torch.Tensor, form: str) -> torch.Tensor:
    """int8 [n, k] as the kernel of this form reads it, one dimension."""
    return int8_linear.packed(weight, form).contiguous()


def int8_sums(weight: torch.Tensor) -> torch.Tensor:
    """The int32 sum of each row of int8 [n, k], padded as the kernel reads it."""
    return int8_linear.padded(weight.sum(1).to(torch.int32))


def int8_columns(values: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """One number for each of n columns, of one for all or for each, padded as the kernel reads it."""
    return int8_linear.padded(values.reshape(-1).to(dtype, copy=True).expand(n)).contiguous()


_OPERATORS: Mapping[Callable[..., torch.Tensor], str] = {
    int8_pack: "(Tensor weight, str form) -> Tensor",
    int8_sums: "(Tensor weight) -> Tensor",
    int8_columns: "(Tensor values, int n, ScalarType dtype) -> Tensor",
}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _function, _schema in _OPERATORS.items():
    _library.define(f"{_function.__name__}{_schema}")
    _library.impl(_function.__name__, _function, "CPU")
