"""The Triton text of each pointwise op of the kernel IR.

`{0}`, `{1}`, `{2}` are operands. `fw` is `fusewright_triton.emit.device` (helpers with torch's semantics where
Triton's differ), `libdevice` is Triton's name for the vendors' math libraries (libdevice, OCML). Plain
operators take literals as operands; function calls get typed constants, because Triton would choose its own type
for a literal in a call.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.toolkit.ir.types import TYPES, DType


class Unsupported(Exception):
    """The kernel needs something that Triton or the target cannot do; the caller leaves it to eager."""


@dataclass(frozen=True, slots=True)
class Form:
    """One text per kind of operand; `literals` says that operands may be plain numbers."""

    floats: str = ""
    ints: str = ""
    bools: str = ""
    literals: bool = False


def _plain(text: str, bools: bool = False) -> Form:
    return Form(text, text, text if bools else "", literals=True)


def _math(name: str, operands: int = 1) -> Form:
    return Form(f"libdevice.{name}({', '.join(f'{{{i}}}' for i in range(operands))})")


FORMS: dict[str, Form] = {
    "add": _plain("{0} + {1}"),
    "sub": _plain("{0} - {1}"),
    "mul": _plain("{0} * {1}"),
    "div": Form("{0} / {1}"),
    "floordiv": Form("fw.floordiv({0}, {1})", "fw.int_floordiv({0}, {1})"),
    "truncdiv": Form("libdevice.trunc({0} / {1})", "{0} // {1}"),
    "remainder": Form("fw.remainder({0}, {1})", "fw.int_remainder({0}, {1})"),
    "fmod": Form("libdevice.fmod({0}, {1})", "{0} % {1}"),
    "neg": Form("{0} * -1.0", "-{0}", literals=True),  # Triton's -x is 0 - x, which loses the sign of zero
    "abs": Form("tl.abs({0})", "tl.abs({0})"),
    "sign": Form("fw.sign({0})", "fw.sign({0})"),
    "minimum": Form("fw.minimum({0}, {1})", "tl.minimum({0}, {1})"),
    "maximum": Form("fw.maximum({0}, {1})", "tl.maximum({0}, {1})"),
    "fmin": Form("tl.minimum({0}, {1})"),
    "fmax": Form("tl.maximum({0}, {1})"),
    "sqrt": Form("tl.sqrt({0})"),
    "rsqrt": Form("tl.rsqrt({0})"),
    "reciprocal": Form("1.0 / {0}"),
    "exp": _math("exp"),
    "exp2": _math("exp2"),
    "expm1": _math("expm1"),
    "log": _math("log"),
    "log2": _math("log2"),
    "log10": _math("log10"),
    "log1p": _math("log1p"),
    "tanh": _math("tanh"),
    "sigmoid": Form("fw.sigmoid({0})"),
    "erf": _math("erf"),
    "erfc": _math("erfc"),
    "sin": _math("sin"),
    "cos": _math("cos"),
    "tan": _math("tan"),
    "asin": _math("asin"),
    "acos": _math("acos"),
    "atan": _math("atan"),
    "atan2": _math("atan2", 2),
    "sinh": _math("sinh"),
    "cosh": _math("cosh"),
    "asinh": _math("asinh"),
    "acosh": _math("acosh"),
    "atanh": _math("atanh"),
    "lgamma": _math("lgamma"),
    "hypot": _math("hypot", 2),
    "pow": Form("libdevice.pow({0}, {1})", "fw.int_pow({0}, {1})"),
    "copysign": _math("copysign", 2),
    "floor": Form("tl.floor({0})"),
    "ceil": Form("tl.ceil({0})"),
    "round": _math("nearbyint"),
    "trunc": _math("trunc"),
    "isnan": Form("{0} != {0}"),
    "isinf": Form('tl.abs({0}) == float("inf")'),
    "signbit": Form("fw.signbit({0})", "{0} < 0"),
    "eq": _plain("{0} == {1}", bools=True),
    "ne": _plain("{0} != {1}", bools=True),
    "lt": _plain("{0} < {1}", bools=True),
    "le": _plain("{0} <= {1}", bools=True),
    "gt": _plain("{0} > {1}", bools=True),
    "ge": _plain("{0} >= {1}", bools=True),
    "and": Form(ints="{0} & {1}", bools="{0} & {1}", literals=True),
    "or": Form(ints="{0} | {1}", bools="{0} | {1}", literals=True),
    "xor": Form(ints="{0} ^ {1}", bools="{0} ^ {1}", literals=True),
    "not": Form(ints="~{0}", bools="{0} == 0"),
    "shl": Form(ints="fw.shl({0}, {1})"),
    "shr": Form(ints="fw.shr({0}, {1})"),
    "where": Form("tl.where({0}, {1}, {2})", "tl.where({0}, {1}, {2})", "tl.where({0}, {1}, {2})", literals=True),
}

EXACT_F32: dict[str, str] = {
    "div": "fw.divide({0}, {1})",
    "truncdiv": "libdevice.trunc(fw.divide({0}, {1}))",
    "reciprocal": "fw.reciprocal({0})",
    "sqrt": "tl.sqrt_rn({0})",
}
"""Correctly rounded f32 forms: Triton's plain `/` and `sqrt` are approximations of 1-2 ulp on f32, exact on f64."""

