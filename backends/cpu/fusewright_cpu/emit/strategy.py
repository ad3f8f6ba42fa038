"""Turn a kernel into loops: choose which axis is vectorised, how many lanes, and what runs in parallel.

Two shapes of code cover everything:
- row mode: the last row axis is vectorised; per point of P, values of P are scalars (softmax over the last
  dimension);
- column mode: a parallel axis is vectorised; row loops are scalar and carry vectors (pointwise kernels,
  column sums)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.ir import Kernel, Node, cost
from fusewright.toolkit.ir.types import TYPES
from fusewright_cpu.emit.interleave import members
from fusewright_cpu.emit.tiles import MOST_LANES, tile_axis
from fusewright_cpu.policy import LOOPS
from fusewright_cpu.target import CpuTarget


@dataclass(frozen=True, slots=True)
class Strategy:
    """`v` is the vectorised axis (None: no axis), `lanes` its lane count. `parallel` and `serial` are the
    other P axes, outermost first; the serial ones run in order inside a work item. `block` cuts a parallel
    `v` into work items (0: whole)."""

    v: int | None
    row: bool
    lanes: int
    parallel: tuple[int, ...]
    serial: tuple[int, ...]
    block: int
    tile: int | None = None
    """The second axis of tiles, which take as many points of it as `v` has lanes (see `tiles`); it is also cut into blocks."""


def choose(kernel: Kernel, target: CpuTarget) -> Strategy:
    """Return the strategy of a kernel, a pure function of strides, types and size hints."""
    hints = kernel.hints
    sizes = [evaluate(s, hints) for s in kernel.sizes]
    n_p = len(kernel.p)
    serial = serial_axes(kernel)
    tiled = None if serial else _tiled(kernel, target, sizes)
    if tiled is not None:
        return tiled
    v = _vector_axis(kernel, sizes, serial)
    row = v is not None and v >= n_p
    lanes = 1 if v is None or _conflicts(kernel, v) else _lanes(kernel, _shuffling(kernel, target, v), kernel.sizes[v])
    outer = [a for a in range(n_p) if a != v]
    parallel = tuple(a for a in outer if a not in serial)
    block = 0
    if v is not None and not row and v not in serial:
        block = _block(kernel, sizes[v], lanes, bool(serial), bool(parallel))
    return Strategy(v, row, lanes, parallel, tuple(a for a in outer if a in serial), block)


def _tiled(kernel: Kernel, target: CpuTarget, sizes: list[int]) -> Strategy | None:
    """Return square tiles if loads and stores run along two axes: with those along the second transposed, the fewer; else all
    stores, if loads all run along another axis."""
    for loaded in (False, True):
        found: dict[int, Strategy] = {}
        for v in reversed(range(len(kernel.p))):
            lanes = min(_lanes(kernel, target, kernel.sizes[v]), MOST_LANES)
            tile = tile_axis(kernel, sizes, v, lanes, loaded)
            if tile is not None:
                t, transposed = tile
                parallel = tuple(a for a in range(len(kernel.p)) if a not in (v, t))
                found.setdefault(transposed, Strategy(v, False, lanes, parallel, (), LOOPS.tile * lanes, t))
        if found:
            return found[min(found)]
    return None


def _block(kernel: Kernel, size: int, lanes: int, has_serial: bool, has_outer: bool) -> int:
    if has_serial:
        return 2 * lanes
    if kernel.r:
        return tile_units(kernel) * lanes
    if has_outer and size <= 2 * LOOPS.block:
        return 0
    return LOOPS.block


def tile_units(kernel: Kernel) -> int:
    """Return the number of adjacent vectors in column mode with rows: enough columns to use whole cache lines, within the
    register file."""
    nodes = list(kernel.nodes())
    if any(n.keep for n in nodes) or sum(n.op in ("reduce", "scan") for n in nodes) > 3:
        return 2
    return 8 if sum(cost(n) for n in nodes) <= 16 else 4


def pointwise_units(kernel: Kernel, target: CpuTarget) -> int:
    """Return the number of vectors in one step of column mode without rows: on Arm, whose loops take an instruction to advance each
    pointer and load and store pairs of registers, several if the body is short."""
    total = sum(map(cost, kernel.nodes()))
    return 1 if not target.arm or total > 60 else 2 if total > 12 else 4


def row_units(nodes: Sequence[Node], target: CpuTarget) -> int:
    """Return the number of vectors in flight in a row loop: several accumulators hide the latency of cheap bodies. More on Arm,
    whose loops take an instruction to advance each pointer."""
    total = sum(cost(n) for n in nodes)
    more = 2 if target.arm else 1
    if any(n.op == "reduce" for n in nodes):
        return 4 * more if total <= 12 // more else 4 if total <= 12 else 2 if total <= 60 else 1
    return 2 * more if total <= 12 else 1


def serial_axes(kernel: Kernel) -> frozenset[int]:
    """Return P axes along which different points may store to one element: they must run in order, on one thread."""
    axes = kernel.axes_of()
    out: set[int] = set()
    for n in kernel.nodes():
        if n.op != "store" or n.index is None or not (n.how or n.index.indirect):
            continue
        varying = frozenset().union(*(axes[i.value] for i in n.index.indirect))
        for a in range(len(kernel.p)):
            if a in varying or n.index.stride_of(a) in (0, None):
                out.add(a)
    return frozenset(out)


def _conflicts(kernel: Kernel, v: int) -> bool:
    """Return whether accumulating stores may hit one element from several lanes along `v`."""
    axes = kernel.axes_of()
    for n in kernel.nodes():
        if n.op == "store" and n.how and n.index is not None:
            if n.index.stride_of(v) in (0, None) or any(v in axes[i.value] for i in n.index.indirect):
                return True
    return False


def _vector_axis(kernel: Kernel, sizes: list[int], serial: frozenset[int]) -> int | None:
    """Return the axis along which most bytes are contiguous; the innermost one when in doubt."""
    candidates = list(range(len(kernel.p))) + ([len(kernel.sizes) - 1] if kernel.r else [])
    if not candidates:
        return None
    axes = kernel.axes_of()
    best, best_score = candidates[-1], float("-inf")
    for a in reversed(candidates):
        zipped = {**members(kernel, a), **members(kernel, a, "store")} if a < len(kernel.p) else {}
        score = sum(
            (1.0 if n.id in zipped else _access_score(n, a, axes)) * TYPES[n.dtype].size
            for n in kernel.nodes()
            if n.op in ("load", "store")
        )
        if sizes[a] < 8:
            score -= 64
        if _conflicts(kernel, a):
            score -= 128
        if a >= len(kernel.p) and kernel.recurs:
            score -= 256  # one step needs the one before
        if score > best_score + 1e-9:
            best, best_score = a, score
    return best


def _access_score(n: Node, a: int, axes: dict[int, frozenset[int]]) -> float:
    if n.index is None:
        return 0.0
    if a not in axes[n.id]:
        return 0.5
    stride = n.index.stride_of(a)
    if any(a in axes[i.value] for i in n.index.indirect):
        return -1.0
    if stride == 1:
        return 2.0
    return 0.5 if stride == 0 else -4.0


def _shuffling(kernel: Kernel, target: CpuTarget, v: int) -> CpuTarget:
    """Return the target, but with NEON's vectors if lanes along `v` are moved by distances for which SVE has no instruction:
    there they would go through memory."""
    if target.sve_bits <= 128:
        return target
    scans = [n for n in kernel.nodes() if n.op == "scan"] if v >= len(kernel.p) else []
    sets = [] if v >= len(kernel.p) else [*members(kernel, v).values(), *members(kernel, v, "store").values()]
    if not scans and not any(m.stride & (m.stride - 1) for m in sets):
        return target
    wide = any(n.dtype == "f32" and n.how in ("sum", "prod") for n in scans)  # these run in f64
    return replace(target, vector_bytes=8 if wide else 16)


def _lanes(kernel: Kernel, target: CpuTarget, size: Extent) -> int:
    """Return the lanes of one register for the widest computed type."""
    width = 1
    for n in kernel.nodes():
        if n.op in ("index", "bound", "scalar"):
            continue
        width = max(width, TYPES[n.dtype].size)
    if width == 8 and not any(n.dtype == "f64" for n in kernel.nodes()):
        # 64-bit integers beside f32 are mostly positions and gather indices: the floats determine the speed
        width = 4 if any(n.dtype in ("f32", "bf16", "f16") for n in kernel.nodes()) else 8
    lanes = max(1, target.vector_bytes // width)
    while isinstance(size, int) and lanes > 1 and lanes // 2 >= size:
        lanes //= 2
    return lanes


def work_units(kernel: Kernel) -> tuple[int, int]:
    """Return lane-instructions (per point of P, per point of P x R); a memory access counts for 4."""
    per: dict[str, int] = {"P": 0, "PR": 0}
    for s in kernel.stages:
        per[s.over] += sum(cost(n) + (3 if n.op in ("load", "store") else 0) for n in s.nodes)
    return per["P"], per["PR"]
