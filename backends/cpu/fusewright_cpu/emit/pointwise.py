"""Pointwise ops, casts and literals of the kernel IR as LLVM instructions, for any lane count.

A value of type bool is an i1, bf16 is an i16 that is only moved and cast, everything else is LLVM's type of
that name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from fusewright.toolkit.ir.types import TYPES, DType, is_float
from fusewright_cpu.emit.math import emit_math, lanewise
from fusewright_cpu.emit.text import BITS, Fn, V, const

LLVM_TYPE: dict[DType, str] = {
    "f32": "float",
    "f64": "double",
    "bf16": "i16",
    "f16": "half",
    "i8": "i8",
    "u8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "bool": "i1",
}


def memory_type(dtype: DType) -> str:
    """Return the LLVM type of an element in memory."""
    return "i8" if dtype == "bool" else LLVM_TYPE[dtype]


def literal(value: float | int | bool, dtype: DType) -> V:
    """Return a constant of the IR."""
    if dtype == "bf16":
        bits = torch.tensor(float(value), dtype=torch.bfloat16).view(torch.int16)
        return const(int(bits), "i16")
    if dtype == "f16":
        value = float(torch.tensor(float(value), dtype=torch.float16))
    return const(value, LLVM_TYPE[dtype])


SUBNORMAL = 0x20
"""The class of subnormals of both signs, for the instruction that classifies floats."""


class IntegerDivision:
    """How integer division reports a zero divisor: a callback that gets the mask of the lanes with one."""

    def __init__(self, report: Callable[[V], None]) -> None:
        self.report = report

    def operands(self, f: Fn, a: V, b: V, signed: bool) -> tuple[V, V, V]:
        """Return (a, a divisor that is neither 0 nor -1, the mask of lanes with -1)."""
        a, b = f.same(a, b)
        zero = f.cmp("icmp eq", b, const(0, b.t))
        self.report(zero)
        minus = f.cmp("icmp eq", b, const(-1, b.t)) if signed else const(False, "i1")
        # INT_MIN / -1 traps like a division by zero
        safe = f.select(f.bin("or", zero, minus), const(1, b.t), b)
        return a, safe, minus


def emit_op(f: Fn, op: str, dtype: DType, args: list[V], division: IntegerDivision) -> V:
    """Emit the pointwise op `op` on operands of IR type `dtype` (for `where`: the type of the branches)."""
    if op == "where":
        return f.select(args[0], args[1], args[2])
    if is_float(dtype):
        return _FLOAT[op](f, *args) if op in _FLOAT else emit_math(f, op, f.same(*args))
    return _integer(f, op, dtype, args, division)


# floats


def _fbin(ins: str) -> Callable[[Fn, V, V], V]:
    return lambda f, a, b: f.bin(ins, a, b)


def _fcmp(pred: str) -> Callable[[Fn, V, V], V]:
    return lambda f, a, b: f.cmp(f"fcmp {pred}", a, b)


def _call(name: str) -> Callable[[Fn, V], V]:
    return lambda f, a: f.call(name, a.t, [a])


def maximum(f: Fn, a: V, b: V) -> V:
    """Emit torch's maximum: NaN if either is. Of two zeros it is the second, as in eager's vectors, but not if that is a number: a
    relu keeps -0.0. With a number, this is one instruction of x86."""
    return _extreme(f, "maximum", "g", a, b)


def minimum(f: Fn, a: V, b: V) -> V:
    return _extreme(f, "minimum", "l", a, b)


def _extreme(f: Fn, name: str, pred: str, a: V, b: V) -> V:
    if f.module.target.arm:
        return f.call(name, a.t, [a, b])
    if b.lit:  # comparisons with equality, as of some others of half types LLVM makes those that take the other zero
        return f.select(f.bin("and", f.cmp(f"fcmp u{pred}e", a, b), f.cmp("fcmp ord", b, b)), a, b)
    return f.select(f.bin("or", f.cmp(f"fcmp o{pred}t", a, b), f.cmp("fcmp uno", a, a)), a, b)


def _fmax(f: Fn, a: V, b: V) -> V:
    return f.select(f.bin("or", f.cmp("fcmp oge", a, b), f.cmp("fcmp uno", b, b)), a, b)


def _fmin(f: Fn, a: V, b: V) -> V:
    return f.select(f.bin("or", f.cmp("fcmp ole", a, b), f.cmp("fcmp uno", b, b)), a, b)


def _sign(f: Fn, x: V) -> V:
    zero, one = const(0.0, x.t), const(1.0, x.t)
    up = f.select(f.cmp("fcmp ogt", x, zero), one, zero)
    return f.bin("fsub", up, f.select(f.cmp("fcmp olt", x, zero), one, zero))


def _fmod(f: Fn, a: V, b: V) -> V:
    return lanewise(f, "fmodf" if a.t == "float" else "fmod", [a, b])


def _opposite(f: Fn, m: V, b: V) -> V:
    """Return the lanes where the remainder `m` is not zero and differs in sign from `b`."""
    zero = const(0.0, m.t)
    differ = f.bin("xor", f.cmp("fcmp olt", m, zero), f.cmp("fcmp olt", b, zero))
    return f.bin("and", differ, f.cmp("fcmp une", m, zero))


def _remainder(f: Fn, a: V, b: V) -> V:
    a, b = f.same(a, b)
    m = _fmod(f, a, b)
    return f.select(_opposite(f, m, b), f.bin("fadd", m, b), m)


def _floordiv(f: Fn, a: V, b: V) -> V:
    """Emit torch's floor division: by fmod, so that the quotient is never one too large."""
    a, b = f.same(a, b)
    zero, one = const(0.0, a.t), const(1.0, a.t)
    plain = f.bin("fdiv", a, b)
    m = _fmod(f, a, b)
    q = f.bin("fdiv", f.bin("fsub", a, m), b)
    q = f.select(_opposite(f, m, b), f.bin("fsub", q, one), q)
    down = f.call("floor", a.t, [q])
    up = f.cmp("fcmp ogt", f.bin("fsub", q, down), const(0.5, a.t))
    down = f.select(up, f.bin("fadd", down, one), down)
    down = f.select(f.cmp("fcmp oeq", q, zero), f.call("copysign", a.t, [zero, plain]), down)
    return f.select(f.cmp("fcmp oeq", b, zero), plain, down)


