"""Choose how the points and rows of a kernel are spread over threads, by a formula of strides, types, traced sizes and properties
of the chip (`target`): cores, SIMD groups that keep its memory busy, threadgroup memory.

Assumptions about Apple's GPUs:
- a simdgroup has 32 lanes; accesses are fastest when lanes take neighbouring elements, up to four per lane at once;
- a reduction over a simdgroup costs a few instructions; over a threadgroup also a barrier and threadgroup memory;
- a dispatch has three directions, so up to three axes need no division.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.types import TYPES
from fusewright_mps.emit.addressing import multiple
from fusewright_mps.target import Target

Workers: TypeAlias = Literal["thread", "simd", "group", "columns"]

LANES = 32
GROUP = 256
"""Threads per threadgroup in kernels without rows."""
SIDE = 32
"""Elements of a tile along each axis."""
VECTOR = 4
"""Elements in Metal's widest vectors."""
HELD = 48
"""Most registers per thread for held elements of a row."""
FORCED = 64
"""The same limit for a row that is needed again after it was overwritten, so that it must be held."""


@dataclass(frozen=True, slots=True)
class Config:
    """`count` `workers` share the row of a point: one thread, a simdgroup, a threadgroup, or ("columns") simdgroups that span 32
    neighbouring points. A thread takes `vector` neighbours along axis `along` (None: no such axis). `order` lists the axes of P
    by direction of the dispatch: x, y, then all others along z. `held`: steps per worker over a row that stays in registers; 0 if
    it is read again. `most`: most threads along a single axis of unknown or great length; each strides by that number."""

    workers: Workers
    count: int
    along: int | None
    vector: int
    order: tuple[int, ...]
    group: tuple[int, int, int]
    held: int = 0
    most: int = 1 << 18


