"""Sizes and element offsets as Triton expressions, and which accesses move neighbours together."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusewright.toolkit.backend import addressing
from fusewright.toolkit.ir.extent import Atom, Extent, SizeExpr
from fusewright.toolkit.ir.index import Coefs, DivMod, Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.types import TYPES

LANE_BYTES = 16
"""Bytes of the widest load of one lane."""


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


def strides(kernel: Kernel, axes: tuple[int, ...]) -> Coefs:
    """Return by how many positions the neighbours along each of the flattened `axes` are apart. A row that is alone has none."""
    if not axes:
        return ()
    inner = itertools.accumulate([kernel.sizes[a] for a in axes[:0:-1]], operator.mul, initial=1)
    return tuple(zip(axes, reversed(list(inner)), strict=True))


def together(kernel: Kernel) -> int | None:
    """Return how many neighbours in a row all accesses of whole tensors can move at once, if rows are not 16-byte aligned.

    Otherwise each lane would take as many neighbours as the operands shared by all rows allow, and read the others in separate
    pieces. Measured on an H100, layer norm of 30522 bf16: 0.85 of a copy against 0.60.
    """
    n_p, last = len(kernel.p), len(kernel.sizes) - 1
    row = strides(kernel, tuple(range(n_p, len(kernel.sizes))))
    found = None
    for n in kernel.nodes():
        if n.op not in ("load", "store") or n.index is None or min(n.index.axes(), default=n_p) >= n_p:
            continue
        if kernel.r and last not in n.index.axes() and not n.index.indirect:
            continue  # the same for neighbours
        coefs = dict(n.index.coefs)
        if len(row) > 1 and all(coefs.get(a) == c for a, c in row):  # the whole row in order
            coefs = {a: c for a, c in coefs.items() if a < n_p} | {last: 1}
        steps = [c for c in coefs.values() if c != 1] + [n.index.offset]
        if len(steps) > len(coefs) or n.index.divmods or n.index.indirect:
            return None  # not along the row, or at unknown places
        known = [s for s in steps if isinstance(s, int)]
        if len(known) < len(steps):
            return None
        lane = LANE_BYTES // TYPES[n.dtype].size
        step = math.gcd(lane, *known)
        if step < lane:
            found = min(step, found or step)
    return found


def begin_anywhere(kernel: Kernel, axes: tuple[int, ...]) -> bool:
    """Return whether most accesses of a pointwise kernel in blocks over `axes` are to neighbours that begin between vectors, as the
    taps of a window do.
    A lane that took several neighbours would read them one by one, each time beside gaps."""
    if kernel.r:
        return False
    flat = strides(kernel, axes)
    found = {(n.op, n.buffer, n.index): n for n in kernel.nodes() if n.op in ("load", "store")}
    together = [_vector(n, flat) for n in found.values() if n.index is not None and n.index.stride_of(axes[-1]) == 1]
    return 2 * sum(together) < len(together)


def _vector(n: Node, flat: Coefs) -> bool:
    """Return whether an access moves whole vectors of neighbours along the flattened position."""
    if n.index is None or n.index.divmods or n.index.indirect or not isinstance(n.index.offset, int):
        return False
    lane = LANE_BYTES // TYPES[n.dtype].size
    coefs = dict(n.index.coefs)
    whole = all(coefs.pop(a, 0) == c for a, c in flat)
    others = [c for a, c in (coefs if whole else dict(n.index.coefs)).items() if whole or a != flat[-1][0]]
    if not whole and len(flat) > 1:
        others.append(flat[-2][1])  # the position in a row is a remainder
    return all(isinstance(c, int) and c % lane == 0 for c in (*others, n.index.offset))
