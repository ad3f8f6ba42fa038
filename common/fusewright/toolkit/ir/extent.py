"""Sizes and strides in kernels: an `Extent` is an int, or a `SizeExpr` whose symbols are positions in the kernel's list.

While a kernel is being built, symbols are whatever the builder was given (mostly names); `symbols.close` numbers them."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.sizes.expr import (
    Atom,
    Extent,
    SizeExpr,
    apply,
    atoms,
    divide,
    evaluate,
    make,
    product,
    sort_monomial,
    substitute,
    symbol,
    terms_of,
)

__all__ = [
    "Atom", "Extent", "SizeExpr", "apply", "atoms", "distinct", "divide", "evaluate", "nonnegative", "product", "rename",
    "substitute", "symbol", "terms_of",
]  # fmt: skip


def nonnegative(e: Extent) -> bool:
    """Whether `e >= 0` evidently holds for all symbols >= 0 (no coefficient is negative)."""
    return all(c >= 0 for _, c in terms_of(e))


def distinct(shape: Sequence[Extent], stride: Sequence[Extent]) -> bool:
    """Whether no two elements of a tensor evidently share an address, whatever its symbolic sizes are."""
    real = [(step, n) for n, step in zip(reversed(shape), reversed(stride), strict=True) if n != 1]
    if not any(isinstance(step, SizeExpr) for step, _ in real):
        real.sort(key=lambda pair: evaluate(pair[0], {}))
    reach: Extent = 0
    for step, n in real:
        if not nonnegative(step - reach - 1):
            return False
        reach = reach + (n - 1) * step
    return True


def rename(e: Extent, names: dict[Atom, Atom]) -> Extent:
    """Return `e` with its atoms renamed."""
    if isinstance(e, int):
        return e
    out: dict[tuple[Atom, ...], int] = {}
    for m, c in e.terms:
        key = sort_monomial(names.get(a, a) for a in m)
        out[key] = out.get(key, 0) + c
    return make(out)
