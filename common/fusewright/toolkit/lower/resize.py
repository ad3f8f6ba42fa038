"""Rules of image resizing and sampling: elements read at computed positions, and interpolated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce

import torch

from fusewright.interface import HOST, OpView
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Evaluator, Map, Table
from fusewright.toolkit.rules.space import At, layout_of, shape_of

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
    """The pixel in which a result's place lies; `ahead`: where in a result that is. Eager computes places in fp32, for fp64 on
    the host in fp64."""

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


# ---- sampling at given places ----

ZEROS, REFLECTION = 0, 2
"""Of `padding_mode`; 1 repeats the border."""
NEAREST, CUBIC = 1, 2
"""Of `interpolation_mode`; 0 is linear."""


def _grid_sampler(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The weighted mean of the neighbours of a place, or the nearest. ATen's `grid_sampler_compute_source_index`. At a place
    that is NaN or infinite all neighbours are outside; weights of NaN times their zeros make a NaN of images on the host."""
    x, t = op.arg("input"), compute_dtype(op.out.spec.dtype)  # type: ignore[union-attr]
    image, grid = shape_of(x.spec), shape_of(op.arg("grid").spec)
    sizes = [int(n) for n in image[2:]]  # type: ignore[arg-type]
    steps = []
    for d, n in enumerate(sizes):  # the grid has the last dimension first
        number = Index(len(sizes) - 1 - d, sizes=at.dims[0].sizes)
        given = e(op.arg("grid"), At(grid, (at.dims[0], *at.dims[2:], number)), t)
        steps.append(_neighbours(e, _padded(e, op, given, n), n, nearest=op.arg("interpolation_mode") == NEAREST))
    total, weighs_zeros = None, _on_host(op, 4)
    for taps in itertools.product(*steps):
        inside = reduce(lambda a, b: e.b.op("and", a, b), (there for _, there, _ in taps))
        with e.masked(inside):
            v = e(x, At(image, (*at.dims[:2], *(e.b.indirect(place) for place, _, _ in taps))), t)
        v = e.b.where(inside, v, e.const(0, t)) if weighs_zeros else v
        for _, _, share in taps:
            v = v if share is None else v * share
        v = v if weighs_zeros else e.b.where(inside, v, e.const(0, t))
        total = v if total is None else total + v
    assert total is not None
    return total


def _on_host(op: OpView, rank: int) -> bool:
    """Whether eager's code is that for images (rank 4) or volumes (5) on the host, which treat NaN each in a way of its own."""
    x = op.arg("input").spec
    return bool(x.device == HOST and x.rank == rank)


def _padded(e: Evaluator, op: OpView, given: Val, n: int) -> Val:
    """The place of -1 to 1 in an image of `n` elements, and inside it if it is not padded with zeros."""
    corners, t = op.arg("align_corners"), given.dtype
    place = (given + 1) * ((n - 1) / 2) if corners else ((given + 1) * n - 1) * 0.5
    if op.arg("padding_mode") == ZEROS:
        return place
    of_nan = ("maximum", "fmin") if _on_host(op, 5) else ("fmax", "minimum")  # the last element, or the first
    return e.b.op(of_nan[1], e.b.op(of_nan[0], place, e.const(0.0, t)), e.const(n - 1, t))


def _neighbours(e: Evaluator, place: Val, n: int, nearest: bool) -> list[tuple[Val, Val, Val | None]]:
    """Positions, whether they are in the image, and weights: None for 1."""

    def tap(p: Val, share: Val | None) -> tuple[Val, Val, Val | None]:
        return e.b.cast(p, "i64"), e.b.op("and", p >= 0, p <= n - 1), share

    if nearest:
        return [tap(e.b.op("round", place), None)]
    first = e.b.op("floor", place)
    share = place - first
    return [tap(first, 1 - share), tap(first + 1, share)]


def _sampled(op: OpView) -> str | None:
    """Eager is faster at images whose channels lie together (2x128x32x32 0.56 ms, a kernel 1.21), and at reflections (0.72 ms, a
    kernel 3.95: remainders of floats take long); on planes a kernel takes 0.59 ms, eager 0.72, of bf16 1.42 and 2.47 (a Zen 5
    virtual machine, one thread, 2026-11-28)."""
    x, grid = op.arg("input").spec, op.arg("grid").spec
    if not x.static or not grid.static or 0 in x.shape:
        return "a symbolic size, or nothing"
    if op.arg("interpolation_mode") == CUBIC or op.arg("padding_mode") == REFLECTION or layout_of(x) != "contiguous":
        return "cubic weights, reflections, or channels that lie together"
    if op.arg("interpolation_mode") == NEAREST and _on_host(op, 5) and x.dtype.itemsize == 2:
        return "places of volumes in a half type, which rounding moves"
    return None if x.dtype == grid.dtype and x.dtype.is_floating_point else "a grid of another type"


TABLE: Table = {
    "grid_sampler_2d": (Map(_grid_sampler, _sampled, cost=120, window=True),),
    "grid_sampler_3d": (Map(_grid_sampler, _sampled, cost=240, window=True),),
    **{f"upsample_nearest{n}d": (Map(_nearest(0.0), _numbers, cost=4),) for n in (1, 2, 3)},
    **{f"upsample_nearest_exact{n}d": (Map(_nearest(0.5), _numbers, cost=4),) for n in (1, 2, 3)},
    "upsample_linear1d": (Map(_linear, _floating, cost=30, window=True),),
    "upsample_bilinear2d": (Map(_linear, _floating, cost=60, window=True),),
    "upsample_trilinear3d": (Map(_linear, _floating, cost=120, window=True),),
}
