"""Convolutions of small groups in channels-last, and their gradients, as products of tiles of several groups.

A tile's weight is one matrix with zeros between groups: tensor cores take no fewer than 16 channels, and memory is read in runs of
at least 32 bytes. A product with zeros would make NaN of another group's infinity, so results that are not finite are computed
again, group by group.

This module is compiled by Triton, and interpreted in simulation, where other modules stand for its imports.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
import triton
import triton.language as tl

from fusewright_triton.emit import device as fw


@triton.jit
def of_windows(
    x_ptr, weight_ptr, image, top, left, valid, channels, kept, C, HEIGHT, WIDTH, DH, DW,
    KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, VECTOR: tl.constexpr,
    BM: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Sums [BM, BO] over windows of the image's kept channels; with UP, of an image with UP - 1 zeros between its pixels."""
    sums = tl.full([BM, BO], 0.0, tl.float32)
    i, o = tl.arange(0, BI), tl.arange(0, BO)
    for k in range(KH * KW):
        row, column = top + k // KW * DH, left + k % KW * DW
        inside = valid & (row >= 0) & (column >= 0)
        if UP > 1:
            inside = inside & (row % UP == 0) & (column % UP == 0)
            row, column = row // UP, column // UP
        inside = inside & (row < HEIGHT) & (column < WIDTH)
        at = x_ptr + tl.multiple_of(((image * HEIGHT + row) * WIDTH + column).to(tl.int64) * C, VECTOR)
        window = tl.load(at[:, None] + channels[None, :], mask=inside[:, None] & kept[None, :], other=0.0)
        if UP > 0:  # a gradient reads the window from its end
            weight = tl.load(weight_ptr + ((KH * KW - 1 - k) * BO + o)[:, None] * BI + i[None, :]).T
        else:
            weight = tl.load(weight_ptr + (k * BI + i)[:, None] * BO + o[None, :])
        sums = tl.dot(window, weight, sums)
    return sums


@triton.jit
def grouped(
    x_ptr, weight_ptr, out_ptr, M, TILES, C, K, HEIGHT, WIDTH, ROWS, COLUMNS, SH, SW, PH, PW, DH, DW,
    KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, GROUPS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr,
    VECTOR: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A convolution without bias, dense out [M, K], M pixels of ROWS x COLUMNS an image, or (UP) the image's gradient of one of
    stride UP, from dense x [images, HEIGHT, WIDTH, C].

    A tile is GROUPS groups of INS channels of x and OUTS of out; weights are [TILES, KH, KW, BI, BO], or (UP) the convolution's,
    [TILES, KH, KW, BO, BI], with zeros between groups and behind. The window of a pixel begins at row * SH - PH,
    column * SW - PW, its places DH and DW apart. C, K and the channels of a tile are multiples of VECTOR.
    """
    tile = tl.program_id(0) % TILES
    pixels = tl.program_id(0) // TILES * BM + tl.arange(0, BM)
    image = pixels // (ROWS * COLUMNS)
    place = pixels - image * (ROWS * COLUMNS)
    top, left = place // COLUMNS * SH - PH, place % COLUMNS * SW - PW
    i, o = tl.arange(0, BI), tl.arange(0, BO)
    channels = tile * (GROUPS * INS) + i
    weight = weight_ptr + tile * (KH * KW * BI * BO)
    sums = of_windows(
        x_ptr, weight, image, top, left, pixels < M, channels, i < GROUPS * INS, C, HEIGHT, WIDTH, DH, DW,
        KH, KW, UP, VECTOR, BM, BI, BO,
    )
    if GROUPS > 1:
        wrong = fw.reduce_max((sums - sums != 0.0).to(tl.float32), 1)
        if fw.reduce_max(tl.reshape(wrong, [BM]), 0) > 0.0:
            exact = tl.full([BM, BO], 0.0, tl.float32)
            for group in range(GROUPS):
                alone = of_windows(
                    x_ptr, weight, image, top, left, pixels < M, channels, i // INS == group, C, HEIGHT, WIDTH, DH, DW,
                    KH, KW, UP, VECTOR, BM, BI, BO,
                )  # fmt: skip
                exact = tl.where((o // OUTS == group)[None, :], alone, exact)
            sums = exact
    to = out_ptr + tl.multiple_of(pixels.to(tl.int64) * K, VECTOR)
    to = to[:, None] + (tile * (GROUPS * OUTS) + o)[None, :]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=(pixels < M)[:, None] & (o < GROUPS * OUTS)[None, :])


@triton.jit
def weight_gradient(
    grad_ptr, x_ptr, out_ptr, M, TILES, PIECE, C, K, HEIGHT, WIDTH, ROWS, COLUMNS, SH, SW, PH, PW, DH, DW,
    KH: tl.constexpr, KW: tl.constexpr, GROUPS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr,
    VECTOR: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of a weight, a row of its window a program, over PIECE pixels, a multiple of BM: fp32 [pieces, K, KH, KW, INS]
    of dense grad [M, K] and x [images, HEIGHT, WIDTH, C]. What `grouped` says of a convolution holds; BJ is at least KW."""
    tile = tl.program_id(0) % TILES
    i = tl.program_id(0) // TILES % KH
    piece = tl.program_id(0) // (TILES * KH)
    o, q = tl.arange(0, BO), tl.arange(0, BJ * BI)
    j, c = q // BI, q % BI
    used = (j < KW) & (c < GROUPS * INS)
    sums = tl.full([BJ * BI, BO], 0.0, tl.float32)
    offsets = tl.multiple_of(j * DW * C, VECTOR) + (tile * (GROUPS * INS) + c)
    for block in range(PIECE // BM):
        pixels = piece * PIECE + block * BM + tl.arange(0, BM)
        image = pixels // (ROWS * COLUMNS)
        place = pixels - image * (ROWS * COLUMNS)
        at = grad_ptr + tl.multiple_of(pixels.to(tl.int64) * K, VECTOR)
        used_grad = (pixels < M)[:, None] & (o < GROUPS * OUTS)[None, :]
        grad = tl.load(at[:, None] + (tile * (GROUPS * OUTS) + o)[None, :], mask=used_grad, other=0.0)
        row, left = place // COLUMNS * SH - PH + i * DH, place % COLUMNS * SW - PW
        column = left[:, None] + (j * DW)[None, :]
        inside = ((pixels < M) & (row >= 0) & (row < HEIGHT))[:, None] & (column >= 0) & (column < WIDTH) & used[None, :]
        first = x_ptr + tl.multiple_of(((image * HEIGHT + row) * WIDTH + left).to(tl.int64) * C, VECTOR)
        window = tl.load(first[:, None] + offsets[None, :], mask=inside, other=0.0)
        sums = tl.dot(tl.trans(window), grad, sums)
    same = used[:, None] & (o < GROUPS * OUTS)[None, :] & ((c // INS)[:, None] == (o // OUTS)[None, :])
    to = (((piece * K + tile * (GROUPS * OUTS) + o)[None, :] * KH + i) * KW + j[:, None]) * INS + (c % INS)[:, None]
    tl.store(out_ptr + to, sums, mask=same)
