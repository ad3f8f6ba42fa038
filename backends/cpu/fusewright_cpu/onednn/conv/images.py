"""Shapes, strides and geometry of convolutions: signals [N, C, L] are images of height 1, because oneDNN packs no weights of fewer
dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.interface import OpView, TensorSpec, Value, hint
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import spec_of

NEUTRAL = {"padding": 0, "stride": 1, "dilation": 1, "output_padding": 0}
"""Geometry of the one line of a signal."""


def geometry_of(op: OpView) -> tuple[Any, ...]:
    """Return padding, stride, dilation and groups, over two dimensions or more."""
    flat = spec_of(op.arg("input")).rank == 3
    names = ("padding", "stride", "dilation")
    return *((NEUTRAL[name], *op.arg(name)) if flat else op.arg(name) for name in names), op.arg("groups")


def pair(op: OpView, name: str) -> tuple[int, int]:
    """Return a geometry argument for height and width."""
    given = op.arg(name)
    return (NEUTRAL[name] if spec_of(op.arg("input")).rank == 3 else given[0], given[-1])


def image_shape(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return [N, C, L] as [N, C, 1, L]."""
    return tuple(shape) if len(shape) > 3 else (*shape[:2], 1, shape[2])


def channels_last_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return the strides of [N, C, L], [N, C, H, W] or [N, C, D, H, W] with C innermost."""
    stride = channels_last_strides(image_shape(shape))
    return stride if len(shape) > 3 else (*stride[:2], stride[3])


def as_image(value: Value, b: Builder) -> Ref | None:
    """Refer to [N, C, L] as images, to others as they are. Of fixed sizes, signals become channels-last in a kernel:
    the operator's own copy of images of height 1 takes two to three times as long."""
    spec = b.spec(value)
    if spec.rank > 3:
        return b.any_strides(value)
    usual = channels_last_of(spec.shape) if spec.static else spec.stride
    if any(n != 1 and s != u for n, s, u in zip(spec.shape, spec.stride, usual, strict=True)):
        return Ref(b.channels_last(b.append_op("unsqueeze", value, 2)).id)
    view = b.ctx.value(None)
    b.call("aten::unsqueeze.default", b.any_strides(value), 2, out=view)
    return Ref(view.id)


def steps_of(spec: TensorSpec) -> tuple[int, int, int]:
    """Return how far images, lines and pixels are apart."""
    n, _, *points = map(hint, spec.stride)
    return n, points[0] if len(points) == 2 else 0, points[-1]


def dense(value: Value, b: Builder) -> Value:
    """Return an image or a signal with dense channels-last strides, copied (as an image) if it has others."""
    spec = b.spec(value)
    usual = channels_last_of(spec.shape)
    same = all(n == 1 or a == s for n, a, s in zip(spec.shape, spec.stride, usual, strict=True))
    return value if same else copied(value, b)


def dense_channels(value: Value, b: Builder) -> Value:
    """Return an image or a signal whose channels lie side by side, copied if they do not."""
    spec = b.spec(value)
    return copied(value, b) if spec.stride[1] != 1 and spec.shape[1] != 1 else value


def copied(value: Value, b: Builder) -> Value:
    """Copy an image, or a signal as one, to dense channels-last strides."""
    return b.channels_last(value if b.spec(value).rank > 3 else b.append_op("unsqueeze", value, 2))
