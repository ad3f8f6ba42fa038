"""Sizes and element offsets as Triton expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from fusewright.toolkit.ir.extent import Atom, Extent, SizeExpr, nonnegative
from fusewright.toolkit.ir.index import DivMod, Index


def extent_text(e: Extent, names: Mapping[Atom, str]) -> str:
    """Return a size as an expression over the kernel's size parameters."""
    if not isinstance(e, SizeExpr):
        return str(e)
    text = ""
    for monomial, c in e.terms:
        factors = [names[s] for s in monomial]
        if abs(c) != 1 or not factors:
            factors.insert(0, str(abs(c)))
        text += (" - " if text else "-") if c < 0 else " + " if text else ""
        text += " * ".join(factors)
    return text


def atom(text: str) -> str:
    """Return `text`, in parentheses unless it already binds tightly."""
    return text if _WORD.fullmatch(text) or _call(text) else f"({text})"


_WORD = re.compile(r"[\w.]+|\d[\d.]*e[-+]\d+")


def _call(text: str) -> bool:
    """Return whether `text` is one call, `f(...)`, whose parenthesis closes at the very end."""
    start = text.find("(")
    if start <= 0 or not text.endswith(")") or not text[:start].replace("_", "").replace(".", "").isalnum():
        return False
    depth = 0
    for i, c in enumerate(text[start:], start):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return False
    return True


class Addresses:
    """Prints indices. `axis` returns the text of an axis, `value` that of an i64 SSA value used as an index."""

    def __init__(self, names: Mapping[Atom, str], axis: Callable[[int], str], value: Callable[[int], str]) -> None:
        self.names, self.axis, self.value = names, axis, value

    def extent(self, e: Extent) -> str:
        return extent_text(e, self.names)

    def index(self, ix: Index) -> str:
        """Return the element offset of an access; "0" for the first element."""
        terms = [self._scaled(self.axis(a), c) for a, c in ix.coefs]
        terms += [self._scaled(self._divmod(d), d.stride) for d in ix.divmods]
        terms += [self._scaled(self.value(i.value), i.stride) for i in ix.indirect]
        return self._sum(terms, ix.offset)

    def _divmod(self, d: DivMod) -> str:
        text = self._sum([self._scaled(self.axis(a), c) for a, c in d.coefs], d.offset)
        plain = nonnegative(d.offset) and all(nonnegative(c) for _, c in d.coefs)
        if d.div != 1:
            by = self.extent(d.div)
            text = f"{atom(text)} // {atom(by)}" if plain else f"fw.floor_index({text}, {by})"
        if d.mod is None:
            return text
        by = self.extent(d.mod)
        if plain:
            return f"{atom(text)} % {atom(by)}"
        return f"{atom(text)} - fw.floor_index({text}, {by}) * {atom(by)}"

    def _sum(self, terms: list[str], offset: Extent) -> str:
        if offset != 0 or not terms:
            terms = [*terms, self.extent(offset)]
        text = terms[0]
        for t in terms[1:]:
            text += f" - {t[1:]}" if t.startswith("-") and " " not in t else f" + {t}"
        return text

    def _scaled(self, text: str, c: Extent) -> str:
        if c == 1:
            return text if " " not in text else f"({text})"
        return f"{atom(text)} * {atom(self.extent(c)) if isinstance(c, SizeExpr) else c}"
