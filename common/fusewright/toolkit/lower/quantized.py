"""Rules of quantization and dequantization: the arithmetic of torch's `quantized_decomposed` operators, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from fusewright.interface import OpView
from fusewright.toolkit.ir import Val
from fusewright.toolkit.ir.types import TYPES, DType, from_torch
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Domain, Evaluator, Map, Row, RowContext, Table
from fusewright.toolkit.rules.space import At, shape_of

LEAST_SYMMETRIC = 1e-5
"""Smallest magnitude for which `choose_qparams_per_token` computes a scale."""
LEAST_SCALE = torch.finfo(torch.float32).eps
"""Smallest scale of `choose_qparams_per_token_asymmetric`."""


def _quantized(e: Evaluator, op: OpView, scaled: Val, zero: Val, early: bool = False) -> Val:
    """clamp(round(scaled) + zero) to the op's range, in its dtype; `early`: add the zero point before rounding."""
    q = e.b.op("round", scaled + zero) if early else e.b.op("round", scaled) + zero
    low, high = (e.b.const(float(op.arg(n)), q.dtype) for n in ("quant_min", "quant_max"))
    q = e.b.op("minimum", e.b.op("maximum", q, low), high)
    return e.cast(q, from_torch(op.out.spec.dtype))  # type: ignore[union-attr]


def _quantize(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = e(op.arg("input"), at, "f32")
    return _quantized(e, op, x * e.b.const(1.0 / op.arg("scale"), "f32"), e.b.const(float(op.arg("zero_point")), "f32"))


def _quantize_tensor(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    factor = e.b.cast(e.b.op("reciprocal", e(op.arg("scale"), at, _wide(op.arg("scale")))), "f32")
    return _quantized(e, op, e(op.arg("input"), at, "f32") * factor, e(op.arg("zero_point"), at, "f32"))


def _quantize_per_channel(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    channel = _channel(op, at)
    factor = e.b.op("reciprocal", e(op.arg("scales"), channel, "f32"))
    return _quantized(e, op, e(op.arg("input"), at, "f32") * factor, e(op.arg("zero_points"), channel, "f32"))


def _quantize_per_token(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = _wide(op.arg("scales"))
    factor = e.b.op("reciprocal", e(op.arg("scales"), at, t))
    return _quantized(e, op, e(op.arg("input"), at, t) * factor, e(op.arg("zero_points"), at, t), early=True)


def _dequantize(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    zero, scale = e.b.const(float(op.arg("zero_point")), "f32"), e.b.const(float(op.arg("scale")), "f32")
    return _out(e, op, (e(op.arg("input"), at, "f32") - zero) * scale)


def _dequantize_tensor(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    scale = e.b.cast(e(op.arg("scale"), at, _wide(op.arg("scale"))), "f32")
    return _out(e, op, (e(op.arg("input"), at, "f32") - e(op.arg("zero_point"), at, "f32")) * scale)


def _dequantize_per_channel(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    channel = _channel(op, at)
    x = e(op.arg("input"), at, "f32")
    x = x if op.arg("zero_points") is None else x - e(op.arg("zero_points"), channel, "f32")
    return _out(e, op, x * e(op.arg("scales"), channel, "f32"))


def _dequantize_per_token(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = _wide(op.arg("scales"))
    return _out(e, op, (e(op.arg("input"), at, t) - e(op.arg("zero_points"), at, t)) * e(op.arg("scales"), at, t))


def _out(e: Evaluator, op: OpView, x: Val) -> Val:
    return e.cast(x, from_torch(op.out.spec.dtype))  # type: ignore[union-attr]


def _channel(op: OpView, at: At) -> At:
    return at.pick((op.arg("axis") % len(at.shape),))


def _wide(scale: Any) -> DType:
    """The compute type of arithmetic with a scale: fp64 scales are not rounded first."""
    return "f64" if scale.spec.dtype == torch.float64 else "f32"


def _symmetric(r: RowContext, op: OpView) -> tuple[Val, ...]:
    x = r.x(op.arg("input"), "f32")
    largest = r.b.reduce("max", r.b.op("abs", x))
    scale = r.b.op("maximum", largest, r.b.const(LEAST_SYMMETRIC, "f32")) / 127
    return scale, r.b.const(0.0, compute_dtype(op.outs[1].spec.dtype))  # type: ignore[union-attr]


def _asymmetric(r: RowContext, op: OpView) -> tuple[Val, ...]:
    x, zero = r.x(op.arg("input"), "f32"), r.b.const(0.0, "f32")
    least = r.b.op("minimum", r.b.reduce("min", x), zero)
    most = r.b.op("maximum", r.b.reduce("max", x), zero)
    scale = r.b.op("maximum", (most - least) / 255, r.b.const(LEAST_SCALE, "f32"))
    low, high = least / scale, most / scale
    point = r.b.where((low - 128) + (high + 127) > 0, -low - 128, -high + 127)
    point = r.b.op("minimum", r.b.op("maximum", point, r.b.const(-128.0, "f32")), r.b.const(127.0, "f32"))
    return r.b.cast(scale, "f64"), r.b.cast(r.b.op("round", point), "i64")


def _tokens(op: OpView) -> Domain:
    shape = shape_of(op.arg("input").spec)
    return Domain(shape, (len(shape) - 1,))


def _number(op: OpView) -> str | None:
    """Eager raises for a scale of 0."""
    scale = op.arg("scale")
    return None if isinstance(scale, int | float) and scale else "a scale of 0, or one that is computed"


def _float_scales(*names: str) -> Any:
    def check(op: OpView) -> str | None:
        kinds = {op.arg(n).spec.dtype for n in names}
        return None if kinds <= {torch.float32, torch.float64} else "scales in other types than fp32 and fp64"

    return check


def _single_scales(op: OpView) -> str | None:
    return None if op.arg("scales").spec.dtype == torch.float32 else "scales in another type than fp32"


def _single_input(op: OpView) -> str | None:
    spec = op.arg("input").spec
    if not spec.shape or spec.shape[-1] == 0:
        return "no rows, or empty ones"
    kind = TYPES[from_torch(spec.dtype)].name
    return None if kind == "f32" else "rows in another type than fp32, whose arithmetic eager keeps"


def _rows(code: Any) -> tuple[Row, ...]:
    return (Row(_tokens, code, (0, 1), ("row", "row"), _single_input),)


TABLE: Table = {
    "quantize": (Map(_quantize, _number, cost=6),),
    "quantize_tensor": (Map(_quantize_tensor, _float_scales("scale"), cost=10),),
    "quantize_per_channel": (Map(_quantize_per_channel, _single_scales, cost=10),),
    "quantize_per_token": (Map(_quantize_per_token, _float_scales("scales"), cost=10),),
    "dequantize": (Map(_dequantize, cost=3),),
    "dequantize_tensor": (Map(_dequantize_tensor, _float_scales("scale"), cost=3),),
    "dequantize_per_channel": (Map(_dequantize_per_channel, _single_scales, cost=3),),
    "dequantize_per_token": (Map(_dequantize_per_token, _float_scales("scales"), cost=3),),
    "choose_qparams_per_token": _rows(_symmetric),
    "choose_qparams_per_token_asymmetric": _rows(_asymmetric),
}  # fmt: skip
