"""The Metal form of each kernel op, by the type of its operands. Math is in f32, integers or bool.

Functions named `fw_...` are in `prelude`. `metal::precise` functions are accurate to a few units in the last place (Metal Shading
Language Specification, table 8.2). `metal::fast` ones are used where a value is only ever rounded to a half type, whose rounding
error is far larger than theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusewright.toolkit.ir.types import TYPES, DType
from fusewright_mps.emit.source import Unsupported

METAL: dict[DType, str] = {
    "f32": "float", "bf16": "bfloat", "f16": "half", "i8": "char", "u8": "uchar", "i16": "short", "i32": "int", "i64": "long",
    "bool": "bool",
}  # fmt: skip
"""Metal's names of element types. There is none for f64."""


@dataclass(frozen=True, slots=True)
class Form:
    """Text per kind of operand, "" if the op does not exist for it. `fast` is for floats whose result is rounded to a half type."""

    floats: str = ""
    ints: str = ""
    bools: str = ""
    fast: str = ""


def _same(text: str, bools: bool = False) -> Form:
    return Form(text, text, text if bools else "")


def _math(name: str, fast: bool = False) -> Form:
    return Form(f"metal::precise::{name}({{0}})", fast=f"metal::fast::{name}({{0}})" if fast else "")


FORMS: dict[str, Form] = {
    "add": Form("{0} + {1}", "fw_add({0}, {1})"),
    "sub": Form("{0} - {1}", "fw_sub({0}, {1})"),
    "mul": Form("{0} * {1}", "fw_mul({0}, {1})"),
    "div": Form("{0} / {1}"),
    "floordiv": Form("fw_floordiv({0}, {1})", "fw_floordiv({0}, {1})"),
    "truncdiv": Form("metal::trunc({0} / {1})", "fw_truncdiv({0}, {1})"),
    "remainder": Form("fw_remainder({0}, {1})", "fw_remainder({0}, {1})"),
    "fmod": Form("metal::fmod({0}, {1})", "fw_fmod({0}, {1})"),
    "neg": Form("-{0}", "fw_neg({0})"),
    "abs": Form("metal::fabs({0})", "fw_abs({0})"),
    "sign": Form("fw_sign({0})", "fw_sign({0})"),
    "minimum": Form("fw_min({0}, {1})", "fw_min({0}, {1})"),
    "maximum": Form("fw_max({0}, {1})", "fw_max({0}, {1})"),
    "fmin": Form("metal::fmin({0}, {1})"),
    "fmax": Form("metal::fmax({0}, {1})"),
    "sqrt": _math("sqrt", fast=True),
    "rsqrt": _math("rsqrt", fast=True),
    "reciprocal": Form("1.0f / {0}"),
    "exp": _math("exp", fast=True),
    "exp2": _math("exp2", fast=True),
    "expm1": Form("fw_expm1({0})"),
    "log": _math("log", fast=True),
    "log2": _math("log2"),
    "log10": _math("log10"),
    "log1p": Form("fw_log1p({0})"),
    "tanh": _math("tanh"),  # the fast one is (e - 1) / (e + 1) with e = exp(2 x): NaN where that overflows
    "sigmoid": Form("fw_sigmoid({0})", fast="fw_fast_sigmoid({0})"),
    "erf": Form("fw_erf({0})"),
    "erfc": Form("fw_erfc({0})"),
    "sin": _math("sin"),
    "cos": _math("cos"),
    "tan": _math("tan"),
    "asin": _math("asin"),
    "acos": _math("acos"),
    "atan": _math("atan"),
    "atan2": Form("metal::precise::atan2({0}, {1})"),
    "sinh": _math("sinh"),
    "cosh": _math("cosh"),
    "asinh": _math("asinh"),
    "acosh": _math("acosh"),
    "atanh": _math("atanh"),
    "lgamma": Form("fw_lgamma({0})"),
    "hypot": Form("fw_hypot({0}, {1})"),
    "pow": Form("metal::precise::pow({0}, {1})", "fw_pow({0}, {1})"),
    "copysign": Form("metal::copysign({0}, {1})"),
    "floor": Form("metal::floor({0})"),
    "ceil": Form("metal::ceil({0})"),
    "round": Form("metal::rint({0})"),
    "trunc": Form("metal::trunc({0})"),
    "isnan": Form("metal::isnan({0})"),
    "isinf": Form("metal::isinf({0})"),
    "signbit": Form("metal::signbit({0})", "{0} < 0"),
    "eq": _same("{0} == {1}", bools=True),
    "ne": _same("{0} != {1}", bools=True),
    "lt": _same("{0} < {1}", bools=True),
    "le": _same("{0} <= {1}", bools=True),
    "gt": _same("{0} > {1}", bools=True),
    "ge": _same("{0} >= {1}", bools=True),
    "and": Form(ints="{0} & {1}", bools="{0} && {1}"),
    "or": Form(ints="{0} | {1}", bools="{0} || {1}"),
    "xor": Form(ints="{0} ^ {1}", bools="{0} != {1}"),
    "not": Form(ints="~{0}", bools="!{0}"),
    "shl": Form(ints="fw_shl({0}, {1})"),
    "shr": Form(ints="fw_shr({0}, {1})"),
    "where": _same("{0} ? {1} : {2}", bools=True),
}

DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
"""On integers, division by zero is an error where eager raises one."""

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
KEEPS_RELATIVE_ERROR = ("mul", "div", "neg", "abs", "where")
"""Ops whose relative error is at most the sum of their operands' relative errors."""
NOT_NEGATIVE = ("exp", "exp2", "sigmoid", "abs")
"""Ops with results >= 0: a sum of them has no larger relative error than its terms."""


def form_of(op: str, dtype: DType, fast: bool) -> str:
    """Return the text of `op` on operands of `dtype`."""
    form, kind = FORMS[op], TYPES[dtype].kind
    text = {"float": form.floats, "int": form.ints, "bool": form.bools}[kind]
    if dtype == "f64" or not text:
        raise Unsupported(f"{op} on {dtype}: Metal has no such arithmetic; torch's own call runs it")
    return form.fast if fast and form.fast and kind == "float" else text


def literal(value: int | float | bool, dtype: DType) -> str:
    """Return a constant of a type. f64 constants are written as f32 (see `values.refuse_f64`)."""
    kind = TYPES[dtype].kind
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        return _whole(int(value), dtype)
    text = _real(float(value))
    return text if dtype in ("f32", "f64") else f"{METAL[dtype]}({text})"


def _whole(value: int, dtype: DType) -> str:
    bits, signed = TYPES[dtype].size * 8, TYPES[dtype].signed
    v = value % 2**bits
    v = v - 2**bits if signed and v >= 2 ** (bits - 1) else v
    if dtype == "i64":
        return "(-9223372036854775807l - 1l)" if v == -(2**63) else f"{v}l"
    if dtype == "i32":
        return "(-2147483647 - 1)" if v == -(2**31) else str(v)
    return f"{METAL[dtype]}({v})"


def _real(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value) or abs(value) >= 3.4028235677973366e38:
        return "INFINITY" if value > 0 else "-INFINITY"
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def cast(text: str, src: DType, dst: DType) -> str:
    """Convert `text` as torch does: half types go through f32, floats go through int to the small integer types."""
    s, d = TYPES[src], TYPES[dst]
    if s.kind == "float" and not s.compute:
        text = f"float({text})"
    if dst == "bool":
        return f"{text} != 0" if s.kind == "int" else f"{text} != 0.0f" if s.kind == "float" else text
    if dst in ("f32", "f64"):
        return text if s.kind == "float" else f"float({text})"
    if d.kind == "float":
        return f"{METAL[dst]}({text if s.kind == 'float' else f'float({text})'})"
    if s.kind == "float" and d.size < 4:
        return f"{METAL[dst]}(int({text}))"
    return f"{METAL[dst]}({text})"


def combined(how: str, dtype: DType, a: str, b: str) -> str:
    """Combine `a` and `b`, for reductions, scans and accumulating stores."""
    if how in ("any", "all"):
        return f"{a} {'||' if how == 'any' else '&&'} {b}"
    if how in ("max", "min"):
        return f"fw_{how}({a}, {b})"
    sign = {"sum": "+", "add": "+", "prod": "*", "mul": "*"}[how]
    if TYPES[dtype].kind == "float":
        return f"{a} {sign} {b}"
    return f"fw_{'add' if sign == '+' else 'mul'}({a}, {b})"
