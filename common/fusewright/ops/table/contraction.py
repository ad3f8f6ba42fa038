"""Contraction rows: matrix products and convolution. Where that is short, the fp64 reference is a formula, not the op itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Kind, Op, row

_op = partial(row, Kind.CONTRACTION)


def addmm_ref(x: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = alpha * torch.matmul(mat1, mat2)
    return product if beta == 0 else beta * x + product


def addbmm_ref(x: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return beta * x + alpha * torch.einsum("bnk,bkm->nm", batch1, batch2)


# fmt: off
ROWS: tuple[Op, ...] = (
    _op("mm", "aten::mm", dt.SELF, sh.mm, lambda x, y: torch.einsum("nk,km->nm", x, y), "matrix product"),
    _op("bmm", "aten::bmm", dt.SELF, sh.bmm, lambda x, y: torch.einsum("bnk,bkm->bnm", x, y),
        "batch of matrix products"),
    _op("addmm", "aten::addmm", dt.SELF, sh.mm, addmm_ref,
        "beta * self + alpha * (mat1 @ mat2); self is not read when beta is 0"),
    _op("baddbmm", "aten::baddbmm", dt.SELF, sh.bmm, addmm_ref, "beta * self + alpha * (batch1 @ batch2)"),
    _op("addbmm", "aten::addbmm", dt.SELF, sh.bmm_sum, addbmm_ref,
        "beta * self + alpha * sum over the batch of (batch1 @ batch2)"),
    _op("mv", "aten::mv", dt.SELF, sh.matvec, lambda x, v: (x * v).sum(-1), "matrix times vector"),
    _op("addmv", "aten::addmv", dt.dtype_of("mat"), sh.matvec, addmm_ref, "beta * self + alpha * (mat @ vec)"),
    _op("dot", "aten::dot", dt.SELF, sh.scalar_shape, lambda x, y: (x * y).sum(), "product of two vectors"),
    _op("conv", "aten::convolution", dt.INPUT, sh.conv, torch.convolution,
        "1-3d convolution with bias, groups, dilation, transposed", "ONNX Conv, ConvTranspose"),
)
# fmt: on
