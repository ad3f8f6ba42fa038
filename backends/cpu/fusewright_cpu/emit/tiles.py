"""Square tiles: a pointwise kernel that loads or stores along two axes reads or writes vectors along the second and
transposes them in registers, instead of gathering or scattering."""

from __future__ import annotations

from fusewright.toolkit.ir.ir import Kernel, Node, across, cost
from fusewright_cpu.emit.text import Fn, V

MOST_TRANSPOSED = 2
"""The most transposed loads and stores of one kernel: each holds a register per lane."""
MOST_LANES = 16
"""The most lanes of a tile: as many vectors are in registers at once."""
MOST_COST = 100
"""The most vector instructions of a kernel that is written out once per lane."""


def tile_axis(kernel: Kernel, sizes: list[int], v: int, lanes: int, loaded: bool = False) -> tuple[int, int] | None:
    """Return the axis of the loads and stores that do not run along `v`, and their number; None where tiles do not apply. `loaded`:
    only loads run along `v`, under any conditions, as the parts of a concatenation do. (The parts of a stack do not: they are the
    same for all of `v`.)"""
    if kernel.r or lanes < 4 or sizes[v] < lanes or sum(cost(n) for n in kernel.nodes()) > MOST_COST:
        return None
    nodes = list(kernel.nodes())
    stores = [n for n in nodes if n.op == "store"]
    if not all(_along(n, v) or across_store(kernel, n, v) is not None for n in stores):
        return None
    if any(_along(n, v) for n in stores) is loaded:
        return None
    loads = [n for n in nodes if n.op == "load"]
    if loaded and not (all(_loaded_along(n, v) for n in loads) and any(n.index.stride_of(v) for n in loads if n.index is not None)):
        return None
    axes = [a for n in nodes for a in (across(kernel, n, v), across_store(kernel, n, v)) if a is not None]
    if not 0 < len(axes) <= MOST_TRANSPOSED or len(set(axes)) > 1 or sizes[axes[0]] < lanes:
        return None
    return axes[0], len(axes)


def _along(n: Node, v: int) -> bool:
    """Whether a store that overwrites runs along `v`."""
    return not n.how and n.index is not None and not n.index.indirect and n.index.stride_of(v) == 1


def _loaded_along(n: Node, v: int) -> bool:
    """Whether a load runs along `v` or does not depend on it."""
    return n.index is not None and not n.index.indirect and n.index.stride_of(v) in (0, 1)


def across_store(kernel: Kernel, n: Node, v: int) -> int | None:
    """Return the parallel axis along which a plain store is contiguous; None if there is none, or it runs along `v`."""
    ix = n.index
    if n.op != "store" or ix is None or n.how or len(n.args) > 1 or ix.indirect or ix.divmods or ix.stride_of(v) in (0, 1):
        return None
    return next((a for a, c in ix.coefs if c == 1 and a != v and a < len(kernel.p)), None)


def transpose(f: Fn, rows: list[V]) -> list[V]:
    """Transpose a square of as many vectors as they have lanes, a power of two, by swapping halves at every
    scale. On SVE beyond 128 bits, use as many rounds of interleaving, a shuffle for which it has an instruction."""
    n, half = len(rows), len(rows) // 2
    if f.module.target.sve_bits > 128:
        for _ in range(n.bit_length() - 1):
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [
                f.shuffle(a, b, [x for i in at for x in (i, n + i)])
                for a, b in pairs
                for at in (range(half), range(half, n))
            ]
        return rows
    while half:
        low = [i for i in range(n) if i % (2 * half) < half]
        first = [k if k % (2 * half) < half else n + k - half for k in range(n)]
        second = [k + half if k % (2 * half) < half else n + k for k in range(n)]
        out = list(rows)
        for i in low:
            out[i] = f.shuffle(rows[i], rows[i + half], first)
            out[i + half] = f.shuffle(rows[i], rows[i + half], second)
        rows, half = out, half // 2
    return rows
