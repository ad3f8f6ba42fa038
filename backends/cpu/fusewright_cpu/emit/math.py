"""Elementary functions on f32 vectors, with their error bounds, and the C library for the rest.

The polynomials were fitted for this file: weighted least squares on Chebyshev nodes with 50 digits; each
coefficient is rounded to the type before the next ones are fitted. NaN, infinities, signed zeros and
subnormals follow the C library. f64, and functions without a row, call the C library lane by lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fusewright_cpu.emit.text import Fn, V, const

COEFS: dict[str, tuple[float, ...]] = {
    # (e^r - 1 - r) / r^2, |r| <= ln(2)/2
    "exp": (
        0.5, 0.16666516661643982, 0.04166645556688309, 0.008369089104235172, 0.0013935758033767343,
    ),
    # (2^r - 1) / r, |r| <= 1/2
    "exp2": (
        0.6931471824645996, 0.24022650718688965, 0.05550358071923256, 0.009618077427148819,
        0.0013391643296927214, 0.0001545635750517249,
    ),
    # (log(1 + f) - f + f^2/2) / f^3, sqrt(1/2) <= 1 + f <= sqrt(2)
    "log": (
        0.3333335518836975, -0.2500085234642029, 0.1999976634979248, -0.16621315479278564,
        0.14228099584579468, -0.13203458487987518, 0.12615187466144562, -0.07353802770376205,
    ),
    # (tanh(x)/x - 1) / x^2 in x^2, |x| <= 0.625
    "tanh": (
        -0.3333328068256378, 0.13331419229507446, -0.053738292306661606, 0.02063542976975441,
        -0.005701635032892227,
    ),
    # erf(x)/x in x^2 - 7.875, x^2 <= 14.5, beyond which erf is 1 to within a last place
    "erf": (
        0.3563225567340851, -0.022596411406993866, 0.0021384309511631727, -0.00022175750927999616,
        2.350168324483093e-05, -2.457227310515009e-06, 2.487535653017403e-07, -2.410424215781859e-08,
        2.146263833324724e-09, -1.7328688484141708e-10, 1.5726130467297317e-11, -1.4651358468467657e-12,
        5.737549107695528e-14, 3.2617650611987004e-16, 5.894706626641201e-16, -5.92264759659316e-17,
    ),
    # f64: (sin(r)/r - 1) / r^2 and (cos(r) - 1 + r^2/2) / r^4 in r^2, |r| <= pi/4
    "sin": (
        -0.16666666666663887, 0.00833333333108016, -0.0001984126691777299, 2.7555991136772973e-06,
        -2.4805653175224014e-08,
    ),
    "cos": (
        0.04166666666666468, -0.0013888888887277995, 2.4801585211521405e-05, -2.755636983353908e-07,
        2.0700611678090424e-09,
    ),
    # f64: log2((1 + s) / (1 - s)) / s in s^2, and (2^r - 1) / r
    "pow_log2": (
        2.885390081777927, 0.9617966939244149, 0.5770780172254999, 0.41219840438273253,
        0.32061626010778493, 0.2614476363137333, 0.2428814877452231,
    ),
    "pow_exp2": (
        0.69314718055995, 0.24022650695712247, 0.055504108664449, 0.00961812918358182,
        0.0013333558230012497, 0.00015403439271753413, 1.5252657332095355e-05,
        1.3258663932802985e-06, 1.0208678584380495e-07,
    ),
}  # fmt: skip

LN2 = (0.693145751953125, 1.428606765330187e-06)
LOG10_2 = (0.301025390625, 4.605039066518657e-06)
LOG2E = (1.44287109375, -0.00017605285393074155)
LOG10E = (0.434326171875, -3.168997136526741e-05)
PIO2 = (1.5707963267948966, 6.123233995736766e-17)
ERF_TOP, ERF_CENTER = 14.5, 7.875
LONG_POLY = 12
"""The least number of coefficients of a polynomial that is evaluated in parts."""
MAX_ANGLE = 2.0**28
"""Beyond this |x| the two-part reduction of sin and cos runs out of bits, and the C library takes over."""


def _c(x: float, like: V) -> V:
    return const(x, like.t)


def _poly(f: Fn, x: V, coefs: tuple[float, ...]) -> V:
    """Evaluate by Horner's scheme. A long polynomial is split by powers of x^4 into four independent parts: the chain
    of one long scheme has more latency than a core can fill with the next vectors. Where each constant addend costs a
    move, evaluate in powers of x."""
    if f.module.target.fma_overwrites_addend:
        return _poly_in_powers(f, x, coefs)
    if len(coefs) < LONG_POLY:
        acc = f.splat(_c(coefs[-1], x), x.w)
        for c in reversed(coefs[:-1]):
            acc = f.fma(acc, x, _c(c, x))
        return acc
    x2 = f.bin("fmul", x, x)
    x4 = f.bin("fmul", x2, x2)
    part = [_poly(f, x4, coefs[k::4]) for k in range(4)]
    return f.fma(x2, f.fma(part[3], x, part[2]), f.fma(part[1], x, part[0]))


def _poly_in_powers(f: Fn, x: V, coefs: tuple[float, ...]) -> V:
    """Evaluate blocks of `k` coefficients times 1, x, x^2 ... and combine them by Horner's scheme in x^k (Paterson and Stockmeyer,
    SIAM J. Comput. 2, 1973): constants are factors, or are added alone."""
    k = min(range(2, len(coefs)), key=lambda k: len(_starts(coefs, k)) + k)
    starts = _starts(coefs, k)
    blocks = [coefs[a:b] for a, b in zip(starts, (*starts[1:], len(coefs)), strict=True)]
    factor, powers = _factors(f, x, [c for block in blocks for c in block[1:]]), _powers(f, x, k)
    acc: V | None = None
    for block in reversed(blocks):
        part = x if block[1] == 1.0 else f.bin("fmul", x, factor[block[1]])
        for power, c in zip(powers[2:], block[2:], strict=False):
            part = f.fma(power, factor[c], part)
        part = part if acc is None else f.fma(acc, powers[k], part)
        acc = f.bin("fadd", part, _c(block[0], x))  # largest near 0, so last
    assert acc is not None
    return acc


def _starts(coefs: tuple[float, ...], k: int) -> range:
    """Return where blocks begin; a single last coefficient belongs to the block before."""
    return range(0, len(coefs) - 1, k)


def _powers(f: Fn, x: V, k: int) -> list[V]:
    """Return x^0 (never used) to x^k."""
    powers = [x, x]
    while len(powers) <= k:
        half = len(powers) // 2
        powers.append(f.bin("fmul", powers[len(powers) - half], powers[half]))
    return powers


def _factors(f: Fn, x: V, values: list[float]) -> dict[float, V]:
    """Return constants to multiply by."""
    if x.w == 1:
        return {c: _c(c, x) for c in values}
    return dict(zip(values, f.lane_constants(values, x), strict=True))


def _abs(f: Fn, x: V) -> V:
    return f.call("fabs", x.t, [x])


def _sign_of(f: Fn, magnitude: V, sign: V) -> V:
    return f.call("copysign", magnitude.t, [magnitude, sign])


def _at_most(f: Fn, x: V, hi: float) -> V:
    """Return min(x, hi); NaN stays NaN."""
    if f.module.target.arm:  # one instruction; x86 has none that keeps NaN on both sides
        return f.call("minimum", x.t, [x, _c(hi, x)])
    return f.select(f.cmp("fcmp olt", _c(hi, x), x), _c(hi, x), x)


def _clamp(f: Fn, x: V, lo: float, hi: float) -> V:
    """Clamp x to [lo, hi]; NaN stays NaN."""
    x = _at_most(f, x, hi)
    if f.module.target.arm:
        return f.call("maximum", x.t, [x, _c(lo, x)])
    return f.select(f.cmp("fcmp ogt", _c(lo, x), x), _c(lo, x), x)


def _scale(f: Fn, x: V, n: V) -> V:
    """Return x * 2^n for a whole float n in [-160, 160], rounded once."""
    target = f.module.target
    if target.has("avx512f") and x.t == "float" and x.w == 16:
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        f.module.declare(name, x.ty, [x.ty, x.ty, x.ty, "i16", "i32"])
        return f.let(x.t, x.w, f"call {x.ty} @{name}({x}, {n}, {x}, i16 -1, i32 4)")
    k = f.conv("fptosi", n, "i32")
    half = f.bin("ashr", k, const(1, "i32"))
    return f.bin("fmul", f.bin("fmul", x, _pow2(f, half)), _pow2(f, f.bin("sub", k, half)))


def _pow2(f: Fn, k: V) -> V:
    """Return 2^k as f32 for a normal result."""
    bits = f.bin("shl", f.bin("add", k, const(127, "i32")), const(23, "i32"))
    return f.conv("bitcast", bits, "float")


def _exp_reduced(f: Fn, x: V) -> tuple[V, V]:
    """Return (n, r) with x = n ln2 + r."""
    n = f.call("rint", x.t, [f.bin("fmul", x, _c(math.log2(math.e), x))])
    r = f.fma(n, _c(-LN2[0], x), x)
    return n, f.fma(n, _c(-LN2[1], x), r)


def exp(f: Fn, x: V) -> V:
    x = _clamp(f, x, -104.0, 89.0)
    n, r = _exp_reduced(f, x)
    return _scale(f, _poly(f, r, (1.0, 1.0, *COEFS["exp"])), n)


def exp2(f: Fn, x: V) -> V:
    x = _clamp(f, x, -151.0, 129.0)
    n = f.call("rint", x.t, [x])
    r = f.bin("fsub", x, n)
    return _scale(f, _poly(f, r, (1.0, *COEFS["exp2"])), n)


def expm1(f: Fn, x: V) -> V:
    y = _clamp(f, x, -20.0, 89.0)
    n, r = _exp_reduced(f, y)
    m = f.fma(f.bin("fmul", r, r), _poly(f, r, COEFS["exp"]), r)
    # half of 2^n, since 2^128 is not a float
    s = _pow2(f, f.bin("sub", f.conv("fptosi", n, "i32"), const(1, "i32")))
    out = f.bin("fmul", f.fma(s, m, f.bin("fsub", s, _c(0.5, x))), _c(2.0, x))
    return f.select(f.cmp("fcmp oeq", x, _c(0.0, x)), x, out)


def _log_parts(f: Fn, x: V) -> tuple[V, V, V]:
    """Return (n, f, t) with log(x) = n ln2 + f + t, t the small part, for positive finite x."""
    tiny = f.cmp("fcmp olt", x, _c(2.0**-126, x))
    x = f.select(tiny, f.bin("fmul", x, _c(2.0**24, x)), x)
    bits = f.conv("bitcast", x, "i32")
    # the exponent of x / sqrt(1/2), so that the mantissa lies in [sqrt(1/2), sqrt(2))
    off = f.bin("sub", bits, const(0x3F3504F3, "i32"))
    k = f.bin("ashr", off, const(23, "i32"))
    m = f.conv("bitcast", f.bin("sub", bits, f.bin("shl", k, const(23, "i32"))), "float")
    n = f.bin("fsub", f.conv("sitofp", k, "float"), f.select(tiny, _c(24.0, x), _c(0.0, x)))
    d = f.bin("fsub", m, _c(1.0, x))
    q = _poly(f, d, (-0.5, *COEFS["log"]))
    return n, d, f.bin("fmul", f.bin("fmul", d, d), q)


def _log_special(f: Fn, x: V, y: V) -> V:
    """Set log's values at 0, negative numbers, infinity and NaN."""
    y = f.select(f.cmp("fcmp oeq", x, _c(0.0, x)), _c(-math.inf, x), y)
    y = f.select(f.cmp("fcmp oeq", x, _c(math.inf, x)), x, y)
    return f.select(f.cmp("fcmp uge", x, _c(0.0, x)), f.select(f.cmp("fcmp uno", x, x), x, y), _c(math.nan, x))


