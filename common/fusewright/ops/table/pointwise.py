"""Pointwise rows: every element of the output depends on one element of each (broadcast) input."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright.ops import dtype_rules as dt
from fusewright.ops import shape_rules as sh
from fusewright.ops.core import Args, Kind, Op, row

_op = partial(row, Kind.POINTWISE)


def _unary(name: str, doc: str, dtype_rule: Any = dt.FLOAT, reference: Any = None, aten: str = "") -> Op:
    return _op(name, f"aten::{aten or name}", dtype_rule, sh.SAME, reference or getattr(torch, name), doc)


def _binary(name: str, doc: str, dtype_rule: Any = dt.PROMOTE, reference: Any = None, overload: str = ".Tensor") -> Op:
    return _op(name, f"aten::{name}{overload}", dtype_rule, sh.BROADCAST, reference or getattr(torch, name), doc)


def _scalar(name: str, doc: str, dtype_rule: Any = dt.PROMOTE, overload: str = ".Scalar") -> Op:
    # Only arithmetic takes a number in place of a tensor; elsewhere that is a separate overload with its own row.
    return _op(f"{name}_scalar", f"aten::{name}{overload}", dtype_rule, sh.SAME, getattr(torch, name), doc)


def wide(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which a reference computes if an op's argument is `dtype`."""
    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def clamp_dtype(a: Args) -> tuple[torch.dtype]:
    """The promoted dtype of self, min and max, where given."""
    return (dt.result_type([a["self"], a["min"], a["max"]]),)


