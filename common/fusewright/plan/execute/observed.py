"""The first calls of a graph with collectives, which must never be repeated.

A mismatch in a first run (see `firstrun`) is found by one process; another may have loaded the plan from its cache and never
look. If this process repeated the call, it would be one collective ahead of the others, and all would deadlock. So metadata is
checked before anything relies on it: the first call runs every op in eager, which is correct whatever was traced, and
mismatches are mended for the next call. The second call runs the plan and compares its results once more; a mismatch is then an
error, since only the backend can have caused it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusewright.errors import BackendContractError
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.firstrun import Check, MetadataMismatch
from fusewright.plan.ir import Run


def eagerly(plan: Plan, check: Check, found: list[MetadataMismatch]) -> Run:
    """Compile a plan of eager calls to a callable that records the mismatches found by `check` and continues."""
    run = codegen.load(plan, checked=True)

    def note(values: Mapping[int, Any]) -> None:
        try:
            check(values)
        except MetadataMismatch as u:
            found.extend((u, *u.others))

    run.__globals__["check"] = note
    return run


def observed_first(
    plan: Plan, checked: Callable[..., Any], run: Run, repair: Callable[[Sequence[MetadataMismatch]], Run],
    passed: Callable[[], None], backend: str,
) -> Run:  # fmt: skip
    """Return a callable whose first call runs `plan`, which consists of eager's calls, the second `checked`, and all later ones
    `run`, or what `repair` returns for the mismatches of the first call. Each call runs the graph once."""
    found: list[MetadataMismatch] = []
    first: Run | None = eagerly(plan, checked.__globals__["check"], found)
    final: Run | None = None
    lock = threading.RLock()

    def begin(args: list[Any]) -> Any:
        nonlocal first, final
        if first is not None:
            result = first(args)
            first = None
            if found:
                final = repair(found)
            return result
        try:
            result = checked(args)
        except MetadataMismatch as u:
            raise BackendContractError(f"backend {backend!r}: {u}, though eager makes what was traced") from u
        passed()
        final = run
        return result

    def call(args: list[Any]) -> Any:
        if final is None:
            with lock:
                if final is None:
                    return begin(args)
        return final(args)

    return call
