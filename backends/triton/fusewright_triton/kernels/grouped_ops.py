"""Convolutions of small groups and their gradients, as torch operators that a plan can name, on GPUs and (interpreted) on CPU
tensors.

`fusewright_triton::grouped`, `grouped_image_gradient` and `grouped_weight_gradient`, all of channels-last images, in bf16 or fp16;
`steps` is stride, padding and dilation. `grouped_blocks` lays out the weight of the first two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from fusewright_triton.kernels.attention_ops import power_of_two
from fusewright_triton.run.handwritten import NAMESPACE, Kernel, operator, or_else
from fusewright_triton.target import named

CONVOLUTION, WEIGHT = Kernel("grouped", "grouped"), Kernel("grouped", "weight_gradient")
OPERATOR, BLOCKS, IMAGE_GRADIENT, WEIGHT_GRADIENT = (
    f"{NAMESPACE}::grouped{what}.default" for what in ("", "_blocks", "_image_gradient", "_weight_gradient")
)
LAST = torch.channels_last

WIDE = 32
"""Channels of a tile: more are more products with zeros, fewer are shorter runs of memory."""

RUN = 8
"""Channels that a load takes at once, if a tile's are a multiple."""

PIXELS, PIXELS_SUMMED = 128, 64
"""Pixels of a block, and of one whose sum is a weight's gradient."""

PROGRAMS = 528
"""Programs of a weight's gradient: four for each multiprocessor of the largest GPU that was measured."""

BUILD = {"num_warps": 4, "num_stages": 3}


class Tile(NamedTuple):
    """How a convolution is cut: groups of a tile, tiles, and the channels of a block, in and out."""

    groups: int
    tiles: int
    ins: int
    outs: int


