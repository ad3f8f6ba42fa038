"""Interleaved loads: `x[3 * i]`, `x[3 * i + 1]` and `x[3 * i + 2]` together read whole vectors, which are then
unzipped; gathers are several times slower. Likewise, stores zip vectors and write whole ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright_cpu.emit.text import Fn, V

MOST = 8
"""The largest stride that is unzipped."""


@dataclass(frozen=True, slots=True)
class Member:
    """One load (or store) of a complete set: `base` is the index of the first of the `stride` accesses, `place` the number of
    this one."""

    buffer: int
    base: Index
    stride: int
    place: int


def members(kernel: Kernel, v: int | None, op: str = "load") -> dict[int, Member]:
    """Return loads (or stores) along axis `v` whose `stride` neighbours are all present: together they touch
    no element that the kernel would not touch anyway."""
    found: dict[int, Member] = {}
    for s in kernel.stages:
        if s.over == "P" and v is not None:
            found.update((n.id, m) for n in s.nodes if (m := _member(kernel, n, v, op)) is not None)
    places: dict[tuple[int, Index], list[int]] = {}
    for m in found.values():
        places.setdefault((m.buffer, m.base), []).append(m.place)
    whole = {key for key, at in places.items() if len(set(at)) == len(at) or op == "load"}
    return {
        i: m for i, m in found.items()
        if (m.buffer, m.base) in whole and len(set(places[m.buffer, m.base])) == m.stride
    }  # fmt: skip


def _member(kernel: Kernel, n: Node, v: int, op: str) -> Member | None:
    ix = n.index
    if n.op != op or ix is None or n.buffer is None or ix.indirect or ix.divmods:
        return None
    if len(n.args) != (op == "store") or n.how:
        return None
    stride = ix.stride_of(v)
    if not isinstance(stride, int) or not 2 <= stride <= MOST or not isinstance(ix.offset, int):
        return None
    if kernel.buffers[n.buffer].access != ("in" if op == "load" else "out"):
        return None
    place = ix.offset % stride
    return Member(n.buffer, replace(ix, offset=ix.offset - place), stride, place)


def zipped(f: Fn, parts: list[V]) -> list[V]:
    """Turn one vector per place into vectors in memory order; the inverse of `unzip`."""
    n, w = len(parts), parts[0].w
    if n == 1:
        return parts
    if n % 2:
        return [_picked(f, parts, [j * w + i for i in range(w)]) for j in range(n)]
    low, high = list(range(w // 2)), list(range(w // 2, w))
    even, odd = zipped(f, parts[::2]), zipped(f, parts[1::2])
    return [
        f.shuffle(a, b, [x for i in half for x in (i, w + i)])
        for a, b in zip(even, odd, strict=True) for half in (low, high)
    ]  # fmt: skip


def _picked(f: Fn, parts: list[V], at: list[int]) -> V:
    """Return element `k // n` of vector `k % n`, for every k in `at`."""
    n, w = len(parts), parts[0].w
    out = parts[0]
    for p, part in enumerate(parts):
        if p == 0:
            out = f.lanes(part, [k // n if k % n == 0 else 0 for k in at])
        else:
            out = f.shuffle(out, part, [w + k // n if k % n == p else i for i, k in enumerate(at)])
    return out


def unzip(f: Fn, parts: list[V]) -> list[V]:
    """Turn vectors in memory order into one vector per place, with every `len(parts)`-th element each."""
    n = len(parts)
    if n == 1:
        return parts
    if n % 2:
        return [_every(f, parts, k) for k in range(n)]
    w = parts[0].w
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    even = unzip(f, [f.shuffle(a, b, list(range(0, 2 * w, 2))) for a, b in pairs])
    odd = unzip(f, [f.shuffle(a, b, list(range(1, 2 * w, 2))) for a, b in pairs])
    return [x for both in zip(even, odd, strict=True) for x in both]


def _every(f: Fn, parts: list[V], k: int) -> V:
    """Return elements k, k + n, k + 2n ... of n vectors."""
    n, w = len(parts), parts[0].w
    out = parts[0]
    for p, part in enumerate(parts):
        at = [k + n * i for i in range(w)]
        if p == 0:
            out = f.lanes(part, [a if a < w else 0 for a in at])
        else:
            out = f.shuffle(out, part, [w + a - p * w if p * w <= a < (p + 1) * w else i for i, a in enumerate(at)])
    return out
