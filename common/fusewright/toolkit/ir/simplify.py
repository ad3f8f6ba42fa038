"""Normal form of a kernel's axes: drop axes of size 1, split axes where a reshape divides them, and merge neighbours
where every address allows it. Emitters then see few, long axes and affine indices, and equivalent kernels become
identical."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.toolkit.ir.extent import Extent, divide, nonnegative
from fusewright.toolkit.ir.index import Index, IndexTooComplex, axis_index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.verify import kernel_pass


@kernel_pass("simplify_axes")
def simplify_axes(kernel: Kernel) -> Kernel:
    """Return an equivalent kernel with as few axes as its indices allow."""
    for _ in range(16):
        cut = _find_split(kernel)
        if cut is None:
            break
        after = _split(kernel, *cut)
        if after is None:
            break
        kernel = after
    kernel = _drop_units(kernel)
    merged = _find_merge(kernel)
    while merged is not None:
        kernel = _merge(kernel, merged)
        merged = _find_merge(kernel)
    return kernel


@kernel_pass("in_order")
def in_order(kernel: Kernel) -> Kernel:
    """Number the values in order of execution, which emitters rely on."""
    ids = {n.id: i for i, n in enumerate(kernel.nodes())}

    def move(n: Node) -> Node:
        index = None if n.index is None else n.index.with_values(ids)
        return replace(n, id=ids[n.id], args=tuple(ids[a] for a in n.args), index=index)

    stages = tuple(replace(s, nodes=tuple(move(n) for n in s.nodes)) for s in kernel.stages)
    return replace(kernel, stages=stages)


def _indices(kernel: Kernel) -> Iterator[Index]:
    return (n.index for n in kernel.nodes() if n.index is not None)


def _rewrite(kernel: Kernel, p: list[Extent], r: list[Extent], axes: list[Index]) -> Kernel:
    """Rewrite the kernel over new axes, where old axis `a` becomes the index `axes[a]`."""
    sizes = tuple(p + r)

    def move(n: Node) -> Node:
        return n if n.index is None else replace(n, index=n.index.substitute(axes, sizes))

    stages = tuple(replace(s, nodes=tuple(move(n) for n in s.nodes)) for s in kernel.stages)
    return replace(kernel, p=tuple(p), r=tuple(r), stages=stages)


def _find_split(kernel: Kernel) -> tuple[int, Extent] | None:
    """Find an axis in some division and the factor to split it at. The row of a scan stays one axis, and so does one that is
    counted down: its quotient still depends on both parts."""
    scans = any(n.op == "scan" for n in kernel.nodes())
    for index in _indices(kernel):
        for d in index.divmods:
            if len(d.coefs) != 1 or d.offset != 0:
                continue
            axis, coef = d.coefs[0]
            if not nonnegative(coef):
                continue
            for cut in (d.div, None if d.mod is None else d.div * d.mod):
                inner = divide(cut, coef) if cut is not None else None
                outer = None if inner is None else divide(kernel.sizes[axis], inner)
                if scans and axis >= len(kernel.p):
                    continue
                if inner is not None and outer is not None and 1 not in (inner, outer):
                    return axis, inner
    return None


def _split(kernel: Kernel, axis: int, inner: Extent) -> Kernel | None:
    """Split an axis of size n into (n / inner, inner)."""
    outer = divide(kernel.sizes[axis], inner)
    if outer is None:
        return None
    old, n_p = list(kernel.sizes), len(kernel.p)
    sizes = (*old[:axis], outer, inner, *old[axis + 1 :])
    axes = [axis_index(a if a < axis else a + 1, sizes) for a in range(len(old))]
    axes[axis] = axis_index(axis, sizes) * inner + axis_index(axis + 1, sizes)
    cut = n_p + 1 if axis < n_p else n_p
    try:
        return _rewrite(kernel, list(sizes[:cut]), list(sizes[cut:]), axes)
    except IndexTooComplex:
        return None


def _drop_units(kernel: Kernel) -> Kernel:
    """Drop axes of size 1. R keeps one axis if it had any, since reductions need a row."""
    n_p = len(kernel.p)
    stay = [a for a, s in enumerate(kernel.sizes) if s != 1]
    if kernel.r and not any(a >= n_p for a in stay):
        stay.append(len(kernel.sizes) - 1)
    if len(stay) == len(kernel.sizes):
        return kernel
    sizes = tuple(kernel.sizes[a] for a in stay)
    axes = [axis_index(stay.index(a), sizes) if a in stay else Index(sizes=sizes) for a in range(len(kernel.sizes))]
    return _rewrite(
        kernel, [kernel.sizes[a] for a in stay if a < n_p], [kernel.sizes[a] for a in stay if a >= n_p], axes
    )


def _find_merge(kernel: Kernel) -> int | None:
    """Find an axis `a` that can merge with `a + 1`: in every address the outer stride is the inner stride times
    the inner size."""
    n_p = len(kernel.p)
    for a in range(len(kernel.sizes) - 1):
        if a == n_p - 1:
            continue
        inner = kernel.sizes[a + 1]
        if all(_mergeable(index, a, inner) for index in _indices(kernel)):
            return a
    return None


def _mergeable(index: Index, a: int, inner: Extent) -> bool:
    forms = [index.coefs, *(d.coefs for d in index.divmods)]
    return all(dict(f).get(a, 0) == dict(f).get(a + 1, 0) * inner for f in forms)


def _merge(kernel: Kernel, a: int) -> Kernel:
    """Merge axes `a` and `a + 1`. `_find_merge` ensures that indices are affine in the new axis, so strides carry
    over."""
    old = list(kernel.sizes)
    sizes = (*old[:a], old[a] * old[a + 1], *old[a + 2 :])
    cut = len(kernel.p) - (1 if a < len(kernel.p) else 0)

    def form(coefs: tuple[tuple[int, Extent], ...]) -> tuple[tuple[int, Extent], ...]:
        return tuple((x if x < a else x - 1, c) for x, c in coefs if x != a)

    def move(n: Node) -> Node:
        if n.index is None:
            return n
        divmods = tuple(replace(d, coefs=form(d.coefs)) for d in n.index.divmods)
        return replace(n, index=replace(n.index, coefs=form(n.index.coefs), divmods=divmods, sizes=sizes))

    stages = tuple(replace(s, nodes=tuple(move(n) for n in s.nodes)) for s in kernel.stages)
    return replace(kernel, p=sizes[:cut], r=sizes[cut:], stages=stages)
