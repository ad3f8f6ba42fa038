"""The functions allowed in sizes besides `+` and `*`. A closed list: sizes may come from disk, and become Python source."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_BITS = 64
"""Larger powers and shifts are refused, since their results could fill the memory."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of `least` to `most` numbers; `real` if its result may be a non-integer."""

    call: Callable[..., Any]
    least: int
    most: int
    real: bool = False


def _few(call: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def checked(a: int, b: int) -> int:
        if not 0 <= b <= MOST_BITS:
            raise OverflowError(f"a power or a shift by {b}")
        return call(a, b)

    return checked


def _total(*args: float) -> float:
    return sum(args)


def _product(*args: float) -> float:
    return math.prod(args)


_MANY = 64

FUNCTIONS: Mapping[str, Function] = {
    "FloorDiv": Function(operator.floordiv, 2, 2),
    "Mod": Function(operator.mod, 2, 2),
    "Max": Function(max, 2, _MANY),
    "Min": Function(min, 2, _MANY),
    "CeilToInt": Function(math.ceil, 1, 1),
    "FloorToInt": Function(math.floor, 1, 1),
    "TruncToInt": Function(math.trunc, 1, 1),
    "RoundToInt": Function(round, 1, 1),
    "PowByNatural": Function(_few(operator.pow), 2, 2),
    "LShift": Function(_few(operator.lshift), 2, 2),
    "RShift": Function(_few(operator.rshift), 2, 2),
    "Where": Function(lambda c, a, b: a if c else b, 3, 3),
    "Eq": Function(operator.eq, 2, 2),
    "Ne": Function(operator.ne, 2, 2),
    "Lt": Function(operator.lt, 2, 2),
    "Le": Function(operator.le, 2, 2),
    "Gt": Function(operator.gt, 2, 2),
    "Ge": Function(operator.ge, 2, 2),
    "ToFloat": Function(float, 1, 1, real=True),
    "TruncToFloat": Function(lambda x: float(math.trunc(x)), 1, 1, real=True),
    "IntTrueDiv": Function(operator.truediv, 2, 2, real=True),
    "FloatTrueDiv": Function(operator.truediv, 2, 2, real=True),
    "FloatPow": Function(lambda a, b: float(a) ** float(b), 2, 2, real=True),
    "Sum": Function(_total, 2, _MANY, real=True),
    "Product": Function(_product, 2, _MANY, real=True),
}
"""By printed name, mostly torch's own. `Sum` and `Product` are for floats; integers use polynomials."""
