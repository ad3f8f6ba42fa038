"""Loop kernels as Metal source: `emit` prints one, `library` puts several into the text of one shader library.

The interface of `backend` and `runtime` to everything in `emit`; `emit.source` says what a `Source` is and how it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from fusewright.toolkit.ir.ir import Kernel
from fusewright_mps.emit.source import Source, Unsupported, Variant
from fusewright_mps.target import TARGETS, Target

__all__ = ["Source", "Unsupported", "Variant", "emit", "library", "refused", "variant_for"]

TARGET = TARGETS["M1"]
"""The least of them: what is emitted for it runs on all."""


def emit(kernel: Kernel, variant: Variant | None = None, target: Target = TARGET) -> Source:
    """Metal functions of `kernel`. The default variant follows from the sizes that the kernel was traced with.

    Raises `Unsupported` when Metal cannot do it.
    """
    raise Unsupported(f"{kernel.name}: nothing is emitted yet")


def variant_for(kernel: Kernel, sizes: Sequence[int], aligned: bool = True, check_division: bool = False) -> Variant:
    """The variant that these sizes need."""
    return Variant(aligned, False, check_division)


def library(sources: Iterable[Source]) -> str:
    """The text of a shader library: what all kernels share, then the functions of each, equal ones once."""
    return "\n".join(dict.fromkeys(s.text for s in sources))


@functools.lru_cache(4096)
def refused(kernel: Kernel) -> str | None:
    """Why the emitter cannot print a kernel, or None."""
    try:
        emit(kernel)
    except Unsupported as e:
        return str(e)
    return None
