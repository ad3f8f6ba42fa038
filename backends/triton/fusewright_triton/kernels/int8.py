"""Products with weights of 8 bits, which are read as they are: widened in registers, or multiplied as integers.

This module is compiled by Triton, and interpreted in simulation, where other modules stand for its imports.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
import triton
import triton.language as tl


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
    SCALED: tl.constexpr, BIASED: tl.constexpr, INTEGER: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] times the transpose of w [N, K], by blocks of BM x BN; a grid of parts x blocks, rows innermost.

    x, w and out are dense in their last dimension, their rows x_m, w_n and out_m apart. INTEGER: x is int8 as w is, and
    sums are int32. Else w is widened to x's type, and sums are fp32. EVEN: K is a multiple of BK. With SPLIT parts of K,
    out [SPLIT, M, N] has the sums of each, for `joined`.
    """
    down = (m + BM - 1) // BM
    part, block = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    first, left = (block % down) * BM, (block // down) * BN
    rows, cols, steps = first + tl.arange(0, BM), left + tl.arange(0, BN), tl.arange(0, BK)
    here, inside = rows < m, cols < n
    count = ((k + BK - 1) // BK + SPLIT - 1) // SPLIT
    begin = part * count
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_m + begin * BK + steps[None, :]
    w_at = w_ptr + cols.to(tl.int64)[None, :] * w_n + begin * BK + steps[:, None]
    acc = tl.full([BM, BN], 0, tl.int32 if INTEGER else tl.float32)
    for step in range(begin, tl.minimum(begin + count, (k + BK - 1) // BK)):
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
    if not INTEGER and SPLIT == 1:
        acc = finished(acc, scale_ptr, bias_ptr, cols[None, :], inside[None, :], SCALED, BIASED)
    out_at = out_ptr + (part * m + rows).to(tl.int64)[:, None] * out_m + cols[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
def joined(
    part_ptr, scale_ptr, bias_ptr, out_ptr, m, n,
    SCALED: tl.constexpr, BIASED: tl.constexpr, INTEGER: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [M, N]: the parts [SPLIT, M, N] of `blocks` added in order, times the factors, plus the biases."""
    across = (n + BN - 1) // BN
    row = tl.program_id(0) // across
    cols = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    inside = cols < n
    acc = tl.full([BN], 0, tl.int32 if INTEGER else tl.float32)
    for part in range(SPLIT):
        acc += tl.load(part_ptr + (part * m + row).to(tl.int64) * n + cols, mask=inside, other=0)
    if not INTEGER:
        acc = finished(acc, scale_ptr, bias_ptr, cols, inside, SCALED, BIASED)
    tl.store(out_ptr + row.to(tl.int64) * n + cols, acc.to(out_ptr.dtype.element_ty), mask=inside)
