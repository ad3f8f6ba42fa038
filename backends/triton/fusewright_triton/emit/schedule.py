"""Cut a kernel into programs: blocks of P, elements of the row per step, splits, warps.

This is a formula of bytes and shape, without a search; its numbers are `target.Schedule`. It rests on three facts:
- a warp moves memory best with 16 bytes per lane, and one program should have 2-4 such loads in flight per lane;
- a row that fits in registers is read once ("persistent"); few warps per row mean few barriers per reduction;
- kernels with fewer programs than the device has multiprocessors waste it: long rows are then split, and a
  second kernel combines the parts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.types import TYPES
from fusewright.toolkit.transform.online_softmax import totals
from fusewright_triton.emit.addressing import LANE_BYTES, begin_anywhere
from fusewright_triton.emit.held import halves, kept, passes
from fusewright_triton.target import FORMULA, Target

HELD = 8192
"""The most elements of rows next to each other that one program holds."""
SHORT = 512
"""Elements of a row below which 16 to each lane of a warp leave lanes idle."""
STEP_ELEMENTS, ONLINE_ELEMENTS = 4, 8
"""The least elements to each lane of a row that is passed over in steps, and of one whose maximum and sum of exponentials are
computed together, where a lane rescales its sum once for all of a step."""
SCAN_HELD = 8192
"""The longest row with a scan that a program holds: the carry from step to step costs more than it saves for few warps."""
SCAN_STEP = 2048, 8
"""Elements of a row with a scan in a step, and those that lie in one lane next to each other."""
FOLDED_STEP = 4096, 8
"""Elements in a step of a long row with squared deviations, or that is read again, and the least of them to each lane."""
AGAIN = 65536
"""The longest row of which a cache keeps as many as programs of `4096` elements a step are under way, until they read it again."""
COLUMN = 32
"""Elements of held columns to each lane, if there are programs enough: with a quarter, warps exchange what one could add up (the
maximum of 20 in 84 million took 378 us, and 91 with these)."""
APART = 64
"""The shortest run of elements, each in a sector of its own, that is worth a tile: a block repeats the sectors of a shorter one."""
RUN = 32
"""The shortest row for which a block has lines of its own, so that what all of a row share is computed once for each lane."""
VECTORS = 4
"""The fewest loads shared by all short rows for which a block has lines of its own as well: each lane reads them once."""
TILE = 32, 128
"""The sides of a tile in elements of up to four bytes, the second one along the longer run. Sixteen to each lane: with 64 of them,
registers spill, and mish of 32x128x254x254 in bf16 took 2.25 ms, 1.05 so. A copy of 128x64x126x126 in bf16, whose planes
begin within sectors, takes 0.18 ms with a square of 64, 0.14 so."""
TAPS = 4
"""The fewest elements of a window, read from one operand: lanes hold all of them, and fewer points."""
COLUMNS = 64
"""Columns of up to four bytes that a program passes over in steps."""
SQUARE = 32, 8
"""Neighbouring long rows of a program some of whose operands lie across them, and elements of a step to each lane."""
COLUMN_STEPS = 4, 8
"""Elements of such a step to each lane: of positions of extremes, and of others. With 32, sums of 32x4096x4095 in bf16 took 0.75 ms
and 0.32 so, positions of 32x4096x4096 0.29 with eight and 0.25 so."""
COLUMN_SPLIT = 4
"""How many times as many programs share columns as a row: there are fewer blocks of them. The gradient of mish with the sum for a
bias over 64 channels of 128x256x256 in bf16 took 3.9 ms in 128 programs, 1.65 in 512."""
BESIDE = 4
"""The most elements apart that neighbours are read as such, without a window that covers what lies between."""
THREADS = 128
"""The most threads of a program for rows next to each other: others run while it waits for its loads."""
WIDE = 2**31 - 2**22
"""The least element offset that needs 64-bit arithmetic; the margin covers lanes past the end of a block."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`block` neighbouring points of the P axes `axes` (flattened together) per program."""

    axes: tuple[int, ...]
    block: int


@dataclass(frozen=True, slots=True)
class Config:
    """`tiles` are the blocks over P, outermost first; a P axis in no tile has one program per point.

    `row` is the number of row elements per step (0: no row axes), `persistent` says that one step covers the
    whole row, `split` is the number of programs that share a row. `each` elements of a step are combined by their lane before
    they are added to what it carries to the next step.
    """

    tiles: tuple[Tile, ...]
    row: int
    persistent: bool
    split: int
    warps: int
    each: int = 1


