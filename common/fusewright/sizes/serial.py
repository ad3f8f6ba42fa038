"""Sizes as JSON: an int, or a list of `[monomial, coefficient]`. In a monomial, a name is a string and a position an int; other
atoms
are objects with one member: `{"size": [value, dim]}`, `{"offset": value}`, `{"number": value}`, `{"FloorDiv": [a, b]}`."""

from __future__ import annotations

import math
from typing import Any

from fusewright.sizes.expr import Apply, Atom, Extent, NumberOf, OffsetOf, SizeExpr, SizeOf, apply, make, sort_monomial
from fusewright.sizes.functions import FUNCTIONS

LARGEST = 1 << 64
_MOST = 1024
"""Maximum number of terms in a sum, and of factors in a product."""
_DEEPEST = 32


def to_data(e: Extent | float) -> Any:
    """A size as JSON values."""
    return [[[_atom(a) for a in m], c] for m, c in e.terms] if isinstance(e, SizeExpr) else e


def _atom(a: Atom) -> Any:
    match a:
        case SizeOf():
            return {"size": [a.value, a.dim]}
        case OffsetOf():
            return {"offset": a.value}
        case NumberOf():
            return {"number": a.value}
        case Apply():
            return {a.function: [to_data(x) for x in a.args]}
    return a


def from_data(data: Any) -> Extent:
    """Read a size written by `to_data`. ValueError for anything else, including non-canonical sizes."""
    if type(data) is int and abs(data) < LARGEST:
        return data
    found = _read(data, 0)
    if isinstance(found, float) or to_data(found) != data:
        raise ValueError("no size in canonical form")
    return found


def _read(data: Any, depth: int) -> Extent | float:
    if (type(data) is int and abs(data) < LARGEST) or (type(data) is float and depth and math.isfinite(data)):
        return data
    if type(data) is not list or not 0 < len(data) <= _MOST or depth > _DEEPEST:
        raise ValueError("no size")
    return make(dict(_term(t, depth) for t in data))


def _term(data: Any, depth: int) -> tuple[tuple[Atom, ...], int]:
    if type(data) is not list or len(data) != 2 or type(data[0]) is not list or len(data[0]) > _MOST:
        raise ValueError("no term of a size")
    atoms, c = data
    if type(c) is not int or abs(c) >= LARGEST:
        raise ValueError("no coefficient")
    return sort_monomial(_read_atom(a, depth) for a in atoms), c


def _read_atom(data: Any, depth: int) -> Atom:
    if type(data) is str or (type(data) is int and 0 <= data < LARGEST):
        return data
    match data:
        case {"size": [value, dim]} if len(data) == 1 and type(value) is type(dim) is int:
            return SizeOf(value, dim)
        case {"offset": value} if len(data) == 1 and type(value) is int:
            return OffsetOf(value)
        case {"number": value} if len(data) == 1 and type(value) is int:
            return NumberOf(value)
        case dict() if len(data) == 1:
            ((name, args),) = data.items()
            return _read_call(name, args, depth)
    raise ValueError("no symbol")


def _read_call(name: Any, args: Any, depth: int) -> Atom:
    function = FUNCTIONS.get(name) if isinstance(name, str) else None
    if function is None or type(args) is not list or not function.least <= len(args) <= function.most:
        raise ValueError("no function of sizes")
    made = apply(name, *(_read(a, depth + 1) for a in args))
    atom = made.atom if isinstance(made, SizeExpr) else None
    if atom is None:
        raise ValueError("a function that is none")
    return atom
