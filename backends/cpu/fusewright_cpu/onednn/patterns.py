"""The ops that library calls fuse: post-ops as a table, and what may follow each anchor as chains of optional steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.pattern import Match, chain, maybe
from fusewright_cpu.onednn import own, sums

Scalars = tuple[float, ...]


@dataclass(frozen=True)
class PostOp:
    """A unary op that oneDNN fuses into a product: torch's name for it, its scalars and its variant.

    `exact` is False where oneDNN loses a NaN that eager keeps (max(NaN, 0) is 0 there); it is then used only under
    `finite_math`.
    """

    attr: str
    exact: bool = True
    scalars: Callable[[OpView], Scalars | None] = lambda op: ()
    algorithm: Callable[[OpView], str] = lambda op: ""


def _limits(op: OpView) -> Scalars | None:
    low, high = op.arg("min"), op.arg("max")
    return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None


def _slope(op: OpView) -> Scalars | None:
    slope = op.arg("negative_slope")
    return (float(slope),) if isinstance(slope, int | float) else None


POST_OPS: Mapping[str, PostOp] = {
    "gelu": PostOp("gelu", algorithm=lambda op: str(op.arg("approximate"))),
    "silu": PostOp("swish"),
    "tanh": PostOp("tanh"),
    "sigmoid": PostOp("sigmoid"),
    "hardswish": PostOp("hardswish"),
    "leaky_relu": PostOp("leaky_relu", scalars=_slope),
    "relu": PostOp("relu", exact=False),
    "clamp": PostOp("hardtanh", exact=False, scalars=_limits),
    "hardsigmoid": PostOp("hardsigmoid", exact=False),
}
"""Row of the opset -> post-op. Measurements show which ones lose NaN;
tests/backends/onednn/test_special_values.py checks this."""

AFTER_ADD = frozenset({"relu"})
"""The unary ops that torch's mkldnn ops accept after a binary one."""


def posts(m: Match) -> tuple[OpView, ...]:
    """Return the ops after the anchor, in order."""
    return m.ops[1:]


def other_of(m: Match) -> Value | None:
    """Return the operand that the binary post-op adds."""
    add = m.get("add")
    return None if add is None else _other(add, (m.get("batch_norm") or m.anchor).out)


def post_op(m: Match) -> tuple[str, Scalars, str]:
    """Return attribute, scalars and algorithm of the unary op as torch's mkldnn ops take them."""
    unary = m.get("unary")
    if unary is None:
        return "none", (), ""
    post = POST_OPS[unary.op]
    return post.attr, post.scalars(unary) or (), post.algorithm(unary)


def scales(op: OpView, m: Match, b: Builder) -> bool:
    """Match a product with a power of two, as queries have it: constant weights and biases are scaled ahead, without rounding."""
    number, constants = op.args[1], operands(m.anchor)[1:]
    exact = isinstance(number, int | float) and number > 0 and math.frexp(number)[0] == 0.5
    ahead = all(map(b.is_const, constants)) and b.ctx.options["prepack"] != "never"
    return exact and ahead and op.args[0] == m.out and same_type(op.out, m.out)


def operands(op: OpView) -> tuple[Value, Value, Value | None]:
    """Return input, second matrix and bias of a product."""
    if op.op == "linear":
        return op.arg("input"), op.arg("weight"), op.arg("bias")
    if op.op == "addmm":
        return op.arg("mat1"), op.arg("mat2"), op.arg("self")
    return op.arg("self"), op.arg("mat2"), None


def unflattens(op: OpView, m: Match, b: Builder) -> bool:
    """Match a view that divides the rows of a product of matrices: model code flattens them, and an activation may follow."""
    out, made = m.out.spec, op.out.spec
    if out is None or made is None or out.rank != 2 or made.rank < 2 or not (out.static and made.static):
        return False
    return made.shape[-1] == out.shape[-1] and out.numel_hint() > 0


def is_packed(op: OpView, b: Builder) -> bool:
    """Return whether the weight of a convolution is in oneDNN's own layout. Of volumes in patches, eager makes one product."""
    x, w = op.arg("input").spec, op.arg("weight").spec
    patches = x.rank == 5 and set(w.shape[2:]) != {1} and tuple(w.shape[2:]) == tuple(op.arg("stride"))
    constant = b.is_const(op.arg("weight")) and b.ctx.options["prepack"] != "never"
    return constant and not op.arg("transposed") and not patches


