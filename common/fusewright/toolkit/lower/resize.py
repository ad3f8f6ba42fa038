"""Rules of image resizing: elements read at computed positions, and interpolated."""

from __future__ import annotations

import torch

from fusewright.interface import OpView
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Evaluator, Map, Table
from fusewright.toolkit.rules.space import At, shape_of

AXES = ((-2, "scales_h"), (-1, "scales_w"))
"""Resized dimensions, and the arguments with their scales."""


def _axes(op: OpView) -> list[tuple[int, str]]:
    """The resized dimensions of an op without other arguments, and those with their scales."""
    scales = op.argnames[2:]
    return [(d - len(scales), name) for d, name in enumerate(scales)]


def _nearest(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = op.arg("self")
    shape, dims = shape_of(x.spec), list(at.dims)
    for d, _ in _axes(op):
        dims[d] = dims[d] // (int(at.shape[d]) // int(shape[d]))  # type: ignore[arg-type]
    return e.value(x, At(shape, tuple(dims)))


def _whole_factor(op: OpView) -> str | None:
    x, out = op.arg("self").spec, op.out.spec
    if out is None or not (x.static and out.static):
        return "a symbolic size"
    if not x.dtype.is_floating_point and x.dtype != torch.uint8:
        return "eager refuses other integers"
    for d, name in _axes(op):
        factor, scale = out.shape[d] / x.shape[d], op.arg(name)
        if factor != int(factor) or (scale is not None and scale != factor):
            return "the scale is no whole number"
    return None


def _bilinear(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The weighted mean of four elements, with the weights of ATen's `area_pixel_compute_source_index` and
    `compute_source_index_and_lambda`."""
    x = op.arg("self")
    shape = shape_of(x.spec)
    upper, lower, down = _taps(e, op, at, *AXES[0])
    left, right, across = _taps(e, op, at, *AXES[1])

    def row(h: Index) -> Val:
        a, b = (e.value(x, At(shape, (*at.dims[:-2], h, w))) for w in (left, right))
        return a * (1 - across) + b * across

    return row(upper) * (1 - down) + row(lower) * down


def _taps(e: Evaluator, op: OpView, at: At, d: int, scale: str) -> tuple[Index, Index, Val]:
    """Two positions of the input along a dimension, and the weight of the second."""
    t = compute_dtype(op.out.spec.dtype)  # type: ignore[union-attr]
    n, made = int(shape_of(op.arg("self").spec)[d]), int(at.shape[d])  # type: ignore[arg-type]
    if n == made:
        return at.dims[d], at.dims[d], e.b.const(0.0, t)
    place = e.b.cast(e.position(at.dims[d]), t)
    if op.arg("align_corners"):
        place = place * ((n - 1) / (made - 1) if made > 1 else 0.0)
    else:
        given = op.arg(scale)
        step = 1.0 / given if given is not None and given > 0 else n / made
        place = e.b.op("maximum", (place + 0.5) * step - 0.5, e.b.const(0.0, t))
    last = e.b.const(n - 1, "i64")
    first = e.b.op("minimum", e.b.cast(place, "i64"), last)
    share = e.b.op("minimum", place - e.b.cast(first, t), e.b.const(1.0, t))
    return e.b.indirect(first), e.b.indirect(e.b.op("minimum", first + 1, last)), share


def _floating(op: OpView) -> str | None:
    x, out = op.arg("self").spec, op.out.spec
    if out is None or not (x.static and out.static) or 0 in x.shape:
        return "a symbolic size, or nothing"
    return None if out.dtype.is_floating_point else "integers"


TABLE: Table = {
    **{f"upsample_nearest{n}d": (Map(_nearest, _whole_factor, cost=4),) for n in (1, 2, 3)},
    "upsample_bilinear2d": (Map(_bilinear, _floating, cost=60, window=True),),
}
