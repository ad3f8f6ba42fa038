"""Row-major tensors, for kernels that take [m, k]: test for the layout, convert to it, count rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

from fusewright.interface import Size, TensorSpec, Value
from fusewright.toolkit.region.builder import Builder


def is_row_major(spec: TensorSpec) -> bool:
    """Whether a tensor is row-major, with symbolic sizes too."""
    step: Any = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and _formula(stride) != step:
            return False
        step = step * _formula(size)
    return True


def _formula(size: Size) -> Any:
    return size if isinstance(size, int) else size.expr


def rows_fit(spec: TensorSpec) -> bool:
    """Whether `row_major` can convert the tensor."""
    return spec.static or is_row_major(spec)


def row_count(shape: Sequence[Size]) -> Any:
    """Return the number of rows."""
    return reduce(operator.mul, map(_formula, shape), 1)


def row_major(x: Value, b: Builder) -> Value:
    """Return the value in row-major layout, copied if necessary."""
    if is_row_major(b.spec(x)):
        return b.at_hand(x)
    return b.row_major(x) if b.spec(x).static else Value(b.exact(x).id, x.spec)