@dataclass(frozen=True, slots=True)
class _Shape:
    """The formula's inputs. `bytes_along[a]` is the traffic whose addresses are contiguous along axis a, `bytes_beside[a]` that of
    which a few neighbours along it share a sector, with that share; `taps` is how many elements of an operand one point reads."""

    sizes: tuple[int, ...]
    n_p: int
    bytes_along: tuple[int, ...]
    bytes_beside: tuple[int, ...]
    width: int
    live: int
    taps: int

    @property
    def points(self) -> int:
        return _product(self.sizes[: self.n_p])

    @property
    def row(self) -> int:
        return _product(self.sizes[self.n_p :])


def choose(kernel: Kernel, target: Target) -> Config:
    """Return the configuration of a kernel, a pure function of its strides, types and size hints."""
    hints = kernel.hints
    shape = _shape(kernel, tuple(evaluate(s, hints) for s in kernel.sizes))
    if not kernel.r:
        return _point(kernel, shape, target)
    if kernel.recurs:
        return _recurrence(shape, target)
    static = all(isinstance(s, int) for s in kernel.r)
    if _row_is_contiguous(shape):
        return _rows(kernel, shape, target, static)
    return _columns(kernel, shape, target, static)


def simulation(kernel: Kernel) -> Config:
    """Large blocks and no splits: the interpreter pays per program, not per element."""
    hints = kernel.hints
    points = max(1, _product([evaluate(s, hints) for s in kernel.p]))
    every = tuple(range(len(kernel.p)))
    if not kernel.r:
        return Config((Tile(every, min(_pow2(points), 65536)),) if every else (), 0, False, 1, 4)
    row = _pow2(max(2, _product([evaluate(s, hints) for s in kernel.r])))
    if kernel.recurs:
        return Config(_tile(every, min(_pow2(points), 65536)), 1, False, 1, 4)
    static = all(isinstance(s, int) for s in kernel.r)
    persistent = static and row <= 65536 and all(s != 0 for s in kernel.r)
    step = row if persistent else min(row, 4096)
    block = max(1, min(_pow2(points), 65536 // step))
    return Config((Tile(every, block),) if every else (), step, persistent, 1, 4)


def _shape(kernel: Kernel, sizes: tuple[int, ...]) -> _Shape:
    along, beside, width, live = [0] * len(sizes), [0] * len(sizes), 1, 0
    places = defaultdict[tuple[object, ...], list[Node]](list)
    for n in _accesses(kernel):
        size = TYPES[n.dtype].size
        width = max(width, size)
        live += max(size, 4) // 4
        places[n.op, n.buffer, n.index and (n.index.coefs, n.index.divmods, n.index.indirect)].append(n)
    for n, *others in places.values():  # a window reads its neighbours' elements again, from a cache
        if n.index is None:
            continue
        size = TYPES[n.dtype].size
        for a in (a for a in range(len(sizes)) if sizes[a] > 1):
            if n.index.stride_of(a) in (1, -1):
                along[a] += size * _reach(n, sizes)
            elif step := _beside(n, a, 1 + len(others)):
                beside[a] += size * _reach(n, sizes) // step
    taps = max((len(nodes) for place, nodes in places.items() if place[0] == "load"), default=1)
    return _Shape(sizes, len(kernel.p), tuple(along), tuple(beside), width, max(live, 1), taps)


def _beside(n: Node, axis: int, taps: int) -> int:
    """Return how many elements apart neighbours along an axis are, as in a window with a stride, 0 if that is far."""
    step = n.index.stride_of(axis) if n.index is not None else None
    return abs(step) if isinstance(step, int) and 1 < abs(step) <= max(BESIDE, taps) else 0


def _accesses(kernel: Kernel) -> list[Node]:
    """Return loads and stores, without duplicates."""
    seen: dict[tuple[object, ...], Node] = {}
    for n in kernel.nodes():
        if n.op in ("load", "store"):
            seen.setdefault((n.op, n.buffer, n.index), n)
    return list(seen.values())


def _reach(n: Node, sizes: tuple[int, ...]) -> int:
    """Return how much of the domain an access covers, in percent of a full tensor (small operands are cached)."""
    if n.index is None:
        return 0
    covered = _product([sizes[a] for a in n.index.axes()])
    return max(1, 100 * covered // max(1, _product(sizes)))


def _row_is_contiguous(shape: _Shape) -> bool:
    reached = [a + b for a, b in zip(shape.bytes_along, shape.bytes_beside, strict=True)]
    last_row = max(reached[shape.n_p :], default=0)
    last_p = max(reached[: shape.n_p], default=0)
    return last_row >= last_p


def _point(kernel: Kernel, shape: _Shape, target: Target) -> Config:
    """Configure a pointwise kernel: one block over flattened P, or a tile when buffers favour different axes."""
    every = tuple(range(shape.n_p))
    if not every:
        return Config((), 0, False, 1, 1)
    best = sorted(every, key=lambda a: (shape.bytes_along[a], a))
    if len(best) > 1 and (runs := _transposes(kernel, shape, *sorted(best[-2:]))):
        return _tiles(shape, *runs, target)
    if best and (across := _scattered(kernel, shape, best[-1], target)) is not None:
        width = max(TYPES[n.dtype].size for n in _accesses(kernel) if n.index and {across, best[-1]} <= set(n.index.axes()))
        outer, inner = sorted((across, best[-1]))
        return _tiles(replace(shape, width=width), (outer,), (inner,), target)
    positions, lines = _positions(kernel, best[-1])
    width = max((TYPES[n.dtype].size for n in _accesses(kernel) if n.id not in positions), default=1)
    per_lane = max(LANE_BYTES // width * (target.schedule.point_bytes_ahead if shape.live <= 8 else 1), 2)
    if shape.taps >= TAPS and (shape.bytes_beside[best[-1]] or begin_anywhere(kernel, every)):
        per_lane = 2
    block = 4 * 32 * per_lane
    spread = _pow2(max(1, shape.points // (4 * target.units)))
    block = max(min(block, spread), min(128, _pow2(shape.points)))
    warps = _warps(block, per_lane, target)
    inner = shape.sizes[best[-1]]
    shares = 4 * _pow2(inner) <= block and _vectors(kernel, best[-1]) >= VECTORS
    if best[-1] == every[-1] and (shares or (lines and inner >= RUN)):
        across = _pow2(inner) if shares else _along(inner, block)
        return Config((Tile(every[:-1], block // across), Tile(every[-1:], across)), 0, False, 1, warps)
    return Config((Tile(every, block),), 0, False, 1, warps)


def _vectors(kernel: Kernel, inner: int) -> int:
    """Return how many loads all rows share."""
    found = (n.index for n in _accesses(kernel) if n.op == "load" and n.index is not None)
    return sum(index.axes() == {inner} and not index.indirect for index in found)


def _along(size: int, block: int) -> int:
    """Return how many neighbours of a row a block takes: all, if it holds them and few lanes are left without one."""
    across = min(block, _pow2(size))
    while across > RUN and -(-size // across) * across * 3 > size * 4:
        across //= 2
    return across


def _positions(kernel: Kernel, inner: int) -> tuple[frozenset[int], bool]:
    """Return the loads of positions at which rows are gathered, at addresses that neighbours along `inner` share, and whether these
    share a position with nothing that tells them apart. None where elements are scattered: lanes then add to memory one by one."""
    if any(n.op == "store" and n.index is not None and n.index.indirect for n in _accesses(kernel)):
        return frozenset(), False
    nodes, axes = kernel.node_map(), kernel.axes_of()
    values = {i.value for n in _accesses(kernel) if n.index is not None for i in n.index.indirect}
    todo, found = [*values], set[int]()
    while todo:
        node = nodes[todo.pop()]
        if node.op != "load":
            todo.extend(node.args)
        elif node.index is not None and inner not in node.index.axes():
            found.add(node.id)
    return frozenset(found), bool(values) and all(inner not in axes[v] for v in values)


def _scattered(kernel: Kernel, shape: _Shape, inner: int, target: Target) -> int | None:
    """Return the axis along which an operand that no L1 cache holds is contiguous, whose elements lie apart along `inner`: in a
    block of neighbours along that axis each would be a sector, once for every axis over which the operand is repeated."""
    for n in _accesses(kernel):
        if n.index is None or n.index.indirect or inner not in n.index.axes() or n.index.stride_of(inner) in (1, -1):
            continue
        if _product(tuple(shape.sizes[a] for a in n.index.axes())) * TYPES[n.dtype].size < target.shared:
            continue
        for a in n.index.axes():
            if n.index.stride_of(a) in (1, -1) and shape.sizes[a] >= 8 and shape.sizes[inner] >= APART:
                return a
    return None


def _tiles(shape: _Shape, outer: tuple[int, ...], inner: tuple[int, ...], target: Target) -> Config:
    """Return a tile over two runs of axes that leaves every multiprocessor two tiles."""
    per_lane, (short, long) = 8 if shape.taps >= TAPS else 16, TILE
    long = long * 4 // max(shape.width, 4)
    if shape.points < 2 * target.units * short * long:
        short, long = short // 2, long // 2
    elements = short * long * per_lane // 16
    sizes = [_pow2(_product([shape.sizes[a] for a in run])) for run in (outer, inner)]
    down = min(long if sizes[0] > sizes[1] else elements // min(long, sizes[1]), sizes[0])
    across = min(elements // down, sizes[1])
    return Config((Tile(outer, down), Tile(inner, across)), 0, False, 1, _warps(down * across, per_lane, target))


def _transposes(kernel: Kernel, shape: _Shape, outer: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the runs of axes that end with these two if both are contiguous for a good part of the traffic, and long enough for a
    tile."""
    small, large = sorted((shape.bytes_along[outer], shape.bytes_along[inner]))
    if small * 4 < large or not small:
        return None
    found = [n.index for n in _accesses(kernel) if n.index is not None]
    runs = _run(found, shape, outer, 0, TILE[1]), _run(found, shape, inner, outer + 1, RUN)
    return runs if all(_product([shape.sizes[a] for a in run]) >= 8 for run in runs) else None


def _run(found: Sequence[Index], shape: _Shape, last: int, first: int, wanted: float = math.inf) -> tuple[int, ...]:
    """Return the axes from `first` on that lie one behind the other, up to `last`, in operands contiguous along it: as many as
    make `wanted` elements."""
    contiguous = [i for i in found if i.stride_of(last) in (1, -1)]
    start, run = last, shape.sizes[last]
    while start > first and run < wanted and {i.stride_of(start - 1) for i in contiguous} == {run}:
        start -= 1
        run *= shape.sizes[start]
    return tuple(range(start, last + 1))


def _rows(kernel: Kernel, shape: _Shape, target: Target, static: bool) -> Config:
    """Configure reductions along contiguous memory."""
    every = tuple(range(shape.n_p))
    large, shared = _matrices(kernel, shape, target.schedule.matrix)
    if static and shape.row and large:
        return _products(kernel, shape, shared, len(large), target)
    row = _pow2(max(shape.row, 2))
    limit = target.schedule.persistent // max(1, (shape.live + 1) // 4)
    alone = _gathers(kernel, shape, target)
    if _scanned(kernel, row, target):
        return _scan_steps(shape, target)
    if static and shape.row and row <= limit and not alone and not _online(kernel, row, target):
        across = _across(kernel, shape, target)
        if across is not None and (block := _lines(shape, *across, row, target)) > 1:
            most = _pow2(target.schedule.lane_words // shape.live + 1) // 2
            return Config((Tile(across[:1], block),), row, True, 1, _row_warps(block * row, target, most))
        block = 1
        while block * row < (1024 if row <= 64 else 512) and block * 2 * 4 * target.units <= shape.points:
            block *= 2
        return Config(_tile(every, block), row, True, 1, _row_warps(block * row, target))
    if not alone and (across := _across(kernel, shape, target)) is not None:
        return _square_steps(kernel, shape, across[0], target)
    joined = totals(kernel)
    moments = any(n.how == "m2" for n in kernel.nodes()) or (shape.row > AGAIN and passes(kernel) > 1)
    if moments and halves(kernel) and not joined and not alone:
        return _folded_steps(kernel, shape, target)
    again = shape.row > AGAIN and passes(kernel, joined) > 1
    step = min(_pow2(max(shape.row, 16)), 1024 if alone else 4096 if (joined and not again) or shape.live > 4 else 8192)
    split = _split(kernel, shape, shape.points, step, target)
    warps = _warps(step, ONLINE_ELEMENTS if joined else STEP_ELEMENTS, target)
    return combined(kernel, Config(_tile(every, 1), step, False, split, warps), target)


def combined(kernel: Kernel, config: Config, target: Target) -> Config:
    """Return the configuration in which lanes combine all they hold of a step, no more, where that saves rescaling or `config` has
    them combine; in front of a scan no more than `config` has."""
    held = max(1, config.row // (config.warps * target.lanes))
    if config.persistent or any(t.block > 1 for t in config.tiles) or not (config.each > 1 or totals(kernel)):
        return replace(config, each=1)
    scans = any(n.op == "scan" for n in kernel.nodes())
    return replace(config, each=min(config.each, held) if scans else held)


def _online(kernel: Kernel, row: int, target: Target) -> bool:
    """Return whether to pass in steps over rows that would fill a multiprocessor each: if one pass gives a maximum and the sum of
    exponentials, and no other one is needed (some programs then load while others add up), or registers would not hold the row."""
    threads, joined = _row_warps(row, target) * target.lanes, totals(kernel)
    if not joined or threads < 1024:
        return False
    registers = min(target.block_registers // threads, target.thread_registers)
    return passes(kernel, joined) == 1 or kept(kernel) * (row // threads) >= registers


def _scanned(kernel: Kernel, row: int, target: Target) -> bool:
    """Return whether to pass in steps over rows with a scan: if many warps would hold them, which scan all of their blocks before
    one is stored, and one pass is enough."""
    return row > SCAN_HELD and passes(kernel) == 1 and any(n.op == "scan" for n in kernel.nodes())


def _scan_steps(shape: _Shape, target: Target) -> Config:
    """Give each row few warps, whose lanes add up what they load at once before they scan their sums."""
    step, each = SCAN_STEP
    return Config(_tile(tuple(range(shape.n_p)), 1), step, False, 1, _warps(step, 2 * each, target), each)


def _square_steps(kernel: Kernel, shape: _Shape, axis: int, target: Target) -> Config:
    """Give each program neighbouring rows along an axis of P, and steps of as many bytes: some operands are contiguous along one,
    some along the other. The gradient of a bias over 128x64x256x256 in bf16, one of two operands channels-last, took 8.5 ms row by
    row, and half of that so."""
    block, per_lane = SQUARE
    last = axis == shape.n_p - 1
    block = min(block, _pow2(_neighbours(kernel, shape, axis) if last else shape.sizes[axis]))
    return _block_steps(kernel, shape, tuple(range(shape.n_p)) if last else (axis,), block, per_lane, target)


def _block_steps(kernel: Kernel, shape: _Shape, axes: tuple[int, ...], block: int, per_lane: int, target: Target) -> Config:
    """Let a program pass in steps over a block of rows next to each other, so many elements of a step to each lane."""
    step = min(_pow2(max(shape.row, 2)), max(4, 8 * target.lanes * per_lane // block))
    split = _split(kernel, shape, -(-shape.points // block), step, target, COLUMN_SPLIT)
    return Config(_tile(axes, block), step, False, split, _warps(block * step, per_lane, target))


def _folded_steps(kernel: Kernel, shape: _Shape, target: Target) -> Config:
    """Give each row a program whose lanes take the sum, or the mean, of a step's elements before they add it to what they carry:
    a Welford step and two masks for each element took longer than the loads, and accumulators of all lanes fill registers."""
    step, per_lane = FOLDED_STEP
    step = min(_pow2(max(shape.row, 16)), step)
    split = _split(kernel, shape, shape.points, step, target)
    warps = _warps(step, per_lane, target)
    return Config(_tile(tuple(range(shape.n_p)), 1), step, False, split, warps, max(1, step // (warps * target.lanes)))


def _gathers(kernel: Kernel, shape: _Shape, target: Target) -> bool:
    """Return whether few rows gather so many elements that the sectors keep one multiprocessor busy: the losses at all targets."""
    if shape.points * 8 > target.units or shape.row < target.schedule.split_worth or not splittable(kernel):
        return False
    return any(n.op == "load" and n.index is not None and n.index.indirect and _over_row(n, shape) for n in _accesses(kernel))


def _across(kernel: Kernel, shape: _Shape, target: Target) -> tuple[int, int] | None:
    """Return the axis of P along which an operand that no L1 cache holds is contiguous whose rows are not, and the bytes of the
    narrowest elements read so: read one row at a time, every element would fetch a sector of memory."""
    found = [(a, n) for n in _accesses(kernel) if (a := _transposed(n, shape, target)) is not None]
    if not found:
        return None
    axis, axes = found[0][0], kernel.axes_of()
    narrow = [TYPES[n.dtype].size for a, n in found if a == axis]
    for n in _accesses(kernel):  # positions read across rows make neighbouring rows gather neighbours
        if n.index is not None and any(i.stride == 1 and axis in axes[i.value] for i in n.index.indirect):
            if not _along_row(n, shape) and _over_row(n, shape):
                narrow.append(TYPES[n.dtype].size)
    return axis, min(narrow)


def _transposed(n: Node, shape: _Shape, target: Target) -> int | None:
    """Return the axis of P along which an operand is contiguous whose rows are not."""
    if n.index is None or not _over_row(n, shape) or _along_row(n, shape):
        return None
    if _product(tuple(shape.sizes[a] for a in n.index.axes())) * TYPES[n.dtype].size < target.shared:
        return None
    return next((a for a in range(shape.n_p) if shape.sizes[a] > 1 and n.index.stride_of(a) in (1, -1)), None)


def _along_row(n: Node, shape: _Shape) -> bool:
    rows = range(shape.n_p, len(shape.sizes))
    return n.index is not None and any(shape.sizes[a] > 1 and n.index.stride_of(a) in (1, -1) for a in rows)


def _lines(shape: _Shape, axis: int, size: int, row: int, target: Target) -> int:
    """Return how many rows next to each other along `axis` a program holds: a sector of 32 bytes of the operand whose elements have
    `size` bytes, if registers of `THREADS` threads hold all operands, and half of the shared memory the widest, which may pass
    through it."""
    block = min(32 // max(size, 2), _pow2(shape.sizes[axis]), HELD // row)
    while block > 1 and (
        block * 2 * target.units > shape.points
        or block * row * shape.width > target.shared // 2
        or block * row * shape.live > THREADS * target.schedule.lane_words
    ):
        block //= 2
    return block


def matrices(kernel: Kernel) -> frozenset[int]:
    """Return the buffers that products of few rows read once, beside rows that all programs read; none in other kernels."""
    hints = kernel.hints
    shape = _shape(kernel, tuple(evaluate(s, hints) for s in kernel.sizes))
    return frozenset(n.buffer for n in _matrices(kernel, shape, FORMULA.matrix)[0] if n.buffer is not None)


def _matrices(kernel: Kernel, shape: _Shape, least: int) -> tuple[list[Node], tuple[int, ...]]:
    """Return loads of the large operands (at least `least` elements) of products of few rows, in a kernel that only reduces, and
    the axes of P along which rows share them. A matrix may be chosen by its number, as long as its rows are read in order."""
    loads = [n for n in _accesses(kernel) if n.op == "load" and n.index is not None and _over_row(n, shape)]
    stores = any(n.op == "store" and n.index is not None and _over_row(n, shape) for n in _accesses(kernel))
    if shape.row < SHORT or stores or len(loads) < 2:
        return [], ()
    axes = {n.id: n.index.axes() for n in loads if n.index is not None}
    if any(n.index is not None and n.index.indirect for n in loads):
        known = kernel.axes_of()
        for n in loads:
            chosen = frozenset[int]().union(*(known[i.value] for i in n.index.indirect))  # type: ignore[union-attr]
            if any(a >= shape.n_p for a in chosen):
                return [], ()
            axes[n.id] |= chosen
    reach = {n.id: _product(tuple(shape.sizes[a] for a in axes[n.id])) for n in loads}
    large = [n for n in loads if reach[n.id] * 2 > max(reach.values())]
    held = frozenset[int]().union(*(axes[n.id] for n in large))
    shared = tuple(a for a in range(shape.n_p) if a not in held)
    if len(large) == len(loads) or max(reach.values()) < least or _product(tuple(shape.sizes[a] for a in shared)) > 8:
        return [], ()
    return large, shared


def _over_row(n: Node, shape: _Shape) -> bool:
    return n.index is not None and any(a >= shape.n_p for a in n.index.axes())


def _products(kernel: Kernel, shape: _Shape, shared: tuple[int, ...], matrices: int, target: Target) -> Config:
    """Give each program a row of each matrix, or a part of it where rows are long and few; each lane takes 16 elements of all of
    them at a time."""
    tiles = tuple(Tile((a,), _pow2(shape.sizes[a])) for a in shared[:1] if shape.sizes[a] > 1)
    row = _pow2(max(shape.row, 2))
    step = min(row, target.schedule.product_step // _product(tuple(t.block for t in tiles)))
    programs = shape.points // _product(tuple(shape.sizes[t.axes[0]] for t in tiles))
    few = step < row and 2 * programs <= target.units  # the gradients of a norm took 30% longer in 512 programs than in 128
    split = _split(kernel, shape, programs, step, target) if few else 1
    return Config(tiles, step, step == row, split, _warps(step, max(4, 16 // matrices), target))


def _row_warps(elements: int, target: Target, most: int = HELD) -> int:
    """Return the warps for rows that are held in registers, at most so many elements of them to each lane."""
    short, long = target.schedule.row_elements
    return _warps(elements, min(short if elements < 1024 else long, most), target)


def _columns(kernel: Kernel, shape: _Shape, target: Target, static: bool) -> Config:
    """Configure reductions across contiguous memory: lanes lie along P."""
    every = tuple(range(shape.n_p))
    inner = max(range(shape.n_p), key=lambda a: shape.bytes_along[a])
    width = max((TYPES[n.dtype].size for n in _accesses(kernel) if _over_row(n, shape)), default=4)
    block = min(COLUMNS * 4 // max(width, 4), _pow2(_neighbours(kernel, shape, inner)))
    while block > 1 and shape.points < block * target.units and not splittable(kernel):
        block //= 2  # programs cannot share a row: as many as there are columns
    row = _pow2(max(shape.row, 2))
    if static and shape.row and row * block <= 4096:
        while block * row < 2048 and block * 2 * 2 * target.units <= shape.points:
            block *= 2
        many = shape.points >= block * target.units and COLUMN * shape.live <= target.schedule.lane_words
        return Config(_tile(every, block), row, True, 1, _warps(block * row, COLUMN if many else COLUMN // 4, target))
    per_lane = COLUMN_STEPS[not any(n.op == "reduce" and n.how.startswith("arg") for n in kernel.nodes())]
    return _block_steps(kernel, shape, every, block, per_lane, target)


def _neighbours(kernel: Kernel, shape: _Shape, inner: int) -> int:
    """Return how many points in a row lie next to each other in memory: along `inner` and, where it is the last axis of P, along
    those before it that continue it (the channels of all groups)."""
    found = [n.index for n in _accesses(kernel) if n.index is not None and _over_row(n, shape)]
    first = 0 if inner == shape.n_p - 1 else inner
    return _product([shape.sizes[a] for a in _run(found, shape, inner, first)])


def _recurrence(shape: _Shape, target: Target) -> Config:
    """Give each thread whole rows, of which it takes one element at a time, and each program a warp or more of neighbours."""
    block = min(128, _pow2(max(1, shape.points)))
    while block > target.lanes and shape.points < 2 * target.units * block:
        block //= 2
    return Config(_tile(tuple(range(shape.n_p)), block), 1, False, 1, _warps(block, 1, target))


def _tile(axes: tuple[int, ...], block: int) -> tuple[Tile, ...]:
    return (Tile(axes, block),) if axes else ()


def _split(kernel: Kernel, shape: _Shape, programs: int, step: int, target: Target, more: int = 1) -> int:
    """Return how many programs share a row: enough for six blocks per multiprocessor, each with a few steps to do; `more` times as
    many as share a row alone."""
    if not splittable(kernel) or programs >= 2 * target.units or shape.row < 4 * step:
        return 1
    if shape.row * max(1, shape.points // max(programs, 1)) < target.schedule.split_worth:
        return 1
    wanted = _pow2(-(-6 * target.units // max(programs, 1))) // 2
    return min(max(wanted, 1), target.schedule.max_split * more, _pow2(shape.row // (2 * step) + 1) // 2)


def splittable(kernel: Kernel) -> bool:
    """Return whether rows may be shared: there is no scan, and no stored buffer is loaded (programs do not see each
    other's stores within a launch, and later functions recompute values)."""
    stored = {n.buffer for n in kernel.nodes() if n.op == "store"}
    loaded = {n.buffer for n in kernel.nodes() if n.op == "load"}
    return not stored & loaded and not any(n.op == "scan" for n in kernel.nodes())


def _warps(elements: int, per_lane: int, target: Target) -> int:
    """Return the warps for a block, `per_lane` elements to each lane or more; a power of 2, at most 1024 threads."""
    return max(1, min(_pow2(elements) // (_pow2(per_lane) * target.lanes), 1024 // target.lanes))


def _product(sizes: Sequence[int]) -> int:
    out = 1
    for s in sizes:
        out *= s
    return out


def _pow2(n: int) -> int:
    """Return the least power of 2 that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
