"""Batch norms of inference that no convolution takes; group norms of channels-last images (sequences and volumes too), and their
gradients, by sums over the pixels of each channel.

A row of such a group norm is the few channels of a group at every pixel: read by itself, it takes a piece of each sector of memory,
and rows that no program can hold are read several times. Sums over pixels read whole channels, and the groups' numbers are few
(measured: docs/studies/gpu-models.md). In planes that holds of gradients: sums over groups, and those of weight and bias, read
images and gradients twice, the sums of channels give both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.region.builder import Builder, channels_last_strides, same_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.norms import of_constants, write_batch_norm
from fusewright.toolkit.region.pattern import chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.select.calls import Calls

LEAST = 1 << 20
"""Elements of the smallest image for which three kernels pay."""

LEAST_IN_PLANES = 1 << 23
"""The same of gradients in planes, which read twice as much of what they read by groups: not measured, some 15 us at 4 TB/s."""

FEW = 16
"""Pixels below which the numbers of channels, in fp32, would be a large part of what the images are; not measured."""


def _has_groups(op: OpView) -> bool:
    """Whether a norm has several groups of several channels, in large images, volumes or sequences of fixed sizes."""
    x, groups = spec_of(op.arg("input")), op.arg("group")
    floats = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and op.arg("HxW") >= FEW
    return floats and x.static and x.rank >= 3 and 1 < groups < x.shape[1] and x.numel_hint() >= LEAST


def _or_as_it_is(op: OpView, c: Calls, planes: bool = False) -> _Groups | None:
    """Return the groups of a norm of channels-last images, or of images in `planes`; leave any other to the fuser."""
    c.b.without(op)
    found = _Groups(op, c.b)
    if planes or found.channels_last:
        return found
    c.b.leave(op)
    return None


def _reads_twice(op: OpView, c: Calls) -> bool:
    """Whether the gradients of a norm of images in planes would read them for groups that no program holds, and for weights."""
    x, row = spec_of(op.arg("input")), op.arg("C") // op.arg("group") * op.arg("HxW")
    image, *weights = (v.spec is not None for v in op.outs)
    return image and any(weights) and row > c.target.schedule.persistent and x.numel_hint() >= LEAST_IN_PLANES


def _channels_last(x: TensorSpec) -> bool:
    """Whether channels are innermost, in images of any rank."""
    return layout_of(x) != "contiguous" and same_strides(x, channels_last_strides(x.shape))  # type: ignore[arg-type]


@dataclass
class _Groups:
    """Writes the ops of one norm for the fuser. Numbers of channels are fp32 [N, groups, channels of a group] or, to combine them
    with images, [N, C, 1, 1] (or more dims); numbers of groups have 1 in the place of channels."""

    op: OpView
    b: Builder

    @property
    def shape(self) -> tuple[int, int, int]:
        n, c, groups = self.op.arg("N"), self.op.arg("C"), self.op.arg("group")
        return n, groups, c // groups

    @property
    def channels_last(self) -> bool:
        return _channels_last(self.b.spec(self.images("input")))

    @property
    def pixels(self) -> tuple[int, ...]:
        return tuple(range(2, spec_of(self.op.arg("input")).rank))

    @property
    def single(self) -> tuple[int, ...]:
        """The size of an image of one pixel."""
        return (1,) * len(self.pixels)

    def images(self, name: str) -> Value:
        """Images as they lie in memory: behind the copy to planes that eager makes on GPUs."""
        x: Value = self.op.arg(name)
        copy = self.b.graph.producer(x)
        return copy.arg("self") if copy is not None and copy.op == "clone" else x

    def wide(self, x: Value) -> Value:
        return x if spec_of(x).dtype is torch.float32 else self.b.append_op("cast", x, torch.float32)

    def channels(self, x: Value) -> Value:
        return self.b.append_op("view", x, self.shape)

    def groups(self, x: Value) -> Value:
        return self.b.append_op("view", self.wide(x), (*self.shape[:2], 1))

    def weight(self) -> Value | None:
        w = self.op.arg("weight")
        return None if w is None else self.b.append_op("view", self.wide(w), (1, *self.shape[1:]))

    def each(self, x: Value) -> Value:
        """A number of each channel, or of its group, beside images."""
        if spec_of(x).shape != self.shape:
            x = self.b.append_op("expand", x, self.shape)
        return self.b.append_op("reshape", x, (self.op.arg("N"), self.op.arg("C"), *self.single))

    def give(self, x: Value, out: Value) -> None:
        """Let `x` be a result of the norm."""
        spec: TensorSpec = spec_of(out)
        if spec.rank == spec_of(self.op.arg("input")).rank and self.channels_last:
            out = self.b.with_layout(out, channels_last_strides(spec.shape))  # type: ignore[arg-type]
        if spec_of(x).shape != spec.shape:
            x = self.b.append_op("view", x, spec.shape)
        self.b.append_op("cast", x, spec.dtype, out=out)


def _write(op: OpView, c: Calls) -> None:
    g, b = _or_as_it_is(op, c), c.b
    if g is None:
        return
    x = g.wide(g.images("input"))
    means = g.channels(b.append_op("mean", x, g.pixels, True))
    variances = g.channels(b.append_op("var", x, g.pixels, 0, True))
    mean = b.append_op("mean", means, (2,), True)
    apart = b.append_op("sub", means, mean)
    variance = b.append_op("mean", b.append_op("addcmul", variances, apart, apart), (2,), True)
    rstd = b.append_op("rsqrt", b.append_op("add", variance, op.arg("eps")))
    weight = g.weight()
    scale = rstd if weight is None else b.append_op("mul", rstd, weight)
    centred = b.append_op("sub", x, g.each(mean))
    scaled = b.append_op("mul", centred, g.each(scale))
    bias = op.arg("bias")
    if bias is not None:
        scaled = b.append_op("add", scaled, b.append_op("view", g.wide(bias), (1, op.arg("C"), *g.single)))
    for made, out in zip((scaled, mean, rstd), op.outs, strict=True):
        g.give(made, out)


def _write_gradient(op: OpView, c: Calls) -> None:
    g, b = _or_as_it_is(op, c, _reads_twice(op, c)), c.b
    if g is None:
        return
    count = g.shape[2] * op.arg("HxW")
    gradient, mean, rstd = g.wide(g.images("grad_out")), g.groups(op.arg("mean")), g.groups(op.arg("rstd"))

    def centred() -> Value:  # once for each use, so that each kernel computes it and none stores it
        return b.append_op("sub", g.wide(g.images("input")), g.each(mean))

    sums = g.channels(b.append_op("sum", gradient, g.pixels, True))
    products = g.channels(b.append_op("sum", b.append_op("mul", gradient, centred()), g.pixels, True))
    wanted = dict(zip(("image", "weight", "bias"), op.outs, strict=True))
    if wanted["weight"].spec:
        g.give(b.append_op("sum", b.append_op("mul", products, rstd), (0,), False), wanted["weight"])
    if wanted["bias"].spec:
        g.give(b.append_op("sum", sums, (0,), False), wanted["bias"])
    if not wanted["image"].spec:
        return
    weight = g.weight()
    sums, products = (x if weight is None else b.append_op("mul", x, weight) for x in (sums, products))
    of_group, with_image = (b.append_op("sum", x, (2,), True) for x in (sums, products))
    cubed = b.append_op("mul", b.append_op("mul", rstd, rstd), rstd)
    slope = b.append_op("mul", b.append_op("mul", with_image, cubed), 1 / count)
    shift = b.append_op("mul", b.append_op("mul", of_group, rstd), 1 / count)
    scale = rstd if weight is None else b.append_op("mul", rstd, weight)
    direct = b.append_op("mul", gradient, g.each(scale))
    through = b.append_op("addcmul", g.each(shift), centred(), g.each(slope))
    g.give(b.append_op("sub", direct, through), wanted["image"])


BATCH = (
    Row(
        "triton.batch_norm", chain("batch_norm"), when=lambda m, c: of_constants(m.anchor, c.b),
        write=lambda m, c: write_batch_norm(m.anchor, c.b), note="batch norm of constants",
    ),
)  # fmt: skip

GROUPS = (
    Row(
        "triton.group_norm", chain("group_norm"), when=lambda m, c: _has_groups(m.anchor),
        write=lambda m, c: _write(m.anchor, c), note="group norm, by channels if images are channels-last",
    ),
    Row(
        "triton.group_norm_backward", chain("group_norm_backward"), when=lambda m, c: _has_groups(m.anchor),
        write=lambda m, c: _write_gradient(m.anchor, c), note="gradient of a group norm, by channels if images are channels-last",
    ),
)  # fmt: skip
