"""Rules of activations and their gradients. The formulas are those of the opset's references, in numerically accurate forms."""

from __future__ import annotations

import math

import torch

from fusewright.interface import OpView
from fusewright.toolkit.ir import Builder, Val
from fusewright.toolkit.lower.movement import out_type
from fusewright.toolkit.lower.pointwise import formula
from fusewright.toolkit.rules.kinds import Evaluator, Map, Table
from fusewright.toolkit.rules.space import At

_SQRT_HALF = math.sqrt(0.5)
_GELU = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _gelu(b: Builder, op: OpView, x: Val) -> Val:
    if op.arg("approximate") == "tanh":
        return x * 0.5 * (b.op("tanh", _gelu_inner(x)) + 1)
    return x * 0.5 * (b.op("erf", x * _SQRT_HALF) + 1)


def _gelu_inner(x: Val) -> Val:
    return (x + x * x * x * _CUBE) * _GELU


def _gelu_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    if op.arg("approximate") == "tanh":
        t = b.op("tanh", _gelu_inner(x))
        slope = (1 - t * t) * (x * x * (3 * _CUBE) + 1) * _GELU
        return g * ((t + 1) * 0.5 + x * 0.5 * slope)
    density = b.op("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * ((b.op("erf", x * _SQRT_HALF) + 1) * 0.5 + x * density)


def _silu(b: Builder, op: OpView, x: Val) -> Val:
    return x * b.op("sigmoid", x)


def _silu_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    s = b.op("sigmoid", x)
    return g * s * (x * (1 - s) + 1)


def softplus(b: Builder, x: Val) -> Val:
    """log(1 + exp(x)), without overflow."""
    return b.op("maximum", x, b.const(0, x.dtype)) + b.op("log1p", b.op("exp", -b.op("abs", x)))


def _tanh_of_softplus(b: Builder, x: Val) -> tuple[Val, Val, Val]:
    """tanh(log(1 + exp(x))), 1 minus that, and the sigmoid of x. With w = exp(x) the first is w (w + 2) / (w (w + 2) + 2): one
    exponential for all three, and no cancellation."""
    w, below = b.op("exp", -b.op("abs", x)), x < 0
    near, far = b.where(below, w * (w + 2), w * 2 + 1), b.where(below, 2, w * w * 2)
    scale = 1 / (near + far)
    return near * scale, far * scale, b.where(below, w, 1) / (w + 1)


def _mish(b: Builder, op: OpView, x: Val) -> Val:
    return x * _tanh_of_softplus(b, x)[0]


def _mish_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    t, rest, s = _tanh_of_softplus(b, x)
    return g * (t + x * s * rest * (t + 1))


def _clipped(b: Builder, x: Val, low: float, high: float) -> Val:
    return b.op("minimum", b.op("maximum", x, b.const(low, x.dtype)), b.const(high, x.dtype))


def _hardsigmoid(b: Builder, op: OpView, x: Val) -> Val:
    return _clipped(b, x + 3, 0, 6) / 6


def _hardswish(b: Builder, op: OpView, x: Val) -> Val:
    return x * _clipped(b, x + 3, 0, 6) / 6


def _hardswish_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    inner = b.where(x < 3, g * (x / 3 + 0.5), g)
    return b.where(x <= -3, 0, inner)


def _hardsigmoid_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    return b.where(b.op("and", x > -3, x < 3), g / 6, 0)


def _hardtanh_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    return b.where(b.op("or", x <= op.arg("min_val"), x >= op.arg("max_val")), 0, g)


def _leaky_relu(b: Builder, op: OpView, x: Val) -> Val:
    return b.where(x > 0, x, x * op.arg("negative_slope"))


def _leaky_relu_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    return b.where(x > 0, g, g * op.arg("negative_slope"))


def _elu(b: Builder, op: OpView, x: Val) -> Val:
    alpha, scale, inner = (op.arg(n) for n in ("alpha", "scale", "input_scale"))
    return b.where(x > 0, x * scale, b.op("expm1", x * inner) * (alpha * scale))


def _elu_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    alpha, scale, inner = (op.arg(n) for n in ("alpha", "scale", "input_scale"))
    slope = (x + alpha * scale) * inner if op.arg("is_result") else b.op("exp", x * inner) * (inner * alpha * scale)
    return b.where(x <= 0, g * slope, g * scale)


def _softplus(b: Builder, op: OpView, x: Val) -> Val:
    beta = op.arg("beta")
    z = x if beta == 1 else x * beta
    y = b.op("log1p", b.op("exp", z))
    return b.where(z > op.arg("threshold"), x, y if beta == 1 else y / beta)


def _softplus_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    z = x * op.arg("beta")
    return b.where(z > op.arg("threshold"), g, g * b.op("sigmoid", z))


def _log_sigmoid(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = e(op.arg("self"), at, out_type(op))
    tail = e.b.op("exp", -e.b.op("abs", x))
    return tail if k else e.b.op("minimum", x, e.b.const(0, x.dtype)) - e.b.op("log1p", tail)


def _threshold(b: Builder, op: OpView, x: Val) -> Val:
    return b.where(x <= op.arg("threshold"), op.arg("value"), x)


def _threshold_backward(b: Builder, op: OpView, g: Val, x: Val) -> Val:
    return b.where(x <= op.arg("threshold"), 0, g)


def _prelu(b: Builder, op: OpView, x: Val, weight: Val) -> Val:
    return b.where(x > 0, x, x * weight)


def _prelu_backward(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = out_type(op)
    g, x, weight = (e(op.arg(n), at, t) for n in ("grad_output", "self", "weight"))
    return e.b.where(x > 0, 0, x * g) if k else e.b.where(x > 0, g, weight * g)


def _one_type(op: OpView) -> str | None:
    weight, x = op.arg("weight").spec, op.arg("self").spec
    return None if weight.dtype == x.dtype else "a weight of another type"


def _no_fp64(op: OpView) -> str | None:
    return "eager's fractions are fp32 numbers in fp64 too" if op.out.spec.dtype == torch.float64 else None  # type: ignore[union-attr]


def _dropout_backward(b: Builder, op: OpView, g: Val, mask: Val) -> Val:
    return g * mask * op.arg("scale")


_X, _GX, _GY = ("self",), ("grad_output", "self"), ("grad_output", "output")

TABLE: Table = {
    name: (rule,)
    for name, rule in {
        "gelu": formula(_gelu, *_X, kinds="float", cost=30),
        "silu": formula(_silu, *_X, kinds="float", cost=24),
        "mish": formula(_mish, *_X, kinds="float", cost=36),
        "hardswish": formula(_hardswish, *_X, kinds="float", cost=6, check=_no_fp64),
        "hardsigmoid": formula(_hardsigmoid, *_X, kinds="float", cost=6, check=_no_fp64),
        "leaky_relu": formula(_leaky_relu, *_X, kinds="float"),
        "elu": formula(_elu, *_X, kinds="float", cost=28),
        "softplus": formula(_softplus, *_X, kinds="float", cost=40),
        "log_sigmoid": Map(_log_sigmoid, cost=40),
        "threshold": formula(_threshold, *_X, kinds="number"),
        "prelu": formula(_prelu, "self", "weight", kinds="float", check=_one_type),
        "prelu_backward": Map(_prelu_backward, _one_type),
        "log_sigmoid_backward": formula(lambda b, op, g, x: g * b.op("sigmoid", -x), *_GX, kinds="float", cost=26),
        "gelu_backward": formula(_gelu_backward, *_GX, kinds="float", cost=50),
        "silu_backward": formula(_silu_backward, *_GX, kinds="float", cost=26),
        "mish_backward": formula(_mish_backward, *_GX, kinds="float", cost=50),
        "tanh_backward": formula(lambda b, op, g, y: g * (1 - y * y), *_GY, kinds="float"),
        "sigmoid_backward": formula(lambda b, op, g, y: g * (1 - y) * y, *_GY, kinds="float"),
        "threshold_backward": formula(_threshold_backward, *_GX, kinds="number"),
        "hardtanh_backward": formula(_hardtanh_backward, *_GX, kinds="float"),
        "hardswish_backward": formula(_hardswish_backward, *_GX, kinds="float", cost=6, check=_no_fp64),
        "hardsigmoid_backward": formula(_hardsigmoid_backward, *_GX, kinds="float", cost=4, check=_no_fp64),
        "leaky_relu_backward": formula(_leaky_relu_backward, *_GX, kinds="float"),
        "elu_backward": formula(_elu_backward, "grad_output", "self_or_result", kinds="float", cost=20),
        "softplus_backward": formula(_softplus_backward, *_GX, kinds="float", cost=26),
        "dropout_backward": formula(_dropout_backward, "grad_output", "mask", kinds="float"),
    }.items()
}
