"""Products of matrices with what follows in the same kernel: one program to a multiprocessor, which walks over tiles.

Tiles are loaded by tensor descriptors (on NVIDIA from compute capability 9.0 by the tensor memory accelerator). A bias and an
activation are applied to the fp32 sums, and rows of any width are written, aligned or not.

This module is compiled by Triton, and interpreted in simulation, where other modules stand for its imports.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """x * Phi(x), by max(x, 0) - |x| Phi(-|x|), where Phi(-z) = exp(-z^2 / 2) t P(t), t = 1 / (1 + c z).

    P is fitted to the relative error of Phi, 7e-6 at most (a half's last bit is 5e-4): libdevice's erf takes four times as
    many instructions, which a product that waits for its epilogue cannot hide. The form is that of Hastings, Approximations
    for Digital Computers, 1955, sheet 43. NaN stays NaN; of -infinity it is 0.
    """
    z = tl.minimum(tl.abs(x), 16.0)  # Phi is 0 from there on
    t = 1.0 / (1.0 + 0.3111269837220809 * z)
    p = -0.07219681825446389 * t + 0.17297140491416643
    p = p * t + 0.022801400736259327
    p = p * t + 0.13062072643924016
    p = p * t + 0.12154456654724302
    p = p * t + 0.12425951498675834
    return tl.maximum(x, 0.0) - p * t * z * tl.exp2(x * x * -0.7213475204444817)


@triton.jit
def activated(x, ACT: tl.constexpr):
    """An activation by its name, of fp32."""
    if ACT == "gelu":
        x = gelu(x)
    elif ACT == "gelu_tanh":  # x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1.0 + tl.exp2((x + 0.044715 * x * x * x) * -2.302208198144325))
    elif ACT == "silu":
        x = x / (1.0 + tl.exp2(x * -1.4426950408889634))
    elif ACT == "sigmoid":
        x = 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))
    elif ACT == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    return x


@triton.jit
def place(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile: GROUP tiles of rows share the columns that they read, which then stay in the cache."""
    across = (N + BN - 1) // BN
    down = (M + BM - 1) // BM
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    inside = tile % (GROUP * across)
    return (group * GROUP + inside % height) * BM, inside // height * BN


@triton.jit
def write(
    sums, bias_ptr, residual_ptr, out, out_ptr, row, column, M, N,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, DIRECT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What is added, activation and store of [BM, BN] sums. DIRECT: not through the descriptor, whose rows must be aligned."""
    columns = column + tl.arange(0, BN)
    rows = row + tl.arange(0, BM)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        sums += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    values = activated(sums, ACT).to(out_ptr.dtype.element_ty)
    if DIRECT:
        tl.store(out_ptr + at, values, mask=inside)
    else:
        out.store([row, column], values)


@triton.jit
def product(
    x, weight, out, bias_ptr, residual_ptr, out_ptr, M, N, K,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, DIRECT: tl.constexpr, HALVES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """activation(x @ weight.T + bias + residual) of x [M, K], weight [N, K], bias [N] and dense residual into dense out [M, N].

    HALVES: the right half of a tile is written after the left, so that the copy in shared memory is half as large.
    """
    tiles = ((M + BM - 1) // BM) * ((N + BN - 1) // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = place(tile, M, N, BM, BN, GROUP)
        sums = tl.full([BM, BN], 0.0, tl.float32)
        for k in range((K + BK - 1) // BK):
            sums = tl.dot(x.load([row, k * BK]), weight.load([column, k * BK]).T, sums)
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(sums, [BM, 2, BN // 2]), [0, 2, 1]))
            write(
                left, bias_ptr, residual_ptr, out, out_ptr, row, column, M, N, BIAS, RESIDUAL, ACT, DIRECT, BM, BN // 2
            )
            write(
                right,
                bias_ptr,
                residual_ptr,
                out,
                out_ptr,
                row,
                column + BN // 2,
                M,
                N,
                BIAS,
                RESIDUAL,
                ACT,
                DIRECT,
                BM,
                BN // 2,
            )
        else:
            write(sums, bias_ptr, residual_ptr, out, out_ptr, row, column, M, N, BIAS, RESIDUAL, ACT, DIRECT, BM, BN)


@triton.jit
def convolution(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, RUN, GROUPS, ROWS, COLUMNS, KH, xn, xh, xw, step,
    BIAS: tl.constexpr, ACT: tl.constexpr, VECTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """activation(convolution + bias) as a product of windows and weights: dense [M, GROUPS * N], M pixels, of ROWS x COLUMNS each
    an image.

    A window is KH runs of RUN numbers each, `step` apart, the first at image * xn + row * xh + column * xw + group * RUN, a
    multiple of VECTOR. The weight is [KH, RUN, GROUPS * N]. Nothing is outside of an image: its padding is in memory.
    """
    blocks = (N + BN - 1) // BN
    tile = tl.program_id(0)
    group = tile % (blocks * GROUPS) // blocks
    columns = tile % blocks * BN + tl.arange(0, BN)
    pixels = tile // (blocks * GROUPS) * BM + tl.arange(0, BM)
    image = pixels // (ROWS * COLUMNS)
    place = pixels - image * (ROWS * COLUMNS)
    first = image.to(tl.int64) * xn + (place // COLUMNS).to(tl.int64) * xh + (place % COLUMNS) * xw + group * RUN
    matrix = weight_ptr + (group * N + columns)[None, :]
    sums = tl.full([BM, BN], 0.0, tl.float32)
    chunks = (RUN + BK - 1) // BK
    for chunk in range(KH * chunks):
        row = chunk // chunks
        k = (chunk - row * chunks) * BK + tl.arange(0, BK)
        at = x_ptr + tl.multiple_of(first + row.to(tl.int64) * step, VECTOR)
        window = tl.load(at[:, None] + k[None, :], mask=(pixels < M)[:, None] & (k < RUN)[None, :], other=0.0)
        kept = (k < RUN)[:, None] & (columns < N)[None, :]
        weight = tl.load(matrix + (row * RUN + k)[:, None] * (GROUPS * N), mask=kept, other=0.0)
        sums = tl.dot(window, weight, sums)
    if BIAS:
        sums += tl.load(bias_ptr + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + (pixels.to(tl.int64)[:, None] * (GROUPS * N) + (group * N + columns)[None, :])
    values = activated(sums, ACT).to(out_ptr.dtype.element_ty)
    tl.store(to, values, mask=(pixels < M)[:, None] & (columns < N)[None, :])
