"""Group norms of channels-last images in fp32, and batch norms that no convolution takes.

Eager's kernel for this layout computes the variance as the difference of two means, which cancel (T. F. Chan, G. H. Golub and
R. J. LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983): where the mean is three times
the spread, it has 24 times the error of eager's kernel for contiguous images, which is the one that a contiguous model uses.
"""

from __future__ import annotations

from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.norms import of_constants, write_batch_norm
from fusewright.toolkit.rules.space import layout_of

RULE, CONSTANTS = "onednn.group_norm", "onednn.batch_norm"
"""Whether the first rule applies depends on the actual layout, so no row can claim the op in advance."""


def lower(op: OpView, b: Builder) -> bool:
    """Write a norm as other ops. Return False for other ops, or if its statistics are read."""
    return _batch_norm(op, b) or _group_norm(op, b)


def _batch_norm(op: OpView, b: Builder) -> bool:
    if op.op != "batch_norm" or not b.ctx.rules.allows(CONSTANTS) or not of_constants(op, b):
        return False
    write_batch_norm(op, b)
    b.notes[op.id] = "in kernels; what its weights determine, once"
    b.ctx.rules.hit(CONSTANTS)
    return True


def _group_norm(op: OpView, b: Builder) -> bool:
    """Write `op` as means over points and then over the channels of a group: of the values, of their deviations from that mean, and
    of the squared deviations, in kernels that go along the channels. Return False for other ops, or if the statistics are read.

    The mean of the deviations is the rounding error of the mean: the same at every point, so it would accumulate later.
    """
    if op.op != "group_norm" or not b.ctx.rules.allows(RULE) or not all(b.graph.unused(v) for v in op.outs[1:]):
        return False
    given: tuple[Any, ...] = b.resolved(op).args
    x, weight, bias, *_, groups, eps = given
    spec = x.spec
    if spec is None or spec.dtype is not torch.float32 or not spec.static or (spec.rank, layout_of(spec)) != (4, "channels_last"):
        return False
    mean = _means(x, groups, b)

    def distance() -> Value:  # emitted once per use, so that each kernel recomputes it and none stores it
        return b.append_op("sub", x, mean)

    d = distance()
    rest, squares = _means(distance(), groups, b), _means(b.append_op("mul", d, d), groups, b)
    variance = b.append_op("sub", squares, b.append_op("mul", rest, rest))
    factor = b.append_op("rsqrt", b.append_op("add", variance, eps))
    column = (1, spec.shape[1], 1, 1)
    if weight is not None:
        factor = b.append_op("mul", factor, b.append_op("view", weight, column))
    shift = b.append_op("mul", rest, factor)
    shift = b.append_op("neg", shift) if bias is None else b.append_op("sub", b.append_op("view", bias, column), shift)
    b.append_op("add", b.append_op("mul", distance(), factor), shift, out=b.with_layout(op.out, spec.stride))
    b.notes[op.id] = "in kernels, along the channels"
    b.ctx.rules.hit(RULE)
    return True


def _means(x: Value, groups: int, b: Builder) -> Value:
    """[N, C, H, W] -> [N, C, 1, 1]: the mean of its group for every channel."""
    assert x.spec is not None
    n, channels, *_ = x.spec.shape
    assert isinstance(channels, int)
    apart = (n, groups, channels // groups)
    over_points = b.append_op("view", b.append_op("mean", x, (2, 3), True), apart)
    over_group = b.append_op("mean", over_points, (2,), True)
    return b.append_op("reshape", b.append_op("expand", over_group, apart), (n, channels, 1, 1))
