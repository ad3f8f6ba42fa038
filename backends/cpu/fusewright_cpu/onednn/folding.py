"""Batch norms of constants folded into the convolution in front of them."""

from __future__ import annotations

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.pattern import Match


def folded(m: Match, b: Builder, dtype: torch.dtype | None = None) -> tuple[Ref, Ref | None]:
    """Return weight and bias with the batch norm's scale and shift folded in (in fp32). `dtype`: the type of a folded weight, by
    default the weight's own.

    The bias stays in fp32: its rounding error would be the same at every point of the image, so averaging over the image would
    not reduce it.
    """
    op, norm = m.anchor, m.get("batch_norm")
    given = op.arg("weight").spec
    weight = b.exact(op.arg("weight"))
    if given.rank == 3:
        weight = b.prepare("aten::unsqueeze.default", weight, 2)
    bias = None if op.arg("bias") is None else b.exact(op.arg("bias"))
    if norm is not None:
        points = (1,) * max(given.rank - 2, 2)
        column = (1, -1, *points) if op.arg("transposed") else (-1, 1, *points)
        weight, bias = _fold(weight, bias, norm, column, b, dtype or given.dtype)
    return weight, bias


def _fold(weight: Ref, bias: Ref | None, norm: OpView, column: tuple[int, ...], b: Builder, dtype: torch.dtype) -> tuple[Ref, Ref]:
    def wide(value: Value | Ref) -> Ref:
        return b.prepare(
            "aten::_to_copy.default", value if isinstance(value, Ref) else b.exact(value), dtype=torch.float32
        )

    variance = b.prepare("aten::add.Scalar", wide(norm.arg("running_var")), norm.arg("eps"))
    scale = b.prepare("aten::rsqrt.default", variance)
    if norm.arg("weight") is not None:
        scale = b.prepare("aten::mul.Tensor", scale, wide(norm.arg("weight")))
    shift = b.prepare("aten::neg.default", wide(norm.arg("running_mean")))
    if bias is not None:
        shift = b.prepare("aten::add.Tensor", shift, wide(bias))
    shift = b.prepare("aten::mul.Tensor", shift, scale)
    if norm.arg("bias") is not None:
        shift = b.prepare("aten::add.Tensor", shift, wide(norm.arg("bias")))
    by_channel = b.prepare("aten::view.default", scale, column)
    scaled = b.prepare("aten::mul.Tensor", wide(weight), by_channel)
    rounded = scaled if dtype is torch.float32 else b.prepare("aten::_to_copy.default", scaled, dtype=dtype)
    return rounded, shift