def cast_ref(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Convert to the kind of the new dtype; the caller rounds to floats of fewer bits."""
    return x.to(wide(dtype) or x.dtype).clone()


def clone_ref(x: Any, *, memory_format: Any = None) -> Any:
    return x.clone()


def copy_ref(x: Any, src: Any, non_blocking: bool = False) -> Any:
    return src.to(x.dtype).expand(x.shape).clone()


def rsub_ref(x: Any, other: Any, alpha: Any = 1) -> Any:
    return other - alpha * x


def div_rounded_ref(x: Any, other: Any, *, rounding_mode: str | None) -> Any:
    return torch.div(x, other, rounding_mode=rounding_mode)


def addcmul_ref(x: Any, t1: Any, t2: Any, *, value: Any = 1) -> Any:
    return x + value * t1 * t2


def addcdiv_ref(x: Any, t1: Any, t2: Any, *, value: Any = 1) -> Any:
    return x + value * t1 / t2


def lerp_ref(x: Any, end: Any, weight: Any) -> Any:
    return x + weight * (end - x)


# fmt: off
ROWS: tuple[Op, ...] = (
    # arithmetic
    _binary("add", "self + alpha * other"),
    _binary("sub", "self - alpha * other"),
    _op("rsub", "aten::rsub.Scalar", dt.PROMOTE, sh.SAME, rsub_ref, "other - alpha * self, other a number"),
    _binary("mul", "self * other"),
    _binary("div", "self / other, true division", dt.promote_float("self", "other")),
    _op("div_rounded", "aten::div.Tensor_mode", dt.PROMOTE, sh.BROADCAST, div_rounded_ref,
        "self / other rounded by rounding_mode: trunc or floor"),
    _binary("fmod", "remainder with the sign of self"),
    _scalar("fmod", "remainder with the sign of self, other a number"),
    _binary("remainder", "remainder with the sign of other, as Python's %"),
    _scalar("remainder", "remainder with the sign of other, as Python's %, other a number"),
    _op("pow", "aten::pow.Tensor_Tensor", dt.promote("self", "exponent"), sh.broadcast("self", "exponent"),
        torch.pow, "self ** exponent, both tensors"),
    _op("pow_scalar", "aten::pow.Tensor_Scalar", dt.promote("self", "exponent"), sh.SAME, torch.pow,
        "self ** exponent, exponent a number"),
    _op("scalar_pow", "aten::pow.Scalar", dt.promote("self", "exponent"), sh.shape_of("exponent"), torch.pow,
        "self ** exponent, self a number"),
    _binary("maximum", "the larger; NaN wins", overload=""),
    _binary("minimum", "the smaller; NaN wins", overload=""),
    _binary("fmax", "the larger; NaN loses", overload=""),
    _binary("fmin", "the smaller; NaN loses", overload=""),
    _op("clamp", "aten::clamp", clamp_dtype, sh.SAME, torch.clamp,
        "limited to min and max, numbers; NaN stays"),
    _op("clamp_tensor", "aten::clamp.Tensor", clamp_dtype, sh.broadcast("self", "min", "max"), torch.clamp,
        "limited to min and max, tensors; NaN wins"),
    _binary("atan2", "angle of the point (other, self)", dt.promote_float("self", "other"), overload=""),
    _binary("hypot", "sqrt(self^2 + other^2)", overload=""),
    _binary("copysign", "size of self, sign of other", dt.promote_float("self", "other")),
    _scalar("copysign", "size of self, sign of other, other a number", dt.promote_float("self", "other")),
    _binary("logaddexp", "log(exp(self) + exp(other))", overload=""),
    _op("addcmul", "aten::addcmul", dt.promote("self", "tensor1", "tensor2"),
        sh.broadcast("self", "tensor1", "tensor2"), addcmul_ref, "self + value * tensor1 * tensor2"),
    _op("addcdiv", "aten::addcdiv", dt.promote("self", "tensor1", "tensor2"),
        sh.broadcast("self", "tensor1", "tensor2"), addcdiv_ref, "self + value * tensor1 / tensor2"),
    _op("lerp", "aten::lerp.Tensor", dt.SELF, sh.broadcast("self", "end", "weight"), lerp_ref,
        "self + weight * (end - self)"),
    _op("lerp_scalar", "aten::lerp.Scalar", dt.SELF, sh.broadcast("self", "end"), lerp_ref,
        "self + weight * (end - self), weight a number"),
    # unary
    _unary("abs", "absolute value", dt.magnitude),
    _unary("neg", "-self", dt.SELF),
    _unary("sign", "-1, 0 or 1", dt.SELF),
    _unary("sgn", "sign; for complex numbers the direction", dt.SELF),
    _unary("ceil", "rounded up", dt.SELF),
    _unary("floor", "rounded down", dt.SELF),
    _unary("round", "rounded to nearest, half to even", dt.SELF),
    _unary("trunc", "rounded to zero", dt.SELF),
    _unary("frac", "self - trunc(self)", dt.SELF),
    _unary("sqrt", "square root"),
    _unary("rsqrt", "1 / sqrt(self)"),
    _unary("reciprocal", "1 / self"),
    _unary("exp", "e ** self"),
    _unary("exp2", "2 ** self"),
    _unary("expm1", "exp(self) - 1"),
    _unary("log", "natural logarithm"),
    _unary("log2", "logarithm to base 2"),
    _unary("log10", "logarithm to base 10"),
    _unary("log1p", "log(1 + self)"),
    _unary("sin", "sine"),
    _unary("cos", "cosine"),
    _unary("tan", "tangent"),
    _unary("asin", "inverse sine"),
    _unary("acos", "inverse cosine"),
    _unary("atan", "inverse tangent"),
    _unary("sinh", "hyperbolic sine"),
    _unary("cosh", "hyperbolic cosine"),
    _unary("tanh", "hyperbolic tangent"),
    _unary("asinh", "inverse hyperbolic sine"),
    _unary("acosh", "inverse hyperbolic cosine"),
    _unary("atanh", "inverse hyperbolic tangent"),
    _unary("sigmoid", "1 / (1 + exp(-self))"),
    _unary("erf", "error function"),
    _unary("erfc", "1 - erf(self)"),
    _unary("erfinv", "inverse of erf"),
    _unary("lgamma", "log of the absolute gamma function"),
    _unary("digamma", "derivative of lgamma"),
    _unary("relu", "max(self, 0); NaN stays", dt.SELF),
    # comparisons and logic
    _binary("eq", "self == other", dt.BOOL),
    _scalar("eq", "self == other, other a number", dt.BOOL),
    _binary("ne", "self != other", dt.BOOL),
    _scalar("ne", "self != other, other a number", dt.BOOL),
    _binary("lt", "self < other", dt.BOOL),
    _scalar("lt", "self < other, other a number", dt.BOOL),
    _binary("le", "self <= other", dt.BOOL),
    _scalar("le", "self <= other, other a number", dt.BOOL),
    _binary("gt", "self > other", dt.BOOL),
    _scalar("gt", "self > other, other a number", dt.BOOL),
    _binary("ge", "self >= other", dt.BOOL),
    _scalar("ge", "self >= other, other a number", dt.BOOL),
    _unary("isnan", "is not a number", dt.BOOL),
    _unary("isinf", "is infinite", dt.BOOL),
    _unary("signbit", "has its sign bit set", dt.BOOL),
    _unary("logical_not", "is zero", dt.BOOL),
    _binary("logical_and", "and of the truth values", dt.BOOL, overload=""),
    _binary("logical_or", "or of the truth values", dt.BOOL, overload=""),
    _binary("logical_xor", "xor of the truth values", dt.BOOL, overload=""),
    _unary("bitwise_not", "every bit flipped; logical for bool", dt.SELF),
    _binary("bitwise_and", "and of the bits"),
    _scalar("bitwise_and", "and of the bits, other a number"),
    _binary("bitwise_or", "or of the bits"),
    _scalar("bitwise_or", "or of the bits, other a number"),
    _binary("bitwise_xor", "xor of the bits"),
    _scalar("bitwise_xor", "xor of the bits, other a number"),
    _binary("bitwise_left_shift", "self << other"),
    _scalar("bitwise_left_shift", "self << other, other a number", overload=".Tensor_Scalar"),
    _binary("bitwise_right_shift", "self >> other, the sign is kept"),
    _scalar("bitwise_right_shift", "self >> other, the sign is kept, other a number",
        overload=".Tensor_Scalar"),
    # selection
    _op("where", "aten::where.self", dt.PROMOTE, sh.broadcast("condition", "self", "other"), torch.where,
        "self where condition, else other"),
    _op("masked_fill", "aten::masked_fill.Scalar", dt.SELF, sh.broadcast("self", "mask"), torch.masked_fill,
        "a number where mask, else self"),
    _op("masked_fill_tensor", "aten::masked_fill.Tensor", dt.SELF, sh.broadcast("self", "mask"),
        torch.masked_fill, "a 0-dim value where mask, else self"),
    # dtype and memory
    _op("cast", "aten::_to_copy", dt.attr_or_self, sh.SAME, cast_ref,
        "a copy with another dtype, device or memory format"),
    _op("clone", "aten::clone", dt.SELF, sh.SAME, clone_ref, "a copy"),
    _op("copy", "aten::copy", dt.SELF, sh.SAME, copy_ref,
        "src broadcast and cast to self, whose values are not read"),
)
# fmt: on
