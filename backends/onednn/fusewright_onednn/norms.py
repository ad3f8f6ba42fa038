"""Group norms of channels-last images in fp32.

Eager's kernel for this layout takes the variance as the difference of two means, which cancel (T. F. Chan, G. H. Golub and
R. J. LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983): where the mean is three times
the spread it has 24 times the error of eager's kernel for planes, which is the one that a model has that runs in planes.
"""

from __future__ import annotations

from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.rules.space import layout_of


def lower(op: OpView, b: Builder) -> bool:
    """Write `op` as means over points and then over the channels of a group, of the values, of their distances from that and of the
    squares of those: kernels that go along the channels. False where it is something else, or somebody reads its statistics.

    The mean of the distances is what rounding left of the mean: the same at every point, so that it would add up further on.
    """
    if op.op != "group_norm" or not all(b.links.unused(v) for v in op.outs[1:]):
        return False
    given: tuple[Any, ...] = b.at_hand(op).args
    x, weight, bias, *_, groups, eps = given
    spec = x.spec
    if spec is None or spec.dtype is not torch.float32 or not spec.static or layout_of(spec) != "channels_last":
        return False
    mean = _means(x, groups, b)

    def distance() -> Value:  # written out for every use, so that each kernel computes it and none stores it
        return b.behind("sub", x, mean)

    d = distance()
    rest, squares = _means(distance(), groups, b), _means(b.behind("mul", d, d), groups, b)
    variance = b.behind("sub", squares, b.behind("mul", rest, rest))
    factor = b.behind("rsqrt", b.behind("add", variance, eps))
    column = (1, spec.shape[1], 1, 1)
    if weight is not None:
        factor = b.behind("mul", factor, b.behind("view", weight, column))
    shift = b.behind("mul", rest, factor)
    shift = b.behind("neg", shift) if bias is None else b.behind("sub", b.behind("view", bias, column), shift)
    b.behind("add", b.behind("mul", distance(), factor), shift, out=b.placed(op.out, spec.stride))
    b.notes[op.id] = "in kernels, along the channels"
    return True


def _means(x: Value, groups: int, b: Builder) -> Value:
    """[N, C, H, W] -> [N, C, 1, 1]: for every channel the mean of its group."""
    assert x.spec is not None
    n, channels, *_ = x.spec.shape
    assert isinstance(channels, int)
    apart = (n, groups, channels // groups)
    over_points = b.behind("view", b.behind("mean", x, (2, 3), True), apart)
    over_group = b.behind("mean", over_points, (2,), True)
    return b.behind("reshape", b.behind("expand", over_group, apart), (n, channels, 1, 1))
