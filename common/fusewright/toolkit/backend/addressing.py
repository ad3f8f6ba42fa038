"""Sizes and element offsets as text, for emitters that print source code."""

from __future__ import annotations

import abc
from collections.abc import Callable

from fusewright.toolkit.ir.extent import Atom, Extent, SizeExpr, nonnegative
from fusewright.toolkit.ir.index import DivMod, Index


def extent_text(e: Extent, symbol: Callable[[Atom], str], number: Callable[[int], str] = str) -> str:
    """Return a size as a sum of products of the kernel's size parameters."""
    if not isinstance(e, SizeExpr):
        return number(e)
    text = ""
    for monomial, c in e.terms:
        factors = [symbol(s) for s in monomial]
        if abs(c) != 1 or not factors:
            factors.insert(0, number(abs(c)))
        text += (" - " if text else "-") if c < 0 else " + " if text else ""
        text += " * ".join(factors)
    return text


class Addresses(abc.ABC):
    """Prints index expressions. `axis` returns the text of an axis, `value` that of an i64 value used as an index."""

    def __init__(self, axis: Callable[[int], str], value: Callable[[int], str]) -> None:
        self.axis, self.value = axis, value

    @abc.abstractmethod
    def extent(self, e: Extent) -> str:
        """Return a size."""

    @abc.abstractmethod
    def scaled(self, text: str, by: Extent) -> str:
        """Return `text * by`, so that it can stand in a sum."""

    @abc.abstractmethod
    def divided(self, text: str, d: DivMod, truncates: bool) -> str:
        """Return `text // d.div % d.mod`, rounded down. With `truncates`, no operand is negative: the language's own division
        does."""

    def index(self, ix: Index) -> str:
        """Return the element offset of an access; "0" for the first element."""
        terms = [self.scaled(self.axis(a), c) for a, c in ix.coefs]
        terms += [self.scaled(self._divmod(d), d.stride) for d in ix.divmods]
        terms += [self.scaled(self.value(i.value), i.stride) for i in ix.indirect]
        return self._sum(terms, ix.offset)

    def _divmod(self, d: DivMod) -> str:
        text = self._sum([self.scaled(self.axis(a), c) for a, c in d.coefs], d.offset)
        return self.divided(text, d, nonnegative(d.offset) and all(nonnegative(c) for _, c in d.coefs))

    def _sum(self, terms: list[str], offset: Extent) -> str:
        if offset != 0 or not terms:
            terms = [*terms, self.extent(offset)]
        text = terms[0]
        for t in terms[1:]:
            text += f" - {t[1:]}" if t.startswith("-") and " " not in t else f" + {t}"
        return text
