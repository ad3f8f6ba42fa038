"""The first calls of a graph that holds collectives: never run again, whatever they find.

What a first run finds untrue (see `firstrun`) is found by one process: another may have the plan from its cache, and never
look. Were the call started over, this process would be one collective ahead of the others, and all of them would wait for
ever. So metadata is compared before anything believes it: the first call runs every op in eager, which is right whatever was
traced, and what turns out untrue is mended for the next one. Then the plan is run, and what it makes compared once more; a
difference is an error then, for only its backend can have made it.
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
    """A plan of eager's calls alone as a callable, which notes what `check` finds untrue and goes on."""
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
    """A callable whose first call runs `plan`, which is all eager's calls, its second one `checked`, and all later ones `run`;
    or what `repair` makes of what the first call found, from the next call on. Each call runs the graph once."""
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
