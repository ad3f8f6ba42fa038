"""Composite rows whose primitives, as kernels, are as fast as eager's call or faster. Those with errors of their own have kernel
rules."""

from __future__ import annotations

from functools import partial
from typing import Any

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Kind, Op, row
from fusewright.ops.semantics import opened as m
from fusewright.ops.table.composite import pointwise_loss_shape

_op = partial(row, Kind.COMPOSITE, opened=True)


def _unary(name: str, doc: str, formula: Any, dtype_rule: Any = dt.SELF, source: str = "") -> Op:
    """An element of the result depends on that of the only tensor."""
    return _op(name, f"aten::{name}", dtype_rule, sh.SAME, formula, doc, source, formula, activation=True)


# fmt: off
ROWS: tuple[Op, ...] = (
    _unary("nan_to_num", "self, with numbers for NaN and the infinities", m.nan_to_num),
    _unary("logit", "log(self / (1 - self)), self limited to eps and 1 - eps if that is given", m.logit, dt.FLOAT),
    _unary("sinc", "sin(pi * self) / (pi * self); 1 at 0", m.sinc, dt.FLOAT),
    _unary("softshrink", "self, lambd nearer to 0", m.softshrink),
    _unary("hardshrink", "self, or 0 where it is within lambd of 0", m.hardshrink),
    _unary("isposinf", "is the positive infinity", m.isposinf, dt.BOOL),
    _unary("isneginf", "is the negative infinity", m.isneginf, dt.BOOL),
    _op("xlogy", "aten::xlogy.Tensor", dt.promote_float("self", "other"), sh.BROADCAST, m.xlogy,
        "self * log(other); 0 where self is 0, and NaN where other is", "", m.xlogy),
    _op("xlog1py", "aten::special_xlog1py", dt.promote_float("self", "other"), sh.BROADCAST, m.xlog1py,
        "self * log1p(other); 0 where self is 0, and NaN where other is", "", m.xlog1py),
    _op("cross", "aten::linalg_cross", dt.PROMOTE, sh.BROADCAST, m.cross, "products of vectors of three along dim", "", m.cross),
    _op("std_mean", "aten::std_mean.correction", dt.dtypes(dt.magnitude, dt.SELF), sh.reduced(2), m.std_mean,
        "std and mean", "", m.std_mean),
    _op("aminmax", "aten::aminmax", dt.dtype_of("self", 2), m.extremes_shape, m.aminmax, "amin and amax", "", m.aminmax),
    _op("euclidean_dist", "aten::_euclidean_dist", dt.dtype_of("x1"), m.distances_shape, m.euclidean_dist,
        "distances of vectors, by one product", "", m.euclidean_dist, opened=False),
    _op("bce", "aten::binary_cross_entropy", dt.SELF, pointwise_loss_shape, m.bce,
        "binary cross entropy, logs being at least -100; self must be in 0 to 1", opened=False),
    _op("rot90", "aten::rot90", dt.SELF, m.rotated_shape, m.rot90, "k quarter turns in the plane of two dims", "", m.rot90),
    _op("diag_embed", "aten::diag_embed", dt.SELF, m.embedded_shape, m.diag_embed, "zeros with self on a diagonal", "",
        m.diag_embed),
    _op("diagonal_copy", "aten::diagonal_copy", dt.SELF, sh.diagonal, m.diagonal_copy, "a copy of diagonal", "", m.diagonal_copy),
    _op("channel_shuffle", "aten::channel_shuffle", dt.SELF, sh.SAME, m.channel_shuffle,
        "channels of groups, interleaved", "Zhang et al., arXiv:1707.01083", m.channel_shuffle),
    # backward
    _op("logit_backward", "aten::logit_backward", dt.promote("grad_output", "self"), sh.broadcast("grad_output", "self"),
        m.logit_backward, "gradient of logit", "", m.logit_backward),
    _op("bce_backward", "aten::binary_cross_entropy_backward", dt.SELF, sh.SAME, m.bce_backward, "gradient of bce", "",
        m.bce_backward),
    _op("diagonal_backward", "aten::diagonal_backward", dt.dtype_of("grad_output"), sh.attr_shape("input_sizes"),
        m.diagonal_backward, "zeros with the gradient on a diagonal", "", m.diagonal_backward),
)
# fmt: on
