"""The range of a kernel's indices, to decide whether they fit in 32 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fusewright.sizes.expr import atoms, leaves, symbol, terms_of
from fusewright.toolkit.ir.extent import Extent, evaluate, nonnegative, product
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel


def offsets_bound(kernel: Kernel, sizes: Sequence[int], least: Sequence[int] | None = None) -> int:
    """An upper bound on the magnitude of the kernel's indices; with `least` sizes, for all from those on, if what indices are made
    of does `grow`."""
    smallest = sizes if least is None else least
    axes = [evaluate(s, sizes) for s in kernel.sizes]
    n_p = len(kernel.p)
    top = max(_points(axes[:n_p]), _points(axes[n_p:]))
    bounds = {n.id: evaluate(n.extent, sizes) for n in kernel.nodes() if n.op == "bound" and n.extent is not None}
    for n in kernel.nodes():
        if n.index is not None:
            top = max(top, *_reach(n.index, axes, bounds, sizes, smallest))
    return top


def grow(kernel: Kernel) -> bool:
    """Whether all sizes in a kernel grow with its symbols. Indices may begin before their tensor by a fixed distance."""
    indices = [n.index for n in kernel.nodes() if n.index is not None]
    offsets = [offset for ix in indices for offset in (ix.offset, *(d.offset for d in ix.divmods))]
    grown = [e for e in offsets if any(True for _ in leaves(e))]
    grown += [n.extent for n in kernel.nodes() if n.op == "bound" and n.extent is not None]
    return all(map(nonnegative, (*kernel.sizes, *grown, *(e for ix in indices for e in _factors(ix)))))


def only_added(kernel: Kernel, symbols: Collection[int]) -> bool:
    """Whether these sizes do nothing but add to indices, so that `offsets_bound` over a range of them is largest at one end."""
    indices = [n.index for n in kernel.nodes() if n.index is not None]
    added = [offset for ix in indices for offset in (ix.offset, *(d.offset for d in ix.divmods))]
    others = [n.extent for n in kernel.nodes() if n.op == "bound" and n.extent is not None]
    others += [e for ix in indices for e in _factors(ix)]
    return all(_linear(e, symbols) for e in added) and not any(depends(e, symbols) for e in (*kernel.sizes, *others))


def depends(e: Extent, symbols: Collection[int]) -> bool:
    """Whether a size is computed from one of these."""
    return any(a in symbols for a in leaves(e))


def _linear(e: Extent, symbols: Collection[int]) -> bool:
    """Whether each term of a size is fixed, or one of these times what is fixed."""
    inner = [a for a in atoms(e) if depends(symbol(a), symbols)]
    return all(a in symbols for a in inner) and all(sum(a in symbols for a in m) <= 1 for m, _ in terms_of(e))


def _factors(ix: Index) -> Iterator[Extent]:
    """The sizes in an index that others are multiplied with or divided by."""
    yield from (c for _, c in ix.coefs)
    for d in ix.divmods:
        yield from (d.stride, d.div, *(c for _, c in d.coefs))
    yield from (i.stride for i in ix.indirect)


def _reach(
    ix: Index, axes: list[int], bounds: dict[int, int], sizes: Sequence[int], least: Sequence[int]
) -> tuple[int, int]:
    """Bounds of an index and of the dividends in it."""

    def term(stride: Extent, reach: int) -> int:
        return abs(evaluate(stride, sizes)) * max(reach, 0)

    total, inside = abs(evaluate(ix.offset, sizes)) + sum(term(c, axes[a] - 1) for a, c in ix.coefs), 0
    for d in ix.divmods:
        inner = abs(evaluate(d.offset, sizes)) + sum(term(c, axes[a] - 1) for a, c in d.coefs)
        inside = max(inside, inner)
        total += term(d.stride, inner // max(1, evaluate(d.div, least)))
    total += sum(term(i.stride, bounds.get(i.value, 0)) for i in ix.indirect)
    return total, inside


def _points(sizes: Sequence[int]) -> int:
    out = product(sizes)
    assert isinstance(out, int)
    return out
