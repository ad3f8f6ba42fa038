"""Recognizes quantized products in a region: an op on dequantized operands and its epilogue up to the next quantization.

Quantize and dequantize ops in a graph define the results of int8 arithmetic. These patterns extract the 8-bit tensors, scales
and zero points of a linear, a convolution, an addition or a product of two activations, for any library. docs/quantization.md
explains why the opset has no rows `q_add` and `q_matmul`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.pattern import Chain, Match, chain, many, maybe

VIEWS = frozenset({"view", "reshape", "squeeze", "unsqueeze"})
PRODUCTS = ("matmul", "bmm", "mm")
"""Products of two activations."""
BATCHING = frozenset({"view", "reshape", "expand", "clone"})
"""Ops that may stand between a dequantization and its use because they preserve the matrices."""
HALVES = (torch.bfloat16, torch.float16)
BYTES = (torch.uint8, torch.int8)
"""Types of quantized tensors."""


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor that stands for (value - zero_point) * scale. Scale and zero point are numbers or one-element values."""

    value: Value
    scale: Any
    zero_point: Any
    made_by: OpView

    @property
    def static(self) -> bool:
        """Whether scale and zero point are known numbers."""
        return isinstance(self.scale, int | float) and isinstance(self.zero_point, int)


@dataclass(frozen=True)
class Rows:
    """A quantized tensor with a scale and a zero point per row (token)."""

    value: Value
    scale: Value
    zero_point: Value
    made_by: OpView


@dataclass(frozen=True)
class Weight:
    """A constant int8 weight. `scale` and `zero_point` are values with one element per index of `axis`, or a number for all;
    a `zero_point` of None means 0."""

    value: Value
    scale: Any
    zero_point: Any
    axis: int


@dataclass(frozen=True)
class Target:
    """The quantization of a result."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: torch.dtype


def same_rows(op: OpView) -> bool:
    """Whether a view preserves the last dimension, and so the rows."""
    x, out = op.args[0], op.out
    return isinstance(x, Value) and bool(x.spec and out.spec and x.spec.shape[-1:] == out.spec.shape[-1:] != ())


def _widens(op: OpView) -> bool:
    """Whether an op is an exact cast of a half type, as `rewrite/widen.py` puts before products."""
    x = op.args[0]
    given = x.spec.dtype if isinstance(x, Value) and x.spec else None
    return op.op == "cast" and given in HALVES and op.out.spec is not None and op.out.spec.dtype is torch.float32


def before_casts(value: Any, graph: RegionGraph) -> Any:
    """Skip exact casts of a half type."""
    made = graph.producer(value) if isinstance(value, Value) else None
    while made is not None and _widens(made):
        value = made.args[0]
        made = graph.producer(value)
    return value


def before_views(value: Any, graph: RegionGraph) -> Any:
    """Skip views that preserve rows, and exact casts of a half type."""
    made = graph.producer(value) if isinstance(value, Value) else None
    while made is not None and (_widens(made) or (made.op in VIEWS and same_rows(made))):
        value = made.args[0]
        made = graph.producer(value)
    return value


def dequantized(value: Any, graph: RegionGraph, views: bool = False) -> Quantized | Rows | None:
    """The 8-bit tensor that `value` was dequantized from, or None. With `views`, views that preserve rows may lie between."""
    value = before_views(value, graph) if views else before_casts(value, graph)
    made = graph.producer(value) if isinstance(value, Value) else None
    if made is None or made.op not in ("dequantize", "dequantize_tensor", "dequantize_per_token"):
        return None
    x = made.arg("input")
    if x.spec is None or x.spec.dtype not in BYTES:
        return None
    if made.op == "dequantize_per_token":
        return Rows(x, made.arg("scales"), made.arg("zero_points"), made)
    return Quantized(x, made.arg("scale"), made.arg("zero_point"), made)


def before_padding(x: Quantized, graph: RegionGraph) -> tuple[Value, tuple[int, int, int, int]] | None:
    """The images that were padded with zeros, i.e. with the zero point, to make `x`, and the padding: top, left, bottom, right.
    None if `x` was made otherwise."""
    made = graph.producer(x.value)
    if made is None or made.op != "constant_pad_nd" or made.arg("value") != x.zero_point:
        return None
    images, pads = made.arg("self"), made.arg("pad")
    if len(pads) != 4 or images.spec.rank != 4 or not all(isinstance(p, int) and p >= 0 for p in pads):
        return None
    left, right, top, bottom = pads
    return images, (top, left, bottom, right)


def weight_of(value: Any, graph: RegionGraph) -> Weight | None:
    """The constant int8 weight that `value` was dequantized from; None if there is none, or if a scale is 0."""
    value = before_casts(value, graph)
    made = graph.producer(value) if isinstance(value, Value) else None
    if made is None or made.op not in ("dequantize", "dequantize_per_channel"):
        return None
    q = made.arg("input")
    if q.spec is None or q.spec.dtype is not torch.int8 or not graph.is_const(q):
        return None
    if made.op == "dequantize":
        return Weight(q, made.arg("scale"), made.arg("zero_point"), 0)
    scale, zero = made.arg("scales"), made.arg("zero_points")
    return Weight(q, scale, zero, made.arg("axis")) if graph.is_const(scale) and graph.is_const(zero) else None


def _keeps_matrices(op: OpView) -> bool:
    """Whether an op changes only the batching of matrices."""
    x, out = op.args[0], op.out
    if not isinstance(x, Value) or op.op not in BATCHING or x.spec is None or out.spec is None:
        return False
    before, after = x.spec, out.spec
    same = before.shape[-2:] == after.shape[-2:] and before.numel_hint() == after.numel_hint()
    return same and before.static and after.static


def factors(op: OpView, graph: RegionGraph) -> tuple[Quantized, Quantized] | None:
    """Both operands of one of `PRODUCTS`, quantized with known numbers and possibly batched in another way; None otherwise."""
    found = []
    for value in op.args[:2]:
        while isinstance(value, Value) and (made := graph.producer(value)) is not None and (_keeps_matrices(made) or _widens(made)):
            value = made.args[0]
        q = dequantized(value, graph)
        if not isinstance(q, Quantized) or not q.static or not q.scale:
            return None
        found.append(q)
    return found[0], found[1]


def target_of(op: OpView | None) -> Target | None:
    """The quantization that a quantize op applies."""
    if op is None:
        return None
    return Target(*(op.arg(n) for n in ("scale", "zero_point", "quant_min", "quant_max", "dtype")))


def residual_of(m: Match) -> Value | None:
    """The tensor that a match adds to the product, or None."""
    add = m.get("add")
    return None if add is None else other_of(add, m.ops[m.ops.index(add) - 1].out)


def other_of(op: OpView, value: Value) -> Value | None:
    """The other operand of an addition; None if it is the same value or not a tensor."""
    a, b = op.arg("self"), op.arg("other")
    found = b if a == value else a
    return found if isinstance(found, Value) and found.spec is not None and found != value else None


def _adds(op: OpView, m: Match, context: Any) -> bool:
    """Whether an addition adds a tensor of the product's shape and dtype."""
    other, out = other_of(op, m.out), m.out.spec
    if op.arg("alpha") != 1 or other is None or other.spec is None or out is None or op.out.spec is None:
        return False
    return other.spec.shape == out.shape and other.spec.dtype == out.dtype == op.out.spec.dtype


