"""Convolutions of few channels, such as a network's first, and of single pixels in groups, by a kernel of our own.

Libraries read single channels there, or compute one group at a time, in two to six times as long (measured:
docs/studies/gpu-models.md). The kernel reads images whose padding is in memory: the copy that makes images channels-last, which
most first convolutions need anyway, writes zeros around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.interface import OpView
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Thunk
from fusewright.toolkit.region.builder import channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain, maybe
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.kernels.convolution_ops import CONVOLUTION, packed
from fusewright_triton.kernels.product_ops import ACTIVATIONS
from fusewright_triton.select import depthwise
from fusewright_triton.select.calls import Calls
from fusewright_triton.select.convolutions import NORM, constant, folded, padded, planar
from fusewright_triton.select.epilogues import activation_of

MOST, FEW, WIDE = 16, 8, 128
"""Channels of an image; and results from which on only images of few channels were measured."""

GROUPS, LEAST = 3, 16
"""Least number of groups, and of the channels of each, where libraries are slow."""

PIXELS = 1 << 13
"""Results of the smallest convolution that is worth it."""

ALIGNED = 4
"""Channels, a multiple of which are read at once."""


def suits(op: OpView) -> bool:
    """Return whether a 2-d convolution of fixed sizes is one that libraries are slow at."""
    outs, channels, *window = spec_of(op.arg("weight")).shape
    pixels = spec_of(op.out).numel_hint() // outs  # type: ignore[operator]
    if set(op.arg("dilation")) != {1} or not PIXELS <= pixels < 1 << 31:
        return False
    if op.arg("groups") == 1:
        return channels <= (FEW if outs > WIDE else MOST) and window != [1, 1]  # type: ignore[operator]
    alone = window == [1, 1] and not any(op.arg("padding"))
    return alone and op.arg("groups") >= GROUPS and channels >= LEAST and outs // op.arg("groups") >= LEAST  # type: ignore[operator]


def _suits(m: Match, c: Calls) -> bool:
    """Reject images in planes in training, where the layout was chosen before."""
    op = m.anchor
    chosen = (c.graph.phase == "infer" and constant(m, c)) or layout_of(spec_of(op.out)) == "channels_last"
    return chosen and planar(op) and suits(op) and (op.arg("groups") == 1 or constant(m, c))


def _same_type(op: OpView, m: Match, c: Calls) -> bool:
    return activation_of(op) is not None and spec_of(op.out).dtype == spec_of(m.anchor.out).dtype


def _pays(m: Match, c: Calls) -> bool:
    op, device, arch = m.anchor, c.ctx.device, c.ctx.device.arch
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    stride, padding, groups = (op.arg(n) for n in ("stride", "padding", "groups"))

    def tensors(pads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        image, weight = (torch.randn(*s.shape, device=x.device).to(s.dtype) for s in (x, w))  # type: ignore[arg-type]
        weight = torch.nn.functional.pad(weight, (0, 0, 0, 0, *pads[4:]))
        return torch.nn.functional.pad(image, pads).contiguous(memory_format=torch.channels_last), weight

    def library() -> Thunk:
        image, weight = tensors((0,) * 6)
        return lambda: torch.nn.functional.conv2d(image, weight, None, stride, padding, groups=groups)

    def kernel() -> Thunk:
        image, weight = tensors(_pads(op))
        return lambda: torch.ops.fusewright_triton.convolution(image, packed(weight), None, "", stride, groups, arch)

    key = f"convolution {str(x.dtype).removeprefix('torch.')} {x.shape} {w.shape} {stride} {padding} {groups} {device.type}"
    return c.pays(key, library, kernel)


def _pads(op: OpView) -> tuple[int, ...]:
    """Return the zeros around an image, and behind its channels: none where they would be groups."""
    behind = -spec_of(op.arg("input")).shape[1] % ALIGNED if op.arg("groups") == 1 else 0  # type: ignore[operator]
    return (*depthwise.pads(op), 0, behind)


def _write(m: Match, c: Calls) -> None:
    op, b, pads = m.anchor, c.b, _pads(m.anchor)
    weight, shift = _kept(m, pads, c) if constant(m, c) else _anew(op, pads, c)
    x = padded(op.arg("input"), pads, c)
    given: tuple[Any, ...] = (activation_of(m.last) or "", op.arg("stride"), op.arg("groups"), c.ctx.device.arch)
    stride = channels_last_strides(spec_of(m.out).shape)  # type: ignore[arg-type]
    b.library(CONVOLUTION, x, weight, shift, *given, out=m.out, stride=stride, op=op)


def _kept(m: Match, pads: Sequence[int], c: Calls) -> tuple[Ref, Ref]:
    """Return weight and shift of constants, laid out once."""
    weight, shift = folded(m, c)
    weight = c.b.prepare("aten::constant_pad_nd.default", weight, (0, 0, 0, 0, *pads[4:]))
    weight = c.b.prepare("aten::permute.default", weight, (2, 3, 1, 0))
    weight = c.b.prepare("aten::clone.default", weight, memory_format=torch.contiguous_format)
    weight = c.b.prepare("aten::permute.default", weight, (3, 2, 0, 1))
    return weight, c.b.prepare("aten::_to_copy.default", shift, dtype=spec_of(m.anchor.arg("weight")).dtype)


def _anew(op: OpView, pads: Sequence[int], c: Calls) -> tuple[Ref | None, Ref | None]:
    """Return weight and bias of a training step; the kernel's call lays the weight out."""
    weight = c.exact(op.arg("weight"))
    if any(pads[4:]):
        weight = c.made("aten::constant_pad_nd.default", weight, (0, 0, 0, 0, *pads[4:]))
    return weight, c.exact(op.arg("bias"))


ROWS = (
    Row(
        "triton.conv.few_channels", chain("conv", NORM, maybe(frozenset(ACTIVATIONS) - {""}, _same_type)),
        when=_suits, pays=_pays, write=_write, note="convolution of few channels, or of pixels in groups",
    ),
)  # fmt: skip