def _bits(f: Fn, x: V) -> V:
    return f.conv("bitcast", x, f"i{BITS[x.t]}")


_FLOAT: dict[str, Callable[..., V]] = {
    "add": _fbin("fadd"),
    "sub": _fbin("fsub"),
    "mul": _fbin("fmul"),
    "div": _fbin("fdiv"),
    "floordiv": _floordiv,
    "truncdiv": lambda f, a, b: f.call("trunc", a.t, [f.bin("fdiv", a, b)]),
    "remainder": _remainder,
    "fmod": _fmod,
    "neg": lambda f, a: f.fneg(a),
    "abs": _call("fabs"),
    "sign": _sign,
    "minimum": minimum,
    "maximum": maximum,
    "fmin": _fmin,
    "fmax": _fmax,
    "sqrt": _call("sqrt"),
    "rsqrt": lambda f, a: f.bin("fdiv", const(1.0, a.t), f.call("sqrt", a.t, [a])),
    "reciprocal": lambda f, a: f.bin("fdiv", const(1.0, a.t), a),
    "copysign": lambda f, a, b: f.call("copysign", a.t, [a, b]),
    "floor": _call("floor"),
    "ceil": _call("ceil"),
    "round": _call("roundeven"),
    "trunc": _call("trunc"),
    "isnan": lambda f, a: f.cmp("fcmp uno", a, a),
    "isinf": lambda f, a: f.cmp("fcmp oeq", f.call("fabs", a.t, [a]), const(math.inf, a.t)),
    "signbit": lambda f, a: f.cmp("icmp slt", _bits(f, a), const(0, f"i{BITS[a.t]}")),
    "eq": _fcmp("oeq"),
    "ne": _fcmp("une"),
    "lt": _fcmp("olt"),
    "le": _fcmp("ole"),
    "gt": _fcmp("ogt"),
    "ge": _fcmp("oge"),
}

# integers and bool

_INT_SIMPLE = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
_INT_COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}


