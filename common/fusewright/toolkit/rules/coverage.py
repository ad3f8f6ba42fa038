"""Proves that a kernel reads every element of a tensor. An op that checks its indices or divisors must check them all, even
if its readers need only a part of its result, because eager would raise for the rest too.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from fusewright.toolkit.ir.extent import Extent, divide, nonnegative
from fusewright.toolkit.ir.index import Index

Digit = tuple[Extent, Extent]
"""(step, count): a term of an index that takes the values 0, step, ..., (count - 1) * step."""


def covers(places: Collection[Index], total: Extent) -> bool:
    """Whether these linear indices, over all points of a kernel, cover 0 .. total - 1. False if that cannot be proved."""
    starts: dict[Index, set[int]] = {}
    for ix in places:
        found = _without_offset(ix)
        if found is not None:
            starts.setdefault(found[1], set()).add(found[0])
    return any(_counts_all(ix, offsets, total) for ix, offsets in starts.items())


def _without_offset(ix: Index) -> tuple[int, Index] | None:
    """Split an index into its offset and the rest, with every step made positive."""
    if ix.indirect or ix.sizes is None:
        return None
    offset, coefs = ix.offset, []
    for axis, c in ix.coefs:
        if not nonnegative(c):
            offset, c = offset + c * (ix.sizes[axis] - 1), c * -1
        coefs.append((axis, c))
    return (offset, Index(0, tuple(coefs), ix.divmods, (), ix.sizes)) if isinstance(offset, int) else None


def _counts_all(ix: Index, offsets: set[int], total: Extent) -> bool:
    digits = _digits(ix)
    if digits is None or min(offsets) != 0:
        return False
    if len(offsets) > 1:  # one index at several offsets, as in unrolled rows
        step = sorted(offsets)[1]
        if offsets != set(range(0, step * len(offsets), step)):
            return False
        digits.append((step, len(offsets)))
    reached: Extent = 1
    while digits:
        following = next((d for d in digits if d[0] == reached), None)
        if following is None:
            break
        digits.remove(following)
        reached = reached * following[1]
    return not digits and reached == total


def _digits(ix: Index) -> list[Digit] | None:
    """The terms of an index as digits that vary independently, or None if they do not."""
    assert ix.sizes is not None
    digits: list[Digit] = []
    parts: dict[int, list[tuple[Extent, Extent]]] = {}
    for axis, c in ix.coefs:
        digits.append((c, ix.sizes[axis]))
        parts.setdefault(axis, []).append((1, ix.sizes[axis]))
    for d in ix.divmods:
        if len(d.coefs) != 1 or d.coefs[0][1] != 1:
            return None
        axis = d.coefs[0][0]
        size = ix.sizes[axis]
        count = divide(size, d.div) if d.mod is None else d.mod
        around = d.div == 1 and count == size
        if count is None or (d.offset != 0 and not around) or divide(size, d.div * count) is None:
            return None
        digits.append((d.stride, count))
        parts.setdefault(axis, []).append((d.div, d.div * count))
    return digits if all(_apart(p) for p in parts.values()) else None


def _apart(parts: list[tuple[Extent, Extent]]) -> bool:
    """Whether the digits of one axis, given as (low, high) place values, do not overlap."""
    if len(parts) < 2:
        return True
    if not all(isinstance(a, int) and isinstance(b, int) for a, b in parts):
        return False
    spans = sorted((int(a), int(b)) for a, b in parts)  # type: ignore[arg-type]
    return all(low[1] <= high[0] and high[0] % low[1] == 0 for low, high in pairwise(spans))