def transposes_packed(op: OpView, b: Builder) -> bool:
    """Return whether the weight of a transposed convolution is in oneDNN's own layout: not of one channel a group, nor where the
    result is longer than oneDNN makes it, for neither of which torch calls oneDNN.

    At stride 1, eager's kernels for planes add shorter sums.
    """
    x, weight, groups = op.arg("input").spec, op.arg("weight"), op.arg("groups")
    if not op.arg("transposed") or x.rank not in (3, 4) or not b.is_const(weight) or b.ctx.options["prepack"] == "never":
        return False
    ends = zip(op.arg("output_padding"), op.arg("stride"), strict=True)
    terms = math.prod(weight.spec.shape) // (weight.spec.shape[1] * groups)
    long = set(op.arg("stride")) == {1} and x.dtype is torch.float32 and terms > sums.LONGEST
    return not long and groups in (1, *range(2, x.shape[1])) and all(end < step for end, step in ends)


def rides(op: OpView, b: Builder) -> bool:
    """Return whether a unary op may be computed in a call of oneDNN."""
    return POST_OPS[op.op].exact or bool(b.ctx.options["finite_math"])


def reads(op: OpView, m: Match) -> bool:
    """Match a unary op of `POST_OPS` on the result, of the same type."""
    return op.args[0] == m.out and same_type(op.out, m.out) and POST_OPS[op.op].scalars(op) is not None


def _unary(op: OpView, m: Match, b: Builder) -> bool:
    after_add = m.get("add") is None or op.op in AFTER_ADD
    return reads(op, m) and after_add and rides(op, b)


def _unary_of_product(op: OpView, m: Match, b: Builder) -> bool:
    return reads(op, m) and (rides(op, b) or own.takes(m.anchor, operands(m.anchor), b))


def _unary_of_conv(op: OpView, m: Match, b: Builder) -> bool:
    return _unary(op, m, b) and not _in_parts(m, b)


def _in_parts(m: Match, b: Builder) -> bool:
    """Match a convolution whose long sums are split: the kernel that adds the parts fuses the ops after it."""
    return is_packed(m.anchor, b) and sums.parts_of(m.anchor) > 1


def folds_batch_norm(op: OpView, m: Match, b: Builder) -> bool:
    """Match a batch norm of constants whose statistics nobody reads."""
    if op.arg("input") != m.out or not same_type(op.out, m.out) or not all(map(b.graph.unused, op.outs[1:])):
        return False
    if m.anchor.arg("transposed") and (m.anchor.arg("groups") != 1 or not transposes_packed(m.anchor, b)):
        return False
    statistics = [op.arg(n) for n in ("weight", "bias", "running_mean", "running_var")]
    return all(b.is_const(v) for v in [m.anchor.arg("weight"), m.anchor.arg("bias"), *statistics])


def _residual(op: OpView, m: Match, b: Builder) -> bool:
    """Match a residual that is worth fusing. In fp32 a separate addition is as fast or faster; grouped convolutions have no fused
    one; after a batch norm the bias is fp32, which the fused one does not take."""
    plain = op.arg("alpha") == 1 and same_type(op.out, m.out) and not m.anchor.arg("transposed")
    if not plain or m.get("batch_norm") is not None:
        return False
    other, out = _other(op, m.out), m.out.spec
    taken = other is not None and other != m.out and same_type(other, m.out)
    half = out is not None and out.dtype is torch.bfloat16
    return taken and half and m.anchor.arg("groups") == 1 and not _in_parts(m, b)


def _other(op: OpView, value: Value) -> Value | None:
    a, b = op.args[0], op.args[1]
    found: Any = b if a == value else a
    return found if isinstance(found, Value) else None


def same_type(a: Value, b: Value) -> bool:
    x, y = a.spec, b.spec
    return isinstance(x, TensorSpec) and isinstance(y, TensorSpec) and (x.shape, x.dtype) == (y.shape, y.dtype)


PRODUCTS = ("linear", "addmm", "mm")
FACTOR = maybe("mul", scales, "factor", rule="onednn.product.factor")

SCALED = chain(PRODUCTS, FACTOR)

PRODUCT = chain(
    PRODUCTS,
    FACTOR,
    maybe("view", unflattens, "rows", rule="onednn.product.rows"),
    maybe(frozenset(POST_OPS), _unary_of_product, "unary", rule="onednn.product.unary"),
)  # fmt: skip
"""No binary post-op: it measures slower than a separate addition, and up to nine times slower with a bias
(docs/studies/onednn.md)."""

CONV = chain(
    "conv",
    maybe("batch_norm", folds_batch_norm, "batch_norm", rule="onednn.conv.batch_norm"),
    maybe("add", _residual, "add", rule="onednn.conv.residual"),
    maybe(frozenset(POST_OPS), _unary_of_conv, "unary", rule="onednn.conv.unary"),
)

ATTENTION = chain(("sdpa", "sdpa_with_lse"))