def tile(ins: int, outs: int, groups: int) -> Tile:
    """Return the tile for groups of `ins` and `outs` channels: as many groups as fit, whose channels are whole runs if possible."""
    most = max(1, min(WIDE // max(ins, outs), groups))
    k = max((k for k in range(1, most + 1) if groups % k == 0), key=lambda k: (math.gcd(RUN, k * ins, k * outs), k))
    return Tile(k, groups // k, power_of_two(k * ins), power_of_two(k * outs))


def _tile(shape: Sequence[int], groups: int) -> Tile:
    """Return the tile of a weight."""
    return tile(shape[1], shape[0] // groups, groups)


def blocks(weight: Tensor, groups: int) -> Tensor:
    """Return a weight [groups * outs, ins, kh, kw] as a matrix for each tile and place of a window, with zeros between groups
    and behind: [tiles, kh, kw, in, out]."""
    made, how = _blocks_meta(weight, groups).zero_(), _tile(weight.shape, groups)
    each = weight.unflatten(0, (how.tiles, how.groups, -1)).permute(0, 4, 5, 3, 2, 1)
    used = made[..., : how.groups * each.shape[3], : how.groups * each.shape[4]]
    used.unflatten(-1, (how.groups, -1)).unflatten(3, (how.groups, -1)).diagonal(0, 3, 5).copy_(each)
    return made


def _blocks_meta(weight: Tensor, groups: int) -> Tensor:
    how = _tile(weight.shape, groups)
    return torch.empty((how.tiles, *weight.shape[2:], how.ins, how.outs), dtype=weight.dtype, device=weight.device)


def _weight(matrices: Tensor, shape: Sequence[int], groups: int) -> Tensor:
    """Return the weight of this shape that `blocks` laid out so."""
    how, (outs, ins) = _tile(shape, groups), shape[:2]
    used = matrices[..., : how.groups * ins, : how.groups * (outs // groups)]
    each = used.unflatten(-1, (how.groups, -1)).unflatten(3, (how.groups, -1)).diagonal(0, 3, 5)
    return each.permute(0, 5, 4, 3, 1, 2).reshape(tuple(shape))


def _aligned(how: Tile, groups: int, *channels: int) -> int:
    """Return of how many elements addresses are multiples."""
    return math.gcd(RUN, *(how.groups * n // groups for n in channels))


def _run(
    x: Tensor, matrices: Tensor, out: Tensor, how: Tile, steps: Sequence[int], up: int, groups: int, target: str
) -> None:
    """Launch the convolution, or (up) the image's gradient."""
    pixels, (kh, kw) = out.numel() // out.shape[1], matrices.shape[1:3]
    sizes = (x.shape[1], out.shape[1], *x.shape[2:], *out.shape[2:])
    read, written = (how.outs, how.ins) if up else (how.ins, how.outs)
    fixed = {
        "KH": kh, "KW": kw, "UP": up, "GROUPS": how.groups, "INS": x.shape[1] // groups, "OUTS": out.shape[1] // groups,
        "VECTOR": _aligned(how, groups, x.shape[1], out.shape[1]), "BM": PIXELS, "BI": read, "BO": written,
    }  # fmt: skip
    args = (x.contiguous(memory_format=LAST), matrices, out, pixels, how.tiles, *sizes, *steps)
    CONVOLUTION.launch(named(target), -(-pixels // PIXELS) * how.tiles, args, fixed, **BUILD)


def _pairs(steps: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return (steps[0], steps[1]), (steps[2], steps[3]), (steps[4], steps[5])


def _by_torch(
    x: Tensor, matrices: Tensor, shape: Sequence[int], steps: Sequence[int], groups: int, target: str
) -> Tensor:
    weight = _weight(matrices, shape, groups)
    return torch.nn.functional.conv2d(x, weight, None, *_pairs(steps), groups).contiguous(memory_format=LAST)


@or_else(_by_torch)
def grouped(
    x: Tensor, matrices: Tensor, shape: Sequence[int], steps: Sequence[int], groups: int, target: str
) -> Tensor:
    """Compute a convolution without bias, with one rounding at the end, of x [n, groups * ins, h, w] and the `blocks` of a weight
    of this shape, [groups * outs, ins, kh, kw]."""
    out = _meta(x, matrices, shape, steps, groups, target)
    if out.numel():
        _run(x, matrices, out, _tile(shape, groups), steps, 0, groups, target)
    return out


def _meta(x: Tensor, matrices: Tensor, shape: Sequence[int], steps: Sequence[int], groups: int, target: str) -> Tensor:
    sides = zip(x.shape[2:], shape[2:], steps[:2], steps[2:4], steps[4:], strict=True)
    sizes = [(n + 2 * p - (k - 1) * d - 1) // s + 1 for n, k, s, p, d in sides]
    return torch.empty((x.shape[0], shape[0], *sizes), dtype=x.dtype, device=x.device, memory_format=LAST)


def _image_by_torch(
    grad: Tensor, matrices: Tensor, size: Sequence[int], shape: Sequence[int], steps: Sequence[int],
    groups: int, target: str,
) -> Tensor:  # fmt: skip
    weight, image = _weight(matrices, shape, groups), (grad.shape[0], shape[1] * groups, *size)
    made = conv2d_input(image, weight, grad, *_pairs(steps), groups)
    return made.contiguous(memory_format=LAST)


@or_else(_image_by_torch)
def image_gradient(
    grad: Tensor, matrices: Tensor, size: Sequence[int], shape: Sequence[int], steps: Sequence[int],
    groups: int, target: str,
) -> Tensor:  # fmt: skip
    """Compute the gradient [n, groups * ins, *size] of the image that `grouped` reads, for the same stride in both directions."""
    out = _image_meta(grad, matrices, size, shape, steps, groups, target)
    before = [(k - 1) * d - p for k, p, d in zip(shape[2:], steps[2:4], steps[4:], strict=True)]
    if out.numel():
        _run(grad, matrices, out, _tile(shape, groups), (1, 1, *before, *steps[4:]), steps[0], groups, target)
    return out


def _image_meta(
    grad: Tensor, matrices: Tensor, size: Sequence[int], shape: Sequence[int], steps: Sequence[int],
    groups: int, target: str,
) -> Tensor:  # fmt: skip
    image = (grad.shape[0], shape[1] * groups, *size)
    return torch.empty(image, dtype=grad.dtype, device=grad.device, memory_format=LAST)


def parts(pixels: int, shape: Sequence[int], groups: int) -> tuple[int, ...]:
    """Return the shape of what `weight_gradient` makes."""
    programs = _tile(shape, groups).tiles * shape[2]
    count = max(1, min(-(-PROGRAMS // programs), -(-pixels // PIXELS_SUMMED)))
    return (count, shape[0], *shape[2:], shape[1])


def _weight_by_torch(
    grad: Tensor, x: Tensor, shape: Sequence[int], steps: Sequence[int], groups: int, target: str
) -> Tensor:
    found = _weight_meta(grad, x, shape, steps, groups, target).zero_()
    made = conv2d_weight(x, tuple(shape), grad, *_pairs(steps), groups)
    found[0] = made.permute(0, 2, 3, 1)
    return found


@or_else(_weight_by_torch)
def weight_gradient(
    grad: Tensor, x: Tensor, shape: Sequence[int], steps: Sequence[int], groups: int, target: str
) -> Tensor:
    """Compute parts in fp32, `parts(...)`, whose sum over the first dim is the gradient of a weight of this shape, as
    [groups * outs, kh, kw, ins]."""
    out = _weight_meta(grad, x, shape, steps, groups, target)
    how, pixels, (kh, kw) = _tile(shape, groups), grad.numel() // grad.shape[1], shape[2:]
    piece = -(-pixels // (out.shape[0] * PIXELS_SUMMED)) * PIXELS_SUMMED
    sizes = (x.shape[1], grad.shape[1], *x.shape[2:], *grad.shape[2:])
    images = (t.contiguous(memory_format=LAST) for t in (grad, x))
    fixed = {
        "KH": kh, "KW": kw, "GROUPS": how.groups, "INS": shape[1], "OUTS": shape[0] // groups,
        "VECTOR": _aligned(how, groups, x.shape[1], grad.shape[1]), "BM": PIXELS_SUMMED,
        "BJ": 1 << (kw - 1).bit_length(), "BI": how.ins, "BO": how.outs,
    }  # fmt: skip
    args = (*images, out, pixels, how.tiles, piece, *sizes, *steps)
    WEIGHT.launch(named(target), how.tiles * kh * out.shape[0], args, fixed, **BUILD)
    return out


def _weight_meta(
    grad: Tensor, x: Tensor, shape: Sequence[int], steps: Sequence[int], groups: int, target: str
) -> Tensor:
    return torch.empty(parts(grad.numel() // grad.shape[1], shape, groups), dtype=torch.float32, device=grad.device)


_HOW = "int[6] steps, int groups, str target) -> Tensor"
operator("grouped_blocks(Tensor weight, int groups) -> Tensor", blocks, _blocks_meta)
operator(f"grouped(Tensor x, Tensor matrices, int[4] shape, {_HOW}", grouped, _meta)
operator(
    "grouped_image_gradient(Tensor grad, Tensor matrices, int[2] size, int[4] shape, int[6] steps, int groups,"
    " str target) -> Tensor",
    image_gradient,
    _image_meta,
)
operator(f"grouped_weight_gradient(Tensor grad, Tensor x, int[4] shape, {_HOW}", weight_gradient, _weight_meta)
