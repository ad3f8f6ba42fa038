"""Run-time checks of kernels and the errors that they report.

A kernel returns one word: 0, or a failure. The lowest byte is the number of a `bound` (`Node.value`, from 1 in the order of
the ops) or `ZERO_DIVISION`; the other seven bytes hold the index that was out of bounds. If several checks fail, the lowest
number is reported: that of the op that eager runs first.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.ir import Kernel

ZERO_DIVISION = 255
MOST_SITES = 250
"""The number of checks with a number of their own; later ones share the last."""
INDEX_BITS = 56
"""Bits of the word that hold the index. Larger indices are clamped."""

ANY_INDEX = "IndexError: index {index} is out of bounds for size {size}"
"""The message of checks without one of their own."""

_TYPES = {"IndexError": IndexError, "RuntimeError": RuntimeError}


def word(site: int, index: int) -> int:
    """The error word of a failed check."""
    top = 1 << (INDEX_BITS - 1)
    return (max(-top, min(index, top - 1)) << 8) | site


def error(kernel: Kernel, code: int, sizes: Sequence[int]) -> Exception:
    """Return the exception that eager would raise where this kernel returned `code`. `sizes` begins with the values of its
    symbols."""
    site = code & 0xFF
    if site == ZERO_DIVISION:
        return RuntimeError("ZeroDivisionError")
    found = next((n for n in kernel.nodes() if n.op == "bound" and (n.value or 1) == site), None)
    if found is None or found.extent is None:
        return RuntimeError(f"{kernel.name} failed with code {code}")
    return out_of_bounds(found.says, code >> 8, found.extent, sizes)


def out_of_bounds(says: str, index: int, size: Extent, sizes: Sequence[int]) -> Exception:
    """Return the error for an index from its message template: "IndexError: index {index} is out of ... {size}"."""
    kind, _, text = (says or ANY_INDEX).partition(": ")
    return _TYPES.get(kind, IndexError)(text.replace("{index}", str(index)).replace("{size}", str(evaluate(size, sizes))))