def log(f: Fn, x: V) -> V:
    n, d, t = _log_parts(f, x)
    low = f.fma(n, _c(LN2[1], x), t)
    return _log_special(f, x, f.fma(n, _c(LN2[0], x), f.bin("fadd", d, low)))


def _log_base(f: Fn, x: V, unit: tuple[float, float], e: tuple[float, float]) -> V:
    """Return the log in another base: `unit` is that log of 2, `e` that log of e, each in two parts."""
    n, d, t = _log_parts(f, x)
    low = f.fma(d, _c(e[1], x), f.bin("fmul", t, _c(e[0] + e[1], x)))
    low = f.fma(n, _c(unit[1], x), low)
    # d * e[0] is exact enough only as a product and its rounding error
    high = f.bin("fmul", d, _c(e[0], x))
    rest = f.fma(d, _c(e[0], x), f.fneg(high))
    big = f.bin("fmul", n, _c(unit[0], x))
    total = f.bin("fadd", big, high)
    lost = f.bin("fsub", high, f.bin("fsub", total, big))
    return _log_special(f, x, f.bin("fadd", total, f.bin("fadd", lost, f.bin("fadd", rest, low))))


def log2(f: Fn, x: V) -> V:
    return _log_base(f, x, (1.0, 0.0), LOG2E)


