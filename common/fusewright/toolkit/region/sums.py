"""Sums of products, written as ops for the fuser."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusewright.interface import Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import spec_of


def write_sum(total: Value | None, products: Iterable[tuple[Value, Value]], out: Value, b: Builder) -> None:
    """Write `total` and the products as ops for the fuser, which make `out`; the sum is fp32."""
    *others, last = products
    for factors in others:
        total = _added(total, factors, None, b)
    if spec_of(out).dtype is torch.float32:
        _added(total, last, out, b)
    else:
        b.append_op("cast", _added(total, last, None, b), spec_of(out).dtype, out=out)


def _added(total: Value | None, factors: tuple[Value, Value], out: Value | None, b: Builder) -> Value:
    return b.append_op("mul", *factors, out=out) if total is None else b.append_op("addcmul", total, *factors, out=out)
