"""Sizes and element offsets as Metal expressions."""

from __future__ import annotations

import re
from collections.abc import Callable

from fusewright.toolkit.ir.extent import Extent, SizeExpr, divide, nonnegative
from fusewright.toolkit.ir.index import DivMod, Index

WIDE = 2**31 - 2**22
"""Element offsets that may reach this are 64-bit; the margin covers lanes past the end of a row."""

_WORD = re.compile(r"[\w.]+")


def atom(text: str) -> str:
    """Return `text`, in parentheses unless it already binds tightly."""
    return text if _WORD.fullmatch(text) or _closed(text) else f"({text})"


def _closed(text: str) -> bool:
    """Whether `text` is a single call or subscript that closes at its end."""
    found = re.match(r"[\w:]*[(\[]", text)
    if found is None or text[-1] not in ")]":
        return False
    depth = 0
    for k, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and c in ")]" and k < len(text) - 1:
            return False
    return True


class Addresses:
    """Writes index expressions. `axis` returns the text of an axis, `value` that of an i64 value used as an index."""

    def __init__(self, wide: bool, axis: Callable[[int], str], value: Callable[[int], str]) -> None:
        self.wide, self.axis, self.value = wide, axis, value

    def number(self, n: int) -> str:
        return f"{n}l" if self.wide else str(n)

    def extent(self, e: Extent) -> str:
        """Return a size as an expression of the kernel's size symbols `s0`, `s1`, ..."""
        if not isinstance(e, SizeExpr):
            return self.number(e)
        text = ""
        for monomial, c in e.terms:
            factors = [f"s{s}" for s in monomial]
            if abs(c) != 1 or not factors:
                factors.insert(0, self.number(abs(c)))
            text += (" - " if text else "-") if c < 0 else " + " if text else ""
            text += " * ".join(factors)
        return text

    def divisor(self, e: Extent) -> str:
        """Return a size to divide by. 0 becomes 1: a kernel of size 0 never runs, but compilers warn."""
        return self.extent(e if e != 0 else 1)

    def index(self, ix: Index) -> str:
        """Return the element offset of an access."""
        terms = [self._scaled(self.axis(a), c) for a, c in ix.coefs]
        terms += [self._scaled(self._divmod(d), d.stride) for d in ix.divmods]
        terms += [self._scaled(self.value(i.value), i.stride) for i in ix.indirect]
        return self._sum(terms, ix.offset)

    def _divmod(self, d: DivMod) -> str:
        text = self._sum([self._scaled(self.axis(a), c) for a, c in d.coefs], d.offset)
        plain = nonnegative(d.offset) and all(nonnegative(c) for _, c in d.coefs)
        kind = "ulong" if self.wide else "uint"
        back = "long" if self.wide else "int"
        if d.div != 1:
            by = self.divisor(d.div)
            text = f"{back}({kind}({text}) / {kind}({by}))" if plain else f"fw_floor_index({text}, {by})"
        if d.mod is None:
            return text
        by = self.divisor(d.mod)
        if plain:
            return f"{back}({kind}({text}) % {kind}({by}))"
        return f"({atom(text)} - fw_floor_index({text}, {by}) * {atom(by)})"

    def _sum(self, terms: list[str], offset: Extent) -> str:
        if offset != 0 or not terms:
            terms = [*terms, self.extent(offset)]
        text = terms[0]
        for t in terms[1:]:
            text += f" - {t[1:]}" if t.startswith("-") and " " not in t else f" + {t}"
        return text

    def _scaled(self, text: str, c: Extent) -> str:
        if c == 1:
            return atom(text) if " " in text else text
        by = self.extent(c)
        return f"{atom(text)} * {atom(by) if isinstance(c, SizeExpr) else by if by[0] != '-' else f'({by})'}"


def multiple(e: Extent, of: int) -> bool:
    """Whether `e` is provably a multiple of `of` for all sizes."""
    return of == 1 or e == 0 or divide(e, of) is not None
