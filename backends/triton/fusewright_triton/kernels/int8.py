"""Products with weights of 8 bits, which are read as they are: widened in registers, or multiplied as integers.

This module is compiled by Triton, and interpreted in simulation, where other modules stand for its imports.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
import triton
import triton.language as tl

from fusewright_triton import device as fw


@triton.jit
def finished(acc, scale_ptr, bias_ptr, cols, inside, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """Sums times the factors and plus the biases of `cols`, which broadcasts to them."""
    if SCALED:
        acc = acc * tl.load(scale_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        acc = acc + tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def blocks(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, m, n, k, x_m, w_n, out_m,
    SCALED: tl.constexpr, BIASED: tl.constexpr, INTEGER: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] times the transpose of w [N, K], by blocks of BM x BN; a grid of all blocks, rows innermost.

    x, w and out are dense in their last dimension, their rows x_m, w_n and out_m apart. INTEGER: x is int8 as w is, and
    sums are int32. Else w is widened to x's type, and sums are fp32. EVEN: K is a multiple of BK.
    """
    down = (m + BM - 1) // BM
    first, left = (tl.program_id(0) % down) * BM, (tl.program_id(0) // down) * BN
    rows, cols, steps = first + tl.arange(0, BM), left + tl.arange(0, BN), tl.arange(0, BK)
    here, inside = rows < m, cols < n
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_m + steps[None, :]
    w_at = w_ptr + cols.to(tl.int64)[None, :] * w_n + steps[:, None]
    acc = tl.full([BM, BN], 0, tl.int32 if INTEGER else tl.float32)
    for step in range((k + BK - 1) // BK):
        if EVEN:
            x = tl.load(x_at, mask=here[:, None], other=0)
            w = tl.load(w_at, mask=inside[None, :], other=0)
        else:
            there = steps < k - step * BK
            x = tl.load(x_at, mask=here[:, None] & there[None, :], other=0)
            w = tl.load(w_at, mask=there[:, None] & inside[None, :], other=0)
        if INTEGER:
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK
    if not INTEGER:
        acc = finished(acc, scale_ptr, bias_ptr, cols[None, :], inside[None, :], SCALED, BIASED)
    out_at = out_ptr + rows.to(tl.int64)[:, None] * out_m + cols[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
def rows(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, m, n, k, x_m, w_n, out_m,
    SCALED: tl.constexpr, BIASED: tl.constexpr, INTEGER: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `blocks`, for one row of x: products are summed along K, without the units for matrices. BM is 1."""
    row = tl.program_id(0) % m
    cols, steps = (tl.program_id(0) // m) * BN + tl.arange(0, BN), tl.arange(0, BK)
    inside = cols < n
    x_at = x_ptr + row.to(tl.int64) * x_m + steps
    w_at = w_ptr + cols.to(tl.int64)[:, None] * w_n + steps[None, :]
    acc = tl.full([BN, BK], 0, tl.int32 if INTEGER else tl.float32)
    for step in range((k + BK - 1) // BK):
        if EVEN:
            x = tl.load(x_at)
            w = tl.load(w_at, mask=inside[:, None], other=0)
        else:
            there = steps < k - step * BK
            x = tl.load(x_at, mask=there, other=0)
            w = tl.load(w_at, mask=inside[:, None] & there[None, :], other=0)
        acc += w.to(acc.dtype) * x.to(acc.dtype)[None, :]
        x_at += BK
        w_at += BK
    total = fw.reduce_sum(acc, 1)
    if not INTEGER:
        total = finished(total, scale_ptr, bias_ptr, cols[:, None], inside[:, None], SCALED, BIASED)
    out_at = out_ptr + row.to(tl.int64) * out_m + cols[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside[:, None])
