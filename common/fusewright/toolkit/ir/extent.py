"""Sizes and strides: an `Extent` is an int, or a small canonical polynomial over opaque size symbols.

Equal values have equal form, so `==` and `hash` decide equality. Nothing is solved or simplified beyond
that: a size such as `ceil(n / 2)` is a symbol of its own, whose value the launch gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Monomial: TypeAlias = tuple[str, ...]
"""Symbols of a product, sorted, repeats for powers; () is the constant term."""


@dataclass(frozen=True, slots=True)
class Poly:
    """A sum of `coefficient * monomial`, sorted by monomial, no zero coefficient, at least one symbol."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Extent) -> Extent:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Extent) -> Extent:
        return _sum(self, other, -1)

    def __rsub__(self, other: Extent) -> Extent:
        return _sum(other, self, -1)

    def __mul__(self, other: Extent) -> Extent:
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in _terms(other):
                key = tuple(sorted(m + n))
                out[key] = out.get(key, 0) + c * d
        return _make(out)

    __rmul__ = __mul__

    def __neg__(self) -> Extent:
        return self * -1

    def __str__(self) -> str:
        parts = []
        for m, c in self.terms:
            body = "*".join(m)
            parts.append(str(c) if not m else body if c == 1 else f"{c}*{body}")
        return "+".join(parts).replace("+-", "-")


Extent: TypeAlias = int | Poly


def symbol(name: str) -> Poly:
    """The size symbol called `name`."""
    return Poly((((name,), 1),))


def _terms(e: Extent) -> Iterator[tuple[Monomial, int]]:
    if isinstance(e, Poly):
        yield from e.terms
    elif e:
        yield ((), e)


def _make(terms: Mapping[Monomial, int]) -> Extent:
    kept = tuple(sorted((m, c) for m, c in terms.items() if c))
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    return Poly(kept)


def _sum(a: Extent, b: Extent, sign: int) -> Extent:
    out = dict(_terms(a))
    for m, c in _terms(b):
        out[m] = out.get(m, 0) + sign * c
    return _make(out)


def symbols(e: Extent) -> frozenset[str]:
    """Names of the symbols in `e`."""
    return frozenset(s for m, _ in _terms(e) for s in m)


def divide(a: Extent, b: Extent) -> Extent | None:
    """`a / b` when it is exact and `b` has a single term, else None."""
    divisor = list(_terms(b))
    if len(divisor) != 1:
        return 1 if a == b and divisor else None
    (dm, dc), out = divisor[0], {}
    for m, c in _terms(a):
        rest = list(m)
        for s in dm:
            if s not in rest:
                return None
            rest.remove(s)
        if c % dc:
            return None
        out[tuple(rest)] = c // dc
    return _make(out)


def nonnegative(e: Extent) -> bool:
    """True when `e >= 0` for all symbols >= 0 is evident (no negative coefficient)."""
    return all(c >= 0 for _, c in _terms(e))


def product(sizes: Iterable[Extent]) -> Extent:
    """All of them multiplied; 1 for none."""
    out: Extent = 1
    for s in sizes:
        out = s * out
    return out


def evaluate(e: Extent, sizes: Mapping[str, int]) -> int:
    """The value of `e`; KeyError when a symbol has none."""
    total = 0
    for m, c in _terms(e):
        for s in m:
            c *= sizes[s]
        total += c
    return total


def rename(e: Extent, names: Mapping[str, str]) -> Extent:
    """`e` with its symbols renamed."""
    out: dict[Monomial, int] = {}
    for m, c in _terms(e):
        key = tuple(sorted(names.get(s, s) for s in m))
        out[key] = out.get(key, 0) + c
    return _make(out)
