"""The range of a kernel's indices, to decide whether they fit in 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.toolkit.ir.extent import Extent, evaluate, product
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel


def offsets_bound(kernel: Kernel, sizes: Sequence[int]) -> int:
    """An upper bound on the magnitude of the kernel's indices."""
    axes = [evaluate(s, sizes) for s in kernel.sizes]
    n_p = len(kernel.p)
    top = max(_points(axes[:n_p]), _points(axes[n_p:]))
    bounds = {n.id: evaluate(n.extent, sizes) for n in kernel.nodes() if n.op == "bound" and n.extent is not None}
    for n in kernel.nodes():
        if n.index is not None:
            top = max(top, *_reach(n.index, axes, bounds, sizes))
    return top


def _reach(ix: Index, axes: list[int], bounds: dict[int, int], sizes: Sequence[int]) -> tuple[int, int]:
    """Bounds of an index and of the dividends in it."""

    def term(stride: Extent, reach: int) -> int:
        return abs(evaluate(stride, sizes)) * max(reach, 0)

    total, inside = abs(evaluate(ix.offset, sizes)) + sum(term(c, axes[a] - 1) for a, c in ix.coefs), 0
    for d in ix.divmods:
        inner = abs(evaluate(d.offset, sizes)) + sum(term(c, axes[a] - 1) for a, c in d.coefs)
        inside = max(inside, inner)
        total += term(d.stride, inner // max(1, evaluate(d.div, sizes)))
    total += sum(term(i.stride, bounds.get(i.value, 0)) for i in ix.indirect)
    return total, inside


def _points(sizes: Sequence[int]) -> int:
    out = product(sizes)
    assert isinstance(out, int)
    return out
