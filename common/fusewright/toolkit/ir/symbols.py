"""Size symbols of a finished kernel are positions; the launch supplies what they stand for.

While a kernel is built or transformed, its extents may use any atom: names, or formulas over its own symbols. `close`
numbers them in order of first use, so that equal kernels compare equal whatever their sizes are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.toolkit.ir.extent import Atom, Extent, atoms, evaluate, rename, symbol
from fusewright.toolkit.ir.ir import Kernel, Node, Stage, used_symbols
from fusewright.toolkit.ir.simplify import in_order, simplify_axes
from fusewright.toolkit.ir.verify import kernel_pass

GUESS = 1024
"""The hint of a symbol whose size is unknown."""


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel derived from another. `sizes` gives each of its symbols as a formula over the original kernel's symbols."""

    kernel: Kernel
    sizes: tuple[Extent, ...]


def step(kernel: Kernel) -> Step:
    """Bring a transformed kernel into normal form: values in order, symbols renumbered."""
    closed, stand_for = close(kernel, dict(enumerate(kernel.hints)))
    normal = in_order(simplify_axes(closed))
    renumbered, kept = close(normal, dict(enumerate(normal.hints)))
    return Step(renumbered, tuple(symbol(stand_for[k]) for k in kept if isinstance(k, int)))


@kernel_pass("close", made=lambda closed: closed[:1])
def close(kernel: Kernel, hints: Mapping[Atom, int]) -> tuple[Kernel, tuple[Atom, ...]]:
    """Replace the kernel's atoms by positions; return the kernel and the atoms in that order."""
    order = used_symbols(kernel)
    return numbered(kernel, order, hints), order


def numbered(kernel: Kernel, order: Sequence[Atom], hints: Mapping[Atom, int]) -> Kernel:
    """Replace each atom of the kernel by its position in `order`."""
    if not order:
        return kernel if not kernel.hints else replace(kernel, hints=())
    seen = tuple(hint_of(a, hints) for a in order)
    names: dict[Atom, Atom] = {a: k for k, a in enumerate(order)}
    if all(a == k for a, k in names.items()):
        return kernel if kernel.hints == seen else replace(kernel, hints=seen)
    sizes = tuple(rename(e, names) for e in kernel.sizes)

    def move(n: Node) -> Node:
        index = None if n.index is None else n.index.renamed(names, sizes)
        return replace(n, index=index, extent=None if n.extent is None else rename(n.extent, names))

    stages = tuple(Stage(s.over, tuple(move(n) for n in s.nodes)) for s in kernel.stages)
    n_p = len(kernel.p)
    return replace(kernel, p=sizes[:n_p], r=sizes[n_p:], stages=stages, hints=seen)


def size_hint(e: Extent, hints: Mapping[Atom, int]) -> int:
    """The size seen when tracing, with those of its atoms that a finished kernel has."""
    return evaluate(e, {a: hint_of(a, hints) for a in atoms(e)})


def hint_of(a: Atom, hints: Mapping[Atom, int]) -> int:
    """The size of a symbol or formula seen when tracing."""
    try:
        return evaluate(symbol(a), hints)
    except (KeyError, ArithmeticError):
        return GUESS
