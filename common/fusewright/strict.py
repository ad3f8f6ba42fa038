"""Whether the current call was compiled with the option `strict`.

The compiler knows its options; operators called by a plan do not. An operator whose kernel cannot be built falls back to
another way to compute its result, and a user of `strict` wants an error instead.
"""

from __future__ import annotations

import threading
from typing import Any

from fusewright.plan.ir import Run

_now = threading.local()


def is_strict() -> bool:
    """Whether this thread is running a plan compiled with `strict`."""
    return getattr(_now, "strict", False)


def strictly(run: Run) -> Run:
    """Wrap `run` so that `is_strict` holds meanwhile, in whichever thread calls it (autograd has its own threads)."""

    def strict_run(args: list[Any]) -> Any:
        before, _now.strict = is_strict(), True
        try:
            return run(args)
        finally:
            _now.strict = before

    return strict_run
