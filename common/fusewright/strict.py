"""Whether what runs now was compiled with the option `strict`.

Compiling knows its options. What a plan calls does not: an operator whose kernel cannot be built computes its result in another
way, which a user of `strict` wants to see as an error instead.
"""

from __future__ import annotations

import threading
from typing import Any

from fusewright.plan.ir import Run

_now = threading.local()


def is_strict() -> bool:
    """True while this thread runs a plan that was compiled with `strict`."""
    return getattr(_now, "strict", False)


def strictly(run: Run) -> Run:
    """`run`, with `is_strict` true meanwhile, in whichever thread it is called (autograd has threads of its own)."""

    def strict_run(args: list[Any]) -> Any:
        before, _now.strict = is_strict(), True
        try:
            return run(args)
        finally:
            _now.strict = before

    return strict_run