def _rounds(op: OpView, m: Match, context: Any) -> bool:
    """Whether a cast rounds a product to bf16, which was widened because the device has no products of bf16."""
    given, out = m.out.spec, op.out.spec
    return given is not None and out is not None and (given.dtype, out.dtype) == (torch.float32, torch.bfloat16)


def _quantizes(op: OpView, m: Match, context: Any) -> bool:
    scale = op.arg("scale")
    known = isinstance(scale, int | float) and bool(scale) and isinstance(op.arg("zero_point"), int)
    return known and op.arg("input") == m.out and op.arg("dtype") in BYTES


def product(
    anchor: str | tuple[str, ...], rule: str, posts: Callable[[OpView], Any], names: frozenset[str], residual: bool = True,
    views: bool = False,
) -> Chain:
    """A chain of an anchor and its optional epilogue: rounding to bf16, row-preserving views (if `views`), an addition (if
    `residual`), a unary op of `names` for which `posts` is not None, quantization. `rule` is the prefix of the steps' ids."""

    def unary(op: OpView, m: Match, context: Any) -> bool:
        same = op.out.spec is not None and m.out.spec is not None and op.out.spec.dtype == m.out.spec.dtype
        return op.args[0] == m.out and same and posts(op) is not None

    seen = (many(VIEWS, lambda op, m, context: same_rows(op) and op.args[0] == m.out),) if views else ()
    adds = (maybe("add", _adds, "add", rule=f"{rule}.residual"),) if residual else ()
    return chain(
        anchor,
        maybe("cast", _rounds, "rounded", rule=f"{rule}.rounded"),
        *seen,
        *adds,
        maybe(names, unary, "unary", rule=f"{rule}.unary"),
        maybe("quantize", _quantizes, "quantize", rule=f"{rule}.quantize"),
    )