def log10(f: Fn, x: V) -> V:
    return _log_base(f, x, LOG10_2, LOG10E)


def log1p(f: Fn, x: V) -> V:
    u = f.bin("fadd", x, _c(1.0, x))
    n, d, t = _log_parts(f, u)
    # the part of x that adding 1 rounded away
    lost = f.bin("fdiv", f.bin("fsub", x, f.bin("fsub", u, _c(1.0, x))), u)
    # for x > 2^24 the 1 itself is lost, but no longer matters
    lost = f.select(f.cmp("fcmp ogt", x, _c(2.0**24, x)), _c(0.0, x), lost)
    low = f.fma(n, _c(LN2[1], x), f.bin("fadd", t, lost))
    y = _log_special(f, u, f.fma(n, _c(LN2[0], x), f.bin("fadd", d, low)))
    return f.select(f.cmp("fcmp oeq", x, _c(0.0, x)), x, y)


def tanh(f: Fn, x: V) -> V:
    a = _abs(f, x)
    u = f.bin("fmul", x, x)
    small = f.fma(f.bin("fmul", _poly(f, u, COEFS["tanh"]), u), x, x)
    e = exp(f, f.bin("fadd", a, a))
    big = f.bin("fsub", _c(1.0, x), f.bin("fdiv", _c(2.0, x), f.bin("fadd", e, _c(1.0, x))))
    return _sign_of(f, f.select(f.cmp("fcmp olt", a, _c(0.625, x)), small, big), x)


