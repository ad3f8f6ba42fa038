"""Sizes and element offsets as Metal expressions."""

from __future__ import annotations

import re
from collections.abc import Callable

from fusewright.toolkit.backend import addressing
from fusewright.toolkit.ir.extent import Extent, SizeExpr, divide
from fusewright.toolkit.ir.index import DivMod

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


class Addresses(addressing.Addresses):
    """Indices in Metal, 64-bit if `wide`; the kernel's size symbols are `s0`, `s1`, ..."""

    def __init__(self, wide: bool, axis: Callable[[int], str], value: Callable[[int], str]) -> None:
        super().__init__(axis, value)
        self.wide = wide

    def number(self, n: int) -> str:
        return f"{n}l" if self.wide else str(n)

    def extent(self, e: Extent) -> str:
        return addressing.extent_text(e, lambda s: f"s{s}", self.number)

    def divisor(self, e: Extent) -> str:
        """Return a size to divide by. 0 becomes 1: a kernel of size 0 never runs, but compilers warn."""
        return self.extent(e if e != 0 else 1)

    def divided(self, text: str, d: DivMod, truncates: bool) -> str:
        kind = "ulong" if self.wide else "uint"
        back = "long" if self.wide else "int"
        if d.div != 1:
            by = self.divisor(d.div)
            text = f"{back}({kind}({text}) / {kind}({by}))" if truncates else f"fw_floor_index({text}, {by})"
        if d.mod is None:
            return text
        by = self.divisor(d.mod)
        if truncates:
            return f"{back}({kind}({text}) % {kind}({by}))"
        return f"({atom(text)} - fw_floor_index({text}, {by}) * {atom(by)})"

    def scaled(self, text: str, by: Extent) -> str:
        if by == 1:
            return atom(text) if " " in text else text
        c = self.extent(by)
        return f"{atom(text)} * {atom(c) if isinstance(by, SizeExpr) else c if c[0] != '-' else f'({c})'}"


def multiple(e: Extent, of: int) -> bool:
    """Whether `e` is provably a multiple of `of` for all sizes."""
    return of == 1 or e == 0 or divide(e, of) is not None
