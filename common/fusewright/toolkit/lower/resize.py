"""Rules of image resizing: elements read at computed positions, and interpolated."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusewright.interface import HOST, OpView
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Evaluator, Map, Table
from fusewright.toolkit.rules.space import At, shape_of

SCALES = ("scales", "scales_d", "scales_h", "scales_w")
"""Names of the arguments with scales, one for each resized dimension."""


def _axes(op: OpView) -> list[tuple[int, str]]:
    """The resized dimensions of an op, and the arguments with their scales."""
    scales = [name for name in op.argnames if name in SCALES]
    return [(d - len(scales), name) for d, name in enumerate(scales)]


def _step(op: OpView, made: int, n: int, scale: str) -> float:
    """How far the sources of neighbouring results are apart: ATen's `compute_scales_value`."""
    given = op.arg(scale)
    return 1.0 / given if given is not None and given > 0 else n / made


def _nearest(ahead: float) -> Callable[[Evaluator, OpView, int, At], Val]:
    """The pixel in which a result's place lies; `ahead`: of what in a result that is. Eager computes places in fp32, for fp64 on the
    host in fp64."""

    def rule(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        x = op.arg("self")
        shape, dims = shape_of(x.spec), list(at.dims)
        t = "f64" if x.spec.dtype == torch.float64 and x.spec.device == HOST else "f32"
        for d, scale in _axes(op):
            n, made = int(shape[d]), int(at.shape[d])  # type: ignore[arg-type]
            if made % n == 0 and op.arg(scale) in (None, made / n):
                dims[d] = dims[d] // (made // n)
                continue
            place = (e.b.cast(e.position(dims[d]), t) + ahead) * _step(op, made, n, scale)
            dims[d] = e.b.indirect(e.b.op("minimum", e.b.cast(place, "i64"), e.b.const(n - 1, "i64")))
        return e.value(x, At(shape, tuple(dims)))

    return rule


def _numbers(op: OpView) -> str | None:
    x, out = op.arg("self").spec, op.out.spec
    if out is None or not (x.static and out.static) or 0 in x.shape:
        return "a symbolic size, or nothing"
    return None if x.dtype.is_floating_point or x.dtype == torch.uint8 else "eager refuses other integers"


def _linear(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The weighted mean of two elements along each dimension, with the weights of ATen's `area_pixel_compute_source_index` and
    `compute_source_index_and_lambda`."""
    x, axes = op.arg("self"), _axes(op)
    shape = shape_of(x.spec)
    taps = [_taps(e, op, at, *axis) for axis in axes]

    def mean(places: tuple[Index, ...]) -> Val:
        if len(places) == len(axes):
            return e.value(x, At(shape, (*at.dims[: -len(axes)], *places)))
        first, second, share = taps[len(places)]
        return mean((*places, first)) * (1 - share) + mean((*places, second)) * share

    return mean(())


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
        place = e.b.op("maximum", (place + 0.5) * _step(op, made, n, scale) - 0.5, e.b.const(0.0, t))
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
    **{f"upsample_nearest{n}d": (Map(_nearest(0.0), _numbers, cost=4),) for n in (1, 2, 3)},
    **{f"upsample_nearest_exact{n}d": (Map(_nearest(0.5), _numbers, cost=4),) for n in (1, 2, 3)},
    "upsample_linear1d": (Map(_linear, _floating, cost=30, window=True),),
    "upsample_bilinear2d": (Map(_linear, _floating, cost=60, window=True),),
    "upsample_trilinear3d": (Map(_linear, _floating, cost=120, window=True),),
}