def sigmoid(f: Fn, x: V) -> V:
    e = exp_of(f, f.fneg(_abs(f, x)))
    top = f.select(f.cmp("fcmp oge", x, _c(0.0, x)), _c(1.0, x), e)
    return f.bin("fdiv", top, f.bin("fadd", _c(1.0, x), e))


def erf(f: Fn, x: V) -> V:
    """Evaluate one polynomial over the whole range, in a variable centred so that its rounding errors stay small: no
    exp, no branch. x^2 is clamped; beyond the clamp the value times x grows to 1 and is clamped there."""
    u = f.bin("fsub", _at_most(f, f.bin("fmul", x, x), ERF_TOP), _c(ERF_CENTER, x))
    return _clamp(f, f.bin("fmul", _poly(f, u, COEFS["erf"]), x), -1.0, 1.0)


def _sincos(f: Fn, x: V, quarter: int, symbol: str) -> V:
    """Return sin(x + quarter * pi/2), computed in f64 so that one reduction serves all but huge angles."""
    d = f.conv("fpext", x, "double")
    n = f.call("rint", "double", [f.bin("fmul", d, const(2 / math.pi, "double"))])
    r = f.fma(n, const(-PIO2[1], "double"), f.fma(n, const(-PIO2[0], "double"), d))
    u = f.bin("fmul", r, r)
    s = f.fma(f.bin("fmul", _poly(f, u, COEFS["sin"]), u), r, r)
    c = f.fma(f.bin("fmul", u, u), _poly(f, u, COEFS["cos"]), f.fma(u, const(-0.5, "double"), const(1.0, "double")))
    k = f.bin("add", f.conv("fptosi", n, "i32"), const(quarter, "i32"))
    odd = f.cmp("icmp ne", f.bin("and", k, const(1, "i32")), const(0, "i32"))
    flip = f.cmp("icmp ne", f.bin("and", k, const(2, "i32")), const(0, "i32"))
    y = f.conv("fptrunc", f.select(odd, c, s), "float")
    y = f.select(flip, f.fneg(y), y)
    if not quarter:
        y = f.select(f.cmp("fcmp oeq", x, _c(0.0, x)), x, y)
    huge = f.cmp("fcmp ogt", _abs(f, x), _c(MAX_ANGLE, x))

    def far() -> list[V]:
        return [f.select(huge, lanewise(f, symbol, [x]), y)]

    return f.when(f.any(huge), far, [y])[0]


def sin(f: Fn, x: V) -> V:
    return _sincos(f, x, 0, "sinf")


def cos(f: Fn, x: V) -> V:
    return _sincos(f, x, 1, "cosf")


