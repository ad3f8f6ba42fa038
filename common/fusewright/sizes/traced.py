"""Convert torch's symbolic sizes, which are sympy expressions, to `SizeExpr`.

Expressions are identified by the names of their classes, so neither sympy nor torch's private functions are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fusewright.sizes.expr import Extent, SizeExpr, apply, is_real, product, symbol
from fusewright.sizes.functions import FUNCTIONS

MOST_FACTORS = 8
"""Powers up to this one become products."""

_CALLED: Mapping[str, str] = {
    **{name: name for name in FUNCTIONS if name not in ("Sum", "Product")},
    "PythonMod": "Mod", "CleanDiv": "FloorDiv", "Equality": "Eq", "Unequality": "Ne",
    "StrictLessThan": "Lt", "LessThan": "Le", "StrictGreaterThan": "Gt", "GreaterThan": "Ge",
}  # fmt: skip
"""Class name of an expression -> function."""


class _Unknown(Exception):
    """An expression of a kind that sizes cannot represent."""


@lru_cache(4096)
def from_sympy(e: Any) -> Extent:
    """Convert an expression. One that sizes cannot represent becomes a fresh symbol without a value."""
    try:
        found = _number(e)
    except _Unknown:
        return symbol(str(e))
    return found if isinstance(found, int | SizeExpr) else symbol(str(e))


def _number(e: Any) -> Extent | float:
    kind = type(e).__name__
    if (make := _MADE.get(kind)) is not None:
        return make(e)
    if kind in _CALLED:
        return apply(_CALLED[kind], *map(_number, e.args))
    if getattr(e, "is_Symbol", False):
        return symbol(e.name)
    if getattr(e, "is_Integer", False):
        return int(e)
    if getattr(e, "is_Float", False):
        return float(e)
    raise _Unknown(e)


def _add(e: Any) -> Extent:
    args = [_number(a) for a in e.args]
    if any(map(is_real, args)):
        return apply("Sum", *args)
    out: Extent = 0
    for a in args:
        out = a + out  # type: ignore[operator,assignment]
    return out


def _mul(e: Any) -> Extent:
    top, bottom = [a for a in e.args if not _is_fraction(a)], [a for a in e.args if _is_fraction(a)]
    args = [_number(a) for a in top]
    args += [int(a.p) for a in bottom if type(a).__name__ in ("Rational", "Half")]
    if any(map(is_real, args)):
        made = apply("Product", *args)
    else:
        made = product(args)  # type: ignore[arg-type]
    return apply("IntTrueDiv", made, product([_denominator(a) for a in bottom])) if bottom else made


def _is_fraction(e: Any) -> bool:
    return type(e).__name__ in ("Rational", "Half") or (type(e).__name__ == "Pow" and e.exp.is_Integer and int(e.exp) < 0)


def _denominator(e: Any) -> Extent:
    if type(e).__name__ in ("Rational", "Half"):
        return int(e.q)
    found = _power(_number(e.base), -int(e.exp))
    if isinstance(found, int | SizeExpr):
        return found
    raise _Unknown(e)


def _pow(e: Any) -> Extent | float:
    if not e.exp.is_Integer:
        raise _Unknown(e)
    if int(e.exp) < 0:
        return apply("IntTrueDiv", 1, _denominator(e))
    return _power(_number(e.base), int(e.exp))


def _power(base: Extent | float, n: int) -> Extent | float:
    if is_real(base) or n > MOST_FACTORS:
        return apply("FloatPow" if is_real(base) else "PowByNatural", base, n)
    return product([base] * n)  # type: ignore[list-item]


def _modular(e: Any) -> Extent | float:
    base, divisor, modulus = map(_number, e.args)
    return apply("Mod", apply("FloorDiv", base, divisor), modulus)


def _ceil_div(e: Any) -> Extent:
    a, b = map(_number, e.args)
    if is_real(a) or is_real(b):
        raise _Unknown(e)
    return apply("FloorDiv", a + b - 1, b)  # type: ignore[operator]


_MADE: Mapping[str, Callable[[Any], Extent | float]] = {
    "Add": _add, "Mul": _mul, "Pow": _pow, "ModularIndexing": _modular, "CeilDiv": _ceil_div,
    "Identity": lambda e: _number(e.args[0]), "BooleanTrue": lambda e: 1, "BooleanFalse": lambda e: 0,
}  # fmt: skip