def _integer(f: Fn, op: str, dtype: DType, args: list[V], division: IntegerDivision) -> V:
    signed = TYPES[dtype].signed
    s = "s" if signed else "u"
    a, b = args[0], args[-1]
    if op in _INT_SIMPLE:
        return f.bin(_INT_SIMPLE[op], a, b)
    if op in _INT_COMPARE:
        sign = "" if op in ("eq", "ne") else s
        return f.cmp(f"icmp {sign}{_INT_COMPARE[op]}", a, b)
    zero = const(0, a.t)
    match op:
        case "neg":
            return f.bin("sub", zero, a)
        case "not":
            return f.bin("xor", a, const(True, "i1") if a.t == "i1" else const(-1, a.t))
        case "abs":
            return f.select(f.cmp("icmp slt", a, zero), f.bin("sub", zero, a), a) if signed else a
        case "sign":
            up = f.conv("zext", f.cmp(f"icmp {s}gt", a, zero), a.t)
            return f.bin("sub", up, f.conv("zext", f.cmp("icmp slt", a, zero), a.t)) if signed else up
        case "minimum":
            return f.select(f.cmp(f"icmp {s}lt", a, b), a, b)
        case "maximum":
            return f.select(f.cmp(f"icmp {s}gt", a, b), a, b)
        case "signbit":
            return f.cmp("icmp slt", a, zero) if signed else f.cmp("icmp ne", zero, zero)
        case "shl" | "shr":
            return _shift(f, op, a, b, signed)
        case "pow":
            return _int_pow(f, a, b, signed)
        case _:
            return _int_division(f, op, a, b, signed, division)


def _shift(f: Fn, op: str, a: V, b: V, signed: bool) -> V:
    """Emit a shift; amounts outside the type's range shift everything out."""
    bits = BITS[a.t]
    bad = f.cmp("icmp uge", b, const(bits, a.t))
    if op == "shl":
        return f.select(bad, const(0, a.t), f.bin("shl", a, f.select(bad, const(0, a.t), b)))
    if signed:
        return f.bin("ashr", a, f.select(bad, const(bits - 1, a.t), b))
    return f.select(bad, const(0, a.t), f.bin("lshr", a, f.select(bad, const(0, a.t), b)))


def _int_division(f: Fn, op: str, a: V, b: V, signed: bool, division: IntegerDivision) -> V:
    a, b = f.same(a, b)
    x, d, minus = division.operands(f, a, b, signed)
    s = "s" if signed else "u"
    zero = const(0, a.t)
    if op == "fmod":
        return f.select(minus, zero, f.bin(f"{s}rem", x, d))
    quotient = f.bin(f"{s}div", x, d)
    rest = f.bin("sub", x, f.bin("mul", quotient, d))
    if signed:
        off = f.cmp("icmp slt", f.bin("xor", rest, d), zero)
        off = f.bin("and", off, f.cmp("icmp ne", rest, zero))
    if op == "remainder":
        rest = f.select(off, f.bin("add", rest, d), rest) if signed else rest
        return f.select(minus, zero, rest)
    if op == "floordiv" and signed:
        quotient = f.bin("sub", quotient, f.conv("zext", off, a.t))
    return f.select(minus, f.bin("sub", zero, a), quotient) if signed else quotient


def _int_pow(f: Fn, a: V, b: V, signed: bool) -> V:
    """Emit repeated squaring, modulo 2^bits; a negative exponent gives 0 except for the bases 1 and -1."""
    a, b = f.same(a, b)
    one, zero = const(1, a.t), const(0, a.t)

    def body(_: V, state: list[V]) -> list[V]:
        acc, base, e = state
        odd = f.cmp("icmp ne", f.bin("and", e, one), zero)
        return [f.select(odd, f.bin("mul", acc, base), acc), f.bin("mul", base, base), f.bin("lshr", e, one)]

    steps = const(BITS[a.t], "i64")
    acc = f.loop(const(0, "i64"), steps, const(1, "i64"), [f.splat(one, a.w), a, b], body)[0]
    if not signed:
        return acc
    even = f.cmp("icmp eq", f.bin("and", b, one), zero)
    inverse = f.select(f.cmp("icmp eq", a, one), one, zero)
    minus = f.select(even, one, const(-1, a.t))
    inverse = f.select(f.cmp("icmp eq", a, const(-1, a.t)), minus, inverse)
    return f.select(f.cmp("icmp slt", b, zero), inverse, acc)