def pow_(f: Fn, x: V, y: V) -> V:
    """Return x^y through log2 and exp2 in f64, which leaves an error of about half an ulp."""
    x, y = f.same(x, y)
    a, e = f.conv("fpext", _abs(f, x), "double"), f.conv("fpext", y, "double")
    p = _exp2_double(f, f.bin("fmul", e, _log2_double(f, a)))
    out = f.conv("fptrunc", p, "float")
    whole = f.cmp("fcmp oeq", f.call("trunc", "float", [y]), y)
    half = f.bin("fmul", y, _c(0.5, y))
    odd = f.bin("and", whole, f.cmp("fcmp one", f.call("trunc", "float", [half]), half))
    signed = f.select(f.bin("and", odd, _negative(f, x)), f.fneg(out), out)
    finite_base = f.cmp("fcmp ogt", x, _c(-math.inf, x))
    bad = f.bin("and", f.bin("and", f.cmp("fcmp olt", x, _c(0.0, x)), finite_base), f.cmp("fcmp one", y, half))
    bad = f.bin("and", bad, f.bin("xor", whole, const(True, "i1")))
    signed = f.select(bad, _c(math.nan, x), signed)
    y_inf = f.cmp("fcmp oeq", _abs(f, y), _c(math.inf, y))
    unit = f.bin("and", f.cmp("fcmp oeq", _abs(f, x), _c(1.0, x)), y_inf)
    one = f.bin("or", f.cmp("fcmp oeq", y, _c(0.0, y)), f.cmp("fcmp oeq", x, _c(1.0, x)))
    return f.select(f.bin("or", one, unit), _c(1.0, x), signed)


def _negative(f: Fn, x: V) -> V:
    return f.cmp("icmp slt", f.conv("bitcast", x, "i32"), const(0, "i32"))


def _log2_double(f: Fn, a: V) -> V:
    """Return log2 of a non-negative f64 that came from f32 (so it is normal, 0, inf or NaN), to 1e-15."""
    bits = f.conv("bitcast", a, "i64")
    k = f.bin("ashr", f.bin("sub", bits, const(0x3FE6A09E667F3BCD, "i64")), const(52, "i64"))
    m = f.conv("bitcast", f.bin("sub", bits, f.bin("shl", k, const(52, "i64"))), "double")
    one = const(1.0, "double")
    s = f.bin("fdiv", f.bin("fsub", m, one), f.bin("fadd", m, one))
    n = f.conv("sitofp", f.conv("trunc", k, "i32"), "double")
    y = f.fma(s, _poly(f, f.bin("fmul", s, s), COEFS["pow_log2"]), n)
    y = f.select(f.cmp("fcmp oeq", a, const(0.0, "double")), const(-math.inf, "double"), y)
    return f.select(f.cmp("fcmp ult", a, const(math.inf, "double")), f.select(f.cmp("fcmp uno", a, a), a, y), a)


def _exp2_double(f: Fn, x: V) -> V:
    """Return 2^x in f64, clamped to what f32 can tell from 0 and infinity."""
    x = _clamp(f, x, -160.0, 130.0)
    n = f.call("rint", "double", [x])
    r = f.bin("fsub", x, n)
    p = _poly(f, r, (1.0, *COEFS["pow_exp2"]))
    k = f.conv("sext", f.conv("fptosi", n, "i32"), "i64")
    scale = f.conv("bitcast", f.bin("shl", f.bin("add", k, const(1023, "i64")), const(52, "i64")), "double")
    return f.bin("fmul", p, scale)


def exp_of(f: Fn, x: V) -> V:
    """Return exp of a value in its own type."""
    return exp(f, x) if x.t == "float" else lanewise(f, "exp", [x])


def lanewise(f: Fn, symbol: str, args: list[V]) -> V:
    """Call a function of the C library for every lane, through a helper function of the module."""
    args = f.same(*args)
    t, w = args[0].t, args[0].w
    f.module.declare(symbol, t, [t] * len(args), external=True)
    if w == 1:
        return f.let(t, 1, f"call {t} @{symbol}({', '.join(map(str, args))})")
    name = f"fw.lanes.{symbol}.{w}"
    if name not in f.module.helpers:
        f.module.helpers.add(name)
        _lanes_helper(f, name, symbol, args[0], len(args))
    return f.let(t, w, f"call {args[0].ty} @{name}({', '.join(map(str, args))})")


def _lanes_helper(f: Fn, name: str, symbol: str, like: V, arity: int) -> None:
    h = Fn(f.module, name, like.ty, [like.ty] * arity)
    slots = [h.alloca(like.ty, 1) for _ in range(arity)]
    for v, s in zip(h.args, slots, strict=True):
        h.raw(f"store {like.ty} {v.name}, ptr {s.name}")

    def body(i: V, _: list[V]) -> list[V]:
        at = [h.gep(like.t, s, i) for s in slots]
        xs = [h.let(like.t, 1, f"load {like.t}, {p}") for p in at]
        y = h.let(like.t, 1, f"call {like.t} @{symbol}({', '.join(map(str, xs))})")
        h.raw(f"store {y}, {at[0]}")
        return []

    h.loop(const(0, "i64"), const(like.w, "i64"), const(1, "i64"), [], body)
    out = h.let(like.t, like.w, f"load {like.ty}, {slots[0]}")
    h.raw(f"ret {out}")
    h.finish()


