"""What a program that holds its row keeps in registers, and how often one that does not passes over it.

Loads do not count as kept: what is read again after a reduction, from a cache, costs no more than a register that was spilled.
"""

from __future__ import annotations

from collections.abc import Collection

from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.types import TYPES


def passes(kernel: Kernel, joined: Collection[int] = ()) -> int:
    """Return how many stages pass over the row for a store or a reduction, other than those `joined` to an earlier one."""
    return sum(
        s.over == "PR" and any(n.op in ("store", "reduce") and n.id not in joined for n in s.nodes) for s in kernel.stages
    )


def halves(kernel: Kernel) -> bool:
    """Return whether what each row has of its own in memory takes at most two bytes an element. A group norm's step in fp32 took
    4.3 ms as such rows are passed over, 3.0 as others are: caches keep half as many elements."""
    moved = [n for n in kernel.nodes() if n.op in ("load", "store") and n.index is not None]
    return all(TYPES[n.dtype].size <= 2 for n in moved if _of_row(n, len(kernel.p)))


def _of_row(n: Node, count: int) -> bool:
    """Whether each point of the `count` axes of P has a row of its own in what an access moves."""
    axes = n.index.axes() if n.index is not None else ()
    return bool(axes) and min(axes) < count <= max(axes)


def kept(kernel: Kernel) -> float:
    """Return the most 32-bit words of an element that are computed before a reduction and used after it. Nothing is computed twice
    there: values of equal expressions are one."""
    same = _equal(kernel)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    words: dict[int, float] = {}
    for k, s in enumerate(kernel.stages):
        for n in s.nodes if s.over == "PR" else ():
            if same[n.id] != n.id:
                continue
            for u in n.uses():
                last[same[u]] = k
            if n.op not in ("load", "reduce", "store", "const", "index", "scalar"):
                first[n.id], words[n.id] = k, _words(n)
    reducing = [k for k, s in enumerate(kernel.stages) if any(n.op == "reduce" for n in s.nodes)]
    return max((sum(words[i] for i, at in first.items() if at <= k < last.get(i, at)) for k in reducing), default=0.0)


def _words(n: Node) -> float:
    return 0.0 if n.dtype == "bool" else max(TYPES[n.dtype].size, 2) / 4


def _equal(kernel: Kernel) -> dict[int, int]:
    """Map every value to the first one of an equal expression."""
    found: dict[tuple[object, ...], int] = {}
    same: dict[int, int] = {}
    for n in kernel.nodes():
        renamed = {u: same[u] for u in n.uses() if u in same}
        index = n.index.with_values(renamed) if n.index is not None else None
        args = tuple(renamed.get(a, a) for a in n.args)
        key = (n.op, n.dtype, args, index, n.buffer, n.how, repr(n.value), n.extent, n.id if n.op == "store" else None)
        same[n.id] = found.setdefault(key, n.id)
    return same