# casts


def cast(f: Fn, x: V, src: DType, dst: DType) -> V:
    """Emit `Tensor.to`. Half types go through f32, as torch's do."""
    if src == dst:
        return x
    if src == "bf16":
        wide = f.bin("shl", f.conv("zext", x, "i32"), const(16, "i32"))
        return cast(f, f.conv("bitcast", wide, "float"), "f32", dst)
    if src == "f16":
        return cast(f, f.conv("fpext", x, "float"), "f32", dst)
    if dst == "bf16":
        return to_bf16(f, cast(f, x, src, "f32"))
    if dst == "f16":
        return f.conv("fptrunc", cast(f, x, src, "f32"), "half")
    t, kinds = LLVM_TYPE[dst], (TYPES[src].kind, TYPES[dst].kind)
    unsigned = not TYPES[src].signed
    if dst == "bool":
        return f.cmp("fcmp une" if kinds[0] == "float" else "icmp ne", x, const(0, x.t))
    if kinds == ("float", "float"):
        return f.conv("fpext" if t == "double" else "fptrunc", x, t)
    if kinds[1] == "float":
        return f.conv("uitofp" if unsigned else "sitofp", x, t)
    if kinds[0] == "float":
        # narrow integers go through i32, like torch's C cast on x86; unless frozen, LLVM makes a rounding of this cast and one
        # back to floats, which keeps NaN and values that no integer has
        whole = f.conv("fptosi", x, "i32" if BITS[t] < 32 else t)
        return f.conv("trunc", f.let(whole.t, whole.w, f"freeze {whole}"), t)
    if BITS[t] < BITS[x.t]:
        return f.conv("trunc", x, t)
    return f.conv("zext" if unsigned else "sext", x, t)


def to_bf16(f: Fn, x: V) -> V:
    """Round to nearest even; NaN stays NaN."""
    return to_bf16s(f, [x])[0]


def to_bf16s(f: Fn, xs: Sequence[V]) -> list[V]:
    """Round vectors of one width. The conversion instruction flushes subnormals, so if there is one, all use integer arithmetic."""
    if f.module.target.arm and f.module.target.has("bf16"):  # this one keeps subnormals
        return [f.conv("bitcast", f.conv("fptrunc", x, "bfloat"), "i16") for x in xs]
    if not (f.module.target.has("avx512bf16") and all(x.w == 16 for x in xs)):
        return [_round_bf16(f, x) for x in xs]
    name, test = "llvm.x86.avx512bf16.cvtneps2bf16.512", "llvm.x86.avx512.fpclass.ps.512"  # llvm.is.fpclass: three instructions
    f.module.declare(name, "<16 x bfloat>", [xs[0].ty])
    f.module.declare(test, "<16 x i1>", [xs[0].ty, "i32"])
    fast = [f.conv("bitcast", f.let("bfloat", 16, f"call <16 x bfloat> @{name}({x})"), "i16") for x in xs]
    tiny = [f.let("i1", 16, f"call <16 x i1> @{test}({x}, i32 {SUBNORMAL})") for x in xs]
    found = functools.reduce(lambda a, b: f.bin("or", a, b), tiny)
    return f.when(f.any(found), lambda: [_round_bf16(f, x) for x in xs], fast)


def _round_bf16(f: Fn, x: V) -> V:
    if f.module.target.arm:  # replace NaN before narrowing any lane, so that its mask needs no narrowing
        x = f.select(f.cmp("fcmp ord", x, x), x, const(math.nan, "float"))
    bits = f.conv("bitcast", x, "i32")
    odd = f.bin("and", f.bin("lshr", bits, const(16, "i32")), const(1, "i32"))
    rounded = f.bin("add", f.bin("add", bits, const(0x7FFF, "i32")), odd)
    if not f.module.target.arm:
        rounded = f.select(f.cmp("fcmp uno", x, x), const(0x7FC00000, "i32"), rounded)
    return f.conv("trunc", f.bin("lshr", rounded, const(16, "i32")), "i16")