def choose(kernel: Kernel, target: Target, aligned: bool = True) -> Config:
    """Choose the configuration of a kernel on a chip."""
    seen = [evaluate(s, kernel.hints) for s in kernel.sizes]
    if not kernel.r:
        return _points(kernel, seen, target, aligned)
    n_p, points, row = len(kernel.p), math.prod(seen[: len(kernel.p)]), math.prod(seen[len(kernel.p) :])
    reach = contiguous(kernel, seen)
    best = max(range(n_p), key=lambda a: (reach[a], a), default=None)
    by_rows = best is None or reach[-1] >= reach[best]
    if kernel.recurs:
        return _alone(kernel, seen, best)
    scans = any(n.op == "scan" for n in kernel.nodes())
    full = target.simdgroups * LANES  # threads that keep all cores busy
    if row <= 4 or (row <= 16 and points >= full) or (not by_rows and (scans or (row <= 64 and points >= full // 2))):
        return _alone(kernel, seen, best)
    if not by_rows and best is not None:
        return _columns(kernel, seen, best, row, target)
    vector = 1 if scans else _vector(kernel, len(seen) - 1, seen, aligned)
    if row <= 128 or (row <= 1024 and points >= target.cores * target.schedulers):
        return _simds(kernel, seen, vector)
    return _group_of_a_row(kernel, points, row, vector, target)


def contiguous(kernel: Kernel, seen: list[int]) -> list[int]:
    """Return, for each axis, the bytes moved by accesses that are contiguous along it."""
    found = [0] * len(seen)
    for n in accesses(kernel):
        assert n.index is not None
        covered = math.prod(seen[a] for a in n.index.axes())
        for a in range(len(seen)):
            if seen[a] > 1 and n.index.stride_of(a) in (1, -1):
                found[a] += TYPES[n.dtype].size * covered
    return found


def accesses(kernel: Kernel) -> list[Node]:
    """Return the distinct loads and stores."""
    found: dict[tuple[object, ...], Node] = {}
    for n in kernel.nodes():
        if n.op in ("load", "store"):
            found.setdefault((n.op, n.buffer, n.index), n)
    return list(found.values())


def _order(n_p: int, first: int | None = None) -> tuple[int, ...]:
    """Return the axes of P: `first`, then the others from the innermost to the outermost."""
    rest = [a for a in reversed(range(n_p)) if a != first]
    return tuple(rest if first is None else [first, *rest])


def _points(kernel: Kernel, seen: list[int], target: Target, aligned: bool) -> Config:
    reach = contiguous(kernel, seen)
    along = max(range(len(seen)), key=lambda a: (reach[a], a), default=None)
    if along is None:
        return Config("thread", 1, None, 1, (), (1, 1, 1))
    vector = _vector(kernel, along, seen, aligned)
    across = _across(reach, seen, along)
    if across is not None:
        rest = [a for a in _order(len(seen), along) if a not in (along, across)]
        return Config("thread", 1, along, vector, (along, across, *rest), (SIDE // vector, SIDE, 1))
    order = _order(len(seen), along)
    return Config("thread", 1, along, vector, order, _group(order, seen, vector), most=target.cores * target.resident)


def _across(reach: list[int], seen: list[int], along: int) -> int | None:
    """Return the axis along which other accesses are contiguous, if they are a good part of the traffic. The threadgroup is then a
    tile over both axes, so that it uses whole cache lines either way."""
    others = [a for a in range(len(seen)) if a != along]
    best = max(others, key=lambda a: (reach[a], a), default=None)
    if best is None or reach[best] * 4 < reach[along] or not reach[best]:
        return None
    return best if min(seen[best], seen[along]) >= 8 else None


def _group(order: tuple[int, ...], seen: list[int], vector: int) -> tuple[int, int, int]:
    """Return the threads of a threadgroup in each direction, filling x first, then y and z."""
    sizes = [-(-seen[order[0]] // vector), *(seen[a] for a in order[1:2])]
    sizes.append(math.prod(seen[a] for a in order[2:]))
    group, left = [], GROUP
    for k in range(3):
        group.append(min(left, _pow2(sizes[k]) if k < len(sizes) else 1))
        left //= group[-1]
    return group[0], group[1], group[2]


def _alone(kernel: Kernel, seen: list[int], best: int | None) -> Config:
    """One thread per point; neighbouring threads lie along the most contiguous axis."""
    n_p = len(kernel.p)
    order = _order(n_p, best if best is not None else None)
    group = _group(order, seen, 1) if order else (1, 1, 1)
    return Config("thread", 1, None, 1, order, group)


def _simds(kernel: Kernel, seen: list[int], vector: int) -> Config:
    """One simdgroup per point; a threadgroup holds several independent ones."""
    order = _order(len(kernel.p))
    together = min(8, _pow2(seen[order[0]])) if order else 1
    scans = any(n.op == "scan" for n in kernel.nodes())
    held = 0 if scans else _steps(kernel, LANES * vector)
    return Config("simd", LANES, len(seen) - 1, vector, order, (LANES * together, 1, 1), held)


def _group_of_a_row(kernel: Kernel, points: int, row: int, vector: int, target: Target) -> Config:
    """One threadgroup per point. Each thread takes four steps, or fewer if the points are too few to occupy all cores."""
    steady, idle = row // (4 * vector), min(target.simdgroups * LANES // points, row // (2 * vector)) if points else 0
    count = min(target.max_threads, max(2 * LANES, _pow2(max(steady, idle))))
    held = 0 if any(n.op == "scan" for n in kernel.nodes()) else _steps(kernel, count * vector)
    return Config("group", count, len(kernel.sizes) - 1, vector, _order(len(kernel.p)), (count, 1, 1), held)


def _columns(kernel: Kernel, seen: list[int], best: int, row: int, target: Target) -> Config:
    """Simdgroups whose lanes are neighbouring points and which divide the row; as many as threadgroup memory has room for."""
    reductions = sum(2 if n.how.startswith("arg") else 1 for n in kernel.nodes() if n.op == "reduce")
    room = target.threadgroup * 3 // 4 // (LANES * 8 * max(1, reductions))
    count = max(1, min(LANES, _pow2(row // 8), _pow2(room + 1) // 2))
    return Config("columns", count, len(seen) - 1, 1, _order(len(kernel.p), best), (LANES, count, 1))


def _steps(kernel: Kernel, at_once: int) -> int:
    """Return the number of steps over a held row, 0 if its length is unknown."""
    row = math.prod(s for s in kernel.r if isinstance(s, int)) if all(isinstance(s, int) for s in kernel.r) else 0
    return -(-row // at_once) if row else 0


def _vector(kernel: Kernel, axis: int, seen: list[int], aligned: bool) -> int:
    """Return how many neighbours along an axis are moved at once: the widest vector that all contiguous accesses allow."""
    if not aligned or any(n.op == "scan" for n in kernel.nodes()) or _read_again(kernel):
        return 1
    size = kernel.sizes[axis]
    alone = len(kernel.sizes) == 1 and not kernel.r  # then a separate loop handles the remainder
    for v in (VECTOR, 2):
        if seen[axis] < v or not (multiple(size, v) or alone):
            continue
        whole = [n for n in accesses(kernel) if n.index is not None and n.index.stride_of(axis) == 1]
        if whole and all(moves(n, axis, v) for n in whole):
            return v
    return 1


def moves(n: Node, axis: int, vector: int) -> bool:
    """Whether an access can move `vector` neighbours along an axis at once."""
    ix = n.index
    if ix is None or ix.stride_of(axis) != 1 or len(n.args) > (1 if n.op == "store" else 0) or n.how:
        return False
    return all(multiple(s, vector) for s in _strides(ix, axis))


def _strides(ix: Index, axis: int) -> list[Extent]:
    """Return all offsets and strides of an address except that of the axis."""
    out: list[Extent] = [ix.offset, *(c for a, c in ix.coefs if a != axis)]
    out += [d.stride for d in ix.divmods]
    return out + [i.stride for i in ix.indirect]


def _read_again(kernel: Kernel) -> bool:
    """Whether the kernel loads a buffer that it also stores."""
    stored = {n.buffer for n in kernel.nodes() if n.op == "store"}
    return any(n.op == "load" and n.buffer in stored for n in kernel.nodes())


def _pow2(n: int) -> int:
    """Return the smallest power of 2 that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
