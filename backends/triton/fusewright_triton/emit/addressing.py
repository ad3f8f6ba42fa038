"""Sizes and element offsets as Triton expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusewright.toolkit.backend import addressing
from fusewright.toolkit.ir.extent import Atom, Extent, SizeExpr
from fusewright.toolkit.ir.index import Coefs, DivMod, Index


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


class Addresses(addressing.Addresses):
    """Indices in Triton; `names` are the parameters that hold the kernel's size symbols. `flattened` are the strides of axes in a
    position that holds several; `axis` returns the text of the k-th such position for `~k`."""

    def __init__(
        self,
        names: Mapping[Atom, str],
        axis: Callable[[int], str],
        value: Callable[[int], str],
        flattened: Sequence[Coefs],
    ) -> None:
        super().__init__(axis, value)
        self.names, self.flattened = names, flattened

    def index(self, ix: Index) -> str:
        """Return the element offset of an access, by the flattened position where that has all of its axes: Triton does not see
        that neighbours lie together if the position was divided and put together again."""
        divmods = tuple(replace(d, coefs=self._joined(d.coefs)) for d in ix.divmods)
        return super().index(replace(ix, coefs=self._joined(ix.coefs), divmods=divmods))

    def _joined(self, coefs: Coefs) -> Coefs:
        left = dict(coefs)
        for k, strides in enumerate(self.flattened):
            step = left.get(strides[-1][0], 0)
            if step != 0 and all(left.get(a) == step * s for a, s in strides):
                left = {~k: step} | {a: c for a, c in left.items() if a not in dict(strides)}
        return tuple(left.items())

    def extent(self, e: Extent) -> str:
        return addressing.extent_text(e, self.names.__getitem__)

    def divided(self, text: str, d: DivMod, truncates: bool) -> str:
        if d.div != 1:
            by = self.extent(d.div)
            text = f"{atom(text)} // {atom(by)}" if truncates else f"fw.floor_index({text}, {by})"
        if d.mod is None:
            return text
        by = self.extent(d.mod)
        return f"{atom(text)} % {atom(by)}" if truncates else f"{atom(text)} - fw.floor_index({text}, {by}) * {atom(by)}"

    def scaled(self, text: str, by: Extent) -> str:
        if by == 1:
            return text if " " not in text else f"({text})"
        return f"{atom(text)} * {atom(self.extent(by)) if isinstance(by, SizeExpr) else by}"
