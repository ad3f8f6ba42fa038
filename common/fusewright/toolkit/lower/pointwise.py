"""Rules of the pointwise rows, as data: the formula over scalars, and the dtype that it is computed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from fusewright.interface import HOST, OpView, Value
from fusewright.ops.dtype_rules import result_type
from fusewright.toolkit.ir import Builder, Val
from fusewright.toolkit.ir.types import TYPES, DType, from_torch
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Check, Evaluator, Map, Table, always
from fusewright.toolkit.rules.space import At

Formula = Callable[..., Val]
"""`formula(b, op, *arguments)`: arguments are values of the compute type, or None where the call passes None."""

Kinds = Literal["any", "number", "integer", "bits", "float"]

_REFUSED: dict[Kinds, tuple[str, ...]] = {
    "any": (), "number": ("bool",), "integer": ("bool", "float"), "bits": ("float",), "float": ("bool", "int"),
}  # fmt: skip


def promoted(op: OpView, names: tuple[str, ...]) -> torch.dtype:
    """The dtype in which eager compares or combines the arguments."""
    given = [a.spec if isinstance(a, Value) and a.spec is not None else _number(a) for a in map(op.arg, names)]
    return result_type(given)


def _number(a: Any) -> Any:
    return 1 if isinstance(a, Value) else a


def formula(
    code: Formula,
    *names: str,
    compute: Literal["out", "args"] = "out",
    kinds: Kinds = "any",
    cost: int = 2,
    check: Check = always,
    divides: bool = False,
    rounds: bool = False,
    saturates: bool = False,
) -> Map:
    """Make a rule from a formula over the arguments called `names`, computed in the dtype of the result, or of the arguments if
    the result is bool. `kinds`: see `_REFUSED`. `divides`: for integers, a second argument of zero is an error. `rounds`: eager
    rounds numbers to a half type first, which changes more than the last digit of the result. `saturates`: numbers beyond an
    integer dtype are its limits, where others wrap."""

    def run(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        dtype = op.outs[k].spec.dtype if compute == "out" else promoted(op, names)  # type: ignore[union-attr]
        t = compute_dtype(dtype)
        given = [op.arg(n) for n in names]
        if compute == "args" or rounds:
            given = [_rounded(a, dtype) for a in given]
        if saturates:
            given = [_saturated(a, dtype) for a in given]
        values = [None if a is None else e(a, at, t) for a in given]
        divisor = values[1] if divides and TYPES[t].kind == "int" and isinstance(given[1], Value) else None
        if divisor is not None:
            e.checked("divisor", at)
            if e.mask is not None:  # where nothing is needed, nothing is read, and the zero in its place is no error
                values[1] = e.b.where(e.mask, divisor, e.b.const(1, t))
        return code(e.b, op, *values)

    def checked(op: OpView) -> str | None:
        dtype = op.out.spec.dtype if compute == "out" else promoted(op, names)  # type: ignore[union-attr]
        kind = TYPES[from_torch(dtype)].kind
        if kind in _REFUSED[kinds]:
            return f"computed in {str(dtype).removeprefix('torch.')}"
        return check(op)

    return Map(run, checked, cost, names)


def _rounded(arg: Any, dtype: torch.dtype) -> Any:
    """Round a number to the dtype in which eager compares; integers wrap (see `Evaluator.const`)."""
    if arg is None or isinstance(arg, Value) or not dtype.is_floating_point:
        return arg
    return torch.tensor(float(arg), dtype=torch.float64).to(dtype).item()


def _saturated(arg: Any, dtype: torch.dtype) -> Any:
    if not isinstance(arg, int) or dtype.is_floating_point:
        return arg
    info = torch.iinfo(dtype)
    return min(max(arg, info.min), info.max)


def kernel_op(name: str) -> Formula:
    """The formula that consists of one kernel op."""
    return lambda b, op, *args: b.op(name, *args)


def is_bool(v: Val) -> bool:
    return v.dtype == "bool"


def is_int(v: Val) -> bool:
    return TYPES[v.dtype].kind == "int"


# ---- arithmetic ----


def scaled(b: Builder, v: Val, alpha: Any) -> Val:
    return v if alpha == 1 else v * alpha


def _add(b: Builder, op: OpView, x: Val, y: Val) -> Val:
    if is_bool(x):
        return b.op("or", x, y) if op.arg("alpha") else x
    return x + scaled(b, y, op.arg("alpha"))


def _sub(b: Builder, op: OpView, x: Val, y: Val) -> Val:
    return x - scaled(b, y, op.arg("alpha"))


def _rsub(b: Builder, op: OpView, x: Val, y: Val) -> Val:
    return y - scaled(b, x, op.arg("alpha"))


def _mul(b: Builder, op: OpView, x: Val, y: Val) -> Val:
    return b.op("and" if is_bool(x) else "mul", x, y)


def _div_rounded(b: Builder, op: OpView, x: Val, y: Val) -> Val:
    if op.arg("rounding_mode") == "floor":
        return b.op("floordiv", x, y)
    other, dtype = op.arg("other"), op.out.spec.dtype  # type: ignore[union-attr]
    if dtype not in (torch.float16, torch.bfloat16) or not isinstance(other, Value) or not getattr(other.spec, "rank", 0):
        return b.op("truncdiv", x, y)
    return b.op("trunc", b.cast(b.cast(b.op("div", x, y), from_torch(dtype)), x.dtype))  # eager's quotient is of the half type


def _either(number: str, truth: str) -> Formula:
    return lambda b, op, x, y: b.op(truth if is_bool(x) else number, x, y)


def _float_or_int(name: str, integer: str) -> Formula:
    return lambda b, op, x, y: b.op(integer if is_int(x) else name, x, y)


def power(b: Builder, x: Val, n: Any) -> Val:
    """`x ** n` for a number `n`, by multiplications and roots where torch uses them."""
    if is_int(x):
        return b.op("pow", x, b.const(int(n), x.dtype)) if n not in (2, 3) else (x * x if n == 2 else x * x * x)
    simple: Mapping[float, Callable[[], Val]] = {
        1.0: lambda: x,
        2.0: lambda: x * x,
        3.0: lambda: x * x * x,
        0.5: lambda: b.op("sqrt", x),
        -0.5: lambda: b.op("rsqrt", x),
        -1.0: lambda: b.op("reciprocal", x),
        -2.0: lambda: b.op("reciprocal", x * x),
    }
    found = simple.get(float(n))
    return found() if found else b.op("pow", x, b.const(float(n), x.dtype))


def _pow_scalar(b: Builder, op: OpView, x: Val) -> Val:
    n, spec = op.arg("exponent"), op.arg("self").spec
    if n in (0.5, -0.5) and spec.dtype == torch.float16 and torch.device(spec.device).type == HOST:
        # On CPUs eager takes roots of every type but this one: as a power, -inf and -0.0 have that of their absolute value.
        x = b.where(b.op("or", x.eq(-math.inf), x.eq(0)), b.op("abs", x), x)
    return power(b, x, n)


def _integer_power(op: OpView) -> str | None:
    n = op.arg("exponent")
    if not isinstance(n, int | float):
        return "exponent is no plain number"
    out = op.out.spec
    negative = out is not None and not out.dtype.is_floating_point and n < 0
    return "eager raises for integers to a negative power" if negative else None


def _known_limits(op: OpView) -> str | None:
    """Since torch 2.15, eager drops a limit that all integers of the dtype fulfil, also one that only the call knows."""
    limits = [a for a in (op.arg("min"), op.arg("max")) if isinstance(a, Value) and a.spec is None]
    out = op.out.spec
    narrow = out is not None and not out.dtype.is_floating_point and out.dtype.itemsize < 8
    return "a limit that may not fit in the dtype" if limits and narrow else None


def _clamp(b: Builder, op: OpView, x: Val, low: Val | None, high: Val | None) -> Val:
    x = x if low is None else b.op("maximum", x, low)
    return x if high is None else b.op("minimum", x, high)


def _logaddexp(b: Builder, op: OpView, x: Val, y: Val) -> Val:
    top = b.op("maximum", x, y)
    apart = top + b.op("log1p", b.op("exp", -b.op("abs", x - y)))
    return b.where(b.op("and", b.op("isinf", x), x.eq(y)), x, apart)


def _addcmul(b: Builder, op: OpView, x: Val, s: Val, t: Val) -> Val:
    return x + scaled(b, s, op.arg("value")) * t


def _addcdiv(b: Builder, op: OpView, x: Val, s: Val, t: Val) -> Val:
    return x + scaled(b, s, op.arg("value")) / t


def _lerp(b: Builder, op: OpView, x: Val, end: Val, w: Val) -> Val:
    near = b.op("abs", w) < 0.5
    return b.where(near, x + w * (end - x), end - (end - x) * (1 - w))


def _sign(b: Builder, op: OpView, x: Val) -> Val:
    return x if is_bool(x) else b.op("sign", x)


def _rounding(name: str) -> Formula:
    return lambda b, op, x: x if not TYPES[x.dtype].kind == "float" else b.op(name, x)


def _abs(b: Builder, op: OpView, x: Val) -> Val:
    return x if is_bool(x) or not TYPES[x.dtype].signed else b.op("abs", x)


def _relu(b: Builder, op: OpView, x: Val) -> Val:
    return b.op("maximum", x, b.const(0, x.dtype))


def _horner(x: Val, coefficients: Sequence[float]) -> Val:
    """The polynomial with these coefficients, highest power first."""
    out = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        out = out * x + c
    return out


_ERFINV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
"""M. Giles, "Approximating the erfinv function", GPU Computing Gems Jade, 2011: single precision."""


def _erfinv(b: Builder, op: OpView, x: Val) -> Val:
    w = -b.op("log", (1 - x) * (1 + x))
    centre, tail = _horner(w - 2.5, _ERFINV_CENTRE), _horner(b.op("sqrt", w) - 3, _ERFINV_TAIL)
    inner = b.where(w < 5, centre, tail) * x
    infinite = b.op("copysign", b.const(math.inf, x.dtype), x)
    return b.where(b.op("abs", x).eq(1), infinite, inner)


_DIGAMMA = (-1 / 132, 1 / 240, -1 / 252, 1 / 120, -1 / 12)
"""Coefficients of powers of 1/x^2, from B(2k)/2k: Abramowitz and Stegun 6.3.18, highest power first, sign changed."""


def _digamma(b: Builder, op: OpView, x: Val) -> Val:
    whole = b.op("round", x)  # the nearest pole; the difference is exact
    y = b.where(x < 0, 1 - x, x)  # by reflection
    below = b.op("reciprocal", y)
    for k in range(1, 10):
        below = below + b.op("reciprocal", y + k)
    small = y < 10
    y = b.where(small, y + 10, y)
    z = b.op("reciprocal", y * y)
    large = b.op("log", y) - 0.5 / y + _horner(z, _DIGAMMA) * z
    out = b.where(small, large - below, large)
    turned = out - math.pi / b.op("tan", (x - whole) * math.pi)
    pole = b.op("copysign", b.const(math.inf, x.dtype), -x)
    out = b.where(x < 0, b.where(x.eq(whole), math.nan, turned), out)
    return b.where(x.eq(0), pole, out)


def _single(op: OpView) -> str | None:
    """The formulas of a few functions are only accurate to fp32."""
    return "fp64" if op.out.spec is not None and op.out.spec.dtype == torch.float64 else None


_OF_STEPS: Mapping[str, Formula] = {
    "logaddexp": _logaddexp, "relu": _relu, "clamp": _clamp, "lerp": _lerp, "lerp_scalar": _lerp,
    "rsub": lambda b, op, x, y: y - x,
}  # fmt: skip


def stepped(b: Builder, dtype: DType, name: str, *args: Val | float) -> Val:
    """A row on floats, as a step of a recurrence calls it."""
    if name == "pow_scalar" and isinstance(args[0], Val):
        return power(b, args[0], args[1])
    values = [x if isinstance(x, Val) else b.const(x, dtype) for x in args]
    code = _OF_STEPS.get(name) or kernel_op(name.removesuffix("_scalar"))
    return code(b, None, *values)


# ---- comparisons and logic ----


def _isnan(b: Builder, op: OpView, x: Val) -> Val:
    return b.op("isnan", x) if TYPES[x.dtype].kind == "float" else b.const(False, "bool")


def _isinf(b: Builder, op: OpView, x: Val) -> Val:
    return b.op("isinf", x) if TYPES[x.dtype].kind == "float" else b.const(False, "bool")


def _signbit(b: Builder, op: OpView, x: Val) -> Val:
    return b.const(False, "bool") if is_bool(x) or not TYPES[x.dtype].signed else b.op("signbit", x)


def truth(b: Builder, x: Val) -> Val:
    """Whether a value is not zero; NaN is not."""
    return x if is_bool(x) else x.ne(0)


def _logical(name: str) -> Map:
    def run(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        return e.b.op(name, truth(e.b, e(op.arg("self"), at)), truth(e.b, e(op.arg("other"), at)))

    return Map(run)


def _where(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = compute_dtype(op.out.spec.dtype)  # type: ignore[union-attr]
    condition = truth(e.b, e(op.arg("condition"), at))
    return e.b.where(condition, e(op.arg("self"), at, t), e(op.arg("other"), at, t))


def _masked_fill(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = compute_dtype(op.out.spec.dtype)  # type: ignore[union-attr]
    mask = truth(e.b, e(op.arg("mask"), at))
    return e.b.where(mask, e(op.arg("value"), at, t), e(op.arg("self"), at, t))


# ---- dtype and memory ----


def _cast(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    x = e(op.arg("self"), at)
    return e.cast(x, from_torch(op.out.spec.dtype))  # type: ignore[union-attr]


def _same_device(op: OpView) -> str | None:
    source = op.arg("self").spec
    return None if op.out.spec is not None and source.device == op.out.spec.device else "a copy to another device"


def _clone(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    return e(op.arg("self"), at)


def _copy(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    return e.cast(e(op.arg("src"), at), from_torch(op.out.spec.dtype))  # type: ignore[union-attr]


def _unary(name: str, cost: int) -> Map:
    return formula(kernel_op(name), "self", kinds="float", cost=cost)


_UNARY = {
    "sqrt": 6, "rsqrt": 10, "reciprocal": 4, "exp": 16, "exp2": 14, "expm1": 24, "log": 20, "log2": 22, "log10": 22,
    "log1p": 26, "sin": 30, "cos": 30, "tan": 40, "asin": 30, "acos": 30, "atan": 30, "sinh": 30, "cosh": 30,
    "tanh": 26, "asinh": 40, "acosh": 40, "atanh": 40, "sigmoid": 22, "erf": 28, "erfc": 40, "lgamma": 100,
}  # fmt: skip

_XY = ("self", "other")

TABLE: Table = {
    name: (rule,)
    for name, rule in {
        "add": formula(_add, *_XY),
        "sub": formula(_sub, *_XY, kinds="number"),
        "rsub": formula(_rsub, *_XY, kinds="number"),
        "mul": formula(_mul, *_XY),
        "div": formula(kernel_op("div"), *_XY, kinds="float", cost=4),
        "div_rounded": formula(_div_rounded, *_XY, kinds="number", cost=10, divides=True),
        "fmod": formula(kernel_op("fmod"), *_XY, kinds="number", cost=12, divides=True, rounds=True),
        "remainder": formula(kernel_op("remainder"), *_XY, kinds="number", cost=12, divides=True, rounds=True),
        "pow": formula(kernel_op("pow"), "self", "exponent", kinds="number", cost=60),
        "pow_scalar": formula(_pow_scalar, "self", kinds="number", cost=8, check=_integer_power),
        "scalar_pow": formula(kernel_op("pow"), "self", "exponent", kinds="number", cost=60, rounds=True),
        "maximum": formula(_either("maximum", "or"), *_XY),
        "minimum": formula(_either("minimum", "and"), *_XY),
        "fmax": formula(_float_or_int("fmax", "maximum"), *_XY, kinds="number"),
        "fmin": formula(_float_or_int("fmin", "minimum"), *_XY, kinds="number"),
        "clamp": formula(_clamp, "self", "min", "max", kinds="number", check=_known_limits, saturates=True),
        "clamp_tensor": formula(_clamp, "self", "min", "max", kinds="number"),
        "atan2": formula(kernel_op("atan2"), *_XY, kinds="float", cost=40),
        "hypot": formula(kernel_op("hypot"), *_XY, kinds="float", cost=20),
        "copysign": formula(kernel_op("copysign"), *_XY, kinds="float"),
        "logaddexp": formula(_logaddexp, *_XY, kinds="float", cost=50),
        "addcmul": formula(_addcmul, "self", "tensor1", "tensor2", kinds="number"),
        "addcdiv": formula(_addcdiv, "self", "tensor1", "tensor2", kinds="float", cost=6),
        "lerp": formula(_lerp, "self", "end", "weight", kinds="float", cost=6),
        "lerp_scalar": formula(_lerp, "self", "end", "weight", kinds="float", cost=6),
        "abs": formula(_abs, "self"),
        "neg": formula(kernel_op("neg"), "self", kinds="number"),
        "sign": formula(_sign, "self"),
        "sgn": formula(_sign, "self"),
        "ceil": formula(_rounding("ceil"), "self"),
        "floor": formula(_rounding("floor"), "self"),
        "round": formula(_rounding("round"), "self"),
        "trunc": formula(_rounding("trunc"), "self"),
        "frac": formula(lambda b, op, x: x - b.op("trunc", x), "self", kinds="float"),
        **{name: _unary(name, cost) for name, cost in _UNARY.items()},
        "erfinv": formula(_erfinv, "self", kinds="float", cost=60, check=_single),
        "digamma": formula(_digamma, "self", kinds="float", cost=150, check=_single),
        "relu": formula(_relu, "self", kinds="number"),
        **{n: formula(kernel_op(n), *_XY, compute="args") for n in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{f"{n}_scalar": formula(kernel_op(n), *_XY, compute="args") for n in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{f"{n}_scalar": formula(kernel_op(n), *_XY, kinds="number", cost=12, rounds=True) for n in ("fmod", "remainder")},
        "copysign_scalar": formula(kernel_op("copysign"), *_XY, kinds="float"),
        **{
            f"bitwise_{n}{s}": formula(kernel_op(n), *_XY, kinds="bits")
            for n in ("and", "or", "xor")
            for s in ("", "_scalar")
        },
        **{f"bitwise_left_shift{s}": formula(kernel_op("shl"), *_XY, kinds="integer") for s in ("", "_scalar")},
        **{f"bitwise_right_shift{s}": formula(kernel_op("shr"), *_XY, kinds="integer") for s in ("", "_scalar")},
        "isnan": formula(_isnan, "self", compute="args"),
        "isinf": formula(_isinf, "self", compute="args"),
        "signbit": formula(_signbit, "self", compute="args"),
        "logical_not": formula(lambda b, op, x: ~truth(b, x), "self", compute="args"),
        "logical_and": _logical("and"),
        "logical_or": _logical("or"),
        "logical_xor": _logical("xor"),
        "bitwise_not": formula(kernel_op("not"), "self", kinds="bits"),
        "where": Map(_where),
        "masked_fill": Map(_masked_fill, symbols=("value",)),
        "masked_fill_tensor": Map(_masked_fill),
        "cast": Map(_cast, _same_device),
        "clone": Map(_clone),
        "copy": Map(_copy),
    }.items()
}