@dataclass(frozen=True, slots=True)
class MathRow:
    """`emit` makes f32 vector code; `ulp` bounds its error in units in the last place of the exact result."""

    emit: Callable[..., V]
    ulp: float


MATH: dict[str, MathRow] = {
    "exp": MathRow(exp, 1.5),
    "exp2": MathRow(exp2, 1.5),
    "expm1": MathRow(expm1, 2.0),
    "log": MathRow(log, 1.5),
    "log2": MathRow(log2, 1.5),
    "log10": MathRow(log10, 1.5),
    "log1p": MathRow(log1p, 2.5),
    "tanh": MathRow(tanh, 2.5),
    "sigmoid": MathRow(sigmoid, 3.0),
    "erf": MathRow(erf, 4.0),
    "sin": MathRow(sin, 1.0),
    "cos": MathRow(cos, 1.0),
    "pow": MathRow(pow_, 1.0),
}

LIBM = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "erfc", "sin", "cos",
    "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma",
    "hypot", "pow", "fmod",
)  # fmt: skip
"""Functions that the C library has under this name for f64, and with an `f` appended for f32."""


def emit_math(f: Fn, name: str, args: list[V]) -> V:
    """Emit the function `name` on f32 or f64 values of any lane count."""
    if args[0].t == "float" and name in MATH:
        return MATH[name].emit(f, *args)
    if name == "sigmoid":
        return sigmoid(f, args[0])
    return lanewise(f, name + ("f" if args[0].t == "float" else ""), args)


# -- activations; a comparison with NaN is false, which keeps it


def _no_less(f: Fn, x: V, low: V) -> V:
    return f.select(f.cmp("fcmp olt", x, low), low, x)


def _no_more(f: Fn, x: V, high: V) -> V:
    return f.select(f.cmp("fcmp ogt", x, high), high, x)


def _silu(f: Fn, x: V) -> V:
    return f.bin("fdiv", x, f.bin("fadd", const(1.0, x.t), exp(f, f.fneg(x))))


def _gate(f: Fn, x: V) -> V:
    """Return min(max(x + 3, 0), 6) / 6, as a product: a division takes as long as all the rest."""
    sixth = f.splat(const(1 / 6, x.t), x.w)
    line = f.fma(x, sixth, f.splat(const(0.5, x.t), x.w))
    return _no_more(f, _no_less(f, line, const(0.0, x.t)), const(1.0, x.t))


def _hardswish(f: Fn, x: V) -> V:
    return f.bin("fmul", x, _gate(f, x))


def _gelu(f: Fn, x: V) -> V:
    return _gated(f, x, erf(f, f.bin("fmul", x, const(math.sqrt(0.5), x.t))))


def _gelu_tanh(f: Fn, x: V) -> V:
    cube = f.bin("fmul", f.bin("fmul", x, x), f.bin("fmul", x, const(0.044715, x.t)))
    return _gated(f, x, tanh(f, f.bin("fmul", f.bin("fadd", x, cube), const(math.sqrt(2 / math.pi), x.t))))


def _gated(f: Fn, x: V, gate: V) -> V:
    """Return x * (1 + gate) / 2."""
    return f.bin("fmul", f.bin("fmul", x, const(0.5, x.t)), f.bin("fadd", gate, const(1.0, x.t)))


ACTIVATIONS: Mapping[str, Callable[..., V]] = {
    "": lambda f, x: x,
    "relu": lambda f, x: _no_less(f, x, const(0.0, x.t)),
    "clamp": lambda f, x, low, high: _no_more(f, _no_less(f, x, low), high),
    "leaky_relu": lambda f, x, slope: f.select(f.cmp("fcmp ogt", x, const(0.0, x.t)), x, f.bin("fmul", x, slope)),
    "silu": _silu,
    "hardswish": _hardswish,
    "hardsigmoid": _gate,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "tanh": tanh,
    "sigmoid": sigmoid,
}
"""Name -> code for a vector, and for each scalar that is an argument (see `by_hand.SCALARS`)."""