TRITON: dict[DType, str] = {
    "f32": "tl.float32",
    "f64": "tl.float64",
    "bf16": "tl.bfloat16",
    "f16": "tl.float16",
    "i8": "tl.int8",
    "u8": "tl.uint8",
    "i16": "tl.int16",
    "i32": "tl.int32",
    "i64": "tl.int64",
    "bool": "tl.int1",
}
"""Names of element types in Triton source."""

SIGNATURE: dict[DType, str] = {
    "f32": "fp32",
    "f64": "fp64",
    "bf16": "bf16",
    "f16": "fp16",
    "i8": "i8",
    "u8": "u8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "bool": "i1",
}
"""Names of element types in Triton's signatures."""


def form_of(op: str, dtype: DType) -> tuple[str, bool]:
    """Return the text of `op` on operands of `dtype`, and whether its operands may be literals. Raise KeyError for unknown ops."""
    form, kind = FORMS[op], TYPES[dtype].kind
    text = {"float": form.floats, "int": form.ints, "bool": form.bools}[kind]
    if dtype == "f32":
        text = EXACT_F32.get(op, text)
    if not text:
        raise Unsupported(f"{op} on {dtype}")
    return text, form.literals


def literal(value: int | float | bool, dtype: DType) -> str:
    """Return a number as Python text, for use beside a value of its type."""
    kind = TYPES[dtype].kind
    if kind == "bool":
        return str(bool(value))
    if kind == "int":
        bits, v = TYPES[dtype].size * 8, int(value)
        top = 2 ** (bits - 1) if TYPES[dtype].signed else 2**bits
        return str((v + top) % 2**bits - top if TYPES[dtype].signed else v % top)
    x = float(value)
    if x != x or x in (float("inf"), float("-inf")):
        return f'float("{x}")'
    return repr(x)


def constant(value: int | float | bool, dtype: DType) -> str:
    """Return a number as a typed Triton scalar. Triton turns -0.0 into +0.0, so -0.0 is made from its bits."""
    if TYPES[dtype].kind == "float" and float(value) == 0.0 and str(float(value)).startswith("-"):
        if dtype == "f64":
            return "tl.full((), -9223372036854775808, tl.int64).to(tl.float64, bitcast=True)"
        zero = "tl.full((), -2147483648, tl.int32).to(tl.float32, bitcast=True)"
        return zero if dtype == "f32" else f"{zero}.to({TRITON[dtype]})"
    return f"tl.full((), {literal(value, dtype)}, {TRITON[dtype]})"


def is_negative_zero(value: int | float | bool | None) -> bool:
    """Return whether a literal is -0.0, which Triton cannot hold as a number."""
    return isinstance(value, float) and str(value) == "-0.0"


def cast(text: str, src: DType, dst: DType) -> str:
    """Convert `text` of type `src` as torch converts: f64 and integers reach the half types through f32."""
    s, d = TYPES[src], TYPES[dst]
    if dst == "bool":
        return f"{text} != 0"
    half = d.kind == "float" and not d.compute
    if half and (src == "f64" or (s.kind == "int" and s.size > 2) or (s.kind == "float" and not s.compute)):
        return f"{text}.to(tl.float32).to({TRITON[dst]})"
    if s.kind == "float" and d.kind == "int" and d.size < 4:
        step = f"{text}.to(tl.float32)" if not s.compute else text
        return f"{step}.to(tl.int32).to({TRITON[dst]})"
    if s.kind == "float" and not s.compute and d.kind == "int":
        return f"{text}.to(tl.float32).to({TRITON[dst]})"
    return f"{text}.to({TRITON[dst]})"
