"""Sizes and strides in kernels: an `Extent` is an int, or a `SizeExpr` whose symbols are positions in the kernel's list.

While a kernel is being built, symbols are whatever the builder was given (mostly names); `symbols.close` numbers them."""

from __future__ import annotations

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
    "Atom", "Extent", "SizeExpr", "apply", "atoms", "divide", "evaluate", "nonnegative", "product", "rename",
    "substitute", "symbol",
]  # fmt: skip


def nonnegative(e: Extent) -> bool:
    """Whether `e >= 0` evidently holds for all symbols >= 0 (no coefficient is negative)."""
    return all(c >= 0 for _, c in terms_of(e))


def rename(e: Extent, names: dict[Atom, Atom]) -> Extent:
    """Return `e` with its atoms renamed."""
    if isinstance(e, int):
        return e
    out: dict[tuple[Atom, ...], int] = {}
    for m, c in e.terms:
        key = sort_monomial(names.get(a, a) for a in m)
        out[key] = out.get(key, 0) + c
    return make(out)
